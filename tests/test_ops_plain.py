"""The tape: a whole layer of plain code, checkpoints, what is kept and what is refused. Its parts one by one: test_ops_plain_parts."""

import gc
import tracemalloc
import weakref

import numpy as np
import oracles
import pytest
from backends import each_backend, numbers
from tapes import assert_gradients, assert_twins

from mesp_mlx import reference
from mesp_mlx.reference import plain

ROPE = {"dims": 6, "traditional": False, "base": 100.0, "scale": 1.0, "freqs": None, "magnitude": 1.2}
EPS, SCALE = 1e-5, 0.4


@pytest.mark.parametrize("shape", [(2, 3, 4), (4, 6), (24,)])
@pytest.mark.parametrize("whole", [False, True])
def test_shapes(shape, whole):
    """The axes of (1, 2, 0) aren't their own inverse; both calls take a tuple too, as arrays do."""
    x = np.random.default_rng(0).normal(size=24).reshape(shape)
    arguments = [(4, 3, 2), (1, 2, 0), (24,)]
    target, axes, flat = [(a,) if whole else a for a in arguments]
    dy = np.arange(24.0)
    assert_gradients(lambda p: p["x"].reshape(*target).transpose(*axes).reshape(*flat), {"x": x}, dy)


HEADS, KV_HEADS, TOKENS, WIDTH = 4, 2, 7, 32
SIZES = {"q": (WIDTH, WIDTH), "k": (WIDTH, 16), "v": (WIDTH, 16), "o": (WIDTH, WIDTH), "gate": (WIDTH, 64), "up": (WIDTH, 64), "down": (64, WIDTH)}


def layer_case(seed=0):
    """A decoder layer: everything with a gradient, its output's gradient, and what is frozen: the linears and a norm's weight."""
    rng = np.random.default_rng(seed)
    primals = {"x": rng.normal(size=(2, TOKENS, WIDTH))}
    for name, (width, out) in SIZES.items():
        primals[f"{name}.a"], primals[f"{name}.b"] = oracles.random_pair(rng, width, out, 2)
    frozen = {name: oracles.random_linear(rng, out, width, 4, 32, name in "qkv") for name, (width, out) in SIZES.items()}
    return primals, rng.normal(size=(2, TOKENS, WIDTH)), frozen | {"weight": 1 + 0.1 * rng.normal(size=WIDTH)}


def layer(plain, w, p):
    def linear(name, x):
        return plain.linear(x, w[name], (p[f"{name}.a"], p[f"{name}.b"]), 0.5)

    def heads(name, count):
        return linear(name, h).reshape(2, TOKENS, count, -1).transpose(0, 2, 1, 3)

    h = plain.rms_norm(p["x"], w["weight"], EPS)
    q, k, v = plain.rope(heads("q", HEADS), ROPE), plain.rope(heads("k", KV_HEADS), ROPE), heads("v", KV_HEADS)
    m = p["x"] + linear("o", plain.attention(q, k, v, SCALE, 4).transpose(0, 2, 1, 3).reshape(2, TOKENS, WIDTH))
    h = plain.rms_norm(m, w["weight"], EPS)
    return m + linear("down", plain.gate(linear("gate", h), linear("up", h)))


def test_a_layer_made_of_them():
    primals, dy, w = layer_case()
    assert_gradients(lambda p: layer(plain, w, p), primals, dy)
    assert_twins(layer, primals, dy, w)


@each_backend
def test_no_structured_backward_is_used(backend, monkeypatch):
    """They are what this code judges."""
    for module in (backend.activations, backend.attention, backend.gated_mlp, backend.lora_linear, backend.rms_norm):
        for name in ("forward", "backward", "apply", "activate", "activate_with_slope"):
            monkeypatch.setattr(module, name, None, raising=False)
    primals, dy, w = (oracles.to_float32 if backend is reference else oracles.to_mlx)(layer_case())
    _, gradients = backend.plain.vjp(lambda p: layer(backend.plain, w, p), primals, dy)
    assert all(np.abs(numbers(gradient)).max() > 0 for gradient in gradients.values())


@each_backend
def test_gradients_have_the_dtype_of_a_float32_run(backend):
    primals, dy, w = (oracles.to_float32 if backend is reference else oracles.to_mlx)(layer_case())
    y, gradients = backend.plain.vjp(lambda p: layer(backend.plain, w, p), primals, dy)
    targets, mask = (backend.arrays.asarray(np.ones((2, TOKENS), dtype)) for dtype in (np.int64, bool))
    loss, dlogits = backend.plain.vjp(lambda p: backend.plain.cross_entropy(p["y"], targets, mask), {"y": y})
    assert {array.dtype for array in (y, loss, dlogits["y"], *gradients.values())} == {y.dtype} and numbers(y).dtype == np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_is_that_of_the_activations(dtype):
    primals, dy, w = layer_case()
    y, gradients = plain.vjp(lambda p: layer(plain, w, p), {name: array.astype(dtype) for name, array in primals.items()}, dy.astype(dtype))
    assert {array.dtype for array in (y, *gradients.values())} == {np.dtype(dtype)}


@each_backend
def test_traced_and_plain_arrays_mix(backend, monkeypatch):
    """Whichever are traced, their gradients are the same; and no frozen product is reversed for an input without one."""
    primals, dy, w = (oracles.to_float32 if backend is reference else oracles.to_mlx)(layer_case())
    _, want = backend.plain.vjp(lambda p: layer(backend.plain, w, p), primals, dy)
    for names in (["x"], ["q.a"], ["down.b"], ["x", "k.b"], [name for name in primals if name != "x"]):
        _, got = backend.plain.vjp(lambda p: layer(backend.plain, w, primals | p), {name: primals[name] for name in names}, dy)
        oracles.assert_close(got, {name: want[name] for name in names}, "autodiff")
    monkeypatch.setattr(backend.quantized, "matmul_transposed", None)
    backend.plain.vjp(lambda p: layer(backend.plain, w, primals | p), {"down.a": primals["down.a"]}, dy)


def test_an_array_used_twice_sums_its_gradients():
    x, dy, fixed = np.random.default_rng(0).normal(size=(3, 2, 1, 4))

    def function(plain, fixed, p):  # y reaches the output by a long way and by a short one
        y = p["x"] + p["x"]
        return fixed + plain.gate(plain.gate(y, y), p["x"]) + y + p["x"] + fixed

    assert_gradients(lambda p: function(plain, fixed, p), {"x": x, "unused": dy}, dy)
    assert_twins(function, {"x": x, "unused": dy}, dy, fixed)


@each_backend
def test_a_checkpoint_changes_no_gradient(backend):
    """It calls its function a second time in backward; beside it, arrays go on as they are."""
    primals, dy, w = (oracles.to_float32 if backend is reference else oracles.to_mlx)(layer_case())
    traced = {name: primals[name] for name in primals if name[0] in "xqd"}
    calls = []

    def counted(p):
        calls.append(None)
        return layer(backend.plain, w, p)

    def twice(function):  # one layer after another, with the same adapters
        return lambda p: function(primals | p | {"x": p["x"] + function(primals | p)})

    want = backend.plain.vjp(twice(counted), traced, dy)
    assert len(calls) == 2
    got = backend.plain.vjp(twice(backend.plain.checkpoint(counted)), traced, dy)
    assert len(calls) == 2 + 4
    oracles.assert_close(got, want, "autodiff")
    y = backend.plain.checkpoint(counted)(primals)
    assert type(y) is type(dy)
    oracles.assert_close(y, layer(backend.plain, w, primals), "autodiff")


def kept_bytes(function, primals, dy):
    """What is alive of a forward pass when its output is there, and what a whole vjp leaves behind."""
    held = []

    def watched(p):
        before = tracemalloc.get_traced_memory()[0]
        y = function(p)
        held.append(tracemalloc.get_traced_memory()[0] - before)
        return y

    gc.disable()  # nothing waits for it: a tape has no cycles
    tracemalloc.start()
    try:
        plain.vjp(watched, primals, dy)
        return held[0], tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()


def test_a_checkpoint_keeps_its_inputs_alone():
    primals, dy, w = layer_case()
    everything, after = kept_bytes(lambda p: layer(plain, w, p), primals, dy)
    inputs, after_checkpoint = kept_bytes(plain.checkpoint(lambda p: layer(plain, w, p)), primals, dy)
    row = 8 * 2 * TOKENS  # bytes of a number per token
    probabilities, wide = HEADS * TOKENS * row, 64 * row
    assert everything > probabilities + 5 * wide + 8 * WIDTH * row  # gate, up, its sigmoid, the product; x and m normed, q, k, v, o, m and y
    assert WIDTH * row <= inputs < 1.5 * WIDTH * row + 4000  # its output, and a few small objects
    assert max(after, after_checkpoint) < 4000


def test_nothing_dequantised_is_kept():
    rng = np.random.default_rng(0)
    frozen, x = oracles.random_linear(rng, 256, 256, 4), rng.normal(size=(1, 4, 256))
    kept, _ = kept_bytes(lambda p: plain.linear(p["x"], frozen, None, 1.0), {"x": x}, x)
    assert x.nbytes <= kept < 2 * x.nbytes


def test_nothing_dequantised_is_kept_by_mlx():
    mx, ops = oracles.mlx()
    rng = np.random.default_rng(0)
    frozen, x = oracles.to_mlx(([oracles.random_linear(rng, 256, 256, 4) for _ in range(60)], rng.normal(size=(1, 4, 256))))

    def chain(p):
        h = p["x"]
        for linear in frozen:
            h = ops.plain.linear(h, linear, None, 1.0)
        return h

    mx.eval(frozen, x)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ops.plain.vjp(chain, {"x": x}, x))
    assert mx.get_peak_memory() - before < len(frozen) * 4 * 256 * 256 / 2  # MLX runs ahead by a few, of 60


def test_the_tape_is_taken_apart_as_it_is_passed():
    primals, dy, w = layer_case()
    alive = []

    def first(p):
        alive.append(later and later())
        return plain.gate(p["x"], p["x"])

    later = None

    def function(p):
        nonlocal later
        h = layer(plain, w, p | {"x": plain.checkpoint(first)(p)})
        later = weakref.ref(h)
        return plain.gate(h, h)

    gc.disable()
    try:
        plain.vjp(function, primals, dy)
    finally:
        gc.enable()
    assert later and alive == [None, None] and later() is None


def test_what_is_refused():
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"cotangent of shape \(\) for an output of shape \(2, 3\)"):
        plain.vjp(lambda p: plain.gate(p["x"], x), {"x": x})
    with pytest.raises(ValueError, match="not broadcast"):
        plain.vjp(lambda p: p["x"] + p["y"], {"x": x, "y": x[0]}, x)
    with pytest.raises(ValueError, match="pass it in the inputs"):
        plain.vjp(lambda p: plain.checkpoint(lambda q: plain.gate(q["x"], p["y"]))({"x": p["x"]}), {"x": x, "y": x}, x)


def test_an_output_that_is_an_input_or_depends_on_none():
    x = np.arange(3.0)
    value, gradients = plain.vjp(lambda p: p["x"], {"x": x, "y": x}, 2 * x)
    np.testing.assert_array_equal([value, gradients["x"], gradients["y"]], [x, 2 * x, 0 * x])
    value, gradients = plain.vjp(lambda p: x, {"y": x}, x)
    np.testing.assert_array_equal([value, gradients["y"]], [x, 0 * x])
