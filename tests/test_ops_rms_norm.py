import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

EPS = 1e-5


def case(shape, weighted=True, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape), rng.normal(size=shape[-1]) if weighted else None, rng.normal(size=shape)


def plain(mx, x, weight):
    y = x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + EPS)
    return y if weight is None else y * weight


@pytest.mark.parametrize("shape", [(1, 2), (1, 8), (5, 7), (2, 3, 64)])
@pytest.mark.parametrize("weighted", [True, False])
def test_reference_backward_is_the_derivative(shape, weighted):
    x, weight, dy = case(shape, weighted)
    before = dy.copy()
    oracles.assert_derivative(lambda x: reference.rms_norm.forward(x, weight, EPS), x, reference.rms_norm.backward(x, weight, EPS, dy), dy)
    np.testing.assert_array_equal(dy, before)


@pytest.mark.parametrize("weighted", [True, False])
def test_reference_forward_is_the_formula(weighted):
    x, weight, _ = case((4, 9), weighted)
    want = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPS) * (1 if weight is None else weight)
    oracles.assert_close(reference.rms_norm.forward(x, weight, EPS), want, "finite differences")


@settings(max_examples=30)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 70)), weighted=st.booleans())
def test_mlx_equals_the_twin(shape, weighted):
    mx, ops = oracles.mlx()
    (x, weight, dy), (tx, tw, tdy) = oracles.to_mlx(case(shape, weighted)), oracles.to_float32(case(shape, weighted))
    oracles.assert_close(ops.rms_norm.forward(x, weight, EPS), reference.rms_norm.forward(tx, tw, EPS), "twin")
    oracles.assert_close(ops.rms_norm.backward(x, weight, EPS, dy), reference.rms_norm.backward(tx, tw, EPS, tdy), "twin")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
def test_custom_gradient_equals_plain_autodiff(compiled, weighted):
    mx, ops = oracles.mlx()
    x, weight, dy = oracles.to_mlx(case((2, 3, 64), weighted))
    want = mx.grad(lambda x: (dy * plain(mx, x, weight)).sum())(x)
    gradient = mx.grad(lambda x: (dy * ops.rms_norm.apply(x, weight, EPS)).sum())
    oracles.assert_close((mx.compile(gradient) if compiled else gradient)(x), want, "autodiff")
    if weighted:
        assert not mx.any(mx.grad(lambda weight: (dy * ops.rms_norm.apply(x, weight, EPS)).sum())(weight)).item()


def test_bfloat16_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    x, weight, dy = (array.astype(mx.bfloat16) for array in oracles.to_mlx(case((16, 256))))
    y, (dx,) = mx.vjp(lambda x: plain(mx, x, weight), [x], [dy])
    exact = [array.astype(mx.float32) for array in (x, weight, dy)]
    truth, (dx_truth,) = mx.vjp(lambda x: plain(mx, x, exact[1]), [exact[0]], [exact[2]])
    got = [ops.rms_norm.forward(x, weight, EPS), ops.rms_norm.backward(x, weight, EPS, dy)]
    assert all(array.dtype == mx.bfloat16 for array in got)
    oracles.assert_no_worse(got, [y[0], dx], [truth[0], dx_truth])
