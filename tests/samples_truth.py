"""The truth for any architecture of mlx-lm: a small random model on disk, and the gradients of its adapter by MLX's autodiff of the whole model."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx.model.samples import small_config

SCALE = 2.0
NO_LORA = {  # mlx-lm's model reads the weights of these itself, so that its LoRA can't wrap them
    "gemma3n": {"altup.correction_coefs", "altup.prediction_coefs"},
    "kimi_k3": {"mlp_res_proj", "self_attention_res_proj"},
}


def build(config: Mapping[str, Any]) -> Any:
    """mlx-lm's own model of a config, as it is before weights are loaded."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(dict(config))
    return model_class(arguments.from_dict(dict(config)))


def make(folder: Path, model_type: str, seed: int = 0, bits: int | None = None, config: Mapping[str, Any] | None = None) -> Path:
    """Write a random model of a type into folder as mlx-lm writes one, config.json and model.safetensors, and return the folder.

    The weights are float32, or quantised by that many bits in groups of 32 wherever mlx_lm.convert would. They depend on the seed alone. `config` stands in
    for `small_config(model_type)`.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import quantize_model, save_config, save_model

    config = dict(config or small_config(model_type))
    mx.random.seed(seed)  # what a new module starts as
    model = build(config)
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    weights = {name: _random(name, value, seed, name in tables) for name, value in tree_flatten(model.parameters())}
    model.load_weights(list((model.sanitize(weights) if hasattr(model, "sanitize") else weights).items()))
    if bits is not None:
        model, config = quantize_model(model, config, 32, bits)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    return folder


def load(folder: Path) -> Any:
    """The model in a folder, by mlx-lm's loader, in float32, frozen and in training mode: custom kernels have no gradient."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import load_model

    model: Any = load_model(folder)[0]
    if not hasattr(model, "_no_grad"):
        nn.Module.__init__(model)  # recurrent_gemma's own __init__ leaves that out
    model.set_dtype(mx.float32)
    model.freeze()
    model.train()
    return model


def linear_keys(model: Any) -> list[str]:
    """What of a model's layers can be adapted by LoRA, embeddings apart: paths inside a layer, as mlx-lm's `keys`."""
    import mlx.nn as nn
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    linear = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
    found = {key for layer in model.layers for key, module in layer.named_modules() if isinstance(module, linear) or hasattr(module, "to_lora")}
    return sorted(found - NO_LORA.get(model.model_type, set()))


def adapt(model: Any, rank: int, seed: int, keys: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Put LoRA, with A and B random, on a model by mlx-lm's linear_to_lora_layers, and return the adapter by tensor name. keys None: `linear_keys(model)`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    keys = linear_keys(model) if keys is None else list(keys)
    linear_to_lora_layers(model, len(model.layers), {"rank": rank, "scale": SCALE, "dropout": 0.0, "keys": keys})
    shapes: Any = tree_flatten(model.trainable_parameters())
    adapter = {name: (0.1 if ".lora_a" in name else 0.01) * _noise(name, value.shape, seed) for name, value in shapes}
    model.load_weights([(name, mx.array(value)) for name, value in adapter.items()], strict=False)
    return adapter


def autodiff(
    folder: Path, ids: np.ndarray, targets: np.ndarray, mask: np.ndarray, rank: int = 4, seed: int = 1, keys: Sequence[str] | None = None
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(loss, gradients, adapter) of the model in a folder: ids, targets and mask are [B, T], and the loss is summed over the positions of the mask.

    Gradients and adapter have the names of the adapter's tensors, in mlx-lm's shapes, all float32. keys None adapts every linear layer and expert.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    def loss_of(model: Any) -> mx.array:
        return (nn.losses.cross_entropy(model(mx.array(ids)), mx.array(targets)) * mx.array(mask)).sum()

    model = load(folder)
    adapter = adapt(model, rank, seed, keys)
    loss, gradients = nn.value_and_grad(model, loss_of)(model)
    return loss.item(), {name: np.array(value) for name, value in tree_flatten(gradients)}, adapter


def _noise(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    return np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)


def _random(name: str, value: Any, seed: int, table: bool) -> Any:
    """A weight in place of the one that a new module has: matrices whose products are of their inputs' size, and what else there is (norms, biases, gates)
    near what it starts as. A table's rows are larger: the first norm's gradient would grow as they shrink."""
    import mlx.core as mx

    if not mx.issubdtype(value.dtype, mx.floating):  # packed weights
        return mx.array(np.random.default_rng([seed, zlib.crc32(name.encode())]).integers(0, 2**32, value.shape, dtype=np.uint32)).astype(value.dtype)
    noise = mx.array(_noise(name, value.shape, seed))
    if name.endswith(".signs"):
        return mx.sign(noise)
    if value.ndim < 2 or name.endswith("A_log"):
        return (value + 0.1 * noise).astype(mx.float32)
    inputs = value.shape[-1] if value.shape[-1] > 1 else value[0].size  # a convolution of each channel by itself is [channels, width, 1]
    return noise * ((2 if table else 1) / inputs**0.5)
