"""Memory that a file is read into: an MLX array's own, so that no copy is made and the allocator counts it."""

import math
from typing import Any, cast

import mlx.core as mx

# What is allocated, and what it is then viewed as: Python's memoryview has no bfloat16.
TYPES = {
    "F32": (mx.float32, mx.float32), "F16": (mx.float16, mx.float16), "BF16": (mx.uint16, mx.bfloat16),
    "U32": (mx.uint32, mx.uint32), "I32": (mx.int32, mx.int32), "U8": (mx.uint8, mx.uint8), "I8": (mx.int8, mx.int8),
}  # fmt: skip


def allocate(shape: tuple[int, ...], dtype: str) -> tuple[mx.array, memoryview]:
    """An uninitialised array of a safetensors dtype, and its bytes to be written before `finish`."""
    array = mx.empty((max(math.prod(shape), 1),), TYPES[dtype][0])
    mx.eval(array)
    return array.reshape(shape) if math.prod(shape) else mx.zeros(shape, TYPES[dtype][0]), memoryview(cast(Any, array)).cast("B")


def finish(array: mx.array, dtype: str) -> mx.array:
    """The array as its true type, once its bytes are written."""
    return array.view(TYPES[dtype][1])
