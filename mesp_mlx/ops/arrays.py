"""The few array operations that stages need besides the ops proper."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

name = "mlx"
float32 = mx.float32
UNLIMITED_BYTES = 1 << 50


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


def evaluator(room_bytes: int | None) -> Callable[[Any], Any]:
    """`evaluate` that holds execution back: tasks wait while more than room_bytes beyond what is active at its start are allocated; None: they never do.

    Without it MLX runs up to ten tasks ahead of the one that frees memory; with too little room every task waits for the one before.
    """

    def evaluate_within(tree: Any) -> Any:
        mx.set_memory_limit(UNLIMITED_BYTES if room_bytes is None else mx.get_active_memory() + room_bytes)
        return evaluate(tree)

    return evaluate_within


def take_rows(a: mx.array, index: mx.array) -> mx.array:
    """Rows of a [N, ...] at integer index [n] -> [n, ...]."""
    return mx.take(a, index, axis=0)


def scatter_rows(values: mx.array, index: mx.array, n_rows: int) -> mx.array:
    """Values [n, ...] put at distinct rows index [n] of zeros [n_rows, ...]: the transpose of `take_rows`."""
    out = mx.zeros((n_rows, *values.shape[1:]), values.dtype)
    if values.shape[0]:
        out[index] = values
    return out


def sum_squares(a: mx.array) -> float:
    """The sum of squares as a Python float (evaluates)."""
    return float(np.array(mx.sum(mx.square(a.astype(mx.float32)))))
