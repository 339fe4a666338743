"""What results are judged by: gradient checks, comparisons of trees, and the one table of tolerances.

Each check trusts only the one below it: float64 finite differences, the NumPy twin, plain MLX autodiff. NaN never passes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mesp_mlx.reference import quantized

# A gradient's error is max|difference| / max|reference|, tensor by tensor; of finite differences, that of the slope in a random direction.
TOLERANCE = {
    "finite differences": 1e-6,  # float64
    "twin": 1e-5,  # float32 MLX against float32 NumPy
    "autodiff": 1e-5,  # float32 custom function against float32 plain MLX
    "low precision": 1.5,  # times the error of naive code at the same dtype, against a float32 truth
}


def mlx() -> tuple[Any, Any]:
    """(mlx.core, mesp_mlx.ops), or skip the test where MLX is not installed."""
    mx = pytest.importorskip("mlx.core")
    from mesp_mlx import ops

    return mx, ops


def leaves(tree: Any) -> list[Any]:
    """The arrays of nested dicts, lists and tuples, as NumPy, in order; None where there is none."""
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in leaves(tree[name])]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if tree is None or isinstance(tree, np.ndarray | np.generic | int | float):
        return [tree]
    return [np.array(tree.astype(_core().float32)) if tree.dtype == _core().bfloat16 else np.array(tree)]


def error(got: Any, want: Any) -> float:
    """max|got - want| / max|want|; infinite if either holds a NaN or the shapes differ."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape or not (np.isfinite(got).all() and np.isfinite(want).all()):
        return math.inf
    difference = np.abs(got - want).max(initial=0.0)
    return 0.0 if difference == 0 else float(difference / max(np.abs(want).max(initial=0.0), 1e-30))


def assert_close(got: Any, want: Any, check: str) -> None:
    """Every array of `got` is as close to that of `want` as the table demands; None only where None is wanted."""
    got_leaves, want_leaves = leaves(got), leaves(want)
    assert len(got_leaves) == len(want_leaves)
    for place, (a, b) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        assert (a is None) == (b is None), f"array {place}: one of them is None"
        if a is not None:
            assert error(a, b) <= TOLERANCE[check], f"array {place}, {check}: error {error(a, b):.2e} over {TOLERANCE[check]:.0e}"


def assert_derivative(function: Callable[[np.ndarray], Any], x: np.ndarray, gradient: Any, dy: Any, seed: int = 1, step: float = 1e-5) -> None:
    """`gradient` is that of sum(dy * function(x)), by central differences along a random direction. All float64."""
    direction = np.random.default_rng(seed).normal(size=x.shape)
    slope = float(np.sum(dy * (function(x + step * direction) - function(x - step * direction))) / (2 * step))
    want = float(np.sum(direction * gradient))
    # A slope may be near zero by chance: measure against the size it would have on average.
    typical = float(np.linalg.norm(direction) * np.linalg.norm(gradient)) / math.sqrt(max(x.size, 1))
    off = abs(slope - want)
    assert math.isfinite(slope) and math.isfinite(want)
    assert off == 0 or off <= TOLERANCE["finite differences"] * max(abs(slope), typical), f"slope {slope}, gradient says {want}"


def assert_no_worse(got: Any, naive: Any, truth: Any) -> None:
    """In low precision, each array is about as close to the truth as naive code's."""
    for place, (a, b, c) in enumerate(zip(leaves(got), leaves(naive), leaves(truth), strict=True)):
        ours, theirs = error(a, c), error(b, c)
        assert 0 < theirs < 0.2, f"array {place}: naive code itself is off by {theirs:.2e}"
        assert ours <= TOLERANCE["low precision"] * theirs, f"array {place}: {ours:.2e}, naive code {theirs:.2e}"


def to_float32(tree: Any) -> Any:
    """The same tree with float64 arrays in float32."""
    return _map(lambda a: a.astype(np.float32) if a.dtype == np.float64 else a, tree)


def to_mlx(tree: Any) -> Any:
    """The same tree with NumPy arrays as MLX arrays, float64 as float32."""
    return _map(lambda a: _core().array(a.astype(np.float32) if a.dtype == np.float64 else a), tree)


def random_linear(rng: np.random.Generator, out: int, width: int, bits: int | None = None, group_size: int = 32, bias: bool = False) -> dict[str, Any]:
    """A frozen linear with outputs of about unit size, float64 when dense."""
    weight = rng.normal(size=(out, width)) / math.sqrt(width)
    linear = {"weight": weight} if bits is None else quantized.quantize(weight, bits, group_size)
    return linear | ({"bias": rng.normal(size=out)} if bias else {})


def random_pair(rng: np.random.Generator, width: int, out: int, rank: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """A LoRA pair (A, B). B starts at zero in training, which would hide an error in dA."""
    return rng.normal(size=(width, rank)) / math.sqrt(width), rng.normal(size=(rank, out))


def _map(function: Callable[[np.ndarray], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map(function, part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, part) for part in tree)
    return function(tree) if isinstance(tree, np.ndarray) else tree


def _core() -> Any:
    import mlx.core as mx

    return mx
