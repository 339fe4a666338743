"""Mixture of experts: the router, and one expert's gated MLP on the tokens that it serves: the twin of `mesp_mlx.ops.experts`.

y[t] = sum over j of p[t, j] * MLP_index[t, j](x[t])          # index = topk(logits), p their softmax
"""

import numpy as np

from mesp_mlx.reference import gated_mlp
from mesp_mlx.reference.activations import Activation
from mesp_mlx.reference.gated_mlp import Dropouts, Kept, Loras
from mesp_mlx.reference.quantized import Linear


def route(logits: np.ndarray, chosen: int, over_all: bool) -> tuple[np.ndarray, np.ndarray]:
    """The `chosen` experts of each token and their weights: logits [N, E] -> index [N, k], p [N, k].

    over_all: the softmax is over all experts, so that p sums to less than 1.
    """
    index = np.sort(np.argpartition(-logits, chosen - 1, axis=-1)[:, :chosen], axis=-1)
    return index, _softmax(logits, index, over_all)[0]


def route_backward(logits: np.ndarray, index: np.ndarray, dp: np.ndarray, over_all: bool) -> np.ndarray:
    """The gradient of logits [N, E], given dp [N, k]: that of p_j = e^l_j / Z, with Z over all experts or over those chosen.

    dl_j = p_j (dp_j - c), with c = sum over j of p_j dp_j, and -p_j c for those that were not chosen but are in Z.
    """
    p, total = _softmax(logits, index, over_all)
    weighted = p * dp
    c = np.sum(weighted, axis=-1, keepdims=True)
    d = np.zeros_like(logits)
    if over_all:
        np.exp(logits - total, out=d)
        d *= -c
        np.put_along_axis(d, index, np.take_along_axis(d, index, -1) + weighted, -1)
    else:
        np.put_along_axis(d, index, weighted - c * p, -1)
    return d


def forward(
    x: np.ndarray,
    p: np.ndarray,
    gate: Linear,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    kept: Kept | None = None,
) -> np.ndarray:
    """One expert's share of y: rows x [n, D] with their weights p [n] -> p * MLP(x) [n, D]. The rest as in `gated_mlp.forward`."""
    y = gated_mlp.forward(x, gate, up, down, lora, scale, dropout, activation, tile, kept)
    y *= p[:, None]
    return y


def backward(
    x: np.ndarray,
    p: np.ndarray,
    gate: Linear,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: np.ndarray,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[np.ndarray | None, np.ndarray, Loras]:
    """(dx [n, D] or None, dp [n], the adapters' gradients as in `gated_mlp.backward`), given dy [n, D]."""
    dx, grads, dp = gated_mlp.weighted_backward(x, p, gate, up, down, lora, scale, dy, dropout, activation, tile, need_dx, kept)
    assert dp is not None
    return dx, dp, grads


def _softmax(logits: np.ndarray, index: np.ndarray, over_all: bool) -> tuple[np.ndarray, np.ndarray]:
    """p [N, k] of the chosen, and log Z [N, 1]."""
    found = np.take_along_axis(logits, index, -1)
    among = logits if over_all else found
    top = among.max(axis=-1, keepdims=True)
    total = top + np.log(np.sum(np.exp(among - top), axis=-1, keepdims=True))
    return np.exp(found - total), total
