"""Random models load in mlx-lm, have the statistics of real ones, and real shapes have their real sizes."""

import collections
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models import VARIANTS, make_model, tiny_config, tool, variant_config

from mesp_mlx import reference
from mesp_mlx.errors import UserError
from mesp_mlx.model.spec import load_spec
from mesp_mlx.stream.safetensors import read_array, read_folder, to_float32

maker = tool("make_random_model")

# Parameters as their makers publish them, to the last weight.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-4b": 4_022_468_096,
    "gemma-2b": 2_506_172_416,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "phi-3-mini": 3_821_079_552,
    "smollm3-3b": 3_075_098_624,
    "olmo-2-1b": 1_484_916_736,
    "olmo-3-7b": 7_298_011_136,
    "granite-3.3-2b": 2_533_539_840,
    "glm-4-9b": 9_400_279_040,
    "command-r7b": 8_028_033_024,
    "starcoder2-3b": 3_030_371_328,
    "pythia-1.4b": 1_414_647_808,
    "gpt2": 124_439_808,
    "opt-1.3b": 1_315_758_080,
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.parametrize("shape", sorted(PARAMETERS))
def test_real_shapes_have_the_published_number_of_parameters(shape):
    assert sum(int(np.prod(tensor)) for tensor in load_spec(maker.SHAPES[shape]).tensors().values()) == PARAMETERS[shape]


def test_every_shape_is_counted():
    assert sorted(maker.SHAPES) == sorted(PARAMETERS)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_mlx_lm_loads_every_variant(tmp_path, variant):
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import load_model

    model, _ = load_model(make_model(tmp_path, variant_config(variant)))  # strict: no tensor missing, none left over
    logits = model(mx.array([[3, 1, 4, 1, 5, 9, 2, 6]]))
    assert logits.dtype == mx.float32
    assert 0.5 < mx.std(logits).item() < 2


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_spec_names_the_tensors_written(tmp_path, variant):
    config = variant_config(variant)
    entries, spec = read_folder(make_model(tmp_path, config, bits=None)), load_spec(config)
    assert {name: entry.shape for name, entry in entries.items()} == spec.tensors()


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (4, 64), (5, 32), (6, 128), (8, 32)])
def test_quantised_weights_have_mean_zero_and_the_deviation_of_real_ones(tmp_path, bits, group_size):
    folder = make_model(tmp_path, tiny_config("llama", hidden_size=256, intermediate_size=512), bits=bits, group_size=group_size)
    entries = read_folder(folder)
    for module, width in {"model.layers.0.mlp.up_proj": 256, "model.layers.1.mlp.down_proj": 512}.items():
        parts = {part: read_array(entries[f"{module}.{part}"]) for part in ("weight", "scales", "biases")}
        weight = reference.quantized.dequantize(parts | {"bits": bits, "group_size": group_size}, np.float32)
        assert weight.shape[1] == width
        assert np.std(weight) == pytest.approx(width**-0.5, rel=0.03)
        assert abs(np.mean(weight)) < 0.02 * width**-0.5


def test_single_modules_can_be_quantised_otherwise(tmp_path):
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import load_model

    own = {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}, "lm_head": False}
    folder = make_model(tmp_path, tiny_config("mistral", intermediate_size=128), group_size=64, quantization=own)
    model, config = load_model(folder)
    assert config["quantization"]["lm_head"] is False
    modules = dict(model.named_modules())
    first, second = modules["model.layers.0.mlp.down_proj"], modules["model.layers.1.mlp.down_proj"]
    assert (first.bits, first.group_size, second.bits, second.group_size) == (8, 32, 4, 64)
    assert modules["lm_head"].weight.dtype == mx.float32
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])))).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, None])
def test_half_precision_models_compute_in_it(tmp_path, dtype, bits):
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import load_model

    model, _ = load_model(make_model(tmp_path, tiny_config("qwen2"), dtype=dtype, bits=bits))
    logits = model(mx.array([[1, 2, 3]]))
    assert logits.dtype == getattr(mx, dtype) and mx.isfinite(logits).all().item()


def test_norms_and_biases_are_neither_one_nor_zero(tmp_path):
    entries = read_folder(make_model(tmp_path, tiny_config("qwen2"), bits=None, dtype="bfloat16"))
    norm, bias = (to_float32(read_array(entries[f"model.layers.0.{name}"]), "BF16") for name in ("input_layernorm.weight", "self_attn.q_proj.bias"))
    assert 0.5 < norm.min() < 0.95 < 1.05 < norm.max() < 1.5
    assert 0.05 < np.std(bias) < 0.2


def test_same_seed_same_bytes(tmp_path):
    files = [make_model(tmp_path / f"{i}", tiny_config("llama"), seed=seed) / "model.safetensors" for i, seed in enumerate([5, 5, 6])]
    first, again, other = (file.read_bytes() for file in files)
    assert first == again != other


def test_command_writes_a_real_shape_with_fewer_layers(tmp_path, capsys):
    out = tmp_path / "model"
    assert maker.main(["--shape", "smollm2-135m", "--layers", "2", "--dtype", "float16", str(out)]) == 0
    assert "smollm2-135m: " in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["quantization"]["group_size"], config["torch_dtype"]) == (2, 64, "float16")
    entries = read_folder(out)
    assert entries["model.embed_tokens.weight"].shape == (49152, 576 * 4 // 32)
    assert entries["model.embed_tokens.scales"].dtype == "F16"
    assert "model.layers.1.mlp.up_proj.weight" in entries and "model.layers.2.mlp.up_proj.weight" not in entries
    assert maker.main(["--shape", "smollm2-135m", str(out)]) == 2
    assert "holds a model already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "gpt-5"], "invalid choice"),
        (["--shape", "smollm2-135m", "--layers", "0"], "num_hidden_layers"),
        (["--shape", "smollm2-135m", "--layers", "two"], "invalid int value"),
        (["--shape", "smollm2-135m", "--bits", "7"], "invalid choice"),
        (["--shape", "smollm2-135m", "--seed", "-1"], "argument --seed: -1 is not a whole number, 0 or more"),
        (["--shape", "smollm2-135m", "--group-size", "128"], "not a multiple of the group size 128"),
    ],
)
def test_bad_arguments_end_with_code_2_and_leave_nothing(tmp_path, capsys, arguments, said):
    try:
        code = maker.main([*arguments, str(tmp_path / "out")])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(maker.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match="0.00 GB are free"):
        maker.make(tiny_config("llama"), tmp_path / "out", group_size=32)
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's high-water mark")
def test_memory_stays_near_the_largest_tensor(tmp_path):
    """A plain Qwen2.5-0.5B layer: the table has 272 MB in bfloat16, and float32 copies of it would take 545 MB more."""
    code = (
        "import importlib.util, sys; from mesp_mlx.memory.measure import process_peak_bytes\n"
        f"s = importlib.util.spec_from_file_location('m', {maker.__file__!r}); m = importlib.util.module_from_spec(s); s.loader.exec_module(m)\n"
        f"before = process_peak_bytes(); code = m.main(['--shape', 'qwen2.5-0.5b', '--layers', '1', '--quantize', 'none', {str(tmp_path)!r}])\n"
        "print(code, process_peak_bytes() - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code, used = result.stdout.split()[-2:]
    assert code == "0" and int(used) < 272e6 + 80e6
