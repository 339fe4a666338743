"""The operations of a stage in NumPy: the twin of `mesp_mlx.ops`, and the backend where MLX is not installed.

Everything is computed in the dtype of the activations: float32 in a run, float64 in gradient checks.
"""

from mesp_mlx.reference import arrays, attention, buffers, cross_entropy, dropout, gated_mlp, lora_linear, plain, quantized, random, rms_norm, rope

__all__ = ["arrays", "attention", "buffers", "cross_entropy", "dropout", "gated_mlp", "lora_linear", "plain", "quantized", "random", "rms_norm", "rope"]
