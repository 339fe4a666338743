from typing import Any

import numpy as np
import oracles
import pytest
from backends import each_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

KINDS = [(None, 32), (4, 32), (6, 64), (8, 128)]
NAMES = ("gate", "up", "down")
SMOOTH = ["silu", "gelu", "gelu_exact", "gelu_sigmoid", "relu_squared"]
ACTIVATIONS = [*SMOOTH, "relu", "clipped_swiglu"]


def case(seed=0, n=5, width=128, hidden=256, kind=(None, 32), bias=False, dropped=False, adapters=NAMES) -> Any:
    rng = np.random.default_rng(seed)
    linears = [oracles.random_linear(rng, hidden, width, *kind, bias) for _ in range(2)] + [oracles.random_linear(rng, width, hidden, *kind, bias)]
    pairs = {"gate": oracles.random_pair(rng, width, hidden), "up": oracles.random_pair(rng, width, hidden), "down": oracles.random_pair(rng, hidden, width)}
    lora = {name: pairs[name] if name in adapters else None for name in NAMES}
    x, dy = rng.normal(size=(1, n, width)), rng.normal(size=(1, n, width))
    dropout = {name: (rng.random((1, n, hidden if name == "down" else width)) >= 0.3, 0.3) for name in NAMES} if dropped else None
    return x, linears, lora, 1.5, dy, dropout


def plain(mx, ops, x, weights, lora, scale, dropout, activation):
    def linear(x, name, weight):
        y = x @ weight["weight"].T + weight.get("bias", 0)
        if lora[name] is None:
            return y
        dropped = mx.where(dropout[name][0], x, 0) / (1 - dropout[name][1]) if dropout else x
        return y + (scale * (dropped @ lora[name][0] @ lora[name][1])).astype(x.dtype)

    g, u = linear(x, "gate", weights[0]), linear(x, "up", weights[1])
    return linear(ops.plain.gate(g, u, activation), "down", weights[2])


def dense(mx, ops, linears):
    return [{"weight": ops.quantized.dequantize(linear, mx.float32)} | ({"bias": linear["bias"]} if "bias" in linear else {}) for linear in linears]


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("activation", SMOOTH)
def test_reference_backward_is_the_derivative(kind, bias, dropped, activation):
    x, linears, lora, scale, dy, dropout = case(kind=kind, bias=bias, dropped=dropped)
    forward = lambda x, lora: reference.gated_mlp.forward(x, *linears, lora, scale, dropout, activation, 96)  # noqa: E731
    dx, grads = reference.gated_mlp.backward(x, *linears, lora, scale, dy, dropout, activation, 96)
    oracles.assert_derivative(lambda x: forward(x, lora), x, dx, dy)
    for name in NAMES:
        pair = grads[name]
        assert pair is not None
        (a, b), (da, db) = lora[name], pair
        oracles.assert_derivative(lambda a, name=name, b=b: forward(x, {**lora, name: (a, b)}), a, da, dy)
        oracles.assert_derivative(lambda b, name=name, a=a: forward(x, {**lora, name: (a, b)}), b, db, dy)


def test_a_clipped_gate_is_differentiated_too():
    """Away from the corners, which a step of a finite difference must not cross: gate and up are their biases here, nearly."""
    x, linears, _, scale, dy, _ = case(9, bias=True)
    corners = np.array([-20.0, -6.0, 0.0, 6.0, 8.0, 20.0])
    for shift, linear in enumerate(linears[:2]):
        linear["weight"] *= 0.01
        linear["bias"] = np.resize(np.roll(np.tile(corners, 7), shift * 2), linear["bias"].shape) * (1 if shift == 0 else -1)
    lora = dict.fromkeys(NAMES)
    dx, _ = reference.gated_mlp.backward(x, *linears, lora, scale, dy, None, "clipped_swiglu", 96)
    oracles.assert_derivative(lambda x: reference.gated_mlp.forward(x, *linears, lora, scale, None, "clipped_swiglu", 96), x, dx, dy)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_reference_forward_is_three_lora_linears(activation):
    x, linears, lora, scale, _, dropout = case(bias=True, dropped=True)
    g, u = (reference.lora_linear.forward(x, linear, lora[name], scale, dropout[name]) for linear, name in zip(linears[:2], NAMES[:2], strict=True))
    phi = g / (1 + np.exp(-g)) if activation == "silu" else 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    want = reference.lora_linear.forward(phi * u, linears[2], lora["down"], scale, dropout["down"])
    oracles.assert_close(reference.gated_mlp.forward(x, *linears, lora, scale, dropout, activation, 64), want, "finite differences")


@settings(max_examples=40)
@given(
    n=st.integers(1, 9), kind=st.sampled_from(KINDS), bias=st.booleans(), dropped=st.booleans(), activation=st.sampled_from(ACTIVATIONS),
    adapters=st.sets(st.sampled_from(NAMES)), tile=st.sampled_from([None, 128, 256, 384, 512]), need_dx=st.booleans(),
)  # fmt: skip
def test_mlx_equals_the_twin(n, kind, bias, dropped, activation, adapters, tile, need_dx):
    mx, ops = oracles.mlx()
    arrays = case(n, n, 128, 384, kind, bias, dropped, adapters)
    results = []
    for module, (x, linears, lora, scale, dy, dropout) in ((ops, oracles.to_mlx(arrays)), (reference, oracles.to_float32(arrays))):
        y = module.gated_mlp.forward(x, *linears, lora, scale, dropout, activation, tile)
        results.append((y, module.gated_mlp.backward(x, *linears, lora, scale, dy, dropout, activation, tile, need_dx)))
    oracles.assert_close(*results, "twin")


@each_backend
@pytest.mark.parametrize("need_dx", [True, False])
@pytest.mark.parametrize("tile", [None, 96])
def test_what_forward_keeps_spares_backward_the_products(backend, need_dx, tile, monkeypatch):
    convert = oracles.to_float32 if backend is reference else oracles.to_mlx
    x, linears, lora, scale, dy, dropout = convert(case(5, kind=(4, 32), bias=True, dropped=True))
    want = backend.gated_mlp.backward(x, *linears, lora, scale, dy, dropout, "silu", tile, need_dx, {})  # an empty dict: nothing was kept
    kept: dict[str, Any] = {}
    y = backend.gated_mlp.forward(x, *linears, lora, scale, dropout, "silu", 64, kept)
    oracles.assert_close(y, backend.gated_mlp.forward(x, *linears, lora, scale, dropout, "silu", tile), "twin")
    masks = {name: (keep[0], rate) for name, (keep, rate) in dropout.items()}
    outputs = [backend.lora_linear.forward(x[0], linears[i], lora[name], scale, masks[name]) for i, name in enumerate(("gate", "up"))]
    oracles.assert_close(kept, dict(zip(("gate", "up"), outputs, strict=True)), "twin")
    monkeypatch.setattr(backend.quantized, "matmul", None)  # backward must not multiply by gate and up once more
    oracles.assert_close(backend.gated_mlp.backward(x, *linears, lora, scale, dy, dropout, "silu", tile, need_dx, kept), want, "twin")


@pytest.mark.parametrize("hidden", [1, 33, 130])
def test_a_width_that_no_tile_divides(hidden):
    mx, ops = oracles.mlx()
    arrays = case(1, 3, 16, hidden)
    results = []
    for module, (x, linears, lora, scale, dy, _) in ((ops, oracles.to_mlx(arrays)), (reference, oracles.to_float32(arrays))):
        results.append((module.gated_mlp.forward(x, *linears, lora, scale, tile=32), module.gated_mlp.backward(x, *linears, lora, scale, dy, tile=32)))
    oracles.assert_close(*results, "twin")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(("activation", "adapters"), [("silu", NAMES), ("gelu", ("up", "down")), ("relu_squared", ("gate",)), ("clipped_swiglu", NAMES)])
def test_custom_gradient_equals_plain_autodiff(kind, dropped, activation, adapters):
    mx, ops = oracles.mlx()
    x, linears, lora, scale, dy, dropout = oracles.to_mlx(case(2, kind=kind, bias=True, dropped=dropped, adapters=adapters))
    lora = {name: pair for name, pair in lora.items() if pair}
    missing = {name: None for name in NAMES if name not in lora}
    weights = dense(mx, ops, linears)
    want = mx.grad(lambda x, lora: (dy * plain(mx, ops, x, weights, lora | missing, scale, dropout, activation)).sum(), argnums=(0, 1))(x, lora)
    apply = lambda x, lora: ops.gated_mlp.apply(x, *linears, lora | missing, scale, dropout, activation, 128)  # noqa: E731
    got = mx.grad(lambda x, lora: (dy * apply(x, lora)).sum(), argnums=(0, 1))(x, lora)
    oracles.assert_close(got, want, "autodiff")


@pytest.mark.parametrize("compiled", [False, True])
def test_long_rows_take_less_memory_than_plain_autodiff(compiled):
    mx, ops = oracles.mlx()
    x, linears, lora, scale, dy, dropout = oracles.to_mlx(case(3, 2048, 128, 1024, (4, 32), dropped=True))

    def gradient(function):
        gradient = mx.grad(lambda x, lora: (dy * function(x, lora)).sum(), argnums=(0, 1))
        gradient = mx.compile(gradient) if compiled else gradient
        mx.eval(x, linears, lora, dy, dropout)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        result = gradient(x, lora)
        mx.eval(result)
        return result, mx.get_peak_memory() - before

    want, plain_bytes = gradient(lambda x, lora: plain(mx, ops, x, dense(mx, ops, linears), lora, scale, dropout, "silu"))
    got, our_bytes = gradient(lambda x, lora: ops.gated_mlp.apply(x, *linears, lora, scale, dropout, tile=128))
    oracles.assert_close(got, want, "autodiff")
    assert our_bytes < plain_bytes / 2, f"{our_bytes / 1e6:.0f} MB, plain autodiff {plain_bytes / 1e6:.0f} MB"


def test_bfloat16_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    x, linears, lora, scale, dy, _ = oracles.to_mlx(case(4, n=16))
    low = [{"weight": linear["weight"].astype(mx.bfloat16)} for linear in linears]
    exact = [{"weight": linear["weight"].astype(mx.float32)} for linear in low]
    x, dy = x.astype(mx.bfloat16), dy.astype(mx.bfloat16)
    y, (dx,) = mx.vjp(lambda x: plain(mx, ops, x, low, lora, scale, None, "silu"), [x], [dy])
    truth = ops.gated_mlp.forward(x.astype(mx.float32), *exact, lora, scale)
    dx_truth = ops.gated_mlp.backward(x.astype(mx.float32), *exact, lora, scale, dy.astype(mx.float32))
    got = [ops.gated_mlp.forward(x, *low, lora, scale, tile=128), ops.gated_mlp.backward(x, *low, lora, scale, dy, tile=128)]
    assert got[0].dtype == got[1][0].dtype == mx.bfloat16 and got[1][1]["down"][0].dtype == mx.float32
    oracles.assert_no_worse([got[0], got[1][0]], [y[0], dx], [truth, dx_truth[0]])
    grads = mx.grad(lambda lora: (dy.astype(mx.float32) * plain(mx, ops, x, low, lora, scale, None, "silu")).sum())(lora)
    oracles.assert_no_worse(got[1][1], grads, dx_truth[1])
