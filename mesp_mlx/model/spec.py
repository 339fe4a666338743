"""What a model is, read from its config.json: widths, heads, positions, biases and how its weights are quantised."""

import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mesp_mlx.errors import UserError
from mesp_mlx.model.families import FAMILIES, Family

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "yarn")
MOST_LAYERS = 10_000  # far beyond any model: a damaged config would be worked on for minutes
MAX_WINDOW_LAYERS = 28  # what transformers takes for Qwen2 and Qwen3 where a config says nothing
PROJECTIONS: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: position p turns the pair i by p * scale / wavelength_i.

    The wavelengths (over 2 pi) are base^(2i/dims), or those listed. Magnitude multiplies the rotated features (YaRN).
    """

    dims: int
    base: float
    traditional: bool = False
    scale: float = 1.0
    wavelengths: tuple[float, ...] | None = None
    magnitude: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only model; `windows` has, for each layer, the keys a query sees, or None for all."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: Rope
    windows: tuple[int | None, ...]
    quantization: Mapping[str, Any]
    dtype: str  # that the config names, "F32", "F16" or "BF16", to tell sizes before there are files

    def linear_shape(self, projection: str) -> tuple[int, int]:
        """[out, in] of one of a layer's projections, named as in PROJECTIONS."""
        width, mlp = self.hidden_size, self.intermediate_size
        heads, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = ((heads, width), (kv, width), (kv, width), (width, heads), (mlp, width), (mlp, width), (width, mlp))
        return dict(zip(PROJECTIONS, shapes, strict=True))[projection]

    def has_bias(self, projection: str) -> bool:
        """Whether one of a layer's projections, named as in PROJECTIONS, adds a bias."""
        if projection.startswith("mlp."):
            return self.mlp_bias
        return self.o_bias if projection == "self_attn.o_proj" else self.qkv_bias

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Name and logical shape (as if nothing were quantised) of every tensor of one layer, in the order the layer uses them."""
        prefix, width = f"model.layers.{layer}.", self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}input_layernorm.weight": (width,)}
        for projection in PROJECTIONS:
            if projection == "mlp.gate_proj":
                shapes[f"{prefix}post_attention_layernorm.weight"] = (width,)
            shapes[f"{prefix}{projection}.weight"] = self.linear_shape(projection)
            if self.has_bias(projection):
                shapes[f"{prefix}{projection}.bias"] = self.linear_shape(projection)[:1]
        if self.qk_norm:
            shapes |= {f"{prefix}self_attn.{norm}.weight": (self.head_dim,) for norm in ("q_norm", "k_norm")}
        return shapes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and logical shape of every tensor of the model."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        for layer in range(self.num_layers):
            shapes |= self.layer_tensors(layer)
        shapes["model.norm.weight"] = (self.hidden_size,)
        return shapes if self.tied else shapes | {"lm_head.weight": table}

    def quantized_as(self, module: str) -> tuple[int, int] | None:
        """(bits, group size) that the config gives a module, or None when it names it unquantised or nothing is."""
        setting = self.quantization.get(module, self.quantization)
        if not isinstance(setting, Mapping) or "bits" not in setting:
            return None
        return setting["bits"], setting.get("group_size", self.quantization.get("group_size", 64))


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder.

    Raises:
        UserError: there is none, it can't be read, or it is not a JSON object.
    """
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"reading the model in {folder}: it has no config.json. Give a folder in MLX's or Hugging Face's layout.") from None
    except OSError as error:
        raise UserError(f"reading {file}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"reading {file}: it is not JSON ({error}). Download the model again.") from None
    if not isinstance(config, dict):
        raise UserError(f"reading {file}: expected a JSON object, found {type(config).__name__}.")
    return config


def load_spec(config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
    """The spec that a config describes; `source` names it in errors.

    Raises:
        UserError: an unserved model_type, a missing or impossible value, an unserved RoPE type or quantisation.
    """

    value = partial(_value, config, source)
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UserError(f"reading {source}: model_type {model_type!r} is not served. Served: {', '.join(sorted(FAMILIES))}.")
    if (theirs := config.get("quantization_config")) and not config.get("quantization"):
        method = theirs.get("quant_method") if isinstance(theirs, dict) else None
        found = f"the weights are quantised by {method!r}" if method else "it has 'quantization_config' but not MLX's 'quantization', which mlx-lm wants too"
        raise UserError(f"reading {source}: {found}. Give the unquantised model, or one that mlx_lm.convert quantised.")

    heads, width = value("num_attention_heads"), value("hidden_size")
    layers, kv_heads = value("num_hidden_layers"), value("num_key_value_heads", heads)
    if layers > MOST_LAYERS:
        raise UserError(f"reading {source}: 'num_hidden_layers' is {layers}, expected at most {MOST_LAYERS}. Download the model again.")
    head_dim = value("head_dim", width // heads) if family.own_head_dim else width // heads
    if heads % kv_heads or head_dim % 2 or head_dim == 0:
        raise UserError(f"reading {source}: {heads} heads of width {head_dim} over {kv_heads} key/value heads do not fit together.")
    max_positions = value("max_position_embeddings", family.max_positions)
    attention_bias = value("attention_bias", False, bool)
    dtype = config.get("torch_dtype") or config.get("dtype")
    return ModelSpec(
        model_type=str(model_type),
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=value("intermediate_size"),
        vocab_size=value("vocab_size"),
        rms_norm_eps=value("rms_norm_eps", family.rms_norm_eps, (int, float)),
        max_positions=max_positions,
        tied=value("tie_word_embeddings", True, bool),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.mlp_bias and value("mlp_bias", False, bool),
        qk_norm=family.qk_norm,
        rope=_rope(config, family, head_dim, source),
        windows=_windows(config, family, layers, source),
        quantization=_quantization(config, source),
        dtype={"float16": "F16", "bfloat16": "BF16"}.get(str(dtype).removeprefix("torch."), "F32"),
    )


def _value(config: Mapping[str, Any], source: str, key: str, default: Any = None, kind: type | tuple[type, ...] = int) -> Any:
    """What a config has under a key, or the default where it has nothing: a positive number, or true or false."""
    found = config.get(key)
    found = default if found is None else found
    if found is None:
        raise UserError(f"reading {source}: it lacks {key!r}. Download the model again.")
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool) or (kind is not bool and not 0 < found <= sys.float_info.max):
        expected = "true or false" if kind is bool else "a positive whole number" if kind is int else "a positive number"
        raise UserError(f"reading {source}: {key!r} is {reprlib.repr(found)}, expected {expected}.")
    return found


def _windows(config: Mapping[str, Any], family: Family, layers: int, source: str) -> tuple[int | None, ...]:
    """Layer types say which layers slide; without them Mistral's all do, and Qwen's from max_window_layers when switched on."""
    if config.get("sliding_window") is None or (family.window_switch and not config.get("use_sliding_window", False)):
        return (None,) * layers
    window = _value(config, source, "sliding_window")
    if (kinds := config.get("layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
            raise UserError(f"reading {source}: 'layer_types' should name full_attention or sliding_attention for each of {layers} layers.")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", MAX_WINDOW_LAYERS) if family.window_switch else 0 if family.all_slide else layers
    if not isinstance(first, int):
        raise UserError(f"reading {source}: 'max_window_layers' is {first!r}, expected a number of layers.")
    return tuple(window if layer >= first else None for layer in range(layers))


def _quantization(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    quantization = config.get("quantization") or {}
    if not isinstance(quantization, Mapping):
        raise UserError(f"reading {source}: 'quantization' should be an object with bits and group_size, found {quantization!r}.")
    for where, setting in [("quantization", quantization)] * bool(quantization) + [(k, v) for k, v in quantization.items() if isinstance(v, Mapping)]:
        mode, bits, group = setting.get("mode", "affine"), setting.get("bits"), setting.get("group_size", quantization.get("group_size", 64))
        if mode != "affine":
            raise UserError(f"reading {source}: {where} uses quantisation mode {mode!r}; served: affine. Convert the model with mlx_lm.convert -q.")
        if type(bits) is not int or type(group) is not int or bits not in BITS or group not in GROUP_SIZES:
            raise UserError(f"reading {source}: {where} has {bits} bits in groups of {group}; served: bits {BITS}, groups {GROUP_SIZES}.")
    return quantization


def _rope(config: Mapping[str, Any], family: Family, dims: int, source: str) -> Rope:
    """Positions as mlx-lm sets them up. Newer configs nest rope_theta and the scaling under rope_parameters."""
    nested = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or nested
    for key, found in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if not isinstance(found, Mapping):
            raise UserError(f"reading {source}: {key!r} is {found!r}, expected an object.")
    kind = scaling.get("type") or scaling.get("rope_type") or "default"
    if kind not in ROPE_TYPES:
        raise UserError(f"reading {source}: RoPE scaling of type {kind!r} is not served. Served: {', '.join(ROPE_TYPES)}.")
    base = _value(nested if config.get("rope_theta") is None else config, source, "rope_theta", family.rope_theta, (int, float))
    plain = Rope(dims, float(base), _value(config, source, "rope_traditional", False, bool))
    own = [plain.base ** (i / dims) for i in range(0, dims, 2)]
    try:
        if kind in ("default", "dynamic"):  # dynamic scaling starts beyond the model's own length, where no row is let
            return plain
        factor = float(scaling["factor"])
        if kind == "linear":
            return Rope(dims, plain.base, plain.traditional, scale=1 / factor)
        if kind == "llama3":
            return Rope(dims, plain.base, plain.traditional, wavelengths=_llama3(own, scaling, factor))
        return Rope(dims, plain.base, plain.traditional, wavelengths=_yarn(own, plain.base, scaling, factor), magnitude=_yarn_magnitude(scaling, factor))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"reading {source}: the RoPE scaling {dict(scaling)} of type {kind!r} can't be used ({error!r}).") from None


def _llama3(own: list[float], scaling: Mapping[str, Any], factor: float) -> tuple[float, ...]:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended. Source: Llama 3.1's reference code."""
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    old = scaling.get("original_max_position_embeddings", 8192)

    def stretch(wavelength: float) -> float:
        turns = old / (2 * math.pi * wavelength)  # turns made over the length first trained on
        if turns < low:
            return wavelength * factor
        if turns > high:
            return wavelength
        smooth = (turns - low) / (high - low)
        return wavelength / ((1 - smooth) / factor + smooth)

    return tuple(stretch(wavelength) for wavelength in own)


def _yarn(own: list[float], base: float, scaling: Mapping[str, Any], factor: float) -> tuple[float, ...]:
    """YaRN (arXiv 2309.00071), section 3.2: pairs that turn often are kept, slow ones stretched, with a ramp over the pairs between."""
    old, dims = scaling.get("original_max_position_embeddings", 4096), 2 * len(own)

    def pair_that_turns(times: float) -> float:
        return dims * math.log(old / (times * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), dims - 1)
    span = high - low or 0.001
    stretched = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(own))]
    return tuple(wavelength * factor / (factor * (1 - s) + s) for wavelength, s in zip(own, stretched, strict=True))


def _yarn_magnitude(scaling: Mapping[str, Any], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    return temperature(scaling.get("mscale", 1)) / temperature(scaling.get("mscale_all_dim", 0))
