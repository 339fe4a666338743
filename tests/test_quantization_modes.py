"""mxfp4, mxfp8 and nvfp4: their bits against MLX's and against arithmetic, products, and whole models that mlx-lm packed, mixed ones included."""

import itertools
import math
import re

import numpy as np
import oracles
import pytest
from backends import each_backend, mx, needs_mlx, numbers, ops
from engines import autodiff_of_mlx_lm, one_pass, random_adapter, random_group, worst_error
from methods import exact_pass
from models import make_model, tiny_config, tool
from runs import chat_rows, data_folder, run
from tiny_tokenizers import TEMPLATES, make_tokenizer

from mesp_mlx import check_gradients, reference
from mesp_mlx.errors import UserError
from mesp_mlx.memory.table import Layout, Workload
from mesp_mlx.model import quantization, weights
from mesp_mlx.model.architecture import open_folder
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.stream.safetensors import Writer, read_array, read_folder

each_mode = pytest.mark.parametrize("mode", quantization.MODES)
MIXED = {
    "v_proj": {"bits": 6, "group_size": 64},  # affine: what is not said of a module is a default, not the model's
    "down_proj": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "gate_proj": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "o_proj": {"bits": 3, "group_size": 32, "mode": "affine"},
    "k_proj": False,
}


def random_linear(rng, out, width, mode, bias=False):
    """Random codes, all but not-a-numbers, with scales by which outputs are of about unit size at a width of 128."""
    bits, group = quantization.MODES[mode]
    codes = rng.integers(0, 256, (out, width * bits // 8), np.uint8)
    codes[codes & 127 == 127] = 0
    scales = rng.integers(*{"mxfp4": (120, 124), "mxfp8": (114, 118), "nvfp4": (0x08, 0x18)}[mode], (out, width // group), np.uint8)
    linear = {"weight": codes.view(np.uint32), "scales": scales, "bits": bits, "group_size": group, "mode": mode}
    return linear | ({"bias": rng.normal(size=out)} if bias else {})


def mlx_linear(weight, mode, **scale):
    """What mx.quantize makes."""
    packed, scales, *_ = mx.quantize(weight, mode=mode, **scale)
    return {"weight": packed, "scales": scales, "mode": mode, **dict(zip(("bits", "group_size"), quantization.MODES[mode], strict=True)), **scale}


def dequantized_by_mlx(linear, dtype):
    return mx.dequantize(linear["weight"], linear["scales"], None, mode=linear["mode"], global_scale=linear.get("global_scale"), dtype=dtype)


def in_numpy(linear):
    return {name: value if isinstance(value, int | str) else numbers(value) for name, value in linear.items()}


def by_definition(linear):
    """[out, in], number by number, of the formats as they are published."""

    def small_float(code, exponent, mantissa):
        code, sign = code % 2 ** (exponent + mantissa), -1 if code >= 2 ** (exponent + mantissa) else 1
        power, part = divmod(code, 2**mantissa)
        bias = 2 ** (exponent - 1) - 1
        return sign * (math.ldexp(1 + part / 2**mantissa, power - bias) if power else math.ldexp(part / 2**mantissa, 1 - bias))

    rows, bits = [], linear["bits"]
    for words, scales in zip(linear["weight"].tolist(), linear["scales"].tolist(), strict=True):
        codes = [word >> shift & (2**bits - 1) for word in words for shift in range(0, 32, bits)]
        values = [small_float(code, *((4, 3) if bits == 8 else (2, 1))) for code in codes]
        sizes = [small_float(scale, 4, 3) if linear["mode"] == "nvfp4" else math.ldexp(1, scale - 127) for scale in scales]
        rows.append([value * sizes[i // linear["group_size"]] for i, value in enumerate(values)])
    return np.array(rows)


@each_mode
def test_the_twin_is_the_published_format(mode):
    linear = random_linear(np.random.default_rng(0), 40, 256, mode)
    assert reference.quantized.shape(linear) == (40, 256)
    np.testing.assert_array_equal(reference.quantized.dequantize(linear, np.float64), by_definition(linear))
    np.testing.assert_array_equal(reference.quantized.dequantize(linear, np.float32), by_definition(linear))  # every weight fits


@needs_mlx
@each_mode
def test_every_code_and_every_scale_is_mlxs_to_the_bit(mode):
    bits, group = quantization.MODES[mode]
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 256 * 8 // bits // group, axis=1)
    if mode != "nvfp4":
        scales = scales[:255]  # the last is not a number by the format, and infinity to MLX's CPU
    linear = {"weight": codes[: len(scales)].view(np.uint32), "scales": scales, "bits": bits, "group_size": group, "mode": mode}
    packed = oracles.to_mlx(linear)
    want = numbers(dequantized_by_mlx(packed, mx.float32))
    assert np.isfinite(want).mean() > 0.9
    with np.errstate(over="ignore", invalid="ignore"):  # the largest scale times the largest code
        np.testing.assert_array_equal(reference.quantized.dequantize(linear, np.float32), want)
    np.testing.assert_array_equal(numbers(ops.quantized.dequantize(packed, mx.float32)), want)
    usual = ops.quantized.rows(packed, *((100, 140) if mode != "nvfp4" else (0, 127)))
    for dtype in (mx.bfloat16, mx.float16):
        got = ops.quantized.dequantize(usual, dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(numbers(got.astype(mx.float32)), numbers(dequantized_by_mlx(usual, dtype).astype(mx.float32)))


@needs_mlx
@each_mode
@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_mlx_packs_is_read(monkeypatch, mode, on_cpu):
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: on_cpu)
    weight = mx.random.normal((7, 192), key=mx.random.key(0))
    weight[0], weight[1] = 0, mx.abs(weight[1])
    linear = mlx_linear(weight, mode)
    want = numbers(dequantized_by_mlx(linear, mx.float32))
    assert ops.quantized.shape(linear) == (7, 192) and np.abs(want - numbers(weight)).max() < 0.6
    np.testing.assert_array_equal(numbers(ops.quantized.dequantize(linear, mx.float32)), want)
    np.testing.assert_array_equal(reference.quantized.dequantize(in_numpy(linear), np.float32), want)


@needs_mlx
@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_global_scale(monkeypatch, on_cpu):
    """Of nvfp4, by which small weights keep their scales out of e4m3's fractions."""
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: on_cpu)
    weight = 1e-4 * mx.random.normal((9, 64), key=mx.random.key(1))
    linear = mlx_linear(weight, "nvfp4", global_scale=mx.max(mx.abs(weight)))
    want = numbers(dequantized_by_mlx(linear, mx.float32))
    assert np.abs(want - numbers(weight)).max() < 5e-5
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(5, 64)).astype(np.float32), rng.normal(size=(5, 9)).astype(np.float32)
    for backend, given, to in ((ops, linear, mx.array), (reference, in_numpy(linear), np.asarray)):
        q = backend.quantized
        oracles.assert_close(q.dequantize(given, backend.arrays.float32), want, "twin")
        oracles.assert_close([q.matmul(to(x), given), q.matmul_transposed(to(dy), given)], [x @ want.T, dy @ want], "twin")
        part = q.columns(q.take(q.rows(given, 2, 8), to(np.array([1, 3]))), 32, 64)
        oracles.assert_close(q.dequantize(part, backend.arrays.float32), want[[3, 5], 32:], "twin")
    assert set(ops.quantized.zeros_like(linear)) == set(linear)


@each_backend
@each_mode
def test_rows_columns_and_chosen_rows(backend, mode):
    linear = random_linear(np.random.default_rng(2), 11, 256, mode, bias=True)
    want, q = by_definition(linear), backend.quantized
    given = linear if backend is reference else oracles.to_mlx(linear)

    def dense(part):
        return numbers(q.dequantize(part, backend.arrays.float32))

    np.testing.assert_array_equal(dense(q.rows(given, 3, 9)), want[3:9])
    for i, j in ((0, 32), (32, 96), (224, 256)):
        part = q.columns(given, i, j)
        assert q.shape(part) == (11, j - i) and "bias" not in part and part["mode"] == mode
        np.testing.assert_array_equal(dense(part), want[:, i:j])
    index = np.array([10, 0, 0], np.int32)
    taken = q.take(given, backend.arrays.asarray(index))
    np.testing.assert_array_equal(dense(taken), want[index])
    np.testing.assert_array_equal(numbers(taken["bias"]), linear["bias"][index].astype(numbers(taken["bias"]).dtype))
    np.testing.assert_array_equal(dense(q.unpacked(given, backend.arrays.float32)), want)


@each_mode
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_dense_weight(mode, bias):
    rng = np.random.default_rng(3)
    linear, x, dy = random_linear(rng, 37, 256, mode, bias), rng.normal(size=(2, 3, 256)), rng.normal(size=(2, 3, 37))
    weight = by_definition(linear)
    oracles.assert_close(reference.quantized.matmul(x, linear, 12_000), x @ weight.T + linear.get("bias", 0), "finite differences")
    oracles.assert_close(reference.quantized.matmul_transposed(dy, linear, 12_000), dy @ weight, "finite differences")


@needs_mlx
@each_mode
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_mlx_equals_the_twin(monkeypatch, mode, on_cpu, bias):
    """In tiles on a CPU; packed as on a GPU, in both directions."""
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: on_cpu)
    rng = np.random.default_rng(4)
    arrays = random_linear(rng, 96, 128, mode, bias), rng.normal(size=(2, 3, 128)), rng.normal(size=(2, 3, 96))
    (linear, x, dy), (twin, tx, tdy) = oracles.to_mlx(arrays), oracles.to_float32(arrays)
    want = [reference.quantized.matmul(tx, twin), reference.quantized.matmul_transposed(tdy, twin)]
    for tile_bytes in (1, 12_000, None):
        oracles.assert_close([ops.quantized.matmul(x, linear, tile_bytes), ops.quantized.matmul_transposed(dy, linear, tile_bytes)], want, "twin")
    assert (ops.quantized.unpacked(linear, mx.float32) is linear) is not on_cpu
    assert ops.quantized.matmul(x.astype(mx.bfloat16), linear).dtype == mx.bfloat16


@needs_mlx
@each_mode
@pytest.mark.parametrize("on_cpu", [True, False])
def test_apply_is_a_product_with_a_gradient(monkeypatch, mode, on_cpu):
    """Against mx.grad of plain MLX on the dense weight, alone and compiled; the frozen linear gets zeros."""
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(ops.quantized.tiles, "WEIGHT_BYTES", 20_000)  # several tiles
    rng = np.random.default_rng(7)
    linear, x, dy = oracles.to_mlx((random_linear(rng, 128, 128, mode, True), rng.normal(size=(6, 128)), rng.normal(size=(6, 128))))
    weight = dequantized_by_mlx(linear, mx.float32)

    def ours(x):
        return mx.sum(dy * ops.quantized.apply(mx.tanh(ops.quantized.apply(x, linear)), linear))

    def naive(x):
        return mx.sum(dy * (mx.tanh(x @ weight.T + linear["bias"]) @ weight.T + linear["bias"]))

    want = mx.value_and_grad(naive)(x)
    oracles.assert_close(mx.value_and_grad(ours)(x), want, "autodiff")
    oracles.assert_close(mx.compile(mx.value_and_grad(ours))(x), want, "autodiff")
    grads = mx.grad(lambda bias: mx.sum(ops.quantized.apply(x, linear | {"bias": bias})))(linear["bias"])
    assert not numbers(grads).any()
    zeros = ops.quantized.zeros_like(linear)
    assert zeros["scales"].dtype == mx.uint8 and not numbers(zeros["weight"]).any() and zeros["mode"] == mode


def test_a_bfloat16_product_is_no_worse_than_naive_code():
    oracles.mlx()
    rng = np.random.default_rng(5)
    for mode in quantization.MODES:
        linear = oracles.to_mlx(random_linear(rng, 48, 128, mode))
        x, dy = (mx.array(rng.normal(size=shape)).astype(mx.bfloat16) for shape in ((6, 128), (6, 48)))
        w, exact = dequantized_by_mlx(linear, mx.bfloat16), dequantized_by_mlx(linear, mx.float32)
        got = [ops.quantized.matmul(x, linear), ops.quantized.matmul_transposed(dy, linear)]
        oracles.assert_no_worse(got, [x @ w.T, dy @ w], [x.astype(mx.float32) @ exact.T, dy.astype(mx.float32) @ exact])


def packed_by_mlx_lm(folder, config, mode, predicate=None):
    """A random model that mlx-lm, with mlx.nn's own quantize, packed and saved: [out, in] of every weight is what it drew."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, found = load_model(make_model(folder / "plain", config, bits=None))
    bits, group = quantization.MODES.get(mode, (4, 32))
    model, found = quantize_model(model, found, group, bits, mode, quant_predicate=predicate)
    save_model(folder / "packed", model)
    save_config(found, folder / "packed" / "config.json")
    return folder / "packed"


def mixed(name, _module):
    """What mlx_lm.convert is given as a quant_predicate: the settings of a module, or whether it is packed at all."""
    return MIXED.get(name.rpartition(".")[2], True)


def planned_bytes(spec):
    """The bytes of all weights by the plan's table."""
    load = Workload(spec, ())
    layouts = [*itertools.chain.from_iterable(load.weights.values()), load.table, load.norm]
    embedding = load.stored("model.embed_tokens.weight", "", (spec.vocab_size, spec.hidden_size))
    return sum(layout.bytes for layout in layouts) + (0 if spec.tied else Layout(tuple(embedding)).bytes)


def stored_bytes(entries):
    """The bytes of all tensors in the files."""
    return sum(entry.size_bytes for entry in entries.values())


@needs_mlx
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("mode", "predicate"), [*((mode, None) for mode in quantization.MODES), ("affine", mixed), ("mxfp4", mixed)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_that_mlx_lm_packed(tmp_path, monkeypatch, family, mode, predicate, tied):
    """Streamed, loss and gradients are those of mlx-lm's own autodiff of the same stored weights; the plan knows their bytes."""
    folder = packed_by_mlx_lm(tmp_path, tiny_config(family, tie_word_embeddings=tied), mode, predicate)
    spec, entries = open_folder(folder)
    kinds = {entry.dtype for name, entry in entries.items() if name.endswith("scales")}
    assert kinds == ({"U8"} if predicate is None else {"U8", "F32"})
    assert planned_bytes(spec) == stored_bytes(entries)
    adapter, groups = random_adapter(folder), [random_group(160, [13, 9]), random_group(160, [21], seed=3, first_row=2)]
    want_loss, want = autodiff_of_mlx_lm(folder, adapter, groups, float64=True)
    assert set(want) == set(adapter)
    for backend, on_cpu in [(reference, True), (ops, True), (ops, False)]:
        monkeypatch.setattr(ops.quantized, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        loss, gradients, store = one_pass(folder, backend, adapter, groups)
        assert abs(loss - want_loss) <= 1e-5 * abs(want_loss)
        assert worst_error(gradients, want) <= 1e-4
        assert max(store.loads.values()) <= 2


@needs_mlx
@each_backend
@each_mode
def test_a_layer_at_once_by_autodiff(tmp_path, mode, backend):
    """The baseline whose layers and whole head are reversed by autodiff."""
    folder, groups = make_model(tmp_path, tiny_config("llama"), mode=mode), [random_group(160, [13, 9])]
    loss, gradients, _ = exact_pass(folder, backend, random_adapter(folder), groups, method="mebp")
    want_loss, want = autodiff_of_mlx_lm(folder, random_adapter(folder), groups, float64=True)
    assert loss == pytest.approx(want_loss, rel=1e-6) and worst_error(gradients, want) <= 1e-4


@each_backend
@each_mode
def test_a_model_that_is_drawn(tmp_path, one_process, mode, backend):
    """make_random_model writes every mode, and check-gradients, which dequantises by code of its own, passes on it."""
    folder = make_model(tmp_path / "model", tiny_config("llama", tie_word_embeddings=False), mode=mode, dtype="bfloat16", quantization={"lm_head": False})
    spec, entries = load_spec(read_config(folder)), read_folder(folder)
    weights.check(spec, entries)
    assert planned_bytes(spec) == stored_bytes(entries)
    found = one_pass(folder, backend, random_adapter(folder), [random_group(160, [7])])
    assert np.isfinite(found[0]) and all(np.isfinite(value).all() and value.any() for value in found[1].values())
    given = {"model": str(folder), "rank": 4, "backend": backend.arrays.name, "seed": 0}
    assert check_gradients.run(given, 24, 1, str(tmp_path / "found.json"), None) == 0


@each_mode
def test_drawn_weights_have_the_deviation_of_real_ones(tmp_path, mode):
    folder = make_model(tmp_path, tiny_config("llama", hidden_size=256, intermediate_size=512), mode=mode)
    entries, setting = read_folder(folder), dict(zip(("bits", "group_size"), quantization.MODES[mode], strict=True))
    assert read_config(folder)["quantization"] == {**setting, "mode": mode}
    for module, width in {"model.layers.0.mlp.up_proj": 256, "model.layers.1.mlp.down_proj": 512}.items():
        parts = {part: read_array(entries[f"{module}.{part}"]) for part in ("weight", "scales")}
        weight = reference.quantized.dequantize(parts | setting | {"mode": mode}, np.float32)
        assert weight.shape[1] == width and abs(np.mean(weight)) < 0.02 * width**-0.5
        assert np.std(weight) == pytest.approx(width**-0.5, rel=0.03)


def test_drawn_from_the_command_line(tmp_path):
    assert tool("make_random_model").main(["--shape", "smollm2-135m", "--layers", "1", "--quantize", "nvfp4", str(tmp_path / "model")]) == 0
    spec = load_spec(read_config(tmp_path / "model"))
    assert spec.quantized_as("model.layers.0.mlp.up_proj") == (4, 16, "nvfp4")
    weights.check(spec, read_folder(tmp_path / "model"))


def test_what_a_config_says_of_a_module_inherits_nothing():
    """As mlx.nn has it: a module's own settings are complete but for the defaults of their mode."""
    modules = {"a": {"bits": 8}, "b": {"mode": "nvfp4"}, "c": False, "d": True, "e": {"bits": 8, "group_size": 32, "mode": "mxfp8"}}
    spec = load_spec(tiny_config("llama", quantization={"mode": "mxfp4", **modules}))
    assert {name: spec.quantized_as(name) for name in "abcdef"} == {
        "a": (8, 64, "affine"), "b": (4, 16, "nvfp4"), "c": None, "d": (4, 32, "mxfp4"), "e": (8, 32, "mxfp8"), "f": (4, 32, "mxfp4"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"mode": "mxfp4", "bits": 8}, "quantization has 8 bits in groups of 32; mxfp4 has 4 bits in groups of 32."),
        ({"mode": "mxfp8", "bits": 8.0}, "quantization has 8.0 bits in groups of 32; mxfp8 has 8 bits in groups of 32."),
        ({"mode": "nvfp4", "group_size": 32}, "quantization has 4 bits in groups of 32; nvfp4 has 4 bits in groups of 16."),
        ({"bits": 4, "x": {"mode": ["mxfp8"]}}, "x uses quantisation mode ['mxfp8']; served: affine, mxfp4, mxfp8, nvfp4."),
    ],
)
def test_settings_that_no_mode_has(quantization, said):
    with pytest.raises(UserError, match=re.escape(said)):
        load_spec(tiny_config("llama", quantization=quantization))


def test_activations_that_are_quantised_as_well():
    with pytest.raises(UserError, match="'quantize_activations' is set, and what is rounded in passing has no gradient"):
        load_spec(tiny_config("llama", quantization={"mode": "nvfp4"}, quantize_activations=True))


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("mode", "change", "said"),
    [
        ("mxfp4", {f"{UP}.scales": ("F32", np.zeros((96, 2), np.float32))}, "scales in model.safetensors: F32 [96, 2], expected U8 [96, 2]"),
        ("nvfp4", {f"{UP}.scales": ("U8", np.zeros((96, 2), np.uint8))}, "scales in model.safetensors: U8 [96, 2], expected U8 [96, 4]"),
        ("mxfp8", {f"{UP}.biases": ("F32", np.zeros((96, 2), np.float32))}, "biases in model.safetensors: F32 [96, 2], expected none"),
        ("mxfp8", {f"{UP}.weight": ("U32", np.zeros((96, 8), np.uint32))}, "weight in model.safetensors: U32 [96, 8], expected U32 [96, 16]"),
        ("mxfp4", {f"{UP}.global_scale": ("F32", np.ones((), np.float32))}, "global_scale in model.safetensors: F32 [], expected none"),
        ("nvfp4", {f"{UP}.global_scale": ("F32", np.ones(2, np.float32))}, "global_scale in model.safetensors: F32 [2], expected F32 []"),
        ("affine", {f"{UP}.scales": ("U8", np.zeros((96, 2), np.uint8))}, "scales in model.safetensors: U8 [96, 2], expected F32/F16/BF16 [96, 2]"),
    ],
)
def test_tensors_that_do_not_fit_their_mode(tmp_path, mode, change, said):
    folder = make_model(tmp_path / "model", tiny_config("llama"), mode=mode)
    spec, entries = load_spec(read_config(folder)), read_folder(folder)
    tensors = {name: (entry.dtype, read_array(entry)) for name, entry in entries.items()} | change
    with Writer(folder / "model.safetensors", {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, array)
    with pytest.raises(UserError) as caught:
        weights.check(spec, read_folder(folder))
    bits, group = quantization.MODES.get(mode, (4, 32))
    described = f"for {bits} bits in groups of {group}" + (f" ({mode})" if mode != "affine" else "")
    assert str(caught.value).splitlines()[1] == f"  {UP}.{said} {described}"


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_a_training_run(tmp_path, one_process, mode):
    """The whole program, from the plan to the adapter, with the numbers that a plain model of the same weights gives."""
    config = tiny_config("qwen2", vocab_size=352)
    packed = make_model(tmp_path / "packed", config, mode=mode)
    plain = make_model(tmp_path / "plain", config, bits=None)
    spec, entries = load_spec(read_config(packed)), read_folder(packed)
    with Writer(plain / "model.safetensors", {name: ("F32", shape) for name, shape in spec.tensors().items()}) as writer:
        for name in spec.tensors():
            module = name.removesuffix(".weight")
            linear = {part: read_array(entry) for part in ("weight", "scales") if (entry := entries.get(f"{module}.{part}"))}
            if "scales" in linear:
                linear |= dict(zip(("bits", "group_size"), quantization.MODES[mode], strict=True)) | {"mode": mode}
            writer.write(name, reference.quantized.dequantize(linear, np.float32) if linear else read_array(entries[name]))
    data, losses = data_folder(tmp_path / "data", chat_rows(8)), []
    for model in (packed, plain):
        make_tokenizer(TEMPLATES["chatml"]).save_pretrained(model)
        done = run(model, data, tmp_path / f"adapter of {model.name}", iters=2, batch_size=2, rank=2, max_seq_length=64, quantize="none")
        losses.append(done.values("train", "train_loss"))
    assert len(losses[0]) == 2
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
