"""The few array operations that stages need besides the ops proper: the twin of `mesp_mlx.ops.arrays`."""

from collections.abc import Callable
from typing import Any

import numpy as np

name = "numpy"
float32 = np.float32


def asarray(a: Any) -> np.ndarray:
    """The array itself: nothing is copied."""
    return np.asarray(a)


def to_numpy(a: np.ndarray) -> np.ndarray:
    """The array itself."""
    return a


def zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Zeros of the given shape."""
    return np.zeros(shape, dtype)


def astype(a: np.ndarray, dtype: Any) -> np.ndarray:
    """The array in another dtype; itself where it has it already."""
    return a.astype(dtype, copy=False)


def concatenate(pieces: list[np.ndarray], axis: int) -> np.ndarray:
    """Join arrays along an axis."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)


def evaluate(tree: Any, *more: Any) -> Any:
    """The tree given first: NumPy computes at once."""
    return tree


def evaluator(limit_bytes: int | None) -> Callable[[Any], Any]:
    """`evaluate`: NumPy never runs ahead."""
    return evaluate


def own(a: np.ndarray) -> np.ndarray:
    """The array in memory of its own, row by row, if it is a part of another's."""
    return np.ascontiguousarray(a)


def take_rows(a: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Rows of a [N, ...] at integer index [n] -> [n, ...]."""
    return a[index]


def scatter_rows(values: np.ndarray, index: np.ndarray, n_rows: int) -> np.ndarray:
    """Values [n, ...] put at distinct rows index [n] of zeros [n_rows, ...]: the transpose of `take_rows`."""
    out = np.zeros((n_rows, *values.shape[1:]), values.dtype)
    out[index] = values
    return out


def add_rows(total: np.ndarray, values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Total [N, ...] with values [n, ...] added to its rows at distinct integer index [n]: in place."""
    total[index] += values
    return total


def set_row(total: np.ndarray, row: int, values: np.ndarray) -> np.ndarray:
    """Total [N, ...] with values [...] as its row: in place."""
    total[row] = values
    return total


def sum_squares(a: np.ndarray) -> float:
    """The sum of squares as a Python float, accumulated by pairs."""
    return float(np.sum(np.square(a)))
