"""GGUF files (llama.cpp's format) into MLX model folders: header, names, row order and packing.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed once; tensors are read later,
in tiles of rows, into buffers: nothing is mapped.
"""

import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesp_mlx.errors import UserError
from mesp_mlx.model import gguf_tokenizer, weights
from mesp_mlx.model.convert import Part, by_rows, kept, packed_tensors, quantized, write_model
from mesp_mlx.model.spec import load_spec
from mesp_mlx.model.weights import FLOATS
from mesp_mlx.stream.safetensors import Entry, from_float32, read_array, read_into, to_float32

# Type number: name, elements in a block, bytes of a block.
SERVED_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34)}
DTYPES = tuple(name for name, _, _ in SERVED_TYPES.values())
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
SMALL_BYTES = 1 << 20
BLOCK = 32  # elements that share a scale, in all quantised types served

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MODULES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class File:
    """A parsed header: metadata by key, and where each tensor lies (the entry's dtype is GGUF's type name)."""

    path: Path
    metadata: Mapping[str, Any]
    entries: Mapping[str, Entry]


def read_header(path: Path) -> File:
    """Parse the header of a GGUF file.

    Raises:
        UserError: no GGUF file, one of several parts, truncated or corrupt, or with tensors of a type not served.
    """

    def refused(found: str) -> UserError:
        return UserError(f"reading {path}: {found}")

    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as stream:
            magic, version = stream.read(4), int.from_bytes(stream.read(4), "little")
            if magic != b"GGUF" or version not in (2, 3):
                raise refused(f"it starts with {magic!r}, version {version}. Expected a little-endian GGUF file of version 2 or 3.")
            tensors, keys = _scalar(stream, "<Q"), _scalar(stream, "<Q")
            metadata = {}
            for _ in range(keys):
                key = _string(stream)
                metadata[key] = _value(stream, _scalar(stream, "<I"))
            listed = []
            for _ in range(tensors):
                name = _string(stream)
                shape = tuple(_scalar(stream, "<Q") for _ in range(_scalar(stream, "<I")))[::-1]
                listed.append((name, shape, _scalar(stream, "<I"), _scalar(stream, "<Q")))
            alignment = max(1, int(metadata.get("general.alignment", 32)))
            data = -(-stream.tell() // alignment) * alignment
            pieces = int(metadata.get("split.count", 0))
    except OSError as error:
        raise refused(f"{error.strerror}.") from None
    except (EOFError, UnicodeDecodeError, ValueError, KeyError, TypeError, OverflowError):
        raise refused("its header is cut short or corrupt. Download it again.") from None
    if pieces > 1:
        raise refused(f"it is one of {pieces} parts. Merge them with `llama-gguf-split --merge` first.")
    unserved = sorted({OTHER_TYPES.get(kind, f"type {kind}") for _, _, kind, _ in listed if kind not in SERVED_TYPES})
    if unserved:
        raise refused(
            f"it holds {', '.join(unserved)} tensors; served are Q4_0, Q4_1, Q8_0, F16, BF16 and F32. "
            "Take the model's Q4_0 or Q8_0 file, or the Hugging Face model it was made from."
        )
    entries = {}
    for name, shape, kind, offset in listed:
        dtype, block, block_bytes = SERVED_TYPES[kind]
        size_bytes = math.prod(shape) // block * block_bytes
        if not shape or min(shape) < 1 or shape[-1] % block or data + offset + size_bytes > file_bytes:
            end = data + offset + size_bytes
            raise refused(f"tensor {name!r}, {list(shape)} of {dtype}, ends at byte {end}, the file has {file_bytes}. Download it again.")
        entries[name] = Entry(name, path, dtype, shape, data + offset, size_bytes)
    return File(path, metadata, entries)


def _read(stream: BinaryIO, count: int) -> bytes:
    if count > SMALL_BYTES and count > os.fstat(stream.fileno()).st_size:  # a corrupt length would ask for all memory
        raise EOFError
    data = stream.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _scalar(stream: BinaryIO, kind: str) -> Any:
    return struct.unpack(kind, _read(stream, struct.calcsize(kind)))[0]


def _string(stream: BinaryIO) -> str:
    return _read(stream, _scalar(stream, "<Q")).decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(stream)
    if kind != ARRAY:
        return _scalar(stream, SCALARS[kind])
    kind, count = _scalar(stream, "<I"), _scalar(stream, "<Q")
    if kind in (STRING, ARRAY):
        return [_value(stream, kind) for _ in range(count)]
    return np.frombuffer(_read(stream, count * struct.calcsize(SCALARS[kind])), SCALARS[kind]).tolist()


def convert(path: Path, folder: Path, quantize_floats: bool = True) -> None:
    """Write the model of a GGUF file, with its tokenizer, into folder in MLX's layout.

    Q4_0, Q4_1 and Q8_0 weights keep their exact values, as 4 or 8 bits in groups of 32. Float matrices become
    4-bit in groups of 64 if quantize_floats.

    Raises:
        UserError: a file, architecture or tokenizer that is not served, or too little space.
    """
    file = read_header(path)
    config = config_of(file)
    write_tokenizer(file, folder)  # first: it is quickly refused
    write_model(folder, config, parts(file, config, quantize_floats))


def write_tokenizer(file: File, folder: Path) -> None:
    """Write the tokenizer of a GGUF file into folder, as transformers reads it.

    Raises:
        UserError: a tokenizer that is not served.
    """
    for name, content in gguf_tokenizer.files(file.metadata, str(file.path)).items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=None if name == "tokenizer.json" else 2), encoding="utf-8")


def config_of(file: File) -> dict[str, Any]:
    """config.json, without `quantization`, of the model in a GGUF file.

    Raises:
        UserError: an architecture or a setting that is not served, or metadata that lacks something.
    """
    metadata, source = file.metadata, str(file.path)
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UserError(f"reading {source}: architecture {architecture!r} is not served. Served in GGUF: {', '.join(ARCHITECTURES)} (Mistral is llama).")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        return float(str(np.float32(found))) if isinstance(found, float) else found  # 1e-05, not 9.999999747378752e-06

    if value("expert_count", 0):
        raise UserError(f"reading {source}: it is a mixture of {value('expert_count')} experts, which is not served.")
    embedding = file.entries.get("token_embd.weight")
    width, heads = value("embedding_length"), value("attention.head_count")
    head_dim = value("attention.key_length") or (width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise UserError(f"reading {source}: positions rotate {value('rope.dimension_count')} of a head's {head_dim} numbers; served: all of them.")
    longest = max((max(entry.shape) for entry in file.entries.values()), default=0)
    if not (_within(value("block_count"), len(file.entries)) and _within(head_dim, longest)):
        raise UserError(f"reading {source}: {value('block_count')} layers with heads of {head_dim} are not what it holds. Download it again.")
    window = value("attention.sliding_window")
    dtype = _dtype(embedding) if embedding else "F32"
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": "mistral" if window and architecture == "llama" else architecture,
        "hidden_size": width,
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": value("feed_forward_length"),
        "vocab_size": embedding.shape[0] if embedding else None,
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.entries,
        "hidden_act": "silu",
        "torch_dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype],
    }
    if architecture == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in file.entries, "mlp_bias": "blk.0.ffn_up.bias" in file.entries}
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    if scaling := _rope_scaling(file, value, config, source):
        config["rope_scaling"] = scaling
    for name in ("bos", "eos", "pad"):
        ids = gguf_tokenizer.token_ids(metadata, name)
        if ids:
            config[f"{name}_token_id"] = ids[0] if len(ids) == 1 else ids
    load_spec(config, source)
    return config


def _within(found: Any, largest: int) -> bool:
    """Whether a number could be true; one that is missing is reported elsewhere."""
    return not isinstance(found, int) or found <= largest


def _rope_scaling(file: File, value: Callable[..., Any], config: Mapping[str, Any], source: str) -> dict[str, Any] | None:
    """From metadata, or for Llama 3 from rope_freqs: what each wavelength is multiplied by."""
    if "rope_freqs.weight" in file.entries:
        factors = read_array(file.entries["rope_freqs.weight"]).astype(np.float64)
        scaling = {
            "rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
        plain, stretched = (load_spec({**config, "rope_scaling": s}, source).ropes[0] for s in (None, scaling))
        assert plain and stretched  # every layer of these architectures rotates
        own = plain.base ** (np.arange(0, plain.dims, 2) / plain.dims)
        if stretched.wavelengths is None or len(factors) != len(own) or not np.allclose(own * factors, stretched.wavelengths, rtol=1e-4):
            raise UserError(f"reading {source}: its rope_freqs are not Llama 3's position scaling. Give the Hugging Face model it was made from.")
        return scaling
    kind = value("rope.scaling.type", "linear")  # files of 2023 give a factor only
    factor = value("rope.scaling.factor") or value("rope.scale_linear")
    if kind == "none" or not factor or factor == 1.0:
        return None
    scaling = {"rope_type": kind, "type": kind, "factor": factor}
    for key, name in (("original_context_length", "original_max_position_embeddings"), ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if (found := value(f"rope.scaling.{key}")) is not None:
            scaling[name] = found
    return scaling


def _dtype(entry: Entry) -> str:
    """The dtype of a weight's numbers once converted: quantised types carry float16 scales."""
    return entry.dtype if entry.dtype in FLOATS else "F16"


def parts(file: File, config: Mapping[str, Any], quantize_floats: bool = True) -> list[Part]:
    """What to write for each tensor, under Hugging Face's names and in the order that a model uses them.

    Raises:
        UserError: tensors are missing, unknown or of the wrong shape.
    """
    spec = load_spec(config, str(file.path))
    named = {_name(name): entry for name, entry in file.entries.items() if name != "rope_freqs.weight"}
    permuted = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads} if file.metadata["general.architecture"] == "llama" else {}
    made = []
    weights.check(spec, named, DTYPES)
    for name in spec.tensors():
        entry = named[name]
        if entry.dtype not in FLOATS:
            part = _requantized(name, entry)
        elif len(entry.shape) == 2 and quantize_floats:
            part = quantized(name, entry)
        elif len(entry.shape) == 2:
            part = kept(name, entry)
        else:
            part = kept(name, entry, _exact_dtype(entry, _dtype(named["model.embed_tokens.weight"])))
        heads = next((heads for module, heads in permuted.items() if module in name), None)
        made.append(_with_rows_restored(part, heads) if heads else part)
    return made


def _name(name: str) -> str:
    """Hugging Face's name of a tensor, or the same name if it has none."""
    block = re.match(r"blk\.(\d+)\.", name)
    prefix, stem = (f"model.layers.{block[1]}.", name[block.end() :]) if block else ("", name)
    module, _, kind = stem.rpartition(".")
    return f"{prefix}{MODULES[module]}.{kind}" if module in MODULES else name


def _exact_dtype(entry: Entry, dtype: str) -> str:
    """dtype if it holds this tensor exactly, else the tensor's own: one float32 norm would make all activations float32."""
    array = to_float32(read_array(entry), entry.dtype)
    with np.errstate(over="ignore"):
        rounded = to_float32(from_float32(array, dtype), dtype)
    return dtype if np.array_equal(array, rounded) else entry.dtype


def _with_rows_restored(part: Part, heads: int) -> Part:
    """Undo llama.cpp's row order of q and k: it stores the two halves of each head, which rotate together, interleaved."""

    def make() -> dict[str, np.ndarray]:
        return {name: restore_rows(array, heads) for name, array in part.make().items()}

    return Part(part.tensors, make, part.module, part.setting)


def restore_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows 2i and 2i+1 of each head become rows i and i + d/2 of it: array [heads * d, ...]."""
    out, *rest = array.shape
    return array.reshape(heads, out // heads // 2, 2, *rest).swapaxes(1, 2).reshape(array.shape)


def _requantized(name: str, entry: Entry) -> Part:
    """A quantised weight [out, in] in MLX's packing, exactly: w = scale q + bias in groups of 32.

    Q4_0: w = d (q - 8). Q4_1: w = d q + m. Q8_0: w = d q with signed q, so that q + 128 is unsigned. A block holds d (and m) in float16,
    then its codes: bytes for Q8_0; for 4 bits, byte j holds element j in its low half and j + 16 in its high half.
    """
    bits = 8 if entry.dtype == "Q8_0" else 4
    _, _, block_bytes = next(served for served in SERVED_TYPES.values() if served[0] == entry.dtype)
    codes_at = 4 if entry.dtype == "Q4_1" else 2

    def convert(rows: Entry) -> Sequence[np.ndarray]:
        blocks: np.ndarray = np.empty((rows.shape[0], rows.shape[1] // BLOCK, block_bytes), np.uint8)
        read_into(rows, memoryview(blocks.reshape(-1)).cast("B"))
        numbers = np.ascontiguousarray(blocks[..., :codes_at]).view("<f2")
        scales = numbers[..., 0]
        with np.errstate(over="ignore", invalid="ignore"):
            biases = numbers[..., 1] if codes_at == 4 else scales * np.float16(-128 if bits == 8 else -8)
        if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
            raise UserError(f"reading tensor {entry.name!r} from {entry.file}: it holds scales that are not finite. Download the file again.")
        codes = blocks[..., codes_at:]
        if bits == 8:
            packed = codes ^ np.uint8(0x80)
        else:
            halves = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)  # elements 0 to 31 of each block, in order
            packed = halves[..., 0::2] | halves[..., 1::2] << np.uint8(4)
        return np.ascontiguousarray(packed).reshape(rows.shape[0], -1).view("<u4"), scales, biases

    module = name.removesuffix(".weight")
    tensors = packed_tensors(module, entry.shape, bits, BLOCK, "F16")
    return Part(tensors, lambda: by_rows(tensors, entry, convert), module, (bits, BLOCK))
