"""MLP without a gate, with low-rank adapters, over tiles of its width F: `gated_mlp` without its gate, computed there.

Equals, each of up and down being a `lora_linear`:

    u = up(x)                             # [N, F]
    y = down(phi(u))                      # [N, D]; phi: see `activations`

Saved for backward: x. Recomputed: u and phi(u), a tile [N, f] at a time; the product with down is not.
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.ops import gated_mlp, quantized
from mesp_mlx.ops.activations import Activation
from mesp_mlx.ops.gated_mlp import Dropouts, Kept, Loras
from mesp_mlx.ops.quantized import Linear


def forward(
    x: mx.array,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "gelu",
    tile: int | None = None,
    kept: Kept | None = None,
) -> mx.array:
    """x [..., D] -> y [..., D] in the dtype of x. `tile` is a multiple of 32 and of the group size.

    A dict given as `kept` receives what `backward` need not compute again: {"up": u}, [N, F].
    """
    return gated_mlp.forward(x, None, up, down, lora, scale, dropout, activation, tile, kept)


def backward(
    x: mx.array,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: mx.array,
    dropout: Dropouts = None,
    activation: Activation = "gelu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[mx.array | None, Loras]:
    """(dx [..., D] or None, {"up", "down": (dA [in, R], dB [R, out]) float32, or None without an adapter}), given dy [..., D].

    As in `gated_mlp`, with du = dz phi'(u).
    """
    return gated_mlp.backward(x, None, up, down, lora, scale, dy, dropout, activation, tile, need_dx, kept)


def apply(
    x: mx.array, up: Linear, down: Linear, lora: Loras, scale: float, dropout: Dropouts = None, activation: Activation = "gelu", tile: int | None = None
) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; frozen linears get zeros."""
    return _apply(x, up, down, lora, scale, dropout, activation, tile)


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    x, up, down, lora, scale, dropout, activation, tile = primals
    dx, grads = backward(x, up, down, lora, scale, dy, dropout, activation, tile)
    return dx, *map(quantized.zeros_like, (up, down)), *gated_mlp.cotangents(lora, grads, scale, dropout), activation, tile
