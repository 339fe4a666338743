import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

KINDS = [(None, 32), (4, 32), (3, 64), (8, 128)]


def case(seed, n=5, out=24, kind=(None, 32), bias=False, dropped=False, rank=4):
    rng = np.random.default_rng(seed)
    linear, pair = oracles.random_linear(rng, out, 128, *kind, bias), oracles.random_pair(rng, 128, out, rank)
    x, dy = rng.normal(size=(1, n, 128)), rng.normal(size=(1, n, out))
    return x, linear, pair, 2.5, dy, (rng.random(x.shape) >= 0.3, 0.3) if dropped else None


def plain(mx, x, weight, bias, a, b, scale, dropout):
    dropped = x if dropout is None else mx.where(dropout[0], x, 0) / (1 - dropout[1])
    return x @ weight.T + bias + (scale * (dropped @ a @ b)).astype(x.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_reference_backward_is_the_derivative(kind, bias, dropped):
    x, linear, (a, b), scale, dy, dropout = case(0, kind=kind, bias=bias, dropped=dropped)
    dx, grads = reference.lora_linear.backward(x, linear, (a, b), scale, dy, dropout)
    assert grads is not None
    oracles.assert_derivative(lambda x: reference.lora_linear.forward(x, linear, (a, b), scale, dropout), x, dx, dy)
    oracles.assert_derivative(lambda a: reference.lora_linear.forward(x, linear, (a, b), scale, dropout), a, grads[0], dy)
    oracles.assert_derivative(lambda b: reference.lora_linear.forward(x, linear, (a, b), scale, dropout), b, grads[1], dy)


def test_reference_forward_is_the_formula():
    x, linear, (a, b), scale, _, dropout = case(1, bias=True, dropped=True)
    assert dropout is not None
    want = x @ linear["weight"].T + linear["bias"] + scale * (np.where(dropout[0], x, 0) / (1 - dropout[1])) @ a @ b
    oracles.assert_close(reference.lora_linear.forward(x, linear, (a, b), scale, dropout), want, "finite differences")


def test_without_an_adapter_or_dx_nothing_is_returned_for_it():
    x, linear, pair, scale, dy, _ = case(2)
    assert reference.lora_linear.backward(x, linear, None, scale, dy)[1] is None
    assert reference.lora_linear.backward(x, linear, pair, scale, dy, need_dx=False)[0] is None
    oracles.assert_close(reference.lora_linear.forward(x, linear, None, scale), x @ linear["weight"].T, "finite differences")


@settings(max_examples=30)
@given(
    n=st.integers(1, 9),
    out=st.integers(1, 33),
    rank=st.integers(1, 5),
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    dropped=st.booleans(),
    adapter=st.booleans(),
    tile_bytes=st.sampled_from([None, 6000]),
)
def test_mlx_equals_the_twin(n, out, rank, kind, bias, dropped, adapter, tile_bytes):
    mx, ops = oracles.mlx()
    x, linear, pair, scale, dy, dropout = case(out, n, out, kind, bias, dropped, rank)
    args = (x, linear, pair if adapter else None, scale)
    results = []
    for module, convert in ((ops, oracles.to_mlx), (reference, oracles.to_float32)):
        arrays, dy_, dropout_ = convert((args, dy, dropout))
        y = module.lora_linear.forward(*arrays, dropout_, tile_bytes=tile_bytes)
        results.append((y, module.lora_linear.backward(*arrays, dy_, dropout_, tile_bytes=tile_bytes)))
    oracles.assert_close(*results, "twin")


@pytest.mark.parametrize(("kind", "dropped", "compiled"), [*((kind, dropped, False) for kind in KINDS for dropped in (False, True)), ((4, 32), True, True)])
def test_custom_gradient_equals_plain_autodiff(kind, dropped, compiled):
    mx, ops = oracles.mlx()
    x, linear, (a, b), scale, dy, dropout = oracles.to_mlx(case(3, kind=kind, bias=True, dropped=dropped))
    weight = ops.quantized.dequantize(linear, mx.float32)
    want = mx.grad(lambda x, a, b: (dy * plain(mx, x, weight, linear["bias"], a, b, scale, dropout)).sum(), argnums=(0, 1, 2))(x, a, b)
    gradient = mx.grad(lambda x, a, b: (dy * ops.lora_linear.apply(x, linear, a, b, scale, dropout)).sum(), argnums=(0, 1, 2))
    oracles.assert_close((mx.compile(gradient) if compiled else gradient)(x, a, b), want, "autodiff")


def test_frozen_weights_get_zeros():
    mx, ops = oracles.mlx()
    x, linear, (a, b), scale, dy, _ = oracles.to_mlx(case(4, kind=(4, 32), bias=True))
    arrays = {name: value for name, value in linear.items() if isinstance(value, mx.array) and name != "weight"}
    grads = mx.grad(lambda arrays: (dy * ops.lora_linear.apply(x, {**linear, **arrays}, a, b, scale)).sum())(arrays)
    assert set(grads) == {"scales", "biases", "bias"} and all(not mx.any(value).item() for value in grads.values())


def test_bfloat16_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    x, linear, (a, b), scale, dy, _ = oracles.to_mlx(case(5, n=16, out=64))
    x, dy, weight = (array.astype(mx.bfloat16) for array in (x, dy, linear["weight"]))
    naive = mx.vjp(lambda x, a, b: plain(mx, x, weight, mx.array(0, mx.bfloat16), a, b, scale, None), [x, a, b], [dy])[1]
    exact = (x.astype(mx.float32), {"weight": weight.astype(mx.float32)}, (a, b), scale, dy.astype(mx.float32))
    dx, grads = ops.lora_linear.backward(x, {"weight": weight}, (a, b), scale, dy)
    assert dx.dtype == mx.bfloat16 and grads[0].dtype == grads[1].dtype == mx.float32
    oracles.assert_no_worse([dx], naive[:1], [ops.lora_linear.backward(*exact)[0]])
    # B is kept in float32, so its gradient has only the rounding of the inputs, in ours as in naive code.
    oracles.assert_close(grads, ops.lora_linear.backward(*exact)[1], "twin")
