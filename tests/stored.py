"""What the tests of stream/ share: tensors written to files, and the modules that a store is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from backends import numbers
from models import tiny_config

from mesp_mlx.model.spec import load_spec
from mesp_mlx.reference.quantized import quantize
from mesp_mlx.stream.safetensors import NUMPY_TYPES, Writer, from_float32, read_array, read_folder, to_float32

PARAMETERS = ("weight", "scales", "biases", "bias")


def random_array(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bits at all, NaN payloads and denormals among them."""
    kind = np.dtype(NUMPY_TYPES[dtype])
    if dtype == "BOOL":
        return np.random.default_rng(seed).integers(0, 2, shape).astype(bool)
    return np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)


def write(file: Path, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, str] | None = None, metadata: Mapping[str, str] | None = None) -> Writer:
    """Our writer on arrays; dtypes where an array's own does not say it, which is bfloat16."""
    names = {np.dtype(kind).name: name for name, kind in NUMPY_TYPES.items() if name != "BF16"}
    declared = {name: ((dtypes or {}).get(name) or names[array.dtype.name], array.shape) for name, array in arrays.items()}
    with Writer(file, declared, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    return writer


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and got.dtype == want.dtype and got.tobytes() == want.tobytes()


@dataclass(frozen=True, eq=False)
class Piece:
    """A stage as the store sees it."""

    name: str
    modules: tuple[str, ...] = ()


ROWS = 37  # of every table: no tile divides it
MODULES = ("norm", "plain", "half", "brain", "four", "eight", "one")
SETTINGS = {"four": (4, 32), "eight": (8, 64)}
SPEC = load_spec(tiny_config("llama", quantization={"bits": 4, "group_size": 32, "eight": {"bits": 8, "group_size": 64}, "plain": False}))


def write_modules(folder: Path) -> Path:
    """One module of each kind, over two files, and back the folder."""
    rng = np.random.default_rng(0)
    tensors: dict[str, tuple[str, np.ndarray]] = {"norm.weight": ("F32", rng.normal(size=64).astype(np.float32))}
    for module, dtype, rows in (("plain", "F32", ROWS), ("half", "F16", ROWS), ("brain", "BF16", ROWS), ("one", "BF16", 1)):
        tensors[f"{module}.weight"] = dtype, from_float32(rng.normal(size=(rows, 64)).astype(np.float32), dtype)
    tensors["half.bias"] = "F16", rng.normal(size=ROWS).astype(np.float16)
    for module, dtype in (("four", "BF16"), ("eight", "F16")):
        linear = quantize(rng.normal(size=(ROWS, 64)).astype(np.float32), *SETTINGS[module])
        tensors[f"{module}.weight"] = "U32", linear["weight"]
        tensors |= {f"{module}.{part}": (dtype, from_float32(linear[part], dtype)) for part in ("scales", "biases")}
        tensors[f"{module}.bias"] = "F32", rng.normal(size=ROWS).astype(np.float32)
    names = list(tensors)
    for file, part in (("model-1.safetensors", names[::2]), ("model-2.safetensors", names[1::2])):
        write(folder / file, {name: tensors[name][1] for name in part}, {name: tensors[name][0] for name in part})
    return folder


def on_disk(folder: Path, module: str, rows: Any = slice(None)) -> dict[str, np.ndarray]:
    """A module's parameters, read by themselves; floats as float32."""
    entries, found = read_folder(folder), {}
    for part in PARAMETERS:
        if entry := entries.get(f"{module}.{part}"):
            found[part] = (read_array(entry) if entry.dtype == "U32" else to_float32(read_array(entry), entry.dtype))[rows]
    return found


def size_bytes(folder: Path, *modules: str) -> int:
    return sum(entry.size_bytes for name, entry in read_folder(folder).items() if name.rpartition(".")[0] in modules)


def assert_same(linear: Mapping[str, Any], folder: Path, module: str, rows: Any = slice(None)) -> None:
    """A linear that the store gave has the numbers on disk, bit for bit, and its module's setting."""
    arrays, want = {part: numbers(value) for part, value in linear.items() if part not in ("bits", "group_size")}, on_disk(folder, module, rows)
    assert arrays.keys() == want.keys()
    for part, array in arrays.items():
        assert array.shape == want[part].shape and np.array_equal(array, want[part]), part
    assert (linear.get("bits"), linear.get("group_size")) == SETTINGS.get(module, (None, None))
