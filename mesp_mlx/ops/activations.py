"""The activations of MLPs, and their derivatives.

    silu            g sigmoid(g)
    gelu            g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g³))) / 2                    (Hendrycks & Gimpel, 2016)
    gelu_exact      g Phi(g), with the normal distribution Phi(g) = (1 + erf(g / sqrt(2))) / 2
    gelu_sigmoid    g sigmoid(1.702 g)
    relu            max(g, 0)
    relu_squared    max(g, 0)²                                                          (So et al., 2021)
    clipped_swiglu  gelu_sigmoid(min(g, 7)), which in a gated MLP multiplies clip(u, -7, 7) + 1 instead of u: see `factor`    (gpt-oss)

The first two and gelu_sigmoid are g sigmoid(inner(g)): inner(g) = g for silu; gelu's (1 + tanh(t)) / 2 is sigmoid(2 t).
"""

import math
from typing import Literal

import mlx.core as mx

from mesp_mlx.ops import arrays

Activation = Literal["silu", "gelu", "gelu_exact", "gelu_sigmoid", "relu", "relu_squared", "clipped_swiglu"]
GELU, CUBIC = 1.5957691216, 0.044715  # 2 sqrt(2 / pi), and gelu's coefficient
STEEP = 1.702  # of gelu_sigmoid
LIMIT = 7.0  # of clipped_swiglu


def activate(g: mx.array, activation: Activation) -> mx.array:
    """phi(g), in the shape and dtype of g."""
    match activation:
        case "silu":
            return g * arrays.sigmoid(g)
        case "gelu":
            return g * arrays.sigmoid(GELU * g * (1 + CUBIC * g * g))
        case "gelu_sigmoid":
            return g * arrays.sigmoid(STEEP * g)
        case "gelu_exact":
            return g * _normal(g)
        case "relu":
            return mx.maximum(g, 0)
        case "relu_squared":
            return mx.square(mx.maximum(g, 0))
        case "clipped_swiglu":
            return activate(mx.minimum(g, LIMIT), "gelu_sigmoid")


def activate_with_slope(g: mx.array, activation: Activation) -> tuple[mx.array, mx.array]:
    """phi(g) and phi'(g), in the shape and dtype of g; of g s, with s = sigmoid(inner(g)), that is s + phi(g) (1 - s) inner'(g)."""
    match activation:
        case "silu":
            s = arrays.sigmoid(g)
            phi = g * s
            return phi, s + phi * (1 - s)
        case "gelu":
            cube = CUBIC * g * g
            inner = GELU * g * (1 + cube)
            s = arrays.sigmoid(inner)
            rest = 1 - s if g.dtype == mx.float32 else mx.sigmoid(-inner)  # few of bfloat16's eight bits are left of 1 - s
            phi = g * s
            return phi, s + GELU * phi * rest * (1 + 3 * cube)
        case "gelu_sigmoid":
            s = arrays.sigmoid(STEEP * g)
            phi = g * s
            return phi, s + STEEP * phi * (1 - s)
        case "gelu_exact":
            s = _normal(g)
            return g * s, s + g * arrays.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))
        case "relu":
            return mx.maximum(g, 0), (g > 0).astype(g.dtype)
        case "relu_squared":
            r = mx.maximum(g, 0)
            return r * r, 2 * r
        case "clipped_swiglu":
            phi, slope = activate_with_slope(mx.minimum(g, LIMIT), "gelu_sigmoid")
            return phi, slope * (g < LIMIT).astype(g.dtype)


def factor(u: mx.array, activation: Activation) -> mx.array:
    """What phi(g) is multiplied by in a gated MLP: u itself, unless the activation changes it."""
    return mx.clip(u, -LIMIT, LIMIT) + 1 if activation == "clipped_swiglu" else u


def through_factor(d: mx.array, u: mx.array, activation: Activation) -> mx.array:
    """The gradient of u, given that of `factor`."""
    return d * (mx.abs(u) < LIMIT).astype(d.dtype) if activation == "clipped_swiglu" else d


def _normal(g: mx.array) -> mx.array:
    return 0.5 * (1 + mx.erf(g * math.sqrt(0.5)))
