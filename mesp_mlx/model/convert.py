"""Writes a model folder in MLX's layout from tensors made one at a time, and quantises a Hugging Face folder into one.

Weights go from disk to disk in tiles of rows, so that no whole tensor of the source is ever in memory:
only the packed tensor being built is.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx.errors import UserError
from mesp_mlx.model import weights
from mesp_mlx.model.files import TEMPLATE_FILES, TOKENIZER_FILES
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.reference.quantized import quantize
from mesp_mlx.stream.safetensors import NUMPY_TYPES, Entry, Writer, from_float32, read_array, read_folder, to_float32

BITS, GROUP_SIZE = 4, 64  # what an unquantised model becomes: mlx_lm.convert's own default
TILE_BYTES = 1 << 22
COPIED_FILES = (*TOKENIZER_FILES, *TEMPLATE_FILES, "generation_config.json")
HEADER_BYTES_PER_TENSOR = 200  # more than any name, shape and offset take in a safetensors header


@dataclass(frozen=True)
class Part:
    """Tensors that are made together: a weight with its scales and biases, or one that is kept as it is.

    `tensors` gives each one's name, safetensors dtype and shape; `make` reads, converts and returns them.
    `module` and `setting` (bits, group size; None: unquantised) are given for the weight of a linear or an embedding.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    make: Callable[[], Mapping[str, np.ndarray]]
    module: str | None = None
    setting: tuple[int, int] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize for dtype, shape in self.tensors.values())


def by_rows(tensors: Mapping[str, tuple[str, tuple[int, ...]]], entry: Entry, convert: Callable[[Entry], Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """Make tensors, which share their first axis with entry, by converting a tile of its rows at a time."""
    made = {name: np.empty(shape, NUMPY_TYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    out = entry.shape[0]
    step = max(1, TILE_BYTES * out // max(entry.size_bytes, 1))
    for first in range(0, out, step):
        last = min(first + step, out)
        for array, rows in zip(made.values(), convert(entry.rows(first, last)), strict=True):
            array[first:last] = rows
    return made


def packed_tensors(module: str, shape: tuple[int, ...], bits: int, group_size: int, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a weight [out, in] quantised in MLX's layout; dtype is that of scales and biases."""
    out, width = shape
    groups = (dtype, (out, width // group_size))
    return {f"{module}.weight": ("U32", (out, width * bits // 32)), f"{module}.scales": groups, f"{module}.biases": groups}


def kept(name: str, entry: Entry, dtype: str | None = None) -> Part:
    """A tensor kept under `name`, in its own dtype unless another is given."""
    dtype = dtype or entry.dtype

    def convert(rows: Entry) -> list[np.ndarray]:
        array = read_array(rows)
        return [array if dtype == entry.dtype else from_float32(to_float32(array, entry.dtype), dtype)]

    tensors = {name: (dtype, entry.shape)}
    return Part(tensors, lambda: by_rows(tensors, entry, convert), name.removesuffix(".weight") if len(entry.shape) == 2 else None)


def quantized(name: str, entry: Entry) -> Part:
    """A weight [out, in] quantised as mlx_lm.convert does by default: if its width divides by the group; scales in the weight's dtype."""
    if len(entry.shape) != 2 or entry.shape[1] % GROUP_SIZE:
        return kept(name, entry)

    def convert(rows: Entry) -> list[np.ndarray]:
        weight = to_float32(read_array(rows), entry.dtype)
        if not np.isfinite(weight).all():
            raise UserError(f"quantising tensor {entry.name!r} of {entry.file}: it holds numbers that are not finite. Download the model again.")
        linear = quantize(weight, BITS, GROUP_SIZE)
        return [linear["weight"], from_float32(linear["scales"], entry.dtype), from_float32(linear["biases"], entry.dtype)]

    module = name.removesuffix(".weight")
    tensors = packed_tensors(module, entry.shape, BITS, GROUP_SIZE, entry.dtype)
    return Part(tensors, lambda: by_rows(tensors, entry, convert), module, (BITS, GROUP_SIZE))


def quantization(parts: Sequence[Part]) -> dict[str, Any]:
    """config.json's `quantization`: the commonest setting, and by name every module with another one or none."""
    settings = {part.module: part.setting for part in parts if part.module is not None}
    counts = Counter(setting for setting in settings.values() if setting is not None)
    if not counts:
        return {}
    common = counts.most_common(1)[0][0]
    named = {module: _setting(*setting) if setting else False for module, setting in settings.items() if setting != common}
    return {"quantization": {**_setting(*common), **named}}


def _setting(bits: int, group_size: int) -> dict[str, int]:
    return {"group_size": group_size, "bits": bits}


def write_model(folder: Path, config: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """Write config.json and model.safetensors into folder, one part at a time, after checking the space for them.

    Raises:
        UserError: too little space, or a source that can't be read.
    """
    tensors = {name: declared for part in parts for name, declared in part.tensors.items()}
    require_space(folder, weight_bytes(parts), "writing the converted model")
    (folder / "config.json").write_text(json.dumps({**config, **quantization(parts)}, indent=2) + "\n", encoding="utf-8")
    with Writer(folder / "model.safetensors", tensors, {"format": "mlx"}) as writer:
        for part in parts:
            for name, array in part.make().items():
                writer.write(name, array)


def weight_bytes(parts: Sequence[Part]) -> int:
    """The most bytes that model.safetensors takes."""
    return sum(part.size_bytes + HEADER_BYTES_PER_TENSOR * len(part.tensors) for part in parts)


def require_space(folder: Path, needed_bytes: int, doing: str) -> None:
    """Refuse to start what would not fit on the disk of folder, which need not exist yet.

    Raises:
        UserError: less than needed_bytes is free.
    """
    folder = nearest_folder(folder)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"{doing}: it needs {needed_bytes / 1e6:,.0f} MB and {folder} has {free_bytes / 1e6:,.0f} MB free. "
            "Free some space, or point MESP_MLX_CACHE (for downloads HF_HOME) at a larger disk."
        )


def nearest_folder(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder


def quantize_folder(source: Path, folder: Path) -> None:
    """Quantise the Hugging Face folder `source` into `folder`.

    Raises:
        UserError: a family not served, missing or broken tensors, too little space.
    """
    entries = read_folder(source)
    config = read_config(source)
    config.setdefault("tie_word_embeddings", "lm_head.weight" not in entries)
    spec = load_spec(config, str(source / "config.json"))
    weights.check(spec, entries)
    write_model(folder, config, [(quantized if name.endswith(".weight") else kept)(name, entries[name]) for name in spec.tensors()])
    for file in {file for pattern in COPIED_FILES for file in source.glob(pattern) if file.is_file()}:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
