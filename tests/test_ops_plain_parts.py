"""The parts of a layer in plain code, one by one."""

import numpy as np
import oracles
import pytest
from backends import each_backend, mx, needs_mlx, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from tapes import assert_gradients, assert_twins

from mesp_mlx import reference
from mesp_mlx.reference import plain

KINDS = [(None, 32), (4, 32), (3, 64)]
SMOOTH = ["silu", "gelu", "gelu_exact", "gelu_sigmoid", "relu_squared"]
ACTIVATIONS = [*SMOOTH, "relu", "clipped_swiglu"]
CAP = 1.5
ROPE = {"dims": 6, "traditional": False, "base": 100.0, "scale": 1.0, "freqs": None, "magnitude": 1.2}
EPS, SCALE = 1e-5, 0.4


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


def norm_case(shape, weighted=True, seed=0):
    rng = np.random.default_rng(seed)
    constants = {"weight": rng.normal(size=shape[-1]), "bias": rng.normal(size=shape[-1])}
    return {"x": 1 + rng.normal(size=shape)}, rng.normal(size=shape), constants if weighted else dict.fromkeys(constants)


@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (2, 2, 3, 16)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(shape, weighted):
    primals, dy, constants = norm_case(shape, weighted)
    assert_gradients(lambda p: plain.rms_norm(p["x"], constants["weight"], EPS), primals, dy)
    want = primals["x"] / np.sqrt((primals["x"] ** 2).sum(-1, keepdims=True) / shape[-1] + EPS) * (constants["weight"] if weighted else 1)
    oracles.assert_close(plain.rms_norm(primals["x"], constants["weight"], EPS), want, "finite differences")


@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (2, 2, 3, 16)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm(shape, weighted, biased):
    primals, dy, constants = norm_case(shape)
    weight, bias = constants["weight"] if weighted else None, constants["bias"] if biased else None
    assert_gradients(lambda p: plain.layer_norm(p["x"], weight, bias, EPS), primals, dy)
    centred = primals["x"] - primals["x"].sum(-1, keepdims=True) / shape[-1]
    want = centred / np.sqrt((centred**2).sum(-1, keepdims=True) / shape[-1] + EPS)
    want = want * (constants["weight"] if weighted else 1) + (constants["bias"] if biased else 0)
    oracles.assert_close(plain.layer_norm(primals["x"], weight, bias, EPS), want, "finite differences")


@settings(max_examples=30)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(3, 70)), weighted=st.booleans())
def test_norm_twins(shape, weighted):
    case = norm_case(shape, weighted)
    assert_twins(lambda plain, c, p: plain.rms_norm(p["x"], c["weight"], EPS), *case)
    assert_twins(lambda plain, c, p: plain.layer_norm(p["x"], c["weight"], c["bias"], EPS), *case)


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
@pytest.mark.parametrize("kind", ["", "cap", "sinks", "cap, sinks"])
def test_attention(heads, window, tokens, kind):
    primals, do = attention_case(2, *heads, tokens)
    cap, sinks = CAP if "cap" in kind else None, np.random.default_rng(7).normal(size=heads[0]) if "sinks" in kind else None
    assert_gradients(lambda p: plain.attention(p["q"], p["k"], p["v"], SCALE, window, cap, sinks), primals, do)
    want, (q, k, v) = np.empty_like(do), primals.values()
    for b, h, t in np.ndindex(do.shape[:3]):  # one query at a time, with the keys it sees and no others
        seen, head = slice(max(0, t + 1 - (window or tokens)), t + 1), h // (heads[0] // heads[1])
        scores = SCALE * k[b, head, seen] @ q[b, h, t]
        weights = np.exp(CAP * np.tanh(scores / CAP) if cap else scores)
        want[b, h, t] = weights / (weights.sum() + (0 if sinks is None else np.exp(sinks[h]))) @ v[b, head, seen]
    oracles.assert_close(plain.attention(q, k, v, SCALE, window, cap, sinks), want, "finite differences")


@settings(max_examples=40)
@given(
    batch=st.integers(1, 2), kv_heads=st.integers(1, 2), groups=st.integers(1, 3), tokens=st.integers(1, 20), window=st.none() | st.integers(1, 25),
    cap=st.sampled_from([None, CAP]), sunk=st.booleans(),
)  # fmt: skip
def test_attention_twins(batch, kv_heads, groups, tokens, window, cap, sunk):
    case = attention_case(batch, kv_heads * groups, kv_heads, tokens, seed=tokens)
    constants = {"sinks": np.random.default_rng(7).normal(size=kv_heads * groups) if sunk else None}
    names = ["v"] if tokens == 1 or window == 1 else None  # a softmax over one key is constant: the other gradients are zero, or rounding
    assert_twins(lambda plain, c, p: plain.attention(p["q"], p["k"], p["v"], SCALE, window, cap, c["sinks"]), *case, constants, names)


@settings(max_examples=30)
@given(shape=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 9)), activation=st.sampled_from(ACTIVATIONS))
def test_activate_and_gate(shape, activation):
    rng = np.random.default_rng(shape[2])
    g, u, dz = (2 * rng.normal(size=shape) for _ in range(3))
    for factor in (1, 6):  # so far out that clipped_swiglu clips, and no number is near its corners
        away = {name: a + 1e-3 * ((np.abs(a) < 1e-3) + (np.abs(np.abs(a) - 7) < 1e-3)) for name, a in (("g", factor * g), ("u", factor * u))}
        assert_gradients(lambda p: plain.gate(p["g"], p["u"], activation), away, dz)
        assert_gradients(lambda p: plain.activate(p["g"], activation), {"g": away["g"]}, dz)
        assert_twins(lambda plain, c, p: plain.gate(p["g"], p["u"], activation), away, dz, {})
        assert_twins(lambda plain, c, p: plain.activate(p["g"], activation), {"g": away["g"]}, dz, {})
        phi = reference.activations.activate(away["g"], activation)  # whose formulas its own tests have
        oracles.assert_close(plain.activate(away["g"], activation), phi, "finite differences")
        other = np.clip(away["u"], -7, 7) + 1 if activation == "clipped_swiglu" else away["u"]
        oracles.assert_close(plain.gate(away["g"], away["u"], activation), phi * other, "finite differences")
    oracles.assert_close(plain.gate(g, u), g / (1 + np.exp(-g)) * u, "finite differences")  # silu, unless told otherwise


@pytest.mark.parametrize(("scale", "cap"), [(1.0, None), (0.3, None), (1.0, 4.0), (0.5, 4.0)])
def test_cap(scale, cap):
    rng = np.random.default_rng(0)
    logits, dy = 5 * rng.normal(size=(2, 3, 11)), rng.normal(size=(2, 3, 11))
    assert_gradients(lambda p: plain.cap(p["logits"], scale, cap), {"logits": logits}, dy)
    assert_twins(lambda plain, c, p: plain.cap(p["logits"], scale, cap), {"logits": logits}, dy, {})
    oracles.assert_close(plain.cap(logits, scale, cap), cap * np.tanh(scale * logits / cap) if cap else scale * logits, "finite differences")


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


@needs_mlx
def test_experts_of_nvfp4_with_a_scale_of_their_own():
    mx.random.seed(0)
    packed, dense = {}, {}
    for name, shape in {"gate": (3, 64, 32), "up": (3, 64, 32), "down": (3, 32, 64)}.items():
        weight = mx.random.normal(shape)
        largest = mx.max(mx.abs(weight), axis=(-2, -1))
        parts = [mx.quantize(weight[e], 16, 4, mode="nvfp4", global_scale=largest[e]) for e in range(3)]
        words, scales = (mx.stack(list(each)) for each in zip(*parts, strict=True))
        packed[name] = {"weight": words, "scales": scales, "global_scale": largest, "bits": 4, "group_size": 16, "mode": "nvfp4"}
        each = zip(parts, largest, strict=True)
        dense[name] = {"weight": mx.stack([mx.dequantize(*part, group_size=16, bits=4, mode="nvfp4", global_scale=scale) for part, scale in each])}
    x, p, none = mx.random.normal((5, 32)), mx.random.uniform(shape=(5, 2)), dict.fromkeys(packed)
    index = mx.array([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    from mesp_mlx.ops import plain as parts_in_mlx

    got, want = (parts_in_mlx.experts(x, p, index, linears, none, 1.0, none) for linears in (packed, dense))
    assert mx.abs(got - want).max() <= 1e-5 * mx.abs(want).max()
