"""The few array operations that stages need besides the ops proper."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mesp_mlx.ops import quantized

name = "mlx"
float32 = mx.float32
UNLIMITED_BYTES = 1 << 50
# 2^f for f in -1/2 to 1/2, to 8e-8 of itself: least squares at Chebyshev points, lowest power first.
POWERS = (1.00000007, 0.693146949, 0.240221218, 0.0555074262, 0.00967545975, 0.00132669704)
ROUND = 1.5 * 2.0**23 + 127  # added to y, leaves it rounded to n, and in the lowest bits n + 127: the exponent of 2^n


def asarray(a: Any) -> mx.array:
    """A NumPy array (or nested list) as an MLX array of the same dtype."""
    return mx.array(a)


def to_numpy(a: mx.array) -> np.ndarray:
    """Evaluate and copy out. bfloat16, which NumPy lacks, comes out as float32."""
    return np.array(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a)


def zeros(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> mx.array:
    """Zeros of the given shape."""
    return mx.zeros(shape, dtype)


def astype(a: mx.array, dtype: mx.Dtype) -> mx.array:
    """The array in another dtype; itself where it has it already."""
    return a.astype(dtype)


def concatenate(pieces: list[mx.array], axis: int) -> mx.array:
    """Join arrays along an axis."""
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis)


def evaluate(tree: Any, *more: Any) -> Any:
    """The tree given first, with its arrays, and those of any more, computed now: the engine calls this, ops never do."""
    mx.eval(tree, *more)
    return tree


def evaluator(limit_bytes: int | None) -> Callable[[Any], Any]:
    """`evaluate` that holds execution back: tasks wait while more than limit_bytes are allocated in all; None: they never do.

    Without it MLX runs up to ten tasks ahead of the one that frees memory; with too little room every task waits for the one before.
    """

    def evaluate_within(tree: Any) -> Any:
        mx.set_memory_limit(UNLIMITED_BYTES if limit_bytes is None else limit_bytes)
        return evaluate(tree)

    return evaluate_within


def own(a: mx.array) -> mx.array:
    """The array in memory of its own, row by row, if it is a part of another's."""
    return mx.contiguous(a)


def take_rows(a: mx.array, index: mx.array) -> mx.array:
    """Rows of a [N, ...] at integer index [n] -> [n, ...]."""
    return mx.take(a, index, axis=0)


def scatter_rows(values: mx.array, index: mx.array, n_rows: int) -> mx.array:
    """Values [n, ...] put at distinct rows index [n] of zeros [n_rows, ...]: the transpose of `take_rows`."""
    out = mx.zeros((n_rows, *values.shape[1:]), values.dtype)
    if values.shape[0]:
        out[index] = values
    return out


def add_rows(total: mx.array, values: mx.array, index: mx.array) -> mx.array:
    """Total [N, ...] with values [n, ...] added to its rows at distinct integer index [n], in the dtype of total; total itself is not to be used again."""
    return total.at[index].add(values.astype(total.dtype))


def set_row(total: mx.array, row: int, values: mx.array) -> mx.array:
    """Total [N, ...] with values [...] as its row; total itself is not to be used again: where nobody holds it, it is not copied."""
    total[row] = values
    return total


def exp(a: mx.array) -> mx.array:
    """e^a for a <= 88, as exact as mx.exp, which takes five times as long on a CPU device; in float32 there it ends at 2^-126 instead of zero."""
    if a.dtype != mx.float32 or not quantized.on_cpu():
        return mx.exp(a)
    y = mx.maximum(a * 1.4426950408889634, -126.0)  # e^a = 2^y
    rounded = y + ROUND
    f = y - (rounded - ROUND)
    power = POWERS[-1] * f + POWERS[-2]
    for coefficient in POWERS[-3::-1]:
        power = power * f + coefficient
    return power * mx.view(mx.view(rounded, mx.uint32) << 23, mx.float32)


def sigmoid(a: mx.array) -> mx.array:
    """1 / (1 + e^-a)."""
    return 1 / (1 + exp(mx.minimum(-a, 88.0))) if a.dtype == mx.float32 and quantized.on_cpu() else mx.sigmoid(a)


def row_sums(a: mx.array) -> mx.array:
    """Sums over the last axis, [..., n] -> [..., 1], in float32: on a CPU device as a product, ten times as fast as mx.sum."""
    return a @ mx.ones((a.shape[-1], 1)) if quantized.on_cpu() else mx.sum(a, axis=-1, keepdims=True)


def sum_squares(a: mx.array) -> float:
    """The sum of squares as a Python float (evaluates)."""
    return float(np.array(mx.sum(mx.square(a.astype(mx.float32)))))
