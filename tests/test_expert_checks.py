"""check-gradients on mixtures of experts: it passes, and a fault planted in the router or in an expert is seen and named."""

from typing import Any

import pytest
from backends import each_backend, needs_mlx, ops
from models import make_model
from test_check_gradients import failed, looked_into, off
from test_model_experts import FAMILIES, config


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


@needs_mlx
def test_passes_in_bfloat16(tiny, tmp_path):
    code, found = looked_into(tiny("qwen3_moe"), ops, tmp_path, dtype="bfloat16")
    assert (code, failed(found)) == (0, [])
