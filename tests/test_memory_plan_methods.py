"""What a plan says of methods that autodiff reverses, and of weights that NumPy widens, against what a step takes; on NumPy by tracemalloc."""

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import make_model, tiny_config

from mesp_mlx import adapter as adapters
from mesp_mlx import optim, reference
from mesp_mlx.data.group import Group
from mesp_mlx.engine import methods
from mesp_mlx.memory import choose
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory.plan import Workload
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import ALL_STAGES, Store

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "max_position_embeddings": 4096}


def model(folder, layers: int, vocabulary: int, **stored: Any):
    return make_model(folder, tiny_config("llama", num_hidden_layers=layers, vocab_size=vocabulary, **SIZES), **stored)


def traced(folder, load: Workload, strategy: Strategy) -> tuple[int, int]:
    """(planned, traced) peak of the arrays of two updates, nothing of which goes into a file."""
    plan = plans.make(load, strategy, 0)
    settings: Any = SimpleNamespace(method=load.method, grad_checkpoint=load.grad_checkpoint, seed=0, grad_clip=1.0)
    ids = np.random.default_rng(0).integers(0, load.spec.vocab_size, (load.rows, load.width + 1), dtype=np.int32)
    group = Group(ids[:, :-1], ids[:, 1:], np.ones((load.rows, load.width), bool), tuple(range(load.rows)), (load.width,) * load.rows)
    spec: Any = load.spec
    model = build(spec, reference, 2.0, strategy, method=load.method)
    resident = ALL_STAGES if load.method == "backprop" else model.resident_stages()
    entries = read_folder(folder)
    tracemalloc.start()
    try:
        adapter = adapters.initialise(load.spec, load.modules, load.rank, 0, reference)
        optimizer = optim.make("adam", {}, reference)
        with Store(entries, load.spec, reference, resident, strategy.prefetch, strategy.hold) as store:
            for number in range(2):
                optimizer.start_update()
                apply = lambda name, gradient: optimizer.apply(adapter, name, gradient, 1e-5)  # noqa: E731
                methods.update(settings, number, model, store, adapter, [Batch(group)], apply)[1]()
        return plan.arrays_peak_bytes, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def workload(folder, layers: int = -1, **fields: Any) -> Workload:
    spec = load_spec(read_config(folder))
    return Workload(spec, tuple(adapters.choose_modules(spec, layers)), backend="numpy", **fields)


def test_weights_that_numpy_widens(tmp_path):
    """12 layers in bfloat16: all in memory, they take twice what the file takes."""
    folder = model(tmp_path, 12, 2048, bits=None, dtype="bfloat16")
    load = workload(folder)
    planned, found = traced(folder, load, choose.fastest(load))
    weights = sum(layout.bytes for layouts in load.weights.values() for layout in layouts) + load.table.bytes
    assert planned > 2 * weights and found <= planned <= 1.15 * found
    assert plans.make(load, choose.least(load), 0).read_bytes < 4 * weights, "what is read is counted as it is stored"


@pytest.mark.parametrize("more", [{"method": "backprop"}, {"method": "backprop", "grad_checkpoint": True}, {"method": "mebp"}], ids=str)
@pytest.mark.parametrize(("layers", "vocabulary", "width", "rows"), [(3, 16384, 128, 1), (6, 1024, 512, 1)], ids=str)
def test_methods_that_autodiff_reverses(tmp_path, layers, vocabulary, width, rows, more):
    folder = model(tmp_path, layers, vocabulary)
    load = workload(folder, width=width, rows=rows, **more)
    planned, found = traced(folder, load, choose.fastest(load))
    assert found <= planned * 1.01 and planned <= 1.2 * found


def test_backprop_keeps_the_trained_layers_alone_and_weights_once(tmp_path):
    folder = model(tmp_path, 6, 1024)
    peaks = [plans.make(workload(folder, layers, method="backprop", width=512), Strategy(), 0).arrays_peak_bytes for layers in (2, 4, 6)]
    assert peaks[1] - peaks[0] == pytest.approx(peaks[2] - peaks[1]) and peaks[2] > 1.8 * peaks[0]
    load = workload(folder, method="backprop", width=512)
    assert plans.make(load, choose.fastest(load), 0).arrays_peak_bytes == plans.make(load, Strategy(), 0).arrays_peak_bytes
