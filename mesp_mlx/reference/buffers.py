"""Memory that a file is read into."""

import numpy as np

# bfloat16 has no NumPy type: its bits are read as uint16 and widened to float32, exactly. float16 is widened too: its arithmetic is slow.
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32, "I32": np.int32, "U8": np.uint8, "I8": np.int8}


def allocate(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, memoryview]:
    """An uninitialised array of a safetensors dtype, and its bytes to be written before `finish`."""
    array = np.empty(shape, TYPES[dtype])
    return array, memoryview(array.reshape(-1).view(np.uint8))


def finish(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array as a type NumPy computes with, once its bytes are written."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "F16" else array
