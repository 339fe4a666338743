"""MeZO's slopes against the true gradient, its directions, what a pass reads, and what it keeps."""

import dataclasses
import itertools
import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from backends import each_backend, needs_mlx, numbers, ops
from engines import RecordingStore, random_adapter, random_group
from methods import counted_memory, exactly, given, opened, unsupervised
from models import make_model, tiny_config

from mesp_mlx import optim, reference
from mesp_mlx.engine.backprop import forward
from mesp_mlx.engine.zeroth_order import Perturbations, estimate, slopes
from mesp_mlx.model.stages import Batch
from mesp_mlx.stream.safetensors import read_folder

GROUPS = [random_group(160, [13, 9, 5]), random_group(160, [21], seed=3, first_row=3)]
TOKENS = sum(int(group.mask.sum()) for group in GROUPS)
BATCHES = [Batch(group) for group in GROUPS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"), tiny_config("qwen3"))


def slopes_of(folder, backend, adapter, perturbations, groups=GROUPS, dtype: Any = None, store: Any = None):
    """(mean loss over tokens, slopes, store) of an adapter."""
    model, opened_store = opened(folder, backend, dtype=dtype, **({"store": store} if store else {}))
    with opened_store:
        loss, found = slopes(model, opened_store, given(backend, adapter), [Batch(group) for group in groups], perturbations)
    return loss, found, opened_store


def along(gradient, perturbations, index):
    """The derivative along a direction that a gradient tells, per supervised token."""
    parts = [perturbations.direction(reference, index, name, value.shape).astype(np.float64) * value for name, value in gradient.items()]
    return sum(float(part.sum()) for part in parts) / TOKENS


def test_the_slope_is_the_derivative_of_the_mean_loss(tiny):
    """In float64, with what is left over shrinking as the square of epsilon, as that of a difference about the middle does."""
    adapter = {name: value.astype(np.float64) for name, value in random_adapter(tiny).items()}
    loss, gradient = exactly(tiny, adapter, GROUPS, backend=reference)
    off = []
    for epsilon in (1e-6, 1e-4, 1e-3):
        perturbations = Perturbations(seed=3, update=5, count=2, epsilon=epsilon)
        mean, found, _ = slopes_of(tiny, reference, adapter, perturbations, dtype=np.float64)
        want = [along(gradient, perturbations, index) for index in range(2)]
        off.append(max(abs(a - b) for a, b in zip(found, want, strict=True)))
        assert min(map(abs, want)) > 0.1 and mean == pytest.approx(loss, abs=1e3 * epsilon)
    assert off[0] < 1e-6, "z is float32, and so is epsilon times z"
    assert off[2] / off[1] == pytest.approx(100, rel=0.05)


@each_backend
@pytest.mark.parametrize("epsilon", [1e-3, 1e-2])
def test_float32_loses_no_more_than_rounding(tiny, backend, epsilon):
    """A sum of losses L is rounded by a few 2^-24 L, which the slope shows divided by 2 epsilon: a tenth of a percent of it at the default."""
    adapter = random_adapter(tiny)
    perturbations = Perturbations(seed=3, update=5, count=4, epsilon=epsilon)
    loss, found, _ = slopes_of(tiny, backend, adapter, perturbations)
    exact_loss, want, _ = slopes_of(tiny, reference, {name: value.astype(np.float64) for name, value in adapter.items()}, perturbations, dtype=np.float64)
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    rounding = 8 * 2**-24 * loss / TOKENS / (2 * epsilon)
    assert rounding < 0.02 * np.abs(want).mean()
    assert found == pytest.approx(want, abs=rounding)


@each_backend
def test_only_some_modules_and_groups_with_nothing_to_learn(tiny, backend):
    adapter, groups = random_adapter(tiny, keys=("self_attn.v_proj",), num_layers=1), [GROUPS[0], unsupervised(GROUPS[1]), GROUPS[1]]
    _, gradient = exactly(tiny, adapter, GROUPS, backend=reference)
    fine, usual = (Perturbations(seed=3, update=5, epsilon=epsilon) for epsilon in (1e-5, 1e-3))
    double = {name: value.astype(np.float64) for name, value in adapter.items()}
    assert slopes_of(tiny, reference, double, fine, groups, np.float64)[1] == [pytest.approx(along(gradient, fine, 0), rel=1e-6)]
    want = slopes_of(tiny, reference, double, usual, dtype=np.float64)[1]
    assert slopes_of(tiny, backend, adapter, usual, groups)[1] == pytest.approx(want, abs=8 * 2**-24 * 5 / 2e-3)


def test_the_adapter_is_left_alone(tiny):
    adapter = random_adapter(tiny)
    before = {name: value.copy() for name, value in adapter.items()}
    slopes_of(tiny, reference, adapter, Perturbations(0, 0, 2))
    assert adapter.keys() == before.keys() and all((adapter[name] == before[name]).all() for name in before)


@each_backend
def test_directions_are_functions_of_their_names(backend):
    """The same whenever asked for; another seed, update, index or name gives one that has nothing in common with it."""
    base, name, shape = Perturbations(seed=1, update=2, count=3), "model.layers.0.self_attn.q_proj.lora_a", (50, 40)
    first = numbers(base.direction(backend, 0, name, shape))
    assert first.shape == shape and first.dtype == np.float32
    others = [Perturbations(seed=1, update=2, count=9, epsilon=0.5).direction(backend, 0, name, shape), base.direction(backend, 0, name, shape)]
    assert all((numbers(other) == first).all() for other in others), "neither count nor epsilon changes it"
    drawn = [
        first,
        base.direction(backend, 1, name, shape),
        base.direction(backend, 0, name[:-1] + "b", shape),
        base.direction(backend, 0, name.replace("0", "1"), shape),
        *(dataclasses.replace(base, **other).direction(backend, 0, name, shape) for other in ({"seed": 2}, {"update": 1}, {"seed": 2, "update": 1})),
    ]
    for a, b in itertools.combinations(map(numbers, drawn), 2):
        assert abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) < 4 / math.sqrt(a.size)


@needs_mlx
def test_twins_move_alike(tiny):
    """Both backends draw the same directions."""
    perturbations = Perturbations(seed=2**63, update=7, count=2)
    for index, (name, value) in enumerate(random_adapter(tiny).items()):
        twins = [numbers(perturbations.direction(backend, index % 2, name, value.shape)) for backend in (reference, ops)]
        np.testing.assert_allclose(*twins, atol=1e-6, rtol=0)


@each_backend
@pytest.mark.parametrize("count", [1, 3])
def test_a_direction_costs_one_pass_over_the_weights(tiny, backend, count):
    """Both sides go through each stage while it is open, and through the head's table together."""
    adapter = random_adapter(tiny)
    model, store = opened(tiny, backend, store=RecordingStore)
    with store:
        store.expect(model.forward_order())
        states = forward(model, store, given(backend, adapter), BATCHES)
        with store.open(model.head) as w:
            model.head.loss(w, states, BATCHES, gradient=False)
    _, found, read = slopes_of(tiny, backend, adapter, Perturbations(0, 0, count), store=RecordingStore)
    # The rows of the targets are looked up for each side.
    size = sum(entry.size_bytes for name, entry in read_folder(tiny).items() if name.startswith("lm_head."))
    targets = size // 160 * sum(len(np.unique(group.targets[group.mask])) for group in GROUPS)
    assert len(found) == count and read.bytes_read == count * (store.bytes_read + targets)
    assert read.loads == {module: count * loads for module, loads in store.loads.items()} and set(store.loads.values()) == {1}
    assert read.events == store.events * count


@each_backend
def test_directions_are_averaged(tiny, backend):
    """n directions: the mean of slope times direction; and the loss is the mean over all that was computed."""
    adapter = given(backend, random_adapter(tiny))
    loss, found, _ = slopes_of(tiny, backend, random_adapter(tiny), Perturbations(1, 2, 3))
    alone = Perturbations(1, 2, 1)
    assert slopes_of(tiny, backend, random_adapter(tiny), alone)[1] == found[:1] and len(set(found)) == 3
    estimated = {name: numbers(value) for name, value in estimate(backend, adapter, Perturbations(1, 2, 3), found)}
    assert list(estimated) == list(adapter)
    for name, value in estimated.items():
        want = np.mean([slope * numbers(alone.direction(backend, index, name, value.shape)) for index, slope in enumerate(found)], axis=0)
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())
    losses = [slopes_of(tiny, backend, random_adapter(tiny), Perturbations(1, 2, count))[0] for count in (1, 2)]
    assert min(losses) != max(losses) and loss == pytest.approx(losses[0], rel=0.02)


def test_many_directions_show_the_gradient(tiny):
    """n random directions of d dimensions span a cosine of about sqrt(n / (n + d + 1)) with the gradient, and it grows as they do."""
    adapter = random_adapter(tiny, rank=1, keys=("self_attn.k_proj",), num_layers=1)
    d = sum(value.size for value in adapter.values())
    perturbations = Perturbations(seed=2, update=0, count=160)
    model, store = opened(tiny, reference, dtype=np.float64)
    with store:
        _, found = slopes(model, store, {name: value.astype(np.float64) for name, value in adapter.items()}, BATCHES[1:], perturbations)
    gradient = exactly(tiny, adapter, GROUPS[1:], backend=reference)[1]
    for n in (1, 10, 40, 160):
        estimated = dict(estimate(reference, adapter, perturbations, found[:n]))
        flat, truth = (np.concatenate([np.asarray(arrays[name], np.float64).reshape(-1) for name in adapter]) for arrays in (estimated, gradient))
        cosine = flat @ truth / np.linalg.norm(flat) / np.linalg.norm(truth)
        assert cosine == pytest.approx(math.sqrt(n / (n + d + 1)), abs=0.12)
    per_token = truth / GROUPS[1].mask.sum()
    assert flat @ per_token / (per_token @ per_token) == pytest.approx(1, abs=3 * math.sqrt(2 / 160)), "and it is not too long or short"


@each_backend
def test_the_estimate_is_made_tensor_by_tensor(backend):
    """An update never holds a second adapter: of 40 tensors, a few."""
    size, names = 16 * 1024, [f"t{i}" for i in range(40)]
    adapter = {name: backend.arrays.zeros((size,)) for name in names}
    perturbations, optimizer = Perturbations(0, 0, 3), optim.make("sgd", {}, backend)

    def update():
        gradients = estimate(backend, adapter, perturbations, [1.0, 2.0, -0.5])
        assert isinstance(gradients, Iterator)
        optimizer.start_update()
        for name, gradient in gradients:
            optimizer.apply(adapter, name, gradient, 0.1)

    backend.arrays.evaluate(adapter)
    if backend is reference:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            update()
            used = tracemalloc.get_traced_memory()[1] - before - 40 * 4 * size  # zeros were not written to, and so not counted
        finally:
            tracemalloc.stop()
    else:
        with counted_memory() as peak:
            used = peak(update)
    assert used < 12 * 4 * size
    assert np.abs(numbers(adapter["t39"])).max() > 0.1


@needs_mlx
@pytest.mark.parametrize(
    ("width", "vocabulary", "lengths"),
    [(256, 512, [768]), (256, 256, [32] * 60), (64, 8192, [256])],
    ids=["one long row", "many groups", "a wide head"],
)
def test_memory_is_a_forward_pass_and_one_state(tmp_path, width, vocabulary, lengths):
    """Within 5 %: the other side's state, [B, T, D] of the whole update, and nothing else."""
    folder = make_model(tmp_path / "model", tiny_config("qwen2", hidden_size=width, intermediate_size=512, vocab_size=vocabulary, max_position_embeddings=1024))
    batches = [Batch(random_group(vocabulary, [length], seed=i, first_row=i, supervised=1.0)) for i, length in enumerate(lengths)]
    model, store = opened(folder, ops)
    with store, counted_memory() as peak:
        adapter = given(ops, random_adapter(folder))

        def inference() -> None:
            store.expect(model.forward_order())
            states = forward(model, store, adapter, batches)
            with store.open(model.head) as w:
                model.head.loss(w, states, batches, gradient=False)

        alone, mezo = peak(inference), peak(lambda: slopes(model, store, adapter, batches, Perturbations(0, 0)))
    state = 4 * width * sum(lengths)
    assert mezo <= 1.05 * (alone + state), f"{mezo} bytes; a forward pass takes {alone}, a state {state}"
