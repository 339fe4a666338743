"""The activations of MLPs, and their derivatives: the twin of `mesp_mlx.ops.activations`.

silu, gelu (by tanh), gelu_exact (by erf), gelu_sigmoid, relu, relu_squared, clipped_swiglu
"""

import functools
import math
from typing import Any, Literal

import numpy as np
from numpy.polynomial import chebyshev

Activation = Literal["silu", "gelu", "gelu_exact", "gelu_sigmoid", "relu", "relu_squared", "clipped_swiglu"]
STEEP = 1.702  # of gelu_sigmoid
LIMIT = 7.0  # of clipped_swiglu
BEND, FAR = 0.25, 12.0  # where the tail's polynomial has its points: t = 1 / (1 + BEND g), for g up to FAR


def activate(g: np.ndarray, activation: Activation) -> np.ndarray:
    """phi(g), in the shape and dtype of g: a new array."""
    match activation:
        case "silu":
            s = sigmoid(g)
        case "gelu":
            s = _gelu_tanh(g)
            s += 1
            s *= 0.5
        case "gelu_sigmoid":
            s = sigmoid(STEEP * g)
        case "gelu_exact":
            s, _ = normal(g)
        case "relu":
            return np.maximum(g, 0)
        case "relu_squared":
            s = np.maximum(g, 0)
            s *= s
            return s
        case "clipped_swiglu":
            return activate(np.minimum(g, LIMIT), "gelu_sigmoid")
    s *= g
    return s


def activate_with_slope(g: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    """phi(g) and phi'(g): two new arrays."""
    match activation:
        case "silu" | "gelu_sigmoid":
            slope = sigmoid(g if activation == "silu" else STEEP * g)
            phi = g * slope
            s = 1 - slope
            s *= phi
            if activation == "gelu_sigmoid":
                s *= STEEP
            slope += s  # s + phi (1 - s) inner'(g)
            return phi, slope
        case "gelu":
            t = _gelu_tanh(g)
            half = 0.5 * (1 + t)
            return g * half, half + 0.5 * math.sqrt(2 / math.pi) * g * (1 - t * t) * (1 + 3 * 0.044715 * g * g)
        case "gelu_exact":
            slope, density = normal(g)
            phi = g * slope
            density *= g
            slope += density
            return phi, slope
        case "relu":
            return np.maximum(g, 0), (g > 0).astype(g.dtype)
        case "relu_squared":
            phi = np.maximum(g, 0)
            slope = 2 * phi
            phi *= phi
            return phi, slope
        case "clipped_swiglu":
            phi, slope = activate_with_slope(np.minimum(g, LIMIT), "gelu_sigmoid")
            slope *= g < LIMIT
            return phi, slope


def factor(u: np.ndarray, activation: Activation) -> np.ndarray:
    """What phi(g) is multiplied by in a gated MLP: u itself, unless the activation changes it."""
    return np.clip(u, -LIMIT, LIMIT) + 1 if activation == "clipped_swiglu" else u


def through_factor(d: np.ndarray, u: np.ndarray, activation: Activation) -> np.ndarray:
    """The gradient of u, given that of `factor`."""
    return d * (np.abs(u) < LIMIT) if activation == "clipped_swiglu" else d


def sigmoid(g: np.ndarray) -> np.ndarray:
    """By tanh, which doesn't overflow."""
    s = g * 0.5
    np.tanh(s, out=s)
    s += 1
    s *= 0.5
    return s


def normal(g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The normal distribution Phi(g) = (1 + erf(g / sqrt(2))) / 2, which NumPy lacks, and its density: to the precision of g, in both tails too.

    Phi(-|g|) is e^(-g²/2) times a smooth function of 1 / (1 + |g| / 4).
    """
    far = np.abs(g)
    np.minimum(far, FAR, out=far)  # beyond, e^(-g²/2) alone says all there is to say
    far *= BEND
    far += 1
    u = np.divide(1, far, out=far)
    low = 1 / (1 + BEND * FAR)
    u -= 0.5 * (1 + low)
    u *= 2 / (1 - low)
    coefficients = _tail(9 if g.dtype == np.float32 else 20)
    tail = np.full_like(u, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        tail *= u
        tail += coefficient
    density = np.exp(-0.5 * g * g)
    tail *= density
    density *= 1 / math.sqrt(2 * math.pi)
    return np.where(g < 0, tail, 1 - tail), density


@functools.cache
def _tail(degree: int) -> tuple[float, ...]:
    """e^(g²/2) Phi(-g) for g from 0 to FAR, as a polynomial of u, which is 1 / (1 + BEND g) stretched to -1 ... 1: interpolated, lowest power first."""
    low = 1 / (1 + BEND * FAR)

    def exact(points: np.ndarray) -> Any:
        distances = [(1 / (low + (1 - low) * (u + 1) / 2) - 1) / BEND for u in points.tolist()]
        return np.array([0.5 * math.exp(g * g / 2) * math.erfc(g * math.sqrt(0.5)) for g in distances])

    return tuple(chebyshev.cheb2poly(chebyshev.chebinterpolate(exact, degree)).tolist())


def _gelu_tanh(g: np.ndarray) -> np.ndarray:
    """tanh(sqrt(2/pi) (g + 0.044715 g³))."""
    t = g * g
    t *= 0.044715
    t += 1
    t *= g
    t *= math.sqrt(2 / math.pi)
    return np.tanh(t, out=t)
