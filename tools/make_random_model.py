"""Write a model of a real shape with random weights, one tensor at a time: what benchmarks and tests run on.

    python tools/make_random_model.py --shape qwen2.5-0.5b --layers 4 OUT

Packed words are drawn directly and their scales chosen so that the weights have mean 0 and a standard deviation of
1/sqrt(in), the size that real weights have; nothing is quantised, so a 7B model takes about as long as writing its file.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx.errors import UserError
from mesp_mlx.model.quantization import BITS, GROUP_SIZES, MODES, Quantization
from mesp_mlx.model.shapes import SHAPES
from mesp_mlx.model.spec import ModelSpec, load_spec
from mesp_mlx.reference.quantized import CODES, SCALES, small_floats
from mesp_mlx.stream.safetensors import NUMPY_TYPES, Writer, from_float32

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
FORMAT = 2  # raised when the same arguments give other files
CHUNK_NUMBERS = 1 << 22  # drawn at a time, so that float32 copies stay small beside the tensor


def make(
    config: Mapping[str, Any],
    folder: Path,
    seed: int = 0,
    bits: int | None = 4,
    group_size: int = 64,
    dtype: str = "bfloat16",
    quantization: Mapping[str, Any] | None = None,
    mode: str = "affine",
) -> Path:
    """Write config.json and model.safetensors of a random model into folder, and return the folder.

    bits None leaves all weights plain; a mode that is not affine has its own bits and group_size. `quantization` gives single modules
    other settings, as in a config.json: {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}, "lm_head": False}.

    Raises:
        UserError: the settings can't be used, or the disk is too full.
    """
    full = quantized(config, bits, group_size, dtype, quantization, mode)
    spec = load_spec(full, "the shape")
    layout = {name: tensor for module, shape in spec.tensors().items() for name, tensor in _stored(spec, module, shape, DTYPES[dtype]).items()}
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(math.prod(shape) * np.dtype(NUMPY_TYPES[kind]).itemsize for kind, shape in layout.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"writing a random model to {folder}: it takes {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free.")
    rng = np.random.Generator(np.random.SFC64(seed))
    with Writer(folder / "model.safetensors", layout, {"format": "mlx"}) as writer:
        for name, shape in spec.tensors().items():
            for part, array in _draw(spec, name, shape, DTYPES[dtype], rng):
                writer.write(part, array)
                del array  # before the next part is drawn
    (folder / "config.json").write_text(json.dumps(full, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    return folder


def quantized(
    config: Mapping[str, Any],
    bits: int | None = 4,
    group_size: int = 64,
    dtype: str = "bfloat16",
    quantization: Mapping[str, Any] | None = None,
    mode: str = "affine",
) -> dict[str, Any]:
    """The config.json of the model that `make` writes."""
    full: dict[str, Any] = {**config, "torch_dtype": dtype}
    if bits is not None:
        bits, group_size = MODES.get(mode, (bits, group_size))
        full["quantization"] = {"group_size": group_size, "bits": bits, "mode": mode, **(quantization or {})}
        full["quantization_config"] = full["quantization"]
    return full


def _quantized_as(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Quantization | None:
    """How the config packs a matrix."""
    setting = spec.quantized_as(name.removesuffix(".weight")) if _is_matrix(name, shape) else None
    if setting and shape[-1] % setting[1]:
        raise UserError(f"writing a random model: {name} is {shape[-1]} wide, not a multiple of the group size {setting[1]}. Choose another --group-size.")
    return setting


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a matrix, or a stack of them: experts' biases are stacked too."""
    return len(shape) > 1 and name.endswith(".weight")


def _stored(spec: ModelSpec, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """How one tensor is stored: itself, or as packed words, scales and, if affine, biases."""
    if (setting := _quantized_as(spec, name, shape)) is None:
        return {name: (dtype, shape)}
    bits, group, mode = setting
    module, grouped = name.removesuffix(".weight"), (*shape[:-1], shape[-1] // group)
    stored = {name: ("U32", (*shape[:-1], shape[-1] * bits // 32))}
    if mode != "affine":
        return {**stored, f"{module}.scales": ("U8", grouped)}
    return {**stored, f"{module}.scales": (dtype, grouped), f"{module}.biases": (dtype, grouped)}


def _draw(spec: ModelSpec, name: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator):
    """The stored parts of one tensor, by name, in the order of `_stored`."""
    if not _is_matrix(name, shape):
        center = 1.0 - spec.norm_offset if name.endswith(".weight") else 0.0
        yield name, from_float32(center + 0.1 * rng.standard_normal(shape, np.float32), dtype)
        return
    deviation = 1 / math.sqrt(shape[-1])
    setting = _quantized_as(spec, name, shape)
    if setting is None:
        array = np.empty(shape, NUMPY_TYPES[dtype])
        rows, flat = max(1, CHUNK_NUMBERS // shape[-1]), array.reshape(-1, shape[-1])
        for first in range(0, len(flat), rows):
            part = flat[first : first + rows]
            part[:] = from_float32(deviation * rng.standard_normal(part.shape, np.float32), dtype)
        yield name, array
        return
    bits, group, mode = setting
    words = rng.integers(0, 1 << 32, (*shape[:-1], shape[-1] * bits // 32), np.uint32)
    if mode != "affine":
        yield from _draw_floats(name, words, mode, (*shape[:-1], shape[-1] // group), deviation, rng)
        return
    yield name, words
    # q is uniform on 0 … L, so q - L/2 has mean 0 and variance ((L+1)² - 1) / 12. Some scales are negative, as in real models.
    largest = (1 << bits) - 1
    scales = 2 * rng.random((*shape[:-1], shape[-1] // group), np.float32) - 1
    scales = np.copysign(np.abs(scales) + np.float32(0.5), scales)  # sizes uniform on 0.5 … 1.5, whose mean square is 1 + 1/12
    scales *= np.float32(deviation / math.sqrt(((largest + 1) ** 2 - 1) / 12 * (1 + 1 / 12)))
    module = name.removesuffix(".weight")
    yield f"{module}.scales", from_float32(scales, dtype)
    yield f"{module}.biases", from_float32(scales * np.float32(-largest / 2), dtype)


def _draw_floats(name: str, words: np.ndarray, mode: str, groups: tuple[int, ...], deviation: float, rng: np.random.Generator):
    """Small floats, whose scales are the two numbers beside the one wanted, so often each that the mean square is right."""
    numbers = small_floats(*CODES[mode])
    if mode == "mxfp8":  # only sizes below 2, in 6 bits and the sign: the largest code is not a number
        words &= np.uint32(0xBFBFBFBF)
        numbers = numbers[:64]
    yield name, words
    wanted = deviation / math.sqrt(np.square(numbers).mean())
    scales = small_floats(*SCALES[mode])[:127]
    code = int(np.searchsorted(scales, wanted))
    low, high = scales[code - 1], scales[code]
    upper = rng.random(groups, np.float32) < (wanted**2 - low**2) / (high**2 - low**2)
    yield f"{name.removesuffix('.weight')}.scales", (code - 1 + upper).astype(np.uint8)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 0 or more")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and write the model; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write a model of a real shape with random weights.")
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES), metavar="NAME", help=", ".join(sorted(SHAPES)))
    parser.add_argument("--layers", type=int, help="how many layers; the shape's own number by default")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES), help="of scales and of all that is not quantised")
    parser.add_argument("--bits", type=int, default=4, choices=BITS)
    parser.add_argument("--group-size", type=int, default=64, choices=GROUP_SIZES)
    parser.add_argument("--quantize", default="affine", choices=["affine", *MODES, "none"], help="none: plain weights; bits and group size are affine's")
    parser.add_argument("--seed", type=_seed, default=0)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    options = parser.parse_args(arguments)
    config = dict(SHAPES[options.shape])
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    try:
        if (options.out / "config.json").exists():
            raise UserError(f"writing a random model: {options.out} holds a model already. Give another folder.")
        make(config, options.out, options.seed, None if options.quantize == "none" else options.bits, options.group_size, options.dtype, mode=options.quantize)
    except (UserError, OSError) as error:
        print(f"make_random_model: {error}", file=sys.stderr)
        return 2
    print(f"{options.shape}: {(options.out / 'model.safetensors').stat().st_size / 1e6:.0f} MB in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
