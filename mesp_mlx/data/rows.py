"""The rows of a run: tokens of both splits, which rows are used, where they are cut and how they are padded."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mesp_mlx.config import MAX_SEQ_LENGTH_CAP, Settings
from mesp_mlx.data import batches, formats, tokens
from mesp_mlx.data.group import Group
from mesp_mlx.data.tokens import TokenSet, read
from mesp_mlx.errors import UserError
from mesp_mlx.model.spec import ModelSpec


@dataclass(frozen=True)
class Rows:
    """What a run trains on and measures itself by.

    train and valid are indices into train_set and valid_set (the same set when validation rows were held out); limit is tokens of a row;
    prompt and stops are token ids: what the sample reply answers, and what ends it.
    """

    train_set: TokenSet
    valid_set: TokenSet
    train: np.ndarray
    valid: np.ndarray
    limit: int
    widths: list[int]
    cut: int
    skipped: int
    prompt: list[int]
    stops: list[int]

    def supervised_share(self) -> float:
        """The fraction of the training rows' tokens that are supervised."""
        return float(self.train_set.supervised(self.limit)[self.train].sum() / self.tokens())

    def tokens(self) -> int:
        """Tokens of the training rows."""
        return int(self.train_set.lengths(self.limit)[self.train].sum())

    def validation_groups(self, rows: int, rows_at_once: int) -> list[list[Group]]:
        """The first so many validation rows, in batches that take no more memory than an update."""
        chosen = self.valid[:rows]
        starts = range(0, len(chosen), rows_at_once)
        return [batches.groups(self.valid_set, chosen[start : start + rows_at_once], self.limit, self.widths) for start in starts]


def read_rows(settings: Settings, data: Path, model_folder: Path, spec: ModelSpec, cache: Path) -> Rows:
    """Read, tokenise and choose the rows in a data folder or file.

    Raises:
        UserError: a missing, empty or malformed file, a length the model has no positions for, or no row with anything to learn.
    """
    if settings.max_seq_length and settings.max_seq_length > spec.max_positions:
        raise UserError(f"--max-seq-length is {settings.max_seq_length}, but the model was made for {spec.max_positions} positions. Lower it.")
    files = {split: file for split, file in formats.find_files(data).items() if file is not None and split != "test"}
    ask = [{"role": "user", "content": settings.sample_prompt}] if settings.sample_prompt else []
    encoded = tokens.encode(model_folder, files, cache, prompt=ask, mask_prompt=settings.mask_prompt)
    train_set = encoded.sets["train"]
    valid_set = encoded.sets.get("valid", train_set)
    largest = max(int(read(held.ids, held.offsets[i], held.offsets[j]).max()) for held in encoded.sets.values() for i, j in held.blocks())
    if largest >= spec.vocab_size:
        raise UserError(
            f"reading {data}: the tokenizer in {model_folder} gives token {largest}, but the model has only {spec.vocab_size}. Use the tokenizer of this model."
        )
    longest = max(int(rows.lengths().max()) for rows in encoded.sets.values())
    limit = settings.max_seq_length or min(longest, spec.max_positions, MAX_SEQ_LENGTH_CAP)
    train, cut, skipped = batches.usable_rows(train_set, limit)
    if valid_set is train_set:
        train, valid = batches.split_rows(train_set, train, settings.seed)
    else:
        valid, valid_cut, valid_skipped = batches.usable_rows(valid_set, limit)
        cut, skipped = cut + valid_cut, skipped + valid_skipped
    if not len(train):
        raise UserError(f"reading {data}: no row has anything to learn within {limit} tokens ({skipped} skipped). Raise --max-seq-length or mend the rows.")
    lengths = np.concatenate([train_set.lengths(limit)[train], valid_set.lengths(limit)[valid]])
    prompt = encoded.prompt_ids or _prompt_of_a_row(valid_set if len(valid) else train_set, int(valid[0]) if len(valid) else int(train[0]), limit)
    return Rows(train_set, valid_set, train, valid, limit, batches.padded_widths(lengths), cut, skipped, prompt, encoded.stop_ids)


def _prompt_of_a_row(rows: TokenSet, row: int, limit: int) -> list[int]:
    """What stands before the first supervised token of a row; of a row that is all supervised, its first quarter."""
    ids, mask = rows.row(row, limit)
    first = int(np.flatnonzero(mask)[0])
    return ids[: first if first > 1 else max(len(ids) // 4, 1)].tolist()
