"""The rows of a run: tokens of both splits, which rows are used, where they are cut and how they are padded."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mesp_mlx.config import MAX_SEQ_LENGTH_CAP, Settings
from mesp_mlx.data import batches, formats, tokens
from mesp_mlx.data.group import Group
from mesp_mlx.data.tokens import TokenSet, read
from mesp_mlx.errors import UserError
from mesp_mlx.model.spec import Spec

ROWS_ASKED = 50  # rows among which the shortest question is asked, where the user asks none
PROMPT_TOKENS = 256  # of a question at most: every token of a reply is a pass over all of it


@dataclass(frozen=True)
class Rows:
    """What a run trains on and measures itself by.

    train and valid are indices into train_set and valid_set (the same set when validation rows were held out); limit is tokens of a row;
    question is what the sample reply answers; prompt and stops are token ids: that question, and what ends the reply.
    """

    train_set: TokenSet
    valid_set: TokenSet
    train: np.ndarray
    valid: np.ndarray
    limit: int
    widths: list[int]
    cut: int
    skipped: int
    question: str
    prompt: list[int]
    stops: list[int]

    def supervised_share(self) -> float:
        """The fraction of the training rows' tokens that are supervised."""
        return float(self.train_set.supervised(self.limit)[self.train].sum() / self.tokens())

    def tokens(self) -> int:
        """Tokens of the training rows."""
        return int(self.train_set.lengths(self.limit)[self.train].sum())

    def validation_groups(self, rows: int, rows_at_once: int, group_tokens: int) -> Iterator[list[Group]]:
        """The first so many validation rows, in batches that take no more memory than an update, each made when it is asked for."""
        chosen = self.valid[:rows]
        for start in range(0, len(chosen), rows_at_once):
            yield batches.groups(self.valid_set, chosen[start : start + rows_at_once], self.limit, self.widths, group_tokens)


def read_rows(settings: Settings, files: Mapping[str, Path | None], model_folder: Path, spec: Spec, cache: Path) -> Rows:
    """Tokenise and choose the rows in the files of a data set, as `formats.find_files` finds them.

    Raises:
        UserError: a malformed file, a length the model has no positions for, or no row with anything to learn.
    """
    if settings.max_seq_length and settings.max_seq_length > spec.max_positions:
        raise UserError(f"--max-seq-length is {settings.max_seq_length}, but the model was made for {spec.max_positions} positions. Lower it.")
    train_file = files["train"]
    assert train_file is not None
    question = settings.sample_prompt or _short_question(files.get("valid") or train_file)
    used = {split: files.get(split) for split in ("train", "valid")}
    asked, masked, trust = [{"role": "user", "content": question}], settings.mask_prompt, settings.trust_remote_code
    encoded = tokens.encode(model_folder, used, cache, prompt=asked, mask_prompt=masked, trust_remote_code=trust)
    train_set = encoded.sets["train"]
    valid_set = encoded.sets.get("valid", train_set)
    largest = max(int(read(held.ids, held.offsets[i], held.offsets[j]).max()) for held in encoded.sets.values() for i, j in held.blocks())
    if largest >= spec.vocab_size:
        raise UserError(
            f"reading {train_file}: the tokenizer in {model_folder} gives token {largest}, but the model has only {spec.vocab_size}. "
            "Use the tokenizer of this model."
        )
    longest = max(int(rows.lengths().max()) for rows in encoded.sets.values())
    limit = settings.max_seq_length or min(longest, spec.max_positions, MAX_SEQ_LENGTH_CAP)
    train, cut, skipped = batches.usable_rows(train_set, limit)
    if not len(train):
        if not train_set.supervised().any():
            raise UserError(f"reading {train_file}: no row has an assistant turn or a completion to learn from. Add some, or give --no-mask-prompt.")
        raise UserError(f"reading {train_file}: nothing to learn stands within the first {limit} tokens of any row. Raise --max-seq-length.")
    if valid_set is not train_set:
        valid, valid_cut, valid_skipped = batches.usable_rows(valid_set, limit)
        cut, skipped = cut + valid_cut, skipped + valid_skipped
    elif settings.val_batches == 0:
        valid = train[:0]
    else:
        train, valid = batches.split_rows(train_set, train, settings.seed)
    lengths = np.concatenate([train_set.lengths(limit)[train], valid_set.lengths(limit)[valid]])
    widths = batches.padded_widths(lengths)
    return Rows(train_set, valid_set, train, valid, limit, widths, cut, skipped, question, encoded.prompt_ids[-min(limit, PROMPT_TOKENS) :], encoded.stop_ids)


def _short_question(file: Path) -> str:
    """The shortest question among a file's first rows: of a chat its first user turn, of a text its first words. A long one would make replies slow."""
    questions = []
    for row in itertools.islice(formats.read_rows(file), ROWS_ASKED):
        turns = [turn["content"] for turn in row.messages or () if turn["role"] == "user" and isinstance(turn.get("content"), str)]
        questions.append(turns[0] if turns else " ".join((row.text or "Hello").split()[:8]))
    return min(questions, key=len, default="Hello")
