"""Every model type of the installed mlx-lm, loaded from disk and streamed: two steps whose loss and gradients are whole autodiff's; or a true refusal."""

import importlib
import importlib.util
import weakref
from typing import Any

import numpy as np
import pytest
from backends import needs_mlx
from engines import random_group

from mesp_mlx import adapter as adapters
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.engine.sink import HeldSink
from mesp_mlx.errors import UserError
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model import architecture, source
from mesp_mlx.model.stages import Batch
from mesp_mlx.op_checks import error
from mesp_mlx.stream.shelves import IN_MEMORY
from mesp_mlx.stream.store import Store

RANK, BOUND = 4, 1e-4
LEAN = Strategy(prefetch=0, hold=False)  # nothing is read ahead, nothing stays open: the weights of one stage may be alive at any time
REFUSED = {  # by model type, the reason that is given; that it is true, `test_refusals_are_true` says
    "bitnet": "have no linear that mlx-lm's LoRA fits",
    "deepseek_v41": "has no gradient: ValueError: .*gather_axis.* Cannot calculate VJP",
    "deepseek_v41_text": "has no gradient: ValueError: .*gather_axis.* Cannot calculate VJP",
    "muse_spark": "No Metal back-end",
    "olmo": "pip install ai2-olmo",
}


def refused() -> dict[str, str]:
    """Those that are here: a GPU of Apple's has what one of them lacks, and a package may be installed."""
    import mlx.core as mx

    there = {"muse_spark": mx.metal.is_available(), "olmo": importlib.util.find_spec("hf_olmo") is not None}
    return {model_type: reason for model_type, reason in REFUSED.items() if not there.get(model_type)}


def types() -> list[str]:
    if any(importlib.util.find_spec(name) is None for name in ("mlx", "mlx_lm")):
        return []
    from mesp_mlx.model.samples import model_types

    return model_types()


class Counting(Store):
    """Notes of how many opened stages an array that was handed out is still alive, whoever holds it, whenever a load comes."""

    def __init__(self, entries: Any, spec: Any, backend: Any):
        super().__init__(entries, spec, backend, prefetch=LEAN.prefetch, hold=LEAN.hold, watch=self._opened)
        self.opened, self.most_alive, self._handed_out = 0, 0, list[tuple[int, weakref.ref]]()

    def _opened(self, _: str) -> None:
        self.opened += 1

    def wait(self, loading: Any) -> dict[str, dict[str, Any]]:
        modules = super().wait(loading)
        arrays = [array for linear in modules.values() for array in linear.values() if hasattr(array, "shape")]
        self._handed_out = [(stage, ref) for stage, ref in self._handed_out if ref() is not None] + [(self.opened, weakref.ref(array)) for array in arrays]
        self.most_alive = max(self.most_alive, len({stage for stage, _ in self._handed_out}))
        return modules


def trained(folder, steps=2):
    """SGD steps, streamed and by whole autodiff: the worst error of their losses and gradients, and the most stages whose weights were alive at a time."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from samples_truth import SCALE, adapt, load

    from mesp_mlx import ops

    spec, entries = architecture.open_folder(folder)
    modules = adapters.choose_modules(spec)
    group = random_group(spec.vocab_size, (11, 7))
    truth = load(folder)
    adapter = adapt(truth, RANK, seed=1, keys=spec.adaptable_keys())
    assert adapters.shapes(spec, modules, RANK) == {name: array.shape for name, array in sorted_like(adapter, modules).items()}
    model, worst, most = architecture.build(spec, entries, ops, SCALE, modules, RANK, LEAN), 0.0, 0
    stages = [stage for segment in model.segments for stage in segment]
    for _ in range(steps):
        truth.load_weights([(name, mx.array(array)) for name, array in adapter.items()], strict=False)
        expected, gradients = nn.value_and_grad(truth, lambda model: loss_of(model, group))(truth)
        true = {name: np.array(array) for name, array in tree_flatten(gradients)}
        found: dict[str, np.ndarray] = {}
        sink = HeldSink(ops, IN_MEMORY.gradients, 1, 0.0, lambda name, gradient, found=found: found.update({name: np.array(gradient)}))
        with Counting(entries, spec, ops) as store:
            loss = loss_and_gradients(model, store, {name: mx.array(array) for name, array in adapter.items()}, [Batch(group)], sink)
        sink.finish()
        largest = max(np.abs(array).max() for array in true.values())
        assert found.keys() == true.keys() and largest > 0
        worst = max(worst, abs(loss - expected.item()) / abs(expected.item()), *(error(found[name], true[name], largest) for name in true))
        most = max(most, store.most_alive)
        assert store.opened >= 2 * len(stages) + 1
        adapter = {name: (array - 1e-3 / largest * true[name]).astype(np.float32) for name, array in adapter.items()}
    return worst, most


def sorted_like(adapter, modules):
    return {name: adapter[name] for module in modules for name in (f"{module}.lora_a", f"{module}.lora_b")}


def loss_of(model, group):
    import mlx.core as mx
    import mlx.nn as nn

    return (nn.losses.cross_entropy(model(mx.array(group.ids)), mx.array(group.targets)) * mx.array(group.mask)).sum()


@needs_mlx
@pytest.mark.slow
@pytest.mark.parametrize("model_type", types())
def test_every_model_type(model_type, tmp_path):
    from samples_truth import make

    if reason := refused().get(model_type):
        with pytest.raises(UserError, match=reason):
            folder = source.resolve(str(make(tmp_path / "model", model_type)), tmp_path / "cache", "none").folder
            trained(folder, steps=1)
        return
    folder = source.resolve(str(make(tmp_path / "model", model_type)), tmp_path / "cache", "none").folder
    worst, most = trained(folder)
    assert worst <= BOUND and most == 1


@needs_mlx
def test_there_are_many_types_and_few_are_refused():
    assert len(types()) >= 100 and len(REFUSED) <= 8 and REFUSED.keys() <= set(types())


@needs_mlx
@pytest.mark.slow
@pytest.mark.parametrize("model_type", REFUSED)
def test_refusals_are_true(model_type, tmp_path):
    """Nothing but mlx-lm is asked: it does not build the model, adapts nothing of it, or its own autodiff of the whole fails."""
    from samples_truth import autodiff, linear_keys, load, make

    if model_type not in refused():
        pytest.skip("it is not refused here")
    if model_type == "olmo":
        with pytest.raises(SystemExit):
            importlib.import_module("mlx_lm.models.olmo")
        return
    folder = make(tmp_path / "model", model_type)
    if model_type == "bitnet":
        assert linear_keys(load(folder)) == []
        return
    ids = np.arange(8)[None]
    with pytest.raises((ValueError, RuntimeError), match="Cannot calculate VJP|No Metal back-end"):
        autodiff(folder, ids, ids, np.ones(ids.shape, bool))


@needs_mlx
@pytest.mark.parametrize("model_type", ["deepseek_v2", "mamba2", "gemma3n"])
def test_some_types(model_type, tmp_path):
    """Of those above, for every run of the tests."""
    test_every_model_type(model_type, tmp_path)


@needs_mlx
def test_the_count_sees_weights_that_stay(tmp_path, monkeypatch):
    """Or it could not fail: a stage that keeps the weights it was given is found out."""
    from samples_truth import make

    from mesp_mlx.model.generic_stages import LayerStage

    right, kept = LayerStage.forward, []

    def hoarding(self, w, *arguments):
        kept.append([w[module] for module in self.modules])
        return right(self, w, *arguments)

    monkeypatch.setattr(LayerStage, "forward", hoarding)
    _, most = trained(make(tmp_path / "model", "mamba2"), steps=1)
    assert most >= 4
