"""The LoRA adapter: which linears get one, how it starts, and the files that mlx-lm reads.

An adapter is a flat dict from mlx-lm's names to float32 arrays of the backend:
`model.layers.3.self_attn.q_proj.lora_a` [in, R] and `.lora_b` [R, out].
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx.errors import RunStopped, UserError
from mesp_mlx.model.spec import Spec
from mesp_mlx.stream.run_file import fetch
from mesp_mlx.stream.safetensors import Entry, Writer, read_array, read_header, to_float32
from mesp_mlx.stream.shelves import IN_MEMORY, Shelf

ADAPTER_FILE, CONFIG_FILE = "adapters.safetensors", "adapter_config.json"


def choose_modules(spec: Spec, num_layers: int = -1, keys: Sequence[str] | None = None) -> list[str]:
    """Full names of the linears to adapt, in the order in which mlx-lm adapts them.

    num_layers: the last N layers, or -1 for all. keys: names inside a layer, such as "self_attn.q_proj"; None for all linears of a layer.

    Raises:
        UserError: the model has fewer layers, or a key names no linear of a layer.
    """
    if num_layers > spec.num_layers:
        raise UserError(f"choosing what to adapt: {num_layers} layers were asked for, the model has {spec.num_layers}. Lower --num-layers, or -1 for all.")
    if num_layers < 1 and num_layers != -1:
        raise UserError(f"choosing what to adapt: the number of layers is {num_layers}. Give --num-layers 1 to {spec.num_layers}, or -1 for all.")
    inside, outside = spec.adaptable_keys(), spec.outside_keys()
    if keys is None and not inside:
        beside = f" --keys may name what stands beside them: {', '.join(outside)}." if outside else ""
        raise UserError(f"choosing what to adapt: the layers of a {spec.model_type} model have no linear that mlx-lm's LoRA fits.{beside}")
    keys = inside if keys is None else keys
    unknown = [key for key in keys if key not in (*inside, *outside)]
    if unknown or not keys:
        found = f"no module is called {' or '.join(map(repr, unknown))}" if unknown else "no module was named"
        raise UserError(f"choosing what to adapt: {found}. Those that can be adapted: {', '.join((*inside, *outside))}.")
    return spec.choose(spec.num_layers if num_layers == -1 else num_layers, keys)


def shapes(spec: Spec, modules: Sequence[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every adapter tensor: lora_a [in, R] and lora_b [R, out] of each linear; experts' have theirs one after another (see the spec)."""
    result = {}
    for module in modules:
        a, b = spec.pair_shapes(module, rank)
        result |= {f"{module}.lora_a": a, f"{module}.lora_b": b}
    return result


def initialise(spec: Spec, modules: Sequence[str], rank: int, seed: int, backend: Any, shelf: Shelf = IN_MEMORY.adapter) -> dict[str, Any]:
    """The adapter that mlx-lm starts from when it is seeded with `seed`: A uniform within 1/sqrt(in), B zero.

    Same bits as mlx-lm, on both backends, for modules in the order of `choose_modules`; no global random state is touched.
    """
    key, adapter = backend.random.key(seed), {}
    for name, shape in shapes(spec, modules, rank).items():
        if name.endswith(".lora_b"):
            adapter[name] = shelf.put(backend.arrays.evaluate(backend.arrays.zeros(shape, backend.arrays.float32)))
            continue
        # mlx-lm makes a Linear that it throws away before each A, and that takes a key too.
        key, _ = backend.random.split(key)
        key, drawn = backend.random.split(key)
        bound = 1 / math.sqrt(shape[0] if len(shape) == 2 else shape[-1])  # experts' A are [E, R, in]
        adapter[name] = shelf.put(backend.arrays.evaluate(backend.random.uniform(drawn, -bound, bound, shape)))
    return adapter


def save(folder: Path, adapter: Mapping[str, Any], backend: Any, name: str = ADAPTER_FILE) -> Path:
    """Write the adapter into `folder` under `name`, one tensor at a time; the file appears when it is complete.

    Raises:
        RunStopped: a tensor holds a number that is not finite; then nothing is written.
        UserError: the file can't be written.
    """
    file = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Writer(file, {tensor: ("F32", tuple(fetch(array).shape)) for tensor, array in adapter.items()}, {"format": "mlx"}) as writer:
            for tensor, array in adapter.items():
                values = backend.arrays.to_numpy(fetch(array))
                if not np.isfinite(values).all():
                    raise RunStopped(f"saving {file}: {tensor} holds numbers that are not finite, so nothing was written. Try a lower --learning-rate.")
                writer.write(tensor, values)
    except OSError as error:
        raise UserError(f"saving the adapter in {file}: {error.strerror}. Free some space or choose another --adapter-path.") from None
    return file


def write_config(
    folder: Path,
    *,
    model: str,
    num_layers: int,
    rank: int,
    scale: float,
    dropout: float,
    keys: Sequence[str],
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write adapter_config.json: what mlx-lm needs to load and fuse the adapter, and `extra`, which it ignores.

    num_layers is the count of adapted layers, never -1; keys always stand there, because mlx-lm takes their absence for
    "every linear and the embeddings". Both together make mlx-lm adapt the very modules that were trained.

    Raises:
        UserError: the file can't be written.
    """
    parameters = {"rank": rank, "scale": float(scale), "dropout": float(dropout), "keys": list(keys)}
    config = {**(extra or {}), "fine_tune_type": "lora", "model": model, "num_layers": num_layers, "lora_parameters": parameters}
    file, partial = folder / CONFIG_FILE, folder / f".{CONFIG_FILE}.{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(config, indent=4, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"saving {file}: {error.strerror}. Free some space or choose another --adapter-path.") from None
    return file


def read_entries(path: Path) -> tuple[Path, dict[str, Entry]]:
    """The file that a file's or folder's path means, and its entries.

    Raises:
        UserError: it is missing or broken.
    """
    file = path / ADAPTER_FILE if path.is_dir() else path
    return file, read_header(file)[0]


def load(path: Path, spec: Spec, modules: Sequence[str], rank: int, backend: Any, shelf: Shelf = IN_MEMORY.adapter) -> dict[str, Any]:
    """The adapter in a file, or in a folder's adapters.safetensors, as float32; its tensors must be those of modules and rank.

    Raises:
        UserError: the file is missing or broken, or tensors are missing, unexpected, of another shape or type, or not finite: all are listed.
    """
    file, entries = read_entries(path)
    expected = shapes(spec, modules, rank)
    wrong = [f"{name}: missing, expected {list(shape)}" for name, shape in expected.items() if name not in entries]
    wrong += [f"{name}: unexpected" for name in entries if name not in expected]
    adapter = {}
    for name, shape in expected.items():
        if (entry := entries.get(name)) is None:
            continue
        if entry.shape != shape:
            wrong.append(f"{name}: shape {list(entry.shape)}, expected {list(shape)}")
        elif entry.dtype not in ("F32", "F16", "BF16"):
            wrong.append(f"{name}: type {entry.dtype}, expected F32")
        elif not np.isfinite(values := to_float32(read_array(entry), entry.dtype)).all():
            wrong.append(f"{name}: holds numbers that are not finite")
        else:
            adapter[name] = shelf.put(backend.arrays.evaluate(backend.arrays.asarray(values)))
    if wrong:
        ranks = {entry.shape[1] for name, entry in entries.items() if name.endswith(".lora_a") and len(entry.shape) > 1}
        hint = f" The file's rank is {ranks.pop()}." if len(ranks) == 1 and ranks != {rank} else ""
        raise UserError(
            f"resuming from {file}: it does not fit this model with rank {rank} on {len(modules)} modules.{hint} Give the --rank, --num-layers and --keys "
            "that it was trained with. Tensor by tensor:\n" + "\n".join(f"  {line}" for line in wrong)
        )
    return adapter
