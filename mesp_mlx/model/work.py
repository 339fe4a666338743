"""What an update multiplies, by method: the products that its time is mostly made of, counted from shapes.

Elementwise work is not counted, nor is dequantising, which goes with each product with a frozen weight.
"""

from dataclasses import dataclass

from mesp_mlx.model.spec import PROJECTIONS, ModelSpec

# How many times a token passes each frozen weight: q, k and v; o; gate and up; down; the output table.
WEIGHTS = {
    "forward": (1, 1, 1, 1, 1),
    "mesp": (4, 3, 3, 2, 2),  # q, k and v are recomputed for the replay and for the attention's own backward; o for the replay; down never
    "mebp": (3, 3, 3, 2, 2),  # autodiff does not recompute what only the layer's output needs
    "backprop": (2, 2, 2, 2, 2),
    "backprop-checkpointed": (3, 3, 3, 2, 2),
    "mezo": (2, 2, 2, 2, 2),
}
# Products of the scores' size; forward has two (scores, and probabilities with values), backward four, and a fifth where it recomputes the scores.
SCORES = {"forward": 2, "mesp": 2 + 2 + 5, "mebp": 2 + 2 + 4, "backprop": 2 + 4, "backprop-checkpointed": 2 + 2 + 4, "mezo": 4}
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


def of_update(spec: ModelSpec, method: str, rows: int, tokens: int, rank: int, perturbations: int = 1) -> Work:
    """The work of an update of `rows` rows of `tokens` tokens, all supervised, with adapters on every projection.

    method: one of config.VARIANTS, or "forward", a pass without gradients.
    """
    method = method.removesuffix("-tiled")
    times = perturbations if method == "mezo" else 1
    linears = {projection: spec.linear_shape(projection) for projection in PROJECTIONS}
    qkv, out, gate_up, down, head = WEIGHTS[method]
    passes = dict(zip(PROJECTIONS, (qkv, qkv, qkv, out, gate_up, gate_up, down), strict=True))
    layer = sum(passes[projection] * width_out * width_in for projection, (width_out, width_in) in linears.items())
    weights = spec.num_layers * layer + head * spec.vocab_size * spec.hidden_size
    if method not in ("forward", "mezo"):  # nothing below the lowest q, k and v wants a gradient
        weights -= sum(width_out * width_in for width_out, width_in in (linears[projection] for projection in PROJECTIONS[:3]))
    pairs = sum(_pairs(tokens, window, method in BLOCKWISE) for window in spec.windows)
    adapters = ADAPTERS[method] * spec.num_layers * rank * sum(width_out + width_in for width_out, width_in in linears.values())
    scale = times * rows
    return Work(scale * tokens * weights, scale * SCORES[method] * spec.num_heads * spec.head_dim * pairs, scale * tokens * adapters)


def _pairs(tokens: int, window: int | None, blockwise: bool) -> int:
    """Query-key pairs that are multiplied: the whole square, or blocks of rows up to their last key."""
    if not blockwise:
        return tokens * tokens
    blocks = [(i, min(i + BLOCK, tokens)) for i in range(0, tokens, BLOCK)]
    return sum((j - i) * (j - (0 if window is None else max(0, i - window + 1))) for i, j in blocks)
