import numpy as np
import oracles
import pytest

from mesp_mlx import reference


@pytest.fixture(params=["numpy", "mlx"])
def arrays(request):
    return reference.arrays if request.param == "numpy" else oracles.mlx()[1].arrays


def test_rows_taken_and_put_back_are_each_others_transpose(arrays):
    a = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    index = arrays.asarray(np.array([4, 0, 5]))
    taken = arrays.take_rows(arrays.asarray(a), index)
    np.testing.assert_array_equal(arrays.to_numpy(taken), a[[4, 0, 5]])
    put = arrays.to_numpy(arrays.scatter_rows(taken, index, 6))
    np.testing.assert_array_equal(put[[4, 0, 5]], a[[4, 0, 5]])
    np.testing.assert_array_equal(put[[1, 2, 3]], 0)


def test_no_rows_put_back_are_zeros(arrays):
    values, index = arrays.zeros((0, 3), arrays.float32), arrays.asarray(np.zeros(0, np.int32))
    np.testing.assert_array_equal(arrays.to_numpy(arrays.scatter_rows(values, index, 4)), np.zeros((4, 3)))


def test_sum_of_squares_is_a_number(arrays):
    a = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    total = arrays.sum_squares(arrays.asarray(a))
    assert isinstance(total, float)
    assert total == pytest.approx(float(np.sum(a.astype(np.float64) ** 2)), rel=1e-6)


def test_joining_casting_and_waiting_keep_values(arrays):
    a = arrays.asarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    joined = arrays.concatenate([a, a], axis=1)
    arrays.evaluate({"x": [joined]}, a)
    assert arrays.to_numpy(joined).shape == (2, 6)
    np.testing.assert_array_equal(arrays.to_numpy(joined)[:, 3:], arrays.to_numpy(arrays.astype(a, arrays.float32)))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_exponentials_are_as_exact_as_the_format(on_cpu, monkeypatch):
    mx, ops = oracles.mlx()
    monkeypatch.setattr(ops.quantized, "on_cpu", lambda: on_cpu)
    a = np.concatenate([np.linspace(-87, 88, 100_001), [0.0, -1e-30, 2.0**-20, -np.log(2) / 2]]).astype(np.float32)
    rounding = 1e-7 * (2 + np.abs(a))  # that of a * log2(e) is most of it
    for got, want in (
        (ops.arrays.exp(mx.array(a)), np.exp(a.astype(np.float64))),
        (ops.arrays.sigmoid(mx.array(a)), 1 / (1 + np.exp(-a.astype(np.float64)))),
    ):
        assert (np.abs(np.array(got) / want - 1) <= rounding).all()


def test_exponentials_at_the_ends():
    mx, ops = oracles.mlx()
    ends = mx.array([-np.inf, -1000.0, np.nan, np.inf], mx.float32)
    small, less, nan = np.array(ops.arrays.exp(ends[:3]))
    assert 0 <= small == less < 2e-38 and np.isnan(nan)
    zero, none, nan, one = np.array(ops.arrays.sigmoid(ends))
    assert 0 <= zero == none < 1e-37 and np.isnan(nan) and one == 1
    assert ops.arrays.exp(mx.zeros(2, mx.bfloat16)).dtype == ops.arrays.sigmoid(mx.zeros(2, mx.bfloat16)).dtype == mx.bfloat16


def test_row_sums():
    mx, ops = oracles.mlx()
    a = np.random.default_rng(1).random((2, 3, 1000), np.float32)
    np.testing.assert_allclose(np.array(ops.arrays.row_sums(mx.array(a))), a.sum(axis=-1, keepdims=True, dtype=np.float64), rtol=1e-6)
