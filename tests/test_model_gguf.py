"""GGUF files are written by the `gguf` package and dequantised by it: the truth here. MLX's own reading is checked where MLX is."""

import json
import math

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import VOCAB, WIDTH, random_weights, write_gguf

from mesp_mlx.errors import UserError
from mesp_mlx.model import gguf as ours
from mesp_mlx.model import gguf_tokenizer
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.reference.quantized import dequantize
from mesp_mlx.stream.safetensors import read_array, read_folder, to_float32


def converted(tmp_path, *arguments, quantize_floats=True, **settings):
    """Write a GGUF file, convert it; the folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    ours.convert(write_gguf(tmp_path / "m.gguf", *arguments, **settings), folder, quantize_floats)
    return folder


def values(folder):
    """Every weight of a converted folder in float32, dequantised."""
    entries, spec = read_folder(folder), load_spec(read_config(folder))
    arrays = {name: read_array(entry) if entry.dtype == "U32" else to_float32(read_array(entry), entry.dtype) for name, entry in entries.items()}
    found = {}
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and f"{module}.scales" in arrays:
            setting = spec.quantized_as(module)
            assert setting is not None
            parts = {part: arrays[f"{module}.{part}"] for part in ("scales", "biases")}
            array = dequantize({"weight": array, **parts, "bits": setting[0], "group_size": setting[1]}, np.float32)
        if kind in ("weight", "bias"):
            found[name] = array
    return found


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_quantised_weights_keep_their_exact_values(tmp_path, kind, architecture):
    weights = random_weights(architecture, tied=False)
    got = values(converted(tmp_path, weights, architecture, kind))
    assert got.keys() == weights.keys()
    for name, weight in weights.items():
        want = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind) if weight.ndim == 2 else weight
        np.testing.assert_array_equal(got[name], want, err_msg=name)


def test_llamas_biases_come_in_the_order_of_their_rows(tmp_path):
    weights = random_weights(biases=True)
    folder = converted(tmp_path, weights, kind=Type.Q8_0)
    assert read_config(folder)["attention_bias"] and read_config(folder)["mlp_bias"]
    got = values(folder)
    for name in (name for name in weights if name.endswith("bias")):
        np.testing.assert_array_equal(got[name], weights[name], err_msg=name)


def test_extreme_codes_and_scales_are_exact(tmp_path):
    weights = random_weights()
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name][0, :32] = np.linspace(-8, 7, 32)
    weights[name][1, :32] = 0
    weights[name][2, :32] = 1e-7  # a subnormal scale
    weights[name][3, :32] = np.linspace(-3e4, 3e4, 32)
    for kind in (Type.Q4_0, Type.Q4_1, Type.Q8_0):
        (tmp_path / kind.name).mkdir()
        got = values(converted(tmp_path / kind.name, weights, kind=kind))
        np.testing.assert_array_equal(got[name], gguf.quants.dequantize(gguf.quants.quantize(weights[name], kind), kind))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
def test_mlx_dequantises_to_the_same_numbers(tmp_path, kind):
    mx = pytest.importorskip("mlx.core")
    weights, bits = random_weights(), 8 if kind == Type.Q8_0 else 4
    arrays = mx.load(str(converted(tmp_path, weights, kind=kind) / "model.safetensors"))
    for name in ("model.embed_tokens", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        scales, biases = (arrays[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
        got = mx.dequantize(arrays[f"{name}.weight"], scales, biases, group_size=32, bits=bits)
        np.testing.assert_array_equal(np.array(got), gguf.quants.dequantize(gguf.quants.quantize(weights[f"{name}.weight"], kind), kind))


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F32, "F32"), (Type.F16, "F16"), (Type.BF16, "BF16")])
def test_float_weights_become_4_bit_with_their_own_scale_type(tmp_path, kind, dtype):
    folder = converted(tmp_path, random_weights(), kind=kind)
    entries = read_folder(folder)
    assert read_config(folder)["quantization"] == {"group_size": 64, "bits": 4}
    assert entries["model.layers.0.mlp.up_proj.weight"].dtype == "U32"
    assert entries["model.layers.0.mlp.up_proj.scales"].dtype == dtype
    assert load_spec(read_config(folder)).dtype == dtype


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16])
def test_float_weights_are_kept_when_asked(tmp_path, kind):
    weights = random_weights(tied=False)
    folder = converted(tmp_path, weights, kind=kind, quantize_floats=False)
    assert "quantization" not in read_config(folder)
    got = values(folder)
    for name, weight in weights.items():
        want = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind) if weight.ndim == 2 else weight
        np.testing.assert_array_equal(got[name], want, err_msg=name)


def test_norms_take_the_models_type_only_where_that_is_exact(tmp_path):
    weights = random_weights()
    weights["model.norm.weight"] = np.full(WIDTH, 0.5, np.float32)
    entries = read_folder(converted(tmp_path, weights, kind=Type.Q4_0))
    assert entries["model.norm.weight"].dtype == "F16"
    assert entries["model.layers.0.input_layernorm.weight"].dtype == "F32"


def test_modules_of_another_setting_are_named_in_the_config(tmp_path):
    types = {"model.embed_tokens.weight": Type.Q8_0, "model.layers.0.mlp.up_proj.weight": Type.F16}
    folder = converted(tmp_path, random_weights(), kind=Type.Q4_1, types=types, quantize_floats=False)
    assert read_config(folder)["quantization"] == {
        "group_size": 32, "bits": 4, "model.embed_tokens": {"group_size": 32, "bits": 8}, "model.layers.0.mlp.up_proj": False,
    }  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_mlx_lm_computes_the_same_as_from_the_weights_themselves(tmp_path, architecture, tied):
    mx = pytest.importorskip("mlx.core")
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    weights = random_weights(architecture, tied)
    types = {"model.embed_tokens.weight": Type.Q8_0}
    model, _ = load_model(converted(tmp_path, weights, architecture, Type.Q4_0, types=types))
    model.set_dtype(mx.float32)
    ids = mx.array([[3, 1, 4, 1, 5, 92, 6]])
    got = np.array(model(ids))

    dense = tmp_path / "dense"
    dense.mkdir()
    config = {key: value for key, value in read_config(tmp_path / "model").items() if key != "quantization"}
    (dense / "config.json").write_text(json.dumps(config))
    kinds = {name: types.get(name, Type.Q4_0) for name, weight in weights.items() if weight.ndim == 2}
    exact = {name: mx.array(gguf.quants.dequantize(gguf.quants.quantize(w, kinds[name]), kinds[name]) if w.ndim == 2 else w) for name, w in weights.items()}
    mx.save_safetensors(str(dense / "model.safetensors"), exact)
    want = np.array(load_model(dense)[0](ids))
    assert np.isfinite(got).all() and np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_the_config_says_what_the_metadata_says(tmp_path):
    config = read_config(converted(tmp_path, random_weights("qwen2", tied=False), "qwen2"))
    assert config["model_type"] == "qwen2" and config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 10000.0
    assert (config["vocab_size"], config["max_position_embeddings"], config["tie_word_embeddings"]) == (VOCAB, 512, False)
    assert config["eos_token_id"] == 0 and "bos_token_id" not in config


def test_a_window_makes_it_mistral(tmp_path):
    config = read_config(converted(tmp_path, random_weights(), sliding_window=100))
    assert load_spec(config).windows == (100, 100) and config["model_type"] == "mistral"


def llama3_factors(head, base, factor):
    """The published rule, written out: https://github.com/meta-llama/llama-models, models/llama3/reference_impl/model.py, apply_scaling."""
    factors = []
    for i in range(0, head, 2):
        wavelength = 2 * math.pi * base ** (i / head)
        smooth = (8192 / wavelength - 1) / (4 - 1)
        factors.append(1 if wavelength < 8192 / 4 else factor if wavelength > 8192 / 1 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_position_scaling(tmp_path):
    weights, yarn = random_weights(), {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 128}

    def scaling(name, **settings):
        (tmp_path / name).mkdir()
        return read_config(converted(tmp_path / name, weights, **settings)).get("rope_scaling")

    assert scaling("none", rope_scaling_type=gguf.RopeScalingType.NONE, rope_scaling_factor=4.0) is None
    assert scaling("linear", rope_scaling_type=gguf.RopeScalingType.LINEAR, rope_scaling_factor=4.0) == {"rope_type": "linear", "type": "linear", "factor": 4.0}
    assert scaling("yarn", **yarn) == {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    factors = {"rope_freqs.weight": llama3_factors(16, 500000.0, 32.0)}
    assert scaling("llama3", extra=factors, rope_freq_base=500000.0) == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    with pytest.raises(UserError, match="Llama 3"):
        scaling("other", extra={"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}, rope_freq_base=500000.0)
    with pytest.raises(UserError, match="longrope"):
        scaling("long", rope_scaling_type=gguf.RopeScalingType.LONGROPE, rope_scaling_factor=4.0)


def refusal(path):
    with pytest.raises(UserError) as refused:
        ours.parts(file := ours.read_header(path), ours.config_of(file))
    return str(refused.value)


def test_what_is_not_served_is_refused_by_name(tmp_path):
    weights, file = random_weights(), tmp_path / "m.gguf"
    assert "'gemma' is not served" in refusal(write_gguf(file, weights, "gemma"))
    assert "mixture of 8" in refusal(write_gguf(file, weights, expert_count=8))
    assert "Q5_1" in refusal(write_gguf(file, weights, types={"model.layers.0.mlp.up_proj.weight": Type.Q5_1}))
    assert "rotate 8 of a head's 16" in refusal(write_gguf(file, weights, rope_dimension_count=8))
    assert "one of 3 parts" in refusal(one_of_three(file, weights))
    missing = {name: weight for name, weight in weights.items() if "1.mlp.up" not in name}
    assert "are missing:\n  model.layers.1.mlp.up_proj.weight" in refusal(write_gguf(file, missing))
    assert f"\n  blk.0.odd.weight in {file.name}\n" in refusal(write_gguf(file, weights, extra={"blk.0.odd.weight": np.zeros(4, np.float32)}))
    narrow = weights | {"model.layers.0.mlp.up_proj.weight": np.zeros((64, 64), np.float32)}
    assert "F32 [64, 64], expected F32/F16/BF16/Q4_0/Q4_1/Q8_0 [128, 64]" in refusal(write_gguf(file, narrow))
    assert "'hidden_size'" in refusal(write_gguf(file, weights, embedding_length=None))


def one_of_three(file, weights):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_k_quants_are_refused_by_name(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", random_weights())
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    data[at : at + 4] = (12).to_bytes(4, "little")
    file.write_bytes(data)
    assert "Q4_K" in refusal(file) and "Q8_0" in refusal(file)


def test_every_cut_is_noticed(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", random_weights()).read_bytes()
    for length in [*range(0, 2000, 37), *range(2000, len(whole), 4999), len(whole) - 40]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        assert "cut.gguf" in refusal(tmp_path / "cut.gguf")


def test_a_damaged_header_never_ends_in_anything_but_a_clear_error(tmp_path):
    whole, rng = write_gguf(tmp_path / "m.gguf", random_weights()).read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(0, 6000, size=4):
            damaged[at] = rng.integers(256)
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            file = ours.read_header(tmp_path / "damaged.gguf")
            gguf_tokenizer.files(file.metadata, "damaged.gguf")
            ours.parts(file, ours.config_of(file))
        except UserError:
            pass


def test_scales_that_are_not_finite_are_refused(tmp_path):
    weights = random_weights()
    file = write_gguf(tmp_path / "m.gguf", weights, kind=Type.Q8_0)
    entry = ours.read_header(file).entries["blk.0.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    data[entry.start : entry.start + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(data)
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="'blk.0.ffn_up.weight'.*not finite"):
        ours.convert(file, tmp_path / "model")
    assert not list((tmp_path / "model").glob("*.safetensors"))
