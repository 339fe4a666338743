"""Root-mean-square normalisation (Zhang & Sennrich, 2019, eq. 4).

Equals, row by row:

    r = 1 / sqrt(mean(x * x) + eps)          # [..., 1]
    y = x * r * weight                       # [..., D]

Saved for backward: x, which the caller has anyway. Recomputed: r, one number per row.
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.ops import arrays


def forward(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """Normalise x [..., D] by its rows' root mean square and scale by weight [D] (None: ones), in the dtype of x."""
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def backward(x: mx.array, weight: mx.array | None, eps: float, dy: mx.array) -> mx.array:
    """The gradient with respect to x [..., D], given dy [..., D]; weight is frozen.

    With g = dy * weight and r as above, dr/dx = -x r^3 / D, so

        dx = r g - x r^3 mean(x g)
    """
    x32, g = x.astype(mx.float32), dy.astype(mx.float32)
    g = g if weight is None else g * weight
    width = x.shape[-1]
    r = mx.rsqrt(arrays.row_sums(x32 * x32) / width + eps)
    return (r * g - x32 * (r * r * r * arrays.row_sums(x32 * g) / width)).astype(x.dtype)


def apply(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; the frozen weight gets zeros."""
    return _apply(x, weight, eps)


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    x, weight, eps = primals
    return backward(x, weight, eps, dy), None if weight is None else mx.zeros_like(weight), eps
