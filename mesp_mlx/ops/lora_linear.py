"""A frozen linear with a low-rank adapter (Hu et al., 2021, eq. 3; backward: MeSP, arXiv 2602.13069).

Equals, with x̃ = dropout(x):

    y = x @ W.T + bias + scale * ((x̃ @ A) @ B)          # A [in, R], B [R, out]

Saved for backward: x. Recomputed: h = x̃ @ A [N, R], which costs less than keeping it for every module.
The weight W stays packed (see `quantized`).
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.ops import quantized
from mesp_mlx.ops.quantized import Linear

Pair = tuple[mx.array, mx.array]
Dropout = tuple[mx.array, float]  # which inputs are kept (bool, shaped like x), and the rate at which they were dropped


def drop(x: mx.array, dropout: Dropout | None) -> mx.array:
    """x where it is kept, scaled so that its mean stays. Linear in x and its own transpose."""
    if dropout is None:
        return x
    keep, rate = dropout
    return x * (keep.astype(x.dtype) * (1 / (1 - rate)))  # half the time of mx.where on a CPU device


def hidden(x: mx.array, lora: Pair, dropout: Dropout | None = None) -> mx.array:
    """h = x̃ A, [..., in] -> [..., R]."""
    return drop(x, dropout) @ lora[0]


def forward(
    x: mx.array,
    linear: Linear,
    lora: Pair | None,
    scale: float,
    dropout: Dropout | None = None,
    h: mx.array | None = None,
    tile_bytes: int | None = None,
) -> mx.array:
    """x [..., in] -> y [..., out] in the dtype of x. h is `hidden`, where the caller has it; tile_bytes: see `quantized.matmul`."""
    y = quantized.matmul(x, linear, tile_bytes=tile_bytes)
    if lora is None:
        return y
    h = hidden(x, lora, dropout) if h is None else h
    return y + (scale * h @ lora[1]).astype(x.dtype)


def backward(
    x: mx.array,
    linear: Linear,
    lora: Pair | None,
    scale: float,
    dy: mx.array,
    dropout: Dropout | None = None,
    need_dx: bool = True,
    h: mx.array | None = None,
    tile_bytes: int | None = None,
) -> tuple[mx.array | None, Pair | None]:
    """(dx [..., in] or None, (dA [in, R], dB [R, out]) float32 or None), given dy [..., out]. h is `hidden`, where it was kept: paid for in memory."""
    dx = quantized.matmul_transposed(dy, linear, tile_bytes=tile_bytes) if need_dx else None  # [N,out] @ [out,in] -> [N,in]
    if lora is None:
        return dx, None
    a, b = lora
    dropped, g = drop(x, dropout).reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    h = dropped @ a if h is None else h.reshape(-1, h.shape[-1])  # [N,in] @ [in,R] -> [N,R]
    db = (scale * h).T @ g  # [R,N] @ [N,out] -> [R,out]
    dh = scale * (g @ b.T)  # [N,out] @ [out,R] -> [N,R]
    da = dropped.T @ dh  # [in,N] @ [N,R] -> [in,R]
    if dx is not None:
        dx = dx + drop((dh @ a.T).reshape(x.shape), dropout).astype(x.dtype)  # [N,R] @ [R,in] -> [N,in]
    return dx, (da.astype(mx.float32), db.astype(mx.float32))


def apply(x: mx.array, linear: Linear, a: mx.array, b: mx.array, scale: float, dropout: Dropout | None = None) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; the frozen linear gets zeros."""
    return _apply(x, linear, (a, b), scale, dropout)


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    x, linear, lora, scale, dropout = primals
    dx, grads = backward(x, linear, lora, scale, dy, dropout)
    d_lora = grads and tuple(d.astype(p.dtype) for d, p in zip(grads, lora, strict=True))
    return dx, quantized.zeros_like(linear), d_lora, scale, dropout and (mx.zeros_like(dropout[0]), dropout[1])
