"""Dropout masks that depend on what is dropped and not on how it is computed."""

import mlx.core as mx

from mesp_mlx import keys

BLOCK = 64  # tokens drawn under one key


def keep_mask(seed: int, update: int, row: int, module: str, tokens: int, width: int, rate: float) -> mx.array:
    """Which inputs of a LoRA module stay: bool [tokens, width], True with probability 1 - rate.

    Each block of 64 tokens is drawn whole under a key of its own, so the mask of the first t tokens is the same for any tokens >= t.
    """
    blocks = range(max(1, -(-tokens // BLOCK)))
    drawn = [mx.random.uniform(0, 1, (BLOCK, width), key=mx.array(keys.key(seed, update, row, module, block), mx.uint32)) >= rate for block in blocks]
    return (drawn[0] if len(drawn) == 1 else mx.concatenate(drawn))[:tokens]
