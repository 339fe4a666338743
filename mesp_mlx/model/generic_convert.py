"""Writes the folder of any model that mlx-lm loads as mlx-lm has it in memory: named as its modules name it, and quantised as mlx_lm.convert would.

What published checkpoints need (experts stacked, norms shifted, other senses dropped) the model's own `sanitize` does, to arrays that are read as each
tensor of the result is written: no more of the model is in memory than the tensors that share a source.
"""

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm

from mesp_mlx.errors import UserError
from mesp_mlx.model import generic
from mesp_mlx.model.convert import BITS, GROUP_SIZE, HEADER_BYTES_PER_TENSOR, copy_files, require_space
from mesp_mlx.stream.safetensors import Writer, read_folder

DTYPES = {
    mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.uint8: "U8", mx.uint16: "U16", mx.uint32: "U32", mx.uint64: "U64",
    mx.int8: "I8", mx.int16: "I16", mx.int32: "I32", mx.int64: "I64", mx.bool_: "BOOL",
}  # fmt: skip


def sanitized(folder: Path) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """A folder's tensors by name, and what mlx-lm makes of them as it loads them: the same arrays where it changes nothing. None is read.

    Raises:
        UserError: they are not what the model's sanitize expects, or the config describes no model.
    """
    with _said(f"reading the model in {folder}"):
        config = mlx_lm.load_config(folder)
        model_class, arguments = generic.model_classes(config, str(folder / "config.json"))
        model: Any = model_class(arguments.from_dict(config))
        found: dict[str, mx.array] = {}
        for file in sorted({entry.file for entry in read_folder(folder).values()}):
            found |= mx.load(str(file))  # type: ignore[arg-type]
        return found, dict(model.sanitize(dict(found)) if hasattr(model, "sanitize") else found)


def convert(source: Path, folder: Path, quantize: bool) -> None:
    """Write the model in the folder `source` into `folder`; quantised, unless it is so already, where asked.

    Raises:
        UserError: it is not whole, mlx-lm does not load it, or there is too little space.
    """
    before = mx.set_cache_limit(0)
    try:
        with _said(f"converting the model in {source}"):
            model, config = mlx_lm.load_model(source, lazy=True, trust_remote_code=True)  # no one comes here unasked: architecture.open_spec
            if quantize and not config.get("quantization"):
                model, config = mlx_lm.quantize_model(model, config, GROUP_SIZE, BITS)
        arrays = dict(tree_flatten(model.parameters()))
        if quantization := config.get("quantization"):
            packed = {name for name, module in model.named_modules() if hasattr(module, "scales")}
            plain = {name: False for name, module in model.named_modules() if hasattr(module, "to_quantized") and name not in packed}
            config["quantization"] = config["quantization_config"] = {**plain, **quantization}
        del model
        _write(folder / "model.safetensors", arrays)
    finally:
        mx.set_cache_limit(before)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_files(source, folder)


def _write(file: Path, arrays: dict[str, mx.array]) -> None:
    """Computes and drops one array after the other."""
    require_space(file.parent, sum(array.nbytes + HEADER_BYTES_PER_TENSOR for array in arrays.values()), "writing the converted model")
    with Writer(file, {name: (DTYPES[array.dtype], tuple(array.shape)) for name, array in arrays.items()}, {"format": "mlx"}) as writer:
        for name in list(arrays):
            array = arrays.pop(name)
            bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array  # NumPy has no bfloat16
            with _said(f"converting tensor {name}"):
                mx.eval(bits)
            writer.write(name, np.array(bits, copy=False))


@contextmanager
def _said(doing: str) -> Iterator[None]:
    """What mlx-lm says is not shown, and what it raises becomes one message."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # a model's own code may raise anything on tensors it does not expect
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error).strip() or type(error).__name__
        lines = what.splitlines()
        shown = "\n".join(lines[:8]) + (f"\n… and {len(lines) - 8} lines more" if len(lines) > 8 else "")
        raise UserError(f"{doing} as mlx-lm does: {shown}\nDownload the model again, or take one that mlx-lm loads.") from error


def is_as_mlx_lm_has_it(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm takes every tensor of the folder as it is.

    Raises:
        UserError: as `sanitized`.
    """
    if config.get("quantization_config") and not config.get("quantization"):  # packed in a way of another library's
        return False
    found, made = sanitized(folder)
    if not all(name in found and _same(found[name], array) for name, array in made.items()):
        return False
    with _said(f"reading the model in {folder}"):
        mlx_lm.load_model(folder, lazy=True, trust_remote_code=True)  # which looks at all names and shapes
    return True


def _same(found: mx.array, made: mx.array) -> bool:
    """Mostly it is the very array; what a model made again, and alike, is small."""
    return found is made or (found.shape == made.shape and found.dtype == made.dtype and bool(mx.array_equal(found, made)))
