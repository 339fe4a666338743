"""The run's file gives back what was put, takes no more room than it must, says so when there is none, and leaves nothing behind."""

import errno
import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, each_backend, mx, needs_mlx
from hypothesis import given
from hypothesis import strategies as st
from stored import random_array

from mesp_mlx import reference
from mesp_mlx.errors import RunStopped, UserError
from mesp_mlx.stream import run_file
from mesp_mlx.stream.run_file import ALIGNMENT_BYTES, InMemory, RunFile, fetch, take

DTYPES = {"numpy": ("F64", "F32", "F16", "I32", "I64", "BOOL", "U8", "U16", "U32"), "mlx": ("F32", "F16", "BF16", "I32", "BOOL", "U8", "U32")}
SHAPES = [(3, 5), (4,), (), (0,), (2, 0, 3), (2, 3, 4, 5)]
PAGE = ALIGNMENT_BYTES


def array(backend: Any, dtype: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Any bits at all as an array of the backend."""
    bits = random_array(dtype, shape, seed)
    if backend is reference:
        return np.array(bits)
    return mx.array(bits).view(mx.bfloat16) if dtype == "BF16" else mx.array(bits)


def bits(found: Any) -> tuple[Any, tuple[int, ...], bytes]:
    """An array's type, shape and bytes, by NumPy alone."""
    if isinstance(found, np.ndarray):
        return found.dtype, found.shape, found.tobytes()
    return found.dtype, found.shape, np.array(found.view(mx.uint16) if found.dtype == mx.bfloat16 else found).tobytes()


def flat(tree: Any) -> Any:
    """A tree with its arrays as what they are."""
    if isinstance(tree, dict):
        return {name: flat(branch) for name, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(flat(branch) for branch in tree)
    return None if tree is None else bits(tree)


@pytest.fixture
def file(tmp_path, request):
    """An empty file that holds NumPy's arrays."""
    made = RunFile(tmp_path, 0, reference)
    yield made
    made.close()


def block(pages: float) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(np.random.default_rng(0).bytes(int(pages * PAGE)), np.uint8)}


@each_backend
@pytest.mark.parametrize("bypass", [False, True])
def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path, backend, bypass):
    file, parked, want = RunFile(tmp_path, 1 << 20, backend, bypass), [], []
    for seed, dtype in enumerate(DTYPES[backend.arrays.name]):
        tree = {str(shape): array(backend, dtype, shape, seed) for shape in SHAPES}
        want.append(flat(tree))
        parked.append(file.put(tree))
    written = sum(sum(len(data) for *_, data in tree.values()) for tree in want)
    assert file.bytes_written == written and file.bytes_read == 0 and file.size_bytes == 1 << 20
    for _ in range(2):
        for index in reversed(range(len(parked))):
            assert flat(parked[index].get()) == want[index]
    assert file.bytes_read == 2 * written and file.bytes_written == written
    file.close()


@each_backend
def test_any_tree_comes_back(tmp_path, backend):
    make = lambda seed: array(backend, "F32", (seed + 1, 3), seed)  # noqa: E731
    trees = [{}, [], (), None, {"a": None}, make(0), [make(1), (make(2), {"b": make(3), "c": [None, {}]})], {"x": make(4), "y": {"z": (make(5),)}}]
    file = RunFile(tmp_path, 0, backend)
    parked = [file.put(tree) for tree in trees]
    assert [flat(one.get()) for one in parked] == [flat(tree) for tree in trees]
    assert file.put(parked[6]) is parked[6] and fetch(trees[6]) is trees[6] and flat(fetch(parked[6])) == flat(trees[6])
    assert InMemory().put(trees[6]) is trees[6]
    held: list[Any] = [parked.pop(), trees[6]]
    gone = weakref.ref(held[0])
    assert flat(take(held, 0)) == flat(trees[7]) and gone() is None and take(held, 1) is trees[6] and held == [None, None]
    file.close()


@each_backend
def test_arrays_whose_rows_do_not_follow_each_other(tmp_path, backend):
    file = RunFile(tmp_path, 0, backend)
    whole = array(backend, "F32", (6, 8))
    parts = {"turned": whole.T, "columns": whole[:, 2:5], "rows": whole[2:4], "every other": whole[::2], "one": whole[0, 0]}
    lazy = {"sum": whole[1:3] * 2}
    for tree in (parts, lazy):
        parked = file.put(tree)
        assert flat(parked.get()) == {name: bits(value) for name, value in ((n, +v if backend is reference else v * 1) for n, v in tree.items())}
    file.close()


@each_backend
def test_what_is_put_may_change_and_what_is_taken_is_anew(tmp_path, backend):
    """No array shares memory with what was put, or with another that came back."""
    file = RunFile(tmp_path, 0, backend)
    given = {"x": array(backend, "I32", (4, 4))}
    want = flat(given)
    parked = file.put(given)
    given["x"] += 1
    first = parked.get()
    first["x"] += 1
    assert flat(parked.get()) == want != flat(first)
    file.close()


@each_backend
def test_set_writes_in_place(tmp_path, backend):
    file = RunFile(tmp_path, 0, backend)
    before, parked, after = (file.put([array(backend, "F32", (5, 7), seed)]) for seed in range(3))
    kept, size = (flat(before.get()), flat(after.get())), file.used_bytes
    new = [array(backend, "F32", (5, 7), 9)]
    parked.set(new)
    assert flat(parked.get()) == flat(new) and (flat(before.get()), flat(after.get())) == kept and file.used_bytes == size == file.size_bytes
    for wrong in ([array(backend, "F32", (7, 5))], [array(backend, "I32", (5, 7))], [], [*new, *new]):
        with pytest.raises(ValueError):
            parked.set(wrong)
    assert flat(parked.get()) == flat(new), "nothing was written"
    file.close()


@needs_mlx
def test_no_copy_in_memory(tmp_path):
    """By MLX's own count: putting allocates nothing, getting allocates the arrays alone, and they are there at once."""
    file, size = RunFile(tmp_path, 0, BACKENDS[1]), 1 << 22
    tree = {"x": mx.zeros((size // 4,)), "y": mx.zeros((size // 2,), mx.bfloat16)}
    mx.eval(tree)
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    parked = file.put(tree)
    assert mx.get_peak_memory() <= base, "which counts from the first allocation on"
    found = parked.get()
    taken = mx.get_active_memory() - base
    assert 2 * size <= taken <= mx.get_peak_memory() - base <= 2 * size + PAGE
    del found
    assert mx.get_active_memory() == base
    file.close()


def test_a_place_is_free_again_when_its_tree_is_gone(file):
    gc.disable()
    try:
        a, b, c = (file.put(block(pages)) for pages in (1, 2, 0.5))
        assert (file.used_bytes, file.peak_bytes, file.size_bytes) == (4 * PAGE, 4 * PAGE, 4 * PAGE)
        del b
        assert file.used_bytes == 2 * PAGE
        d = file.put(block(1))  # at the front of b's place
        assert file.used_bytes == 3 * PAGE and file.size_bytes == 4 * PAGE
        del a, d
        e = file.put(block(3))  # a's, d's and the rest of b's
        assert file.size_bytes == 4 * PAGE == file.used_bytes
        assert (e.get()["x"] == block(3)["x"]).all() and (c.get()["x"] == block(0.5)["x"]).all()
        del c, e
        assert file.used_bytes == 0 and file.peak_bytes == 4 * PAGE
    finally:
        gc.enable()


def test_a_file_grows_by_what_its_end_lacks(file):
    a, b = file.put(block(2)), file.put(block(2))
    del b
    c = file.put(block(5))
    assert file.size_bytes == 7 * PAGE and (a.get()["x"] == block(2)["x"]).all() and (c.get()["x"] == block(5)["x"]).all()
    del a
    d = file.put(block(3))  # the hole at the front is too small
    assert file.size_bytes == 10 * PAGE == file.used_bytes + 2 * PAGE and d


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3 * PAGE), st.sampled_from(["put", "put", "set", "drop", "get"])), max_size=40))
def test_any_history(tmp_path_factory, history):
    """Regions never overlap, all that is put is there until it is dropped, and once all is dropped one region is left."""
    file, model = RunFile(tmp_path_factory.mktemp("any"), 2 * PAGE, reference), {}
    for number, (slot, size, what) in enumerate(history):
        new = np.full(size, number, np.uint8)
        if what == "put":
            model[slot] = file.put({"x": new}), new
        elif what == "drop":
            model.pop(slot, None)
        elif slot in model and what == "set":
            new = np.full_like(model[slot][1], number)
            model[slot][0].set({"x": new})
            model[slot] = model[slot][0], new
        assert all(np.array_equal(parked.get()["x"], want) for parked, want in model.values())
        assert file.used_bytes == sum(max(-(-want.size // PAGE), 1) * PAGE for _, want in model.values()) <= file.peak_bytes <= file.size_bytes
    model.clear()
    assert file.used_bytes == 0 and file._free == [(0, file.size_bytes)]
    file.close()


def test_no_region_is_lost_to_pieces(file):
    """Checkpoints put in order and taken in reverse, twice over, need no more than they are."""
    for _ in range(2):
        stack = [file.put(block(3)) for _ in range(8)]
        while stack:
            assert (stack.pop().get()["x"] == block(3)["x"]).all()
    assert file.size_bytes == file.peak_bytes == 24 * PAGE


@pytest.mark.skipif(sys.platform == "win32", reason="Windows shows the file until it is closed")
def test_the_file_has_no_name(tmp_path):
    file = RunFile(tmp_path, 1 << 20, reference)
    parked = file.put(block(1))
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file._file.fileno()).st_size == file.size_bytes == 1 << 20
    if sys.platform == "linux":
        assert os.fstat(file._file.fileno()).st_blocks * 512 >= 1 << 20, "all of it is reserved"
    descriptor = file._file.fileno()
    file.close()
    file.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)
    with pytest.raises(ValueError):
        parked.get()


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(1)", "os.kill(os.getpid(), 9)", "1 / 0"])
@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
def test_nothing_is_left_however_a_process_ends(tmp_path, end):
    code = f"""
import os, sys
from pathlib import Path
import numpy as np
from mesp_mlx import reference
from mesp_mlx.stream.run_file import RunFile
file = RunFile(Path({str(tmp_path)!r}), 1 << 16, reference)
parked = file.put([np.ones(1000)])
print("put", flush=True)
{end}
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "put\n" and list(tmp_path.iterdir()) == []
    if "exit" in end:
        assert done.stderr == "", "nor does it complain"


Usage = namedtuple("Usage", "total used free")


def full(monkeypatch, by: str) -> None:
    """A disk that has no room left, as the system says it."""
    if by == "disk_usage":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 5 * 10**5, 5 * 10**5))
        return

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, by, fails)


HOW = ["disk_usage", *(["posix_fallocate"] if hasattr(os, "posix_fallocate") else [])]


@pytest.mark.parametrize("by", HOW)
def test_no_room_is_said_before_the_first_step(tmp_path, monkeypatch, by):
    full(monkeypatch, by)
    with pytest.raises(UserError) as caught:
        RunFile(tmp_path, 3_000_000, reference)
    message = str(caught.value)
    assert message.startswith(f"the run's temporary file in {tmp_path} needs 3.0 MB: ") and "MB are free (No space left on device)" in message
    assert message.endswith("Free some there, or give the run more memory (--memory), so that less goes into the file.")
    if by == "disk_usage":
        assert " 0.5 MB are free" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", HOW)
def test_no_room_for_more_stops_the_run(tmp_path, monkeypatch, by):
    file = RunFile(tmp_path, PAGE, reference)
    parked = file.put(block(1))
    full(monkeypatch, by)
    with pytest.raises(RunStopped, match=r"needs 0.6 MB more: .* are free \(No space left on device\)"):
        file.put(block(150))
    assert (parked.get()["x"] == block(1)["x"]).all() and file.used_bytes == file.size_bytes == PAGE
    file.close()


def test_a_system_without_the_call_has_its_file_all_the_same(tmp_path, monkeypatch):
    """macOS has no posix_fallocate; some file systems refuse it."""

    def fails(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    for absent in (True, False):
        if absent:
            monkeypatch.delattr(os, "posix_fallocate", raising=False)
        else:
            monkeypatch.setattr(os, "posix_fallocate", fails, raising=False)
        file = RunFile(tmp_path, 3 * PAGE, reference)
        parked = file.put(block(4))
        assert os.fstat(file._file.fileno()).st_size == file.size_bytes == 7 * PAGE or file.size_bytes == 4 * PAGE
        assert (parked.get()["x"] == block(4)["x"]).all()
        file.close()


def test_a_folder_that_can_not_be_written_to(tmp_path):
    with pytest.raises(UserError, match=r"making the run's temporary file in .*absent: No such file or directory. Give a folder that can be written to."):
        RunFile(tmp_path / "absent", 0, reference)


@each_backend
def test_transfers_that_stop_half_way_go_on(tmp_path, backend, monkeypatch):
    """Also where the system has no positioned calls, as on Windows."""
    tree = {str(n): array(backend, "U8", (n,), n) for n in (1, 10, 1000, 0, 77)}
    for positioned in (True, False):
        if positioned:
            reads, writes = run_file.read_at, run_file._write_at
            monkeypatch.setattr(run_file, "read_at", lambda where, to, at, reads=reads: reads(where, [to[0][:7]], at))
            monkeypatch.setattr(run_file, "_write_at", lambda where, of, at, writes=writes: writes(where, [of[0][:7]], at))
        else:
            monkeypatch.undo()
            for name in ("preadv", "pwrite"):
                monkeypatch.delattr(os, name, raising=False)
        file = RunFile(tmp_path, 0, backend)
        first, second = file.put(tree), file.put(tree)
        assert flat(first.get()) == flat(second.get()) == flat(tree)
        file.close()


def test_large_trees_are_cut_for_the_system(tmp_path, monkeypatch):
    """No call takes more bytes or more buffers than systems allow."""
    from mesp_mlx.stream import safetensors

    monkeypatch.setattr(safetensors, "LARGEST_CALL_BYTES", 100)
    monkeypatch.setattr(safetensors, "MOST_BUFFERS", 3)
    calls, really = [], run_file.read_at
    monkeypatch.setattr(run_file, "read_at", lambda where, to, at: calls.append([part.nbytes for part in to]) or really(where, to, at))
    file = RunFile(tmp_path, 0, reference)
    tree = [array(reference, "U8", (n,), n) for n in (10, 10, 10, 10, 250, 30, 100)]
    assert flat(file.put(tree).get()) == flat(tree)
    assert sum(map(sum, calls)) == 420 and max(map(sum, calls)) == 100 and max(map(len, calls)) == 3
    file.close()


def test_a_disk_that_fails_stops_the_run(tmp_path, monkeypatch):
    file = RunFile(tmp_path, PAGE, reference)
    parked = file.put(block(1))

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(run_file, "read_at", fails)
        patch.setattr(run_file, "_write_at", fails)
        with pytest.raises(RunStopped, match="reading the run's temporary file in .*: Input/output error"):
            parked.get()
        with pytest.raises(RunStopped, match="writing the run's temporary file in .*: Input/output error"):
            parked.set(block(1))
        with pytest.raises(RunStopped, match="writing"):
            file.put(block(2))
    assert file.used_bytes == PAGE, "what could not be written takes no place"
    os.ftruncate(file._file.fileno(), 100)
    with pytest.raises(RunStopped, match=f"ends {PAGE - 100} bytes early"):
        parked.get()
    file.close()
