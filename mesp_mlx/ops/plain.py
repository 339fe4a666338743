"""The parts of a decoder layer in plain MLX, differentiated by MLX's autodiff: for the methods that MeSP is compared with, and to check it by.

Nothing here has a hand-derived backward but the frozen product, whose gradient dequantises anew, as MLX's own quantized_matmul does: no method
keeps a dequantised weight. Every array that autodiff wants for backward is kept, among them h = x̃ A, the logits and, but where MLX has a fused attention
with a backward of its own, the probabilities [B, H, T, T].
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mesp_mlx.ops import quantized
from mesp_mlx.ops import rope as ropes
from mesp_mlx.ops.activations import LIMIT, Activation
from mesp_mlx.ops.lora_linear import Dropout, Pair, drop
from mesp_mlx.ops.quantized import Linear

Arrays = dict[str, Any]
Function = Callable[[Arrays], Any]


def linear(x: mx.array, frozen: Linear, lora: Pair | None, scale: float, dropout: Dropout | None = None) -> mx.array:
    """x [..., in] -> x Wᵀ + bias + scale (x̃ A) B, [..., out]."""
    y = quantized.apply(x, frozen)
    if lora is None:
        return y
    a, b = lora
    return y + (scale * ((drop(x, dropout) @ a) @ b)).astype(x.dtype)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x [..., D] over its rows' root mean square, times weight [D], if any."""
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """x [..., D] less its rows' mean, over their deviation, times weight [D] and plus bias [D], if any."""
    return mx.fast.layer_norm(x, weight, bias, eps).astype(x.dtype)


def rope(x: mx.array, rope: dict[str, Any]) -> mx.array:
    """x [B, H, T, d] turned by its positions."""
    return ropes.forward(x, rope)


def attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, window: int | None = None, cap: float | None = None, sinks: mx.array | None = None
) -> mx.array:
    """Causal attention, q [B, H, T, d], k and v [B, K, T, d] -> [B, H, T, d]; a query sees `window` keys, itself included, or all before it.

    Scores are capped at `cap`, and each head's of sinks [H] is one more logit, without a value: both by code that MLX can differentiate.
    """
    mask: Any = "causal"
    if window is not None or cap is not None or sinks is not None:
        row, key = mx.arange(q.shape[2])[:, None], mx.arange(q.shape[2])[None]
        mask = (key <= row) & (key > row - (window or q.shape[2]))
    if cap is None and sinks is None:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    batch, heads, tokens, width = q.shape
    by_key = (scale * q).reshape(batch, k.shape[1], -1, tokens, width)  # [B, K, G, T, d]
    scores = by_key @ k[:, :, None].swapaxes(-1, -2)
    scores = mx.where(mask, scores if cap is None else cap * mx.tanh(scores / cap), -mx.inf)
    if sinks is not None:
        sink = mx.broadcast_to(sinks.astype(scores.dtype).reshape(k.shape[1], -1, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, sink], axis=-1)
    p = mx.softmax(scores, axis=-1, precise=True)[..., :tokens]
    return (p @ v[:, :, None]).reshape(batch, heads, tokens, -1)


def activate(g: mx.array, activation: Activation) -> mx.array:
    """phi(g): see `activations`."""
    match activation:
        case "silu":
            return g * mx.sigmoid(g)
        case "gelu":
            return 0.5 * g * (1 + mx.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g * g * g)))
        case "gelu_exact":
            return 0.5 * g * (1 + mx.erf(g / math.sqrt(2)))
        case "gelu_sigmoid":
            return g * mx.sigmoid(1.702 * g)
        case "relu":
            return mx.maximum(g, 0)
        case "relu_squared":
            return mx.square(mx.maximum(g, 0))
        case "clipped_swiglu":
            return activate(mx.minimum(g, LIMIT), "gelu_sigmoid")


def gate(g: mx.array, u: mx.array, activation: Activation = "silu") -> mx.array:
    """phi(g) * u, or what the activation makes of u."""
    return activate(g, activation) * (mx.clip(u, -LIMIT, LIMIT) + 1 if activation == "clipped_swiglu" else u)


def route(logits: mx.array, chosen: int, over_all: bool) -> tuple[mx.array, mx.array]:
    """The chosen experts of each token and their weights: logits [N, E] -> index [N, k], p [N, k]; over_all: the softmax is over all experts."""
    index = mx.stop_gradient(mx.sort(mx.argpartition(-logits, kth=chosen - 1, axis=-1)[:, :chosen], axis=-1))
    if over_all:
        return index, mx.take_along_axis(mx.softmax(logits, axis=-1, precise=True), index, axis=-1)
    return index, mx.softmax(mx.take_along_axis(logits, index, axis=-1), axis=-1, precise=True)


def experts(
    x: mx.array, p: mx.array, index: mx.array, linears: Arrays, lora: Arrays, scale: float, dropout: Arrays, activation: Activation = "silu"
) -> mx.array:
    """x [N, D] -> sum over j of p[:, j] times the gated MLP of expert index[:, j], [N, D].

    `linears` has "gate", "up" and "down" of all experts [E, out, in], `lora` their pairs A [E, R, in] and B [E, out, R], `dropout` their masks [N, in].
    """

    def linear(x: mx.array, name: str) -> mx.array:
        frozen, pair, masks = linears[name], lora[name], dropout[name]
        if "global_scale" in frozen:  # which gather_qmm takes on a GPU only
            each = [{part: value[e] if isinstance(value, mx.array) else value for part, value in frozen.items()} for e in range(len(frozen["weight"]))]
            dense = mx.stack([quantized.dequantize(expert, x.dtype) for expert in each])
            y = mx.gather_mm(x, dense.swapaxes(-1, -2), rhs_indices=index)
        elif "scales" in frozen:
            packed = (frozen["weight"], frozen["scales"], frozen.get("biases"))
            how = {part: frozen[part] for part in ("bits", "group_size", "mode") if part in frozen}
            y = mx.gather_qmm(x, *packed, rhs_indices=index, transpose=True, **how).astype(x.dtype)
        else:
            y = mx.gather_mm(x, frozen["weight"].astype(x.dtype).swapaxes(-1, -2), rhs_indices=index)
        if "bias" in frozen:
            y = y + frozen["bias"][index][:, :, None].astype(x.dtype)
        if pair is None:
            return y
        h = drop(x, masks and (masks[0][:, None, None], masks[1]))
        for part in pair:
            h = mx.gather_mm(h, part.swapaxes(-1, -2), rhs_indices=index)
        return y + (scale * h).astype(x.dtype)

    z = x[:, None, None]  # [N, 1, 1, D]
    z = gate(linear(z, "gate"), linear(z, "up"), activation)  # [N, k, 1, F]
    return (p[:, :, None].astype(x.dtype) * linear(z, "down")[:, :, 0]).sum(axis=1)


def cap(logits: mx.array, scale: float = 1.0, cap: float | None = None) -> mx.array:
    """scale * logits, softly held between -cap and cap."""
    logits = logits if scale == 1 else scale * logits
    return logits if cap is None else cap * mx.tanh(logits / cap)


def cross_entropy(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
    """The loss of logits [B, T, V] at targets [B, T], summed where mask [B, T] is true, in float32."""
    whole = logits.astype(mx.float32)
    block = whole.shape[-1] & -whole.shape[-1]  # the largest power of two in it
    # In two levels, because MLX's CPU device adds up one by one: 1e-4 of a loss is lost over 49,152 words.
    totals = mx.logsumexp(mx.logsumexp(whole.reshape(*whole.shape[:-1], -1, block), axis=-1), axis=-1)
    losses = totals - mx.take_along_axis(whole, targets[..., None], axis=-1)[..., 0]
    return mx.sum(losses * mask)


def vjp(function: Function, primals: Arrays, cotangent: mx.array | None = None) -> tuple[mx.array, Arrays]:
    """function(primals), and the gradient of sum(cotangent * function(primals)) by each of their names; no cotangent means 1, for a scalar."""
    names = list(primals)
    ones = mx.ones(()) if cotangent is None else cotangent
    given: list[Any] = list(primals.values())
    (output,), gradients = mx.vjp(lambda *arrays: [function(dict(zip(names, arrays, strict=True)))], given, [ones])
    return output, dict(zip(names, gradients, strict=True))


def checkpoint(function: Function) -> Function:
    """The function, of which only the inputs are kept for backward."""

    def kept(primals: Arrays) -> mx.array:
        names = list(primals)
        recomputed: Any = mx.checkpoint(lambda *arrays: function(dict(zip(names, arrays, strict=True))))
        return recomputed(*primals.values())

    return kept
