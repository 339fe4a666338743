"""What an update multiplies, by method: the products that its time is mostly made of, counted from shapes.

Elementwise work is not counted, nor is dequantising, which goes with each product with a frozen weight.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mesp_mlx.model.spec import ModelSpec

if TYPE_CHECKING:
    from mesp_mlx.model.generic import GenericSpec

Passes = tuple[int, int, int, int, int]
# How many times a token passes each frozen weight: q, k and v; o; gate and up (and a router); down; the output table.
WEIGHTS: dict[str, Passes] = {
    "forward": (1, 1, 1, 1, 1),
    "mesp": (4, 3, 3, 2, 2),  # q, k and v are recomputed for the replay and for the attention's own backward; o for the replay; down never
    "mebp": (3, 3, 3, 2, 2),  # autodiff does not recompute what only the layer's output needs
    "backprop": (2, 2, 2, 2, 2),
    "backprop-checkpointed": (3, 3, 3, 2, 2),
    "mezo": (2, 2, 2, 2, 2),
}
# mesp's, by what it keeps (memory.strategy): less is recomputed.
KEPT: dict[str, Passes] = {
    "nothing": WEIGHTS["mesp"],
    "replay": (3, 3, 3, 2, 2),
    "inputs": (3, 2, 3, 2, 2),
    "attention": (2, 2, 3, 2, 2),
    "all": (2, 2, 2, 2, 2),
}
# A norm after a sublayer asks for what the sublayer gave: it is recomputed unless it was kept; by autodiff wherever anything is.
_AGAIN: Passes = (0, 1, 1, 1, 0)
AFTER_NORM: dict[str, Passes] = {"nothing": _AGAIN, "replay": _AGAIN, "inputs": _AGAIN, "mebp": (0, 0, 0, 1, 0), "backprop-checkpointed": (0, 0, 0, 1, 0)}
# Products of the scores' size; forward has two (scores, and probabilities with values), backward four, and a fifth where it recomputes the scores.
SCORES = {"forward": 2, "mesp": 2 + 2 + 5, "mebp": 2 + 2 + 4, "backprop": 2 + 4, "backprop-checkpointed": 2 + 2 + 4, "mezo": 4}
SCORES_KEPT = 2 + 5  # mesp's where the attention output is kept from the forward pass
# Times a token passes A and B: forward, recomputed, and backward twice (dA or dB, and dx).
ADAPTERS = {"forward": 1, "mesp": 4, "mebp": 4, "backprop": 3, "backprop-checkpointed": 4, "mezo": 2}
BLOCK = 64  # query rows of a block at most: half of the square on the diagonal is multiplied in vain
BLOCKWISE = ("forward", "mesp", "mezo")


@dataclass(frozen=True)
class Work:
    """Multiply-adds of one update: with frozen weights, of attention, and with adapters."""

    weights: int
    attention: int
    adapters: int

    @property
    def flops(self) -> int:
        """Floating-point operations, two to a multiply-add."""
        return 2 * (self.weights + self.attention + self.adapters)


def of_update(
    spec: ModelSpec, method: str, rows: int, tokens: int, rank: int, perturbations: int = 1, keep: str = "nothing", trained: int | None = None
) -> Work:
    """The work of an update of `rows` rows of `tokens` tokens, all supervised, with adapters on every projection.

    Args:
        method: one of config.VARIANTS, or "forward", a pass without gradients.
        keep: what mesp keeps for backward, as memory.strategy names it.
        trained: the layers at the top that have adapters, to which gradients go; None: all.
    """
    method = method.removesuffix("-tiled")
    times, below = perturbations if method == "mezo" else 1, 0 if trained is None else spec.num_layers - trained
    backwards = method not in ("forward", "mezo")
    passes, once = _passes(spec, method, keep), WEIGHTS["forward"]
    scores = SCORES_KEPT if method == "mesp" and keep in ("attention", "all") else SCORES[method]
    weights, attention, adapters = passes[4] * spec.vocab_size * spec.hidden_size, 0, 0
    alike = Counter((layer >= below, spec.windows[layer], spec.experts[layer]) for layer in range(spec.num_layers))
    first = {(layer >= below, spec.windows[layer], spec.experts[layer]): layer for layer in reversed(range(spec.num_layers))}
    for kind, count in alike.items():
        linears, reversed_ = _products(spec, first[kind]), kind[0] or not backwards
        weights += count * _layer(linears, passes if reversed_ else once)
        attention += count * (scores if reversed_ else SCORES["forward"]) * _pairs(tokens, kind[1], method in BLOCKWISE)
        adapters += count * kind[0] * ADAPTERS[method] * rank * sum(at_once * (out + width) for _, at_once, out, width in linears)
    if backwards:  # nothing below the lowest q, k and v wants a gradient
        weights -= sum(out * width for place, _, out, width in _products(spec, below) if place == 0)
    scale = times * rows
    return Work(scale * tokens * weights, scale * spec.num_heads * spec.head_dim * attention, scale * tokens * adapters)


def of_generic(spec: "GenericSpec", method: str, rows: int, tokens: int, adapted: int, perturbations: int, trained: int, squares: int) -> Work:
    """The same of a model whose layers autodiff reverses: every weight of a layer is taken for one that each token passes, experts' where it is chosen.

    Args:
        adapted: numbers of the adapter.
        squares: layers whose attention is quadratic.
    """
    forward = method in ("forward", "mezo")
    passes = WEIGHTS["mebp" if method == "mesp" else method]
    chosen = next((spec.config[key] for key in ("num_experts_per_tok", "moe_topk", "num_experts_per_token") if isinstance(spec.config.get(key), int)), 1)
    inside = Counter[int]()
    for name, shape in spec.tensors().items():
        if (layer := spec.layer_of(name)) >= 0 and len(shape) > 1:
            inside[layer] += math.prod(shape[-2:]) * (min(chosen, shape[0]) if len(shape) == 3 else 1)
    top = sum(size for layer, size in inside.items() if layer >= spec.num_layers - trained)
    weights = passes[0] * top + (passes[0] if forward else 1) * (sum(inside.values()) - top) + passes[4] * spec.vocab_size * spec.hidden_size
    scale = rows * (perturbations if method == "mezo" else 1)
    attention = squares * SCORES["mebp" if method == "mesp" else method] * tokens * tokens * spec.hidden_size
    return Work(scale * tokens * weights, scale * attention, scale * tokens * adapted * ADAPTERS[method])


def _passes(spec: ModelSpec, method: str, keep: str) -> Passes:
    passes = KEPT[keep] if method == "mesp" else WEIGHTS[method]
    more = AFTER_NORM.get(keep if method == "mesp" else method, (0,) * 5) if spec.post_norm else (0,) * 5
    qkv, out, inner, down, head = (times + again for times, again in zip(passes, more, strict=True))
    return qkv, out, inner, down, head


def _products(spec: ModelSpec, layer: int) -> list[tuple[int, int, int, int]]:
    """Of a layer's linears: the place in `Passes`, how many of it a token passes, out, in."""
    linears, names, experts = spec.linears(layer), spec.names, spec.experts[layer]
    places = {key: 0 if key in names.qkv else 1 for key in spec.attention_keys(layer)} | dict.fromkeys(spec.mlp_keys(layer), 2)
    places[spec.mlp_keys(layer)[-1]] = 3
    return [(places[key], experts.chosen if experts and stack else 1, out, width) for key, (*stack, out, width) in linears.items()]


def _layer(linears: list[tuple[int, int, int, int]], passes: Passes) -> int:
    """Multiply-adds of a layer, a token."""
    return sum(passes[place] * at_once * out * width for place, at_once, out, width in linears)


def _pairs(tokens: int, window: int | None, blockwise: bool) -> int:
    """Query-key pairs that are multiplied: the whole square, or blocks of rows up to their last key."""
    if not blockwise:
        return tokens * tokens
    blocks = [(i, min(i + BLOCK, tokens)) for i in range(0, tokens, BLOCK)]
    return sum((j - i) * (j - (0 if window is None else max(0, i - window + 1))) for i, j in blocks)
