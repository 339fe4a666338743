"""The backends that are here, to parametrise tests with: `@each_backend`."""

from typing import Any

import numpy as np
import pytest

from mesp_mlx import reference

try:
    import mlx.core as mx

    from mesp_mlx import ops
except ImportError:
    mx: Any = None
    ops: Any = None

BACKENDS: list[Any] = [reference] if ops is None else [reference, ops]

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.arrays.name)
needs_mlx = pytest.mark.skipif(ops is None, reason="MLX is not installed")


def numbers(array: Any) -> np.ndarray:
    """A backend's array in NumPy, copied; bfloat16 as float32."""
    return np.array(array if isinstance(array, np.ndarray | np.generic) else ops.arrays.to_numpy(array))
