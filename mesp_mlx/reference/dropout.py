"""Dropout masks that depend on what is dropped and not on how it is computed: the twin of `mesp_mlx.ops.dropout`."""

import numpy as np

from mesp_mlx import keys
from mesp_mlx.reference import random

BLOCK = 64  # tokens drawn under one key


def keep_mask(seed: int, update: int, row: int, module: str, tokens: int, width: int, rate: float) -> np.ndarray:
    """Which inputs of a LoRA module stay: bool [tokens, width], True with probability 1 - rate.

    Each block of 64 tokens is drawn whole under a key of its own, so the mask of the first t tokens is the same for any tokens >= t.
    """
    blocks = range(max(1, -(-tokens // BLOCK)))
    drawn = [random.uniform(np.array(keys.key(seed, update, row, module, block), np.uint32), 0, 1, (BLOCK, width)) >= rate for block in blocks]
    return np.concatenate(drawn)[:tokens]
