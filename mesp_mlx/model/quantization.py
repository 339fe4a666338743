"""What a config.json says of how its model's weights are packed."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mesp_mlx.errors import UserError

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits and group size of each mode that has no choice of them


class Quantization(NamedTuple):
    """How a weight is packed: bits of a code, columns that share a scale, and MLX's name of the mode."""

    bits: int
    group_size: int
    mode: str = "affine"


def quantized_as(quantization: Mapping[str, Any], module: str) -> Quantization | None:
    """How a config's quantization packs a module, or None when it names it unquantised or nothing is."""
    setting = quantization.get(module, True)
    setting = quantization if setting is True else setting
    if not isinstance(setting, Mapping) or not {"bits", "mode"} & setting.keys():
        return None
    return _setting(setting)


def _setting(setting: Mapping[str, Any]) -> Quantization:
    """What a config's quantization, or what it says of one module, means to mlx.nn: a module inherits nothing, what is not said is the mode's default."""
    mode = setting.get("mode", "affine")
    bits, group = MODES.get(mode, (None, 64)) if isinstance(mode, str) else (None, None)
    return Quantization(setting.get("bits", bits), setting.get("group_size", group), mode)


def read_quantization(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A config's quantization, checked; empty where it has none.

    Raises:
        UserError: settings that can't be, or that are not served.
    """
    quantization = config.get("quantization") or {}
    if not isinstance(quantization, Mapping):
        raise UserError(f"reading {source}: 'quantization' should be an object with bits and group_size, found {quantization!r}.")
    if config.get("quantize_activations"):
        raise UserError(f"reading {source}: 'quantize_activations' is set, and what is rounded in passing has no gradient. Remove it to train on the weights.")
    for where, setting in [("quantization", quantization)] * bool(quantization) + [(k, v) for k, v in quantization.items() if isinstance(v, Mapping)]:
        bits, group, mode = _setting(setting)
        whole = type(bits) is int and type(group) is int
        if mode != "affine" and (not isinstance(mode, str) or mode not in MODES):
            served = ", ".join(["affine", *MODES])
            raise UserError(f"reading {source}: {where} uses quantisation mode {mode!r}; served: {served}. Convert the model with mlx_lm.convert -q.")
        if mode in MODES and not (whole and (bits, group) == MODES[mode]):
            expected = "{} bits in groups of {}".format(*MODES[mode])
            raise UserError(f"reading {source}: {where} has {bits} bits in groups of {group}; {mode} has {expected}. Download or convert the model again.")
        if mode == "affine" and not (whole and bits in BITS and group in GROUP_SIZES):
            raise UserError(f"reading {source}: {where} has {bits} bits in groups of {group}; served: bits {BITS}, groups {GROUP_SIZES}.")
    return quantization
