import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

KINDS = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]


def difficult_weight(rng, out, width):
    weight = rng.normal(size=(out, width)).astype(np.float32)
    weight[0, :128], weight[1, :128], weight[2, :128], weight[3, :128] = 0, 3, np.abs(weight[2, :128]), -np.abs(weight[3, :128])
    return weight


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_packing_is_mlx_to_the_bit(bits, group):
    mx, ops = oracles.mlx()
    weight = difficult_weight(np.random.default_rng(0), 7, 384)
    ours, mlx = reference.quantized.quantize(weight, bits, group), ops.quantized.quantize(mx.array(weight), bits, group)
    for name in ("weight", "scales", "biases"):
        np.testing.assert_array_equal(ours[name], mlx[name])
    np.testing.assert_array_equal(reference.quantized.dequantize(ours, np.float32), ops.quantized.dequantize(mlx, mx.float32))
    assert reference.quantized.shape(ours) == ops.quantized.shape(mlx) == (7, 384)


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_dequantised_is_within_half_a_step(bits, group):
    weight = difficult_weight(np.random.default_rng(1), 8, 256)
    linear = reference.quantized.quantize(weight, bits, group)
    off = np.abs(reference.quantized.dequantize(linear, np.float64) - weight).reshape(*linear["scales"].shape, group)
    # The far end of a group may be a whole step out: the step is stretched so that the near end and zero are exact.
    assert (off <= np.abs(linear["scales"])[..., None] * 1.01 + 1e-6).all()
    assert np.median(off / np.abs(linear["scales"])[..., None]) < 0.3


@pytest.mark.parametrize(("bits", "group"), [(None, 32), *KINDS])
def test_rows_and_columns_are_slices(bits, group):
    rng = np.random.default_rng(2)
    linear = oracles.random_linear(rng, 9, 384, bits, group, bias=True)
    weight = reference.quantized.dequantize(linear, np.float64)
    part = reference.quantized.rows(linear, 2, 7)
    np.testing.assert_array_equal(reference.quantized.dequantize(part, np.float64), weight[2:7])
    np.testing.assert_array_equal(part["bias"], linear["bias"][2:7])
    columns = reference.quantized.columns(linear, 128, 384)
    np.testing.assert_array_equal(reference.quantized.dequantize(columns, np.float64), weight[:, 128:])
    assert "bias" not in columns
    index = np.array([3, 3, 8])
    np.testing.assert_array_equal(reference.quantized.dequantize(reference.quantized.take(linear, index), np.float64), weight[index])


@pytest.mark.parametrize(("bits", "group"), [(None, 32), *KINDS])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_dense_weight(bits, group, bias):
    rng = np.random.default_rng(3)
    linear, x, dy = oracles.random_linear(rng, 37, 256, bits, group, bias), rng.normal(size=(2, 3, 256)), rng.normal(size=(2, 3, 37))
    weight = reference.quantized.dequantize(linear, np.float64)
    oracles.assert_close(reference.quantized.matmul(x, linear), x @ weight.T + linear.get("bias", 0), "finite differences")
    oracles.assert_close(reference.quantized.matmul_transposed(dy, linear), dy @ weight, "finite differences")


@settings(max_examples=30)
@given(
    kind=st.sampled_from([(None, 32), *KINDS]),
    bias=st.booleans(),
    n=st.integers(1, 5),
    out=st.integers(1, 40),
    tile_bytes=st.sampled_from([1, 12_000, None]),
)
def test_mlx_equals_the_twin(kind, bias, n, out, tile_bytes):
    mx, ops = oracles.mlx()
    rng = np.random.default_rng(out)
    linear, x, dy = oracles.random_linear(rng, out, 128, *kind, bias), rng.normal(size=(1, n, 128)), rng.normal(size=(1, n, out))
    want = [reference.quantized.matmul(x, linear), reference.quantized.matmul_transposed(dy, linear)]
    for module, convert in ((ops, oracles.to_mlx), (reference, oracles.to_float32)):
        linear32, x32, dy32 = convert((linear, x, dy))
        got = module.quantized.matmul(x32, linear32, tile_bytes), module.quantized.matmul_transposed(dy32, linear32, tile_bytes)
        oracles.assert_close(list(got), want, "twin")


@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_packed_products_of_a_gpu_equal_the_twin(monkeypatch, bits, group, bias):
    mx, ops = oracles.mlx()
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: False)
    rng = np.random.default_rng(6)
    arrays = oracles.random_linear(rng, 32, 256, bits, group, bias), rng.normal(size=(3, 256)), rng.normal(size=(3, 32))
    (linear, x, dy), (tl, tx, tdy) = oracles.to_mlx(arrays), oracles.to_float32(arrays)
    got = [ops.quantized.matmul(x, linear), ops.quantized.matmul_transposed(dy, linear)]
    oracles.assert_close(got, [reference.quantized.matmul(tx, tl), reference.quantized.matmul_transposed(tdy, tl)], "twin")
    assert ops.quantized.unpacked(linear, mx.float32) is linear
    np.testing.assert_array_equal(ops.quantized.dequantize(linear, mx.float32), reference.quantized.dequantize(tl, np.float32))


def test_slices_and_chosen_rows_of_mlx_equal_the_twin():
    mx, ops = oracles.mlx()
    linear = oracles.to_float32(oracles.random_linear(np.random.default_rng(4), 11, 256, 4, 64, bias=True))
    packed = oracles.to_mlx(linear)
    for twin, got in [
        (reference.quantized.rows(linear, 3, 9), ops.quantized.rows(packed, 3, 9)),
        (reference.quantized.columns(linear, 64, 192), ops.quantized.columns(packed, 64, 192)),
    ]:
        np.testing.assert_array_equal(reference.quantized.dequantize(twin, np.float32), ops.quantized.dequantize(got, mx.float32))
        assert set(twin) == set(got)
    index = np.array([10, 0, 0], np.int32)
    taken, got = reference.quantized.take(linear, index), ops.quantized.take(packed, mx.array(index))
    np.testing.assert_array_equal(reference.quantized.dequantize(taken, np.float32), ops.quantized.dequantize(got, mx.float32))
    np.testing.assert_array_equal(taken["bias"], got["bias"])


def test_a_bfloat16_product_is_no_worse_than_naive_code():
    mx, ops = oracles.mlx()
    rng = np.random.default_rng(5)
    weight, x, dy = (mx.array(rng.normal(size=shape)).astype(mx.bfloat16) for shape in ((48, 128), (6, 128), (6, 48)))
    linear = ops.quantized.quantize(weight, 4, 32)
    w = mx.dequantize(linear["weight"], linear["scales"], linear["biases"], group_size=32, bits=4)
    exact = {**linear, **{name: linear[name].astype(mx.float32) for name in ("scales", "biases")}}
    truth_weight = ops.quantized.dequantize(exact, mx.float32)
    truth = [x.astype(mx.float32) @ truth_weight.T, dy.astype(mx.float32) @ truth_weight]
    got = [ops.quantized.matmul(x, linear), ops.quantized.matmul_transposed(dy, linear)]
    assert all(a.dtype == mx.bfloat16 for a in got)
    oracles.assert_no_worse(got, [x @ w.T, dy @ w], truth)


@pytest.mark.parametrize(("bits", "group"), [(None, 32), (4, 32), (3, 64), (8, 128)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_apply_is_a_product_with_a_gradient(monkeypatch, bits, group, bias, on_cpu):
    """Against mx.grad of plain MLX on the dense weight, alone, in a row with others, and compiled; the frozen weight's gradient is zero."""
    mx, ops = oracles.mlx()
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(ops.quantized.tiles, "WEIGHT_BYTES", 20_000)  # several tiles
    rng = np.random.default_rng(7)
    linear, x, dy = oracles.to_mlx((oracles.random_linear(rng, 128, 128, bits, group, bias), rng.normal(size=(2, 3, 128)), rng.normal(size=(2, 3, 128))))
    weight = ops.quantized.dequantize(linear, mx.float32)

    def ours(x):
        return mx.sum(dy * ops.quantized.apply(mx.tanh(ops.quantized.apply(x, linear)), linear))

    def naive(x):
        add = linear.get("bias", mx.zeros(()))
        return mx.sum(dy * (mx.tanh(x @ weight.T + add) @ weight.T + add))

    want = mx.value_and_grad(naive)(x)
    oracles.assert_close(ops.quantized.apply(x, linear), ops.quantized.matmul(x, linear), "autodiff")
    oracles.assert_close(mx.value_and_grad(ours)(x), want, "autodiff")
    oracles.assert_close(mx.compile(mx.value_and_grad(ours))(x), want, "autodiff")
    if bits is None:
        frozen = mx.grad(lambda weight: mx.sum(ops.quantized.apply(x, linear | {"weight": weight})))(linear["weight"])
        assert not np.array(frozen).any()
