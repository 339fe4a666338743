import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

EPS = 1e-5
PARTS = [(True, True), (True, False), (False, False)]


def case(shape, weight=True, bias=True, seed=0):
    """x of which the mean is as large as the deviation, weight and bias if asked for, dy."""
    rng = np.random.default_rng(seed)
    x, dy = 1 + rng.normal(size=shape), rng.normal(size=shape)
    return x, rng.normal(size=shape[-1]) if weight else None, rng.normal(size=shape[-1]) if bias else None, dy


def plain(mx, x, weight, bias):
    centred = x - mx.mean(x, axis=-1, keepdims=True)
    y = centred * mx.rsqrt(mx.mean(centred * centred, axis=-1, keepdims=True) + EPS)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("shape", [(1, 2), (1, 8), (5, 7), (2, 3, 64)])
@pytest.mark.parametrize(("weighted", "biased"), PARTS)
def test_reference_backward_is_the_derivative(shape, weighted, biased):
    x, weight, bias, dy = case(shape, weighted, biased)
    before = dy.copy()
    dx = reference.layer_norm.backward(x, weight, EPS, dy)
    np.testing.assert_array_equal(dy, before)
    oracles.assert_derivative(lambda x: reference.layer_norm.forward(x, weight, bias, EPS), x, dx, dy)


@pytest.mark.parametrize(("weighted", "biased"), PARTS)
def test_reference_forward_is_the_formula(weighted, biased):
    x, weight, bias, _ = case((4, 9), weighted, biased)
    want = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + EPS)
    want = want * (1 if weight is None else weight) + (0 if bias is None else bias)
    oracles.assert_close(reference.layer_norm.forward(x, weight, bias, EPS), want, "finite differences")


@settings(max_examples=30)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(3, 70)), parts=st.sampled_from(PARTS))
def test_mlx_equals_the_twin(shape, parts):
    mx, ops = oracles.mlx()
    (x, weight, bias, dy), (tx, tw, tb, tdy) = oracles.to_mlx(case(shape, *parts)), oracles.to_float32(case(shape, *parts))
    oracles.assert_close(ops.layer_norm.forward(x, weight, bias, EPS), reference.layer_norm.forward(tx, tw, tb, EPS), "twin")
    oracles.assert_close(ops.layer_norm.backward(x, weight, EPS, dy), reference.layer_norm.backward(tx, tw, EPS, tdy), "twin")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("weighted", "biased"), PARTS)
def test_custom_gradient_equals_plain_autodiff(compiled, weighted, biased):
    mx, ops = oracles.mlx()
    x, weight, bias, dy = oracles.to_mlx(case((2, 3, 64), weighted, biased))
    want = mx.grad(lambda x: (dy * plain(mx, x, weight, bias)).sum())(x)
    gradient = mx.grad(lambda x: (dy * ops.layer_norm.apply(x, weight, bias, EPS)).sum())
    oracles.assert_close((mx.compile(gradient) if compiled else gradient)(x), want, "autodiff")


def test_frozen_weight_and_bias_get_zeros():
    mx, ops = oracles.mlx()
    x, weight, bias, dy = oracles.to_mlx(case((2, 3, 64)))
    frozen = mx.grad(lambda weight, bias: (dy * ops.layer_norm.apply(x, weight, bias, EPS)).sum(), argnums=(0, 1))(weight, bias)
    assert not any(mx.any(gradient).item() for gradient in frozen)


def test_bfloat16_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    x, weight, bias, dy = (array.astype(mx.bfloat16) for array in oracles.to_mlx(case((16, 256))))
    y, (dx,) = mx.vjp(lambda x: plain(mx, x, weight, bias), [x], [dy])
    exact = [array.astype(mx.float32) for array in (x, weight, bias, dy)]
    truth, (dx_truth,) = mx.vjp(lambda x: plain(mx, x, *exact[1:3]), exact[:1], exact[3:])
    got = [ops.layer_norm.forward(x, weight, bias, EPS), ops.layer_norm.backward(x, weight, EPS, dy)]
    assert all(array.dtype == mx.bfloat16 for array in got)
    oracles.assert_no_worse(got, [y[0], dx], [truth[0], dx_truth])
