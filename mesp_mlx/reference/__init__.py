"""The operations of a stage in NumPy: the twin of `mesp_mlx.ops`, and the backend where MLX is not installed.

Everything is computed in the dtype of the activations: float32 in a run, float64 in gradient checks.
"""

from mesp_mlx.reference import (
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
