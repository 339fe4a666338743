"""A run's one temporary file: checkpoints, the arrays between two stages, gradients and moments, where the plan says so.

It is as large as the plan says before the first step, so that a full disk shows then, and it has no name: whatever ends the process, it is gone.
Nothing here is for more than one thread.
"""

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesp_mlx.errors import RunStopped, UserError
from mesp_mlx.stream.safetensors import read_at, transfer
from mesp_mlx.units import megabytes

ALIGNMENT_BYTES = 4096  # of a region: a page, and what macOS's uncached transfers want
SYNC_BYTES = 256_000_000  # written before the disk is waited for, where the page cache is bypassed
NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


class RunFile:
    """Regions of one unnamed file, each the place of a tree of arrays. The first that is large enough is taken; freed neighbours join.

    Args:
        folder: where the file lies; it must exist.
        size_bytes: what to reserve. It grows when more is put.
        backend: `mesp_mlx.ops` or `mesp_mlx.reference`, whose arrays are put.
        bypass_cache: keep the file out of the system's page cache where that can be asked for.

    Attributes:
        bytes_written, bytes_read: so far.
        used_bytes, peak_bytes: of the regions in use, now and at most.
        size_bytes: of the file.

    Raises:
        UserError: the folder can't be written to, or has no room.
    """

    def __init__(self, folder: Path, size_bytes: int, backend: Any, bypass_cache: bool = False):
        self.bytes_written = self.bytes_read = self.used_bytes = self.peak_bytes = self.size_bytes = 0
        self.buffers, self.evaluate = backend.buffers, backend.arrays.evaluate
        self._folder, self._bypass, self._dirty_bytes = folder, bypass_cache, 0
        self._free: list[tuple[int, int]] = []  # first byte and one past the last, in order, no two touching
        try:
            # It has no name; on Windows it is deleted as it is closed. The caller closes it.
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".mesp-mlx-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UserError(f"making the run's temporary file in {folder}: {error.strerror}. Give a folder that can be written to.") from None
        try:
            if bypass_cache:
                keep_out_of_cache(self._file.fileno())
            self._grow(_aligned(size_bytes))
        except OSError as error:
            self._file.close()
            hint = "Free some there, or give the run more memory (--memory), so that less goes into the file."
            raise UserError(f"{self._no_room(megabytes(size_bytes), error)} {hint}") from None

    def put(self, tree: Any) -> "Parked":
        """Write a tree's arrays: a nested dict, list or tuple of them; None stays None. A tree that is Parked already is returned as it is.

        Raises:
            RunStopped: the disk is full, or fails.
        """
        return tree if isinstance(tree, Parked) else Parked(self, tree)

    def close(self) -> None:
        """Give the file up, and all that is in it."""
        self._file.close()

    def reserve(self, size_bytes: int) -> tuple[int, int]:
        """A region of at least so many bytes, as (first, last); see `give_back`."""
        size = _aligned(max(size_bytes, 1))
        place = next((place for place, (first, last) in enumerate(self._free) if last - first >= size), None)
        if place is None:
            place = len(self._free) - 1 if self._free and self._free[-1][1] == self.size_bytes else len(self._free)
            at_end = sum(last - first for first, last in self._free[place:])
            try:
                self._grow(size - at_end)
            except OSError as error:
                raise RunStopped(f"{self._no_room(f'{megabytes(size - at_end)} more', error)} Free some there, and start again.") from None
        first, last = self._free.pop(place)
        if first + size < last:
            self._free.insert(place, (first + size, last))
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return first, first + size

    def give_back(self, region: tuple[int, int]) -> None:
        """Free a region."""
        self.used_bytes -= region[1] - region[0]
        self._release(region)

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset.

        Raises:
            RunStopped: the disk is full, or fails.
        """
        try:
            transfer(_write_at, self._file.fileno(), [data], offset)
            self._forget_written(data.nbytes)
        except OSError as error:
            raise RunStopped(f"writing the run's temporary file in {self._folder}: {error.strerror}.") from None
        self.bytes_written += data.nbytes

    def read(self, targets: list[memoryview], offset: int) -> None:
        """Fill buffers, one after the other, from an offset on.

        Raises:
            RunStopped: the disk fails.
        """
        wanted = sum(target.nbytes for target in targets)
        try:
            found = transfer(read_at, self._file.fileno(), targets, offset)
        except OSError as error:
            raise RunStopped(f"reading the run's temporary file in {self._folder}: {error.strerror}.") from None
        if found < wanted:
            raise RunStopped(f"reading the run's temporary file in {self._folder}: it ends {wanted - found} bytes early.")
        self.bytes_read += wanted
        if self._bypass:
            drop_from_cache(self._file.fileno(), offset, wanted)

    def _grow(self, more_bytes: int) -> None:
        """Reserve more at the end. Raises OSError where there is no room."""
        if more_bytes <= 0:
            return
        if shutil.disk_usage(self._folder).free < more_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        end = self.size_bytes + more_bytes
        try:
            os.posix_fallocate(self._file.fileno(), self.size_bytes, more_bytes)
        except (AttributeError, OSError) as error:  # macOS and Windows have no such call, some file systems do not take it
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise
            self._file.truncate(end)
        self._release((self.size_bytes, end))
        self.size_bytes = end

    def _release(self, region: tuple[int, int]) -> None:
        first, last = region
        place = sum(start < first for start, _ in self._free)
        if place < len(self._free) and self._free[place][0] == last:
            last = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == first:
            place -= 1
            first = self._free.pop(place)[0]
        self._free.insert(place, (first, last))

    def _no_room(self, wanted: str, error: OSError) -> str:
        found = error.strerror
        with contextlib.suppress(OSError):
            found = f"{megabytes(shutil.disk_usage(self._folder).free)} are free ({error.strerror})"
        return f"the run's temporary file in {self._folder} needs {wanted}: {found}."

    def _forget_written(self, size_bytes: int) -> None:
        """Linux drops no page that still waits to be written: so all of them are written now and then, and dropped together."""
        self._dirty_bytes += size_bytes
        if self._bypass and self._dirty_bytes >= SYNC_BYTES and hasattr(os, "posix_fadvise"):
            os.fdatasync(self._file.fileno())
            drop_from_cache(self._file.fileno(), 0, 0)  # to the end
            self._dirty_bytes = 0


class Parked:
    """A tree of arrays whose bytes are in the run's file; the place is free again when this is gone."""

    def __init__(self, file: RunFile, tree: Any):
        self._file, arrays = file, _leaves(tree)
        self.size_bytes = sum(array.nbytes for array in arrays)
        counter = iter(range(len(arrays)))
        self._tree = _map(tree, lambda _: next(counter))
        self._arrays: list[tuple[str, tuple[int, ...]]] = []
        self._region = file.reserve(self.size_bytes)
        offset = self._region[0]
        for array in arrays:
            data, dtype, shape = file.buffers.view(array)
            self._arrays.append((dtype, shape))
            file.write(data, offset)
            offset += data.nbytes

    def get(self) -> Any:
        """The tree, its arrays made anew.

        Raises:
            RunStopped: the disk fails.
        """
        buffers, arrays, targets = self._file.buffers, [], []
        for dtype, shape in self._arrays:
            array, target = buffers.allocate(shape, dtype)
            arrays.append(array)
            targets.append(target[: array.nbytes])
        self._file.read(targets, self._region[0])
        finished = [buffers.finish(array, dtype, widen=False) for array, (dtype, _) in zip(arrays, self._arrays, strict=True)]
        return _map(self._tree, self._file.evaluate(finished).__getitem__)

    def set(self, tree: Any) -> None:
        """Write arrays of the same shapes and types over those that are there, one at a time.

        Raises:
            ValueError: they are not the same.
            RunStopped: the disk fails.
        """
        offset = self._region[0]
        for array, expected in zip(_leaves(tree), self._arrays, strict=True):
            data, *found = self._file.buffers.view(array)
            if tuple(found) != expected:
                raise ValueError(f"an array {found} was written where there is {expected}")
            self._file.write(data, offset)
            offset += data.nbytes

    def __del__(self) -> None:
        if region := getattr(self, "_region", None):
            self._file.give_back(region)


class InMemory:
    """What stands in for a RunFile where trees stay in memory."""

    bytes_written = bytes_read = peak_bytes = 0

    def put(self, tree: Any) -> Any:
        """The tree itself."""
        return tree


def fetch(tree: Any) -> Any:
    """A tree that may be Parked, in memory."""
    return tree.get() if isinstance(tree, Parked) else tree


def take(trees: list[Any], index: int) -> Any:
    """A tree of a list, fetched; the list lets go of it."""
    tree, trees[index] = trees[index], None
    return fetch(tree)


def drop_from_cache(descriptor: int, offset: int, size_bytes: int) -> None:
    """Let the system forget a range of a file that it keeps in memory, where it can be asked to (Linux)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)


def in_memory(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether a folder's files lie in memory, as those of a tmpfs do: known on Linux, elsewhere taken to be false."""
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()]
    except OSError:
        return False
    at, found = folder.resolve(), {Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), place)): kind for _, place, kind, *_ in lines}
    return next((found[place] for place in (at, *at.parents) if place in found), "") in ("tmpfs", "ramfs")


def keep_out_of_cache(descriptor: int) -> None:
    """Transfer a file's bytes without keeping them in memory, where that can be asked for (macOS)."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _write_at(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, buffers[0], offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.write(descriptor, buffers[0])


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with each of its leaves changed, in order."""
    if isinstance(tree, dict):
        return {name: _map(branch, change) for name, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map(branch, change) for branch in tree)
    return None if tree is None else change(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _map(tree, found.append)
    return found
