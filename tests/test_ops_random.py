import numpy as np
import oracles
import pytest

from mesp_mlx import reference

KNOWN_SPLIT = [3212260180, 2680159693, 952943831, 3111455102]
KNOWN_UNIFORM = [0.4501954913139343, -0.17831707000732422, 0.5785043835639954, 0.09637841582298279, -0.14239221811294556]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40 + 17])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (7, 9), (64, 576), (2, 3, 5)])
def test_draws_are_mlx_to_the_bit(seed, shape):
    mx, ops = oracles.mlx()
    key, mlx_key = reference.random.key(seed), ops.random.key(seed)
    np.testing.assert_array_equal(key, mlx_key)
    for a, b in zip(reference.random.split(key), ops.random.split(mlx_key), strict=True):
        np.testing.assert_array_equal(a, b)
    for low, high in ((0, 1), (-0.3, 0.7), (-1 / 24, 1 / 24)):
        got = reference.random.uniform(key, low, high, shape)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, ops.random.uniform(mlx_key, low, high, shape))


def test_known_draws():
    """Where MLX is not installed, the twin is still held to the numbers MLX 0.32.4 gives."""
    key = reference.random.key(7 + (5 << 32))
    np.testing.assert_array_equal(key, np.array([5, 7], np.uint32))
    assert [int(word) for half in reference.random.split(key) for word in half] == KNOWN_SPLIT
    np.testing.assert_array_equal(reference.random.uniform(key, -0.3, 0.7, (5,)), np.array(KNOWN_UNIFORM, np.float32))
