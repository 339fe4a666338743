"""What the engine's tests share: a model on disk, an adapter with a B that is not zero, rows of random tokens, and one pass of the loop."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx import adapter as adapters
from mesp_mlx.data.group import Group
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.model import weights
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import Store

SCALE = 2.0


def random_adapter(folder: Path, rank: int = 4, num_layers: int = -1, keys: Sequence[str] | None = None, seed: int = 1) -> dict[str, np.ndarray]:
    """An adapter of the model in a folder with both A and B random: a B of zero hides errors in dA."""
    spec, rng = load_spec(read_config(folder)), np.random.default_rng(seed)
    shapes = adapters.shapes(spec, adapters.choose_modules(spec, num_layers, keys), rank)
    return {name: (0.1 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def random_group(vocabulary: int, lengths: Sequence[int], seed: int = 2, supervised: float = 0.7, first_row: int = 0, width: int | None = None) -> Group:
    """Rows of random tokens, of so many positions each, padded to the longest (or to width)."""
    rng, width = np.random.default_rng(seed), width or max(lengths)
    tokens = rng.integers(0, vocabulary, (len(lengths), width + 1), dtype=np.int32)
    mask = (rng.random((len(lengths), width)) < supervised) & (np.arange(width) < np.array(lengths)[:, None])
    return Group(tokens[:, :-1], tokens[:, 1:], mask, tuple(range(first_row, first_row + len(lengths))), tuple(lengths))


def one_pass(
    folder: Path, backend: Any, adapter: Mapping[str, np.ndarray], groups: Sequence[Group], dropout: Dropout | None = None, dtype: Any = None
) -> tuple[float, dict[str, np.ndarray], Store]:
    """The summed loss, its gradients by adapter tensor name, and the store that was read from."""
    spec, entries = load_spec(read_config(folder)), read_folder(folder)
    weights.check(spec, entries)
    model, sink = build(spec, backend, SCALE, dtype=dtype), Gathered()
    arrays = {name: backend.arrays.asarray(value) for name, value in adapter.items()}
    with Store(entries, spec, backend) as store:
        loss = loss_and_gradients(model, store, arrays, [Batch(group, dropout) for group in groups], sink)
    return loss, {name: np.array(backend.arrays.to_numpy(value)) for name, value in sink.gradients.items()}, store


class Gathered:
    """A sink that keeps what it was given, the gradients of the summed loss: of a tensor that several stages use, their sum."""

    def __init__(self) -> None:
        self.gradients: dict[str, Any] = {}

    def check(self, loss: float) -> None:
        assert np.isfinite(loss)

    def put(self, gradients: dict[str, Any]) -> None:
        self.gradients |= {name: self.gradients[name] + value if name in self.gradients else value for name, value in gradients.items()}

    def finish(self) -> None:
        """Nothing is applied."""


class RecordingStore(Store):
    """A store that writes down what is loaded and freed."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.events: list[str] = []

    def load(self, stage: Any) -> Any:
        self.events.append(f"load {stage.name}")
        return super().load(stage)

    def free(self, stage: Any, weights: Any) -> None:
        self.events.append(f"free {stage.name}")
        super().free(stage, weights)


def worst_error(found: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> float:
    """The largest, over tensors, of max|difference| / max|truth|; not a number where either is not."""
    assert found.keys() == truth.keys()
    return max((float(np.abs(found[name] - truth[name]).max() / np.abs(truth[name]).max()) for name in truth), key=lambda e: (np.isnan(e), e))


def autodiff_of_mlx_lm(folder: Path, adapter: Mapping[str, np.ndarray], groups: Sequence[Group], float64: bool = False) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients, summed over the supervised tokens, of the same model by mlx-lm's modules and MLX's autodiff.

    In float32 with the weights as they are stored, or in float64 with plain ones: for a model so large that float32 is no truth to judge float32 by.
    MLX's CPU device, with the BLAS it brings, adds up the 49,152 products of the demo model's head one by one, and is 2e-4 off.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import dequantize_model, load_model

    def loss_of(model: Any) -> mx.array:
        losses = [nn.losses.cross_entropy(model(mx.array(group.ids)), mx.array(group.targets)) * mx.array(group.mask) for group in groups]
        return mx.concatenate([loss.reshape(-1) for loss in losses]).sum()

    with mx.stream(mx.cpu if float64 else mx.default_device()):
        model: Any = load_model(folder)[0]
        model.set_dtype(mx.float32)
        model = dequantize_model(model) if float64 else model
        model.freeze()
        rank = next(iter(adapter.values())).shape[1]
        keys = list(load_spec(read_config(folder)).adaptable_keys())
        linear_to_lora_layers(model, len(model.layers), {"rank": rank, "scale": SCALE, "dropout": 0.0, "keys": keys})
        model.load_weights([(name, mx.array(value)) for name, value in adapter.items()], strict=False)
        model.set_dtype(mx.float64 if float64 else mx.float32)
        loss, gradients = nn.value_and_grad(model, loss_of)(model)
        return loss.item(), {name: np.array(value) for name, value in tree_flatten(gradients)}
