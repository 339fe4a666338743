"""Mixture of experts: the router, and one expert's gated MLP on the tokens that it serves (Shazeer et al., 2017; Mixtral, arXiv 2401.04088).

Equals, with the logits of a router and an MLP for each of E experts:

    index = topk(logits)                                      # [N, k], each row's in ascending order
    p = softmax(logits)[index]  or  softmax(logits[index])    # over all experts, or over those chosen
    y[t] = sum over j of p[t, j] * MLP_index[t, j](x[t])

That a token chooses other experts when its logits change has no derivative: index is a constant. `route` takes all tokens at once; `forward` and
`backward` take one expert and the n rows that it serves, so that the caller has the weights of one expert in memory, and reads none that serves no token.

Saved for backward: x and the logits. Recomputed: index, p, and what `gated_mlp` recomputes. dp costs no product: see `gated_mlp.weighted_backward`.

At the fullest moment of forward, beside the state: h [N, D], the sum y [N, D] float32 (twice while rows are added), logits, p and index, two experts' packed
weights (one is being read), and of the busiest expert, of n tokens: x, its share of y [n, D], and what `gated_mlp` has for n tokens. Of backward: h, dh
(float32, twice) and dy [N, D], the gradients of all experts' adapters, and x, dy and dx [n, D] with what `gated_mlp.backward` has for n tokens. n is N at most.
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.ops import gated_mlp, quantized
from mesp_mlx.ops.activations import Activation
from mesp_mlx.ops.gated_mlp import Dropouts, Kept, Loras
from mesp_mlx.ops.quantized import Linear


def route(logits: mx.array, chosen: int, over_all: bool) -> tuple[mx.array, mx.array]:
    """The `chosen` experts of each token and their weights: logits [N, E] -> index [N, k] (uint32), p [N, k] float32.

    over_all: the softmax is over all experts, so that p sums to less than 1.
    """
    index = mx.sort(mx.argpartition(-logits, kth=chosen - 1, axis=-1)[:, :chosen], axis=-1)
    return index, mx.exp(_chosen(logits, index) - _total(logits, index, over_all))


def route_backward(logits: mx.array, index: mx.array, dp: mx.array, over_all: bool) -> mx.array:
    """The gradient of logits [N, E], in their dtype, given dp [N, k]: that of p_j = e^l_j / Z, with Z over all experts or over those chosen.

    dl_j = p_j (dp_j - c), with c = sum over j of p_j dp_j, and -p_j c for those that were not chosen but are in Z.
    """
    total = _total(logits, index, over_all)
    weighted = mx.exp(_chosen(logits, index) - total) * dp
    c = mx.sum(weighted, axis=-1, keepdims=True)
    if over_all:
        d = -c * mx.exp(logits.astype(mx.float32) - total)
        return mx.put_along_axis(d, index, mx.take_along_axis(d, index, axis=-1) + weighted, axis=-1).astype(logits.dtype)
    d = weighted - c * mx.exp(_chosen(logits, index) - total)
    return mx.put_along_axis(mx.zeros_like(logits), index, d.astype(logits.dtype), axis=-1)


def forward(
    x: mx.array,
    p: mx.array,
    gate: Linear,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    kept: Kept | None = None,
) -> mx.array:
    """One expert's share of y: rows x [n, D] with their weights p [n] -> p * MLP(x) [n, D]. The rest as in `gated_mlp.forward`."""
    y = gated_mlp.forward(x, gate, up, down, lora, scale, dropout, activation, tile, kept)
    return p[:, None].astype(x.dtype) * y


def backward(
    x: mx.array,
    p: mx.array,
    gate: Linear,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: mx.array,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[mx.array | None, mx.array, Loras]:
    """(dx [n, D] or None, dp [n] float32, the adapters' gradients as in `gated_mlp.backward`), given dy [n, D]."""
    dx, grads, dp = gated_mlp.weighted_backward(x, p, gate, up, down, lora, scale, dy, dropout, activation, tile, need_dx, kept)
    assert dp is not None
    return dx, dp, grads


def apply(
    x: mx.array,
    p: mx.array,
    gate: Linear,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; frozen linears get zeros."""
    return _apply(x, p, gate, up, down, lora, scale, dropout, activation, tile)


def _chosen(logits: mx.array, index: mx.array) -> mx.array:
    return mx.take_along_axis(logits, index, axis=-1).astype(mx.float32)


def _total(logits: mx.array, index: mx.array, over_all: bool) -> mx.array:
    """log Z, [N, 1] float32."""
    return mx.logsumexp(logits.astype(mx.float32) if over_all else _chosen(logits, index), axis=-1, keepdims=True)


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    x, p, gate, up, down, lora, scale, dropout, activation, tile = primals
    dx, dp, grads = backward(x, p, gate, up, down, lora, scale, dy, dropout, activation, tile)
    frozen = map(quantized.zeros_like, (gate, up, down))
    return dx, dp.astype(p.dtype), *frozen, *gated_mlp.cotangents(lora, grads, scale, dropout), activation, tile
