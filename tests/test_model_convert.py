"""Quantising a Hugging Face folder, against mlx-lm's own quantisation."""

import json
import shutil
import tracemalloc

import numpy as np
import pytest
from hugging_face import write_hugging_face_folder
from models import FAMILY_VARIANTS

from mesp_mlx.errors import UserError
from mesp_mlx.model import convert
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.weights import check
from mesp_mlx.reference.quantized import quantize
from mesp_mlx.stream.safetensors import Writer, from_float32, read_array, read_folder, to_float32

CONFIG = {
    "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 160, "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
NUMPY = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write_folder(folder, dtype="BF16", config=CONFIG, drop=(), change=None, extra=None):
    """A Hugging Face folder of random weights; change: shapes, and extra: arrays of further tensors, by name. Returns the weights in float32."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": NUMPY[dtype]}))
    (folder / "tokenizer.json").write_text("{}")
    shapes = {name: shape for name, shape in (load_spec(config).tensors() | (change or {})).items() if name not in drop}
    arrays = {name: from_float32(rng.normal(scale=0.3, size=shape).astype(np.float32), dtype) for name, shape in shapes.items()} | (extra or {})
    declared = {name: (dtype, array.shape) for name, array in arrays.items()}
    with Writer(folder / "model.safetensors", declared, {"format": "pt"}) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    return {name: to_float32(array, dtype) for name, array in arrays.items()}


def quantised(tmp_path, **settings):
    """The folder that a folder written with these settings becomes, and its weights before."""
    weights = write_folder(tmp_path / "source", **settings)
    (tmp_path / "made").mkdir()
    convert.quantize_folder(tmp_path / "source", tmp_path / "made")
    return tmp_path / "made", weights


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_equals_mlx_lms_own_quantisation_bit_for_bit(tmp_path, dtype):
    mx = pytest.importorskip("mlx.core")
    utils, tree_flatten = pytest.importorskip("mlx_lm.utils"), pytest.importorskip("mlx.utils").tree_flatten
    made, _ = quantised(tmp_path, dtype=dtype)
    dense, config = utils.load_model(tmp_path / "source")
    theirs, their_config = utils.quantize_model(dense, config, 64, 4)
    ours, _ = utils.load_model(made)
    want, got = dict(tree_flatten(theirs.parameters())), dict(tree_flatten(ours.parameters()))
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and mx.array_equal(got[name], array).item(), name
    assert any(name.endswith("scales") for name in got) and "model.layers.0.mlp.down_proj.scales" not in got  # 96 does not divide by 64
    named = {name: setting for name, setting in their_config["quantization"].items() if name != "mode"}
    assert read_config(made)["quantization"] == {**named, **{f"model.layers.{i}.mlp.down_proj": False for i in range(2)}}
    assert np.isfinite(np.array(ours(mx.array([[1, 2, 3]])).astype(mx.float32))).all()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("tile_bytes", [100, 5000, 1 << 30])
def test_tiles_make_what_the_whole_weight_makes_and_the_rest_is_kept(tmp_path, monkeypatch, dtype, tile_bytes):
    monkeypatch.setattr(convert, "TILE_BYTES", tile_bytes)
    made, weights = quantised(tmp_path, dtype=dtype)
    entries = read_folder(made)
    for name, weight in weights.items():
        array, module = read_array(entries[name]), name.removesuffix(".weight")
        if weight.ndim == 1 or weight.shape[1] % 64:
            assert f"{module}.scales" not in entries
            np.testing.assert_array_equal(to_float32(array, entries[name].dtype), weight)
            continue
        want = quantize(weight, 4, 64)
        np.testing.assert_array_equal(array, want["weight"])
        for part in ("scales", "biases"):
            assert entries[f"{module}.{part}"].dtype == dtype
            np.testing.assert_array_equal(read_array(entries[f"{module}.{part}"]), from_float32(want[part], dtype))
    assert load_spec(read_config(made)).quantized_as("model.layers.0.mlp.down_proj") is None


def test_what_a_model_does_not_use_is_dropped(tmp_path):
    tied = {**CONFIG, "tie_word_embeddings": True}
    bits = np.zeros((160, 128), np.uint16)
    extra = {"lm_head.weight": bits, "model.layers.0.self_attn.rotary_emb.inv_freq": bits[0, :16], "model.layers.1.self_attn.rotary_emb.inv_freq": bits[0, :16]}
    made, _ = quantised(tmp_path, config=tied, extra=extra)
    assert not [name for name in read_folder(made) if "lm_head" in name or "inv_freq" in name]


def test_a_config_silent_about_tying_is_settled_by_the_tensors(tmp_path):
    silent = {name: value for name, value in CONFIG.items() if name != "tie_word_embeddings"}
    head = from_float32(np.ones((160, 128), np.float32), "BF16")
    made, _ = quantised(tmp_path, config=silent, extra={"lm_head.weight": head})
    assert read_config(made)["tie_word_embeddings"] is False and "lm_head.weight" in read_folder(made)


@pytest.mark.parametrize("said", [{}, {"tie_word_embeddings": None}])
def test_gemma_3_under_hugging_face_s_newer_names(tmp_path, said):
    weights = write_hugging_face_folder(tmp_path / "older", "gemma3")
    config = {name: value for name, value in read_config(tmp_path / "older").items() if name != "tie_word_embeddings"} | said
    weights["language_model.lm_head.weight"] = np.ones((160, 64), np.float32)
    newer = {name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head"): w for name, w in weights.items()}
    newer |= {"model.vision_tower.embeddings.weight": np.ones((4, 64), np.float32), "model.multi_modal_projector.norm.weight": np.ones(64, np.float32)}
    for folder in (tmp_path / "newer", tmp_path / "made"):
        folder.mkdir()
    (tmp_path / "newer" / "config.json").write_text(json.dumps(config))
    with Writer(tmp_path / "newer" / "model.safetensors", {name: ("F32", array.shape) for name, array in newer.items()}, {"format": "pt"}) as writer:
        for name, array in newer.items():
            writer.write(name, array)
    convert.quantize_folder(tmp_path / "newer", tmp_path / "made", quantize=False)
    made = read_folder(tmp_path / "made")
    assert made.keys() == weights.keys() and read_config(tmp_path / "made")["tie_word_embeddings"] is False
    for name, array in weights.items():
        np.testing.assert_array_equal(read_array(made[name]), array, err_msg=name)


def test_only_tokenizer_files_come_along(tmp_path):
    write_folder(tmp_path / "source")
    (tmp_path / "source" / "additional_chat_templates").mkdir()
    copied = ("tokenizer_config.json", "merges.txt", "chat_template.jinja", "spiece.model", "qwen.tiktoken", "additional_chat_templates/tool_use.jinja")
    for name in (*copied, "README.md", "pytorch_model.bin", "optimizer.pt"):
        (tmp_path / "source" / name).write_text(name)
    (tmp_path / "made").mkdir()
    convert.quantize_folder(tmp_path / "source", tmp_path / "made")
    made = {file.relative_to(tmp_path / "made").as_posix() for file in (tmp_path / "made").rglob("*") if file.is_file()}
    assert made == {"config.json", "model.safetensors", "tokenizer.json", *copied}


def test_several_files_become_one(tmp_path):
    write_folder(tmp_path / "one")
    (tmp_path / "two").mkdir()
    shutil.copy(tmp_path / "one" / "config.json", tmp_path / "two")
    entries, files = read_folder(tmp_path / "one"), {}
    for part in range(2):
        names = [name for i, name in enumerate(entries) if i % 2 == part]
        files |= {name: f"model-{part}.safetensors" for name in names}
        with Writer(tmp_path / "two" / f"model-{part}.safetensors", {name: ("BF16", entries[name].shape) for name in names}) as writer:
            for name in names:
                writer.write(name, read_array(entries[name]))
    (tmp_path / "two" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name in ("one", "two"):
        (tmp_path / f"made {name}").mkdir()
        convert.quantize_folder(tmp_path / name, tmp_path / f"made {name}")
    assert (tmp_path / "made one" / "model.safetensors").read_bytes() == (tmp_path / "made two" / "model.safetensors").read_bytes()


def test_no_whole_tensor_of_the_source_is_held(tmp_path):
    wide = {**CONFIG, "vocab_size": 120_000, "tie_word_embeddings": True}
    write_folder(tmp_path / "source", config=wide)
    (tmp_path / "made").mkdir()
    tracemalloc.start()
    convert.quantize_folder(tmp_path / "source", tmp_path / "made")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    table_bytes = 120_000 * 128 * 2
    packed_bytes = table_bytes / 4 + 2 * table_bytes / 64
    assert packed_bytes < peak_bytes < packed_bytes + 12 * convert.TILE_BYTES < 2 * table_bytes + packed_bytes


def refusal(tmp_path, **settings):
    shutil.rmtree(tmp_path / "source", ignore_errors=True)
    shutil.rmtree(tmp_path / "made", ignore_errors=True)
    with pytest.raises(UserError) as refused:
        quantised(tmp_path, **settings)
    assert not list((tmp_path / "made").glob("*.safetensors*"))
    return str(refused.value)


def test_folders_that_do_not_fit_their_config_are_refused(tmp_path):
    up = "model.layers.1.mlp.up_proj.weight"
    assert up in refusal(tmp_path, drop=[up])
    message = refusal(tmp_path, change={up: (90, 128)})
    assert up in message and "[90, 128]" in message and "[96, 128]" in message
    unknown = "model.layers.0.self_attn.q_norm.weight"
    assert f"\n  {unknown} in model.safetensors\n" in refusal(tmp_path, extra={unknown: np.zeros(32, np.uint16)})
    many = refusal(tmp_path, drop=[name for name in load_spec(CONFIG).tensors() if "layers" in name])
    assert "… and 16 more" in many and len(many) < 1500


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    write_folder(tmp_path / "source")
    entry = read_folder(tmp_path / "source")["model.layers.0.self_attn.v_proj.weight"]
    data = bytearray(entry.file.read_bytes())
    data[entry.start : entry.start + 2] = from_float32(np.array([np.nan], np.float32), "BF16").tobytes()
    entry.file.write_bytes(data)
    (tmp_path / "made").mkdir()
    with pytest.raises(UserError, match="self_attn.v_proj.weight.*not finite"):
        convert.quantize_folder(tmp_path / "source", tmp_path / "made")


def test_space_is_checked_first(tmp_path, monkeypatch):
    made, _ = quantised(tmp_path)
    needed = (made / "model.safetensors").stat().st_size
    free = [needed]  # the config and slack per tensor come on top
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, free[0]))
    assert "MB free" in refusal(tmp_path)
    free[0] = 2 * needed
    shutil.rmtree(tmp_path / "made")
    quantised(tmp_path)


@pytest.mark.parametrize("quantize", [True, False], ids=["4-bit", "as it is"])
@pytest.mark.parametrize("variant", ["llama", *FAMILY_VARIANTS])
def test_every_family_s_folder_becomes_what_mlx_lm_makes_of_it(tmp_path, variant, quantize):
    weights = write_hugging_face_folder(tmp_path / "source", variant)
    (tmp_path / "made").mkdir()
    convert.quantize_folder(tmp_path / "source", tmp_path / "made", quantize)
    made = read_folder(tmp_path / "made")
    check(load_spec(read_config(tmp_path / "made")), made)
    assert any(name.endswith(".scales") for name in made) == quantize
    if not quantize:
        assert made.keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_array_equal(read_array(made[name]), array, err_msg=name)
    if variant == "opt":  # mlx-lm has none
        return
    mx = pytest.importorskip("mlx.core")
    utils, tree_flatten = pytest.importorskip("mlx_lm.utils"), pytest.importorskip("mlx.utils").tree_flatten
    theirs, config = utils.load_model(tmp_path / "source")
    if quantize:
        theirs, _ = utils.quantize_model(theirs, config, 64, 4, quant_predicate=getattr(theirs, "quant_predicate", None))
    want, got = (dict(tree_flatten(model.parameters())) for model in (theirs, utils.load_model(tmp_path / "made")[0]))
    assert got.keys() == want.keys()
    assert not [name for name, array in want.items() if not mx.array_equal(got[name], array).item()]
