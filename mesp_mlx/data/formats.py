"""Rows on disk to turns: mlx-lm's JSON Lines files, read one line at a time and checked on the way.

A row is one JSON object on one line, of one of three kinds:

    {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}      chat; tools are optional
    {"prompt": "…", "completion": "…"}                                    becomes a chat of two turns
    {"text": "…"}                                                         trained on as it is

A row with keys of more than one kind is taken as mlx-lm takes it: prompt and completion first, then messages, then text. Other keys are ignored.
The kind is decided row by row (mlx-lm decides once, by the first row).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp_mlx.errors import UserError

SPLITS = ("train", "valid", "test")
FORMS = 'a row is one of {"messages": [{"role": …, "content": …}, …]}, {"prompt": …, "completion": …} or {"text": …}'


@dataclass(frozen=True)
class Row:
    """One row: a conversation (messages, and tools if any) or a plain text, and the line of the file it stands on, counted from 1."""

    line: int
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None


def find_files(path: str | Path) -> dict[str, Path | None]:
    """The files of a data set: {"train": …, "valid": …, "test": …}, None where there is none.

    path is a folder that holds train.jsonl (valid.jsonl and test.jsonl optional), or one .jsonl file of training rows.
    Raises UserError when there are no training rows to be found there.
    """
    path = Path(path)
    try:
        return _find_files(path)
    except OSError as error:
        raise UserError(f"Looking for training data in {path}: {error.strerror or error}.") from error


def _find_files(path: Path) -> dict[str, Path | None]:
    if path.is_dir():
        files = {split: path / f"{split}.jsonl" for split in SPLITS}
        if not files["train"].is_file():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise UserError(f"Looking for training data in {path}: there is no train.jsonl, only {found}. Name your file train.jsonl, or give the file itself.")
    elif path.is_file():
        if path.suffix != ".jsonl":
            raise UserError(f"Reading training data from {path}: expected a .jsonl file, one JSON object on each line ({FORMS}), or a folder with train.jsonl.")
        files = {"train": path}
    else:
        raise UserError(f"Looking for training data in {path}: no such file or folder. Give a folder that holds train.jsonl, or one .jsonl file.")
    found = {split: files[split] if split in files and files[split].is_file() else None for split in SPLITS}
    for file in (found["train"], found["valid"]):  # nothing reads a test set
        if file is not None and file.stat().st_size == 0:
            raise UserError(f"Reading {file}: the file is empty. Put one row on each line ({FORMS}){'' if file == found['train'] else ', or remove the file'}.")
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one file, in order, holding one line at a time. Blank lines, a byte order mark and either line ending are fine.

    Raises UserError, with file and line, for a line that is not UTF-8, not JSON, or not a row.
    """
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if raw.strip():
                    yield _row(_parse(raw, f"{path}:{number}"), f"{path}:{number}", number)
    except OSError as error:
        raise UserError(f"Reading {path}: {error.strerror or error}.") from error


def _parse(raw: bytes, where: str) -> Any:
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}. Save the file as UTF-8.") from error
    try:
        value = json.loads(line)
        if "\\ud" in line.lower():  # half of a surrogate pair parses, but is no character and can't be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        hint = " A file of one JSON array must be rewritten with one object on each line." if line.lstrip().startswith("[") else ""
        raise UserError(f"{where}: malformed JSON: {error.msg} at column {error.colno}. Each line must be one whole JSON object.{hint}") from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the text holds half of a surrogate pair ({ascii(error.object[error.start])[1:-1]}), which is no character. Remove it or write the pair."
        ) from error
    except (RecursionError, ValueError) as error:
        raise UserError(f"{where}: can't read this JSON: {error}.") from error
    return value


def _row(value: Any, where: str, line: int) -> Row:
    """Check one parsed line and turn it into a Row."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: found {_kind(value)} where a JSON object was expected: {FORMS}.")
    tools = value.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(f'{where}: "tools" must be a list of objects, each the JSON schema of one tool; found {_kind(tools)}.')
    if "prompt" in value and "completion" in value:
        prompt, completion = (_string(value, key, where) for key in ("prompt", "completion"))
        return Row(line, messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}], tools=tools)
    if "messages" in value:
        return Row(line, messages=_messages(value["messages"], where), tools=tools)
    if "text" in value:
        return Row(line, text=_string(value, "text", where))
    keys = ", ".join(f'"{key}"' for key in value) or "none"
    raise UserError(f"{where}: this row has none of the known sets of keys. Found {keys}; {FORMS}.")


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else _kind(messages)
        raise UserError(f'{where}: "messages" must be a list of turns, {{"role": …, "content": …}}, with at least one; found {found}.')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise UserError(f'{where}: message {number} is {_kind(message)}; expected an object, {{"role": …, "content": …}}.')
        if not isinstance(message.get("role"), str):
            found = "has none" if "role" not in message else f"has {_kind(message['role'])}"
            raise UserError(f'{where}: message {number} needs a "role" that is a string, such as "user" or "assistant"; it {found}.')
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise UserError(f'{where}: the "content" of message {number} is {_kind(content)}; expected a string.')
        if content is None and not message.get("tool_calls"):
            raise UserError(f'{where}: message {number} says nothing: it has neither "content" nor "tool_calls".')
    return messages


def _string(value: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(value[key], str):
        raise UserError(f'{where}: "{key}" must be a string; found {_kind(value[key])}. For a conversation use {{"messages": […]}}.')
    return value[key]


def _kind(value: Any) -> str:
    """What a JSON value is, in JSON's own words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names[type(value)]
