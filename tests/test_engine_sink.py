"""What the optimizer is given: the gradient of the mean loss, clipped as mlx.optimizers clips, or nothing when it is not finite."""

import numpy as np
import pytest
from backends import each_backend, mx, needs_mlx, numbers, ops

from mesp_mlx.engine.sink import HeldSink
from mesp_mlx.errors import RunStopped

SHAPES = {"model.layers.1.mlp.up_proj.lora_a": (16, 4), "model.layers.1.mlp.up_proj.lora_b": (4, 24), "model.layers.0.self_attn.q_proj.lora_a": (7, 3)}


def gradients(seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def filled(backend, given) -> HeldSink:
    """A sink that got the tensors stage by stage."""
    sink = HeldSink(backend)
    for layer in ("model.layers.1.", "model.layers.0."):
        sink.put({name: backend.arrays.asarray(value) for name, value in given.items() if name.startswith(layer)})
    return sink


def norm_of(given) -> float:
    return float(np.sqrt(sum(np.sum(value.astype(np.float64) ** 2) for value in given.values())))


@each_backend
@pytest.mark.parametrize("tokens", [1, 7, 4096])
def test_sums_become_means(backend, tokens):
    given = gradients()
    found, norm = filled(backend, given).finish(tokens)
    assert list(found) == list(SHAPES), "all of them, in the order they came"
    assert type(norm) is float and norm == pytest.approx(norm_of(given) / tokens, rel=1e-6)
    for name, value in found.items():
        assert value.dtype == backend.arrays.float32
        np.testing.assert_allclose(numbers(value), given[name].astype(np.float64) / tokens, rtol=3e-7)


@each_backend
@pytest.mark.parametrize("share", [0.1, 0.999, 1.001, 50.0])
def test_clipping_bounds_the_norm_of_the_mean(backend, share):
    """The norm given back is that before clipping; a gradient within the bound is left alone."""
    given, tokens = gradients(), 13
    plain = norm_of(given) / tokens
    found, norm = filled(backend, given).finish(tokens, clip=share * plain)
    assert norm == pytest.approx(plain, rel=1e-6)
    after = norm_of({name: numbers(value) for name, value in found.items()})
    assert after == pytest.approx(min(1.0, share) * plain, rel=2e-6)
    for name, value in found.items():
        np.testing.assert_allclose(numbers(value), given[name].astype(np.float64) / tokens * min(1.0, share), rtol=3e-6)


@needs_mlx
def test_clipping_is_mlx_s():
    from mlx.optimizers import clip_grad_norm

    given, tokens = gradients(), 5
    for limit in (0.01, 1.0, 100.0):
        found, norm = filled(ops, given).finish(tokens, clip=limit)
        want, want_norm = clip_grad_norm({name: mx.array(value) / tokens for name, value in given.items()}, limit)
        assert norm == pytest.approx(want_norm.item(), rel=1e-6)
        for name, value in found.items():
            np.testing.assert_allclose(numbers(value), np.array(want[name]), rtol=2e-6)


@each_backend
def test_a_sink_is_empty_after_an_update(backend):
    sink = filled(backend, gradients())
    first, _ = sink.finish(3)
    assert sink.finish(3) == ({}, 0.0)
    other = gradients(seed=1)
    sink.put({name: backend.arrays.asarray(value) for name, value in other.items()})
    second, norm = sink.finish(1)
    assert norm == pytest.approx(norm_of(other), rel=1e-6)
    assert all(np.array_equal(numbers(second[name]), other[name]) and not np.array_equal(numbers(first[name]), other[name]) for name in SHAPES)


@each_backend
def test_gradients_of_zero_stay_zero(backend):
    """As dA while B is zero: no division by a norm of nothing."""
    found, norm = filled(backend, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}).finish(2, clip=1.0)
    assert norm == 0 and all((numbers(value) == 0).all() for value in found.values())


@each_backend
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_stops_the_run(backend, value, clip):
    given = gradients()
    name = list(SHAPES)[1]
    given[name][2, 3] = value
    sink = filled(backend, given)
    with pytest.raises(RunStopped, match=rf"not a finite number, first in {name}\. Nothing of it was applied\. Try a lower --learning-rate or --scale"):
        sink.finish(4, clip)
    assert sink.finish(4) == ({}, 0.0), "nor is it kept for the next update"
