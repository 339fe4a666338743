"""Layers that are measured: the curve through what was found, and plans of models that mlx-lm alone knows against what a step of them takes."""

import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
from backends import needs_mlx

from mesp_mlx.memory import measured
from mesp_mlx.memory.measured import Curve, Tried, through

X = (64, 128, 256)
SHORT = (16, 32, 64)  # of what takes a second for every few tokens
MB = 1_000_000


@pytest.mark.parametrize(("base", "line", "square"), [(5000, 300, 0), (0, 300, 12), (90_000, 0, 30), (0, 7, 0)])
def test_a_curve_goes_through_what_lies_on_one(base, line, square):
    found = through(X, [base + line * x + square * x * x for x in X])
    assert found == pytest.approx((base, line, square), abs=1e-3)
    assert found.bytes(3, 1000) == pytest.approx(base + 3 * (line * 1000 + square * 1000**2), abs=10)


@pytest.mark.parametrize("seed", range(20))
def test_a_curve_lies_nowhere_below_what_was_found(seed):
    rng = np.random.default_rng(seed)
    sizes = (10_000 * rng.random() + np.array(X) * rng.random() * 1000 + np.array(X) ** 2 * rng.random() * 10 * (seed % 2)) * (1 + 0.05 * rng.random(3))
    found = through(X, sizes)
    assert all(found.bytes(1, x) >= size - 1 for x, size in zip(X, sizes, strict=True)) and min(found) >= 0


def test_what_adds_next_to_nothing_is_no_square():
    sizes = [300 * x + 0.01 * x * x for x in X]
    assert through(X, sizes).square == 0
    assert through(X[:2], [1, 2]).square == 0 and through(X[:1], [640]) == Curve(0, 10)


def test_each_kind_is_measured_once(monkeypatch):
    monkeypatch.setattr(measured, "peak_bytes", lambda run, waits=True: run())
    asked = []

    def at(layer: int, length: int) -> Tried:
        asked.append((layer, length))
        return Tried(4 * length, 2 * length, lambda: 100 * length, lambda: (layer + 1) * length**2)

    first, other, again = measured.each({"a": "one", "b": "two"}, ["a", "b", "a"], at, X)
    assert first is again and sorted(asked) == [(layer, length) for layer in (0, 1) for length in X]
    assert [fit.kind for fit in (first, other)] == ["one", "two"]
    assert (first.state, first.fresh, first.forward) == (Curve(0, 4), Curve(0, 2), Curve(0, 100))
    assert other.backward == pytest.approx((0, 0, 2), abs=1e-6) and other.grows_with_the_square and first.ahead == 0


@needs_mlx
def test_the_allocators_own_peak():
    import mlx.core as mx

    size = 4 * 512 * 512
    x = mx.random.normal((512, 512))
    mx.eval(x)

    def three() -> mx.array:
        return mx.exp(x) @ mx.exp(-x)

    assert 3 * size <= measured.peak_bytes(three) < 3.1 * size
    limit = mx.set_memory_limit(123 * MB)
    measured.peak_bytes(three)
    assert mx.set_memory_limit(limit) == 123 * MB


MODELS: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 128, "vocab_size": 512},
    "gemma3n": {},
    "qwen3_next": {"hidden_size": 128, "vocab_size": 512},
    "granitemoehybrid": {},
    "deepseek_v2": {},
    "glm4_moe": {"hidden_size": 128, "vocab_size": 512},
    "glm4_moe, packed": {"hidden_size": 128, "vocab_size": 512},
}
MARKS = {"gemma3n": (), "mamba": pytest.mark.slow, "glm4_moe, packed": pytest.mark.slow}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The spec, the tensors and the workload, layers measured, of a small model."""
    made: dict[str, Any] = {}

    def of(name: str):
        if name not in made:
            from samples_truth import make

            from mesp_mlx.model import architecture
            from mesp_mlx.model.samples import small_config

            model_type, _, how = name.partition(", ")
            folder = make(tmp_path_factory.mktemp(model_type), model_type, config=small_config(model_type) | MODELS[name])
            if how:
                from test_model_generic_products import packed

                packed(folder, bits=4, group_size=32)
            spec, entries = architecture.open_folder(folder)
            made[name] = spec, entries, workload(spec)
        return made[name]

    return of


def workload(spec: Any, **fields: Any) -> Any:
    from mesp_mlx import adapter as adapters
    from mesp_mlx.memory.plan import Workload
    from mesp_mlx.model import generic_measured

    return generic_measured.measure(Workload(spec, tuple(adapters.choose_modules(spec)), **{"moments": 0, "clip": False} | fields))


@needs_mlx
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.exhaustive)) for name in MODELS])
@pytest.mark.parametrize("end", ["default", "least"])
def test_the_allocator_peaks_near_what_the_plan_says(model, tmp_path, name, end):
    """At twice the length that was measured. Conservative: what is above is given to MLX, which need not take it."""
    import mlx.core as mx

    from mesp_mlx import ops
    from mesp_mlx.memory import choose
    from mesp_mlx.memory import plan as plans
    from mesp_mlx.memory.strategy import Strategy

    spec, entries, load = model(name)
    load = dataclasses.replace(load, width=256 if spec.max_positions < 512 else 512)
    plan = plans.make(load, choose.least(load) if end == "least" else Strategy(), 0)
    gc.collect()
    mx.synchronize()
    base, limit, cache = mx.get_active_memory(), mx.set_memory_limit(1 << 50), mx.set_cache_limit(4 * MB)
    try:
        mx.reset_peak_memory()
        read = _update(spec, entries, ops, plan, tmp_path, base)
        assert 0.95 <= plan.arrays_peak_bytes / (mx.get_peak_memory() - base) <= 1.3
        assert read == pytest.approx(plan.read_bytes, rel=0.1)
    finally:
        mx.set_memory_limit(limit)
        mx.set_cache_limit(cache)


def _update(spec: Any, entries: Any, backend: Any, plan: Any, folder: Any, base: int) -> int:
    """Make an update under a plan; the bytes of weights that it read."""
    from contextlib import ExitStack, closing
    from types import SimpleNamespace

    from mesp_mlx import adapter as adapters
    from mesp_mlx import optim
    from mesp_mlx.data.group import Group
    from mesp_mlx.engine import methods
    from mesp_mlx.model import architecture
    from mesp_mlx.model.stages import Batch
    from mesp_mlx.stream.run_file import RunFile
    from mesp_mlx.stream.shelves import shelves
    from mesp_mlx.stream.store import Store

    load, strategy = plan.workload, plan.strategy
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (1, load.width + 1), dtype=np.int32)
    group = Group(tokens[:, :-1], tokens[:, 1:], np.ones((1, load.width), bool), (0,), (load.width,))
    settings: Any = SimpleNamespace(method="mesp", grad_checkpoint=False, seed=0, grad_clip=0.0)
    with ExitStack() as stack:
        file = stack.enter_context(closing(RunFile(folder, plan.file_bytes, backend))) if strategy.needs_file else None
        places = shelves(strategy, file)
        adapter = adapters.initialise(spec, load.modules, load.rank, 0, backend, places.adapter)
        optimizer = optim.make("sgd", {}, backend, places.adapter)
        model = architecture.build(spec, entries, backend, 2.0, load.modules, load.rank, strategy, limit_bytes=plan.limit_bytes + base)
        store = stack.enter_context(Store(entries, spec, backend, model.resident_stages(), strategy.prefetch, strategy.hold))
        optimizer.start_update()
        _, finish = methods.update(settings, 0, model, store, adapter, [Batch(group)], lambda name, d: optimizer.apply(adapter, name, d, 1e-5), places)
        finish()
        return store.bytes_read


@needs_mlx
def test_a_plan_names_what_grows_with_the_square(model, monkeypatch):
    from mesp_mlx import plan_report
    from mesp_mlx.memory import plan as plans
    from mesp_mlx.memory.plan import Speeds
    from mesp_mlx.memory.strategy import Strategy
    from mesp_mlx.model import generic
    from mesp_mlx.model.samples import small_config

    square = model("gemma3n")[2]
    monkeypatch.setattr(measured, "LENGTHS", SHORT)
    line = workload(generic.load_spec(small_config("mamba")))
    for load, grows in ((line, False), (square, True)):
        plan = plans.make(load, Strategy(), 0)
        lines = plan_report.body(plan, "")
        assert ("grows with the square of the sequence in Gemma3nDecoderLayer" in lines.get("length", "")) == grows
        assert plan_report.workload_facts(load)["measured"].keys() == {fit.kind for fit in load.measured}
        assert plan.flops > 0 and plan.seconds(Speeds(1e11, 1e9, 1e9)) > 0 and "recomputes" not in plan_report.words(plan)
        peaks = [plans.make(dataclasses.replace(load, width=width), Strategy(), 0).arrays_peak_bytes for width in (1024, 2048, 4096)]
        assert (peaks[2] - peaks[1] > 2.5 * (peaks[1] - peaks[0])) == grows


@needs_mlx
def test_depth_adds_adapters_alone(monkeypatch):
    """The same layers, four times as many: of plain arithmetic, as nothing of a layer is in memory for another."""
    from mesp_mlx import adapter as adapters
    from mesp_mlx.memory import choose
    from mesp_mlx.memory import plan as plans
    from mesp_mlx.model import generic
    from mesp_mlx.model.samples import small_config

    monkeypatch.setattr(measured, "LENGTHS", SHORT)
    few = workload(generic.load_spec(small_config("mamba")), width=64)
    spec = generic.load_spec(small_config("mamba") | {"num_hidden_layers": 16})
    many = dataclasses.replace(few, spec=spec, modules=tuple(adapters.choose_modules(spec)), measured=few.measured[-1:] * 16)
    loads = [dataclasses.replace(few, measured=few.measured[-1:] * 4), many]
    peaks = [(plans.make(load, choose.least(load), 0).arrays_peak_bytes, load.adapter_bytes) for load in loads]
    (low, its), (high, theirs) = peaks
    assert high - low == pytest.approx(theirs - its, rel=0.02)


@needs_mlx
@pytest.mark.parametrize("field", ["keep", "hold", "query_tile", "width_tile", "weight_tile"])
def test_choices_that_mean_nothing_for_autodiff_are_refused(model, field):
    from mesp_mlx import adapter as adapters
    from mesp_mlx import planning, sources
    from mesp_mlx.errors import UserError

    value = {"keep": "all", "hold": False}.get(field, 128)
    settings = sources.load(None, {"model": "m", "data": "d", "backend": "mlx", "strategy": {field: value}})
    spec = model("gemma3n")[0]
    with pytest.raises(UserError, match="reversed by autodiff, which makes no use of that"):
        planning.shaped(settings, spec, adapters.choose_modules(spec), "mlx", 4, True, 1, 64, None)
