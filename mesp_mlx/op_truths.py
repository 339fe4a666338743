"""Frozen products and the head's gradient by definition, in float64 and with nothing of `quantized`: what `op_checks` holds against the ops."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mesp_mlx.model.stages import State

TABLE_ROWS = 1024  # of a weight that are unpacked at once


def numbers(tree: Any) -> Any:
    """The same nested dicts and tuples with their arrays in NumPy, floating-point numbers as float64."""
    if isinstance(tree, dict):
        return {name: numbers(part) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(numbers(part) for part in tree)
    if not hasattr(tree, "dtype"):
        return tree
    if not isinstance(tree, np.ndarray | np.generic):
        from mesp_mlx import ops  # an MLX array: MLX is here

        tree = ops.arrays.to_numpy(tree)
    return tree.astype(np.float64) if tree.dtype.kind == "f" else tree


def products(linear: State, x: Any, dy: Any, to: Callable[[np.ndarray], Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x Wᵀ + bias, dy W and the first rows of W, float64 by tiles of W. to: see `unpacked`."""
    y, dx, first = [], np.zeros(x.shape), None
    for i in range(0, linear["weight"].shape[0], TABLE_ROWS):
        weight = unpacked({name: value[i : i + TABLE_ROWS] if hasattr(value, "shape") else value for name, value in linear.items()}, to)
        y.append(numbers(x @ weight.T))
        dx += numbers(dy[..., i : i + TABLE_ROWS] @ weight)
        first = numbers(weight) if first is None else first
    assert first is not None
    return np.concatenate(y, axis=-1) + numbers(linear.get("bias", 0.0)), dx, first


def unpacked(linear: State, to: Callable[[np.ndarray], Any]) -> Any:
    """W [out, in] by the definition of MLX's formats, with nothing of `quantized`: codes from bits. to: makes arrays of the dtype to compute it in."""
    linear = numbers(linear)
    if "scales" not in linear:
        return to(linear["weight"])
    scales, count, mode = linear["scales"], linear["bits"], linear.get("mode", "affine")
    bits = np.unpackbits(np.ascontiguousarray(linear["weight"], "<u4").view(np.uint8), bitorder="little")
    codes = np.packbits(bits.reshape(*scales.shape, linear["group_size"], count), axis=-1, bitorder="little")[..., 0]
    if mode == "affine":
        return (to(codes) * to(scales)[..., None] + to(linear["biases"])[..., None]).reshape(len(codes), -1)
    values = _small_float(codes, 4, 3) if count == 8 else _small_float(codes, 2, 1)
    sizes = _small_float(scales, 4, 3) if mode == "nvfp4" else 2.0 ** (scales.astype(np.float64) - 127)
    return (to(values) * to(sizes)[..., None]).reshape(len(codes), -1)


def _small_float(code: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    """What codes of a sign and so many bits of exponent and mantissa stand for."""
    sign, power, part = code >> (exponent + mantissa), code >> mantissa & (2**exponent - 1), (code & (2**mantissa - 1)) / 2**mantissa
    return np.where(sign, -1.0, 1.0) * np.where(power, 1 + part, 2 * part) * 2.0 ** (power.astype(np.float64) - 2 ** (exponent - 1) + 1)


def softmax_gradient(
    w: Any, table: str, to: Callable[[np.ndarray], Any], h: Any, targets: np.ndarray, scale: float = 1.0, cap: float | None = None
) -> np.ndarray:
    """(softmax(logits) - onehot(targets)) W, float64 [N, D], from whole float64 logits; the table is read twice in tiles. to: as `unpacked`'s, and h's dtype.

    With a scale and a cap, times the derivative of cap tanh(scale l / cap).
    """
    logits = np.concatenate([numbers(h @ unpacked(tile, to).T) for _, tile in w.tiles(table, TABLE_ROWS)], axis=1)  # [N,D] @ [D,V] -> [N,V]
    logits *= scale
    slope = 1.0
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
        slope = 1 - (logits / cap) ** 2
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits, out=logits)
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(targets)), targets] -= 1
    p *= scale * slope
    dh = np.zeros((len(targets), h.shape[1]))
    for first, tile in w.tiles(table, TABLE_ROWS):
        weight = unpacked(tile, to)
        dh += numbers(to(p[:, first : first + weight.shape[0]]) @ weight)  # [N,v] @ [v,D] -> [N,D]
    return dh
