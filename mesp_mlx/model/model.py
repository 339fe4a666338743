"""A model as the loop sees it: embedding, segments of stages, head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_mlx.data.group import TILE_TOKENS
from mesp_mlx.model.head import Head
from mesp_mlx.model.plain import DecoderLayer, WholeHead
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import AttentionStage, Embedding, Lora, MLPStage, Stage

TILES, TILE_BYTES, LEAST_ROWS = 4, 2_000_000, 16  # tiles at a time, their size, and the fewest query rows in one: see ops


@dataclass(frozen=True)
class Model:
    """What the loop walks. Each segment is the stages between two checkpoints: a decoder layer's two, or the plain layer as one.

    `evaluate` computes a tree of arrays now, within the room that the model was built with, and returns it.
    """

    embedding: Embedding
    segments: tuple[tuple[Stage, ...], ...]
    head: Head | WholeHead
    evaluate: Callable[[Any], Any]

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

    def training_order(self, first_segment: int) -> list[Any]:
        """The stages an update opens, in order: forward, then the trained segments again, last first."""
        return self.forward_order() + [stage for segment in reversed(self.segments[first_segment:]) for stage in segment]


def working_bytes(spec: ModelSpec, group_tokens: int) -> int:
    """Room for the arrays inside a stage, in bytes: those of an MLP or of an attention reversed, and a few tiles.

    Measured on the CPU device: with this much the limit costs no time, with three quarters of it a step takes three times as long.
    """
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inside = max(6 * spec.hidden_size, spec.hidden_size + 4 * heads + 4 * kv)
    return 4 * group_tokens * inside + TILES * max(TILE_BYTES, 4 * LEAST_ROWS * spec.num_heads * group_tokens)


def plain_working_bytes(spec: ModelSpec, group_tokens: int, tiled_head: bool) -> int:
    """The same for a plain layer, which keeps all that it makes, twice over while it is reversed; and for whole logits, of which autodiff makes four arrays.

    Measured too: with the room of a structured stage a plain layer takes twice as long, and saves a fifth of its peak.
    """
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inside = 6 * spec.hidden_size + 4 * heads + 4 * kv + 6 * spec.intermediate_size
    layer = 4 * group_tokens * (inside + 4 * spec.num_heads * group_tokens) + TILES * TILE_BYTES
    return layer if tiled_head else max(layer, 4 * 4 * group_tokens * spec.vocab_size)


def build(
    spec: ModelSpec,
    backend: Any,
    lora_scale: float,
    group_tokens: int = TILE_TOKENS,
    dtype: Any = None,
    method: str = "mesp",
    tiled_head: bool = False,
    room_bytes: int | None = None,
    keep_h: bool = False,
) -> Model:
    """The stages of a model, as a method of training takes them.

    Args:
        spec: its shape.
        backend: `mesp_mlx.ops` or `mesp_mlx.reference`.
        lora_scale: mlx-lm's scale of the LoRA terms.
        group_tokens: the most tokens of a group, padding included; more than that runs, slower.
        dtype: of activations; float32 unless given.
        method: "mebp" and "backprop" take plain layers, one stage each, and a head with whole logits.
        tiled_head: mebp with the head of the others.
        room_bytes: what MLX may allocate ahead within a stage; `working_bytes` unless given.
        keep_h: attention keeps h = x̃ A of its modules from its replay to its backward, to show what that costs. (An MLP's h never leaves its backward.)
    """
    rope, lora = _rope(spec, backend), Lora(backend, lora_scale, keep_h)
    layers = [(AttentionStage(spec, layer, lora, rope), MLPStage(spec, layer, lora)) for layer in range(spec.num_layers)]
    plain = method in ("mebp", "backprop")
    segments = tuple((DecoderLayer(*layer),) for layer in layers) if plain else tuple(layers)
    room = room_bytes or (plain_working_bytes(spec, group_tokens, tiled_head) if plain else working_bytes(spec, group_tokens))
    # Whole-graph autodiff holds what it holds: a limit would only slow it down.
    evaluate = backend.arrays.evaluator(None if method == "backprop" else room)
    head = (WholeHead if plain and not tiled_head else Head)(spec, backend, evaluate)
    return Model(Embedding(backend, dtype or backend.arrays.float32), segments, head, evaluate)


def _rope(spec: ModelSpec, backend: Any) -> dict[str, Any]:
    rope = spec.rope
    listed = rope.wavelengths is not None
    return {
        "dims": rope.dims,
        "traditional": rope.traditional,
        "base": None if listed else rope.base,
        "scale": rope.scale,
        "freqs": backend.arrays.asarray(np.array(rope.wavelengths, np.float32)) if listed else None,
        "magnitude": rope.magnitude,
    }
