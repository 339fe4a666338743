import math

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


@pytest.mark.parametrize("backend", ["reference", "ops"])
@pytest.mark.parametrize("shape", [(200_001,), (400, 500)])
def test_normal_draws_are_normal(backend, shape):
    """Moments within four standard errors, the largest gap between distribution functions within the 0.1 % point of Kolmogorov and Smirnov's test."""
    random = reference.random if backend == "reference" else oracles.mlx()[1].random
    z = np.array(random.normal(random.key(7), shape))
    assert z.shape == shape and z.dtype == np.float32 and np.isfinite(z).all()
    z = z.reshape(-1).astype(np.float64)
    n = len(z)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(z**power) - moment) < 4 * math.sqrt(variance / n), power
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in np.sort(z)])
    gap = max(np.abs(below - np.arange(n) / n).max(), np.abs(below - np.arange(1, n + 1) / n).max())
    assert gap < 1.95 / math.sqrt(n)
    for lag in (1, -(-n // 2)):  # neighbours, and the two that come of one pair
        assert abs(np.mean(z[:-lag] * z[lag:])) < 4 / math.sqrt(n - lag)
    assert 4 < np.abs(z).max() < 6 and len(np.unique(z)) > 0.98 * n


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 5), (64, 577)])
def test_twins_draw_the_same_normal_numbers(shape):
    """To the rounding of log and cos; the key alone decides."""
    mx, ops = oracles.mlx()
    for seed in (0, 7, 2**40 + 17):
        got, twin = ops.random.normal(ops.random.key(seed), shape), reference.random.normal(reference.random.key(seed), shape)
        assert got.dtype == mx.float32 and twin.dtype == np.float32 and got.shape == twin.shape == shape
        np.testing.assert_allclose(got, twin, atol=1e-6, rtol=0)
        np.testing.assert_array_equal(twin, reference.random.normal(reference.random.key(seed), shape))
        assert not np.array_equal(twin, reference.random.normal(reference.random.key(seed + 1), shape))


def test_known_normal_draws():
    """Box and Muller by hand from the uniform draws of the same key."""
    key = reference.random.key(7)
    first, second = reference.random.uniform(key, 0, 1, (2, 2)).astype(np.float64)
    size = np.sqrt(-2 * np.log1p(-first))
    want = [*(size * np.cos(2 * np.pi * second)), *(size * np.sin(2 * np.pi * second))]
    np.testing.assert_allclose(reference.random.normal(key, (2, 2)).reshape(-1), want, atol=1e-6)
    np.testing.assert_allclose(reference.random.normal(key, (3,)), want[:3], atol=1e-6)
