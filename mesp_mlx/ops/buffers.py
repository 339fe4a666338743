"""Memory that a file is read into, or written from: an MLX array's own, so that no copy is made and the allocator counts it."""

import math
from typing import Any, cast

import mlx.core as mx

# What is allocated, and what it is then viewed as: Python's memoryview can't write bfloat16 or truth values.
TYPES = {
    "F32": (mx.float32, mx.float32), "F16": (mx.float16, mx.float16), "BF16": (mx.uint16, mx.bfloat16), "BOOL": (mx.uint8, mx.bool_),
    "U32": (mx.uint32, mx.uint32), "I32": (mx.int32, mx.int32), "U16": (mx.uint16, mx.uint16), "U8": (mx.uint8, mx.uint8), "I8": (mx.int8, mx.int8),
}  # fmt: skip
NAMES = {kind: name for name, (_, kind) in TYPES.items()}


def allocate(shape: tuple[int, ...], dtype: str) -> tuple[mx.array, memoryview]:
    """An uninitialised array of a safetensors dtype, and its bytes to be written before `finish`."""
    array = mx.empty((max(math.prod(shape), 1),), TYPES[dtype][0], stream=mx.cpu)  # which fills it with zeros: a GPU would have to be waited for
    mx.eval(array)
    return array.reshape(shape) if math.prod(shape) else mx.zeros(shape, TYPES[dtype][0]), memoryview(cast(Any, array)).cast("B")


def finish(array: mx.array, dtype: str, widen: bool = True) -> mx.array:
    """The array as its true type, once its bytes are written. MLX computes with them all: there is nothing to widen."""
    return array.view(TYPES[dtype][1])


def view(array: mx.array) -> tuple[memoryview, str, tuple[int, ...]]:
    """An array's bytes in row order, its safetensors dtype and its shape. Evaluates; copies only an array whose rows do not follow each other."""
    mx.eval(array)
    if not array.size:
        return memoryview(b""), NAMES[array.dtype], array.shape
    if not memoryview(cast(Any, array)).c_contiguous:
        array = mx.contiguous(array)
        mx.eval(array)
    return memoryview(cast(Any, array)).cast("B"), NAMES[array.dtype], array.shape
