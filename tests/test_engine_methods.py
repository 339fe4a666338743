"""The four methods side by side: one gradient from the exact ones, what each hands to the optimizer, and which takes more memory."""

import math
from typing import Any

import numpy as np
import pytest
from backends import each_backend, needs_mlx, numbers, ops
from engines import Gathered, random_adapter, random_group, worst_error
from methods import BASELINES, counted_memory, exactly, given, opened
from models import make_model, tiny_config

from mesp_mlx import reference, sources
from mesp_mlx.config import Settings
from mesp_mlx.engine import backprop, methods
from mesp_mlx.engine.zeroth_order import Perturbations, estimate, slopes
from mesp_mlx.errors import RunStopped
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.store import ALL_STAGES, Store

GROUPS = [random_group(160, [13, 9, 5]), random_group(160, [21], seed=3, first_row=3)]
TOKENS = sum(int(group.mask.sum()) for group in GROUPS)
EXACT: dict[str, dict[str, Any]] = {"mesp": {"method": "mesp"}, **BASELINES}


SMALL_TILES = Strategy(vocabulary_tile=960)  # so that the head does not outweigh what is compared


def resident(*arguments: Any) -> Store:
    return Store(*arguments, resident=ALL_STAGES)


def settings(**chosen: Any) -> Settings:
    return sources.load(None, {"model": "m", "data": "d", **chosen})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"), tiny_config("qwen2"))


def update(folder, backend, adapter, chosen: Settings, number: int = 3, dropout: Dropout | None = None) -> tuple[float, dict[str, np.ndarray]]:
    """What one update's optimizer is given."""
    model, store = opened(folder, backend, chosen.method, chosen.tiled_head)
    gradients: dict[str, np.ndarray] = {}

    def apply(name: str, gradient: Any) -> None:
        gradients[name] = numbers(gradient)

    with store:
        loss, finish = methods.update(chosen, number, model, store, given(backend, adapter), [Batch(group, dropout) for group in GROUPS], apply)
    assert not gradients, "they are held until the end"
    finish()
    return loss, gradients


@each_backend
def test_the_exact_ones_give_the_optimizer_the_same(tiny, backend):
    """The gradient of the mean loss, under dropout, cut to the norm that was asked for."""
    adapter, dropout = random_adapter(tiny), Dropout(seed=7, update=3, rate=0.25)
    want_loss, summed = exactly(tiny, adapter, GROUPS, dropout, backend=reference)
    norm = math.sqrt(sum(float(np.square(value).sum()) for value in summed.values())) / TOKENS
    assert norm > 1
    for by in EXACT.values():
        for clip, factor in ((0.0, 1.0), (0.5, 0.5 / norm), (2 * norm, 1.0)):
            loss, gradients = update(tiny, backend, adapter, settings(**by, grad_clip=clip), dropout=dropout)
            assert loss == pytest.approx(want_loss, rel=1e-6)
            assert worst_error(gradients, {name: value * factor / TOKENS for name, value in summed.items()}) <= 1e-5


@each_backend
def test_mezo_gives_an_estimate(tiny, backend):
    """By the settings' seed, number of directions and epsilon, and the number of the update."""
    adapter = random_adapter(tiny)
    chosen = settings(method="mezo", seed=9, mezo_perturbations=2, mezo_epsilon=2e-3)
    loss, got = update(tiny, backend, adapter, chosen, number=4)
    perturbations = Perturbations(seed=9, update=4, count=2, epsilon=2e-3)
    model, store = opened(tiny, backend)
    with store:
        want_loss, found = slopes(model, store, given(backend, adapter), [Batch(group) for group in GROUPS], perturbations)
    want = {name: numbers(value) for name, value in estimate(backend, given(backend, adapter), perturbations, found)}
    assert loss == want_loss and worst_error(got, want) == 0
    (first, again), (_, other) = (update(tiny, backend, adapter, chosen, number=number) for number in (4, 5))
    assert first == loss and worst_error(again, got) == 0 and worst_error(other, got) > 0.1


@each_backend
@pytest.mark.parametrize("by", [*EXACT.values(), {"method": "mezo"}], ids=[*EXACT, "mezo"])
@pytest.mark.filterwarnings("ignore:.*(invalid value|overflow).*:RuntimeWarning")
def test_what_is_not_finite_stops_the_run(tiny, backend, by):
    adapter = random_adapter(tiny)
    adapter["model.layers.1.mlp.down_proj.lora_b"][0, 0] = np.nan
    with pytest.raises(RunStopped, match="the loss is nan. Nothing of it was applied"):
        update(tiny, backend, adapter, settings(**by))


def peaks(folder, groups, by: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The most memory of each method's pass over one update, by MLX's count, under the limits of a run."""
    found, batches = {}, [Batch(group) for group in groups]
    with counted_memory() as peak:
        adapter = given(ops, random_adapter(folder, rank=8))

        def forward() -> None:
            store.expect(model.forward_order())
            states = backprop.forward(model, store, adapter, batches)
            with store.open(model.head) as w:
                model.head.loss(w, states, batches, gradient=False)

        for name, how in by.items():
            method = how.get("method", "mesp")
            kept = resident if method == "backprop" else Store
            model, store = opened(folder, ops, method, how.get("tiled_head", False), store=kept, strategy=SMALL_TILES)
            if method == "mezo":
                chosen = settings(**how)
                run: Any = lambda: methods.update(chosen, 0, model, store, adapter, batches, {}.__setitem__)[1]()  # noqa: B023, E731
            else:
                exact = methods.exact(method, how.get("grad_checkpoint", False))
                run = forward if name == "forward" else lambda: exact(model, store, adapter, batches, Gathered())  # noqa: B023
            with store:
                found[name] = peak(run)
    return found


@needs_mlx
def test_the_order_of_memory(tmp_path):
    """Six layers and a vocabulary that is wide beside them: each step down the list gives something up."""
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 8192, "max_position_embeddings": 256}
    folder = make_model(tmp_path / "model", tiny_config("qwen2", **shape))
    found = peaks(folder, [random_group(8192, [256])], EXACT)
    for less, more, most in (("mesp", "mebp-tiled", 0.85), ("mebp-tiled", "mebp", 0.4), ("mebp", "backprop", 0.7)):
        assert found[less] < most * found[more], found
    assert found["backprop-checkpointed"] < 0.7 * found["backprop"]
    logits = 4 * 256 * 8192
    assert found["mebp"] > 2 * logits > found["mebp-tiled"], "whole logits, and their gradient"


@needs_mlx
def test_memory_and_depth(tmp_path):
    """Three times the layers: what streams hardly grows, by a checkpoint and an adapter's gradients each; the whole graph does, by all it keeps."""
    found = []
    for layers in (2, 6):
        folder = make_model(tmp_path / f"{layers}", tiny_config("llama", num_hidden_layers=layers))
        found.append(peaks(folder, [random_group(160, [128])], EXACT | {"mezo": {"method": "mezo"}, "forward": {}}))
    grown = {name: found[1][name] - found[0][name] for name in found[0]}
    assert grown["backprop"] > 4 * 4 * 128 * (7 * 64 + 2 * 32 + 3 * 96), "what four layers keep, at the least"
    assert all(grown[name] < 0.2 * grown["backprop"] for name in ("mesp", "mebp", "mebp-tiled", "mezo", "forward")), grown
    assert grown["backprop-checkpointed"] < 0.4 * grown["backprop"], grown
