"""Root-mean-square normalisation: the twin of `mesp_mlx.ops.rms_norm`.

r = 1 / sqrt(mean(x * x) + eps);  y = x * r * weight
"""

import numpy as np


def forward(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """Normalise x [..., D] by its rows' root mean square and scale by weight [D] (None: ones), in the dtype of x."""
    y = x * _scale(x, eps)
    if weight is not None:
        y *= weight
    return y


def backward(x: np.ndarray, weight: np.ndarray | None, eps: float, dy: np.ndarray) -> np.ndarray:
    """The gradient with respect to x [..., D], given dy [..., D]: dx = r (g - x r^2 mean(x g)), g = dy * weight."""
    r, g = _scale(x, eps), dy.copy() if weight is None else dy * weight.astype(x.dtype, copy=False)
    mean = np.einsum("...d,...d->...", x, g)[..., None] / x.shape[-1]
    g -= x * (r * r * mean)
    g *= r
    return g


def _scale(x: np.ndarray, eps: float) -> np.ndarray:
    return 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
