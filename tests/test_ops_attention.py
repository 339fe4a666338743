import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

SCALE = 0.4


def case(batch, heads, kv_heads, tokens, width, seed=0):
    rng = np.random.default_rng(seed)
    q, do = (rng.normal(size=(batch, heads, tokens, width)) for _ in range(2))
    k, v = (rng.normal(size=(batch, kv_heads, tokens, width)) for _ in range(2))
    return q, k, v, do


def mask(tokens, window):
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None]
    return (j <= i) & (i - j < (window or tokens))


def plain(mx, q, k, v, window=None):
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = mx.where(mx.array(mask(q.shape[2], window)), (SCALE * q) @ k.swapaxes(-1, -2), -mx.inf)
    return mx.softmax(scores, axis=-1, precise=True) @ v


CASES = [
    (dict(batch=1, heads=2, kv_heads=2, tokens=1, width=4), None, None),
    (dict(batch=2, heads=4, kv_heads=2, tokens=13, width=8), None, 4),
    (dict(batch=1, heads=6, kv_heads=1, tokens=9, width=4), None, 100),
    (dict(batch=2, heads=4, kv_heads=2, tokens=13, width=8), 3, 5),
    (dict(batch=1, heads=2, kv_heads=2, tokens=17, width=8), 6, 4),
    (dict(batch=1, heads=2, kv_heads=1, tokens=10, width=8), 1, 4),
    (dict(batch=1, heads=2, kv_heads=1, tokens=10, width=8), 50, 3),
]


@pytest.mark.parametrize(("shape", "window", "tile"), CASES)
def test_reference_backward_is_the_derivative(shape, window, tile):
    q, k, v, do = case(**shape)
    dq, dk, dv = reference.attention.backward(q, k, v, SCALE, do, window, tile)
    oracles.assert_derivative(lambda q: reference.attention.forward(q, k, v, SCALE, window, tile), q, dq, do)
    oracles.assert_derivative(lambda k: reference.attention.forward(q, k, v, SCALE, window, tile), k, dk, do)
    oracles.assert_derivative(lambda v: reference.attention.forward(q, k, v, SCALE, window, tile), v, dv, do)


@pytest.mark.parametrize(("shape", "window", "tile"), CASES)
def test_reference_forward_is_the_formula(shape, window, tile):
    q, k, v, _ = case(**shape)
    groups = q.shape[1] // k.shape[1]
    scores = np.where(mask(q.shape[2], window), SCALE * q @ np.repeat(k, groups, axis=1).swapaxes(-1, -2), -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = p / p.sum(axis=-1, keepdims=True) @ np.repeat(v, groups, axis=1)
    oracles.assert_close(reference.attention.forward(q, k, v, SCALE, window, tile), want, "finite differences")


@settings(max_examples=40)
@given(
    batch=st.integers(1, 2), kv_heads=st.integers(1, 2), groups=st.integers(1, 3), tokens=st.integers(1, 40),
    window=st.none() | st.integers(1, 45), tile=st.none() | st.integers(1, 45),
)  # fmt: skip
def test_mlx_equals_the_twin(batch, kv_heads, groups, tokens, window, tile):
    mx, ops = oracles.mlx()
    arrays = case(batch, kv_heads * groups, kv_heads, tokens, 8, seed=tokens)
    (q, k, v, do), (tq, tk, tv, tdo) = oracles.to_mlx(arrays), oracles.to_float32(arrays)
    oracles.assert_close(ops.attention.forward(q, k, v, SCALE, window, tile), reference.attention.forward(tq, tk, tv, SCALE, window, tile), "twin")
    got, want = ops.attention.backward(q, k, v, SCALE, do, window, tile), reference.attention.backward(tq, tk, tv, SCALE, tdo, window, tile)
    if tokens == 1 or window == 1:  # a softmax over one key is constant: both gradients are zero, or rounding
        got, want = got[2:], want[2:]
    oracles.assert_close(got, want, "twin")


def test_the_fused_forward_of_a_gpu_equals_the_twin(monkeypatch):
    mx, ops = oracles.mlx()
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: False)
    arrays = case(2, 4, 2, 19, 8)
    (q, k, v, _), (tq, tk, tv, _) = oracles.to_mlx(arrays), oracles.to_float32(arrays)
    oracles.assert_close(ops.attention.forward(q, k, v, SCALE), reference.attention.forward(tq, tk, tv, SCALE), "twin")


@pytest.mark.parametrize(("shape", "window", "tile", "compiled"), [(*case, False) for case in CASES[1:]] + [(*CASES[3], True)])
def test_custom_gradient_equals_plain_autodiff(shape, window, tile, compiled):
    mx, ops = oracles.mlx()
    q, k, v, do = oracles.to_mlx(case(**shape))
    want = mx.grad(lambda q, k, v: (do * plain(mx, q, k, v, window)).sum(), argnums=(0, 1, 2))(q, k, v)
    gradient = mx.grad(lambda q, k, v: (do * ops.attention.apply(q, k, v, SCALE, window, tile)).sum(), argnums=(0, 1, 2))
    got = (mx.compile(gradient) if compiled else gradient)(q, k, v)
    if window == 1:
        got, want = got[2:], want[2:]
    oracles.assert_close(got, want, "autodiff")


@pytest.mark.parametrize("compiled", [False, True])
def test_long_rows_take_less_memory_than_plain_autodiff(compiled):
    mx, ops = oracles.mlx()
    q, k, v, do = oracles.to_mlx(case(1, 2, 1, 2048, 32))

    def gradient(function):
        gradient = mx.grad(lambda q, k, v: (do * function(q, k, v)).sum(), argnums=(0, 1, 2))
        gradient = mx.compile(gradient) if compiled else gradient
        mx.eval(q, k, v, do)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        result = gradient(q, k, v)
        mx.eval(result)
        return result, mx.get_peak_memory() - before

    want, plain_bytes = gradient(lambda q, k, v: plain(mx, q, k, v))
    got, our_bytes = gradient(lambda q, k, v: ops.attention.apply(q, k, v, SCALE))
    oracles.assert_close(got, want, "autodiff")
    assert our_bytes < plain_bytes / 2, f"{our_bytes / 1e6:.0f} MB, plain autodiff {plain_bytes / 1e6:.0f} MB"


def test_bfloat16_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    q, k, v, do = (array.astype(mx.bfloat16) for array in oracles.to_mlx(case(1, 4, 2, 48, 16)))
    o, naive = mx.vjp(lambda q, k, v: plain(mx, q, k, v), [q, k, v], [do])
    exact = [array.astype(mx.float32) for array in (q, k, v, do)]
    truth, truth_grads = mx.vjp(lambda q, k, v: plain(mx, q, k, v), exact[:3], exact[3:])
    got = [ops.attention.forward(q, k, v, SCALE, tile=16), *ops.attention.backward(q, k, v, SCALE, do, tile=16)]
    assert all(array.dtype == mx.bfloat16 for array in got)
    oracles.assert_no_worse(got, [*o, *naive], [*truth, *truth_grads])
