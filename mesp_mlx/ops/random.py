"""Random draws that are a function of their key alone (Threefry: Salmon et al., 2011)."""

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
