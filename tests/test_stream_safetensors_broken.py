"""Files that are cut, damaged or not there: one clear message, never a wrong tensor."""

import errno
import itertools
import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import random_array, same_bits, write

from mesp_mlx.errors import UserError
from mesp_mlx.stream import safetensors
from mesp_mlx.stream.safetensors import NUMPY_TYPES, read_array, read_folder, read_header, read_run


def refusal(function, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return str(caught.value)


def small_file(folder):
    file = folder / "t.safetensors"
    write(file, {"a": random_array("F32", (3, 2)), "b": random_array("U8", (5,)), "c": random_array("BF16", (2, 2))}, {"c": "BF16"}, {"format": "mlx"})
    return file


def test_a_file_cut_anywhere_is_refused(tmp_path):
    file = small_file(tmp_path)
    whole = file.read_bytes()
    read_header(file)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        message = refusal(read_header, file)
        assert str(file) in message and "Expected a complete safetensors file" in message
        assert ("truncated" in message) == (length >= 8 + int.from_bytes(whole[:8], "little"))


def test_a_file_cut_after_its_header_was_read_is_refused(tmp_path):
    file = small_file(tmp_path)
    entries, _ = read_header(file)
    assert [name for name, entry in entries.items() if entry.start + entry.size_bytes == file.stat().st_size] == ["c"]
    os.truncate(file, file.stat().st_size - 3)
    for name in "ab":
        read_array(entries[name])
    assert refusal(read_array, entries["c"]) == f"reading tensor 'c' from {file}: the file ends 3 bytes early."


def test_a_read_that_stops_half_way_goes_on(tmp_path, monkeypatch):
    """Systems may give fewer bytes than were asked for."""
    array = random_array("F32", (7, 11))
    write(tmp_path / "t.safetensors", {"skip": random_array("U8", (8,)), "t": array})
    whole, asked = safetensors.read_at, []

    def few(descriptor, buffers, offset):
        asked.append(len(buffers[0]))
        return whole(descriptor, [buffers[0][:100]], offset)

    monkeypatch.setattr(safetensors, "read_at", few)
    assert same_bits(read_array(read_header(tmp_path / "t.safetensors")[0]["t"]), array)
    assert asked == [308, 208, 108, 8]


def test_a_read_without_positions_is_the_same(tmp_path, monkeypatch):
    """As on Windows."""
    file = small_file(tmp_path)
    want = {name: read_array(entry) for name, entry in read_header(file)[0].items()}
    monkeypatch.delattr(os, "preadv", raising=False)
    assert all(same_bits(read_array(entry), want[name]) for name, entry in read_header(file)[0].items())


def with_header(folder, header, data_bytes=64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "t.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
    return file


def entry(shape: Any, offsets: Any, dtype: Any = "F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b"{", "its header is not JSON"),
        (b"", "its header is not JSON"),
        (b"\xff\xfe{}", "its header is not JSON"),
        (b"[" * 200_000, "its header is not JSON"),
        ([1], "its header is not a JSON object"),
        ({"t": 3}, "tensor 't' has a header entry that can't be read: 3"),
        ({"t": {}}, "tensor 't' has a header entry that can't be read"),
        ({"t": {"dtype": "F32", "shape": [4]}}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([4], [0, 16], "F4")}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([4], [0, 16], ["F32"])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry(4, [0, 16])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([4], [0, 16, 32])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry(["4"], [0, 16])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([4.0], [0, 16])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([True, 4], [0, 16])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([-2, -2], [0, 16])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([4], [-16, 0])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([4], [0.0, 16.0])}, "tensor 't' has a header entry that can't be read"),
        ({"t": entry([4], [16, 0])}, "tensor 't' has shape [4] of F32 but -16 bytes"),
        ({"t": entry([4], [0, 12])}, "tensor 't' has shape [4] of F32 but 12 bytes"),
        ({"t": entry([3], [0, 16])}, "tensor 't' has shape [3] of F32 but 16 bytes"),
        ({"t": entry([4], [0, 16], "F16")}, "tensor 't' has shape [4] of F16 but 16 bytes"),
        ({"t": entry([4], [52, 68])}, ": it is truncated"),
        ({"t": entry([1 << 40], [0, 1 << 42])}, ": it is truncated"),
        ({"s": entry([4], [0, 16]), "t": entry([4], [12, 28])}, "tensors 's' and 't' overlap"),
        ({"t": entry([4], [12, 28]), "s": entry([4], [0, 16])}, "tensors 's' and 't' overlap"),
        ({"s": entry([8], [0, 32]), "t": entry([2], [8, 16])}, "tensors 's' and 't' overlap"),
        ({"s": entry([4], [0, 16]), "t": entry([4], [0, 16])}, "tensors 's' and 't' overlap"),
    ],
)
def test_corrupt_headers(tmp_path, header, found):
    file = with_header(tmp_path, header)
    message = refusal(read_header, file)
    assert message.startswith(f"reading weights from {file}: ") and found in message
    assert message.endswith("Expected a complete safetensors file; download or convert it again.")


def test_empty_tensors_overlap_nothing(tmp_path):
    file = with_header(tmp_path, {"s": entry([4], [0, 16]), "e": entry([0], [0, 0]), "t": entry([2], [16, 24]), "f": entry([3, 0], [24, 24])})
    entries, _ = read_header(file)
    assert [read_array(entries[name]).shape for name in "seft"] == [(4,), (0,), (3, 0), (2,)]


@pytest.mark.parametrize("length", [65, 1 << 20, (1 << 64) - 1])
def test_a_header_longer_than_its_file(tmp_path, length):
    file = tmp_path / "t.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + bytes(64))
    assert f"the header should be {length} bytes long, the file has 72" in refusal(read_header, file)


def test_a_header_too_large_is_not_read(tmp_path, monkeypatch):
    file = small_file(tmp_path)
    length = int.from_bytes(file.read_bytes()[:8], "little")
    monkeypatch.setattr(safetensors, "LARGEST_HEADER_BYTES", length)
    read_header(file)
    monkeypatch.setattr(safetensors, "LARGEST_HEADER_BYTES", length - 1)
    assert f"the header should be {length} bytes long" in refusal(read_header, file)


@given(st.data())
def test_a_damaged_header_is_refused_or_still_consistent(tmp_path_factory, data):
    """A few bytes of the header changed: one clear message, or tensors that lie whole and apart in the file."""
    file = small_file(tmp_path_factory.mktemp("damaged"))
    whole = bytearray(file.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    changes = st.tuples(st.integers(0, 7 + length), st.sampled_from(b'0123456789-.,:"{}[] aFUeE\xff\x00'))
    for place, value in data.draw(st.lists(changes, min_size=1, max_size=3)):
        whole[place] = value
    file.write_bytes(whole)
    try:
        entries, _ = read_header(file)
    except UserError as error:
        assert str(file) in str(error)
        return
    taken = sorted((entry.start, entry.start + entry.size_bytes) for entry in entries.values())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
    for entry in entries.values():
        assert same_bits(read_array(entry), np.frombuffer(whole[entry.start :][: entry.size_bytes], NUMPY_TYPES[entry.dtype]).reshape(entry.shape))


def test_files_that_are_not_there(tmp_path):
    assert refusal(read_header, tmp_path / "t.safetensors") == f"reading weights: {tmp_path / 't.safetensors'} does not exist."
    (tmp_path / "folder.safetensors").mkdir()
    assert refusal(read_header, tmp_path / "folder.safetensors").startswith(f"reading weights from {tmp_path / 'folder.safetensors'}: ")
    entries, _ = read_header(small_file(tmp_path))
    (tmp_path / "t.safetensors").unlink()
    assert refusal(read_array, entries["a"]) == f"reading weights from {tmp_path / 't.safetensors'}: No such file or directory."


def test_a_disk_that_fails_names_the_tensor(tmp_path, monkeypatch):
    entries, _ = read_header(small_file(tmp_path))

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(safetensors, "read_at", fails)
    assert refusal(read_array, entries["a"]) == f"reading tensor 'a' from {tmp_path / 't.safetensors'}: Input/output error."


def test_reading_leaves_no_descriptor_open(tmp_path, monkeypatch):
    entries, _ = read_header(small_file(tmp_path))
    opened, closed, really_open, really_close = [], [], os.open, os.close
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(really_open(*arguments)) or opened[-1])
    monkeypatch.setattr(os, "close", lambda descriptor: closed.append(descriptor) or really_close(descriptor))
    read_array(entries["a"])
    os.truncate(tmp_path / "t.safetensors", entries["a"].start)
    refusal(read_array, entries["a"])
    assert len(opened) == 2 and closed == opened
    own = os.open(tmp_path / "t.safetensors", os.O_RDONLY)
    refusal(read_run, [(entries["a"], memoryview(bytearray(24)))], own)
    os.fstat(own)  # a descriptor that was lent stays open
    os.close(own)


def index(folder, content):
    (folder / "model.safetensors.index.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_folder_is_all_its_weight_files_but_adapters(tmp_path):
    for name in ("one.safetensors", "two.safetensors", "adapters.safetensors", "adapter_model.safetensors"):
        write(tmp_path / name, {f"in {name}": np.zeros(1, np.float32)})
    assert sorted(read_folder(tmp_path)) == ["in one.safetensors", "in two.safetensors"]
    index(tmp_path, {"weight_map": {"in two.safetensors": "two.safetensors", "x": "two.safetensors"}})
    assert list(read_folder(tmp_path)) == ["in two.safetensors"]
    index(tmp_path, {"weight_map": {"a": "two.safetensors", "b": "three.safetensors"}})
    assert refusal(read_folder, tmp_path) == f"reading weights: {tmp_path / 'three.safetensors'} does not exist."


@pytest.mark.parametrize("content", ["{", "[]", "{}", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index(tmp_path, content):
    small_file(tmp_path)
    index(tmp_path, content)
    assert "it is not a safetensors index" in refusal(read_folder, tmp_path)


def test_an_index_that_can_not_be_read(tmp_path):
    small_file(tmp_path)
    (tmp_path / "model.safetensors.index.json").mkdir()
    assert refusal(read_folder, tmp_path).startswith(f"reading {tmp_path / 'model.safetensors.index.json'}: ")


def test_the_models_own_names_come_before_others(tmp_path):
    """As in mlx-lm: Mistral's folders hold the same weights twice, under other names in consolidated.safetensors."""
    for name in ("consolidated.safetensors", "model-1.safetensors", "model-2.safetensors"):
        write(tmp_path / name, {f"in {name}": np.zeros(1, np.float32)})
    assert sorted(read_folder(tmp_path)) == ["in model-1.safetensors", "in model-2.safetensors"]


def test_a_folder_without_weights(tmp_path):
    assert refusal(read_folder, tmp_path) == f"reading the model in {tmp_path}: it has no .safetensors file."
    write(tmp_path / "adapters.safetensors", {"a": np.zeros(1, np.float32)})
    assert "it has no .safetensors file" in refusal(read_folder, tmp_path)
