"""The store reads one stage ahead, hands out nothing unfinished, and keeps nothing."""

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from backends import BACKENDS, each_backend, mx, needs_mlx, numbers
from engines import Gathered, RecordingStore, random_adapter, random_group
from models import make_model, tiny_config
from stored import SPEC, Piece, assert_same, size_bytes, write, write_modules

from mesp_mlx import reference
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch
from mesp_mlx.stream import store as stores
from mesp_mlx.stream.safetensors import from_float32, read_array, read_folder, to_float32
from mesp_mlx.stream.store import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_modules(tmp_path_factory.mktemp("modules"))


A, B, C = Piece("a", ("plain", "norm")), Piece("b", ("half",)), Piece("c", ("four", "brain"))


def opened(store, stage, folder, during=()):
    """Open a stage and check all of it."""
    with store.open(stage) as w:
        store.events.append(f"in {stage.name}")
        for module in stage.modules:
            assert_same(w[module], folder, module)
        for inner in during:
            opened(store, inner, folder)


@each_backend
def test_one_stage_is_read_ahead(folder, backend):
    with RecordingStore(read_folder(folder), SPEC, backend) as store:
        store.expect([A, B, C, A])
        opened(store, A, folder)
        opened(store, B, folder, during=[C])
        opened(store, A, folder)
    assert store.events == [
        "load a", "load b", "in a", "free a",
        "load c", "in b", "load a", "in c", "free c", "free b",
        "in a", "free a",
    ]  # fmt: skip
    assert store.loads == {"plain": 2, "norm": 2, "half": 1, "four": 1, "brain": 1}


@each_backend
def test_an_unexpected_stage_gets_its_own_weights(folder, backend):
    """What was read ahead for another is dropped; the order given still holds afterwards."""
    with RecordingStore(read_folder(folder), SPEC, backend) as store:
        opened(store, C, folder)  # nothing was expected
        store.expect([A, B, A])
        opened(store, A, folder)
        opened(store, C, folder)  # while b is ready
        opened(store, B, folder)
        store.expect([C, B])  # while a is ready
        opened(store, C, folder)
        opened(store, B, folder)
        opened(store, B, folder)
    assert store.events == [
        "load c", "in c", "free c",
        "load a", "load b", "in a", "free a",
        "load c", "load b", "in c", "free c",
        "load a", "in b", "free b",
        "load c", "load b", "in c", "free c",
        "in b", "free b",
        "load b", "in b", "free b",
    ]  # fmt: skip


def test_an_error_inside_the_block_closes_the_stage(folder):
    with RecordingStore(read_folder(folder), SPEC, reference) as store:
        store.expect([A, B])
        with pytest.raises(KeyboardInterrupt), store.open(A) as w:
            raise KeyboardInterrupt
        with pytest.raises(KeyError):
            w["plain"]
        assert store.events == ["load a", "load b", "free a"]


def test_reading_overlaps_the_stage_before(folder, monkeypatch):
    """B is on its way while A is open, and not before."""
    read, really = threading.Event(), stores.read_run

    def reading(run, *rest):
        really(run, *rest)
        if run[0][0].name.startswith("half"):
            read.set()

    monkeypatch.setattr(stores, "read_run", reading)
    with Store(read_folder(folder), SPEC, reference) as store:
        store.expect([A, B])
        assert not read.wait(0.05)
        with store.open(A):
            assert read.wait(10)


@each_backend
def test_a_stage_waits_for_a_slow_disk(folder, backend, monkeypatch):
    """Arrays are never handed out before the last of their bytes is there."""
    really = stores.read_run

    def slowly(*arguments):
        time.sleep(0.01)
        really(*arguments)

    monkeypatch.setattr(stores, "read_run", slowly)
    with RecordingStore(read_folder(folder), SPEC, backend) as store:
        store.expect([A, C, B])
        for stage in (A, C, B):
            opened(store, stage, folder)
        with store.open(Piece("head")) as w:
            for first, tile in w.tiles("four", 10):
                assert_same(tile, folder, "four", slice(first, first + 10))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """400 stages of two tensors, of eight sizes and two dtypes that keep coming back: freed buffers are soon used again."""
    folder, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(1)
    arrays = {}
    for i in range(400):
        shape = (int(rng.integers(1, 5)) * 16, int(rng.integers(1, 3)) * 32)
        for module, dtype in ((f"m{i}", "F32"), (f"n{i}", "BF16")):
            arrays[f"{module}.weight"] = from_float32(rng.integers(-128, 128, shape).astype(np.float32), dtype)
    write(folder / "model.safetensors", arrays, {name: "BF16" for name in arrays if name.startswith("n")})
    return folder


@each_backend
def test_four_hundred_stages_on_each_other_s_heels(many, backend):
    """Values used at once, and values computed only after their stage and a few after it are closed: no buffer is written while it is needed."""
    entries = read_folder(many)
    stages = [Piece(str(i), (f"m{i}", f"n{i}")) for i in range(400)]
    place = np.arange(1, 129, dtype=np.float32)[:, None]
    want = []
    for stage in stages:
        m, n = (to_float32(read_array(entry), entry.dtype) for entry in (entries[f"{module}.weight"] for module in stage.modules))
        want.append((m, m * place[: len(m)] + n))
    late: list[Any] = []
    with Store(entries, SPEC, backend) as store:
        store.expect(stages)
        for i, stage in enumerate(stages):
            with store.open(stage) as w:
                m, n = (w[module]["weight"] for module in stage.modules)
                assert np.array_equal(numbers(m), want[i][0])
                late.append(m * backend.arrays.asarray(place[: m.shape[0]]) + n)
                del m, n
            if len(late) == 3 or stage is stages[-1]:
                for k, computed in enumerate(late, i + 1 - len(late)):
                    assert np.array_equal(numbers(computed), want[k][1]), k
                late.clear()


@each_backend
def test_a_closed_stage_holds_nothing(folder, backend):
    """Neither a stage, nor what was read ahead for a stage that did not come, nor a tile."""
    seen: list[Any] = []

    def alive() -> int:
        return len({id(array) for ref in seen if (array := ref()) is not None})

    class Watching(Store):
        def start(self, wanted: Any) -> Any:
            loading = super().start(wanted)
            seen.extend(weakref.ref(array) for parameters in loading.buffers.values() for array, _ in parameters.values())
            return loading

        def wait(self, loading: Any) -> Any:
            modules = super().wait(loading)
            seen.extend(weakref.ref(value) for module in modules.values() for value in module.values() if not isinstance(value, int))
            return modules

    gc.disable()  # what goes must go by itself
    try:
        with Watching(read_folder(folder), SPEC, backend) as store:
            store.expect([A, B])
            with store.open(A):
                assert alive() == 2 + 2, "a, and b ahead"
            assert alive() == 2
            with store.open(C):
                assert alive() == 5 + 2, "c, and b read again: the first b is gone"
            store.expect([])
            with store.open(B) as w:
                assert alive() == 2
                for _, tile in w.tiles("four", 10):
                    assert alive() - 2 in (4, 8), "the tile, and the next one"
                    del tile
            assert alive() == 0
    finally:
        gc.enable()


ROUNDING = 2048  # of all allocations together; less than any stage's bytes


@pytest.fixture
def no_cache():
    """MLX takes no freed buffer again, which might be larger than what is asked for."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@needs_mlx
def test_memory_returns_to_where_it_was(folder, no_cache):
    """By MLX's own count: with the stages closed, with one read ahead in vain and another opened, with the store closed early."""
    entries, sizes = read_folder(folder), {stage: size_bytes(folder, *stage.modules) for stage in (A, B, C)}
    mx.synchronize()
    base = mx.get_active_memory()

    def more() -> int:
        return mx.get_active_memory() - base

    store = Store(entries, SPEC, BACKENDS[1])
    store.expect([A, B])
    with store.open(A) as w:
        total = mx.sum(w["plain"]["weight"])
        mx.eval(total)
        assert sizes[A] + sizes[B] <= more() < sizes[A] + sizes[B] + ROUNDING, "this stage and the next"
    del w, total
    assert sizes[B] <= more() < sizes[B] + ROUNDING
    with store.open(C):  # whose place b had; b is read again
        assert sizes[C] + sizes[B] <= more() < sizes[C] + sizes[B] + ROUNDING
    store.close()
    assert more() == 0, "what was read ahead goes with the store"
    store = Store(entries, SPEC, BACKENDS[1])
    store.expect([A, B])
    with store.open(A), store.open(B):
        pass
    assert more() == 0
    store.close()


class Counting(Store):
    """Which stages' weights are alive: from the start of their load until the last of their arrays is gone."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.alive: list[str] = []
        self.most: list[str] = []

    def load(self, stage: Any) -> Any:
        loading: Any = super().load(stage)
        if stage.modules:
            self.alive.append(stage.name)
            self.most = max(self.most, list(self.alive), key=len)
            loading.stage = stage.name
        return loading

    def wait(self, loading: Any) -> Any:
        modules = super().wait(loading)
        arrays = [value for module in modules.values() for value in module.values() if not isinstance(value, int)]
        if name := getattr(loading, "stage", None):
            left = [len(arrays)]

            def gone() -> None:
                left[0] -= 1
                if not left[0]:
                    self.alive.remove(name)

            for array in arrays:
                weakref.finalize(array, gone)
        return modules


@each_backend
def test_at_most_three_stages_are_in_memory(tmp_path, backend):
    """In backward: the attention that waits, the MLP above it, and the one read ahead. Depth changes nothing."""
    for layers in (2, 5):
        folder = make_model(tmp_path / str(layers), tiny_config("qwen2", num_hidden_layers=layers), dtype="bfloat16")
        spec = load_spec(read_config(folder))
        model, adapter = build(spec, backend, 2.0), {name: backend.arrays.asarray(value) for name, value in random_adapter(folder).items()}
        gc.disable()
        try:
            with Counting(read_folder(folder), spec, backend) as store:
                loss_and_gradients(model, store, adapter, [Batch(random_group(160, [9, 5]))], Gathered())
                assert store.alive == []
                assert len(store.most) == 3 and store.most[0].endswith("self_attn") and store.most[1].endswith("mlp")
        finally:
            gc.enable()
