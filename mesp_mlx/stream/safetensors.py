"""Safetensors files, read by tensor or by rows and written tensor by tensor.

The `safetensors` library maps a file into memory, and mapped pages count as resident; here bytes are read into
buffers that the caller owns, so that a stage's weights are the only ones in memory.
Format: 8 bytes of little-endian header length, a JSON header, then the tensors' bytes.
Source: the safetensors format description, https://github.com/huggingface/safetensors.
"""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mesp_mlx.errors import UserError

# bfloat16 has no NumPy type: it travels as its bits, in uint16.
NUMPY_TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
LARGEST_HEADER_BYTES = 100_000_000
LARGEST_CALL_BYTES, MOST_BUFFERS = 1 << 30, 1000  # macOS moves less than 2^31 bytes in a call; systems take 1024 buffers


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: its file, first byte, size in bytes, shape and safetensors dtype ("F32", "BF16", "U32", …)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    def rows(self, first: int, last: int) -> "Entry":
        """The part of this tensor that holds rows first to last (exclusive) of its first axis."""
        row_bytes = self.size_bytes // self.shape[0]
        shape = (last - first, *self.shape[1:])
        return Entry(self.name, self.file, self.dtype, shape, self.start + first * row_bytes, (last - first) * row_bytes)


def read_header(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries of one file, and its metadata.

    Raises:
        UserError: the file is missing, is no safetensors file, or is shorter than its header says.
    """

    def broken(found: str) -> UserError:
        return UserError(f"reading weights from {file}: {found}. Expected a complete safetensors file; download or convert it again.")

    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or length > min(file_bytes - 8, LARGEST_HEADER_BYTES):
                raise broken(f"the header should be {length} bytes long, the file has {file_bytes}")
            header = json.loads(stream.read(length))
    except FileNotFoundError:
        raise UserError(f"reading weights: {file} does not exist.") from None
    except OSError as error:
        raise UserError(f"reading weights from {file}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise broken("its header is not JSON") from None
    if not isinstance(header, dict):
        raise broken("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    entries = {}
    for name, field in header.items():
        try:
            dtype, shape, (first, last) = field["dtype"], tuple(field["shape"]), field["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
                raise ValueError
            size_bytes = math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize
        except (KeyError, TypeError, ValueError):
            raise broken(f"tensor {name!r} has a header entry that can't be read: {field}") from None
        if size_bytes != last - first:
            raise broken(f"tensor {name!r} has shape {list(shape)} of {dtype} but {last - first} bytes")
        if 8 + length + last > file_bytes:
            raise broken(f"tensor {name!r} ends at byte {8 + length + last}, the file has {file_bytes}: it is truncated")
        entries[name] = Entry(name, file, dtype, shape, 8 + length + first, size_bytes)
    ordered = sorted(entries.values(), key=lambda entry: (entry.start, entry.size_bytes))
    for before, after in itertools.pairwise(ordered):
        if before.start + before.size_bytes > after.start:
            raise broken(f"tensors {before.name!r} and {after.name!r} overlap")
    return entries, metadata or {}


def read_folder(folder: Path) -> dict[str, Entry]:
    """The entries of every weight file of a model folder: those its index names, else `model*.safetensors`, else all but adapters.

    Raises:
        UserError: there are no weight files, one is missing or broken, or the index can't be read.
    """
    index = folder / "model.safetensors.index.json"
    try:
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    except FileNotFoundError:
        named = sorted(folder.glob("model*.safetensors"))  # not Mistral's consolidated.safetensors beside them, the same weights under other names
        files = named or sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("adapter"))
    except OSError as error:
        raise UserError(f"reading {index}: {error.strerror}.") from None
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
        raise UserError(f"reading {index}: it is not a safetensors index (a JSON object with weight_map). Download the model again.") from None
    if not files:
        raise UserError(f"reading the model in {folder}: it has no .safetensors file.")
    entries: dict[str, Entry] = {}
    for file in files:
        entries |= read_header(file)[0]
    return entries


def open_to_read(file: Path) -> int:
    """A descriptor of a weight file, for `read_into` and `read_run`.

    Raises:
        UserError: it can't be opened.
    """
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise UserError(f"reading weights from {file}: {error.strerror}.") from None


def read_into(entry: Entry, buffer: memoryview) -> None:
    """Fill buffer (bytes, exactly the entry's size) from disk.

    Raises:
        UserError: the file can't be opened, ended early or could not be read.
    """
    opened = open_to_read(entry.file)
    try:
        read_run([(entry, buffer)], opened)
    finally:
        os.close(opened)


def read_run(run: Sequence[tuple[Entry, memoryview]], descriptor: int) -> None:
    """Fill the buffers of entries that follow each other in one file, in as few calls as the system allows.

    Raises:
        UserError: the file ended early or could not be read.
    """
    first, last = run[0][0], run[-1][0]
    try:
        end = first.start + transfer(read_at, descriptor, [buffer for _, buffer in run], first.start)
    except OSError as error:
        raise UserError(f"reading tensor {first.name!r} from {first.file}: {error.strerror}.") from None
    if end < last.start + last.size_bytes:
        short = next(entry for entry, _ in run if end < entry.start + entry.size_bytes)
        missing = short.start + short.size_bytes - end
        raise UserError(f"reading tensor {short.name!r} from {short.file}: the file ends {missing} bytes early.")


def transfer(call: Callable[[int, list[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read or write buffers one after the other at offset, with `call` (such as `read_at`) as often as it takes; the bytes moved until it moved none."""
    remaining, done = [buffer for buffer in buffers if buffer.nbytes], 0
    while remaining:
        batch, room = [], LARGEST_CALL_BYTES
        for buffer in remaining[:MOST_BUFFERS]:
            batch.append(buffer[:room])
            room -= batch[-1].nbytes
            if not room:
                break
        count = call(descriptor, batch, offset + done)
        if not count:
            break
        done += count
        while remaining and count >= remaining[0].nbytes:
            count -= remaining.pop(0).nbytes
        if count:
            remaining[0] = remaining[0][count:]
    return done


def read_at(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """Read into buffers at offset, moving no shared position where the system can; the bytes read, 0 at the file's end."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    os.lseek(descriptor, offset, os.SEEK_SET)  # Windows has no positioned read; one thread uses one descriptor
    data = os.read(descriptor, buffers[0].nbytes)
    buffers[0][: len(data)] = data
    return len(data)


def read_array(entry: Entry) -> np.ndarray:
    """The tensor as a NumPy array of its shape; bfloat16 as its bits in uint16."""
    array = np.empty(entry.shape, NUMPY_TYPES[entry.dtype])
    if entry.size_bytes:
        read_into(entry, memoryview(array.reshape(-1)).cast("B"))
    return array


def to_float32(array: np.ndarray, dtype: str) -> np.ndarray:
    """Floating-point numbers of any safetensors dtype as float32, exactly (but for float64)."""
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def from_float32(array: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 numbers rounded to nearest even in a safetensors dtype; bfloat16 as its bits in uint16."""
    if dtype != "BF16":
        return array.astype(NUMPY_TYPES[dtype])
    bits = np.asarray(array, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


class Writer:
    """Writes one safetensors file tensor by tensor, in the order declared; it appears under its name only when complete.

    Use as a context manager; leaving it by an exception removes what was written.
    """

    def __init__(self, file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None):
        self.file, self._tensors = file, dict(tensors)
        self._partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        for name, (dtype, shape) in self._tensors.items():
            size_bytes = math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_bytes]}
            offset += size_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.size_bytes = 8 + len(text) + offset
        self._remaining = list(self._tensors)
        self._stream = self._partial.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, array: np.ndarray) -> None:
        """Append one tensor; names come in the order declared, with the dtype and shape declared."""
        expected = self._remaining.pop(0)
        dtype, shape = self._tensors[name]
        if name != expected or array.shape != tuple(shape) or array.dtype != NUMPY_TYPES[dtype]:
            raise ValueError(f"wrote {name} {array.shape} {array.dtype} where {expected} {self._tensors[expected]} was declared")
        self._stream.write(memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B"))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            if kind is None and self._remaining:
                raise ValueError(f"never written: {self._remaining}")
            self._stream.flush()
            if kind is None:
                os.fsync(self._stream.fileno())
            self._stream.close()
            if kind is None:
                os.replace(self._partial, self.file)
        finally:
            with contextlib.suppress(OSError):  # closing a file on a full disk fails again
                self._stream.close()
            self._partial.unlink(missing_ok=True)
