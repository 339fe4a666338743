"""The router and the experts, against finite differences, their twin, a loop over tokens and experts, and plain autodiff."""

from typing import Any

import numpy as np
import oracles
import pytest
from backends import each_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

NAMES = ("gate", "up", "down")
ACTIVATIONS = ["silu", "clipped_swiglu"]


def case(seed=0, n=5, width=64, hidden=96, kind=(None, 32), bias=False, dropped=False, adapters=NAMES) -> Any:
    """One expert: rows, their weights, its linears, pairs, scale, dy and masks."""
    rng = np.random.default_rng(seed)
    linears = [oracles.random_linear(rng, hidden, width, *kind, bias) for _ in range(2)] + [oracles.random_linear(rng, width, hidden, *kind, bias)]
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    lora = {name: oracles.random_pair(rng, *shape) if name in adapters else None for name, shape in shapes.items()}
    x, dy, p = 4 * rng.normal(size=(n, width)), rng.normal(size=(n, width)), rng.random(n)  # as large as clipping reaches
    p[0] = 0.0  # a weight that has underflowed has a gradient too
    dropout = {name: (rng.random((n, shapes[name][0])) >= 0.3, 0.3) for name in NAMES} if dropped else None
    return x, p, linears, lora, 1.5, dy, dropout


def many(seed=0, n=40, width=64, hidden=96, count=6, chosen=2, kind=(None, 32), bias=False, dropped=False, adapters=NAMES) -> Any:
    """All experts of a layer, stacked, and the router's logits; expert 4 is never chosen."""
    rng = np.random.default_rng(seed)
    singles = [case(seed + e, n, width, hidden, kind, bias) for e in range(count)]
    stack = lambda parts: {k: np.stack([part[k] for part in parts]) if np.ndim(parts[0][k]) else parts[0][k] for k in parts[0]}  # noqa: E731
    linears = {name: stack([single[2][i] for single in singles]) for i, name in enumerate(NAMES)}
    lora = {name: tuple(np.stack([single[3][name][half].T for single in singles]) for half in (0, 1)) if name in adapters else None for name in NAMES}
    logits = 2 * rng.normal(size=(n, count))
    logits[:, 4] = -30
    shapes = {"gate": width, "up": width, "down": hidden}
    dropout = {name: (rng.random((n, shapes[name])) >= 0.3, 0.3) if dropped else None for name in NAMES}
    return rng.normal(size=(n, width)), logits, linears, lora, 1.5, dropout


@pytest.mark.parametrize("over_all", [False, True])
def test_the_router_is_its_formula_and_its_backward_the_derivative(over_all):
    rng = np.random.default_rng(1)
    logits, dp = 3 * rng.normal(size=(7, 9)), rng.normal(size=(7, 3))
    index, p = reference.experts.route(logits, 3, over_all)
    np.testing.assert_array_equal(index, np.sort(np.argsort(logits, axis=-1)[:, -3:], axis=-1))
    whole = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    want = np.take_along_axis(whole, index, -1)
    oracles.assert_close(p, want if over_all else want / want.sum(axis=-1, keepdims=True), "finite differences")
    dlogits = reference.experts.route_backward(logits, index, dp, over_all)
    oracles.assert_derivative(lambda logits: reference.experts.route(logits, 3, over_all)[1], logits, dlogits, dp)


@pytest.mark.parametrize("over_all", [False, True])
def test_the_routers_twin(over_all):
    mx, ops = oracles.mlx()
    rng = np.random.default_rng(2)
    logits, dp = (3 * rng.normal(size=(33, 16))).astype(np.float32), rng.normal(size=(33, 4)).astype(np.float32)
    index, p = reference.experts.route(logits, 4, over_all)
    got_index, got = ops.experts.route(mx.array(logits), 4, over_all)
    np.testing.assert_array_equal(np.array(got_index), index)
    oracles.assert_close(got, p, "twin")
    want = reference.experts.route_backward(logits, index, dp, over_all)
    oracles.assert_close(ops.experts.route_backward(mx.array(logits), got_index, mx.array(dp), over_all), want, "twin")
    autodiff = mx.grad(lambda logits: (mx.array(dp) * ops.plain.route(logits, 4, over_all)[1]).sum())(mx.array(logits))
    oracles.assert_close(autodiff, want, "autodiff")


@pytest.mark.parametrize("kind", [(None, 32), (4, 32)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_backward_is_the_derivative(kind, bias, dropped, activation):
    x, p, linears, lora, scale, dy, dropout = case(kind=kind, bias=bias, dropped=dropped)
    forward = lambda x, p, lora: reference.experts.forward(x, p, *linears, lora, scale, dropout, activation, 64)  # noqa: E731
    dx, dp, grads = reference.experts.backward(x, p, *linears, lora, scale, dy, dropout, activation, 64)
    oracles.assert_derivative(lambda x: forward(x, p, lora), x, dx, dy)
    oracles.assert_derivative(lambda p: forward(x, p, lora), p, dp, dy)
    for name in NAMES:
        pair = grads[name]
        assert pair is not None
        (a, b), (da, db) = lora[name], pair
        oracles.assert_derivative(lambda a, name=name, b=b: forward(x, p, {**lora, name: (a, b)}), a, da, dy)
        oracles.assert_derivative(lambda b, name=name, a=a: forward(x, p, {**lora, name: (a, b)}), b, db, dy)


@settings(max_examples=30)
@given(
    n=st.integers(1, 9), kind=st.sampled_from([(None, 32), (4, 32), (8, 64)]), bias=st.booleans(), dropped=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS), adapters=st.sets(st.sampled_from(NAMES)), tile=st.sampled_from([None, 64, 128]), need_dx=st.booleans(),
)  # fmt: skip
def test_mlx_equals_the_twin(n, kind, bias, dropped, activation, adapters, tile, need_dx):
    mx, ops = oracles.mlx()
    arrays = case(n, n, 64, 192, kind, bias, dropped, adapters)
    results = []
    for module, (x, p, linears, lora, scale, dy, dropout) in ((ops, oracles.to_mlx(arrays)), (reference, oracles.to_float32(arrays))):
        y = module.experts.forward(x, p, *linears, lora, scale, dropout, activation, tile)
        results.append((y, module.experts.backward(x, p, *linears, lora, scale, dy, dropout, activation, tile, need_dx)))
    oracles.assert_close(*results, "twin")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_custom_gradient_equals_the_twins(activation):
    mx, ops = oracles.mlx()
    arrays = case(3, kind=(4, 32), bias=True, dropped=True)
    x, p, linears, lora, scale, dy, dropout = oracles.to_mlx(arrays)
    apply = lambda x, p, lora: ops.experts.apply(x, p, *linears, lora, scale, dropout, activation, 64)  # noqa: E731
    got = mx.grad(lambda x, p, lora: (dy * apply(x, p, lora)).sum(), argnums=(0, 1, 2))(x, p, lora)
    x, p, linears, lora, scale, dy, dropout = oracles.to_float32(arrays)
    oracles.assert_close(got, reference.experts.backward(x, p, *linears, lora, scale, dy, dropout, activation), "autodiff")


@each_backend
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("tile", [None, 64])
def test_what_forward_keeps_spares_backward_the_products(backend, kept, tile, monkeypatch):
    convert = oracles.to_float32 if backend is reference else oracles.to_mlx
    x, p, linears, lora, scale, dy, dropout = convert(case(5, kind=(4, 32), bias=True, dropped=True))
    want = backend.experts.backward(x, p, *linears, lora, scale, dy, dropout, "clipped_swiglu")
    found: dict[str, Any] = {}
    backend.experts.forward(x, p, *linears, lora, scale, dropout, "clipped_swiglu", tile, found)
    monkeypatch.setattr(backend.quantized, "matmul", None)
    oracles.assert_close(backend.experts.backward(x, p, *linears, lora, scale, dy, dropout, "clipped_swiglu", tile, kept=found), want, "twin")


def by_expert(backend, x, p, index, linears, lora, scale, dropout, activation, dy=None) -> Any:
    """Forward, or backward, expert by expert as a stage does."""
    arrays, numbers = backend.arrays, np.array(index)
    y, dp, dpairs = np.zeros(x.shape, np.float64), np.zeros(p.shape, np.float64), dict[str, Any]()
    for expert in np.unique(numbers).tolist():
        rows, places = np.nonzero(numbers == expert)
        at = arrays.asarray(rows)
        frozen = [{k: v[expert] if np.ndim(v) else v for k, v in linears[name].items()} for name in NAMES]
        pairs = {name: pair and (pair[0][expert].T, pair[1][expert].T) for name, pair in lora.items()}
        masks = {name: mask and (arrays.take_rows(mask[0], at), mask[1]) for name, mask in dropout.items()}
        given = (arrays.take_rows(x, at), p[at, arrays.asarray(places)], *frozen, pairs, scale)
        if dy is None:
            y[rows] += np.array(backend.experts.forward(*given, masks, activation))
            continue
        dx, dp_rows, grads = backend.experts.backward(*given, arrays.take_rows(dy, at), masks, activation)
        y[rows] += np.array(dx)
        dp[rows, places] = np.array(dp_rows)
        for name, pair in grads.items():
            for half, d in zip("ab", pair or (), strict=False):
                dpairs.setdefault(f"{name}.{half}", np.zeros(lora[name][half == "b"].shape))[expert] = np.array(d).T
    return y if dy is None else (y, dp, dpairs)


@each_backend
@pytest.mark.parametrize("kind", [(None, 32), (4, 32)])
@pytest.mark.parametrize(("bias", "activation"), [(False, "silu"), (True, "clipped_swiglu")])
@pytest.mark.parametrize("adapters", [NAMES, (), ("down",)])
def test_expert_by_expert_equals_plain_autodiff(backend, kind, bias, activation, adapters):
    convert = oracles.to_float32 if backend is reference else oracles.to_mlx
    x, logits, linears, lora, scale, dropout = convert(many(kind=kind, bias=bias, dropped=True, adapters=adapters))
    dy = convert(np.random.default_rng(9).normal(size=x.shape))
    index, p = backend.plain.route(logits, 2, False)
    assert not (np.array(index) == 4).any()
    pairs = {f"{name}.{half}": part for name, pair in lora.items() if pair for half, part in zip("ab", pair, strict=True)}

    def plain(given):
        own = {name: pair and (given[f"{name}.a"], given[f"{name}.b"]) for name, pair in lora.items()}
        return backend.plain.experts(given["x"], given["p"], index, linears, own, scale, dropout, activation)

    primals: dict[str, Any] = {"x": x, "p": p, **pairs}
    y, want = backend.plain.vjp(plain, primals, dy)
    oracles.assert_close(by_expert(backend, x, p, index, linears, lora, scale, dropout, activation), y, "twin")
    dx, dp, dpairs = by_expert(backend, x, p, index, linears, lora, scale, dropout, activation, dy)
    oracles.assert_close({"x": dx, "p": dp, **dpairs}, want, "twin")
    for name in dpairs:
        assert not np.array(want[name])[4].any()


@pytest.mark.parametrize("seed", range(2))
def test_plain_code_is_a_loop_over_tokens(seed):
    """The naive formula itself, without an expert gathering its tokens, in float64."""
    x, logits, linears, lora, scale, dropout = many(seed, n=6)
    index, p = reference.plain.route(logits, 2, True)
    y = reference.plain.experts(x, p, index, linears, lora, scale, dropout)
    want = np.zeros_like(x)
    for token in range(len(x)):
        for j, expert in enumerate(index[token]):
            def linear(v, name, expert=expert):
                a, b = lora[name]
                return v @ linears[name]["weight"][expert].T + scale * (v @ a[expert].T @ b[expert].T)

            g = linear(x[token], "gate")
            want[token] += p[token, j] * linear(g / (1 + np.exp(-g)) * linear(x[token], "up"), "down")
    oracles.assert_close(y, want, "finite differences")


def test_bfloat16_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    x, p, linears, lora, scale, dy, _ = oracles.to_mlx(case(4, n=16))
    low = [{"weight": linear["weight"].astype(mx.bfloat16)} for linear in linears]
    exact = [{"weight": linear["weight"].astype(mx.float32)} for linear in low]
    x, dy = x.astype(mx.bfloat16), dy.astype(mx.bfloat16)
    plain = ops.plain

    def naive(x, p):
        g, u = (plain.linear(x, low[i], lora[name], scale) for i, name in enumerate(NAMES[:2]))
        return p[:, None].astype(x.dtype) * plain.linear(plain.gate(g, u), low[2], lora["down"], scale)

    _, theirs = mx.vjp(naive, [x, p], [dy])
    truth = ops.experts.backward(x.astype(mx.float32), p, *exact, lora, scale, dy.astype(mx.float32))
    got = ops.experts.backward(x, p, *low, lora, scale, dy, tile=64)
    assert got[0].dtype == mx.bfloat16 and got[1].dtype == mx.float32
    oracles.assert_no_worse(list(got[:2]), theirs, list(truth[:2]))


@each_backend
def test_rows_are_added_and_set(backend):
    arrays = backend.arrays
    total = arrays.add_rows(arrays.zeros((5, 2)), arrays.asarray(np.ones((2, 2), np.float32)), arrays.asarray(np.array([1, 3])))
    total = arrays.add_rows(total, arrays.asarray(np.ones((2, 2), np.float32)), arrays.asarray(np.array([3, 4])))
    total = arrays.set_row(total, 0, arrays.asarray(np.full(2, 7, np.float32)))
    np.testing.assert_array_equal(arrays.to_numpy(total), np.array([7, 1, 0, 2, 1])[:, None] * np.ones(2))
