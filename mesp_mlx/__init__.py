"""Exact LoRA fine-tuning in flat memory, on MLX or NumPy."""

__version__ = "0.1.0"
