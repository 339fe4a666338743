"""MLP without a gate, with low-rank adapters, over tiles of its width F: the twin of `mesp_mlx.ops.mlp`.

u = up(x);  y = down(phi(u))          # each a lora_linear
"""

import numpy as np

from mesp_mlx.reference import gated_mlp
from mesp_mlx.reference.activations import Activation
from mesp_mlx.reference.gated_mlp import Dropouts, Kept, Loras
from mesp_mlx.reference.quantized import Linear


def forward(
    x: np.ndarray,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "gelu",
    tile: int | None = None,
    kept: Kept | None = None,
) -> np.ndarray:
    """x [..., D] -> y [..., D] in the dtype of x. `tile` is a multiple of 32 and of the group size.

    A dict given as `kept` receives what `backward` need not compute again: {"up": u}, [N, F].
    """
    return gated_mlp.forward(x, None, up, down, lora, scale, dropout, activation, tile, kept)


def backward(
    x: np.ndarray,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: np.ndarray,
    dropout: Dropouts = None,
    activation: Activation = "gelu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[np.ndarray | None, Loras]:
    """(dx [..., D] or None, {"up", "down": (dA [in, R], dB [R, out]), or None without an adapter}), given dy [..., D].

    As in `gated_mlp`, with du = dz phi'(u).
    """
    return gated_mlp.backward(x, None, up, down, lora, scale, dy, dropout, activation, tile, need_dx, kept)
