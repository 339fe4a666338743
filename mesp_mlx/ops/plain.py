"""The parts of a decoder layer in plain MLX, differentiated by MLX's autodiff: for the methods that MeSP is compared with, and to check it by.

Nothing here has a hand-derived backward but the frozen product, whose gradient dequantises anew, as MLX's own quantized_matmul does: no method
keeps a dequantised weight. Every array that autodiff wants for backward is kept, among them h = x̃ A, the logits and, but where MLX has a fused attention
with a backward of its own, the probabilities [B, H, T, T].
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mesp_mlx.ops import quantized
from mesp_mlx.ops import rope as ropes
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


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x [..., D] over its rows' root mean square, times weight [D]."""
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def rope(x: mx.array, rope: dict[str, Any]) -> mx.array:
    """x [B, H, T, d] turned by its positions."""
    return ropes.forward(x, rope)


def attention(q: mx.array, k: mx.array, v: mx.array, scale: float, window: int | None = None) -> mx.array:
    """Causal attention, q [B, H, T, d], k and v [B, K, T, d] -> [B, H, T, d]; a query sees `window` keys, itself included, or all before it."""
    mask: Any = "causal"
    if window is not None:
        row, key = mx.arange(q.shape[2])[:, None], mx.arange(q.shape[2])[None]
        mask = (key <= row) & (key > row - window)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def gate(g: mx.array, u: mx.array) -> mx.array:
    """silu(g) * u."""
    return g * mx.sigmoid(g) * u


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
