"""Any architecture of mlx-lm, as stages for the loop: its own modules, built from the config, with weights that come and go.

The model is mlx-lm's, made without any weight being computed. Recorders stand in place of its layers (see generic_walk), a look at its graph says what each
call needs (see generic_wiring), and stages differentiate one call at a time (see generic_stages).
"""

import contextlib
import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mesp_mlx.errors import UserError
from mesp_mlx.memory.strategy import DEFAULT, Strategy
from mesp_mlx.model.quantization import Quantization, quantized_as
from mesp_mlx.stream.safetensors import Entry

WIDTHS = ("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim", "dim", "emb_dim")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
DTYPES = {"float16": "F16", "bfloat16": "BF16"}
ANY_LENGTH = 1 << 30


@dataclass(frozen=True)
class GenericSpec:
    """The shape of a model as mlx-lm builds it; what ModelSpec is to structured families. `skeleton` is the model, whose weights are never computed."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    tied: bool
    dtype: str
    quantization: Mapping[str, Any]
    config: Mapping[str, Any]
    source: str
    skeleton: Any
    found: Mapping[str, tuple[int, ...]]

    def made(self) -> Any:
        """The model once more, its weights not computed."""
        return _build(self.config, self.source, self.found)

    def quantized_as(self, module: str) -> Quantization | None:
        """How the config packs a module, or None when it names it unquantised, it is of a kind that is never packed, or nothing is."""
        found, setting = self._modules.get(module), quantized_as(self.quantization, module)
        if setting is None or module in self.quantization or found is None or "scales" in found:
            return setting
        return setting if hasattr(found, "to_quantized") and found.weight.shape[-1] % setting.group_size == 0 else None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and logical shape (as if nothing were quantised) of every tensor of the model."""
        from mesp_mlx.model.generic_walk import parameters

        return {name: container[key].shape for name, (container, key) in parameters(self.skeleton).items()}

    def adaptable_keys(self) -> tuple[str, ...]:
        """Names inside a layer of all linears, of all kinds of layers, in the order in which layers first have them."""
        return tuple(dict.fromkeys(key for layer in self._adaptable for key in layer))

    def outside_keys(self) -> tuple[str, ...]:
        """Full names of what else can be adapted: embeddings, and linears beside the layers."""
        paths = set(self._layers.values())
        named = ((name, module) for name, module in self.skeleton.named_modules() if _pair(module, 1))
        return tuple(name for name, _ in named if not any(name.startswith(f"{path}.") for path in paths))

    def choose(self, num_layers: int, keys: Sequence[str]) -> list[str]:
        """Full names of the modules of these keys in the last num_layers layers, then of those beside the layers: the order in which mlx-lm adapts them."""
        layers = list(zip(self._layers.values(), self._adaptable, strict=True))[self.num_layers - num_layers :]
        inside = [f"{path}.{key}" for path, adaptable in layers for key in adaptable if key in keys]
        return inside + [name for name in self.outside_keys() if name in keys]

    def pair_shapes(self, module: str, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a module's lora_a and lora_b."""
        pair = _pair(self._modules[module], rank)
        assert pair is not None
        return pair

    def layer_of(self, module: str) -> int:
        """The layer that a module's full name puts it in; -1 beside the layers."""
        return next((i for i, path in enumerate(self._layers.values()) if module.startswith(f"{path}.")), -1)

    @cached_property
    def _modules(self) -> dict[str, Any]:
        return dict(self.skeleton.named_modules())

    @cached_property
    def _layers(self) -> dict[int, str]:
        """Each layer's path by its identity, in the model's order."""
        return layer_paths(self.skeleton)

    @cached_property
    def _adaptable(self) -> list[list[str]]:
        """What can be adapted in each layer, in mlx-lm's order."""
        import mlx.nn as nn

        layers = [self._modules[path] for path in self._layers.values()]
        found = [[key for key, module in layer.named_modules() if _pair(module, 1) and not isinstance(module, nn.Embedding)] for layer in layers]
        keys = {key for layer in found for key in layer}
        if not self._runs(keys) and self._runs(set()):
            keys = {key for key in keys if self._runs({key})}  # not linears whose weight the model reads by itself: mlx-lm can't adapt them either
        return [[key for key in layer if key in keys] for layer in found]

    def _runs(self, keys: set[str]) -> bool:
        """Whether the forward still runs with these adapted. Nothing is computed."""
        import mlx.core as mx
        from mlx_lm.tuner.utils import linear_to_lora_layers

        model = self.made()
        linear_to_lora_layers(model, self.num_layers, {"rank": 1, "scale": 1.0, "dropout": 0.0, "keys": keys})
        try:
            model.train()(mx.array([[1, 2, 3, 4]]))
        except Exception:
            return False
        return True


def load_spec(config: Mapping[str, Any], source: str = "config.json", found: Mapping[str, tuple[int, ...]] | None = None) -> GenericSpec:
    """The spec of a config whose model_type mlx-lm knows, or whose `model_file`, beside `source`, holds the model.

    found: the shapes of the tensors on disk by name, where they are known: some models have no head of their own if none is there.

    Raises:
        UserError: mlx-lm does not know the type, or can't build the model.
    """
    import mlx.nn as nn

    skeleton = _build(config, source, found or {})
    paths = layer_paths(skeleton)
    tables = {name: module.weight.shape for name, module in skeleton.named_modules() if isinstance(module, nn.Embedding)}
    vocab, width = next(iter(sorted(tables.values(), reverse=True)), (0, 0))
    outside = [module.weight.shape[0] for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)]
    dtype = _value(config, ("torch_dtype", "dtype"), "float32")
    return GenericSpec(
        model_type=str(config.get("model_type")),
        num_layers=len(paths),
        hidden_size=int(_value(config, WIDTHS, width)),
        vocab_size=int(_value(config, ("vocab_size",), vocab)),
        max_positions=int(_value(config, LENGTHS, ANY_LENGTH)),
        tied=vocab not in outside,
        dtype=DTYPES.get(str(dtype).removeprefix("torch."), "F32"),
        quantization=config.get("quantization") or {},
        config=dict(config),
        source=source,
        skeleton=skeleton,
        found=found or {},
    )


def layer_paths(model: Any) -> dict[int, str]:
    """The path of each of a model's decoder layers, by its identity."""
    from mesp_mlx.model.generic_walk import children

    found = {id(value): path for _, _, path, value in children(model)}
    return {id(layer): found[id(layer)] for layer in model.layers}


def build(
    spec: GenericSpec,
    entries: Mapping[str, Entry],
    backend: Any,
    lora_scale: float,
    modules: Sequence[str],
    rank: int,
    strategy: Strategy = DEFAULT,
    dtype: Any = None,
    limit_bytes: int | None = None,
    tiled_head: bool = True,
    products: bool = True,
) -> Any:
    """The stages of a model, as `model.build` gives those of structured families.

    Args:
        spec: its shape.
        entries: its tensors, under mlx-lm's names.
        backend: `mesp_mlx.ops`.
        lora_scale: mlx-lm's scale of the LoRA terms.
        modules: full names of what is adapted.
        rank: of the adapter.
        strategy: the choices of the plan.
        dtype: of activations; float32 unless given.
        limit_bytes: where MLX waits before it allocates more.
        tiled_head: whether the loss is taken in tiles where the model allows it.
        products: whether a CPU device multiplies as generic_products says. Otherwise no stage computes anything when it is called.

    Raises:
        UserError: tensors are missing or do not fit; or the model can't be walked layer by layer: why.
    """
    from mesp_mlx.model import generic_build

    return generic_build.build(spec, entries, backend, lora_scale, modules, rank, strategy, dtype, limit_bytes, tiled_head, products)


def train_mode(model: Any) -> None:
    """A model as it is trained: what its code does only in inference is off, and so is dropout of its own, which is drawn anew whenever a layer is called."""
    import mlx.nn as nn

    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d):
            module.eval()


def _build(config: Mapping[str, Any], source: str, found: Mapping[str, tuple[int, ...]]) -> Any:
    """mlx-lm's model of a config, its weights not computed, as it is once it has seen what tensors were found."""
    import mlx.core as mx
    from mlx_lm.utils import _decode_tagged_floats

    said, file = io.StringIO(), config.get("model_file")
    try:
        with contextlib.redirect_stdout(said):
            kind, arguments = model_classes(config, source)
            model = kind(arguments.from_dict(_decode_tagged_floats(dict(config))))
            if not model.layers:
                raise ValueError("it has no layers")
            if found and "lm_head.weight" not in found and "lm_head" in model and hasattr(model, "sanitize"):
                model.sanitize({name: mx.zeros(shape) for name, shape in found.items()})  # never computed
        return model
    except (Exception, SystemExit) as error:  # a module of mlx-lm's that misses a package says so and ends the process
        why = said.getvalue().strip() if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        whose, advice = ("its model_file", f"Correct {file}") if file else ("mlx-lm", "Update mlx-lm, or give a model that it knows")
        raise UserError(f"reading {source}: {whose} can't build a model of model_type {config.get('model_type')!r} ({why}). {advice}.") from None


def model_classes(config: Mapping[str, Any], source: str) -> tuple[Any, Any]:
    """Model and ModelArgs: mlx-lm's, or those of the config's `model_file`, beside `source`. Its code is run: `architecture.open_spec` asks whether it may."""
    from mlx_lm.utils import _get_classes

    file = config.get("model_file")
    if not file:
        return _get_classes(dict(config))
    described = importlib.util.spec_from_file_location("model_file", Path(source).parent / str(file))
    if described is None or described.loader is None:
        raise ValueError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module.Model, module.ModelArgs


def _pair(module: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shapes of lora_a and lora_b of a module that mlx-lm can adapt and load again, or None."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.switch_layers import SwitchLinear

    if hasattr(module, "to_lora"):
        adapted = module.to_lora(r=rank, scale=1.0, dropout=0.0)
        pair = adapted.get("lora_a"), adapted.get("lora_b")
        return (pair[0].shape, pair[1].shape) if all(isinstance(half, mx.array) for half in pair) else None
    if not isinstance(module, nn.Linear | nn.Embedding | SwitchLinear):
        return None
    *experts, rows, width = module.weight.shape
    if experts:
        return (*experts, rank, width), (*experts, rows, rank)
    return ((width, rank), (rank, rows)) if isinstance(module, nn.Linear) else ((rows, rank), (rank, width))


def _value(config: Mapping[str, Any], keys: Sequence[str], default: Any) -> Any:
    """The first of these keys that a config, or its text_config, has."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in keys:
            if part.get(key) is not None and not (isinstance(part[key], float) and not math.isfinite(part[key])):
                return part[key]
    return default
