"""What the tests of the methods share: one pass of any of them over a model on disk, and the memory it takes."""

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import mx
from engines import SCALE, Gathered

from mesp_mlx.config import VARIANTS
from mesp_mlx.data.group import Group
from mesp_mlx.engine import methods
from mesp_mlx.memory import measure
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import Model, build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.shelves import IN_MEMORY, Shelves
from mesp_mlx.stream.store import Store

# Every exact method but mesp, with the settings that change it.
BASELINES = {name: settings for name, settings in VARIANTS.items() if name not in ("mesp", "mezo")}
# (keys, last layers) of adapters that leave something out.
PARTS: list[tuple[tuple[str, ...] | None, int]] = [(("mlp.down_proj",), 1), (("self_attn.q_proj",), -1), (("mlp.gate_proj", "self_attn.v_proj"), -1), (None, 1)]


DEFAULT = Strategy()


def opened(
    folder: Path, backend: Any, method: str = "mesp", tiled_head: bool = False, dtype: Any = None, store: Any = Store, strategy: Strategy = DEFAULT
) -> tuple[Model, Any]:
    """The model in a folder as a method and a plan take it, and its weights."""
    spec = load_spec(read_config(folder))
    return build(spec, backend, SCALE, strategy, dtype, method, tiled_head), store(read_folder(folder), spec, backend)


def given(backend: Any, adapter: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """An adapter as a backend's arrays."""
    return {name: backend.arrays.asarray(value) for name, value in adapter.items()}


def exact_pass(
    folder: Path,
    backend: Any,
    adapter: Mapping[str, np.ndarray],
    groups: Sequence[Group],
    dropout: Dropout | None = None,
    dtype: Any = None,
    method: str = "mesp",
    tiled_head: bool = False,
    grad_checkpoint: bool = False,
    store: Any = Store,
    shelves: Shelves = IN_MEMORY,
) -> tuple[float, dict[str, np.ndarray], Any]:
    """The summed loss by an exact method, its gradients by adapter tensor name, and the store that was read from."""
    model, opened_store = opened(folder, backend, method, tiled_head, dtype, store)
    sink = Gathered()
    with opened_store:
        run = methods.exact(method, grad_checkpoint, shelves)
        loss = run(model, opened_store, given(backend, adapter), [Batch(group, dropout) for group in groups], sink)
    return loss, {name: np.array(backend.arrays.to_numpy(value)) for name, value in sink.gradients.items()}, opened_store


def exactly(folder: Path, adapter: Mapping[str, np.ndarray], groups: Sequence[Group], dropout: Dropout | None = None, **by: Any) -> tuple[float, Any]:
    """The same in float64, which NumPy alone can: loss and gradients to a dozen digits."""
    return exact_pass(folder, by.pop("backend"), {name: value.astype(np.float64) for name, value in adapter.items()}, groups, dropout, np.float64, **by)[:2]


def without_structure(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Take away every op with a hand-derived backward: what is compared with them must not use them. The rotation of rope remains."""
    structured = ("activations", "attention", "cross_entropy", "gated_mlp", "layer_norm", "lora_linear", "mlp", "rms_norm")
    for module in (getattr(backend, name) for name in structured):
        for name in ("forward", "backward", "apply", "start", "add", "finish", "activate", "activate_with_slope"):
            monkeypatch.setattr(module, name, None, raising=False)


@contextmanager
def counted_memory() -> Iterator[Callable[[Callable[[], Any]], int]]:
    """Gives `peak(run)`: the most bytes of MLX's arrays during a second run, beyond those that were there, as a training process has them."""

    def peak(run: Callable[[], Any]) -> int:
        run()  # what is made once is made
        mx.set_memory_limit(2**36)  # another method's, or another test's, is not this one's
        gc.collect()
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        run()
        return mx.get_peak_memory() - before

    with measure.small_cache("mlx"):
        yield peak


class Counter:
    """A function that counts its calls."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return self.inner(*arguments, **named)


def unsupervised(group: Group) -> Group:
    """The group with nothing to learn."""
    return dataclasses.replace(group, mask=np.zeros_like(group.mask))
