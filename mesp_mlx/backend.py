"""Which arrays a run computes with."""

import importlib.util
import platform
from collections import Counter
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mesp_mlx.errors import UserError

FLOATS = ("F32", "F16", "BF16")
INSTALL = {
    "Darwin": "pip install 'mlx>=0.32.4,<0.33' (Apple silicon)",
    "Linux": "pip install 'mesp-mlx[cpu]' or, with an NVIDIA GPU, 'mesp-mlx[cuda]' (MLX's wheels need glibc 2.35 or newer)",
}


def choose(name: str = "auto") -> ModuleType:
    """`mesp_mlx.ops` (MLX) or `mesp_mlx.reference` (NumPy). "auto" is MLX where it finds a GPU (Metal or CUDA), NumPy elsewhere.

    Raises:
        UserError: MLX was asked for by name and is not installed or does not load.
    """
    if name == "numpy" or (name == "auto" and importlib.util.find_spec("mlx") is None):
        return _numpy()
    try:
        import mlx.core as mx
    except ImportError as error:
        if name == "auto":
            return _numpy()
        hint = INSTALL.get(platform.system(), "MLX has no build for this system")
        raise UserError(f"--backend mlx: MLX can't be loaded here ({error}). Install it: {hint}; or use --backend numpy.") from None
    if name == "auto" and mx.default_device() == mx.cpu:
        return _numpy()
    from mesp_mlx import ops

    return ops


def _numpy() -> ModuleType:
    from mesp_mlx import reference

    return reference


def on_cpu(backend: ModuleType) -> bool:
    """Whether a backend computes on a CPU here, where products dequantise their weights."""
    return backend.arrays.name == "numpy" or backend.quantized.on_cpu()


def stored_dtype(entries: Mapping[str, Any]) -> str:
    """The safetensors dtype of most of a model's floating-point numbers. entries: as `safetensors.read_folder` gives them."""
    sizes = Counter[str]()
    for entry in entries.values():
        sizes[entry.dtype] += entry.size_bytes if entry.dtype in FLOATS else 0
    return max(sizes, key=lambda dtype: sizes[dtype])


def activation_dtype(backend: Any, stored: str) -> Any:
    """The dtype policy: adapters and their gradients are float32 everywhere; activations have the model's dtype on a GPU, float32 on a CPU.

    Args:
        backend: as `choose` gives it.
        stored: the safetensors dtype of the model's floating-point tensors ("F32", "F16", "BF16").
    """
    if backend.arrays.name == "numpy":
        return backend.arrays.float32
    import mlx.core as mx

    return mx.float32 if mx.default_device() == mx.cpu else {"F16": mx.float16, "BF16": mx.bfloat16}.get(stored, mx.float32)
