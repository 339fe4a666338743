"""A frozen linear with a low-rank adapter: the twin of `mesp_mlx.ops.lora_linear`.

y = x @ W.T + bias + scale * ((x̃ @ A) @ B)          # A [in, R], B [R, out], x̃ = dropout(x)
"""

import numpy as np

from mesp_mlx.reference import quantized
from mesp_mlx.reference.quantized import Linear

Pair = tuple[np.ndarray, np.ndarray]
Dropout = tuple[np.ndarray, float]  # which inputs are kept (bool, shaped like x), and the rate at which they were dropped


def drop(x: np.ndarray, dropout: Dropout | None) -> np.ndarray:
    """x where it is kept, scaled so that its mean stays. Linear in x and its own transpose."""
    if dropout is None:
        return x
    keep, rate = dropout
    return x * (keep * x.dtype.type(1 / (1 - rate)))


def hidden(x: np.ndarray, lora: Pair, dropout: Dropout | None = None) -> np.ndarray:
    """h = x̃ A, [..., in] -> [..., R]."""
    return drop(x, dropout) @ lora[0]


def forward(
    x: np.ndarray,
    linear: Linear,
    lora: Pair | None,
    scale: float,
    dropout: Dropout | None = None,
    h: np.ndarray | None = None,
    tile_bytes: int | None = None,
) -> np.ndarray:
    """x [..., in] -> y [..., out] in the dtype of x. h is `hidden`, where the caller has it; tile_bytes: see `quantized.matmul`."""
    y = quantized.matmul(x, linear, tile_bytes=tile_bytes)
    if lora is not None:
        h = hidden(x, lora, dropout) if h is None else h
        y += scale * h @ lora[1]
    return y


def backward(
    x: np.ndarray,
    linear: Linear,
    lora: Pair | None,
    scale: float,
    dy: np.ndarray,
    dropout: Dropout | None = None,
    need_dx: bool = True,
    h: np.ndarray | None = None,
    tile_bytes: int | None = None,
) -> tuple[np.ndarray | None, Pair | None]:
    """(dx [..., in] or None, (dA [in, R], dB [R, out]) or None), given dy [..., out]. h is `hidden`, where it was kept: paid for in memory."""
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
        dx += drop((dh @ a.T).reshape(x.shape), dropout)  # [N,R] @ [R,in] -> [N,in]
    return dx, (da, db)
