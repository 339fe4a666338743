"""Reader and writer against the `safetensors` library and MLX's own."""

import errno
import itertools
import os
from typing import Any

import numpy as np
import pytest
from backends import mx, needs_mlx
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize, safe_open
from safetensors.numpy import save_file
from stored import random_array, same_bits, write

from mesp_mlx.stream.safetensors import NUMPY_TYPES, Writer, from_float32, read_array, read_header, to_float32

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)  # scalars and empty tensors among them
TENSORS = st.dictionaries(st.text('abc.π_"', min_size=1, max_size=8), st.tuples(st.sampled_from(sorted(NUMPY_TYPES)), SHAPES), max_size=5)


@given(TENSORS)
def test_reads_what_the_safetensors_library_writes(tmp_path_factory, tensors):
    arrays = {name: random_array(dtype, shape, seed) for seed, (name, (dtype, shape)) in enumerate(tensors.items())}
    file = tmp_path_factory.mktemp("theirs") / "t.safetensors"
    save_file(arrays, file, {"format": "pt"})
    entries, metadata = read_header(file)
    assert metadata == {"format": "pt"} and entries.keys() == arrays.keys()
    assert all(same_bits(read_array(entries[name]), array) for name, array in arrays.items())


@given(TENSORS, st.booleans())
def test_the_safetensors_library_and_we_read_what_we_write(tmp_path_factory, tensors, described):
    arrays = {name: random_array(dtype, shape, seed) for seed, (name, (dtype, shape)) in enumerate(tensors.items())}
    dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
    file = tmp_path_factory.mktemp("ours") / "t.safetensors"
    writer = write(file, arrays, dtypes, {"format": "mlx", "a": "ü"} if described else None)
    theirs = dict(deserialize(file.read_bytes()))
    found = {name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"])) for name, tensor in theirs.items()}
    assert found == {name: (dtypes[name], array.shape, array.tobytes()) for name, array in arrays.items()}
    with safe_open(file, "np") as opened:
        assert opened.metadata() == ({"format": "mlx", "a": "ü"} if described else None)
    entries, metadata = read_header(file)
    assert metadata == ({"format": "mlx", "a": "ü"} if described else {})
    assert list(entries) == list(arrays), "in the order written"
    assert all(entries[name].dtype == dtypes[name] and same_bits(read_array(entries[name]), array) for name, array in arrays.items())
    assert writer.size_bytes == file.stat().st_size
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0, "tensors begin where any dtype may"


@needs_mlx
def test_reads_what_mlx_writes(tmp_path):
    """Every dtype of MLX; a transposed array, whose memory is not in its order; scalars and empty arrays."""
    kinds = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "I64": mx.int64, "I32": mx.int32, "I16": mx.int16, "I8": mx.int8}
    kinds |= {"U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8, "BOOL": mx.bool_}
    values = mx.random.randint(0, 100, (3, 5, 7), key=mx.random.key(0))
    arrays = {}
    for (name, kind), shape in itertools.product(kinds.items(), ((), (2, 7), (0, 3))):
        arrays[f"{name} {shape}"] = values.astype(kind).reshape(-1)[: int(np.prod(shape))].reshape(shape)
    arrays["F32 (7, 5, 3)"] = values.astype(mx.float32).T
    mx.save_safetensors(str(tmp_path / "t.safetensors"), arrays, {"format": "mlx"})
    entries, metadata = read_header(tmp_path / "t.safetensors")
    assert metadata == {"format": "mlx"} and entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert f"{entries[name].dtype} {entries[name].shape}" == name
        got = read_array(entries[name])
        want = np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
        assert same_bits(got, want), name


@needs_mlx
def test_mlx_reads_what_we_write(tmp_path):
    arrays = {f"{dtype} {shape}": random_array(dtype, shape, seed) for seed, (dtype, shape) in enumerate(itertools.product(NUMPY_TYPES, ((), (4, 3), (0, 2))))}
    arrays = {name: array for name, array in arrays.items() if not name.startswith("F64")}  # MLX has none in files
    write(tmp_path / "t.safetensors", arrays, {name: name.split()[0] for name in arrays}, {"format": "mlx"})
    loaded: Any
    loaded, metadata = mx.load(str(tmp_path / "t.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"} and loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        got = loaded[name]
        assert (got.dtype == mx.bfloat16) == name.startswith("BF16")
        assert same_bits(np.array(got.view(mx.uint16) if got.dtype == mx.bfloat16 else got), array), name


def test_an_array_in_another_memory_order_is_written_in_its_own(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    write(tmp_path / "t.safetensors", {"t": array})
    assert np.array_equal(read_array(read_header(tmp_path / "t.safetensors")[0]["t"]), array)


def test_bfloat16_rounds_to_nearest_even():
    """By the rule itself, in float64: the nearer neighbour, and of two equally near the one whose bits are even."""
    high = np.arange(1 << 16, dtype=np.uint32)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        numbers = ((high << 16) | low).view(np.float32)
        numbers = numbers[np.isfinite(numbers)]
        down = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        up = down + 1
        below, above = (to_float32(bits, "BF16").astype(np.float64) for bits in (down, up))
        above[np.isinf(above)] = np.copysign(2.0**128, above[np.isinf(above)])  # infinity is what the next number would round to
        to_below, to_above = np.abs(numbers - below), np.abs(above - numbers)
        want = np.where((to_below < to_above) | ((to_below == to_above) & (down % 2 == 0)), down, up)
        assert np.array_equal(from_float32(numbers, "BF16"), want)


@needs_mlx
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_rounding_is_mlx_s(dtype):
    """On a million numbers of every exponent; of a number that is none only that it stays so."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)
    numbers = np.concatenate([bits.view(np.float32), np.array([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 3.4e38, 1e-45, 2.9e-8], np.float32)])
    kind = {"BF16": mx.bfloat16, "F16": mx.float16}[dtype]
    with np.errstate(over="ignore"):
        got = from_float32(numbers, dtype).view(np.uint16)
    want = np.array(mx.array(numbers).astype(kind).view(mx.uint16))
    none = np.isnan(numbers)
    assert np.array_equal(got[~none], want[~none])
    assert np.isnan(to_float32(got[none].view(NUMPY_TYPES[dtype]), dtype)).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_half_precision_number_survives_widening(dtype):
    bits = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_TYPES[dtype])
    wide = to_float32(bits, dtype)
    none = np.isnan(wide)
    assert wide.dtype == np.float32 and none.sum() == {"BF16": 2 * 127, "F16": 2 * 1023}[dtype]
    assert same_bits(from_float32(wide, dtype)[~none], bits[~none])
    assert np.isnan(to_float32(from_float32(wide[none], dtype), dtype)).all()


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0), (4,), (3, 2)])
def test_conversion_keeps_the_shape(dtype, shape):
    """Of a transposed array too."""
    numbers = np.full(shape, -1.5, np.float32)
    for array in (numbers, numbers.T):
        stored = from_float32(array, dtype)
        assert (stored.shape, stored.dtype) == (array.shape, NUMPY_TYPES[dtype])
        back = to_float32(stored, dtype)
        assert back.dtype == np.float32 and np.array_equal(back, array)


@given(SHAPES.filter(lambda shape: len(shape) > 0 and shape[0] > 0), st.sampled_from(sorted(NUMPY_TYPES)), st.data())
def test_rows_are_a_slice(tmp_path_factory, shape, dtype, data):
    array = random_array(dtype, shape)
    file = tmp_path_factory.mktemp("rows") / "t.safetensors"
    write(file, {"before": random_array("U8", (5,)), "t": array, "after": random_array("U8", (5,))}, {"t": dtype})
    first = data.draw(st.integers(0, shape[0]))
    last = data.draw(st.integers(first, shape[0]))
    assert same_bits(read_array(read_header(file)[0]["t"].rows(first, last)), array[first:last])


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file, array = tmp_path / "t.safetensors", np.ones(3, np.float32)
    with Writer(file, {"a": ("F32", (3,)), "b": ("F32", (3,))}) as writer:
        writer.write("a", array)
        assert not file.exists() and len(listing(tmp_path)) == 1
        writer.write("b", array)
        assert not file.exists()
    assert listing(tmp_path) == ["t.safetensors"]
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt), Writer(file, {"a": ("F32", (3,))}) as writer:
        writer.write("a", 2 * array)
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"never written: \['b'\]"), Writer(file, {"a": ("F32", (3,)), "b": ("F32", (3,))}) as writer:
        writer.write("a", 2 * array)
    assert listing(tmp_path) == ["t.safetensors"] and file.read_bytes() == before
    write(file, {"a": 2 * array})
    assert listing(tmp_path) == ["t.safetensors"] and np.array_equal(read_array(read_header(file)[0]["a"]), 2 * array)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fails):
    file = tmp_path / "t.safetensors"
    write(file, {"a": np.zeros(3, np.float32)})
    before = file.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write(file, {"a": np.ones(3, np.float32)})
    assert listing(tmp_path) == ["t.safetensors"] and file.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("b", np.ones(3, np.float32)),
        ("a", np.ones(4, np.float32)),
        ("a", np.ones((3, 1), np.float32)),
        ("a", np.ones(3, np.float64)),
        ("a", np.ones(3, np.int32)),
    ],
)
def test_only_what_was_declared_can_be_written(tmp_path, name, array):
    with pytest.raises(ValueError, match=r"where a \('F32', \(3,\)\) was declared"), Writer(tmp_path / "t", {"a": ("F32", (3,)), "b": ("F32", (3,))}) as writer:
        writer.write(name, array)
    assert listing(tmp_path) == []
