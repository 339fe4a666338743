"""Layer normalisation (Ba, Kiros & Hinton, 2016).

Equals, row by row:

    r = 1 / sqrt(mean((x - mean(x))²) + eps)          # [..., 1]
    n = (x - mean(x)) * r
    y = n * weight + bias                             # [..., D]

Saved for backward: x, which the caller has anyway. Recomputed: the mean and r, two numbers per row.
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.ops import arrays


def forward(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """Normalise x [..., D] by its rows' mean and deviation, then scale by weight [D] and shift by bias [D], where there are any; in the dtype of x."""
    return mx.fast.layer_norm(x, weight, bias, eps).astype(x.dtype)


def backward(x: mx.array, weight: mx.array | None, eps: float, dy: mx.array) -> mx.array:
    """The gradient with respect to x [..., D], given dy [..., D]; weight and bias are frozen.

    With g = dy * weight:

        dx = r (g - mean(g) - n mean(g n))
    """
    width = x.shape[-1]
    x32, g = x.astype(mx.float32), dy.astype(mx.float32)
    g = g if weight is None else g * weight
    centred = x32 - arrays.row_sums(x32) / width
    r = mx.rsqrt(arrays.row_sums(centred * centred) / width + eps)
    n = centred * r
    return (r * (g - arrays.row_sums(g) / width - n * (arrays.row_sums(g * n) / width))).astype(x.dtype)


def apply(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; the frozen weight and bias get zeros."""
    return _apply(x, weight, bias, eps)


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    x, weight, bias, eps = primals
    return backward(x, weight, eps, dy), *(None if frozen is None else mx.zeros_like(frozen) for frozen in (weight, bias)), eps
