"""Layer normalisation: the twin of `mesp_mlx.ops.layer_norm`.

r = 1 / sqrt(mean((x - mean(x))²) + eps);  n = (x - mean(x)) * r;  y = n * weight + bias
"""

import numpy as np


def forward(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """Normalise x [..., D] by its rows' mean and deviation, then scale by weight [D] and shift by bias [D], where there are any; in the dtype of x."""
    y, _ = _normalised(x, eps)
    if weight is not None:
        y *= weight
    if bias is not None:
        y += bias
    return y


def backward(x: np.ndarray, weight: np.ndarray | None, eps: float, dy: np.ndarray) -> np.ndarray:
    """The gradient with respect to x [..., D], given dy [..., D]: dx = r (g - mean(g) - n mean(g n)), g = dy * weight."""
    n, r = _normalised(x, eps)
    g = dy.copy() if weight is None else dy * weight.astype(x.dtype, copy=False)
    n *= np.einsum("...d,...d->...", g, n)[..., None] / x.shape[-1]
    g -= np.mean(g, axis=-1, keepdims=True)
    g -= n
    g *= r
    return g


def _normalised(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """n [..., D] and r [..., 1]."""
    n = x - np.mean(x, axis=-1, keepdims=True)
    r = 1 / np.sqrt(np.einsum("...d,...d->...", n, n)[..., None] / x.shape[-1] + eps)
    n *= r
    return n, r
