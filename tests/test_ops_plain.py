import gc
import tracemalloc
import weakref

import numpy as np
import oracles
import pytest
from backends import each_backend, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference
from mesp_mlx.reference import plain

KINDS = [(None, 32), (4, 32), (3, 64)]
ROPE = {"dims": 6, "traditional": False, "base": 100.0, "scale": 1.0, "freqs": None, "magnitude": 1.2}
EPS, SCALE = 1e-5, 0.4


def assert_gradients(function, primals, dy):
    """The tape's gradient of function, a dict's array, is its derivative; and function computes the same without a tape."""
    value, gradients = plain.vjp(function, primals, dy)
    without = function(primals)
    assert isinstance(without, np.ndarray | np.generic)
    np.testing.assert_array_equal(value, without)
    assert list(gradients) == list(primals)
    for name, primal in primals.items():
        oracles.assert_derivative(lambda a, name=name: function(primals | {name: a}), primal, gradients[name], 1.0 if dy is None else dy)


def assert_twins(function, primals, dy, constants, names=None):
    """function(plain, constants, primals) and its gradients (those named) are the same in float32 in MLX and in NumPy."""
    results = []
    for module, convert in ((oracles.mlx()[1], oracles.to_mlx), (reference, oracles.to_float32)):
        fixed = convert(constants)
        value, gradients = module.plain.vjp(lambda p, m=module, c=fixed: function(m.plain, c, p), convert(primals), dy if dy is None else convert(dy))
        results.append([value, function(module.plain, fixed, convert(primals)), {name: gradients[name] for name in names or primals}])
    oracles.assert_close(*results, "twin")


def linear_case(kind, bias, dropped, tokens=5, out=24, seed=0):
    rng = np.random.default_rng(seed)
    pair, x, dy = oracles.random_pair(rng, 128, out), rng.normal(size=(2, tokens, 128)), rng.normal(size=(2, tokens, out))
    constants = {"frozen": oracles.random_linear(rng, out, 128, *kind, bias), "dropout": (rng.random(x.shape) >= 0.3, 0.3) if dropped else None}
    return {"x": x, "a": pair[0], "b": pair[1]}, dy, constants


def linear(plain, c, p):
    return plain.linear(p["x"], c["frozen"], (p["a"], p["b"]), 2.5, c["dropout"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_linear(kind, bias, dropped):
    primals, dy, constants = linear_case(kind, bias, dropped)
    assert_gradients(lambda p: linear(plain, constants, p), primals, dy)
    assert_gradients(lambda p: plain.linear(p["x"], constants["frozen"], None, 2.5), {"x": primals["x"]}, dy)
    weight, keep = reference.quantized.dequantize(constants["frozen"], np.float64), constants["dropout"][0] / 0.7 if dropped else 1
    want = primals["x"] @ weight.T + constants["frozen"].get("bias", 0) + 2.5 * (primals["x"] * keep) @ (primals["a"] @ primals["b"])
    oracles.assert_close(linear(plain, constants, primals), want, "finite differences")


@settings(max_examples=20)
@given(kind=st.sampled_from(KINDS), bias=st.booleans(), dropped=st.booleans(), tokens=st.integers(1, 5), out=st.integers(1, 40))
def test_linear_twins(kind, bias, dropped, tokens, out):
    assert_twins(linear, *linear_case(kind, bias, dropped, tokens, out, seed=out))


def norm_case(shape, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=shape)}, rng.normal(size=shape), {"weight": rng.normal(size=shape[-1])}


@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (2, 2, 3, 16)])
def test_rms_norm(shape):
    primals, dy, constants = norm_case(shape)
    assert_gradients(lambda p: plain.rms_norm(p["x"], constants["weight"], EPS), primals, dy)
    want = primals["x"] / np.sqrt((primals["x"] ** 2).sum(-1, keepdims=True) / shape[-1] + EPS) * constants["weight"]
    oracles.assert_close(plain.rms_norm(primals["x"], constants["weight"], EPS), want, "finite differences")


@settings(max_examples=20)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 70)))
def test_rms_norm_twins(shape):
    assert_twins(lambda plain, c, p: plain.rms_norm(p["x"], c["weight"], EPS), *norm_case(shape))


def test_rope():
    rng = np.random.default_rng(0)
    primals, dy = {"x": rng.normal(size=(2, 3, 7, 8))}, rng.normal(size=(2, 3, 7, 8))
    assert_gradients(lambda p: plain.rope(p["x"], ROPE), primals, dy)
    np.testing.assert_array_equal(plain.rope(primals["x"], ROPE), reference.rope.forward(primals["x"], ROPE))
    assert_twins(lambda plain, c, p: plain.rope(p["x"], ROPE), primals, dy, {})


def attention_case(batch, heads, kv_heads, tokens, seed=0):
    rng = np.random.default_rng(seed)
    q, do = (rng.normal(size=(batch, heads, tokens, 8)) for _ in range(2))
    k, v = (rng.normal(size=(batch, kv_heads, tokens, 8)) for _ in range(2))
    return {"q": q, "k": k, "v": v}, do


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("tokens", [1, 9])
def test_attention(heads, window, tokens):
    primals, do = attention_case(2, *heads, tokens)
    assert_gradients(lambda p: plain.attention(p["q"], p["k"], p["v"], SCALE, window), primals, do)
    want, (q, k, v) = np.empty_like(do), primals.values()
    for b, h, t in np.ndindex(do.shape[:3]):  # one query at a time, with the keys it sees and no others
        seen, head = slice(max(0, t + 1 - (window or tokens)), t + 1), h // (heads[0] // heads[1])
        weights = np.exp(SCALE * k[b, head, seen] @ q[b, h, t])
        want[b, h, t] = weights / weights.sum() @ v[b, head, seen]
    oracles.assert_close(plain.attention(q, k, v, SCALE, window), want, "finite differences")


@settings(max_examples=30)
@given(batch=st.integers(1, 2), kv_heads=st.integers(1, 2), groups=st.integers(1, 3), tokens=st.integers(1, 20), window=st.none() | st.integers(1, 25))
def test_attention_twins(batch, kv_heads, groups, tokens, window):
    case = attention_case(batch, kv_heads * groups, kv_heads, tokens, seed=tokens)
    names = ["v"] if tokens == 1 or window == 1 else None  # a softmax over one key is constant: the other gradients are zero, or rounding
    assert_twins(lambda plain, c, p: plain.attention(p["q"], p["k"], p["v"], SCALE, window), *case, {}, names)


@settings(max_examples=10)
@given(shape=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 9)))
def test_gate(shape):
    rng = np.random.default_rng(shape[2])
    g, u, dz = (2 * rng.normal(size=shape) for _ in range(3))
    assert_gradients(lambda p: plain.gate(p["g"], p["u"]), {"g": g, "u": u}, dz)
    oracles.assert_close(plain.gate(g, u), g / (1 + np.exp(-g)) * u, "finite differences")
    assert_twins(lambda plain, c, p: plain.gate(p["g"], p["u"]), {"g": g, "u": u}, dz, {})


@settings(max_examples=20)
@given(batch=st.integers(1, 2), tokens=st.integers(1, 6), vocabulary=st.integers(2, 30))
def test_cross_entropy(batch, tokens, vocabulary):
    rng = np.random.default_rng(vocabulary)
    primals = {"logits": 3 * rng.normal(size=(batch, tokens, vocabulary))}
    constants = {"targets": rng.integers(0, vocabulary, (batch, tokens)), "mask": rng.random((batch, tokens)) < 0.6}
    assert_gradients(lambda p: plain.cross_entropy(p["logits"], **constants), primals, None)
    likely = np.exp(primals["logits"]) / np.exp(primals["logits"]).sum(-1, keepdims=True)
    want = sum(-np.log(likely[*place, constants["targets"][place]]) for place in np.ndindex(batch, tokens) if constants["mask"][place])
    oracles.assert_close(plain.cross_entropy(primals["logits"], **constants), want, "finite differences")
    assert_twins(lambda plain, c, p: plain.cross_entropy(p["logits"], c["targets"], c["mask"]), primals, None, constants)


@each_backend
@pytest.mark.filterwarnings("error")
def test_large_values_do_not_overflow(backend):
    g = backend.arrays.asarray(np.array([-1000, -100, 100, 1000], np.float32).reshape(1, 1, 4))
    _, gradients = backend.plain.vjp(lambda p: backend.plain.gate(p["g"], g), {"g": g}, g)
    targets, mask = (backend.arrays.asarray(a) for a in (np.array([[0]]), np.array([[True]])))
    loss, dlogits = backend.plain.vjp(lambda p: backend.plain.cross_entropy(p["logits"], targets, mask), {"logits": g})
    assert float(loss) == 2000 and numbers(dlogits["logits"]).tolist() == [[[-1, 0, 0, 1]]]
    assert np.isfinite(numbers(gradients["g"])).all()
    q = backend.arrays.asarray(np.full((1, 1, 3, 2), 1000, np.float32))
    o, gradients = backend.plain.vjp(lambda p: backend.plain.attention(p["q"], q, q, 1.0), {"q": q}, q)
    assert (numbers(o) == 1000).all() and not numbers(gradients["q"]).any()


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
    for module in (backend.attention, backend.gated_mlp, backend.lora_linear, backend.rms_norm):
        for name in ("forward", "backward", "apply"):
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
