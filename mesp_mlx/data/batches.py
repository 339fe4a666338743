"""Which rows make up an update, in which order, and how they are padded. NumPy only.

A row of L tokens has L - 1 positions: the inputs are its first L - 1 tokens, the targets its last L - 1. Widths are counted in positions.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from mesp_mlx.data.group import TILE_TOKENS, Group
from mesp_mlx.data.tokens import TokenSet, read


def usable_rows(tokens: TokenSet, limit: int) -> tuple[np.ndarray, int, int]:
    """(rows to train on, number of rows cut at limit, number of rows skipped because nothing in them is supervised)."""
    usable = np.flatnonzero(tokens.supervised(limit))
    return usable, int(np.sum(tokens.lengths() > limit)), len(tokens) - len(usable)


def split_rows(
    tokens: TokenSet, rows: Sequence[int] | np.ndarray, seed: int, fraction: float = 0.1, least: int = 10, most: int = 200
) -> tuple[np.ndarray, np.ndarray]:
    """Hold out some rows for validation: (training rows, held-out rows), each in order.

    A fraction of the rows, between least and most, but never more than half of the distinct ones; a single row is kept for training.
    The rows with the smallest hash of seed and content are taken, so equal rows stay on one side, and rows added later move few others.
    """
    rows = np.asarray(rows, np.int64)
    copies: dict[bytes, list[int]] = {}
    wanted = set(rows.tolist())
    for i, j in tokens.blocks():
        first = int(tokens.offsets[i])
        ids = read(tokens.ids, first, int(tokens.offsets[j]))
        for row in range(i, j):
            if row in wanted:
                content = ids[tokens.offsets[row] - first : tokens.offsets[row + 1] - first].tobytes()
                copies.setdefault(hashlib.blake2b(content, digest_size=16, key=str(seed).encode()).digest(), []).append(row)
    count = min(max(round(fraction * len(rows)), least), most)
    held_out: list[int] = []
    for digest in sorted(copies)[: len(copies) // 2]:
        if len(held_out) < count:
            held_out += copies[digest]
    return rows[~np.isin(rows, held_out)], np.array(sorted(held_out), np.int64)


def padded_widths(lengths: np.ndarray, most: int = 32) -> list[int]:
    """The widths to pad rows of these lengths (in tokens) to: at most `most` of them, ascending, the last one wide enough for the longest row.

    Widths are multiples of 8, but the last is no wider than the longest row has tokens. Starting from all that occur, the width that costs the fewest
    padding tokens to give up is merged into the next one until few enough remain.
    """
    if len(lengths) == 0:
        return []
    rounded, counts = np.unique((np.maximum(np.asarray(lengths, np.int64) - 1, 1) + 7) // 8 * 8, return_counts=True)
    rounded[-1] = min(rounded[-1], max(int(np.max(lengths)), 1))
    widths, rows = rounded.tolist(), counts.tolist()
    while len(widths) > most:
        k = int(np.argmin(np.array(rows[:-1]) * np.diff(widths)))
        merged = rows.pop(k)
        rows[k] += merged
        widths.pop(k)
    return widths


def groups(tokens: TokenSet, rows: Sequence[int] | np.ndarray, limit: int, widths: Sequence[int], tile_tokens: int = TILE_TOKENS) -> list[Group]:
    """Groups of equal width, narrow ones first, that hold every one of the rows once; B * T is at most tile_tokens unless one row alone is more."""
    by_width: dict[int, list[int]] = {}
    chosen = np.asarray(rows, np.int64)
    positions = np.minimum(tokens.offsets[chosen + 1] - tokens.offsets[chosen], limit) - 1
    for row, width in zip(chosen, np.searchsorted(widths, positions), strict=True):
        by_width.setdefault(widths[width], []).append(int(row))
    result = []
    for width, members in sorted(by_width.items()):
        size = max(1, tile_tokens // width)
        result += [_group(tokens, members[k : k + size], limit, width) for k in range(0, len(members), size)]
    return result


def _group(tokens: TokenSet, rows: list[int], limit: int, width: int) -> Group:
    ids, targets = np.empty((len(rows), width), np.int32), np.empty((len(rows), width), np.int32)
    mask, lengths = np.zeros((len(rows), width), bool), []
    for b, row in enumerate(rows):
        row_ids, row_mask = tokens.row(row, limit)
        n = len(row_ids) - 1
        ids[b], targets[b] = row_ids[0], row_ids[0]  # padding is a token that the row has anyway: no further embedding row is read for it
        ids[b, :n], targets[b, :n], mask[b, :n] = row_ids[:-1], row_ids[1:], row_mask[1:]
        lengths.append(n)
    return Group(ids, targets, mask, tuple(rows), tuple(lengths))


def updates_per_epoch(rows: int, rows_per_update: int) -> int:
    """Updates it takes to train on every row once; the last one may be short."""
    return -(-rows // rows_per_update)


def count_updates(rows: int, batch_size: int, accumulation: int, *, iters: int | None = None, epochs: int | None = None) -> int:
    """Updates of batch_size * accumulation rows each that a run of so many iters (batches, as mlx-lm counts them) or epochs takes, rounded up."""
    if iters is not None:
        return -(-iters // accumulation)
    return (1 if epochs is None else epochs) * updates_per_epoch(rows, batch_size * accumulation)


def epoch_order(rows: Sequence[int] | np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """The rows in the order of one epoch (counted from 0), which depends on seed and epoch alone."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(np.asarray(rows, np.int64))


def updates(
    tokens: TokenSet,
    rows: Sequence[int] | np.ndarray,
    limit: int,
    widths: Sequence[int],
    *,
    rows_per_update: int,
    seed: int,
    stop: int,
    start: int = 0,
    tile_tokens: int = TILE_TOKENS,
) -> Iterator[list[Group]]:
    """The groups of updates start to stop - 1, counted from 0 over all epochs: each epoch trains on every row once, in an order of its own.

    Which rows an update holds depends on its number alone, so a run may start anywhere.
    """
    per_epoch = updates_per_epoch(len(rows), rows_per_update)
    order, order_of = np.empty(0, np.int64), None
    for update in range(start, stop):
        epoch, k = divmod(update, per_epoch)
        if epoch != order_of:
            order, order_of = epoch_order(rows, seed, epoch), epoch
        yield groups(tokens, order[k * rows_per_update : (k + 1) * rows_per_update], limit, widths, tile_tokens)
