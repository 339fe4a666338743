"""A model as the loop sees it: embedding, segments of stages, head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_mlx.memory.strategy import ALL, DEFAULT, Strategy
from mesp_mlx.model.attention import AttentionStage
from mesp_mlx.model.experts import ExpertsStage
from mesp_mlx.model.head import FinalNorm, Head
from mesp_mlx.model.mlp import MLPStage
from mesp_mlx.model.plain import DecoderLayer, WholeHead
from mesp_mlx.model.ropes import Rope
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Embedding, Lora, Stage


class Evaluate:
    """Computes a tree of arrays now, and returns it; MLX holds back while it has allocated more than limit_bytes (None: it never does).

    Attributes:
        count: how many times it was called.
    """

    def __init__(self, backend: Any, limit_bytes: int | None):
        self.count, self._evaluator = 0, backend.arrays.evaluator
        self.limit(limit_bytes)

    def limit(self, limit_bytes: int | None) -> None:
        """Hold back so much from now on."""
        self._within = self._evaluator(limit_bytes)

    def __call__(self, tree: Any) -> Any:
        self.count += 1
        return self._within(tree)


@dataclass(frozen=True)
class Model:
    """What the loop walks. Each segment is the stages between two checkpoints: a decoder layer's two, or one of them, or a plain layer as one."""

    embedding: Embedding
    segments: tuple[tuple[Stage, ...], ...]
    head: Head | WholeHead
    evaluate: Evaluate
    strategy: Strategy

    def lowest_adapted(self, adapter: Mapping[str, Any]) -> tuple[int, Stage]:
        """The lowest stage that holds an adapter, and its segment's index: below it nothing has a gradient."""
        for index, segment in enumerate(self.segments):
            for stage in segment:
                if any(f"{module}.lora_a" in adapter for module in stage.adaptable):
                    return index, stage
        raise ValueError("no stage holds an adapter")

    def forward_order(self) -> list[Any]:
        """The stages a forward pass opens, in order."""
        return [self.embedding, *(stage for segment in self.segments for stage in segment), self.head]

    def resident_stages(self) -> frozenset[str]:
        """The names of the stages whose weights stay in memory, as the strategy says."""
        names = [stage.name for stage in self.forward_order()[1:]]
        stay = len(names) if self.strategy.resident == ALL else self.strategy.resident
        return frozenset(names[max(0, len(names) - stay) :])

    def training_order(self, first: int, lowest: Stage) -> list[Any]:
        """The stages whose weights an update reads, in order: forward, then the segments from `first` on again, last first; what is not held once more."""
        order = self.forward_order()
        for segment in reversed(self.segments[first:]):
            trained = segment[segment.index(lowest) if lowest in segment else 0 :]
            order += segment if self.strategy.hold else [*segment, *reversed(trained[:-1])]
        return order


def build(
    spec: ModelSpec,
    backend: Any,
    lora_scale: float,
    strategy: Strategy = DEFAULT,
    dtype: Any = None,
    method: str = "mesp",
    tiled_head: bool = False,
    limit_bytes: int | None = None,
    keep_h: bool = False,
) -> Model:
    """The stages of a model, as a method of training takes them.

    Args:
        spec: its shape.
        backend: `mesp_mlx.ops` or `mesp_mlx.reference`.
        lora_scale: mlx-lm's scale of the LoRA terms.
        strategy: the choices of the plan.
        dtype: of activations; float32 unless given.
        method: "mebp" and "backprop" take plain layers, one stage each, and a head with whole logits.
        tiled_head: mebp with the head of the others.
        limit_bytes: where MLX waits before it allocates more, as the plan says; no limit unless given.
        keep_h: attention keeps h = x̃ A of its modules from its replay to its backward, to show what that costs. (An MLP's h never leaves its backward.)
    """
    lora = Lora(backend, lora_scale, strategy, keep_h)
    made: dict[Rope | None, dict[str, Any] | None] = {rope: _rope(rope, backend) for rope in dict.fromkeys(spec.ropes)}
    # Whole-graph autodiff holds what it holds: a limit would only slow it down.
    evaluate = Evaluate(backend, None if method == "backprop" else limit_bytes)
    layers = [
        (
            AttentionStage(spec, layer, lora, made[spec.ropes[layer]]),
            ExpertsStage(spec, layer, lora, evaluate) if spec.experts[layer] else MLPStage(spec, layer, lora),
        )
        for layer in range(spec.num_layers)
    ]
    if method in ("mebp", "backprop"):
        segments = tuple((DecoderLayer(*layer),) for layer in layers)
    elif strategy.keep in ("nothing", "replay"):
        segments = tuple(layers)
    else:
        segments = tuple((stage,) for layer in layers for stage in layer)
    whole = method in ("mebp", "backprop") and not tiled_head
    head = WholeHead(spec, backend, evaluate) if whole else Head(FinalNorm(spec, backend), backend, evaluate, strategy)
    return Model(Embedding(spec, backend, dtype or backend.arrays.float32), segments, head, evaluate, strategy)


def _rope(rope: Rope | None, backend: Any) -> dict[str, Any] | None:
    """A rope as the op takes it."""
    if rope is None:
        return None
    listed = rope.wavelengths is not None
    return {
        "dims": rope.dims,
        "traditional": rope.traditional,
        "base": None if listed else rope.base,
        "scale": rope.scale,
        "freqs": backend.arrays.asarray(np.array(rope.wavelengths, np.float32)) if listed else None,
        "magnitude": rope.magnitude,
    }
