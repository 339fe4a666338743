"""What the tests of both backends' plain code share: its gradients against finite differences, and one backend against the other."""

import numpy as np
import oracles

from mesp_mlx import reference
from mesp_mlx.reference import plain


def assert_gradients(function, primals, dy):
    """The tape's gradient of function, a dict's array, is its derivative; and function computes the same without a tape."""
    value, gradients = plain.vjp(function, primals, dy)
    without = function(primals)
    assert isinstance(without, np.ndarray | np.generic)
    np.testing.assert_array_equal(value, without)
    assert list(gradients) == list(primals)
    for name, primal in primals.items():
        oracles.assert_derivative(lambda a, name=name: function(primals | {name: a}), primal, gradients[name], 1.0 if dy is None else dy)


def assert_twins(function, primals, dy, constants, names=None):
    """function(plain, constants, primals) and its gradients (those named) are the same in float32 in MLX and in NumPy."""
    results = []
    for module, convert in ((oracles.mlx()[1], oracles.to_mlx), (reference, oracles.to_float32)):
        fixed = convert(constants)
        value, gradients = module.plain.vjp(lambda p, m=module, c=fixed: function(m.plain, c, p), convert(primals), dy if dy is None else convert(dy))
        results.append([value, function(module.plain, fixed, convert(primals)), {name: gradients[name] for name in names or primals}])
    oracles.assert_close(*results, "twin")
