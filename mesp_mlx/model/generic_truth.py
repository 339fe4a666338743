"""What a model of mlx-lm's gives when nothing of this program takes part: its loss and gradients by autodiff of the whole; and random models on disk."""

import contextlib
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, load_model

from mesp_mlx.data.group import Group
from mesp_mlx.model.generic import train_mode


def write_random(folder: Path, config: Mapping[str, Any], seed: int = 0) -> Path:
    """Write a random model of a config into folder, in float32, in MLX's layout; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model_class, arguments = _get_classes(dict(config))
    with contextlib.redirect_stdout(io.StringIO()):
        model = model_class(arguments.from_dict(dict(config)))
    model.update(tree_unflatten([(name, _random(name, array, seed)) for name, array in _flat(model.parameters()).items()]))
    mx.save_safetensors(str(folder / "model.safetensors"), _flat(model.parameters()), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def whole_gradients(
    folder: Path, keys: Sequence[str], layers: int, rank: int, scale: float, adapter: Mapping[str, np.ndarray], groups: Sequence[Group]
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients, summed over supervised tokens, of the model in a folder, in float32.

    Args:
        keys, layers: what is adapted, as adapter_config.json says it.
        adapter: its tensors by name, of that rank and scale.
    """

    def loss_of(model: Any) -> mx.array:
        losses = [nn.losses.cross_entropy(model(mx.array(group.ids)), mx.array(group.targets)) * mx.array(group.mask) for group in groups]
        return mx.concatenate([loss.reshape(-1) for loss in losses]).sum()

    with contextlib.redirect_stdout(io.StringIO()):
        model: Any = load_model(folder, trust_remote_code=True)[0]  # no one comes here unasked: architecture.open_spec
    model.set_dtype(mx.float32)
    if not hasattr(model, "_no_grad"):
        nn.Module.__init__(model)  # recurrent_gemma's own __init__ leaves that out
    model.freeze()
    linear_to_lora_layers(model, layers, {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(keys)})
    train_mode(model)  # kernels that are only for inference have no gradient
    trained = set(_flat(model.trainable_parameters()))
    if trained != adapter.keys():
        raise ValueError(f"mlx-lm adapts other tensors: {sorted(trained ^ adapter.keys())[:4]}")
    model.load_weights([(name, mx.array(array)) for name, array in adapter.items()], strict=False)
    loss, gradients = nn.value_and_grad(model, loss_of)(model)
    found = {name: np.array(gradient.astype(mx.float32)) for name, gradient in _flat(gradients).items()}
    return loss.item(), found


def _flat(tree: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(tree))  # type: ignore[arg-type]


def _random(name: str, array: mx.array, seed: int) -> mx.array:
    """Matrices so large that they keep the size of what they multiply; what else there is, near what a new model has."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if not mx.issubdtype(array.dtype, mx.floating):  # packed weights
        return mx.array(rng.integers(0, 2**32, array.shape, dtype=np.uint32)).astype(array.dtype)
    noise = mx.array(rng.standard_normal(array.shape, dtype=np.float32))
    if array.ndim < 2 or array.shape[-1] == 1:
        return array.astype(mx.float32) + 0.1 * noise
    return noise / array.shape[-1] ** 0.5
