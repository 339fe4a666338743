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
from mesp_mlx.model.spec import BITS, GROUP_SIZES, ModelSpec, load_spec
from mesp_mlx.stream.safetensors import NUMPY_TYPES, Writer, from_float32

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
FORMAT = 1  # raised when the same arguments give other files
CHUNK_NUMBERS = 1 << 22  # drawn at a time, so that float32 copies stay small beside the tensor


def _qwen2(**own: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 32768}
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", **common, **own}


def _llama(**own: Any) -> dict[str, Any]:
    common = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **common, **own}


def _widths(width: int, mlp: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


_LLAMA_3_2 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}

# The published config.json of each model, but for what only a tokenizer or a generator reads.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(**_widths(896, 4864, 24, 14, 2, 151936, True), max_window_layers=24),
    "qwen2.5-1.5b": _qwen2(**_widths(1536, 8960, 28, 12, 2, 151936, True), max_window_layers=28),
    "qwen2.5-3b": _qwen2(**_widths(2048, 11008, 36, 16, 2, 151936, True), max_window_layers=36),
    "qwen2.5-7b": _qwen2(**_widths(3584, 18944, 28, 28, 4, 152064, False), max_window_layers=28),
    "llama-3.2-1b": _llama(**_widths(2048, 8192, 16, 32, 8, 128256, True), head_dim=64, max_position_embeddings=131072, rope_scaling=_LLAMA_3_2),
    "llama-3.2-3b": _llama(**_widths(3072, 8192, 28, 24, 8, 128256, True), head_dim=128, max_position_embeddings=131072, rope_scaling=_LLAMA_3_2),
    "llama-3-8b": _llama(**_widths(4096, 14336, 32, 32, 8, 128256, False), max_position_embeddings=8192),
    "llama-3-70b": _llama(**_widths(8192, 28672, 80, 64, 8, 128256, False), max_position_embeddings=8192),
    "smollm2-135m": _llama(**_widths(576, 1536, 30, 9, 3, 49152, True), head_dim=64, max_position_embeddings=8192, rope_theta=100000.0),
}


def make(
    config: Mapping[str, Any],
    folder: Path,
    seed: int = 0,
    bits: int | None = 4,
    group_size: int = 64,
    dtype: str = "bfloat16",
    quantization: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json and model.safetensors of a random model into folder, and return the folder.

    bits None leaves all weights plain. `quantization` gives single modules other settings, as in a config.json:
    {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}, "lm_head": False}.

    Raises:
        UserError: the settings can't be used, or the disk is too full.
    """
    full: dict[str, Any] = {**config, "torch_dtype": dtype}
    if bits is not None:
        full["quantization"] = {"group_size": group_size, "bits": bits, "mode": "affine", **(quantization or {})}
        full["quantization_config"] = full["quantization"]
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


def _quantized_as(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(bits, group size) of a matrix that the config quantises."""
    setting = spec.quantized_as(name.removesuffix(".weight")) if len(shape) == 2 else None
    if setting and shape[1] % setting[1]:
        raise UserError(f"writing a random model: {name} is {shape[1]} wide, not a multiple of the group size {setting[1]}. Choose another --group-size.")
    return setting


def _stored(spec: ModelSpec, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """How one tensor is stored: itself, or as packed words, scales and biases."""
    if (setting := _quantized_as(spec, name, shape)) is None:
        return {name: (dtype, shape)}
    bits, group = setting
    module, grouped = name.removesuffix(".weight"), (shape[0], shape[1] // group)
    return {name: ("U32", (shape[0], shape[1] * bits // 32)), f"{module}.scales": (dtype, grouped), f"{module}.biases": (dtype, grouped)}


def _draw(spec: ModelSpec, name: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator):
    """The stored parts of one tensor, by name, in the order of `_stored`."""
    if len(shape) == 1:
        center = 1.0 if name.endswith("norm.weight") else 0.0
        yield name, from_float32(center + 0.1 * rng.standard_normal(shape, np.float32), dtype)
        return
    deviation = 1 / math.sqrt(shape[1])
    setting = _quantized_as(spec, name, shape)
    if setting is None:
        array = np.empty(shape, NUMPY_TYPES[dtype])
        rows = max(1, CHUNK_NUMBERS // shape[1])
        for first in range(0, shape[0], rows):
            part = array[first : first + rows]
            part[:] = from_float32(deviation * rng.standard_normal(part.shape, np.float32), dtype)
        yield name, array
        return
    bits, group = setting
    yield name, rng.integers(0, 1 << 32, (shape[0], shape[1] * bits // 32), np.uint32)
    # q is uniform on 0 … L, so q - L/2 has mean 0 and variance ((L+1)² - 1) / 12. Some scales are negative, as in real models.
    largest = (1 << bits) - 1
    scales = 2 * rng.random((shape[0], shape[1] // group), np.float32) - 1
    scales = np.copysign(np.abs(scales) + np.float32(0.5), scales)  # sizes uniform on 0.5 … 1.5, whose mean square is 1 + 1/12
    scales *= np.float32(deviation / math.sqrt(((largest + 1) ** 2 - 1) / 12 * (1 + 1 / 12)))
    module = name.removesuffix(".weight")
    yield f"{module}.scales", from_float32(scales, dtype)
    yield f"{module}.biases", from_float32(scales * np.float32(-largest / 2), dtype)


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
    parser.add_argument("--quantize", default="affine", choices=["affine", "none"], help="none: plain weights")
    parser.add_argument("--seed", type=_seed, default=0)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    options = parser.parse_args(arguments)
    config = dict(SHAPES[options.shape])
    if options.layers is not None:
        config["num_hidden_layers"] = options.layers
    try:
        if (options.out / "config.json").exists():
            raise UserError(f"writing a random model: {options.out} holds a model already. Give another folder.")
        make(config, options.out, options.seed, options.bits if options.quantize == "affine" else None, options.group_size, options.dtype)
    except (UserError, OSError) as error:
        print(f"make_random_model: {error}", file=sys.stderr)
        return 2
    print(f"{options.shape}: {(options.out / 'model.safetensors').stat().st_size / 1e6:.0f} MB in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
