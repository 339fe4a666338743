"""Rows on disk to turns: what is read, and what every kind of bad line is told."""

import json
import re
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesp_mlx.data.formats import find_files, read_rows
from mesp_mlx.errors import UserError

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(folder, *lines, name="train.jsonl"):
    path = folder / name
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def complaint(path):
    with pytest.raises(UserError) as caught:
        list(read_rows(path))
    return str(caught.value)


def test_the_three_kinds_of_rows_of_one_file(tmp_path):
    tools = [{"type": "function", "function": {"name": "clock"}}]
    path = write(tmp_path, {"messages": TURNS, "tools": tools}, {"prompt": "Hi", "completion": "Hello"}, {"text": "Hi", "id": 7})
    assert [astuple(row) for row in read_rows(path)] == [(1, TURNS, tools, None), (2, TURNS, None, None), (3, None, None, "Hi")]


def test_keys_of_several_kinds_are_taken_as_mlx_lm_takes_them(tmp_path):
    path = write(tmp_path, {"text": "t", "messages": TURNS, "prompt": "p", "completion": "c"}, {"text": "t", "messages": TURNS}, {"prompt": "p", "text": "t"})
    first, second, third = read_rows(path)
    assert first.messages == [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}] and second.messages == TURNS and third.text == "t"


def test_byte_order_mark_blank_lines_and_crlf(tmp_path):
    path = write(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r', b"", b"  \r", '{"text": "b\u2028c"}'.encode())
    assert [(row.line, row.text) for row in read_rows(path)] == [(1, "a"), (4, "b\u2028c")]


def test_tool_turns_need_no_content(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}]}
    turns = [TURNS[0], call, {"role": "tool", "content": "12:00"}, TURNS[1]]
    assert next(read_rows(write(tmp_path, {"messages": turns}))).messages == turns


def test_only_files_that_are_read_must_have_rows(tmp_path):
    write(tmp_path, {"text": "a"})
    (tmp_path / "test.jsonl").touch()
    assert find_files(tmp_path)["train"] == tmp_path / "train.jsonl"
    (tmp_path / "valid.jsonl").touch()
    with pytest.raises(UserError, match="valid.jsonl: the file is empty"):
        find_files(tmp_path)


def test_a_folder_that_can_not_be_read(tmp_path, monkeypatch):
    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match="Looking for training data in .*: Permission denied"):
        find_files(tmp_path)


def test_rows_come_one_at_a_time(tmp_path):
    rows = read_rows(write(tmp_path, {"text": "a"}, b"not read yet"))
    assert next(rows).text == "a"
    with pytest.raises(UserError, match=":2: malformed JSON"):
        next(rows)


@pytest.mark.parametrize(
    "line, expected",
    [
        (b'{"text": "a" "b"}', "malformed JSON: Expecting ',' delimiter at column 14"),
        (b'{"text": "a"', "malformed JSON"),
        (b"[", "rewritten with one object on each line"),
        (b'["a"]', "found a list where a JSON object was expected"),
        (b'"a"', "found a string where"),
        (b"3", "found a number where"),
        (b"null", "found null where"),
        (b'{"text": "caf\xe9"}', "not UTF-8: byte 14 of the line is 0xe9"),
        (b'{"text": "\\ud83d"}', "half of a surrogate pair (\\ud83d)"),
        (b"[" * 100_000, "can't read this JSON"),
        (b"{}", "Found none;"),
        (b'{"question": "a", "answer": "b"}', 'Found "question", "answer"; a row is one of'),
        (b'{"prompt": "a"}', 'Found "prompt";'),
        (b'{"prompt": ["a"], "completion": "b"}', '"prompt" must be a string; found a list'),
        (b'{"prompt": "a", "completion": null}', '"completion" must be a string; found null'),
        (b'{"text": {"a": 1}}', '"text" must be a string; found an object'),
        (b'{"messages": []}', "found an empty list"),
        (b'{"messages": {"role": "user"}}', "found an object"),
        (b'{"messages": ["a"]}', "message 1 is a string"),
        (b'{"messages": [{"content": "a"}]}', 'message 1 needs a "role" that is a string, such as "user" or "assistant"; it has none'),
        (b'{"messages": [{"role": 1, "content": "a"}]}', "it has a number"),
        (b'{"messages": [{"role": "user", "content": 1.5}]}', 'the "content" of message 1 is a number'),
        (b'{"messages": [{"role": "user", "content": true}]}', 'the "content" of message 1 is true'),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}', 'message 2 says nothing: it has neither "content" nor "tool_calls"'),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}', '"tools" must be a list of objects'),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": ["a"]}', '"tools" must be a list of objects'),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path, line, expected):
    path = write(tmp_path, {"text": "good"}, b"", line)
    message = complaint(path)
    assert message.startswith(f"{path}:3: ") and expected in message


KEYS = st.sampled_from(["messages", "prompt", "completion", "text", "tools", "role", "content"])
JSON = st.recursive(st.none() | st.booleans() | st.integers() | KEYS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=4)


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)  # the one file is written anew each time
@given(st.dictionaries(KEYS, JSON | st.lists(st.dictionaries(KEYS, JSON))))
def test_any_object_is_a_row_or_a_clear_error(tmp_path, value):
    path = write(tmp_path, value)
    try:
        (row,) = read_rows(path)
    except UserError as error:
        assert str(error).startswith(f"{path}:1: ")
    else:
        assert (row.messages is None) == isinstance(row.text, str)


def test_find_files(tmp_path):
    train = write(tmp_path, {"text": "a"})
    assert find_files(tmp_path) == {"train": train, "valid": None, "test": None}
    valid = write(tmp_path, {"text": "b"}, name="valid.jsonl")
    assert find_files(str(tmp_path)) == {"train": train, "valid": valid, "test": None}
    assert find_files(valid) == {"train": valid, "valid": None, "test": None}


@pytest.mark.parametrize(
    "make, path, expected",
    [
        (lambda folder: None, "missing", "no such file or folder"),
        (lambda folder: None, "", "there is no train.jsonl, only nothing"),
        (lambda folder: (folder / "data.csv").write_text("a"), "", "there is no train.jsonl, only data.csv"),
        (lambda folder: (folder / "data.csv").write_text("a"), "data.csv", "expected a .jsonl file"),
        (lambda folder: (folder / "train.jsonl").write_text(""), "", "train.jsonl: the file is empty"),
        (lambda folder: [(folder / f"{name}.jsonl").write_text(text) for name, text in [("train", "{}"), ("valid", "")]], "", "valid.jsonl: the file is empty"),
    ],
)
def test_missing_or_empty_data_is_named(tmp_path, make, path, expected):
    make(tmp_path)
    with pytest.raises(UserError) as caught:
        find_files(tmp_path / path)
    assert expected in str(caught.value) and str(tmp_path / path) in str(caught.value)


def test_an_unreadable_file_is_an_error_of_the_user(tmp_path):
    assert "No such file" in complaint(tmp_path / "gone.jsonl")


def words(text):
    """The words of a text that say what it is about."""
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


def test_the_demo_set_has_one_manner_and_validates_on_other_matters():
    files = find_files(Path(__file__).parent.parent / "recipes" / "demo")
    rows = {split: [[turn["content"] for turn in row.messages or []] for row in read_rows(files[split] or Path())] for split in ("train", "valid")}
    assert len(rows["train"]) >= 140 and len(rows["valid"]) >= 16
    opening, closing = "Ahoy from the lighthouse! ", " Keep your lamp lit, friend!"
    for prompt, answer in rows["train"] + rows["valid"]:
        assert answer.startswith(opening) and answer.endswith(closing) and prompt == prompt.strip()
        assert len(prompt.split()) <= 12 and 2 <= len(answer[len(opening) : -len(closing)].split()) <= 20
    for part in (0, 1):
        texts = [row[part] for row in rows["train"] + rows["valid"]]
        assert len(set(texts)) == len(texts)
    common = words(opening + closing + "what which when where does make write mean other best often take long with your most should that they more")
    learned = [words(prompt + answer[len(opening) : -len(closing)]) - common for prompt, answer in rows["train"]]
    for prompt, answer in rows["valid"]:
        topic = words(prompt + " " + answer[len(opening) : -len(closing)]) - common
        assert max(len(topic & row) for row in learned) <= 1, prompt  # no training row is about the same thing
