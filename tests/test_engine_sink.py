"""What the optimizer is given: the gradient of the mean loss, at once or clipped as mlx.optimizers clips, or nothing when it is not finite."""

import numpy as np
import pytest
from backends import each_backend, mx, needs_mlx, numbers, ops

from mesp_mlx.engine.sink import AppliedSink, HeldSink
from mesp_mlx.errors import RunStopped
from mesp_mlx.stream.run_file import InMemory, RunFile

SHAPES = {"model.layers.1.mlp.up_proj.lora_a": (16, 4), "model.layers.1.mlp.up_proj.lora_b": (4, 24), "model.layers.0.self_attn.q_proj.lora_a": (7, 3)}
STAGES = ("model.layers.1.", "model.layers.0.")  # in the order they come


def gradients(seed=0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


class Applied(dict):
    """What the optimizer was given, by name, in order."""

    def apply(self, name, gradient):
        assert name not in self, "once"
        self[name] = gradient


def fill(sink, backend, given) -> None:
    """Hand the sink the tensors stage by stage."""
    sink.check(1.0)
    for stage in STAGES:
        sink.put({name: backend.arrays.asarray(value) for name, value in given.items() if name.startswith(stage)})


def held(backend, given, tokens, clip=0.0, shelf=None) -> Applied:
    """What a sink that holds hands on in the end."""
    applied = Applied()
    sink = HeldSink(backend, shelf or InMemory(), tokens, clip, applied.apply)
    fill(sink, backend, given)
    assert not applied, "nothing before the update ends"
    sink.finish()
    return applied


def norm_of(given) -> float:
    return float(np.sqrt(sum(np.sum(value.astype(np.float64) ** 2) for value in given.values())))


@each_backend
@pytest.mark.parametrize("tokens", [1, 7, 4096])
def test_sums_become_means(backend, tokens):
    given = gradients()
    applied = Applied()
    sink = AppliedSink(backend, tokens, applied.apply)
    fill(sink, backend, given)
    sink.finish()
    for found in (held(backend, given, tokens), applied):
        assert list(found) == list(SHAPES), "all of them, in the order they came"
        for name, value in found.items():
            assert value.dtype == backend.arrays.float32
            np.testing.assert_allclose(numbers(value), given[name].astype(np.float64) / tokens, rtol=3e-7)


@each_backend
def test_what_is_applied_at_once_is_not_held(backend):
    """Stage by stage, and the sink empties what it was given: its memory is free before the next stage."""
    applied = Applied()
    sink = AppliedSink(backend, 3, applied.apply)
    for count, stage in enumerate(STAGES, start=1):
        given = {name: backend.arrays.asarray(value) for name, value in gradients().items() if name.startswith(stage)}
        sink.put(given)
        assert given == {} and len({name.split(".")[2] for name in applied}) == count
    assert list(applied) == list(SHAPES)


@each_backend
def test_what_several_stages_give_to_one_tensor_is_added_up(backend):
    """Norm, clipping and what is applied are those of the sum."""
    given, applied = gradients(), Applied()
    first, again = next(iter(given.items())), {name: backend.arrays.asarray(-0.5 * value) for name, value in given.items() if name.startswith(STAGES[-1])}
    sink = HeldSink(backend, InMemory(), 3, 0.25, applied.apply)
    fill(sink, backend, given)
    sink.put({**again, first[0]: backend.arrays.asarray(2 * first[1])})
    sink.finish()
    total = {name: value * (3 if name == first[0] else 0.5 if name in again else 1) for name, value in given.items()}
    want = held(backend, {name: value.astype(np.float32) for name, value in total.items()}, 3, clip=0.25)
    assert applied.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(numbers(applied[name]), numbers(want[name]), rtol=1e-6)


@each_backend
@pytest.mark.parametrize("share", [0.1, 0.999, 1.001, 50.0])
def test_clipping_bounds_the_norm_of_the_mean(backend, share):
    """A gradient within the bound is left alone."""
    given, tokens = gradients(), 13
    plain = norm_of(given) / tokens
    found = held(backend, given, tokens, clip=share * plain)
    after = norm_of({name: numbers(value) for name, value in found.items()})
    assert after == pytest.approx(min(1.0, share) * plain, rel=2e-6)
    for name, value in found.items():
        np.testing.assert_allclose(numbers(value), given[name].astype(np.float64) / tokens * min(1.0, share), rtol=3e-6)


@needs_mlx
def test_clipping_is_mlx_s():
    from mlx.optimizers import clip_grad_norm

    given, tokens = gradients(), 5
    for limit in (0.01, 1.0, 100.0):
        found = held(ops, given, tokens, clip=limit)
        want, _ = clip_grad_norm({name: mx.array(value) / tokens for name, value in given.items()}, limit)
        for name, value in found.items():
            np.testing.assert_allclose(numbers(value), np.array(want[name]), rtol=2e-6)


@each_backend
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_in_the_file_they_are_the_same_bits(backend, tmp_path, clip):
    """Written once, read once; each stage's place is free before the next is read."""
    file, given = RunFile(tmp_path, 0, backend), gradients()
    used: list[int] = []
    applied = Applied()

    def apply(name, gradient):
        used.append(file.used_bytes)
        applied.apply(name, gradient)

    sink = HeldSink(backend, file, 5, clip, apply)
    fill(sink, backend, given)
    size = sum(value.nbytes for value in given.values())
    assert file.bytes_written == size and file.used_bytes == 2 * 4096
    sink.finish()
    assert file.bytes_read == file.bytes_written == size and used == [4096, 4096, 0]
    want = held(backend, given, 5, clip)
    assert list(applied) == list(want) and all(numbers(applied[name]).tobytes() == numbers(want[name]).tobytes() for name in want)
    file.close()


@each_backend
def test_gradients_of_zero_stay_zero(backend):
    """As dA while B is zero: no division by a norm of nothing."""
    found = held(backend, {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, 2, clip=1.0)
    assert list(found) == list(SHAPES) and all((numbers(value) == 0).all() for value in found.values())


@each_backend
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("spilled", [False, True])
def test_a_gradient_that_is_not_finite_stops_the_run(backend, value, clip, spilled, tmp_path):
    given, applied = gradients(), Applied()
    name = list(SHAPES)[1]
    given[name][2, 3] = value
    shelf = RunFile(tmp_path, 0, backend) if spilled else InMemory()
    sink = HeldSink(backend, shelf, 4, clip, applied.apply)
    fill(sink, backend, given)
    with pytest.raises(RunStopped, match=rf"not a finite number, first in {name}\. Nothing of it was applied\. Try a lower --learning-rate or --scale"):
        sink.finish()
    assert not applied
    if isinstance(shelf, RunFile):
        shelf.close()


@each_backend
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_applied_at_once_only_what_came_before_it_is(backend, value):
    given, applied = gradients(), Applied()
    name = list(SHAPES)[2]
    given[name][2, 2] = value
    sink = AppliedSink(backend, 4, applied.apply)
    with pytest.raises(RunStopped, match=rf"first in {name}\. What came before it in this update was applied: go on from the last saved adapter\. Try a lower"):
        fill(sink, backend, given)
    assert list(applied) == list(SHAPES)[:2]


@each_backend
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(backend, loss):
    for sink in (AppliedSink(backend, 4, Applied().apply), HeldSink(backend, InMemory(), 4, 1.0, Applied().apply)):
        with pytest.raises(RunStopped, match=rf"the loss is {loss}\. Nothing of it was applied"):
            sink.check(loss)
