"""What stays in memory, what is read ahead and how: never what a stage is given."""

import gc
import itertools
import os
import sys
import threading
import weakref
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, each_backend, numbers
from engines import RecordingStore
from hypothesis import given
from hypothesis import strategies as st
from stored import MODULES, ROWS, SPEC, Piece, assert_same, on_disk, size_bytes, write, write_modules

from mesp_mlx import reference
from mesp_mlx.errors import UserError
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import ALL_STAGES, Store

LAYERS = 3
STAGES = [Piece(f"{half}{layer}", (f"{half}{layer}",)) for layer in range(LAYERS) for half in "am"] + [Piece("head", ("head",))]
LAYER = [STAGES[2 * layer : 2 * layer + 2] for layer in range(LAYERS)]
UPDATE = [(stage, False) for stage in STAGES] + [
    opening for attention, mlp in reversed(LAYER) for opening in ((attention, True), (mlp, False), (attention, False))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights of the stages of three layers and a head: each filled with its own number, of its own size."""
    folder = tmp_path_factory.mktemp("model")
    write(folder / "model.safetensors", {f"{stage.name}.weight": np.full((8 + i, 16), i, np.float32) for i, stage in enumerate(STAGES)})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_modules(tmp_path_factory.mktemp("modules"))


def update(store: RecordingStore, openings: Any = UPDATE) -> list[str]:
    """Open stages in the order expected, check what each is given, and return what happened."""
    store.events.clear()
    store.expect([stage for stage, _ in openings])
    for stage, again in openings:
        with store.open(stage, again) as w:
            store.events.append(f"in {stage.name}")
            assert (numbers(w[stage.name]["weight"]) == STAGES.index(stage)).all()
    return list(store.events)


@each_backend
def test_nothing_is_read_ahead_at_depth_0(model, backend):
    """And with nothing held the attention is read a third time."""
    with RecordingStore(read_folder(model), SPEC, backend, prefetch=0, hold=False) as store:
        openings = [(STAGES[0], True), (STAGES[1], False), (STAGES[0], False)]
        assert update(store, openings) == ["load a0", "in a0", "free a0", "load m0", "in m0", "free m0", "load a0", "in a0", "free a0"]


@each_backend
def test_two_are_read_ahead_at_depth_2(model, backend):
    """At the turn, and around a stage that is held."""
    with RecordingStore(read_folder(model), SPEC, backend, prefetch=2) as store:
        events = update(store)
        assert events[:8] == ["load a0", "load m0", "load a1", "in a0", "free a0", "load m1", "in m0", "free m0"]
        assert events[events.index("load m2") :] == [
            "load m2", "in m1", "free m1",
            "load head", "in a2", "free a2",
            "load a2", "in m2", "free m2",
            "load m2", "in head", "free head",
            "load a1", "in a2",
            "load m1", "in m2", "free m2",
            "in a2", "free a2",
            "load a0", "in a1",
            "load m0", "in m1", "free m1",
            "in a1", "free a1",
            "in a0", "in m0", "free m0", "in a0", "free a0",
        ]  # fmt: skip


@each_backend
def test_a_held_stage_s_weights_are_the_same_and_go_once_it_is_opened_again(model, backend):
    with Store(read_folder(model), SPEC, backend) as store:
        with store.open(STAGES[0], again=True) as w:
            held = w["a0"]["weight"]
        with store.open(STAGES[1]), store.open(STAGES[0]) as w:
            assert w["a0"]["weight"] is held and store.loads == {"a0": 1, "m0": 1}
        with pytest.raises(KeyError):
            w["a0"]
        with store.open(STAGES[0]) as w:
            assert store.loads["a0"] == 2 and w["a0"]["weight"] is not held


def test_what_is_held_goes_with_an_error_a_new_order_or_the_store(model):
    gc.disable()
    try:
        store = Store(read_folder(model), SPEC, reference)
        for end in ("error", "expect", "close"):
            with pytest.raises(ZeroDivisionError) if end == "error" else store.open(STAGES[1]):
                with store.open(STAGES[0], again=True) as w:
                    held = weakref.ref(w["a0"]["weight"])
                    del w
                    _ = 1 / (end != "error")
                assert held() is not None
            if end == "expect":
                store.expect([])
            if end == "close":
                store.close()
            assert held() is None, end
    finally:
        gc.enable()


@given(resident=st.sets(st.sampled_from([stage.name for stage in STAGES])), prefetch=st.integers(0, 5), hold=st.booleans())
def test_every_residency_and_every_depth(model, resident, prefetch, hold):
    """Each stage is read as often as the choice says and not once in vain, at most so many ahead; in a second update residents are there."""
    entries = read_folder(model)
    for backend in BACKENDS:
        with RecordingStore(entries, SPEC, backend, resident, prefetch, hold) as store:
            for number in (1, 2):
                read = store.bytes_read
                events = update(store)
                want = Counter(stage.name for stage, _ in UPDATE)
                for attention, _ in LAYER:
                    want[attention.name] -= hold
                want = {name: 1 if number == 1 else 0 for name in resident} | {name: count for name, count in want.items() if name not in resident}
                loads = Counter(event[5:] for event in events if event.startswith("load "))
                assert loads == Counter(want)
                assert store.bytes_read - read == sum(entries[f"{name}.weight"].size_bytes * count for name, count in want.items())
                waiting = most = 0
                for event in events:
                    waiting += event.startswith("load ")
                    if event.startswith("in ") and loads[event[3:]]:
                        loads[event[3:]] -= 1
                        waiting -= 1
                    most = max(most, waiting - (event.startswith("load ") and prefetch == 0))
                assert most <= prefetch + (prefetch > 0), "the one that is about to be opened, and those ahead"
        assert not store._ahead and not store._stay and not store._held


@given(st.lists(st.sampled_from(STAGES), max_size=12), st.integers(0, 4), st.data())
def test_any_order(model, stages, prefetch, data):
    """Whatever is expected, and whatever comes instead, a stage gets its own weights; in the order expected each is read once for each opening."""
    expected = data.draw(st.one_of(st.just(stages), st.lists(st.sampled_from(STAGES), max_size=12)))
    for backend in BACKENDS:
        with Store(read_folder(model), SPEC, backend, prefetch=prefetch) as store:
            store.expect(expected)
            for stage in stages:
                with store.open(stage) as w:
                    assert (numbers(w[stage.name]["weight"]) == STAGES.index(stage)).all()
            if expected == stages:
                assert store.loads == Counter(stage.name for stage in stages)


@each_backend
def test_the_most_that_is_alive(model, backend):
    """By weak references: what is open, what is held, what is ahead, and nothing else, whatever the depth."""
    for prefetch in (0, 1, 2):
        seen: list[Any] = []

        def alive(seen: list[Any] = seen) -> int:
            return len({id(array) for ref in seen if (array := ref()) is not None})

        class Watching(RecordingStore):
            def start(self, wanted: Any) -> Any:
                loading = super().start(wanted)
                seen.extend(weakref.ref(array) for parameters in loading.buffers.values() for array, _ in parameters.values())  # noqa: B023
                return loading

            def wait(self, loading: Any) -> Any:
                modules = super().wait(loading)
                seen.extend(weakref.ref(array) for module in modules.values() for array in module.values())  # noqa: B023
                return modules

        gc.disable()
        try:
            with Watching(read_folder(model), SPEC, backend, prefetch=prefetch) as store:
                store.expect([stage for stage, _ in UPDATE])
                held: set[str] = set()
                for i, (stage, again) in enumerate(UPDATE):
                    with store.open(stage, again):
                        held = held | {stage.name} if again else held - {stage.name}
                        left = [later for later, _ in UPDATE[i + 1 :] if later.name not in held]
                        want = len(held | {stage.name}) + min(prefetch, len(left))
                        assert alive() == want, (prefetch, i)
            assert alive() == 0
        finally:
            gc.enable()


@each_backend
def test_a_resident_head_s_table_is_read_once_whole(folder, backend):
    """Tiles and rows are then cut from memory, as it is packed; before the first tile, rows are read."""
    head, rows = Piece("head", ("norm",)), np.array([0, 3, 4, 36])
    with Store(read_folder(folder), SPEC, backend, resident={"head"}) as store:
        for sweep in (1, 2):
            with store.open(head) as w:
                if sweep == 1:
                    assert_same(w.take("four", rows), folder, "four", rows)
                    read = size_bytes(folder, "norm") + size_bytes(folder, "four") * len(rows) // ROWS
                    assert store.bytes_read == read
                for size in (10, 37, 64):
                    firsts = []
                    for first, tile in w.tiles("four", size):
                        firsts.append(first)
                        assert_same(tile, folder, "four", slice(first, first + size))
                    assert firsts == list(range(0, ROWS, size))
                assert_same(w.take("four", rows), folder, "four", rows)
                assert store.bytes_read == read + size_bytes(folder, "four") and store.loads == {"norm": 1, "four": 1}
        store.drop_resident()
        with store.open(head) as w:
            for first, tile in w.tiles("four", 10):
                assert_same(tile, folder, "four", slice(first, first + 10))
        assert store.bytes_read == read + 2 * size_bytes(folder, "four") + size_bytes(folder, "norm") and store.loads == {"norm": 2, "four": 1}


@pytest.mark.parametrize("resident", [ALL_STAGES, {"a0", "m0"}], ids=["all", "some"])
def test_residents_that_are_dropped_are_gone(model, resident):
    gc.disable()
    try:
        with Store(read_folder(model), SPEC, reference, resident, prefetch=0) as store:
            refs = []
            for stage in STAGES[:2]:
                with store.open(stage) as w:
                    refs.append(weakref.ref(w[stage.name]["weight"]))
            with store.open(STAGES[0]) as w:
                store.drop_resident()
                assert refs[0]() is w["a0"]["weight"] and refs[1]() is None, "what is open stays open"
            assert refs[0]() is None
            for _ in range(2):
                with store.open(STAGES[0]) as w:
                    assert not w["a0"]["weight"].any()
            assert store.loads == {"a0": 3, "m0": 1}
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system reads one buffer at a time")
@each_backend
def test_neighbours_are_one_read_and_each_byte_is_read_once(folder, backend, monkeypatch):
    calls, really = [], os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append((descriptor, offset, sum(buffer.nbytes for buffer in buffers)))
        return really(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    entries = read_folder(folder)
    with Store(entries, SPEC, backend) as store:
        with store.open(Piece("all", MODULES[::-1])) as w:
            for module in MODULES:
                assert_same(w[module], folder, module)
        calls = calls[: len({entry.file for entry in entries.values()})]  # what follows is this test's own reading
        assert sum(size for *_, size in calls) == store.bytes_read == size_bytes(folder, *MODULES), "one call a file: the tensors of each touch"
        starts = {file: min(entry.start for entry in entries.values() if entry.file == file) for file in {entry.file for entry in entries.values()}}
        assert sorted(offset for _, offset, _ in calls) == sorted(starts.values())
    calls.clear()
    monkeypatch.setattr(os, "preadv", preadv)
    with Store(entries, SPEC, backend) as store, store.open(Piece("two", ("half", "one"))) as w:
        half, one = w["half"]["weight"], w["one"]["weight"]
        parts = [entries[name] for name in ("half.weight", "half.bias", "one.weight")]
        gaps = sum(a.file == b.file and a.start + a.size_bytes == b.start for a in parts for b in parts)
        assert len(calls) == len(parts) - gaps and sum(size for *_, size in calls) == store.bytes_read
    assert (numbers(half) == on_disk(folder, "half")["weight"]).all() and (numbers(one) == on_disk(folder, "one")["weight"]).all()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system can't be asked")
@pytest.mark.parametrize("bypass", [False, True])
def test_what_was_read_is_dropped_from_the_page_cache_if_it_is_to_be_bypassed(folder, bypass, monkeypatch):
    dropped: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, size, advice: dropped.append((start, size, advice)))
    entries = read_folder(folder)
    with Store(entries, SPEC, reference, bypass_cache=bypass) as store:
        with store.open(Piece("all", MODULES)) as w:
            for _, tile in w.tiles("four", 10):
                assert tile
        assert sum(size for _, size, _ in dropped) == (store.bytes_read if bypass else 0)
    assert {advice for *_, advice in dropped} == ({os.POSIX_FADV_DONTNEED} if bypass else set())


@each_backend
def test_the_reader_s_error_and_its_end(tmp_path, backend):
    """At every depth: raised where the stage that it hit is opened, and not before; the thread is gone with the store."""
    threads = threading.active_count()
    for prefetch in (0, 1, 3):
        folder = tmp_path / str(prefetch)
        folder.mkdir()
        write(folder / "model.safetensors", {f"{stage.name}.weight": np.full((8, 64), i, np.float32) for i, stage in enumerate(STAGES)})
        entries = read_folder(folder)
        os.truncate(folder / "model.safetensors", entries["m1.weight"].start + 100)
        opened = []
        with pytest.raises(UserError, match=r"reading tensor 'm1.weight' .* ends 1948 bytes early"), Store(entries, SPEC, backend, prefetch=prefetch) as store:
            store.expect(STAGES)
            for stage in STAGES:
                with store.open(stage):
                    opened.append(stage.name)
        assert opened == ["a0", "m0", "a1"] and threading.active_count() == threads


def test_the_time_of_reading_is_counted(folder, monkeypatch):
    """Of the reader's reads alone, and of waiting for them. Each thread has a clock that ticks once when it is read."""
    clocks = defaultdict(itertools.count)
    monkeypatch.setattr("mesp_mlx.stream.store.time", type("Clock", (), {"perf_counter": lambda: next(clocks[threading.get_ident()])}))
    with Store(read_folder(folder), SPEC, reference) as store:
        assert store.read_seconds == store.waited_seconds == 0
        with store.open(Piece("all", MODULES)) as w:
            assert store.read_seconds == store.waited_seconds == 1
            w.take("four", np.array([3]))
            assert store.read_seconds == store.waited_seconds == 2


@pytest.mark.skipif(sys.platform != "darwin", reason="macOS's own flag")
def test_macos_takes_the_flag(folder):
    with Store(read_folder(folder), SPEC, reference, bypass_cache=True) as store, store.open(Piece("all", MODULES)) as w:
        for module in MODULES:
            assert_same(w[module], folder, module)
