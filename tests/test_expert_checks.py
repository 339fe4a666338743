"""check-gradients on mixtures of experts: it passes, and a fault planted in the router or in an expert is seen and named."""

from typing import Any

import pytest
from backends import each_backend, needs_mlx, ops
from models import make_model
from test_check_gradients import failed, looked_into, off
from test_model_experts import FAMILIES, config

from mesp_mlx import reference


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def folder(family: str):
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp(family), config(family), dtype="bfloat16")
        return made[family]

    return folder


@pytest.fixture(autouse=True)
def in_one_process(one_process):
    """Nothing is converted elsewhere, nor tokenised."""


@each_backend
@pytest.mark.parametrize("family", FAMILIES)
def test_passes(tiny, family, backend, tmp_path):
    code, found = looked_into(tiny(family), backend, tmp_path)
    assert (code, failed(found)) == (0, [])
    assert "experts" in [op["name"] for op in found["ops"]]


@each_backend
@pytest.mark.parametrize("fault", ["logits", "x", "p", "down"])
def test_a_fault_is_seen_and_named(tiny, fault, backend, tmp_path, monkeypatch):
    route_backward, backward = backend.experts.route_backward, backend.experts.backward

    def wrong(*arguments: Any, **named: Any) -> Any:
        dx, dp, pairs = backward(*arguments, **named)
        down = pairs["down"] and (off(pairs["down"][0]), pairs["down"][1])
        return (off(dx) if fault == "x" and dx is not None else dx), (off(dp) if fault == "p" else dp), pairs | ({"down": down} if fault == "down" else {})

    if fault == "logits":
        monkeypatch.setattr(backend.experts, "route_backward", lambda *arguments: off(route_backward(*arguments)))
    else:
        monkeypatch.setattr(backend.experts, "backward", wrong)
    code, found = looked_into(tiny("gpt_oss"), backend, tmp_path)
    assert code == 1 and "experts" in failed(found) and "attention" not in failed(found)


def test_first_layers_without_experts_leave_their_rows_empty(tmp_path, capsys):
    """The comparison with float64 is of those alone."""
    folder = make_model(tmp_path / "model", config("qwen3_moe") | {"mlp_only_layers": [0]}, dtype="bfloat16")
    code, found = looked_into(folder, reference, tmp_path, layers=1)
    assert code == 0 and "gate.lora_a" in found["comparisons"][0]["projections"] and "gate.lora_a" not in found["comparisons"][-1]["projections"]
    assert "gate A" in capsys.readouterr().out


@needs_mlx
def test_in_16_bits_the_whole_is_not_compared(tiny, tmp_path, capsys):
    """Tokens are routed otherwise than in float32 there: neither gradient is that one's, and which is nearer is chance."""
    code, found = looked_into(tiny("qwen3_moe"), ops, tmp_path, dtype="bfloat16")
    assert (code, failed(found)) == (0, []) and "bfloat16" not in found["verdict"]
    assert {comparison["dtype"] for comparison in found["comparisons"]} == {"float32"}
    assert {op["dtype"] for op in found["ops"]} == {"float32", "bfloat16"} and "ops and stages alone" in capsys.readouterr().out
