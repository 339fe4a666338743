"""check-gradients passes on every family, and it can fail: an error planted in any backward is seen and named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import each_backend, mx, needs_mlx, ops
from models import FAMILY_VARIANTS, VARIANTS, make_model, variant_config
from runs import chat_rows, command, data_folder, tiny_model

from mesp_mlx import adapter as adapters
from mesp_mlx import check_gradients, model_checks, reference
from mesp_mlx.engine import whole_graph
from mesp_mlx.model.attention import AttentionStage
from mesp_mlx.model.head import Head
from mesp_mlx.model.mlp import MLPStage
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.op_checks import FLOORS, SLACK, Check, bound, error
from mesp_mlx.stream.safetensors import read_folder

OPS = ["quantized", "rms_norm", "rope", "attention", "lora_linear", "gated_mlp", "cross_entropy"]
STAGES = ["attention stage", "MLP stage", "head"]
SEQ = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folders of the variants' models, made when asked for."""
    made = {}

    def folder(variant: str) -> Path:
        if variant not in made:
            made[variant] = make_model(tmp_path_factory.mktemp(variant), variant_config(variant), dtype="bfloat16")
        return made[variant]

    return folder


@pytest.fixture(autouse=True)
def in_one_process(one_process):
    """Nothing is converted elsewhere, nor tokenised."""


def looked_into(folder: Path, backend: Any, tmp_path: Path, layers: int = 1, dtype: str | None = None, seed: int = 0) -> tuple[int, dict[str, Any]]:
    """The exit code and what was written."""
    file = tmp_path / "found.json"
    code = check_gradients.run({"model": str(folder), "rank": 4, "backend": backend.arrays.name, "seed": seed}, SEQ, layers, str(file), dtype)
    return code, json.loads(file.read_text())


def failed(found: dict[str, Any]) -> list[str]:
    return [op["name"] for op in found["ops"] if not op["passed"]]


def off(array: Any, by: float = 1.01) -> Any:
    return array * by


@each_backend
@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_on_every_family(tiny, variant, backend, tmp_path, capsys):
    code, found = looked_into(tiny(variant), backend, tmp_path)
    assert code == 0 and found["exact"] and found["verdict"].startswith("the gradients are exact: worst error ")
    assert [op["name"] for op in found["ops"]] == OPS + STAGES
    assert [(each["truth"], each["layers"]) for each in found["comparisons"]] == [("autodiff by layer", 2), ("whole autodiff", 2), ("NumPy in float64", 1)]
    for each in found["comparisons"]:
        assert each["passed"] and not each["settled"] and each["bound"] == 1e-4
        assert len(each["errors"]) == 14 * each["layers"] and 0 < max(each["errors"].values()) < 1e-5
        for name, row in each["projections"].items():
            part = [value for tensor, value in each["errors"].items() if tensor.endswith(name)]
            assert len(part) == each["layers"] and row == {"worst": max(part), "median": pytest.approx(np.median(part))}
    assert all(0 <= value < 1e-5 for op in found["ops"] for value in (*op["errors"].values(), *op["autodiff"].values()))
    printed = capsys.readouterr().out
    assert found["verdict"] in printed and "down_proj B" in printed and "WRONG" not in printed and "\x1b" not in printed


PLANTS: dict[str, tuple[str, Any]] = {  # the function of each op, and what is done to what it gives
    "quantized": ("matmul_transposed", off),
    "rms_norm": ("backward", off),
    "rope": ("backward", off),
    "attention": ("backward", lambda given: (given[0], off(given[1]), given[2])),
    "lora_linear": ("backward", lambda given: (given[0], given[1] and (off(given[1][0]), given[1][1]))),
    "gated_mlp": ("backward", lambda given: (given[0], given[1] | {"up": (given[1]["up"][0], off(given[1]["up"][1]))})),
    "cross_entropy": ("finish", lambda given: (given[0], off(given[1]))),
}


def plant(monkeypatch, holder: Any, name: str, change: Any) -> None:
    """Have a function give what `change` makes of its result and its arguments."""
    true = getattr(holder, name)
    monkeypatch.setattr(holder, name, lambda *given, **named: change(true(*given, **named), *given))


@each_backend
@pytest.mark.parametrize("op", PLANTS)
def test_an_error_in_an_op_is_named(tiny, backend, op, tmp_path, monkeypatch, capsys):
    function, change = PLANTS[op]
    plant(monkeypatch, getattr(backend, op), function, lambda result, *_: change(result))
    code, found = looked_into(tiny("llama"), backend, tmp_path)
    assert code == 1 and not found["exact"]
    assert failed(found)[0] == op and "WRONG" in capsys.readouterr().out
    assert found["verdict"].startswith(f"NOT exact: the backward of {op} is off by ")
    culprit = found["ops"][OPS.index(op)]
    assert max(culprit["errors"].values()) == pytest.approx(0.01, rel=0.05) and max(culprit["autodiff"].values()) < 1e-5
    assert set(failed(found)) <= {op, "lora_linear", "gated_mlp", "cross_entropy", *STAGES}  # none below it, and none that doesn't use it


@each_backend
@pytest.mark.parametrize(
    ("function", "dims", "wrong"),
    [
        ("matmul_transposed", (64, None), {"dx of layers.0.self_attn.q_proj", "dx of layers.0.mlp.down_proj"}),
        ("matmul", (32, None), {"y of layers.0.self_attn.k_proj"}),
        ("dequantize", (None, 96), {"y of layers.0.mlp.down_proj", "dx of layers.0.mlp.down_proj", "W of layers.0.mlp.down_proj"}),
    ],
)
def test_an_error_with_some_weights_that_every_autodiff_shares_is_named(tiny, backend, function, dims, wrong, tmp_path, monkeypatch):
    """On NumPy the float64 walk shares it as well."""

    def planted(result: Any, *given: Any) -> Any:
        shape = backend.quantized.shape(next(part for part in given if isinstance(part, dict)))
        return off(result, 1.5) if all(wanted in (None, size) for wanted, size in zip(dims, shape, strict=True)) else result

    plant(monkeypatch, backend.quantized, function, planted)
    code, found = looked_into(tiny("llama"), backend, tmp_path)
    errors = found["ops"][0]["errors"]
    assert code == 1 and failed(found)[0] == "quantized" and found["verdict"].startswith("NOT exact: the backward of quantized is off by 5.0e-01")
    assert len(errors) == 12 and {name for name, value in errors.items() if value > 1e-5} == wrong
    assert max(found["ops"][0]["autodiff"].values()) < 1e-5


@each_backend
def test_linears_quantised_otherwise_in_other_layers_are_checked(backend, tmp_path, monkeypatch):
    settings = {"model.layers.1.mlp.up_proj": {"bits": 6, "group_size": 32}, "model.layers.1.self_attn.o_proj": False}
    model = make_model(tmp_path / "model", variant_config("llama-biases"), dtype="bfloat16", quantization=settings)
    assert looked_into(model, backend, tmp_path)[0] == 0
    plant(monkeypatch, backend.quantized, "matmul_transposed", lambda dy, _, linear: off(dy) if linear.get("bits") == 6 else dy)
    code, found = looked_into(model, backend, tmp_path)
    errors = found["ops"][0]["errors"]
    assert code == 1 and failed(found) == ["quantized"] and len(errors) == 18
    assert [name for name, value in errors.items() if value > 1e-5] == ["dx of layers.1.mlp.up_proj"]
    assert "W of layers.1.self_attn.o_proj" in errors


def drop_residual(result: Any, stage: Any, w: Any, adapter: Any, state: Any, kept: Any, dstate: Any, *_: Any) -> Any:
    return ({"x": result[0]["x"] - dstate["x"]} if result[0] else {}), result[1]


@each_backend
@pytest.mark.parametrize(("stage", "name"), [(AttentionStage, "attention stage"), (MLPStage, "MLP stage")])
def test_an_error_in_a_stage_is_named(tiny, backend, stage, name, tmp_path, monkeypatch):
    plant(monkeypatch, stage, "backward", drop_residual)
    code, found = looked_into(tiny("qwen3"), backend, tmp_path)
    assert code == 1 and failed(found) == [name]
    assert found["verdict"].startswith(f"NOT exact: the backward of {name} is off by ")


@each_backend
def test_an_error_in_the_head_is_named(tiny, backend, tmp_path, monkeypatch):
    """Where the loops that share it agree."""
    plant(monkeypatch, Head, "loss", lambda result, *_: (result[0], [{"x": off(state["x"])} for state in result[1]]))
    code, found = looked_into(tiny("llama"), backend, tmp_path)
    by_layer, whole, exact = found["comparisons"]
    assert code == 1 and failed(found) == ["head"]
    assert by_layer["passed"] and not whole["passed"] and not exact["passed"]


@each_backend
def test_an_error_of_another_layer_is_seen_by_the_loop(tiny, backend, tmp_path, monkeypatch):
    def above(result: Any, stage: Any, *_: Any) -> Any:
        return result[0], {name: gradient if stage.layer == 0 else off(gradient) for name, gradient in result[1].items()}

    plant(monkeypatch, MLPStage, "backward", above)
    code, found = looked_into(tiny("llama"), backend, tmp_path)
    assert code == 1 and not failed(found)
    assert found["verdict"].startswith("NOT exact: model.layers.1.mlp.") and "each op and stage of the first layer passes by itself" in found["verdict"]
    last = found["comparisons"][-1]  # float32 gradients that differ are judged by float64
    assert last["truth"] == "NumPy in float64" and last["layers"] == 2 and not last["passed"] and max(last["autodiff"].values()) < 1e-5


@each_backend
def test_the_norms_of_heads_are_checked(tiny, backend, tmp_path, monkeypatch):
    plant(monkeypatch, backend.rms_norm, "backward", lambda dx, x, *_: off(dx) if len(x.shape) == 4 else dx)
    code, found = looked_into(tiny("qwen3"), backend, tmp_path)
    errors = found["ops"][1]["errors"]
    assert code == 1 and failed(found) == ["rms_norm", "attention stage"]
    assert errors["x"] < 1e-5 and errors["q"] > 1e-3 and errors["k"] > 1e-3


@each_backend
def test_windows_of_other_layers_are_checked(tiny, backend, tmp_path, monkeypatch):
    """The first layer of this one sees everything."""
    plant(monkeypatch, backend.attention, "backward", lambda given, *rest: tuple(map(off, given)) if rest[5:] and rest[5] else given)
    code, found = looked_into(tiny("mistral-sliding"), backend, tmp_path)
    errors = found["ops"][3]["errors"]
    assert code == 1 and failed(found) == ["attention"]
    assert errors["q"] < 1e-5 and errors["q (window 5)"] > 1e-3


@each_backend
def test_nan_fails(tiny, backend, tmp_path, monkeypatch, capsys):
    plant(monkeypatch, backend.rope, "backward", lambda dx, *_: dx * float("nan"))
    code, found = looked_into(tiny("llama"), backend, tmp_path)
    assert code == 1 and failed(found)[0] == "rope" and found["ops"][2]["errors"] == {"x": None}
    assert not found["comparisons"][0]["passed"] and None in found["comparisons"][0]["errors"].values()


@each_backend
def test_an_autodiff_that_is_off_is_no_judge(tiny, backend, tmp_path, monkeypatch):
    """As whole logits are on MLX's CPU device: float64 then walks the whole model."""
    true = whole_graph.loss_and_gradients

    def coarse(model: Any, store: Any, adapter: Any, batches: Any, sink: Any, **rest: Any) -> float:
        between: Any = SimpleNamespace(check=sink.check, put=lambda gradients: sink.put({name: off(gradient, 1.003) for name, gradient in gradients.items()}))
        return true(model, store, adapter, batches, between, **rest)

    monkeypatch.setattr(whole_graph, "loss_and_gradients", coarse)
    code, found = looked_into(tiny("llama"), backend, tmp_path)
    _, whole, _, last = found["comparisons"]
    assert code == 0 and whole["settled"] and max(whole["errors"].values()) == pytest.approx(0.003, rel=0.05)
    assert last["truth"] == "NumPy in float64" and last["layers"] == 2
    assert max(last["errors"].values()) < 1e-5 and max(last["whole"].values()) == pytest.approx(0.003, rel=0.05)


@each_backend
def test_whole_autodiff_is_left_out_where_it_does_not_fit(tiny, backend, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_checks, "available_bytes", lambda: 100_000)
    code, found = looked_into(tiny("llama"), backend, tmp_path, layers=9)
    assert code == 0 and [(each["truth"], each["layers"]) for each in found["comparisons"]] == [("autodiff by layer", 2), ("NumPy in float64", 2)]
    assert "whole autodiff is left out: it may need " in capsys.readouterr().out


def subject(folder: Path, backend: Any) -> model_checks.Subject:
    spec = load_spec(read_config(folder))
    row, adapter = check_gradients._random_row(spec, SEQ, 0), check_gradients._random_adapter(spec, 4, 0)
    return model_checks.Subject(spec, read_folder(folder), backend, row, adapter)


@needs_mlx
def test_room_for_whole_autodiff(tiny):
    """What it takes is within what was reckoned, and not far below."""
    found = subject(tiny("llama"), ops)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found.gradients("backprop")
    assert 0.3 < (mx.get_peak_memory() - before) / model_checks.whole_graph_bytes(found) <= 1


@each_backend
@pytest.mark.parametrize("variant", FAMILY_VARIANTS)
def test_passes_on_families_with_layers_of_their_own(tiny, variant, backend, tmp_path):
    code, found = looked_into(tiny(variant), backend, tmp_path)
    assert code == 0 and found["exact"], found["verdict"]
    spec = load_spec(read_config(tiny(variant)))
    ops = ["quantized", f"{spec.norm}_norm", *(["rope"] if spec.ropes[0] else []), "attention", "lora_linear", "gated_mlp" if spec.gated else "mlp"]
    assert [op["name"] for op in found["ops"]] == [*ops, "cross_entropy", *STAGES]
    for each in found["comparisons"]:
        assert each["passed"] and each["bound"] == 1e-4 and 0 < max(each["errors"].values()) < 3e-5


def test_the_adapter_hides_nothing(tiny):
    found = subject(tiny("llama"), reference)
    start = adapters.initialise(found.spec, adapters.choose_modules(found.spec), 4, 0, reference)
    assert len(found.adapter) == 28 and found.adapter.keys() == start.keys()
    for name, array in found.adapter.items():
        if name.endswith("lora_a"):
            size = np.abs(array).max()
            assert np.array_equal(array, start[name])
            assert 0.5 < np.abs(found.adapter[f"{name[:-1]}b"]).max() / (0.1 * size) <= 1.1


@needs_mlx
@pytest.mark.parametrize("variant", ["qwen3", "mistral-sliding"])
def test_sixteen_bits_may_be_off_by_twice_what_autodiff_is(tiny, variant, tmp_path):
    code, found = looked_into(tiny(variant), ops, tmp_path, dtype="bfloat16")
    assert code == 0 and found["verdict"].endswith(" in bfloat16, within 2 x of autodiff's error") and found["dtype"] == "bfloat16"
    assert [op["dtype"] for op in found["ops"]] == ["float32"] * 10 + ["bfloat16"] * 10
    low = found["comparisons"][1]
    assert low["dtype"] == "bfloat16" and low["bound"] == 2 * max(low["autodiff"].values())
    assert 1e-3 < max(low["errors"].values()) <= low["bound"] < 0.3
    assert all(max(each["errors"].values()) < 1e-5 for each in found["comparisons"] if each["dtype"] == "float32")


@needs_mlx
def test_an_error_in_sixteen_bits_alone_is_named(tiny, tmp_path, monkeypatch):
    plant(monkeypatch, ops.rms_norm, "backward", lambda dx, x, *_: off(dx, 1.05) if x.dtype == mx.bfloat16 else dx)
    code, found = looked_into(tiny("llama"), ops, tmp_path, dtype="bfloat16")
    assert code == 1 and found["verdict"].startswith("NOT exact: the backward of rms_norm is off by ")
    assert [op["dtype"] for op in found["ops"] if not op["passed"]][0] == "bfloat16"


def test_bounds():
    assert bound("float32", None) == bound("float32", {"x": 1e-6}) == bound("float32", {"x": float("inf")}) == 1e-4
    assert bound("float32", {"x": 2e-4}) == SLACK * 2e-4 and bound("float32", {"x": 1.0}) == 1e-3 and bound("float32", {"x": 1.0}, 2e-3) == 2e-3
    assert bound("bfloat16", {"x": 0.01, "y": 0.02}) == SLACK * 0.02 and bound("float16", {"x": 0.0}) == FLOORS["float16"] == 2.0**-11
    assert not Check("op", "float32", {"x": 1.1e-4}, {"x": 1e-6}).passed and Check("op", "float32", {"x": 0.9e-4}, {"x": 1e-6}).passed
    one = np.ones(2)
    assert error(one, one) == 0 and error(one * 1.5, one) == 0.5 and error(one[:1], one) == float("inf")
    assert error(np.array([1, np.nan]), one) == error(one, np.array([1, np.nan])) == float("inf")
    assert error(np.full(2, 1e-9), np.zeros(2), largest=1.0) == pytest.approx(1e-3)


@each_backend
def test_rows_of_data(backend, tmp_path, capsys):
    model, data, file = tiny_model(tmp_path / "model"), data_folder(tmp_path / "data", chat_rows(6)), tmp_path / "found.json"
    given = ["check-gradients", "--model", str(model), "--data", str(data), "--backend", backend.arrays.name, "--json", str(file)]
    assert command(*given, "--seq", "32") == 0
    found = json.loads(file.read_text())
    assert found["positions"] == 31 and 0 < found["supervised"] < 31 and found["exact"] and found["data"] == str(data)
    assert command(*given, "--seq", "120") == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]  # what the tokenizer's library has to say comes before
    assert message.startswith(f"error: --data {data}: no row has 120 tokens") and message.endswith("Change --seq.")


def test_what_the_user_can_change(tiny, tmp_path, capsys):
    given = ["check-gradients", "--model", str(tiny("llama")), "--backend", "numpy"]
    nowhere, choices = tmp_path / "none" / "found.json", "expected '4' or 'none'"
    for more, message in {
        ("--backend", "bogus"): "--backend: found 'bogus', expected 'auto', 'mlx' or 'numpy'",
        ("--quantize", "8"): f"--quantize: found '8', {choices}",
        ("--quantize", "bogus"): f"--quantize: found 'bogus', {choices}",
        ("--seed", "99999999999999999999"): "--seed: found 99999999999999999999, expected less than 18446744073709551616",
        ("--rank", "0"): "--rank: found 0, expected at least 1",
        ("--dtype", "float64"): "--dtype: found 'float64', expected float32, bfloat16, float16",
        ("--dtype", "bfloat16"): "--dtype bfloat16: NumPy computes in float32. Leave it out, or choose --backend mlx.",
        ("--json", str(tmp_path)): f"--json {tmp_path}: it is a folder. Choose a file.",
        ("--seq", "129"): "--seq is 129, but the model was made for 128 positions. Lower it.",
        ("--json", str(nowhere)): f"--json {nowhere}: its folder does not exist. Make it, or choose another file.",
        ("--data", str(nowhere)): None,
        ("--seq", "3"): None,
    }.items():
        assert command(*given, *more) == 2
        printed = capsys.readouterr().err.strip()
        assert printed.startswith("error: ") and message in (None, printed.removeprefix("error: "))


def test_exit_code_of_a_failure(tiny, monkeypatch, capsys):
    plant(monkeypatch, reference.rope, "backward", lambda dx, *_: off(dx))
    assert command("check-gradients", "--model", str(tiny("llama")), "--backend", "numpy", "--seq", "16", "--layers", "1") == 1
    assert "NOT exact: the backward of rope" in capsys.readouterr().out


@needs_mlx
def test_dtype_from_the_command_line(tiny, capsys):
    given = ["--seq", "16", "--layers", "1", "--dtype", "float16"]
    assert command("check-gradients", "--model", str(tiny("llama")), "--backend", "mlx", *given) == 0
    printed = capsys.readouterr().out
    assert "dtype float16" in printed and "in float16, within 2 x of autodiff's error" in printed
