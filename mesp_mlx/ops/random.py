"""Random draws that are a function of their key alone (Threefry: Salmon et al., 2011)."""

import math

import mlx.core as mx


def key(seed: int) -> mx.array:
    """The key of a seed: uint32 [2]."""
    return mx.random.key(seed)


def split(key: mx.array) -> tuple[mx.array, mx.array]:
    """Two new keys from one."""
    first, second = mx.random.split(key)
    return first, second


def uniform(key: mx.array, low: float, high: float, shape: tuple[int, ...]) -> mx.array:
    """Float32 draws from [low, high)."""
    return mx.random.uniform(low, high, shape, key=key)


def normal(key: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Float32 draws from a standard normal distribution (Box and Muller, 1958, eq. 1: two from two uniform ones)."""
    count = math.prod(shape)
    pairs = uniform(key, 0, 1, (2, -(-count // 2)))
    size, angle = mx.sqrt(-2 * mx.log(1 - pairs[0])), 2 * math.pi * pairs[1]
    return mx.concatenate([size * mx.cos(angle), size * mx.sin(angle)])[:count].reshape(shape)
