import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference

KINDS = [(None, 32), (4, 32), (6, 64)]
CAPS = [(1.0, None), (0.3, None), (1.0, 4.0), (0.5, 4.0)]  # logit_scale and logit_cap, of the size of the logits here
each_cap = pytest.mark.parametrize("cap", CAPS)


def case(n=6, vocabulary=37, width=64, kind=(None, 32), bias=False, seed=0):
    rng = np.random.default_rng(seed)
    linear = oracles.random_linear(rng, vocabulary, width, *kind, bias)
    return 3 * rng.normal(size=(n, width)), linear, rng.integers(0, vocabulary, n)


def sweep(module, h, linear, targets, tile, gradient=True, cap=()):
    state, vocabulary = module.cross_entropy.start(h, gradient), linear["weight"].shape[0]
    for i in range(0, vocabulary, tile):
        state = module.cross_entropy.add(state, h, module.quantized.rows(linear, i, min(i + tile, vocabulary)), *cap)
    return module.cross_entropy.finish(state, h, module.quantized.take(linear, targets), *cap)


def bent(logits, scale=1.0, cap=None):
    return scale * logits if cap is None else cap * np.tanh(scale * logits / cap)


def plain(mx, h, weight, bias, targets, scale=1.0, cap=None):
    logits = scale * (h @ weight.T + bias).astype(mx.float32)
    logits = logits if cap is None else cap * mx.tanh(logits / cap)
    return (mx.logsumexp(logits, axis=1) - mx.take_along_axis(logits, targets[:, None], axis=1)[:, 0]).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", [1, 8, 37, 100])
@each_cap
def test_reference_gradient_is_the_derivative(kind, bias, tile, cap):
    h, linear, targets = case(kind=kind, bias=bias)
    _, dh = sweep(reference, h, linear, targets, tile, cap=cap)
    oracles.assert_derivative(lambda h: sweep(reference, h, linear, targets, tile, gradient=False, cap=cap)[0], h, dh, 1.0)


@pytest.mark.parametrize("tile", [1, 8, 37])
@each_cap
def test_reference_loss_is_the_formula(tile, cap):
    h, linear, targets = case(bias=True)
    logits = bent(h @ linear["weight"].T + linear["bias"], *cap)
    want = np.sum(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(6), targets])
    oracles.assert_close(sweep(reference, h, linear, targets, tile, cap=cap)[0], want, "finite differences")
    assert sweep(reference, h, linear, targets, tile, gradient=False, cap=cap)[1] is None


@each_cap
def test_large_logits_do_not_overflow(cap):
    h, linear, targets = case()
    loss, dh = sweep(reference, 1000 * h, linear, targets, 8, cap=cap)
    assert np.isfinite(loss) and dh is not None and np.isfinite(dh).all()


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
@pytest.mark.parametrize("gradient", [True, False])
def test_float32_keeps_the_loss_of_a_large_vocabulary(backend, gradient):
    module, convert = (reference, oracles.to_float32) if backend == "numpy" else (oracles.mlx()[1], oracles.to_mlx)
    h, linear, targets = case(64, 8192, bias=True)
    logits = h @ linear["weight"].T + linear["bias"]
    top = logits.max(axis=1)
    want = np.sum(top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(64), targets])
    loss, dh = sweep(module, *convert((h, linear, targets)), 1024, gradient)
    assert float(loss) == pytest.approx(want, rel=1e-6) and (dh is not None) == gradient


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_no_supervised_rows_cost_nothing(backend):
    module = reference if backend == "numpy" else oracles.mlx()[1]
    convert = oracles.to_float32 if backend == "numpy" else oracles.to_mlx
    loss, dh = sweep(module, *convert(case(n=0)), tile=8)
    assert float(loss) == 0 and dh.shape == (0, 64)


@settings(max_examples=40)
@given(
    n=st.integers(0, 9), vocabulary=st.integers(1, 50), tile=st.integers(1, 60), kind=st.sampled_from(KINDS), bias=st.booleans(), cap=st.sampled_from(CAPS),
)  # fmt: skip
def test_mlx_equals_the_twin(n, vocabulary, tile, kind, bias, cap):
    mx, ops = oracles.mlx()
    arrays = case(n, vocabulary, 64, kind, bias, seed=n)
    got, want = (sweep(module, *convert(arrays), tile, cap=cap) for module, convert in ((ops, oracles.to_mlx), (reference, oracles.to_float32)))
    if vocabulary == 1:  # the loss of one choice is zero: both results are rounding
        assert max(abs(float(got[0])), abs(float(want[0]))) < 1e-4
    else:
        oracles.assert_close(got, want, "twin")


@settings(max_examples=30)
@given(vocabulary=st.integers(1, 50), tile=st.integers(1, 60), backend=st.sampled_from(["numpy", "mlx"]), cap=st.sampled_from([*CAPS, (-1.0, None)]))
def test_best_is_the_argmax(vocabulary, tile, backend, cap):
    module, convert = (reference, oracles.to_float32) if backend == "numpy" else (oracles.mlx()[1], oracles.to_mlx)
    rng = np.random.default_rng(vocabulary)
    h, linear = rng.integers(-3, 4, (5, 8)).astype(np.float64), {"weight": rng.integers(-3, 4, (vocabulary, 8)).astype(np.float64)}
    linear["weight"][-1] = linear["weight"][0]  # equals, and exactly so with whole numbers: the first one wins
    args, best = convert((h, linear)), None
    for i in range(0, vocabulary, tile):
        best = module.cross_entropy.best(args[0], best, i, module.quantized.rows(args[1], i, min(i + tile, vocabulary)), *cap)
    assert best is not None
    logits = h @ linear["weight"].T
    value, index = (module.arrays.to_numpy(a) for a in best)
    if cap == CAPS[0]:
        np.testing.assert_array_equal(index, logits.argmax(axis=1))
        np.testing.assert_array_equal(value, logits.max(axis=1))
    else:  # a cap may make equals of logits far above it, and a negative scale turns their order
        want = bent(logits, *cap)
        np.testing.assert_allclose(want[np.arange(5), index], want.max(axis=1), rtol=1e-6)
        np.testing.assert_allclose(value, want.max(axis=1), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, 8])
@each_cap
def test_custom_gradient_equals_plain_autodiff(kind, tile, cap):
    mx, ops = oracles.mlx()
    h, linear, targets = oracles.to_mlx(case(kind=kind, bias=True))
    weight = ops.quantized.dequantize(linear, mx.float32)
    want = mx.value_and_grad(lambda h: 0.5 * plain(mx, h, weight, linear["bias"], targets, *cap))(h)
    got = mx.value_and_grad(lambda h: 0.5 * ops.cross_entropy.apply(h, linear, targets, tile, *cap))(h)
    oracles.assert_close(got, want, "autodiff")


@pytest.mark.parametrize(("compiled", "cap"), [(False, CAPS[0]), (True, CAPS[0]), (False, CAPS[3]), (True, CAPS[3])])
def test_a_large_vocabulary_takes_less_memory_than_plain_autodiff(compiled, cap):
    mx, ops = oracles.mlx()
    h, linear, targets = oracles.to_mlx(case(256, 8192, 64, (4, 32)))

    def gradient(function):
        function = mx.compile(mx.grad(function)) if compiled else mx.grad(function)
        mx.eval(h, linear, targets)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        result = function(h)
        mx.eval(result)
        return result, mx.get_peak_memory() - before

    want, plain_bytes = gradient(lambda h: plain(mx, h, ops.quantized.dequantize(linear, mx.float32), 0, targets, *cap))
    got, our_bytes = gradient(lambda h: ops.cross_entropy.apply(h, linear, targets, 512, *cap))
    oracles.assert_close(got, want, "autodiff")
    assert our_bytes < plain_bytes / 2, f"{our_bytes / 1e6:.0f} MB, plain autodiff {plain_bytes / 1e6:.0f} MB"


@each_cap
def test_bfloat16_is_no_worse_than_naive_code(cap):
    mx, ops = oracles.mlx()
    h, linear, targets = oracles.to_mlx(case(16, 96))
    h, weight = h.astype(mx.bfloat16), linear["weight"].astype(mx.bfloat16)
    naive = mx.value_and_grad(lambda h: plain(mx, h, weight, mx.array(0, mx.bfloat16), targets, *cap))(h)
    truth = mx.value_and_grad(lambda h: plain(mx, h, weight.astype(mx.float32), 0, targets, *cap))(h.astype(mx.float32))
    loss, dh = sweep(ops, h, {"weight": weight}, targets, 32, cap=cap)
    assert loss.dtype == dh.dtype == mx.float32
    oracles.assert_no_worse([loss, dh], naive, truth)
