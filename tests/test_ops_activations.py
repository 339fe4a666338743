import math
from typing import get_args

import numpy as np
import oracles
import pytest
from backends import each_backend, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx import reference
from mesp_mlx.reference.activations import Activation

FORMULAS = {
    "silu": lambda g: g / (1 + math.exp(-g)),
    "gelu": lambda g: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "gelu_exact": lambda g: 0.5 * g * (1 + math.erf(g / math.sqrt(2))),
    "gelu_sigmoid": lambda g: g / (1 + math.exp(-1.702 * g)),
    "relu": lambda g: max(g, 0.0),
    "relu_squared": lambda g: max(g, 0.0) ** 2,
    "clipped_swiglu": lambda g: min(g, 7.0) / (1 + math.exp(-1.702 * min(g, 7.0))),
}
each_activation = pytest.mark.parametrize("activation", FORMULAS)


def points(n=400):
    """From -9 to 9, none at zero or at seven, where some have a corner."""
    g = np.linspace(-9, 9, n)
    return g[(np.abs(g) > 1e-3) & (np.abs(np.abs(g) - 7) > 1e-3)]


def test_every_activation_has_a_formula_here():
    assert set(FORMULAS) == set(get_args(Activation))
    _, ops = oracles.mlx()
    assert get_args(ops.activations.Activation) == get_args(Activation)


@each_activation
def test_reference_is_the_formula_and_its_derivative(activation):
    g = points()
    phi, slope = reference.activations.activate_with_slope(g, activation)
    np.testing.assert_allclose(phi, [FORMULAS[activation](a) for a in g.tolist()], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(reference.activations.activate(g, activation), phi, rtol=1e-14, atol=1e-16)
    numeric = (reference.activations.activate(g + 1e-5, activation) - reference.activations.activate(g - 1e-5, activation)) / 2e-5
    np.testing.assert_allclose(slope, numeric, rtol=1e-8, atol=1e-9)


@each_activation
def test_what_is_given_is_not_changed(activation):
    g = points()
    before = g.copy()
    results = [reference.activations.activate(g, activation), *reference.activations.activate_with_slope(g, activation)]
    np.testing.assert_array_equal(g, before)
    assert not any(np.shares_memory(a, b) for a in results for b in (g, *results) if a is not b)


def test_the_normal_distribution():
    """To twelve digits of what it is, in both tails, until floats end."""
    g = np.concatenate([np.linspace(-12, 12, 4001), [-37.0, -30.0, -20.0, 20.0, 37.0, 0.0, -0.0]])
    phi, density = reference.activations.normal(g)
    np.testing.assert_allclose(phi[:4001], [0.5 * math.erfc(-a / math.sqrt(2)) for a in g[:4001].tolist()], rtol=1e-12)
    np.testing.assert_allclose(2 * phi - 1, [math.erf(a / math.sqrt(2)) for a in g.tolist()], atol=1e-14)
    np.testing.assert_allclose(density, np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi), rtol=1e-12)
    assert (phi[-7:-4] < 1e-80).all() and (phi >= 0).all() and phi[-1] == pytest.approx(0.5, abs=1e-14)


def test_the_normal_distribution_in_float32():
    g = np.linspace(-12, 12, 4001, dtype=np.float32)
    phi, density = reference.activations.normal(g)
    assert phi.dtype == density.dtype == np.float32
    exact = np.array([0.5 * math.erfc(-a / math.sqrt(2)) for a in g.tolist()])
    assert np.abs(phi - exact).max() < 2e-7
    assert (np.abs(phi - exact) / exact)[np.abs(g) < 5].max() < 2e-6  # in the lower tail too


@settings(max_examples=40)
@given(shape=st.tuples(st.integers(1, 3), st.integers(1, 40)), activation=st.sampled_from(list(FORMULAS)))
def test_mlx_equals_the_twin(shape, activation):
    _, ops = oracles.mlx()
    g = 4 * np.random.default_rng(shape[1]).normal(size=shape)
    results = []
    for module, convert in ((ops, oracles.to_mlx), (reference, oracles.to_float32)):
        results.append([module.activations.activate(convert(g), activation), *module.activations.activate_with_slope(convert(g), activation)])
    oracles.assert_close(*results, "twin")


@each_activation
@pytest.mark.parametrize("compiled", [False, True])
def test_slope_equals_autodiff_of_plain(activation, compiled):
    mx, ops = oracles.mlx()
    g = oracles.to_mlx(points())
    autodiff = mx.grad(lambda g: ops.plain.activate(g, activation).sum())
    slope = lambda g: ops.activations.activate_with_slope(g, activation)[1]  # noqa: E731
    oracles.assert_close((mx.compile(slope) if compiled else slope)(g), autodiff(g), "autodiff")


@each_backend
@each_activation
@pytest.mark.filterwarnings("error")
def test_large_values_do_not_overflow(backend, activation):
    g = backend.arrays.asarray(np.array([-1e4, -100, -40, 0, 40, 100, 1e4], np.float32))
    phi, slope = (numbers(a) for a in backend.activations.activate_with_slope(g, activation))
    assert np.isfinite(phi).all() and np.isfinite(slope).all() and phi.dtype == slope.dtype == np.float32
    assert (np.abs(phi[:3]) < 1e-8).all() and (np.abs(slope[:3]) < 1e-8).all()


@each_activation
def test_bfloat16_stays_bfloat16(activation):
    mx, ops = oracles.mlx()
    g = oracles.to_mlx(points()).astype(mx.bfloat16)
    got = [ops.activations.activate(g, activation), *ops.activations.activate_with_slope(g, activation)]
    assert {a.dtype for a in (*got, ops.plain.activate(g, activation), ops.plain.gate(g, g, activation))} == {mx.bfloat16}
    truth = ops.activations.activate(g.astype(mx.float32), activation)
    assert oracles.error(*oracles.leaves([got[0], truth])) < 0.01
