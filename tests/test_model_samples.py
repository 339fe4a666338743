"""Every model type of mlx-lm has a small configuration with two layers of each kind, and a truth to judge gradients by."""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backends import needs_mlx

from mesp_mlx.errors import UserError
from mesp_mlx.model import samples

pytest.importorskip("mlx_lm")

MOST_PARAMETERS = {"phi3small": 3_500_000}  # its vocabulary can't be small
ONCE = {  # what mlx-lm makes one of however many layers there are
    "rwkv7": {("pre_norm", "LayerNorm"), ("attn", "Rwkv7TimeMixing")},  # the first layer has one norm more, and no values to mix
    "deepseek_v41": {("self_attn.indexer", "is_candidate_source=True"), ("self_attn.indexer", "is_candidate_source=False")},
}
ONCE["deepseek_v41_text"] = ONCE["deepseek_v41"]


def kinds(model: Any) -> Iterator[tuple[str, str, Any]]:
    """What tells layers apart, once for each layer that has it: a part's class with its tensors' shapes, and what any module of it is told by name or flag."""
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    for layer in model.layers:
        yield "", type(layer).__name__, None
        for name, part in layer.children().items():
            for module in part if isinstance(part, list) else [part]:
                if isinstance(module, nn.Module):
                    tensors: Any = tree_flatten(module.parameters())
                    yield name, type(module).__name__, tuple(sorted((tensor, tuple(value.shape)) for tensor, value in tensors))
        for name, module in layer.named_modules():
            told = {key: value for key, value in vars(module).items() if isinstance(value, bool | str) and not key.startswith("_")}
            yield from ((name, f"{key}={value}", None) for key, value in told.items())


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The models of all types that can be imported, their weights not evaluated, and for the others the error."""
    import samples_truth

    found: dict[str, Any] = {}
    for model_type in samples.model_types():
        try:
            found[model_type] = samples_truth.build(samples.small_config(model_type))
        except UserError as error:
            found[model_type] = error
    return found


@needs_mlx
def test_every_type_builds_or_its_module_cannot_be_imported(models):
    errors = {model_type: str(error) for model_type, error in models.items() if isinstance(error, UserError)}
    assert len(models) >= 120 and {"llama", "falcon_mamba", "lfm2-vl", "qwen3_5_moe"} <= models.keys() and "base" not in models
    assert not {model_type: error for model_type, error in errors.items() if "can't be imported" not in error}
    assert errors.keys() <= {"olmo"}  # which mlx-lm builds on a package that is not its dependency


@needs_mlx
def test_every_kind_of_layer_is_there_twice(models):
    few = {}
    for model_type, model in models.items():
        if not isinstance(model, UserError):
            alone = {kind[:2] for kind, count in Counter(kinds(model)).items() if count < 2}
            few |= {model_type: alone - ONCE.get(model_type, set())}
    assert len(few) >= 120 and {model_type: alone for model_type, alone in few.items() if alone} == {}


@needs_mlx
@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("qwen3_next", {"Qwen3NextGatedDeltaNet": 2, "Qwen3NextAttention": 2, "Qwen3NextMLP": 2, "Qwen3NextSparseMoeBlock": 2}),
        ("nemotron_h", {"NemotronHMamba2Mixer": 2, "NemotronHAttention": 2, "NemotronHMLP": 2, "NemotronHMoE": 2}),
        ("lfm2_moe", {"ShortConv": 2, "Attention": 2, "MLP": 2, "Lfm2MoeSparseMoeBlock": 2}),
        ("gemma3", {"is_sliding=True": 2, "is_sliding=False": 2}),
        ("gpt_oss", {"AttentionBlock": 4, "MLPBlock": 4}),
    ],
)
def test_the_kinds_are_those_that_the_type_has(models, model_type, parts):
    """Or two of each could be two of one."""
    found = Counter(part for _, part, _ in kinds(models[model_type]))
    assert {part: found[part] for part in parts} == parts


@needs_mlx
def test_models_are_small(models):
    from mlx.utils import tree_flatten

    for model_type, model in models.items():
        if not isinstance(model, UserError):
            parameters: Any = tree_flatten(model.parameters())
            count = sum(value.size for _, value in parameters)
            assert 10_000 < count < MOST_PARAMETERS.get(model_type, 700_000), model_type


@needs_mlx
def test_a_configuration_is_a_config_json_and_the_callers_own():
    for model_type in ("gemma4", "spark2_5", "prism_hadamard_qwen35"):
        config = samples.small_config(model_type)
        assert json.loads(json.dumps(config)) == config and config["model_type"] == model_type
        kept = json.dumps(config)
        config.get("rope_parameters", config.get("text_config")).clear()
        assert json.dumps(samples.small_config(model_type)) == kept


def odd_type(monkeypatch: pytest.MonkeyPatch, *fields: Any) -> str:
    module: Any = ModuleType("mlx_lm.models.odd_one")
    known = [("model_type", str), ("hidden_size", int), ("num_hidden_layers", int, 80)]
    module.ModelArgs = dataclasses.make_dataclass("ModelArgs", [*known, *fields], kw_only=True)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return "odd_one"


@needs_mlx
def test_a_type_nobody_has_seen_is_derived_by_its_fields_names(monkeypatch):
    fields = [("n_heads", int), ("extra_gate", bool), ("gate_scale", float), ("sliding_window", int, 4096), ("layer_types", list), ("unknown", int, 3)]
    expected = {"model_type": "odd_one", "hidden_size": 64, "num_hidden_layers": 4, "n_heads": 4, "extra_gate": True, "gate_scale": 0.5, "sliding_window": 8}
    assert samples.small_config(odd_type(monkeypatch, *fields)) == {**expected, "layer_types": ["sliding_attention", "full_attention"] * 2}


@needs_mlx
def test_a_type_that_cannot_be_derived_says_which_field_and_what_to_do(monkeypatch):
    with pytest.raises(UserError, match=r"odd_one.*field wavelets \(.*list.*\).*OVERRIDES of mesp_mlx/model/samples\.py"):
        samples.small_config(odd_type(monkeypatch, ("wavelets", list)))


@needs_mlx
def test_a_type_whose_module_ends_the_process_is_an_error_with_what_it_said(monkeypatch):
    def end(_name: str) -> None:
        print("pip install it")
        raise SystemExit(1)

    monkeypatch.setattr(samples.importlib, "import_module", end)
    with pytest.raises(UserError, match="llama can't be imported: pip install it"):
        samples.small_config("llama")


def rows(seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 160, (2, 25), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:], rng.random((2, 24)) < 0.7


@needs_mlx
@pytest.mark.parametrize(("model_type", "bits"), [("qwen3_next", None), ("gemma3n", None), ("recurrent_gemma", None), ("baichuan_m1", None), ("gpt_oss", 4)])
def test_the_truth_is_of_the_weights_on_disk_and_the_same_each_time(tmp_path, model_type, bits):
    """mlx-lm's loader gives back what was written (Baichuan's normalises a head once more), and the gradients are finite, not zero and repeatable."""
    import mlx.core as mx
    import samples_truth
    from mlx.utils import tree_flatten

    folders = [samples_truth.make(tmp_path / name, model_type, bits=bits) for name in "ab"]
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1
    written: Any = mx.load(str(folders[0] / "model.safetensors"))
    loaded: Any = dict(tree_flatten(samples_truth.load(folders[0]).parameters()))
    assert written.keys() == loaded.keys()
    assert all(np.allclose(np.array(written[name]), np.array(loaded[name]), rtol=1e-6, atol=0) for name in written)
    assert (bits is None) == all(value.dtype == mx.float32 for value in written.values())

    results = [samples_truth.autodiff(folder, *rows(), rank=2) for folder in folders]
    for loss, gradients, adapter in results:
        assert loss == results[0][0] and 3 < loss / rows()[2].sum() < 10
        assert gradients.keys() == adapter.keys() and len(adapter) >= 40
        assert all(np.isfinite(value).all() and value.any() and value.shape == adapter[name].shape for name, value in gradients.items())
        assert all(value.any() and np.array_equal(value, results[0][1][name]) for name, value in gradients.items())


@needs_mlx
def test_the_truths_gradients_are_slopes_of_its_loss(tmp_path):
    """By central differences of the loss along the adapter's gradient, in the float32 that autodiff has."""
    import mlx.core as mx
    import mlx.nn as nn
    import samples_truth

    folder, (ids, targets, mask) = samples_truth.make(tmp_path, "olmo_hybrid"), rows()
    _, gradients, adapter = samples_truth.autodiff(folder, ids, targets, mask, rank=2)
    model = samples_truth.load(folder)
    samples_truth.adapt(model, 2, 1)
    norm = np.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in gradients.values()))
    step, losses = 1e-3, []
    for sign in (1, -1):
        model.load_weights([(name, mx.array(value + sign * step / norm * gradients[name])) for name, value in adapter.items()], strict=False)
        losses.append((nn.losses.cross_entropy(model(mx.array(ids)), mx.array(targets)) * mx.array(mask)).sum().item())
    assert abs((losses[0] - losses[1]) / (2 * step) / norm - 1) < 2e-3


@needs_mlx
def test_keys_say_what_is_adapted(tmp_path):
    import samples_truth

    folder = samples_truth.make(tmp_path, "mixtral")
    _, gradients, _ = samples_truth.autodiff(folder, *rows(), keys=["self_attn.q_proj"])
    assert gradients.keys() == {f"model.layers.{layer}.self_attn.q_proj.lora_{part}" for layer in range(4) for part in "ab"}
    assert {"block_sparse_moe.gate", "block_sparse_moe.switch_mlp.up_proj"} <= set(samples_truth.linear_keys(samples_truth.load(folder)))
