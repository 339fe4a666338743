"""Memory that a file is read into, or written from: the twin of `mesp_mlx.ops.buffers`."""

import numpy as np

# bfloat16 has no NumPy type: its bits are read as uint16 and widened to float32, exactly. float16 is widened too: its arithmetic is slow.
TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "BOOL": np.bool_,
    "U32": np.uint32, "I32": np.int32, "U16": np.uint16, "U8": np.uint8, "I8": np.int8, "I64": np.int64,
}  # fmt: skip
NAMES = {np.dtype(kind): name for name, kind in TYPES.items() if name != "BF16"}


def allocate(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, memoryview]:
    """An uninitialised array of a safetensors dtype, and its bytes to be written before `finish`."""
    array = np.empty(shape, TYPES[dtype])
    return array, memoryview(array.reshape(-1).view(np.uint8))


def finish(array: np.ndarray, dtype: str, widen: bool = True) -> np.ndarray:
    """The array, once its bytes are written: as a type NumPy computes with, or as it is."""
    if not widen:
        return array
    if dtype == "BF16":
        wide = array.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return array.astype(np.float32) if dtype == "F16" else array


def view(array: np.ndarray) -> tuple[memoryview, str, tuple[int, ...]]:
    """An array's bytes in row order, its safetensors dtype and its shape. Copies only an array whose rows do not follow each other."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)), NAMES[array.dtype], array.shape
