"""Rotary positions as a config sets them, layer by layer: bases, scalings of long-context models, layers without them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mesp_mlx.errors import Unserved
from mesp_mlx.model.fields import MOST, NUMBER, Fields

LARGEST = 3e38  # that float32 has


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: position p turns the pair i by p * scale / wavelength_i.

    The wavelengths (over 2 pi) are base^(2i/dims), or those listed. Magnitude multiplies the rotated features (YaRN, LongRoPE).
    """

    dims: int
    base: float
    traditional: bool = False
    scale: float = 1.0
    wavelengths: tuple[float, ...] | None = None
    magnitude: float = 1.0


def read_ropes(fields: Fields, head_dim: int, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
    """Each layer's, or None where q and k are not rotated.

    Raises:
        Unserved: a scaling that the family does not serve.
        UserError: values that are no positions.
    """
    family, layers = fields.family, len(windows)
    if family.rotates == "none":
        return (None,) * layers
    if family.local_ropes:
        fields = _by_kind(fields)
    rope = local = _rope(fields, head_dim)
    if family.local_ropes:
        local = Rope(rope.dims, float(fields.value("rope_local_base_freq", rope.base, NUMBER)), rope.traditional)
    ropes = tuple(rope if window is None else local for window in windows)
    if family.rotates == "windowed":
        return tuple(None if window is None else own for own, window in zip(ropes, windows, strict=True))
    return ropes if family.rotates == "all" else tuple(own if turns else None for own, turns in zip(ropes, _listed(fields, layers), strict=True))


def _by_kind(fields: Fields) -> Fields:
    """Newer configs may have rope_parameters for each type of layer: the same as one that has those of full attention, and the base of the others."""
    kinds = _object(fields, "rope_parameters")
    if "full_attention" not in kinds:
        return fields
    full, local = (_object(replace(fields, config=kinds), kind) for kind in ("full_attention", "sliding_attention"))
    if _kind(local) != "default":
        raise Unserved(f"reading {fields.source}: RoPE scaling of type {_kind(local)!r} in layers with a window is not served. Served: default.")
    return replace(fields, config={"rope_local_base_freq": local.get("rope_theta"), **fields.config, "rope_parameters": full})


def _object(fields: Fields, key: str) -> Mapping[str, Any]:
    """What the config has under a key, empty where it has nothing."""
    found = fields.config.get(key) or {}
    if not isinstance(found, Mapping):
        raise fields.error(f"{key!r} is {found!r}, expected an object.")
    return found


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("type") or scaling.get("rope_type") or "default"


def _listed(fields: Fields, layers: int) -> list[int]:
    """Of each layer, whether it rotates: no_rope_layers has a 1 where it does; without it, one in so many does not."""
    if (listed := fields.raw("no_rope_layers")) is None:
        every = fields.value("no_rope_layer_interval", 4)
        return [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(turns not in (0, 1) for turns in listed):
        raise fields.error(f"'no_rope_layers' should have 0 or 1 for each of {layers} layers.")
    return listed


def _rope(fields: Fields, head_dim: int) -> Rope:
    """Positions as mlx-lm sets them up. Newer configs nest rope_theta and the scaling under rope_parameters."""
    nested = _object(fields, "rope_parameters")
    scaling = _object(fields, "rope_scaling") or nested
    kind, served = _kind(scaling), ", ".join(fields.family.scalings)
    if kind not in fields.family.scalings:
        raise Unserved(f"reading {fields.source}: RoPE scaling of type {kind!r} is not served. Served: {served}.")
    if "full_attention" in nested:
        raise Unserved(f"reading {fields.source}: RoPE parameters by type of layer are not served. Served: one 'rope_theta', and one 'rope_scaling'.")
    base = float(fields.value("rope_theta", 10_000.0, NUMBER))
    dims = int(min(head_dim * fields.heeded("partial_rotary_factor", 1.0), MOST))
    if dims < 2 or dims % 2 or dims > head_dim:
        raise fields.error(f"{dims} of the {head_dim} features of a head are to be rotated, expected an even number up to all.")
    plain = Rope(dims, base, fields.value("rope_traditional", False, bool))
    try:
        rope = _scaled(plain, kind, scaling, fields)
        if not all(0 < number < LARGEST for number in (rope.scale, rope.magnitude, *(rope.wavelengths or ()))):
            raise ValueError("it gives no positive numbers")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise fields.error(f"the RoPE scaling {dict(scaling)} of type {kind!r} can't be used ({error!r}).") from None
    return rope


def _scaled(plain: Rope, kind: str, scaling: Mapping[str, Any], fields: Fields) -> Rope:
    """The rope with its positions scaled, so far as what the config says of it can be used at all."""
    if kind in ("default", "dynamic"):  # dynamic scaling starts beyond the model's own length, where no row is let
        return plain
    own = [plain.base ** (i / plain.dims) for i in range(0, plain.dims, 2)]
    if kind in ("longrope", "su"):
        return _longrope(plain, own, scaling, fields)
    factor = float(scaling["factor"])
    if kind == "linear":
        return replace(plain, scale=1 / factor)
    if kind == "llama3":
        return replace(plain, wavelengths=_llama3(own, scaling, factor))
    return replace(plain, wavelengths=_yarn(own, plain.base, scaling, factor), magnitude=_yarn_magnitude(scaling, factor))


def _longrope(plain: Rope, own: list[float], scaling: Mapping[str, Any], fields: Fields) -> Rope:
    """LongRoPE (arXiv 2402.13753): a factor for each wavelength, and features made larger by as much as the length grew.

    The long factors, for rows of any length, as in mlx-lm: what is trained here is used there. Hugging Face turns rows up to the length first
    trained on by the short factors.
    """
    factors = scaling["long_factor"]
    factors = [factors] * len(own) if isinstance(factors, int | float) else factors
    old = fields.value("original_max_position_embeddings")
    growth = fields.value("max_position_embeddings") / old
    magnitude = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(old))
    wavelengths = tuple(factor * wavelength for factor, wavelength in zip(factors, own, strict=True))
    return replace(plain, traditional=False, wavelengths=wavelengths, magnitude=magnitude)


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
