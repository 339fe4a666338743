"""The operations of a stage in MLX; `mesp_mlx.reference` is the same in NumPy.

Ops never evaluate: they return lazy arrays whose tiles are chained, and the caller evaluates.
"""

from mesp_mlx.ops import arrays, attention, buffers, cross_entropy, dropout, gated_mlp, lora_linear, plain, quantized, random, rms_norm, rope

__all__ = ["arrays", "attention", "buffers", "cross_entropy", "dropout", "gated_mlp", "lora_linear", "plain", "quantized", "random", "rms_norm", "rope"]
