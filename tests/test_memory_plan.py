"""What a plan says, against what a step does: the allocator's peak, bytes from and to disk, evaluations; and the shape of what it says."""

import gc
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import each_backend, needs_mlx
from models import make_model, tool

from mesp_mlx import adapter as adapters
from mesp_mlx import optim, reference
from mesp_mlx.data.group import Group
from mesp_mlx.engine import methods
from mesp_mlx.memory import choose
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory.plan import Plan, Speeds, Workload
from mesp_mlx.memory.strategy import ALL, Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.run_file import RunFile
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.shelves import shelves
from mesp_mlx.stream.store import ALL_STAGES, Store

SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
STRATEGIES = {
    "default": Strategy(),
    "applied": Strategy(gradients="applied"),
    "replay": Strategy(keep="replay"),
    "inputs": Strategy(keep="inputs"),
    "attention": Strategy(keep="attention"),
    "all": Strategy(keep="all", resident=ALL),
    "some resident": Strategy(resident=3, prefetch=2),
    "nothing ahead": Strategy(prefetch=0, hold=False, gradients="spilled"),
    "checkpoints in the file": Strategy(checkpoints="file"),
    "states in the file": Strategy(states="file", group_tokens=1),
    "adapter in the file": Strategy(adapter="file"),
    "kept in the file": Strategy(keep="attention", checkpoints="file", states="file", group_tokens=1),
    "least": None,
    "least, adapter in the file": None,
}
CASES = {"256, adam": (256, 1, 8, "adam"), "512, rank 32": (512, 1, 32, "sgd"), "4 x 128": (128, 4, 4, "sgd"), "256, dropout": (256, 1, 8, "sgd")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), SHAPE)


def workload(folder: Any, case: str, backend: Any, clip: bool = False) -> Workload:
    width, rows, rank, optimizer = CASES[case]
    spec = load_spec(read_config(folder))
    moments = {"sgd": 0, "adam": 2}[optimizer]
    fields = {"backend": backend.arrays.name, "rank": rank, "moments": moments, "clip": clip, "rows": rows, "width": width}
    return Workload(spec, tuple(adapters.choose_modules(spec)), **fields, dropout="dropout" in case)


def planned(load: Workload, name: str) -> Plan:
    strategy = STRATEGIES[name] or choose.least(load, "file" if "adapter" in name else "memory")
    return plans.make(load, strategy, 0)


def step(folder: Any, backend: Any, plan: Plan, tmp_path: Any, steps: int = 2, base_bytes: int = 0) -> dict[str, int]:
    """What the last of some steps under a plan reads, writes and evaluates."""
    load, strategy = plan.workload, plan.strategy
    settings: Any = SimpleNamespace(method=load.method, grad_checkpoint=False, seed=0, grad_clip=1.0 if load.clip else 0.0)
    tokens = np.random.default_rng(0).integers(0, load.spec.vocab_size, (load.rows, load.width + 1), dtype=np.int32)
    group = plan.shape.group_rows
    batches = []
    for first in range(0, load.rows, group):
        part = tokens[first : first + group]
        mask, numbers = np.ones((len(part), load.width), bool), tuple(range(first, first + len(part)))
        drop = Dropout(0, 0, 0.1) if load.dropout else None
        batches.append(Batch(Group(part[:, :-1], part[:, 1:], mask, numbers, (load.width,) * len(part)), drop))

    def apply(name: str, gradient: Any) -> None:
        optimizer.apply(adapter, name, gradient, 1e-5)

    with ExitStack() as stack:
        file = stack.enter_context(closing(RunFile(tmp_path, plan.file_bytes, backend))) if strategy.needs_file else None
        places = shelves(strategy, file)
        adapter = adapters.initialise(load.spec, load.modules, load.rank, 0, backend, places.adapter)
        optimizer = optim.make("adam" if load.moments else "sgd", {}, backend, places.adapter)
        spec: Any = load.spec
        model = build(spec, backend, 2.0, strategy, limit_bytes=plan.limit_bytes + base_bytes, method=load.method)
        resident = ALL_STAGES if load.method == "backprop" else model.resident_stages()
        store = stack.enter_context(Store(read_folder(folder), load.spec, backend, resident, strategy.prefetch, strategy.hold))
        before: list[int] = []
        for number in range(steps):
            before = [store.bytes_read, model.evaluate.count, file.bytes_read if file else 0, file.bytes_written if file else 0]
            optimizer.start_update()
            _, finish = methods.update(settings, number, model, store, adapter, batches, apply, places)
            finish()
        after = [store.bytes_read, model.evaluate.count, file.bytes_read if file else 0, file.bytes_written if file else 0]
        names = ("read", "evaluations", "file read", "file written")
        return {"file": file.peak_bytes if file else 0} | {name: b - a for name, a, b in zip(names, before, after, strict=True)}


@needs_mlx
@pytest.mark.parametrize("case", [case if case == "256, adam" else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES])
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_allocator_peaks_where_the_plan_says(folder, tmp_path, case, name):
    import mlx.core as mx

    from mesp_mlx import ops

    plan = planned(workload(folder, case, ops), name)
    gc.collect()
    base, limit, cache = mx.get_active_memory(), mx.set_memory_limit(1 << 50), mx.set_cache_limit(4_000_000)
    try:
        mx.reset_peak_memory()
        steps = 2 if plan.workload.moments or plan.strategy.resident else 1  # until moments and resident weights are there
        step(folder, ops, plan, tmp_path, steps, base)
        assert plan.arrays_peak_bytes == pytest.approx(mx.get_peak_memory() - base, rel=0.10)
    finally:
        mx.set_memory_limit(limit)
        mx.set_cache_limit(cache)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_a_step_reads_writes_and_evaluates(folder, tmp_path, case, name):
    """Counted on NumPy: both backends walk the same loop. Of the file also what is put there for less than a thousandth: statistics of a sweep."""
    plan = planned(workload(folder, case, reference, clip=STRATEGIES[name] is None or name == "nothing ahead"), name)
    found = step(folder, reference, plan, tmp_path)
    assert found["evaluations"] == plan.evaluations
    of_tokens = 2 * plan.tokens_bytes // 9 * plan.workload.table.bytes // plan.workload.spec.vocab_size
    assert 0 <= plan.read_bytes - found["read"] < 0.2 * of_tokens  # a token that occurs twice is read once
    for key, size in (("file written", plan.spill_written_bytes), ("file read", plan.spill_read_bytes)):
        assert found[key] == pytest.approx(size, rel=5e-3)
    assert found["file"] == pytest.approx(plan.file_bytes, rel=0.1)


def full_size(name: str, layers: int | None = None, adapter: Any = "memory", **fields: Any) -> Plan:
    """The least plan of a real shape, 4 bits in groups of 64, sgd, nothing clipped."""
    shape = tool("make_random_model").SHAPES[name] | {"quantization": {"bits": 4, "group_size": 64}, "torch_dtype": "bfloat16"}
    spec = load_spec(shape | ({"num_hidden_layers": layers} if layers else {}))
    load = Workload(spec, tuple(adapters.choose_modules(spec)), **{"moments": 0, "clip": False} | fields)
    return plans.make(load, choose.least(load, adapter), 0)


PROMISED: list[tuple[str, dict[str, Any], float]] = [
    ("qwen2.5-0.5b", {}, 42),
    ("qwen2.5-0.5b", {"width": 1024}, 72),
    ("qwen2.5-1.5b", {}, 90),
    ("qwen2.5-3b", {}, 140),
    ("qwen2.5-0.5b", {"itemsize": 2}, 34),
    ("qwen2.5-0.5b", {"moments": 2, "adapter": "file"}, 35),
    ("qwen2.5-3b", {"moments": 2, "adapter": "file"}, 90),
    ("llama-3-70b", {"width": 512}, 1100),
    ("llama-3-70b", {"width": 512, "adapter": "file"}, 800),
    ("qwen2.5-3b", {"width": 16384}, 8300),
    ("llama-3-8b", {"width": 8192}, 12750),
]


@pytest.mark.parametrize(("name", "fields", "megabytes"), PROMISED)
def test_the_least_that_was_promised(name, fields, megabytes):
    assert full_size(name, **fields).arrays_peak_bytes <= megabytes * 1e6


def test_depth_adds_adapters_alone():
    few, many = full_size("qwen2.5-0.5b", 8), full_size("qwen2.5-0.5b", 80)
    assert many.arrays_peak_bytes - few.arrays_peak_bytes == many.workload.adapter_bytes - few.workload.adapter_bytes > 0
    assert full_size("qwen2.5-0.5b", 8, "file").arrays_peak_bytes == full_size("qwen2.5-0.5b", 80, "file").arrays_peak_bytes
    few, many = full_size("qwen2.5-0.5b", 8, rank=1), full_size("qwen2.5-0.5b", 80, rank=1)
    layer = sum(layouts[0].bytes for layouts in few.workload.weights.values())
    assert (many.arrays_peak_bytes - few.arrays_peak_bytes) / 72 < 0.02 * layer * 4  # rank 1 in float32 beside 4-bit weights


def test_batch_adds_nothing():
    peaks = [full_size("qwen2.5-0.5b", rows=rows).arrays_peak_bytes for rows in (1, 4, 16)]
    assert max(peaks) < 1.05 * min(peaks)
    reads = [full_size("qwen2.5-0.5b", rows=rows).read_bytes for rows in (1, 16)]
    assert reads[1] < 1.2 * reads[0]  # but for the table's rows of more tokens


def test_length_adds_a_line():
    widths = np.array([512, 1024, 2048, 3072, 4096])
    peaks = np.array([full_size("qwen2.5-0.5b", 4, width=int(width)).arrays_peak_bytes for width in widths])
    square = np.polyfit(widths, peaks, 2)[0]
    assert abs(square) * 4096**2 <= 0.02 * peaks[-1] and peaks[-1] > 3 * peaks[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_table_adds_up(folder, name):
    load = workload(folder, "4 x 128", reference)
    plan = plans.make(load, planned(load, name).strategy, 40_000_000)
    assert sum(plan.by_part().values()) == plan.total_bytes
    for phase, size in plan.by_phase().items():
        listed = sum(tensor.bytes for tensor in plan.tensors if phase in tensor.phases and tensor.part not in ("base", "slack", "tokens"))
        assert listed + plan.moments[phase].ahead_bytes == size
    assert plan.arrays_peak_bytes == max(plan.by_phase().values()) == plan.by_phase()[plan.peak_phase]
    assert all(tensor.bytes >= 0 and tensor.name and tensor.phases for tensor in plan.tensors)


def test_rows_by_hand(folder):
    """Adapters, weights and checkpoints of 3 layers of width 256, counted without the table."""
    plan = planned(workload(folder, "256, adam", reference), "default")
    in_head = [tensor for tensor in plan.tensors if "head" in tensor.phases]
    sizes = {part: sum(tensor.bytes for tensor in in_head if tensor.part == part) for part in ("adapter", "optimizer", "checkpoints")}
    ends = 256 + 256 + 256 + 128 + 256 + 128 + 256 + 256 + 3 * (256 + 768)
    assert sizes == {"adapter": 3 * 8 * ends * 4, "optimizer": 2 * 3 * 8 * ends * 4, "checkpoints": 3 * 256 * 256 * 4}
    packed = 768 * 256 // 2 + 2 * 768 * 256 // 32 * 4
    in_mlp = [tensor for tensor in plan.tensors if "forward mlp" in tensor.phases and tensor.part == "weights"]
    assert sum(tensor.bytes for tensor in in_mlp if tensor.name.startswith("mlp: mlp.")) == 3 * packed


@each_backend
@pytest.mark.parametrize("method", ["mesp", "mebp", "mezo", "backprop"])
def test_every_method_has_a_plan(folder, backend, method):
    spec = load_spec(read_config(folder))
    load = Workload(spec, tuple(adapters.choose_modules(spec, 2)), method=method, backend=backend.arrays.name, rows=3)
    small, large = (plans.make(load, strategy, 0) for strategy in (choose.least(load), choose.fastest(load)))
    assert 0 < small.arrays_peak_bytes <= large.arrays_peak_bytes and small.flops > 0 and large.evaluations > 0
    assert (method == "backprop") == (small.arrays_peak_bytes == large.arrays_peak_bytes)
    assert "checkpoints" not in small.by_part() or method != "mezo"


def test_reading_hides_behind_computing():
    plan = full_size("qwen2.5-0.5b")
    slow_disk, no_disk = Speeds(1e11, 1e8, 1e8), Speeds(1e11, 1e15, 1e15)
    ahead = plans.make(plan.workload, Strategy(gradients="applied"), 0)
    behind = plans.make(plan.workload, Strategy(gradients="applied", prefetch=0), 0)
    reading = ahead.read_bytes / 1e8
    assert ahead.seconds(slow_disk) == pytest.approx(max(reading, ahead.compute_seconds(slow_disk)))
    assert behind.seconds(slow_disk) == pytest.approx(reading + behind.compute_seconds(slow_disk))
    assert ahead.seconds(no_disk) == pytest.approx(behind.seconds(no_disk))
