"""Tensor by tensor equals mlx.optimizers over the whole tree; the NumPy twins equal both."""

import copy
import importlib
import math

import numpy as np
import pytest
from backends import each_backend

from mesp_mlx import optim, reference
from mesp_mlx.stream.run_file import RunFile, fetch
from mesp_mlx.stream.shelves import IN_MEMORY

UPDATES = 20
SHAPES = {"model.layers.0.a.lora_a": (16, 4), "model.layers.0.a.lora_b": (4, 24), "model.layers.1.b.lora_a": (7, 3)}
CASES = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.01}),
    ("sgd", {"momentum": 0.9, "dampening": 0.3}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {}),
    ("adam", {"bias_correction": False, "betas": [0.8, 0.95], "eps": 1e-6}),
    ("adamw", {}),
    ("adamw", {"weight_decay": 0.1}),
    ("adamw", {"weight_decay": 0.1, "bias_correction": False}),
]
IDS = [f"{name}-{'-'.join(options) or 'defaults'}" for name, options in CASES]


def start():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(update):
    """Gradients of many sizes, another set for each update."""
    rng = np.random.default_rng(100 + update)
    return {name: (rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 1, shape)).astype(np.float32) for name, shape in SHAPES.items()}


def learning_rate(update):
    return 0.03 * (1 + math.cos(update / 7))


def apply(optimizer, adapter, given, rate):
    """One update, tensor by tensor."""
    optimizer.start_update()
    for tensor, gradient in given.items():
        optimizer.apply(adapter, tensor, gradient, rate)


def run(name, options, backend, shelf=IN_MEMORY.adapter):
    optimizer = optim.make(name, options, backend, shelf)
    adapter = {tensor: shelf.put(backend.arrays.asarray(array)) for tensor, array in start().items()}
    for update in range(UPDATES):
        apply(optimizer, adapter, {tensor: backend.arrays.asarray(array) for tensor, array in gradients(update).items()}, learning_rate(update))
    assert optimizer.updates == UPDATES
    return {tensor: np.array(backend.arrays.to_numpy(fetch(array))) for tensor, array in adapter.items()}


def run_mlx_optimizer(name, options):
    """mlx.optimizers as its manual says: the whole tree at once."""
    mx = pytest.importorskip("mlx.core")
    from mlx import optimizers

    kind = {"sgd": optimizers.SGD, "adam": optimizers.Adam, "adamw": optimizers.AdamW}[name]
    ours = {"bias_correction": True} if name == "adam" else {"bias_correction": True, "weight_decay": 0.0} if name == "adamw" else {}
    optimizer = kind(learning_rate=0.1, **(ours | options))
    adapter = {tensor: mx.array(array) for tensor, array in start().items()}
    for update in range(UPDATES):
        optimizer.learning_rate = learning_rate(update)
        adapter = optimizer.apply_gradients({tensor: mx.array(array) for tensor, array in gradients(update).items()}, adapter)
        mx.eval(adapter, optimizer.state)
    return {tensor: np.array(array) for tensor, array in adapter.items()}


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_one_tensor_at_a_time_gives_the_bits_of_mlx_optimizers(name, options):
    pytest.importorskip("mlx.core")
    got, want = run(name, options, importlib.import_module("mesp_mlx.ops")), run_mlx_optimizer(name, options)
    for tensor in SHAPES:
        np.testing.assert_array_equal(got[tensor], want[tensor])


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_twin_equals_mlx_optimizers(name, options):
    got, want, first = run(name, options, reference), run_mlx_optimizer(name, options), start()
    for tensor in SHAPES:
        assert got[tensor].dtype == np.float32
        # of what the updates changed, not of the parameter, which would hide a wrong small update
        assert np.abs(got[tensor] - want[tensor]).max() <= 1e-6 * np.abs(want[tensor] - first[tensor]).max()


def test_first_update_of_adam_with_bias_correction_is_the_learning_rate():
    optimizer = optim.make("adamw", {}, reference)
    adapter = {"w": np.zeros(3, np.float32)}
    apply(optimizer, adapter, {"w": np.array([5.0, -0.01, 2.0], np.float32)}, 0.1)
    np.testing.assert_allclose(adapter["w"], [-0.1, 0.1, -0.1], rtol=1e-4)


@pytest.mark.parametrize("backend_name", ["mesp_mlx.ops", "mesp_mlx.reference"])
def test_stage_by_stage_counts_one_update(backend_name):
    if backend_name == "mesp_mlx.ops":
        pytest.importorskip("mlx.core")
    backend = importlib.import_module(backend_name)
    want, optimizer = run("adamw", {}, backend), optim.make("adamw", {}, backend)
    adapter = {tensor: backend.arrays.asarray(array) for tensor, array in start().items()}
    for update in range(UPDATES):
        optimizer.start_update()
        for tensor, gradient in reversed(gradients(update).items()):
            optimizer.apply(adapter, tensor, backend.arrays.asarray(gradient), learning_rate(update))
    for tensor in SHAPES:
        np.testing.assert_array_equal(backend.arrays.to_numpy(adapter[tensor]), want[tensor])


@each_backend
@pytest.mark.parametrize(("name", "options"), [CASES[0], CASES[2], CASES[8]], ids=[IDS[0], IDS[2], IDS[8]])
def test_moments_in_the_run_s_file_change_no_bit(tmp_path, backend, name, options):
    """Adapter and moments lie there and are written over in place: the file does not grow by an update, and nothing else stays in it."""
    want, file = run(name, options, backend), RunFile(tmp_path, 0, backend)
    got = run(name, options, backend, file)
    for tensor in SHAPES:
        np.testing.assert_array_equal(got[tensor], want[tensor])
    moments = {"sgd": int("momentum" in options)}.get(name, 2)
    assert file.peak_bytes == file.size_bytes <= len(SHAPES) * 4096 * (1 + (moments > 0)) and file.used_bytes == 0
    tensors = sum(4 * math.prod(shape) for shape in SHAPES.values())
    assert file.bytes_written == tensors * (1 + moments + UPDATES * (1 + moments))
    file.close()


def test_a_copied_state_goes_on_with_the_same_bits():
    want, optimizer, adapter = run("adamw", {}, reference), optim.make("adamw", {}, reference), start()
    for update in range(UPDATES):
        if update == 8:
            resumed = optim.make("adamw", {}, reference)
            resumed.updates, resumed.state = optimizer.updates, copy.deepcopy(optimizer.state)
            optimizer = resumed
        apply(optimizer, adapter, gradients(update), learning_rate(update))
    for tensor in SHAPES:
        np.testing.assert_array_equal(adapter[tensor], want[tensor])


def test_tensors_without_a_gradient_stay():
    adapter = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    optimizer = optim.make("adam", {}, reference)
    apply(optimizer, adapter, {"a": np.ones(2, np.float32)}, 0.1)
    assert adapter["a"][0] != 1 and adapter["b"][0] == 1 and list(optimizer.state) == ["a"]


def test_never_holds_a_second_adapter():
    mx = pytest.importorskip("mlx.core")
    from mesp_mlx import ops

    names, size = [f"t{i}" for i in range(40)], 64 * 1024
    adapter = {name: mx.ones((size,)) for name in names}
    optimizer = optim.make("adamw", {}, ops)
    apply(optimizer, adapter, {name: mx.ones((size,)) for name in names}, 0.1)
    grads = {name: mx.ones((size,)) for name in names}
    mx.eval(adapter, grads)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    apply(optimizer, adapter, grads, 0.1)
    assert mx.get_peak_memory() - before <= 12 * 4 * size  # one tensor's new value, state and temporaries, of 40


def test_clipping_is_that_of_mlx_optimizers():
    mx = pytest.importorskip("mlx.core")
    from mlx.optimizers import clip_grad_norm

    for limit in (0.5, 1.0, 1e6):
        grads = gradients(0)
        clipped, norm = clip_grad_norm({name: mx.array(array) for name, array in grads.items()}, limit)
        ours = math.sqrt(sum(reference.arrays.sum_squares(array) for array in grads.values()))
        assert ours == pytest.approx(norm.item(), rel=1e-6)
        factor = optim.clip_factor(ours, limit)
        assert factor == (1.0 if limit == 1e6 else pytest.approx(limit / norm.item(), rel=1e-6))
        for name, array in grads.items():
            np.testing.assert_allclose(array * np.float32(factor), np.array(clipped[name]), rtol=1e-6)


def test_no_limit_and_no_gradient_need_no_clipping():
    assert optim.clip_factor(1e9, 0) == 1.0
    assert optim.clip_factor(0.0, 1.0) == 1.0
