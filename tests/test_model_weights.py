"""Weights that do not fit config.json are refused by name before anything is computed."""

import dataclasses
from pathlib import Path

import pytest
from models import VARIANTS, make_model, tiny_config, variant_config

from mesp_mlx.errors import UserError
from mesp_mlx.model import weights
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.stream.safetensors import Entry, read_folder

QUANTIZATION = {"bits": 4, "group_size": 32, "model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 32}, "lm_head": False}
CONFIG = tiny_config("llama", quantization=QUANTIZATION, tie_word_embeddings=False)
FILE = Path("folder/model.safetensors")


def entries_of(config) -> dict[str, Entry]:
    """The entries that a file of that config has."""
    spec, entries = load_spec(config), {}
    for name, shape in spec.tensors().items():
        module = name.removesuffix(".weight")
        setting = spec.quantized_as(module) if len(shape) == 2 else None
        if setting is None:
            entries[name] = Entry(name, FILE, "BF16", shape, 0, 0)
            continue
        bits, group, _ = setting
        entries[name] = Entry(name, FILE, "U32", (shape[0], shape[1] * bits // 32), 0, 0)
        entries |= {f"{module}.{part}": Entry(f"{module}.{part}", FILE, "F16", (shape[0], shape[1] // group), 0, 0) for part in ("scales", "biases")}
    return entries


def refusal(entries, config=CONFIG) -> str:
    with pytest.raises(UserError) as caught:
        weights.check(load_spec(config), entries)
    return str(caught.value)


def changed(name, **fields) -> dict[str, Entry]:
    entries = entries_of(CONFIG)
    return entries | {name: dataclasses.replace(entries[name], **fields)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_fits(variant):
    config = variant_config(variant)
    weights.check(load_spec(config), entries_of(config))
    weights.check(load_spec(config | {"quantization": {"bits": 6, "group_size": 32}}), entries_of(config | {"quantization": {"bits": 6, "group_size": 32}}))


@pytest.mark.parametrize("bits", [None, 3, 8])
def test_files_on_disk_fit(tmp_path, bits):
    folder = make_model(tmp_path, tiny_config("qwen3"), bits=bits, dtype="bfloat16")
    weights.check(load_spec(read_config(folder)), read_folder(folder))


def test_tensors_that_are_not_needed_do_no_harm():
    extra = Entry("model.layers.0.self_attn.rotary_emb.inv_freq", FILE, "F32", (8,), 0, 0)
    weights.check(load_spec(CONFIG), entries_of(CONFIG) | {extra.name: extra})


def test_what_mlx_lm_drops_is_dropped_and_what_it_refuses_is_refused():
    bias = Entry("model.layers.0.self_attn.q_proj.bias", FILE, "F32", (64,), 0, 0)
    scales = Entry("model.norm.scales", FILE, "F32", (64,), 0, 0)
    assert refusal(entries_of(CONFIG) | {bias.name: bias, scales.name: scales}).splitlines() == [
        "reading weights in folder: 2 tensors are no part of the llama model that config.json describes:",
        f"  {bias.name} in model.safetensors",
        "  model.norm.scales in model.safetensors",
        "Download or convert the model again.",
    ]
    tied = CONFIG | {"tie_word_embeddings": True}
    weights.check(load_spec(tied), entries_of(CONFIG))
    head = entries_of(CONFIG) | {"lm_head.scales": Entry("lm_head.scales", FILE, "F32", (160, 2), 0, 0)}
    assert "  lm_head.scales in model.safetensors" in refusal(head, tied)


def test_missing_tensors_are_listed():
    entries = entries_of(CONFIG)
    gone = ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"]
    left = {name: entry for name, entry in entries.items() if name not in gone}
    assert refusal(left).splitlines() == [
        "reading weights in folder: 3 tensors that a llama model needs are missing:",
        *(f"  {name}" for name in load_spec(CONFIG).tensors() if name in gone),
    ]


def test_a_long_list_is_cut():
    assert refusal({"model.norm.weight": entries_of(CONFIG)["model.norm.weight"]}).splitlines() == [
        "reading weights in folder: 20 tensors that a llama model needs are missing:",
        *(f"  {name}" for name in list(load_spec(CONFIG).tensors())[:8]),
        "  … and 12 more",
    ]


DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "fields", "line"),
    [
        ("model.norm.weight", {"shape": (32,)}, "model.norm.weight in model.safetensors: BF16 [32], expected F32/F16/BF16 [64]"),
        ("model.norm.weight", {"dtype": "I32"}, "model.norm.weight in model.safetensors: I32 [64], expected F32/F16/BF16 [64]"),
        ("lm_head.weight", {"shape": (64, 160)}, "lm_head.weight in model.safetensors: BF16 [64, 160], expected F32/F16/BF16 [160, 64]"),
        (
            "lm_head.weight",
            {"dtype": "U32", "shape": (160, 8)},
            "lm_head.weight in model.safetensors: U32 [160, 8], expected F32/F16/BF16 [160, 64] (packed without scales?)",
        ),
        (f"{UP}.weight", {"shape": (96, 16)}, f"{UP}.weight in model.safetensors: U32 [96, 16], expected U32 [96, 8] for 4 bits in groups of 32"),
        (f"{UP}.weight", {"dtype": "I32"}, f"{UP}.weight in model.safetensors: I32 [96, 8], expected U32 [96, 8] for 4 bits in groups of 32"),
        (f"{DOWN}.weight", {"shape": (64, 12)}, f"{DOWN}.weight in model.safetensors: U32 [64, 12], expected U32 [64, 24] for 8 bits in groups of 32"),
        (f"{DOWN}.scales", {"shape": (64, 2)}, f"{DOWN}.scales in model.safetensors: F16 [64, 2], expected F32/F16/BF16 [64, 3] for 8 bits in groups of 32"),
        (f"{DOWN}.biases", {"dtype": "U8"}, f"{DOWN}.biases in model.safetensors: U8 [64, 3], expected F32/F16/BF16 [64, 3] for 8 bits in groups of 32"),
    ],
)
def test_a_tensor_that_does_not_fit(name, fields, line):
    said = refusal(changed(name, **fields)).splitlines()
    assert said == ["reading weights: 1 tensors do not fit config.json:", f"  {line}", "Download or convert the model again."]


def test_packed_words_need_both_their_tables():
    entries = entries_of(CONFIG)
    del entries[f"{UP}.biases"]
    assert f"  {UP}.biases in model.safetensors: missing, expected F32/F16/BF16 [96, 2]" in refusal(entries)
    del entries[f"{UP}.scales"]
    assert f"  {UP}.weight in model.safetensors: U32 [96, 8], expected F32/F16/BF16 [96, 64] (packed without scales?)" in refusal(entries)


def test_a_quantised_module_that_config_json_does_not_describe():
    config = CONFIG | {"quantization": {**QUANTIZATION, DOWN: False}}
    said = refusal(entries_of(CONFIG), config)
    assert f"  {DOWN}.weight in model.safetensors: has scales, but config.json's quantization does not say how it is quantised" in said


def test_groups_that_do_not_divide_a_row():
    config = CONFIG | {"quantization": {**QUANTIZATION, DOWN: {"bits": 8, "group_size": 64}}}
    assert f"  {DOWN}.weight in model.safetensors: rows of 96 do not divide into groups of 64" in refusal(entries_of(CONFIG), config)


def test_a_module_left_plain_may_be_so():
    """A module that the config would quantise but whose file holds it plain: mlx-lm loads it plain too."""
    entries = {name: entry for name, entry in entries_of(CONFIG).items() if not name.startswith(f"{UP}.")}
    entries[f"{UP}.weight"] = Entry(f"{UP}.weight", FILE, "F32", (96, 64), 0, 0)
    weights.check(load_spec(CONFIG), entries)


def test_every_wrong_tensor_is_listed():
    entries = {name: dataclasses.replace(entry, dtype="I8") for name, entry in entries_of(CONFIG).items()}
    said = refusal(entries).splitlines()
    assert said[0] == "reading weights: 21 tensors do not fit config.json:" and said[-2:] == ["  … and 13 more", "Download or convert the model again."]
