"""Turns to token ids and masks, cached on disk.

transformers is imported by a process of its own, `python -m mesp_mlx.data.tokens`, so the process that trains never carries it. One call does all the
work before training, one more decodes replies.

The cache holds a folder per data file, named by a hash of all that decides its tokens, with three arrays: ids.npy (int32) and mask.npy (uint8, 1 where a
token is supervised, that is, predicted from the one before it), all rows end to end, and offsets.npy (int64), where row i is [offsets[i], offsets[i + 1]).
Rows are stored whole: cutting at a length happens when they are read, so one cache serves every --max-seq-length.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx import child
from mesp_mlx.data.formats import Row, read_rows
from mesp_mlx.data.masks import assistant_spans, token_mask
from mesp_mlx.errors import UserError
from mesp_mlx.model.files import CODE_FILES, SETTINGS_FILES, TEMPLATE_FILES, TOKENIZER_FILES

FORMAT = 1  # part of every cache key: raise it whenever the same rows would give other arrays
COLUMNS = {"ids": np.dtype("<i4"), "mask": np.dtype("u1"), "offsets": np.dtype("<i8")}
BATCH_ROWS, BATCH_CHARACTERS = 256, 1 << 20  # a batch of rows ends at either: together they bound the child's memory


@dataclass(frozen=True, eq=False)
class TokenSet:
    """The tokens of one file of rows, end to end: ids int32, mask uint8 (1 = supervised), offsets int64 [rows + 1]."""

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, limit: int | None = None) -> np.ndarray:
        """Tokens of every row, int64 [rows], cut at limit."""
        lengths = np.diff(self.offsets)
        return lengths if limit is None else np.minimum(lengths, limit)

    def row(self, i: int, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """ids int32 [T] and mask uint8 [T] of row i, cut at limit."""
        start, stop = int(self.offsets[i]), int(self.offsets[i + 1])
        stop = stop if limit is None else min(stop, start + limit)
        return read(self.ids, start, stop), read(self.mask, start, stop)

    def blocks(self, tokens: int = 1 << 20) -> Iterator[tuple[int, int]]:
        """Ranges [i, j) of rows that hold about that many tokens each: for passes over the whole set in bounded memory."""
        i = 0
        while i < len(self):
            j = max(i + 1, int(np.searchsorted(self.offsets, self.offsets[i] + tokens, side="right")) - 1)
            yield i, j
            i = j

    def supervised(self, limit: int | None = None) -> np.ndarray:
        """Supervised tokens of every row cut at limit, int64 [rows]."""
        counts, lengths = np.zeros(len(self), np.int64), self.lengths(limit)
        for i, j in self.blocks():
            first = int(self.offsets[i])
            running = np.concatenate(([0], np.cumsum(read(self.mask, first, int(self.offsets[j])), dtype=np.int64)))
            starts = self.offsets[i:j] - first
            counts[i:j] = running[starts + lengths[i:j]] - running[starts]
        return counts


@dataclass(frozen=True)
class Encoded:
    """What training needs of the tokenizer: a TokenSet per file, the ids of the sample prompt, and the ids that stop a reply."""

    sets: dict[str, TokenSet]
    prompt_ids: list[int]
    stop_ids: list[int]


def read(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    """A copy of array[start:stop]. A mapped file is read instead: pages that were mapped count as resident."""
    if isinstance(array, np.memmap):
        return np.fromfile(array.filename, array.dtype, stop - start, offset=array.offset + start * array.itemsize)  # type: ignore[arg-type]
    return np.array(array[start:stop])


def encode(
    model_folder: Path,
    files: Mapping[str, Path | None],
    cache_folder: Path,
    *,
    prompt: list[dict[str, Any]],
    mask_prompt: bool = True,
    trust_remote_code: bool = False,
) -> Encoded:
    """The tokens of every file there is and of the sample prompt (chat messages, a reply to which is about to start; may be empty).

    With mask_prompt, assistant turns and completions are supervised, else every token but a row's first; text rows always are, all of them.
    With trust_remote_code, a tokenizer's own code is run.
    Starts the child only for what the cache does not hold. Raises UserError for a bad row, or a tokenizer that is missing or can't render it.
    """
    tokenizer = _tokenizer_digest(model_folder, trust_remote_code)
    folders = {name: cache_folder / _digest(tokenizer, _file_digest(file), mask_prompt) for name, file in files.items() if file is not None}
    prompt_file = cache_folder / f"{_digest(tokenizer, json.dumps(prompt))}.json"
    sets = {name: _load(folder) for name, folder in folders.items()}
    answer = _load_prompt(prompt_file)
    if answer is None or None in sets.values():
        missing = [name for name, found in sets.items() if found is None]
        try:
            cache_folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache_folder) as work:
                outputs = {name: Path(work, name) for name in missing}
                jobs = [{"file": str(files[name]), "folder": str(folder)} for name, folder in outputs.items()]
                given = {"prompt": prompt, "mask_prompt": mask_prompt, "trust_remote_code": trust_remote_code}
                answer = _ask_child({"model": str(model_folder), "jobs": jobs} | given)
                for name, folder in outputs.items():
                    _move(folder, folders[name])
                Path(work, "prompt").write_text(json.dumps(answer))
                os.replace(Path(work, "prompt"), prompt_file)
        except OSError as error:
            raise UserError(
                f"Writing the token cache in {cache_folder}: {error.strerror or error}. Free some space, or set MESP_MLX_CACHE to another folder."
            ) from error
        sets = {name: _load(folder) for name, folder in folders.items()}
    return Encoded({name: found for name, found in sets.items() if found is not None}, answer["prompt_ids"], answer["stop_ids"])


def decode(model_folder: Path, replies: list[list[int]], trust_remote_code: bool = False) -> list[str]:
    """The text of each list of ids, special tokens left out. Raises UserError when the tokenizer can't be read."""
    return _ask_child({"model": str(model_folder), "decode": replies, "trust_remote_code": trust_remote_code})["texts"]


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr((FORMAT, *parts)).encode(), digest_size=16).hexdigest()


def _file_digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise UserError(f"Reading {path}: {error.strerror or error}.") from error


def _tokenizer_digest(folder: Path, trust_remote_code: bool) -> str:
    """A hash of all that decides how text becomes tokens: the tokenizer's files, its code if it is run, and the version of transformers."""
    kinds = TOKENIZER_FILES, TEMPLATE_FILES, CODE_FILES if trust_remote_code else ()
    files, templates, code = (sorted({path for pattern in names for path in folder.glob(pattern) if path.is_file()}) for names in kinds)
    if not files:
        raise UserError(
            f"Looking for the tokenizer in {folder}: found neither tokenizer.json nor any other tokenizer file. Copy the model's tokenizer files there."
        )
    files += templates + code + [folder / name for name in SETTINGS_FILES if (folder / name).is_file()]
    return _digest(importlib.metadata.version("transformers"), [(path.relative_to(folder).as_posix(), _file_digest(path)) for path in files])


def _load(folder: Path) -> TokenSet | None:
    """The cached set in a folder, None if there is none that is whole."""
    try:
        ids, mask = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "mask"))
        offsets = np.load(folder / "offsets.npy")
    except (OSError, ValueError, EOFError):
        return None
    whole = offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == len(ids) == len(mask) and bool(np.all(np.diff(offsets) >= 0))
    kinds = {"ids": ids.dtype, "mask": mask.dtype, "offsets": offsets.dtype}
    return TokenSet(ids, mask, offsets) if whole and kinds == COLUMNS else None


def _load_prompt(path: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and answer.keys() >= {"prompt_ids", "stop_ids"} else None


def _move(folder: Path, final: Path) -> None:
    """Put a finished folder in its place, unless another run, or another split of the same content, has just done so."""
    if _load(final) is None:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(folder, final)


def _ask_child(request: dict[str, Any]) -> dict[str, Any]:
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return child.ask("mesp_mlx.data.tokens", request, f"Turning text into tokens with the tokenizer in {request['model']}", quiet)


# From here on: the child.


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    model = Path(request["model"])
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=request["trust_remote_code"])
    except Exception as error:
        if "trust_remote_code=True" in str(error):
            what = f"Reading the tokenizer in {model}: it comes with code of its own, which would be run."
            raise UserError(f"{what} If you trust it, give --trust-remote-code.") from error
        raise UserError(f"Reading the tokenizer in {model}: {_first_line(error)}") from error
    if "decode" in request:
        return {"texts": [tokenizer.decode(ids, skip_special_tokens=True) for ids in request["decode"]]}
    for job in request["jobs"]:
        file, folder = Path(job["file"]), Path(job["folder"])
        try:
            rows = _write(folder, _encode_rows(tokenizer, file, model, request["mask_prompt"]))
        except OSError as error:
            raise UserError(f"Writing the tokens of {file} to the cache in {folder.parent.parent}: {error.strerror or error}.") from error
        if not rows:
            raise UserError(f"Reading {file}: the file holds no rows.")
    return {"prompt_ids": _prompt_ids(tokenizer, request["prompt"]), "stop_ids": _stop_ids(tokenizer, model)}


def _encode_rows(tokenizer: Any, file: Path, model: Path, mask_prompt: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """ids and mask of every row of a file, in order."""
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    for rows in _batches(read_rows(file)):
        texts, spans = [], []
        for row in rows:
            text, places = (row.text, []) if row.text is not None else _render(tokenizer, row, f"{file}:{row.line}", model, mask_prompt)
            texts.append(text)
            spans.append(places)
        chats = [row.text is None for row in rows]
        tokens: list[Any] = [None] * len(rows)
        for chat in set(chats):  # a template writes the special tokens of a chat; a text gets those the tokenizer adds, as in mlx-lm
            chosen = [k for k, is_chat in enumerate(chats) if is_chat == chat]
            for k, result in zip(chosen, _tokenize(tokenizer, [texts[k] for k in chosen], chat), strict=True):
                tokens[k] = result
        for row, text, places, (ids, ends) in zip(rows, texts, spans, tokens, strict=True):
            if row.text is not None and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
                ids = [*ids, tokenizer.eos_token_id]
            if row.text is not None or not mask_prompt:
                mask = np.ones(len(ids), np.uint8)
                mask[:1] = 0
            elif ends is None:
                raise UserError(
                    f"{file}:{row.line}: this model's tokenizer doesn't say which token stands where, so replies can't be told from prompts. "
                    "Use --no-mask-prompt to train on all tokens."
                )
            else:
                mask = token_mask(ids, ends, text, places, added)
            yield np.array(ids, np.int32), mask


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch, characters = [], 0
    for row in rows:
        batch.append(row)
        characters += len(row.text or "") + sum(len(str(message.get("content"))) for message in row.messages or [])
        if len(batch) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _render(tokenizer: Any, row: Row, where: str, model: Path, mask_prompt: bool) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation and the spans of its assistant turns."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{where}: this row is a chat, but the tokenizer in {model} has no chat template to write it with. Use an instruction-tuned version of the model, "
            f'put its chat_template.jinja into that folder, or write the rows as {{"text": …}}.'
        )

    def render(messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(messages, tools=row.tools, tokenize=False, add_generation_prompt=add_generation_prompt)

    messages = row.messages or []
    try:
        text = render(messages)
    except Exception as error:  # templates raise whatever they like
        raise UserError(f"{where}: the model's chat template can't take this row: {_first_line(error)}. Change the row, or leave it out.") from error
    try:
        return text, assistant_spans(render, messages, text) if mask_prompt else []
    except LookupError as error:
        raise UserError(
            f"{where}: can't tell where message {error} stands in what the model's chat template writes. Use --no-mask-prompt to train on all tokens."
        ) from error


def _tokenize(tokenizer: Any, texts: list[str], chat: bool) -> Iterator[tuple[list[int], np.ndarray | None]]:
    """ids of each text and, for a chat, the character of the text at which each token ends."""
    found = tokenizer(texts, add_special_tokens=not chat, return_offsets_mapping=chat and tokenizer.is_fast)
    for k, ids in enumerate(found["input_ids"]):
        if not chat:
            yield ids, None
        elif tokenizer.is_fast:
            yield ids, np.maximum.accumulate(np.array([end for _, end in found["offset_mapping"][k]], np.int64))
        else:
            yield ids, _ends_by_decoding(tokenizer, ids, texts[k])


def _ends_by_decoding(tokenizer: Any, ids: list[int], text: str) -> np.ndarray | None:
    """Where each token ends, from a tokenizer that does not say: by how much of the text its first tokens decode to. None if they don't decode to the text."""
    so_far = [tokenizer.decode(ids[: k + 1], clean_up_tokenization_spaces=False) for k in range(len(ids))]
    ends = np.array([len(os.path.commonprefix([part, text])) for part in so_far], np.int64)
    return np.maximum.accumulate(ends) if so_far and so_far[-1] == text else None


def _prompt_ids(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The ids a model is given to reply to messages; without a chat template, those of the last message's text. No messages, no ids."""
    if not messages:
        return []
    if tokenizer.chat_template is None:
        return tokenizer.encode(messages[-1]["content"])
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:
        raise UserError(f"Writing the sample prompt {messages[-1]['content']!r}: the model's chat template can't take it: {_first_line(error)}.") from error


def _stop_ids(tokenizer: Any, model: Path) -> list[int]:
    """The tokenizer's end-of-sequence id and those that the model's settings name."""
    found = {tokenizer.eos_token_id}
    for name in SETTINGS_FILES:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            ids = json.loads((model / name).read_text()).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    return sorted(found - {None})


def _write(folder: Path, rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> int:
    """Write a set's three arrays as its rows come, and say how many there were."""
    folder.mkdir()
    counts = dict.fromkeys(COLUMNS, 0)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(folder / f"{name}.npy", "wb")) for name in COLUMNS}

        def header(name: str) -> None:
            np.lib.format.write_array_header_1_0(files[name], {"descr": COLUMNS[name].str, "fortran_order": False, "shape": (counts[name],)})

        def append(name: str, values: np.ndarray) -> None:
            files[name].write(values.astype(COLUMNS[name]).tobytes())
            counts[name] += len(values)

        for name in COLUMNS:
            header(name)
        append("offsets", np.zeros(1))
        for ids, mask in rows:
            append("ids", ids)
            append("mask", mask)
            append("offsets", np.array([counts["ids"]]))
        for name, file in files.items():  # NumPy pads a header so that a longer array's fits in its place
            file.seek(0)
            header(name)
    return counts["offsets"] - 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


if __name__ == "__main__":
    child.answer(_serve)
