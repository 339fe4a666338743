"""Rotary position embedding: the twin of `mesp_mlx.ops.rope`, whose docstring has the equations."""

from typing import Any

import numpy as np

Rope = dict[str, Any]


def forward(x: np.ndarray, rope: Rope) -> np.ndarray:
    """Rotate x [B, H, T, d] by position, in the dtype of x."""
    return _rotate(x, rope, rope["scale"])


def backward(dy: np.ndarray, rope: Rope) -> np.ndarray:
    """The gradient with respect to x [B, H, T, d], given dy: the rotation by the opposite angle."""
    return _rotate(dy, rope, -rope["scale"])


def _rotate(x: np.ndarray, rope: Rope, scale: float) -> np.ndarray:
    dims, half = rope["dims"], rope["dims"] // 2
    # Angles are rounded like MLX's: at position 2000 a float32 angle is off by 1e-4, and the twins should be off alike.
    freqs = rope["base"] ** (np.arange(half) / half) if rope["freqs"] is None else rope["freqs"]
    angle = np.arange(x.shape[-2], dtype=x.dtype)[:, None] * x.dtype.type(scale) * (1 / np.asarray(freqs)).astype(x.dtype)
    cos, sin = (rope["magnitude"] * f(angle) for f in (np.cos, np.sin))  # [T, dims/2]
    first, second = (slice(0, dims, 2), slice(1, dims, 2)) if rope["traditional"] else (slice(0, half), slice(half, dims))
    x1, x2 = x[..., first], x[..., second]
    y = np.empty_like(x)
    y[..., dims:] = x[..., dims:]
    y1, y2 = y[..., first], y[..., second]
    np.multiply(x1, cos, out=y1)
    y1 -= x2 * sin
    np.multiply(x1, sin, out=y2)
    y2 += x2 * cos
    return y
