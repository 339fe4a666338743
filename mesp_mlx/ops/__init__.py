"""The operations of a stage in MLX; `mesp_mlx.reference` is the same in NumPy.

Ops never evaluate: they return lazy arrays whose tiles are chained, and the caller evaluates.
"""

from mesp_mlx.ops import (
    activations,
    arrays,
    attention,
    buffers,
    cross_entropy,
    dropout,
    experts,
    gated_mlp,
    layer_norm,
    lora_linear,
    mlp,
    plain,
    quantized,
    random,
    rms_norm,
    rope,
)

__all__ = [
    "activations",
    "arrays",
    "attention",
    "buffers",
    "cross_entropy",
    "dropout",
    "experts",
    "gated_mlp",
    "layer_norm",
    "lora_linear",
    "mlp",
    "plain",
    "quantized",
    "random",
    "rms_norm",
    "rope",
]
