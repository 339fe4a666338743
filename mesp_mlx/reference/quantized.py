"""Frozen linears, dense or in one of MLX's quantisations, and products with them: the twin of `mesp_mlx.ops.quantized`.

A packed row is a stream of codes of `bits` bits, lowest bit first, kept as little-endian 32-bit words. Dequantised:

    W[o, i] = scales[o, i // group_size] * code[o, i] + biases[o, i // group_size]

in the mode "affine"; in the others a code is a small float, a scale is one of 8 bits, and there are no biases.
"""

import functools
import math
from typing import Any

import numpy as np

from mesp_mlx.memory import tiles

Linear = dict[str, Any]
CODES = {"mxfp4": (2, 1), "mxfp8": (4, 3), "nvfp4": (2, 1)}  # bits of exponent and of mantissa
SCALES = {"mxfp4": (8, 0), "mxfp8": (8, 0), "nvfp4": (4, 3)}
GLOBAL = 6 * 448  # the largest e2m1 times the largest e4m3: what nvfp4's global scale is the largest weight of
BLOCK = 1 << 17  # weights dequantised at once: the look-up's indices take as much memory as what it gives


def shape(linear: Linear) -> tuple[int, int]:
    """(out, in) of the weight."""
    out, width = linear["weight"].shape
    return out, (width * 32 // linear["bits"] if "scales" in linear else width)


def dequantize(linear: Linear, dtype: Any) -> np.ndarray:
    """The weight [out, in] in dtype, computed in it."""
    weight = linear["weight"]
    if "scales" not in linear:
        return weight.astype(dtype, copy=False)
    out = np.empty(shape(linear), dtype)
    step = max(1, BLOCK // out.shape[1])
    for i in range(0, len(out), step):
        block = out[i : i + step]
        _codes(np.ascontiguousarray(weight[i : i + step]), linear["bits"], block, CODES.get(linear.get("mode", "affine")))
        groups = block.reshape(len(block), -1, linear["group_size"])
        groups *= _scales(linear, i, i + step)[..., None].astype(dtype, copy=False)
        if "biases" in linear:
            groups += linear["biases"][i : i + step, :, None].astype(dtype, copy=False)
    return out


def quantize(weight: np.ndarray, bits: int, group_size: int) -> Linear:
    """The affine linear of a dense float32 weight [out, in], in a multiple of group_size, exactly as mx.quantize makes it.

    Per group: the end of the range with the larger magnitude is represented exactly, and so is zero.
    """
    out, width = weight.shape
    groups = weight.astype(np.float32, copy=False).reshape(out, width // group_size, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    top = np.float32(2**bits - 1)
    lower_end = np.abs(low) > np.abs(high)
    scales = np.maximum((high - low) / top, np.float32(1e-7))
    scales = np.where(lower_end, scales, -scales)
    edge = np.where(lower_end, low, high)
    steps = np.rint(edge / scales)
    scales = np.divide(edge, steps, out=scales, where=steps != 0)
    biases = np.where(steps != 0, edge, np.float32(0))
    codes = np.clip(np.rint((groups - biases[..., None]) / scales[..., None]), 0, top).astype(np.uint8)
    packed = _pack(codes.reshape(out, width), bits)
    return {"weight": packed, "scales": scales, "biases": biases, "bits": bits, "group_size": group_size}


def rows(linear: Linear, i: int, j: int) -> Linear:
    """Rows i to j: a linear with j - i outputs."""
    return {name: value[i:j] if np.ndim(value) else value for name, value in linear.items()}


def columns(linear: Linear, i: int, j: int) -> Linear:
    """Columns i to j, without the bias: a linear with j - i inputs. Of a packed weight, i and j are multiples of 32 and of group_size (or the end)."""
    if "scales" not in linear:
        return {"weight": linear["weight"][:, i:j]}
    bits, group = linear["bits"], linear["group_size"]
    parts = {name: linear[name][:, i // group : j // group] for name in ("scales", "biases") if name in linear}
    return {**linear_without_bias(linear), **parts, "weight": linear["weight"][:, i * bits // 32 : j * bits // 32]}


def linear_without_bias(linear: Linear) -> Linear:
    """The same linear without its bias."""
    return {name: value for name, value in linear.items() if name != "bias"}


def take(linear: Linear, index: np.ndarray) -> Linear:
    """Rows at integer index [n], a linear with n outputs: embeddings, and the targets' rows of a head."""
    return {name: value[index] if np.ndim(value) else value for name, value in linear.items()}


def unpacked(linear: Linear, dtype: Any) -> Linear:
    """The linear as products read it, for a tile that several products share: dequantised."""
    return {"weight": dequantize(linear, dtype)} | ({"bias": linear["bias"]} if "bias" in linear else {})


def matmul(x: np.ndarray, linear: Linear, tile_bytes: int | None = None) -> np.ndarray:
    """x [..., in] Wᵀ + bias -> [..., out], in the dtype of x. tile_bytes: of weights dequantised at a time."""
    flat = x.reshape(-1, x.shape[-1])
    y = np.empty((len(flat), shape(linear)[0]), x.dtype)
    for i, j in _tiles(linear, x.dtype, tile_bytes):
        np.matmul(flat, dequantize(rows(linear, i, j), x.dtype).T, out=y[:, i:j])
    if "bias" in linear:
        y += linear["bias"]
    return y.reshape(*x.shape[:-1], -1)


def matmul_transposed(dy: np.ndarray, linear: Linear, tile_bytes: int | None = None) -> np.ndarray:
    """dy [..., out] W -> [..., in], in the dtype of dy: the backward of `matmul`."""
    flat = dy.reshape(-1, dy.shape[-1])
    dx = np.empty((len(flat), shape(linear)[1]), dy.dtype)
    for i, j in _tiles(linear, dy.dtype, tile_bytes):
        weight = dequantize(rows(linear, i, j), dy.dtype)
        if i:
            dx += flat[:, i:j] @ weight
        else:
            np.matmul(flat[:, :j], weight, out=dx)
    return dx.reshape(*dy.shape[:-1], -1)


def _tiles(linear: Linear, dtype: Any, tile_bytes: int | None) -> list[tuple[int, int]]:
    """Ranges of rows whose dequantised form takes about tile_bytes; one range where the weight is used as it is."""
    out, width = shape(linear)
    if linear["weight"].dtype == dtype:
        return [(0, out)]
    step = tiles.weight_rows(width, np.dtype(dtype).itemsize, tile_bytes or tiles.WEIGHT_BYTES)
    return [(i, min(i + step, out)) for i in range(0, out, step)]


def _scales(linear: Linear, i: int, j: int) -> np.ndarray:
    """The scales of rows i to j, as numbers."""
    scales, mode = linear["scales"][i:j], linear.get("mode", "affine")
    if mode == "affine":
        return scales
    numbers = small_floats(*SCALES[mode])[scales]
    return numbers * (linear["global_scale"] / np.float32(GLOBAL)) if "global_scale" in linear else numbers


@functools.cache
def small_floats(exponent: int, mantissa: int) -> np.ndarray:
    """The float32 numbers that all codes of a small float stand for, with so many bits of each; a sign unless all 8 bits are exponent.

    As IEEE has it, but for infinities: e8m0 and e4m3 have one not-a-number (two with the sign) in their place, e2m1 has neither.
    """
    code = np.arange(2 ** (exponent + mantissa))
    power, fraction = code >> mantissa, code & (2**mantissa - 1)
    if exponent == 8:
        numbers = np.ldexp(np.float64(1), power - 127)
    else:
        bias = 2 ** (exponent - 1) - 1
        numbers = np.ldexp(np.where(power > 0, fraction + 2**mantissa, fraction).astype(np.float64), np.maximum(power, 1) - bias - mantissa)
    if exponent + mantissa >= 7:
        numbers[-1] = np.nan
    return (numbers if exponent == 8 else np.concatenate([numbers, -numbers])).astype(np.float32)


@functools.lru_cache(maxsize=16)
def _table(bits: int, dtype: np.dtype, kind: tuple[int, int] | None) -> np.ndarray:
    """[256, 8/bits]: what each byte holds, for 2, 4 and 8 bits: codes, or the small floats that they are."""
    shifts = np.arange(0, 8, bits)
    codes = (np.arange(256)[:, None] >> shifts) & (2**bits - 1)
    return (codes if kind is None else small_floats(*kind)[codes]).astype(dtype)


def _codes(packed: np.ndarray, bits: int, codes: np.ndarray, kind: tuple[int, int] | None) -> None:
    """Unpack uint32 [out, words] into codes [out, words*32/bits], or into the small floats that they are."""
    out = len(packed)
    if bits in (2, 4) or kind:
        # One look-up per byte is several times faster than shifting and masking; `clip` is what lets take write into `out` directly.
        np.take(_table(bits, codes.dtype, kind), packed.view(np.uint8), axis=0, out=codes.reshape(out, -1, 8 // bits), mode="clip")
        return
    places = 8 // math.gcd(bits, 8)  # codes until one begins where a byte begins
    period = packed.view(np.uint8).reshape(out, -1, places * bits // 8)
    by_place = codes.reshape(out, -1, places)
    for place in range(places):
        byte, shift = divmod(place * bits, 8)
        code = period[..., byte] >> shift
        if shift + bits > 8:
            code |= period[..., byte + 1] << (8 - shift)
        code &= 2**bits - 1
        by_place[..., place] = code


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 codes [out, in] into uint32 [out, in*bits/32]: the inverse of `_codes`."""
    out, width = codes.shape
    places = 8 // math.gcd(bits, 8)
    by_place = codes.reshape(out, -1, places)
    period = np.zeros((out, width // places, places * bits // 8), np.uint8)
    for place in range(places):
        byte, shift = divmod(place * bits, 8)
        period[..., byte] |= by_place[..., place] << shift
        if shift + bits > 8:
            period[..., byte + 1] |= by_place[..., place] >> (8 - shift)
    return period.reshape(out, -1).view(np.uint32)
