"""Depth costs a generic model nothing but its adapter: with four times the layers the peak of an update grows by the adapter's bytes, or by none at all."""

import gc
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from backends import mx, ops
from engines import SCALE, random_group

from mesp_mlx.engine import methods
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.stages import Batch
from mesp_mlx.stream.run_file import RunFile, fetch
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.shelves import replace, shelves
from mesp_mlx.stream.store import Store

pytest.importorskip("mlx_lm")

from test_model_generic import spec_of  # noqa: E402

from mesp_mlx.config import Settings  # noqa: E402
from mesp_mlx.model import generic, generic_truth, samples  # noqa: E402

RANK, TOKENS = 4, 96
STATE_BYTES = 4 * TOKENS * 64
AHEAD_BYTES = 9 * STATE_BYTES  # MLX runs up to ten operations ahead of the one that frees memory, now more of them, now less
ROUNDING_BYTES = 4096
# What each of them is here for.
TYPES = {
    "llama": "attention and an MLP",
    "qwen3_next": "gated delta, attention and experts",
    "mamba2": "a state space",
    "deepseek_v3": "latent attention, dense MLPs, then experts",
    "gemma3n": "inputs of each layer's own, keys and values shared",
}
FAST = ("llama", "mamba2")


def deepened(model_type: str, layers: int) -> dict[str, Any]:
    """Its small configuration with so many layers: what it says of each of them is repeated."""

    def deeper(config: dict[str, Any]) -> dict[str, Any]:
        count = config.get("num_hidden_layers")
        changed = {"num_hidden_layers": layers, "mlp_only_layers": [], "num_kv_shared_layers": layers // 2}
        repeated = {name: (value * layers)[:layers] for name, value in config.items() if count and isinstance(value, list) and len(value) == count}
        inner = {name: deeper(value) for name, value in config.items() if isinstance(value, dict)}
        return config | inner | repeated | {name: value for name, value in changed.items() if name in config}

    return deeper(samples.small_config(model_type))


class Taken(NamedTuple):
    """Bytes over what there was before the model: at the peak of an update, at the most between two stages, and after it; and those of the adapter."""

    peak: int
    between: int
    after: int
    adapter: int


class Peaks(Store):
    """Writes down the most bytes that there were until a stage was closed, and those that were left then."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.found: list[tuple[int, int]] = []

    def free(self, stage: Any, weights: Any) -> None:
        super().free(stage, weights)
        self.found.append((mx.get_peak_memory(), mx.get_active_memory()))
        mx.reset_peak_memory()


def measured(folder: Path, model_type: str, layers: int, in_file: bool) -> Taken:
    """What updates of a model of so many layers take."""
    strategy = Strategy(checkpoints="file", states="file", gradients="applied", adapter="file" if in_file else "memory")
    generic_truth.write_random(folder, deepened(model_type, layers))
    spec, entries, rng = spec_of(folder), read_folder(folder), np.random.default_rng(0)
    modules = spec.choose(spec.num_layers, spec.adaptable_keys())
    settings = Settings(model="any", data="any", grad_clip=0.0)
    batches = [Batch(random_group(spec.vocab_size, (TOKENS,), seed)) for seed in range(2)]
    gc.collect()
    before = mx.get_active_memory()
    model, file = generic.build(spec, entries, ops, SCALE, modules, RANK, strategy), RunFile(folder, 0, ops)
    places = shelves(strategy, file)
    shapes = {f"{module}.lora_{half}": shape for module in modules for half, shape in zip("ab", spec.pair_shapes(module, RANK), strict=True)}
    adapter = {name: places.adapter.put(mx.array((0.1 * rng.normal(size=shape)).astype(np.float32))) for name, shape in shapes.items()}
    mx.eval([value for value in adapter.values() if isinstance(value, mx.array)])

    def apply(name: str, gradient: Any) -> None:
        # Through NumPy, into a buffer of its own: MLX would put it into the gradient's, which may be up to 16 kB larger than what is in it.
        replace(adapter, name, mx.array(np.array(fetch(adapter[name]) - 0.1 * gradient)))

    runs = []
    gc.collect()
    gc.disable()  # nothing may wait for Python to look for cycles
    cache = mx.set_cache_limit(0)  # or an array would be given any buffer that is not much too large
    mx.set_memory_limit(1)  # operations wait for one another, all but entirely: of a stage's peaks the smallest
    try:
        with Peaks(entries, spec, ops) as store:
            for update in range(3):
                store.found.clear()
                _, finish = methods.update(settings, update, model, store, adapter, batches, apply, places)
                finish()
                runs.append(store.found[:])
        peak, between = (max(min(found[i] for found in stage) for stage in zip(*runs, strict=True)) for i in range(2))
        return Taken(peak - before, between - before, mx.get_active_memory() - before, sum(4 * math.prod(shape) for shape in shapes.values()))
    finally:
        mx.set_cache_limit(cache)
        mx.set_memory_limit(1 << 50)
        gc.enable()
        file.close()


@pytest.mark.parametrize("in_file", [False, True], ids=["adapter in memory", "adapter in the file"])
@pytest.mark.parametrize("model_type", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TYPES])
def test_depth_costs_the_adapter_alone(model_type, in_file, tmp_path):
    """Twelve layers more: a state that each of them kept would be twelve states."""
    few, many = (measured(tmp_path / str(layers), model_type, layers, in_file) for layers in (4, 16))
    more = 0 if in_file else many.adapter - few.adapter
    assert many.adapter > 3 * few.adapter
    assert abs(many.after - few.after - more) <= ROUNDING_BYTES
    assert abs(many.between - few.between - more) <= ROUNDING_BYTES
    assert abs(many.peak - few.peak - more) <= AHEAD_BYTES
