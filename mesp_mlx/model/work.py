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
# mesp's, by what it keeps (memory.strategy): less is recomputed.
KEPT = {"nothing": WEIGHTS["mesp"], "replay": (3, 3, 3, 2, 2), "inputs": (3, 2, 3, 2, 2), "attention": (2, 2, 3, 2, 2), "all": (2, 2, 2, 2, 2)}
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
    times, reversed_layers = perturbations if method == "mezo" else 1, spec.num_layers if trained is None else trained
    backwards = method not in ("forward", "mezo")
    linears = {projection: spec.linear_shape(projection) for projection in PROJECTIONS}
    passes, once = (WEIGHTS if method != "mesp" else {"mesp": KEPT[keep]})[method], WEIGHTS["forward"]
    weights = reversed_layers * _layer(linears, passes) + passes[4] * spec.vocab_size * spec.hidden_size
    weights += (spec.num_layers - reversed_layers) * _layer(linears, once if backwards else passes)
    if backwards:  # nothing below the lowest q, k and v wants a gradient
        weights -= sum(width_out * width_in for width_out, width_in in (linears[projection] for projection in PROJECTIONS[:3]))
    scores = SCORES_KEPT if method == "mesp" and keep in ("attention", "all") else SCORES[method]
    pairs = [_pairs(tokens, window, method in BLOCKWISE) for window in spec.windows]
    below = spec.num_layers - reversed_layers if backwards else 0
    attention = SCORES["forward"] * sum(pairs[:below]) + scores * sum(pairs[below:])
    adapters = ADAPTERS[method] * reversed_layers * rank * sum(width_out + width_in for width_out, width_in in linears.values())
    scale = times * rows
    return Work(scale * tokens * weights, scale * spec.num_heads * spec.head_dim * attention, scale * tokens * adapters)


def _layer(linears: dict[str, tuple[int, int]], passes: tuple[int, ...]) -> int:
    """Multiply-adds of a layer, a token, with so many passes of q, k and v; o; gate and up; down."""
    qkv, out, gate_up, down = passes[:4]
    times = dict(zip(PROJECTIONS, (qkv, qkv, qkv, out, gate_up, gate_up, down), strict=True))
    return sum(times[projection] * width_out * width_in for projection, (width_out, width_in) in linears.items())


def _pairs(tokens: int, window: int | None, blockwise: bool) -> int:
    """Query-key pairs that are multiplied: the whole square, or blocks of rows up to their last key."""
    if not blockwise:
        return tokens * tokens
    blocks = [(i, min(i + BLOCK, tokens)) for i in range(0, tokens, BLOCK)]
    return sum((j - i) * (j - (0 if window is None else max(0, i - window + 1))) for i, j in blocks)
