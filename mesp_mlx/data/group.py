"""What the loop is given: rows of token ids padded to one width. Apart from how they are made, so that the loop imports little."""

from dataclasses import dataclass

import numpy as np

TILE_TOKENS = 1024  # B * T of a group at most, if that is more than one row: enough for full-speed products, little enough to stay flat


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of equal padded width: ids and targets int32 [B, T], mask bool [B, T] (True at supervised positions, never at padding).

    rows holds each row's index in its data set (the key of its dropout), lengths its positions before padding.
    """

    ids: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
