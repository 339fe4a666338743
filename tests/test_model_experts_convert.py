"""Hugging Face folders of mixtures of experts: single experts' tensors stacked, quantised as mlx-lm quantises them."""

import json
from typing import Any

import numpy as np
import pytest
from test_model_experts import config

from mesp_mlx.errors import UserError
from mesp_mlx.model import convert
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.stream.safetensors import Writer, from_float32, read_array, read_folder

SINGLES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_folder(folder, family: str, missing: str = "", cut: str = "") -> dict[str, np.ndarray]:
    """A folder as Hugging Face has it, and its tensors; widths that groups of 64 divide."""
    own = config(family, **{"moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size": 64, "torch_dtype": "bfloat16"})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(own))
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in load_spec(own).tensors().items():
        values = from_float32(rng.normal(scale=0.3, size=shape).astype(np.float32), "BF16")
        if len(shape) < 3:
            tensors[name] = values
            continue
        block, part = name.split(".switch_mlp.")
        part = SINGLES[part.removesuffix(".weight")] + ".weight" if family == "mixtral" else part
        tensors |= {f"{block}.experts.{expert}.{part}": values[expert] for expert in range(shape[0])}
    tensors.pop(missing, None)
    tensors |= {cut: tensors[cut][1:]} if cut else {}
    with Writer(folder / "model.safetensors", {name: ("BF16", value.shape) for name, value in tensors.items()}, {"format": "pt"}) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    return tensors


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
def test_becomes_what_mlx_lm_makes_of_it(tmp_path, family):
    mx = pytest.importorskip("mlx.core")
    utils, tree_flatten = pytest.importorskip("mlx_lm.utils"), pytest.importorskip("mlx.utils").tree_flatten
    write_folder(tmp_path / "source", family)
    (tmp_path / "made").mkdir()
    convert.quantize_folder(tmp_path / "source", tmp_path / "made")
    dense, own = utils.load_model(tmp_path / "source")
    theirs, _ = utils.quantize_model(dense, own, 64, 4, quant_predicate=getattr(dense, "quant_predicate", None))
    ours: Any = utils.load_model(tmp_path / "made")[0]
    want, got = dict(tree_flatten(theirs.parameters())), dict(tree_flatten(ours.parameters()))
    assert got.keys() == want.keys() and any("switch_mlp" in name and name.endswith("scales") for name in got)
    for name, array in want.items():
        assert got[name].dtype == array.dtype and mx.array_equal(got[name], array).item(), name
    bits = {setting["bits"] for setting in read_config(tmp_path / "made")["quantization"].values() if isinstance(setting, dict)}
    assert bits == ({8} if family == "qwen3_moe" else set())


def test_without_quantisation_experts_are_stacked_as_they_are(tmp_path):
    tensors = write_folder(tmp_path / "source", "qwen3_moe")
    (tmp_path / "made").mkdir()
    convert.quantize_folder(tmp_path / "source", tmp_path / "made", quantize=False)
    made = read_folder(tmp_path / "made")
    assert made.keys() == load_spec(read_config(tmp_path / "source")).tensors().keys()
    up = read_array(made["model.layers.1.mlp.switch_mlp.up_proj.weight"])
    np.testing.assert_array_equal(up, np.stack([tensors[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"] for expert in range(6)]))


@pytest.mark.parametrize("change", ["missing", "cut"])
@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "mlp.experts.3.up_proj"), ("mixtral", "block_sparse_moe.experts.0.w2")])
def test_an_expert_that_is_missing_or_unlike_the_others_is_named(tmp_path, family, name, change):
    name = f"model.layers.1.{name}.weight"
    write_folder(tmp_path / "source", family, **{change: name})
    (tmp_path / "made").mkdir()
    with pytest.raises(UserError) as refused:
        convert.quantize_folder(tmp_path / "source", tmp_path / "made")
    experts = load_spec(read_config(tmp_path / "source")).experts[1]
    assert experts and f"1 of {experts.count} experts' tensors are missing, or not BF16 [64, 64] as expected:\n  {name}\n" in str(refused.value)
