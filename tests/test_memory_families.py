"""Plans of every structured family against what a step of it takes: the allocator's peak, what is read and evaluated; layers of different kinds."""

import dataclasses
import gc
from typing import Any

import pytest
from backends import needs_mlx
from models import FAMILY_VARIANTS, make_model, tiny_config
from test_memory_plan import step

from mesp_mlx import adapter as adapters
from mesp_mlx import reference
from mesp_mlx.memory import choose
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory.plan import Workload
from mesp_mlx.memory.strategy import ALL, Strategy
from mesp_mlx.model.spec import load_spec, read_config

WITHIN, EXPERTS_WITHIN, TRIES = 0.05, 0.12, 3  # of the measured peak; plans let all tokens choose one expert
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 64,
    "max_position_embeddings": 1024, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 1024, "n_ctx": 1024, "ffn_dim": 768,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_key_value_heads": 4, "intermediate_size": 1024},
    "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64},
    "cohere2": {"sliding_window": 64},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0, 2],
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}  # fmt: skip
NAMES = [name for name in [*FAMILY_VARIANTS, *EXPERTS] if name not in ("gemma3", "phi3-longrope")]  # gemma3 is gemma3_text inside; longrope's are of its size
QUANTIZED = {"quantization": {"bits": 4, "group_size": 64}}
QUICK = ("gemma2", "gpt_neox", "qwen3_moe")
STRATEGIES = {
    "default": Strategy(),
    "least": None,
    "all": Strategy(keep="all", resident=ALL),
    "attention": Strategy(keep="attention"),
    "inputs": Strategy(keep="inputs", checkpoints="file"),
    "states in the file": Strategy(states="file", group_tokens=1),
}


def grid(*always: str) -> list[Any]:
    """Families by strategies: some by `always` as a rule, all where the grid is asked for."""
    quick = {(name, strategy) for name in QUICK for strategy in always}
    pairs = [(name, strategy) for name in NAMES for strategy in STRATEGIES]
    return [pytest.param(*pair, marks=[] if pair in quick else pytest.mark.exhaustive) for pair in pairs]


def config(name: str) -> dict[str, Any]:
    if name in EXPERTS:
        return tiny_config(name, **SIZES | EXPERTS[name])
    family, overrides = FAMILY_VARIANTS[name]
    tiny = tiny_config(family, **overrides)
    return tiny | {key: size for key, size in SIZES.items() if key in tiny} | OWN.get(family, {})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made: dict[str, Any] = {}

    def folder(name: str):
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp(name), config(name), group_size=64)
        return made[name]

    return folder


def workload(given: Any, **fields: Any) -> Workload:
    """That of a model folder, or of a config."""
    spec = load_spec(given if isinstance(given, dict) else read_config(given))
    return Workload(spec, tuple(adapters.choose_modules(spec)), **{"moments": 0, "clip": False} | fields)


def planned(load: Workload, name: str) -> plans.Plan:
    return plans.make(load, STRATEGIES[name] or choose.least(load), 0)


@needs_mlx
@pytest.mark.parametrize(("name", "strategy"), grid("default", "least"))
def test_the_allocator_peaks_where_the_plan_says(model, tmp_path, name, strategy):
    plan, within, found = planned(workload(model(name)), strategy), EXPERTS_WITHIN if name in EXPERTS else WITHIN, 0
    for _ in range(TRIES):  # how far MLX runs ahead differs: the plan says how far it may
        found = max(found, allocated(model(name), plan, tmp_path))
        if plan.arrays_peak_bytes <= (1 + within) * found:
            break
    assert plan.arrays_peak_bytes == pytest.approx(found, rel=within)


@needs_mlx
@pytest.mark.parametrize("method", ["mebp", "backprop"])
@pytest.mark.parametrize("name", ["gemma2", *EXPERTS])
def test_the_allocator_peaks_near_it_where_autodiff_reverses(model, tmp_path, name, method):
    load = workload(model(name), method=method)
    plan = plans.make(load, choose.fastest(load) if method == "backprop" else Strategy(), 0)
    assert 0.97 <= plan.arrays_peak_bytes / allocated(model(name), plan, tmp_path) <= 1.2


def allocated(folder: Any, plan: plans.Plan, tmp_path: Any) -> int:
    """The allocator's peak of a step."""
    import mlx.core as mx

    from mesp_mlx import ops

    gc.collect()
    mx.synchronize()
    base, limit, cache = mx.get_active_memory(), mx.set_memory_limit(1 << 50), mx.set_cache_limit(4_000_000)
    try:
        mx.reset_peak_memory()
        step(folder, ops, plan, tmp_path, 2 if plan.strategy.resident else 1, base)
        return mx.get_peak_memory() - base
    finally:
        mx.set_memory_limit(limit)
        mx.set_cache_limit(cache)


@pytest.mark.parametrize(("name", "strategy"), grid("default", "attention", "states in the file"))
def test_what_a_step_reads_writes_and_evaluates(model, tmp_path, name, strategy):
    plan = planned(workload(model(name), backend="numpy", width=96, rows=3), strategy)
    found = step(model(name), reference, plan, tmp_path)
    spec = plan.workload.spec
    of_tokens = 2 * plan.tokens_bytes // 9 * plan.workload.table.bytes // spec.vocab_size
    if any(layout.arrays for layout in plan.workload.experts):  # a few experts serve nobody, or more than are expected
        assert found["evaluations"] == pytest.approx(plan.evaluations, rel=0.1)
        assert found["read"] == pytest.approx(plan.read_bytes, rel=0.1, abs=0.5 * of_tokens)
    else:
        assert found["evaluations"] == plan.evaluations
        assert 0 <= plan.read_bytes - found["read"] < 0.5 * of_tokens  # a token that occurs twice is read once
    for key, size in (("file written", plan.spill_written_bytes), ("file read", plan.spill_read_bytes)):
        assert found[key] == pytest.approx(size, rel=5e-3)
    assert found["file"] <= 1.1 * plan.file_bytes


def test_experts_are_read_one_by_one(model):
    """In memory there are norm and router, one expert and the next; a resident stage keeps all that were asked for."""
    load = workload(model("qwen3_moe"))
    assert [bool(layout.arrays) for layout in load.experts] == [False, True, False, True]
    one = 3 * 256 * 256 // 2 + 2 * 3 * 256 * 256 // 64 * 4
    assert load.expert(1).bytes == one and load.experts[1].bytes == 16 * one
    assert load.weights["mlp"][1].bytes == 4 * 256 + 16 * 256 // 2 + 2 * 16 * 256 // 64 * 4
    everywhere = workload(QUANTIZED | config("qwen3_moe") | {"mlp_only_layers": []})
    rows = {tensor.name: tensor for tensor in plans.make(everywhere, Strategy(), 0).tensors if "expert, the next" in tensor.name}
    assert {tensor.count for tensor in rows.values()} == {2} and sum(tensor.bytes for tensor in rows.values()) == 2 * one
    kept = [tensor for tensor in plans.make(load, Strategy(resident=ALL), 0).tensors if "switch_mlp" in tensor.name and tensor.part == "weights"]
    assert sum(tensor.bytes for tensor in kept) == 2 * 16 * one
    few, many = (plans.make(dataclasses.replace(load, width=width), Strategy(), 0).read_bytes for width in (1, 256))
    assert many - few > 2 * 2 * 11 * one, "of 16 experts a single token asks for 4, as it is read forward and backward in two layers"


def test_the_worst_layer_is_looked_for_among_each_kind(model):
    """A model whose only full layer is in the middle: its scores are the largest; and one whose only dense layer is."""
    load = workload(model("gemma2"), width=1024)
    windows = [(64,) * 4, (64, None, 64, 64), (64, 64, None, 64)]
    short, first, second = (plans.make(dataclasses.replace(load, spec=dataclasses.replace(load.spec, windows=found)), Strategy(), 0) for found in windows)
    assert min(plan.by_phase()["backward attention"] for plan in (first, second)) > short.by_phase()["backward attention"]
    sizes = []
    for dense in ([], [2], [2, 3]):
        found = workload(QUANTIZED | config("qwen3_moe") | {"mlp_only_layers": dense, "intermediate_size": 4096})
        sizes.append(plans.make(found, Strategy(gradients="applied", prefetch=0), 0).by_phase()["forward mlp"])
    assert sizes[0] < min(sizes[1:])


def test_a_norm_after_a_sublayer_costs_what_it_reads(model):
    """Of OLMo 2 what a sublayer gave is multiplied again for the norm after it, or kept."""
    load = workload(model("olmo2"))
    out, (inner, down) = 256 * 256, (2 * 768 * 256, 768 * 256)
    none, kept, everything = (plans.make(load, Strategy(keep=keep), 0) for keep in ("inputs", "attention", "all"))
    qkv = 256 * (256 + 2 * 128)
    assert none.weight_products - kept.weight_products == 4 * 256 * (qkv + out + inner + down)
    assert kept.weight_products - everything.weight_products == 4 * 256 * inner
    names = {tensor.name for tensor in kept.tensors if tensor.part == "checkpoints"}
    assert {"attention: y", "mlp: y"} <= names
