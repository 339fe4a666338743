"""The store hands out what is on disk, as a whole, by rows and in tiles, and says why when it can't."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
from backends import BACKENDS, each_backend, mx, needs_mlx, numbers
from hypothesis import given
from hypothesis import strategies as st
from stored import MODULES, ROWS, SETTINGS, SPEC, Piece, assert_same, on_disk, size_bytes, write, write_modules

from mesp_mlx import reference
from mesp_mlx.errors import UserError
from mesp_mlx.reference.quantized import dequantize
from mesp_mlx.stream import store as stores
from mesp_mlx.stream.safetensors import NUMPY_TYPES, from_float32, read_folder
from mesp_mlx.stream.store import ALL_STAGES, Store

TABLES = MODULES[1:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_modules(tmp_path_factory.mktemp("modules"))


@each_backend
def test_a_stage_is_what_is_on_disk(folder, backend):
    stage = Piece("all", MODULES)
    with Store(read_folder(folder), SPEC, backend) as store, store.open(stage) as w:
        for module in MODULES:
            assert_same(w[module], folder, module)
        with pytest.raises(KeyError):
            w["another"]
        assert store.loads == dict.fromkeys(MODULES, 1)
        assert store.bytes_read == sum(file.size_bytes for file in read_folder(folder).values())


@each_backend
def test_a_module_is_all_that_stands_in_it(tmp_path, backend):
    """Whatever it is called; what stands in modules inside it is theirs. A single number has no rows to take."""
    arrays = {name: np.arange(6, dtype=np.float32).reshape(3, 2) for name in ("a.weight", "a.A_log", "a.b.weight")} | {"a.one": np.array(7, np.float32)}
    write(tmp_path / "model.safetensors", arrays)
    with Store(read_folder(tmp_path), SPEC, backend) as store, store.open(Piece("s", ("a",))) as w:
        assert w["a"].keys() == {"weight", "A_log", "one"} and numbers(w["a"]["one"]) == 7
        taken = w.take("a", np.array([0, 2]))
        assert numbers(taken["A_log"]).tolist() == [[0, 1], [4, 5]] and numbers(taken["one"]) == 7


@each_backend
def test_a_quantised_module_is_one_the_ops_take(folder, backend):
    with Store(read_folder(folder), SPEC, backend) as store, store.open(Piece("s", ("four", "eight"))) as w:
        for module in ("four", "eight"):
            bits, group = SETTINGS[module]
            want = dequantize({**on_disk(folder, module), "bits": bits, "group_size": group}, np.float32)
            np.testing.assert_allclose(numbers(backend.quantized.dequantize(w[module], backend.arrays.float32)), want, rtol=1e-6, atol=1e-6)


@needs_mlx
def test_mlx_keeps_the_dtype_on_disk(folder):
    with Store(read_folder(folder), SPEC, BACKENDS[1]) as store, store.open(Piece("all", MODULES)) as w:
        kind = {module: {part: array.dtype for part, array in w[module].items() if isinstance(array, mx.array)} for module in MODULES}
    assert {part for kinds in kind.values() for part in kinds} == {"weight", "scales", "biases", "bias"}
    assert [kind[module]["weight"] for module in MODULES] == [mx.float32, mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint32, mx.bfloat16]
    assert [kind["four"][part] for part in ("scales", "biases", "bias")] == [mx.bfloat16, mx.bfloat16, mx.float32]


@each_backend
@pytest.mark.parametrize("module", TABLES)
def test_chosen_rows_are_those_on_disk(folder, backend, module):
    rows = np.array([0]) if module == "one" else np.array([0, 1, 2, 5, 7, 8, 20, 36])
    with Store(read_folder(folder), SPEC, backend) as store, store.open(Piece("embedding")) as w:
        assert store.rows(module) == (1 if module == "one" else ROWS)
        taken = w.take(module, rows)
        assert_same(taken, folder, module, rows)
        assert store.bytes_read * store.rows(module) == size_bytes(folder, module) * len(rows), "no row but those"
        assert not store.loads


@given(st.sets(st.integers(0, ROWS - 1), min_size=1))
def test_any_rows(folder, rows):
    rows = np.array(sorted(rows))
    for backend in BACKENDS:
        with Store(read_folder(folder), SPEC, backend) as store, store.open(Piece("embedding")) as w:
            assert_same(w.take("four", rows), folder, "four", rows)


def test_neighbouring_rows_are_one_read(folder, monkeypatch):
    reads, really = [], stores.read_run
    monkeypatch.setattr(stores, "read_run", lambda run, *rest: reads.append([(part.name, part.shape[0]) for part, _ in run]) or really(run, *rest))
    with Store(read_folder(folder), SPEC, reference) as store, store.open(Piece("embedding")) as w:
        w.take("half", np.array([3, 4, 5, 9, 11, 12]))
    assert sorted(reads) == [[(f"half.{part}", rows)] for part in ("bias", "weight") for rows in (1, 2, 3)]


@each_backend
@pytest.mark.parametrize("module", TABLES)
@pytest.mark.parametrize("rows", [1, 5, 36, 37, 64])
def test_tiles_are_the_whole_table(folder, backend, module, rows):
    with Store(read_folder(folder), SPEC, backend) as store, store.open(Piece("head")) as w:
        count, firsts = store.rows(module), []
        for first, tile in w.tiles(module, rows):
            firsts.append(first)
            assert_same(tile, folder, module, slice(first, first + rows))
        assert firsts == list(range(0, count, rows))
        assert store.bytes_read == size_bytes(folder, module), "each row once"


def test_the_next_tile_is_read_while_one_is_used(folder):
    with Store(read_folder(folder), SPEC, reference) as store, store.open(Piece("head")) as w:
        read = [store.bytes_read * ROWS // size_bytes(folder, "plain") for _ in w.tiles("plain", 10)]
    assert read == [20, 30, 37, 37]


def test_tiles_given_up_half_way(folder):
    with Store(read_folder(folder), SPEC, reference) as store, store.open(Piece("head")) as w:
        for first, _ in w.tiles("plain", 10):
            if first == 10:
                break
        assert_same(w.take("plain", np.array([36])), folder, "plain", slice(36, 37))


@pytest.fixture
def own(tmp_path):
    """A model's files that a test may break."""
    write(tmp_path / "model.safetensors", {f"{name}.weight": np.full((8, 64), i, np.float32) for i, name in enumerate("abc")})
    return tmp_path


@each_backend
def test_a_reader_s_error_is_raised_where_its_stage_opens(own, backend):
    a, b, c = (Piece(name, (name,)) for name in "abc")
    entries = read_folder(own)
    with Store(entries, SPEC, backend) as store:
        os.truncate(own / "model.safetensors", entries["c.weight"].start + 40)
        store.expect([a, c, b])
        with store.open(a) as w:  # c fails meanwhile, in the other thread
            assert (numbers(w["a"]["weight"]) == 0).all()
        with pytest.raises(UserError, match=r"reading tensor 'c.weight' from .*: the file ends 2008 bytes early"), store.open(c):
            pytest.fail("it opened")
        with store.open(b) as w:  # the rest can still be read
            assert (numbers(w["b"]["weight"]) == 1).all()
        with store.open(Piece("embedding")) as w:
            with pytest.raises(UserError, match="'c.weight'"):
                w.take("c", np.array([7]))
            with pytest.raises(UserError, match="'c.weight'"):
                list(w.tiles("c", 3))
            assert (numbers(w.take("b", np.array([7]))["weight"]) == 1).all()


def test_a_file_that_is_gone(own):
    entries = read_folder(own)
    (own / "model.safetensors").unlink()
    with Store(entries, SPEC, reference) as store, pytest.raises(UserError, match="model.safetensors: No such file"), store.open(Piece("a", ("a",))):
        pytest.fail("it opened")


def test_closing_leaves_no_thread_and_no_descriptor(folder, monkeypatch):
    descriptors, failed, really_open, really_read = [], [], os.open, stores.read_run

    def slowly(*arguments):
        time.sleep(0.01)
        try:
            really_read(*arguments)
        except UserError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(stores, "read_run", slowly)
    monkeypatch.setattr(os, "open", lambda *arguments: descriptors.append(really_open(*arguments)) or descriptors[-1])
    before, first = threading.active_count(), Piece("first", MODULES)
    store = Store(read_folder(folder), SPEC, reference)
    store.expect([first, Piece("next", MODULES)])
    with store.open(first):
        pass
    assert len(descriptors) == 2, "each file is opened once"
    assert threading.active_count() == before + 1
    store.close()  # while the next is read ahead, which goes to its end: no descriptor is closed under it
    assert threading.active_count() == before and not failed
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)
    store.close()  # again does nothing


@each_backend
def test_resident_stages_are_read_once(folder, backend):
    """And kept as they are stored, also while others are open, until the store is closed."""
    first, second, rows = Piece("first", ("plain", "four")), Piece("second", ("half",)), Piece("rows")
    with Store(read_folder(folder), SPEC, backend, resident=ALL_STAGES) as store:
        store.expect([first, second])
        with store.open(first) as w:
            assert store.loads == {"plain": 1, "four": 1, "half": 1}, "the first time they are read ahead like others"
            with store.open(second) as inner, store.open(first) as again:
                assert again is w and numbers(inner["half"]["bias"]).shape == (ROWS,)
            held = w["four"]["weight"]
        for stage, modules in ((second, ("half",)), (first, ("plain", "four"))) * 2:
            with store.open(stage) as w:
                for module in modules:
                    assert_same(w[module], folder, module)
        with store.open(first) as w:
            assert w["four"]["weight"] is held and held.dtype == (np.uint32 if backend is reference else mx.uint32)
        assert store.loads == {"plain": 1, "four": 1, "half": 1} and store.bytes_read == size_bytes(folder, "plain", "four", "half")
        with store.open(rows) as w:  # a table of which only rows are taken isn't kept
            for _ in range(2):
                assert_same(w.take("brain", np.array([1])), folder, "brain", slice(1, 2))
        assert store.bytes_read == size_bytes(folder, "plain", "four", "half") + 2 * size_bytes(folder, "brain") // ROWS


def test_a_resident_store_that_is_closed_holds_nothing(folder):
    store, stage = Store(read_folder(folder), SPEC, reference, resident=ALL_STAGES), Piece("s", ("plain",))
    with store.open(stage) as w:
        held = weakref.ref(w["plain"]["weight"])
    del w
    assert held() is not None
    store.close()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("resident", [(), ALL_STAGES], ids=["streamed", "resident"])
def test_whoever_watches_hears_of_every_stage_before_it_opens(folder, resident):
    """Also of those whose weights are there, or were read ahead; the name comes before the weights."""
    heard = []
    a, b = Piece("a", ("plain",)), Piece("b", ("half",))
    store = Store(read_folder(folder), SPEC, reference, resident, watch=lambda name: heard.append((name, dict(store.loads))))
    with store:
        store.expect([a, b, a])
        for stage in (a, b, a):
            with store.open(stage):
                heard.append(f"in {stage.name}")
    two = {"plain": 1, "half": 1}
    assert heard == [("a", {}), "in a", ("b", two), "in b", ("a", two if resident else {"plain": 2, "half": 1}), "in a"]


def test_every_stored_type_has_its_buffers():
    """What may be in a model's file: floats, packed words."""
    for backend in BACKENDS:
        for dtype in ("F32", "F16", "BF16", "U32"):
            for shape in ((3, 5), (4,), (0, 3), ()):
                array, target = backend.buffers.allocate(shape, dtype)
                value = from_float32(np.full(shape, 3, np.float32), dtype) if dtype != "U32" else np.full(shape, 3, np.uint32)
                size = value.size * np.dtype(NUMPY_TYPES[dtype]).itemsize
                target[:size] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                found = numbers(backend.buffers.finish(array, dtype))
                assert found.shape == shape and (found == 3).all(), (backend.arrays.name, dtype, shape)
