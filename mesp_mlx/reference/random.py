"""MLX's random numbers, bit for bit: the twin of `mesp_mlx.ops.random`.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a key and a
counter of two 32-bit words into two random words. MLX fills n words from the counters (i, i + ceil(n/2)): the first
word of each pair goes to place i, the second to place i + ceil(n/2); the middle word of an odd n comes from (floor(n/2), 0).
"""

import math

import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def key(seed: int) -> np.ndarray:
    """The key of a seed: uint32 [2]."""
    return np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def split(key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two new keys from one."""
    words = _bits(key, 4)
    return words[:2], words[2:]


def uniform(key: np.ndarray, low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 draws from [low, high)."""
    unit = _bits(key, math.prod(shape)).astype(np.float32) / np.float32(2**32)
    unit = np.minimum(unit, np.nextafter(np.float32(1), np.float32(0)))
    low32, high32 = np.float32(low), np.float32(high)
    return (unit * (high32 - low32) + low32).reshape(shape)


def normal(key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 draws from a standard normal distribution (Box and Muller, 1958, eq. 1: two from two uniform ones)."""
    count = math.prod(shape)
    pairs = uniform(key, 0, 1, (2, -(-count // 2)))
    size, angle = np.sqrt(-2 * np.log(1 - pairs[0])), np.float32(2 * math.pi) * pairs[1]
    return np.concatenate([size * np.cos(angle), size * np.sin(angle)])[:count].reshape(shape)


def _bits(key: np.ndarray, n: int) -> np.ndarray:
    half = n // 2
    first = np.arange(n - half, dtype=np.uint32)
    second = first + np.uint32(n - half)
    if n % 2:
        second[half] = 0
    left, right = _threefry(key, first, second)
    return np.concatenate([left, right[:half]])


def _threefry(key: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    k0, k1 = int(key[0]), int(key[1])
    keys = tuple(np.uint32(k) for k in (k0, k1, k0 ^ k1 ^ 0x1BD11BDA))
    left, right = left + keys[0], right + keys[1]
    for step in range(5):
        for rotation in _ROTATIONS[step % 2]:
            left += right
            right = (right << np.uint32(rotation)) | (right >> np.uint32(32 - rotation))
            right ^= left
        left += keys[(step + 1) % 3]
        # Wraps modulo 2**32: on arrays silently, as wanted.
        right += keys[(step + 2) % 3]
        right += np.uint32(step + 1)
    return left, right
