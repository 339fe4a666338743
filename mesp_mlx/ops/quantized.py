"""Frozen linears, dense or in one of MLX's quantisations, and products with them.

A linear is the parameters of MLX's Linear or QuantizedLinear as a dict: `weight` [out, in], or `weight` packed
[out, in*bits/32] uint32 with `scales` and `biases` [out, in/group_size] and the integers `bits` and `group_size`;
and `bias` [out] if it has one. The weight it stands for is

    W[o, i] = scales[o, i // group_size] * code[o, i] + biases[o, i // group_size]

That is the mode "affine". The others have no biases; both numbers of a product are small floats, codes of the bits in brackets (OCP Microscaling
Formats 1.0), and `mode` names them. Every weight is exact in bfloat16, but for a global scale.

    mode     code           scale, uint8    group_size    global_scale
    mxfp4    e2m1 (4)       e8m0            32
    mxfp8    e4m3 (8)       e8m0            32
    nvfp4    e2m1 (4)       e4m3            16            optional: a float32 scalar G, and all scales are times G / (6 * 448)

A GPU multiplies by packed weights (mx.quantized_matmul). On a CPU device that kernel is scalar code, so a tile of rows is
dequantised, in the dtype of the activations, and an ordinary product follows; tiles wait for one another, so that only
about one of them exists at a time, and the first waits for the product's input: mx.compile would else find that forward and backward dequantise it
alike, do so once, and keep it in between.
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from mesp_mlx.memory import tiles

Linear = dict[str, Any]
E2M1 = np.array([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
E2M1_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=-1)  # [256, 2]: the two that a byte holds, the lower bits first
GLOBAL = 6 * 448  # the largest e2m1 times the largest e4m3: what nvfp4's global scale is the largest weight of


def on_cpu() -> bool:
    """Whether the default device is a CPU, where packed weights are not multiplied as they are."""
    return mx.default_device() == mx.cpu


def shape(linear: Linear) -> tuple[int, int]:
    """(out, in) of the weight."""
    out, width = linear["weight"].shape
    return out, (width * 32 // linear["bits"] if "scales" in linear else width)


def dequantize(linear: Linear, dtype: mx.Dtype) -> mx.array:
    """The weight [out, in] in dtype, computed in it."""
    if "scales" not in linear:
        return linear["weight"].astype(dtype)
    if _mode(linear) != "affine":
        return _floats(linear, dtype)
    scales, biases = linear["scales"].astype(dtype), linear["biases"].astype(dtype)
    if not on_cpu():
        return mx.dequantize(linear["weight"], scales, biases, group_size=linear["group_size"], bits=linear["bits"])
    # On a CPU mx.dequantize is made of 32-bit operations; on bytes the same takes half the time at 4 bits and a sixth at 5, and half the memory.
    codes = _codes(linear["weight"], linear["bits"]).reshape(*scales.shape, linear["group_size"]).astype(dtype)
    return (codes * scales[..., None] + biases[..., None]).reshape(shape(linear))


def quantize(weight: mx.array, bits: int, group_size: int) -> Linear:
    """The affine linear of a dense weight [out, in], in a multiple of group_size."""
    packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    return {"weight": packed, "scales": scales, "biases": biases, "bits": bits, "group_size": group_size}


def rows(linear: Linear, i: int, j: int) -> Linear:
    """Rows i to j: a linear with j - i outputs."""
    return {name: value[i:j] if _has_rows(value) else value for name, value in linear.items()}


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


def take(linear: Linear, index: mx.array) -> Linear:
    """Rows at integer index [n], a linear with n outputs: embeddings, and the targets' rows of a head."""
    return {name: mx.take(value, index, axis=0) if _has_rows(value) else value for name, value in linear.items()}


def unpacked(linear: Linear, dtype: mx.Dtype) -> Linear:
    """The linear as products read it, for a tile that several products share: dequantised on a CPU, as it is on a GPU."""
    if not on_cpu() and "scales" in linear:
        return linear
    return {"weight": dequantize(linear, dtype)} | ({"bias": linear["bias"]} if "bias" in linear else {})


def wait(linear: Linear, after: list[mx.array]) -> Linear:
    """The linear, not to be read before the arrays in `after` are computed."""
    names = [name for name, value in linear.items() if isinstance(value, mx.array)]
    return {**linear, **dict(zip(names, mx.depends([linear[name] for name in names], after), strict=True))} if after else linear


def zeros_like(linear: Linear) -> Linear:
    """The cotangent of a frozen linear: lazy zeros, which are never computed unless someone asks for them."""
    return {name: mx.zeros_like(value) if isinstance(value, mx.array) else value for name, value in linear.items()}


def matmul(x: mx.array, linear: Linear, tile_bytes: int | None = None) -> mx.array:
    """x [..., in] Wᵀ + bias -> [..., out], in the dtype of x. tile_bytes: of weights dequantised at a time."""
    if not on_cpu() and "scales" in linear:
        y = _quantized_matmul(x, linear, transpose=True)
    else:
        pieces: list[mx.array] = []
        for i, j in _tiles(linear, x.dtype, tile_bytes):
            weight = dequantize(wait(rows(linear_without_bias(linear), i, j), pieces[-1:] or [x]), x.dtype)
            pieces.append(x @ weight.T)
        y = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=-1)
    return y + linear["bias"].astype(x.dtype) if "bias" in linear else y


def matmul_transposed(dy: mx.array, linear: Linear, tile_bytes: int | None = None) -> mx.array:
    """dy [..., out] W -> [..., in], in the dtype of dy: the backward of `matmul`. Sums over tiles are float32."""
    if not on_cpu() and "scales" in linear:
        return _quantized_matmul(dy, linear, transpose=False)
    dx: mx.array | None = None
    for i, j in _tiles(linear, dy.dtype, tile_bytes):
        weight = dequantize(wait(rows(linear_without_bias(linear), i, j), [dy if dx is None else dx]), dy.dtype)
        part = dy[..., i:j] @ weight
        dx = part if dx is None else dx.astype(mx.float32) + part
    assert dx is not None
    return dx.astype(dy.dtype)


def apply(x: mx.array, linear: Linear) -> mx.array:
    """`matmul` as an ordinary MLX function whose gradient is `matmul_transposed`: what is dequantised is not kept for it. The frozen linear gets zeros."""
    return _apply(x, linear)


def _codes(packed: mx.array, bits: int) -> mx.array:
    """Unpack uint32 [out, words] into codes, uint8 [out, bytes, codes]: a stream of codes of `bits` bits, lowest bit first."""
    places = 8 // math.gcd(bits, 8)  # codes until one begins where a byte begins
    period = packed.view(mx.uint8).reshape(packed.shape[0], -1, places * bits // 8)
    codes = []
    for place in range(places):
        byte, shift = divmod(place * bits, 8)
        code = period[..., byte] >> shift
        if shift + bits > 8:
            code = code | period[..., byte + 1] << (8 - shift)
        codes.append(code & (2**bits - 1))
    return mx.stack(codes, axis=-1)


def _floats(linear: Linear, dtype: mx.Dtype) -> mx.array:
    """`dequantize` of the modes that are not affine."""
    mode, group, scale = _mode(linear), linear["group_size"], linear.get("global_scale")
    if not on_cpu():
        return mx.dequantize(linear["weight"], linear["scales"], None, group, linear["bits"], mode, scale, dtype)
    # As for affine codes: mx.dequantize takes twice the time and the memory here.
    packed = linear["weight"].view(mx.uint8)
    codes = mx.from_fp8(packed, dtype) if mode == "mxfp8" else mx.take(mx.array(E2M1_PAIRS).astype(dtype), packed, axis=0)
    if mode == "nvfp4":
        scales = mx.from_fp8(linear["scales"], dtype if scale is None else mx.float32)
    else:  # a float32's bits, of which the exponent is the scale's code; 0 is 2^-127, which only a fraction expresses
        scales = mx.maximum(linear["scales"].astype(mx.uint32) << 23, 1 << 22).view(mx.float32).astype(dtype)
    if scale is not None:
        scales = (scales * (scale / GLOBAL)).astype(dtype)
    return (codes.reshape(*scales.shape, group) * scales[..., None]).reshape(shape(linear))


def _quantized_matmul(x: mx.array, linear: Linear, transpose: bool) -> mx.array:
    bits, group, scale = linear["bits"], linear["group_size"], linear.get("global_scale")
    y = mx.quantized_matmul(x, linear["weight"], linear["scales"], linear.get("biases"), transpose, group, bits, _mode(linear))
    return (y if scale is None else y * (scale / GLOBAL)).astype(x.dtype)


def _mode(linear: Linear) -> str:
    return linear.get("mode", "affine")


def _has_rows(value: Any) -> bool:
    return isinstance(value, mx.array) and value.ndim > 0


def _tiles(linear: Linear, dtype: mx.Dtype, tile_bytes: int | None) -> list[tuple[int, int]]:
    """Ranges of rows whose dequantised form takes about tile_bytes; one range where the weight is used as it is."""
    out, width = shape(linear)
    if linear["weight"].dtype == dtype:
        return [(0, out)]
    step = tiles.weight_rows(width, dtype.size, tile_bytes or tiles.WEIGHT_BYTES)
    return [(i, min(i + step, out)) for i in range(0, out, step)]


_apply: Any = mx.custom_function(matmul)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    _x, linear = primals
    return matmul_transposed(dy, linear), zeros_like(linear)
