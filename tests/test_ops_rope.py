import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference


def make_rope(dims, traditional=False, scale=1.0, given_freqs=False, magnitude=1.0):
    freqs = 500.0 ** (np.arange(dims // 2) * 2 / dims) * 1.7 if given_freqs else None
    return {"dims": dims, "traditional": traditional, "base": None if given_freqs else 10000.0, "scale": scale, "freqs": freqs, "magnitude": magnitude}


ROPES = [
    make_rope(16),
    make_rope(16, traditional=True),
    make_rope(8, scale=0.25),
    make_rope(8, given_freqs=True, magnitude=1.3),
    make_rope(16, True, 2.0, True, 0.8),
]


def case(shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape), rng.normal(size=shape)


@pytest.mark.parametrize("rope", ROPES)
def test_reference_backward_is_the_derivative(rope):
    x, dy = case((2, 3, 7, 16))
    oracles.assert_derivative(lambda x: reference.rope.forward(x, rope), x, reference.rope.backward(dy, rope), dy)


@pytest.mark.parametrize("rope", ROPES)
def test_reference_forward_turns_pairs_by_their_angle(rope):
    x, _ = case((1, 1, 5, 16))
    y, half, dims = reference.rope.forward(x, rope), rope["dims"] // 2, rope["dims"]
    pairs = [(2 * i, 2 * i + 1) if rope["traditional"] else (i, i + half) for i in range(half)]
    freqs = rope["base"] ** (2 * np.arange(half) / dims) if rope["freqs"] is None else rope["freqs"]
    for t in range(5):
        for i, (a, b) in enumerate(pairs):
            turned = (x[0, 0, t, a] + 1j * x[0, 0, t, b]) * np.exp(1j * t * rope["scale"] / freqs[i]) * rope["magnitude"]
            assert y[0, 0, t, a] + 1j * y[0, 0, t, b] == pytest.approx(turned, rel=1e-12)
    np.testing.assert_array_equal(y[..., dims:], x[..., dims:])


@settings(max_examples=30)
@given(rope=st.sampled_from(ROPES), shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40)))
def test_mlx_equals_the_twin(rope, shape):
    mx, ops = oracles.mlx()
    x, dy = case((*shape, 16))
    rope32, mlx_rope = oracles.to_float32(rope), oracles.to_mlx(rope)
    oracles.assert_close(ops.rope.forward(oracles.to_mlx(x), mlx_rope), reference.rope.forward(oracles.to_float32(x), rope32), "twin")
    oracles.assert_close(ops.rope.backward(oracles.to_mlx(dy), mlx_rope), reference.rope.backward(oracles.to_float32(dy), rope32), "twin")


@pytest.mark.parametrize(("rope", "compiled"), [*((rope, False) for rope in ROPES), (ROPES[3], True)])
def test_custom_gradient_equals_plain_autodiff(rope, compiled):
    mx, ops = oracles.mlx()
    x, dy = oracles.to_mlx(case((2, 3, 7, 16)))
    rope = oracles.to_mlx(rope)
    want = mx.grad(lambda x: (dy * ops.rope.forward(x, rope)).sum())(x)
    gradient = mx.grad(lambda x: (dy * ops.rope.apply(x, rope)).sum())
    oracles.assert_close((mx.compile(gradient) if compiled else gradient)(x), want, "autodiff")


def test_bfloat16_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    x, dy = (array.astype(mx.bfloat16) for array in oracles.to_mlx(case((1, 2, 24, 16))))
    rope = make_rope(16)
    angle = mx.arange(24)[:, None] / 10000 ** (mx.arange(8) / 8)
    cos, sin = mx.cos(angle).astype(mx.bfloat16), mx.sin(angle).astype(mx.bfloat16)
    naive = mx.concatenate([x[..., :8] * cos - x[..., 8:] * sin, x[..., :8] * sin + x[..., 8:] * cos], axis=-1)
    truth = ops.rope.forward(x.astype(mx.float32), rope)
    assert ops.rope.forward(x, rope).dtype == mx.bfloat16
    oracles.assert_no_worse(ops.rope.forward(x, rope), naive, truth)
