"""Writes a model folder in MLX's layout from tensors made one at a time, and quantises a Hugging Face folder into one.

Weights go from disk to disk in tiles of rows, so that no whole tensor of the source is ever in memory:
only the packed tensor being built is.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesp_mlx.errors import UserError
from mesp_mlx.model import weights
from mesp_mlx.model.families import FAMILIES, Family
from mesp_mlx.model.files import CODE_FILES, TEMPLATE_FILES, TOKENIZER_FILES
from mesp_mlx.model.spec import ModelSpec, Spec, load_spec, read_config
from mesp_mlx.reference.quantized import quantize
from mesp_mlx.stream.safetensors import NUMPY_TYPES, Entry, Writer, from_float32, read_array, read_folder, to_float32

BITS, FINER_BITS, GROUP_SIZE = 4, 8, 64  # what an unquantised model becomes: mlx_lm.convert's own default
TILE_BYTES = 1 << 22
COPIED_FILES = (*TOKENIZER_FILES, *TEMPLATE_FILES, *CODE_FILES, "generation_config.json")
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


class Source(NamedTuple):
    """A tensor of another layout's folder; `transposed`: a linear stored [in, out]; `experts`: those that stand there one by one, the first as `entry` too."""

    entry: Entry
    transposed: bool = False
    experts: tuple[Entry, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        own = self.entry.shape[::-1] if self.transposed else self.entry.shape
        return (len(self.experts), *own) if self.experts else own


def sources(spec: Spec, entries: Mapping[str, Entry]) -> dict[str, Source]:
    """The tensors of a Hugging Face folder, or of one in MLX's layout, by the names that mlx-lm has for them; what it drops is left out."""
    family = FAMILIES.get(spec.model_type, Family())
    found = {}
    for name, entry in entries.items():
        if any(re.search(pattern, name) for pattern in family.dropped):
            continue
        new = next((new + name.removeprefix(old) for old, new in family.renamed if name.startswith(old)), name)
        found[new] = Source(entry, new != name and len(entry.shape) == 2 and new.removesuffix(".weight").endswith(family.transposed))
    return _joined(spec, found) if isinstance(spec, ModelSpec) else found


def _joined(spec: ModelSpec, found: dict[str, Source]) -> dict[str, Source]:
    """The same with the tensors of single experts as one of all experts.

    Raises:
        UserError: some are missing, or unlike the others.
    """
    names = FAMILIES[spec.model_type].singles
    for layer, experts in enumerate(spec.experts):
        if experts is None or not names:
            continue
        for key, single in zip(spec.mlp_keys(layer)[1:], names, strict=True):
            of_each = [f"{spec.layer_name(layer)}.{single.format(expert)}.weight" for expert in range(experts.count)]
            entries = {name: found.pop(name).entry for name in of_each if name in found}
            if not entries:
                continue
            first, shape = next(iter(entries.values())), spec.linears(layer)[key][1:]
            kinds = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
            if wrong := [name for name in of_each if kinds.get(name) != (shape, first.dtype)]:
                what = f"{len(wrong)} of {experts.count} experts' tensors are missing, or not {first.dtype} {list(shape)} as expected"
                raise UserError(f"reading weights in {first.file.parent}: {what}:{weights.listed(wrong)}\nDownload the model again.")
            found[f"{spec.layer_name(layer)}.{key}.weight"] = Source(first, experts=tuple(entries.values()))
    return found


def by_rows(tensors: Mapping[str, tuple[str, tuple[int, ...]]], entry: Entry, convert: Callable[[Entry], Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """Make tensors, which share their first axis with entry, by converting a tile of its rows at a time."""
    return _in_tiles(tensors, entry, entry.shape[0], lambda first, last: convert(entry.rows(first, last)))


def _made(tensors: Mapping[str, tuple[str, tuple[int, ...]]], source: Source, convert: Callable[[np.ndarray], Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """The same, convert being given arrays; one that is stored transposed is read whole."""
    if not source.transposed:
        return by_rows(tensors, source.entry, lambda rows: convert(read_array(rows)))
    whole = read_array(source.entry).T
    return _in_tiles(tensors, source.entry, len(whole), lambda first, last: convert(np.ascontiguousarray(whole[first:last])))


def _in_tiles(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], entry: Entry, out: int, convert: Callable[[int, int], Sequence[np.ndarray]]
) -> dict[str, np.ndarray]:
    made = {name: np.empty(shape, NUMPY_TYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    step = max(1, TILE_BYTES * out // max(entry.size_bytes, 1))
    for first in range(0, out, step):
        last = min(first + step, out)
        for array, rows in zip(made.values(), convert(first, last), strict=True):
            array[first:last] = rows
    return made


def packed_tensors(module: str, shape: tuple[int, ...], bits: int, group_size: int, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a weight [..., out, in] quantised in MLX's layout; dtype is that of scales and biases."""
    *rows, width = shape
    groups = (dtype, (*rows, width // group_size))
    return {f"{module}.weight": ("U32", (*rows, width * bits // 32)), f"{module}.scales": groups, f"{module}.biases": groups}


def kept(name: str, entry: Entry, dtype: str | None = None, transposed: bool = False) -> Part:
    """A tensor kept under `name`, in its own dtype unless another is given."""
    dtype, source = dtype or entry.dtype, Source(entry, transposed)

    def convert(array: np.ndarray) -> list[np.ndarray]:
        return [array if dtype == entry.dtype else from_float32(to_float32(array, entry.dtype), dtype)]

    tensors = {name: (dtype, source.shape)}
    return Part(tensors, lambda: _made(tensors, source, convert), name.removesuffix(".weight") if _is_matrix(name, entry) else None)


def quantized(name: str, entry: Entry, bits: int = BITS, transposed: bool = False) -> Part:
    """A weight [out, in], or a stack of them, quantised as mlx_lm.convert does by default: if its width divides by the group; scales in the weight's dtype."""
    source = Source(entry, transposed)
    if not _is_matrix(name, entry) or source.shape[-1] % GROUP_SIZE:
        return kept(name, entry, transposed=transposed)

    def convert(array: np.ndarray) -> list[np.ndarray]:
        weight = to_float32(array, entry.dtype)
        if not np.isfinite(weight).all():
            raise UserError(f"quantising tensor {entry.name!r} of {entry.file}: it holds numbers that are not finite. Download the model again.")
        linear = quantize(weight.reshape(-1, weight.shape[-1]), bits, GROUP_SIZE)
        parts = [linear["weight"], from_float32(linear["scales"], entry.dtype), from_float32(linear["biases"], entry.dtype)]
        return [part.reshape(*weight.shape[:-1], -1) for part in parts]

    module = name.removesuffix(".weight")
    tensors = packed_tensors(module, source.shape, bits, GROUP_SIZE, entry.dtype)
    return Part(tensors, lambda: _made(tensors, source, convert), module, (bits, GROUP_SIZE))


def converted(spec: Spec, name: str, entry: Entry, transposed: bool = False) -> Part:
    """What a tensor of an unquantised model becomes: quantised as mlx_lm.convert does by default, or kept."""
    if not name.endswith(".weight"):
        return kept(name, entry)
    finer = FAMILIES.get(spec.model_type, Family()).finer
    return quantized(name, entry, FINER_BITS if name.removesuffix(".weight").endswith(finer) else BITS, transposed)


def stacked(parts: Sequence[Part]) -> Part:
    """The same tensors of several experts as ones with an axis more, made expert by expert."""
    tensors = {name: (dtype, (len(parts), *shape)) for name, (dtype, shape) in parts[0].tensors.items()}

    def make() -> dict[str, np.ndarray]:
        made = {name: np.empty(shape, NUMPY_TYPES[dtype]) for name, (dtype, shape) in tensors.items()}
        for place, part in enumerate(parts):
            for name, array in part.make().items():
                made[name][place] = array
        return made

    return Part(tensors, make, parts[0].module, parts[0].setting)


def _is_matrix(name: str, entry: Entry) -> bool:
    """Whether a tensor is a matrix, or a stack of them: experts' biases are stacked too."""
    return len(entry.shape) > 1 and name.endswith(".weight")


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


def quantize_folder(source: Path, folder: Path, quantize: bool = True) -> None:
    """Write the Hugging Face folder `source` into `folder` in MLX's layout, quantised unless told otherwise.

    Raises:
        UserError: a family not served, missing or broken tensors, too little space.
    """
    entries = read_folder(source)
    config = read_config(source)
    spec = load_spec(config, str(source / "config.json"))
    found = sources(spec, entries)
    spec = weights.settled(spec, config, found)
    config["tie_word_embeddings"] = spec.tied  # said where config.json is silent
    weights.check(spec, {name: replace(tensor.entry, shape=tensor.shape) for name, tensor in found.items()})
    make = partial(converted, spec) if quantize else kept
    parts = []
    for name in spec.tensors():
        tensor = found[name]
        of_each = [make(name, entry, transposed=tensor.transposed) for entry in tensor.experts or [tensor.entry]]
        parts.append(stacked(of_each) if tensor.experts else of_each[0])
    write_model(folder, config, parts)
    copy_files(source, folder)


def copy_files(source: Path, folder: Path) -> None:
    """Copy what a model folder holds beside config and weights."""
    for file in {file for pattern in COPIED_FILES for file in source.glob(pattern) if file.is_file()}:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
