import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

SCALE = 0.4
CAP = 1.5  # of the size of the scores here, so that it bends them


def case(batch, heads, kv_heads, tokens, width, seed=0):
    rng = np.random.default_rng(seed)
    q, do = (rng.normal(size=(batch, heads, tokens, width)) for _ in range(2))
    k, v = (rng.normal(size=(batch, kv_heads, tokens, width)) for _ in range(2))
    return q, k, v, do


def mask(tokens, window):
    i, j = np.arange(tokens)[:, None], np.arange(tokens)[None]
    return (j <= i) & (i - j < (window or tokens))


def sinks_of(heads, seed=0):
    return np.random.default_rng(seed + 100).normal(size=heads)


def extras(kind, heads):
    """The cap and the sinks of a kind of attention, as keyword arguments."""
    return {"cap": CAP if "cap" in kind else None, "sinks": sinks_of(heads) if "sinks" in kind else None}


def plain(mx, q, k, v, window=None, cap=None, sinks=None):
    groups, tokens = q.shape[1] // k.shape[1], q.shape[2]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)
    scores = (SCALE * q) @ k.swapaxes(-1, -2)
    scores = mx.where(mx.array(mask(tokens, window)), scores if cap is None else cap * mx.tanh(scores / cap), -mx.inf)
    if sinks is not None:
        scores = mx.concatenate([scores, mx.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:-1], 1)).astype(scores.dtype)], axis=-1)
    return mx.softmax(scores, axis=-1, precise=True)[..., :tokens] @ v


CASES = [
    (dict(batch=1, heads=2, kv_heads=2, tokens=1, width=4), None, None),
    (dict(batch=2, heads=4, kv_heads=2, tokens=13, width=8), None, 4),
    (dict(batch=1, heads=6, kv_heads=1, tokens=9, width=4), None, 100),
    (dict(batch=2, heads=4, kv_heads=2, tokens=13, width=8), 3, 5),
    (dict(batch=1, heads=2, kv_heads=2, tokens=17, width=8), 6, 4),
    (dict(batch=1, heads=2, kv_heads=1, tokens=10, width=8), 1, 4),
    (dict(batch=1, heads=2, kv_heads=1, tokens=10, width=8), 50, 3),
]


each_kind = pytest.mark.parametrize("kind", ["", "cap", "sinks", "cap, sinks"])


@pytest.mark.parametrize(("shape", "window", "tile"), CASES)
@each_kind
def test_reference_backward_is_the_derivative(shape, window, tile, kind):
    q, k, v, do = case(**shape)
    more = extras(kind, shape["heads"])
    dq, dk, dv = reference.attention.backward(q, k, v, SCALE, do, window, tile, **more)
    oracles.assert_derivative(lambda q: reference.attention.forward(q, k, v, SCALE, window, tile, **more), q, dq, do)
    oracles.assert_derivative(lambda k: reference.attention.forward(q, k, v, SCALE, window, tile, **more), k, dk, do)
    oracles.assert_derivative(lambda v: reference.attention.forward(q, k, v, SCALE, window, tile, **more), v, dv, do)


@pytest.mark.parametrize(("shape", "window", "tile"), CASES)
@each_kind
def test_reference_forward_is_the_formula(shape, window, tile, kind):
    q, k, v, _ = case(**shape)
    more, groups = extras(kind, shape["heads"]), q.shape[1] // k.shape[1]
    scores = SCALE * q @ np.repeat(k, groups, axis=1).swapaxes(-1, -2)
    scores = np.where(mask(q.shape[2], window), CAP * np.tanh(scores / CAP) if more["cap"] else scores, -np.inf)
    rest = 0 if more["sinks"] is None else np.exp(more["sinks"])[:, None, None]
    p = np.exp(scores)
    want = p / (p.sum(axis=-1, keepdims=True) + rest) @ np.repeat(v, groups, axis=1)
    oracles.assert_close(reference.attention.forward(q, k, v, SCALE, window, tile, **more), want, "finite differences")


@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_sinks_far_from_the_scores(size):
    """One that is far below changes nothing; one that is far above takes all."""
    q, k, v, do = case(1, 4, 2, 9, 8)
    sinks = np.full(4, size)
    got = [reference.attention.forward(q, k, v, SCALE, sinks=sinks), *reference.attention.backward(q, k, v, SCALE, do, sinks=sinks)]
    want = [reference.attention.forward(q, k, v, SCALE), *reference.attention.backward(q, k, v, SCALE, do)]
    oracles.assert_close(got, want if size < 0 else [0 * a for a in want], "finite differences")


@settings(max_examples=40)
@given(
    batch=st.integers(1, 2), kv_heads=st.integers(1, 2), groups=st.integers(1, 3), tokens=st.integers(1, 40),
    window=st.none() | st.integers(1, 45), tile=st.none() | st.integers(1, 45), kind=st.sampled_from(["", "cap", "sinks", "cap, sinks"]),
)  # fmt: skip
def test_mlx_equals_the_twin(batch, kv_heads, groups, tokens, window, tile, kind):
    mx, ops = oracles.mlx()
    arrays = case(batch, kv_heads * groups, kv_heads, tokens, 8, seed=tokens)
    more = extras(kind, kv_heads * groups)
    results = []
    for module, convert in ((ops, oracles.to_mlx), (reference, oracles.to_float32)):
        (q, k, v, do), given = convert(arrays), convert(more)
        o = module.attention.forward(q, k, v, SCALE, window, tile, **given)
        results.append([o, *module.attention.backward(q, k, v, SCALE, do, window, tile, **given)])
    if "sinks" not in kind and (tokens == 1 or window == 1):  # a softmax over one key is constant: both gradients are zero, or rounding
        results = [[result[0], result[3]] for result in results]
    oracles.assert_close(*results, "twin")


@pytest.mark.parametrize("kind", ["", "sinks"])
def test_the_fused_forward_of_a_gpu_equals_the_twin(monkeypatch, kind):
    mx, ops = oracles.mlx()
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: False)
    monkeypatch.setattr(ops.attention, "_blocks", None)
    (*heads, _), more = case(2, 4, 2, 19, 8), extras(kind, 4)
    got = ops.attention.forward(*oracles.to_mlx(heads), SCALE, **oracles.to_mlx(more))
    oracles.assert_close(got, reference.attention.forward(*oracles.to_float32(heads), SCALE, **oracles.to_float32(more)), "twin")


@pytest.mark.parametrize("kind", ["cap", "cap, sinks"])
def test_a_gpu_caps_in_blocks(monkeypatch, kind):
    """MLX's fused attention has no cap."""
    mx, ops = oracles.mlx()
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: False)
    (*heads, _), more = case(2, 4, 2, 19, 8), extras(kind, 4)
    got = ops.attention.forward(*oracles.to_mlx(heads), SCALE, **oracles.to_mlx(more))
    oracles.assert_close(got, reference.attention.forward(*oracles.to_float32(heads), SCALE, **oracles.to_float32(more)), "twin")


@pytest.mark.parametrize(
    ("shape", "window", "tile", "compiled", "kind"),
    [(*case, False, "") for case in CASES[1:]]
    + [(*CASES[3], True, "")]
    + [(*CASES[3], compiled, kind) for compiled in (False, True) for kind in ("cap", "sinks", "cap, sinks")]
    + [(*CASES[1], False, "cap, sinks"), (*CASES[0], False, "sinks")],
)
def test_custom_gradient_equals_plain_autodiff(shape, window, tile, compiled, kind):
    mx, ops = oracles.mlx()
    (q, k, v, do), more = oracles.to_mlx(case(**shape)), oracles.to_mlx(extras(kind, shape["heads"]))
    want = mx.grad(lambda q, k, v: (do * plain(mx, q, k, v, window, **more)).sum(), argnums=(0, 1, 2))(q, k, v)
    gradient = mx.grad(lambda q, k, v: (do * ops.attention.apply(q, k, v, SCALE, window, tile, **more)).sum(), argnums=(0, 1, 2))
    got = (mx.compile(gradient) if compiled else gradient)(q, k, v)
    if window == 1:
        got, want = got[2:], want[2:]
    oracles.assert_close(got, want, "autodiff")


def test_frozen_sinks_get_zeros():
    mx, ops = oracles.mlx()
    (q, k, v, do), sinks = oracles.to_mlx(case(1, 4, 2, 9, 8)), oracles.to_mlx(sinks_of(4))
    assert not mx.any(mx.grad(lambda sinks: (do * ops.attention.apply(q, k, v, SCALE, sinks=sinks)).sum())(sinks)).item()


@pytest.mark.parametrize(("compiled", "kind"), [(False, ""), (True, ""), (False, "cap, sinks")])
def test_long_rows_take_less_memory_than_plain_autodiff(compiled, kind):
    mx, ops = oracles.mlx()
    (q, k, v, do), more = oracles.to_mlx(case(1, 2, 1, 2048, 32)), oracles.to_mlx(extras(kind, 2))

    def gradient(function):
        gradient = mx.grad(lambda q, k, v: (do * function(q, k, v)).sum(), argnums=(0, 1, 2))
        gradient = mx.compile(gradient) if compiled else gradient
        mx.eval(q, k, v, do, more)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        result = gradient(q, k, v)
        mx.eval(result)
        return result, mx.get_peak_memory() - before

    want, plain_bytes = gradient(lambda q, k, v: plain(mx, q, k, v, **more))
    got, our_bytes = gradient(lambda q, k, v: ops.attention.apply(q, k, v, SCALE, **more))
    oracles.assert_close(got, want, "autodiff")
    assert our_bytes < plain_bytes / 2, f"{our_bytes / 1e6:.0f} MB, plain autodiff {plain_bytes / 1e6:.0f} MB"


@each_kind
def test_bfloat16_is_no_worse_than_naive_code(kind):
    mx, ops = oracles.mlx()
    q, k, v, do = (array.astype(mx.bfloat16) for array in oracles.to_mlx(case(1, 4, 2, 48, 16)))
    more = oracles.to_mlx(extras(kind, 4))
    o, naive = mx.vjp(lambda q, k, v: plain(mx, q, k, v, **more), [q, k, v], [do])
    exact = [array.astype(mx.float32) for array in (q, k, v, do)]
    truth, truth_grads = mx.vjp(lambda q, k, v: plain(mx, q, k, v, **more), exact[:3], exact[3:])
    got = [ops.attention.forward(q, k, v, SCALE, tile=16, **more), *ops.attention.backward(q, k, v, SCALE, do, tile=16, **more)]
    assert all(array.dtype == mx.bfloat16 for array in got)
    oracles.assert_no_worse(got, [*o, *naive], [*truth, *truth_grads])
