"""What a plan is made for: a model's frozen weights and adapters, stage by stage, as arrays with a name, a shape and a dtype. Pure arithmetic on a config."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from mesp_mlx.memory.measured import Curve, Fit
from mesp_mlx.model.spec import ModelSpec

if TYPE_CHECKING:
    from mesp_mlx.model.generic import GenericSpec

Part = Literal["adapter", "gradients", "optimizer", "weights", "checkpoints", "states", "stage", "head", "tokens", "slack", "base"]
PARTS: tuple[Part, ...] = ("adapter", "gradients", "optimizer", "weights", "checkpoints", "states", "stage", "head", "tokens", "slack", "base")
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4, "int32": 4, "uint8": 1, "bool": 1}
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


Array = tuple[str, tuple[int, ...], str]  # name, shape, dtype


class Row(NamedTuple):
    """`count` equal arrays of a moment."""

    part: Part
    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int = 1

    @property
    def bytes(self) -> int:
        return self.count * math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Tensor:
    """`count` equal arrays, and the phases of a step in which they live."""

    name: str
    part: Part
    shape: tuple[int, ...]
    dtype: str
    count: int
    phases: frozenset[str]

    @property
    def bytes(self) -> int:
        return self.count * math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True, eq=False)
class Layout:
    """The arrays of one stage's weights or adapters, without part and count; equal layers share one."""

    arrays: tuple[Array, ...] = ()

    @cached_property
    def bytes(self) -> int:
        return sum(math.prod(shape) * SIZES[dtype] for _, shape, dtype in self.arrays)

    @cached_property
    def largest(self) -> int:
        """Numbers of its largest array."""
        return max((math.prod(shape) for _, shape, _ in self.arrays), default=0)

    @cached_property
    def widened(self) -> "Layout":
        """The same with 16-bit numbers as float32."""
        wide = tuple((name, shape, "float32" if SIZES[dtype] == 2 else dtype) for name, shape, dtype in self.arrays)
        return self if wide == self.arrays else Layout(wide)

    def rows(self, part: Part, what: str, count: int = 1) -> list[Row]:
        return [Row(part, f"{what}{name}", shape, dtype, count) for name, shape, dtype in self.arrays] if count else []


@dataclass(frozen=True)
class Workload:
    """What a plan is made for, known before any weight exists.

    Attributes:
        spec: the model's shape, with the quantisation that its weights will have when they are streamed.
        itemsize: bytes of an activation, 4 or 2.
        modules: full names of the adapted modules, as adapter.choose_modules gives them.
        moments: optimizer's slots a tensor: 0 for sgd, 1 with momentum, 2 for adam and adamw.
        clip: whether gradients are clipped by their global norm.
        rows: rows of an update.
        width: padded positions of the longest row.
        supervised: the most supervised positions of a row; None: all.
        on_cpu: products dequantise tiles of weights, instead of reading them packed.
        measured: of a model whose layers autodiff reverses as mlx-lm wrote them, what each layer takes.
        whole_end: such a model makes its logits whole.
    """

    spec: "ModelSpec | GenericSpec"
    modules: tuple[str, ...]
    method: Literal["mesp", "mebp", "mezo", "backprop"] = "mesp"
    tiled_head: bool = False
    grad_checkpoint: bool = False
    backend: Literal["mlx", "numpy"] = "mlx"
    itemsize: int = 4
    rank: int = 8
    moments: int = 2
    clip: bool = True
    dropout: bool = False
    perturbations: int = 1
    rows: int = 1
    width: int = 256
    supervised: int | None = None
    on_cpu: bool = True
    measured: tuple[Fit, ...] = ()
    whole_end: bool = False

    @property
    def dtype(self) -> str:
        return "float32" if self.itemsize == 4 else "bfloat16"

    @property
    def generic(self) -> bool:
        """Whether the model is of no family that has stages of its own."""
        return not isinstance(self.spec, ModelSpec)

    @property
    def plain(self) -> bool:
        """Whether a layer is one stage that autodiff reverses."""
        return self.generic or self.method in ("mebp", "backprop")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The stages of a layer."""
        return ("layer",) if self.plain else ("attention", "mlp")

    @property
    def stages(self) -> int:
        """Stages of the model that have weights, the head's among them."""
        return len(self.kinds) * self.spec.num_layers + 1

    @property
    def whole_head(self) -> bool:
        return self.whole_end or (self.method in ("mebp", "backprop") and not self.tiled_head)

    @property
    def parallel(self) -> bool:
        """Whether a layer's MLP is given its attention's input too."""
        return isinstance(self.spec, ModelSpec) and self.spec.parallel

    @property
    def post_norm(self) -> bool:
        """Whether a norm reads what a sublayer gives."""
        return isinstance(self.spec, ModelSpec) and self.spec.post_norm

    def state(self, layer: int) -> int:
        """Numbers a token of what lies before a layer."""
        return self._numbers(self.measured[layer].state) if self.measured else self.spec.hidden_size

    def fresh(self, layer: int) -> int:
        """Those of them that were not there before the layer below."""
        return self._numbers(self.measured[layer].fresh) if self.measured else self.spec.hidden_size

    def _numbers(self, curve: Curve) -> int:
        return -(-curve.bytes(1, self.width) // (self.width * self.itemsize))

    @cached_property
    def first(self) -> int:
        """The lowest layer with an adapter."""
        return max(0, min(map(self.spec.layer_of, self.modules), default=0))

    @property
    def trained(self) -> int:
        """Layers that are reversed."""
        return self.spec.num_layers - self.first

    @cached_property
    def weights(self) -> dict[str, tuple[Layout, ...]]:
        """The frozen weights of each layer's stages."""
        found = [self._of_stages(layer) for layer in range(self.spec.num_layers)]
        return self._shared([{kind: self._arrays(tensors) for kind, tensors in kinds.items()} for kinds in found])

    @cached_property
    def experts(self) -> tuple[Layout, ...]:
        """What stacks the linears of each layer's experts, which are read one by one."""
        if self.plain:
            return (Layout(),) * self.spec.num_layers
        found = [self._arrays(self._mlp_tensors(layer, stacked=True)) for layer in range(self.spec.num_layers)]
        return self._shared([dict.fromkeys(self.kinds, arrays) for arrays in found])["mlp"]

    def expert(self, layer: int) -> Layout:
        """One of a layer's experts."""
        return Layout(tuple((name, shape[1:], dtype) for name, shape, dtype in self.experts[layer].arrays))

    @property
    def position_bytes(self) -> int:
        """Of a learned position."""
        return sum(math.prod(shape[1:]) * SIZES[dtype] for _, shape, dtype in self.positions.arrays)

    @cached_property
    def positions(self) -> Layout:
        """The table of learned positions."""
        if self.generic or not self._structured.positions:
            return Layout()
        tensors = self._structured.module_tensors(self._structured.names.positions)
        return Layout(tuple(part for name, shape in tensors.items() for part in self.stored(name, name, shape)))

    @cached_property
    def adapters(self) -> dict[str, tuple[Layout, ...]]:
        """The adapter tensors of each layer's stages; those of what is beside the layers are the lowest one's."""
        found: list[dict[str, list[Array]]] = [{kind: [] for kind in self.kinds} for _ in range(self.spec.num_layers)]
        for module in self.modules:
            layer, short = max(0, self.spec.layer_of(module)), self._short(module)
            kind = "layer" if self.plain else "attention" if short in self._structured.attention_keys(layer) else "mlp"
            for half, shape in zip("ab", self.spec.pair_shapes(module, self.rank), strict=True):
                found[layer][kind].append((f"{short}.lora_{half}", shape, "float32"))
        return self._shared(found)

    @cached_property
    def adapter_bytes(self) -> int:
        return sum(layout.bytes for layouts in self.adapters.values() for layout in layouts)

    @cached_property
    def largest_pair_tensor(self) -> int:
        """Numbers of the adapter's largest tensor."""
        return max(layout.largest for layouts in self.adapters.values() for layout in layouts)

    @cached_property
    def table(self) -> Layout:
        """The head's table, as it is stored."""
        tables = [(name, shape) for name, shape in self._outside.items() if shape == (self.spec.vocab_size, self.spec.hidden_size)]
        name, shape = tables[0 if self.spec.tied else -1]
        return Layout(tuple(self.stored(name, name, shape)))

    @cached_property
    def norm(self) -> Layout:
        """What else the head reads."""
        if not self.generic:
            tensors = self._structured.module_tensors(self._structured.names.norm)
        else:
            tensors = {name: shape for name, shape in self._outside.items() if shape[0] != self.spec.vocab_size}
        return Layout(tuple(part for name, shape in tensors.items() for part in self.stored(name, name, shape)))

    def opened(self, layout: Layout) -> Layout:
        """Frozen weights as they are computed with: NumPy's are float32."""
        return layout.widened if self.backend == "numpy" else layout

    def mlp(self, layer: int) -> tuple[int, int]:
        """F, of one expert where there are several, and how many arrays of it go into z: two where there is a gate."""
        assert isinstance(self.spec, ModelSpec)
        if (experts := self.spec.experts[layer]) is not None:
            return experts.width, 2
        return self.spec.intermediate_size, 2 if self.spec.gated else 1

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer the lowest that is like it, in all that a plan asks of it."""
        layers = range(self.spec.num_layers)
        own = self.measured or (None for _ in layers) if self.generic else zip(self._structured.windows, self._structured.experts, strict=True)
        return _lowest_equal(zip(self.experts, *self.weights.values(), *self.adapters.values(), own, strict=True))

    @cached_property
    def alike_weights(self) -> tuple[int, ...]:
        """The same of their frozen weights alone."""
        return _lowest_equal(zip(*self.weights.values(), strict=True))

    @cached_property
    def sorts(self) -> tuple[tuple[int | None, ...], ...]:
        """For each layer what it is like, and its neighbours' weights, which are read ahead, where they are not as its own."""
        around = (None, *self.alike_weights, None)
        beside = zip(self.alike, around, around[1:], around[2:], strict=False)
        return tuple((like, *(other if other != own else None for other in (below, above))) for like, below, own, above in beside)

    def stored(self, name: str, short: str, shape: tuple[int, ...]) -> list[Array]:
        """How a tensor of the model is stored: itself, or packed words, scales and, where the mode has them, biases."""
        kind, (*rows, width), (module, _, last) = STORED[self.spec.dtype], shape, name.rpartition(".")
        setting = self.spec.quantized_as(module) if last == "weight" and rows else None
        if setting is None or width % setting.group_size:  # in a model of any family there are other weights than those of linears
            return [(short, shape, kind)]
        packed, grouped = (short, (*rows, width * setting.bits // 32), "uint32"), (*rows, width // setting.group_size)
        short = short.removesuffix(".weight")
        if setting.mode != "affine":
            return [packed, (f"{short}.scales", grouped, "uint8")]
        return [packed, (f"{short}.scales", grouped, kind), (f"{short}.biases", grouped, kind)]

    @property
    def _structured(self) -> ModelSpec:
        assert isinstance(self.spec, ModelSpec)
        return self.spec

    def _of_stages(self, layer: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """The tensors of a layer, by the stages that read them."""
        if self.generic:
            return {"layer": self._by_layer[layer]}
        if self.plain:
            return {"layer": self._structured.layer_tensors(layer)}
        attention = self._structured.attention_modules(layer)
        own = {name: shape for module in attention for name, shape in self._structured.module_tensors(module).items()}
        return {"attention": own, "mlp": self._mlp_tensors(layer, stacked=False)}

    def _mlp_tensors(self, layer: int, stacked: bool) -> dict[str, tuple[int, ...]]:
        """Of a layer's MLP, what stacks the linears of experts, or all else."""
        spec = self._structured
        modules = dict.fromkeys((*spec.mlp_modules(layer), *(f"{spec.layer_name(layer)}.{key}" for key in spec.mlp_keys(layer))))
        tensors = [spec.module_tensors(module) for module in modules]
        return {name: shape for own in tensors for name, shape in own.items() if (len(next(iter(own.values()))) > 2) == stacked}

    @cached_property
    def _by_layer(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """All tensors, by the layer that they are in; -1: in none."""
        if not self.generic:
            within = f"{self._structured.names.layers}."
            return {-1: {name: shape for name, shape in self.spec.tensors().items() if not name.startswith(within)}}
        found: dict[int, dict[str, tuple[int, ...]]] = {layer: {} for layer in range(-1, self.spec.num_layers)}
        for name, shape in self.spec.tensors().items():
            found[self.spec.layer_of(name)][name] = shape
        return found

    @property
    def _outside(self) -> dict[str, tuple[int, ...]]:
        return self._by_layer[-1]

    def _arrays(self, tensors: Mapping[str, tuple[int, ...]]) -> list[Array]:
        """Tensors of one layer as they are stored."""
        return [part for name, shape in tensors.items() for part in self.stored(name, self._short(name), shape)]

    def _short(self, name: str) -> str:
        """A name within its layer."""
        layer = self.spec.layer_of(name)
        return name if layer < 0 else name.partition(f".{layer}.")[2]

    def _shared(self, found: Sequence[Mapping[str, Sequence[Array]]]) -> dict[str, tuple[Layout, ...]]:
        """The layouts of each layer's stages, equal ones as one object."""
        shared: dict[tuple[Array, ...], Layout] = {}
        keys = {kind: [tuple(layer[kind]) for layer in found] for kind in self.kinds}
        return {kind: tuple(shared.setdefault(key, Layout(key)) for key in own) for kind, own in keys.items()}


def _lowest_equal(keys: Iterable[tuple[object, ...]]) -> tuple[int, ...]:
    """For each key the first place of an equal one."""
    found: dict[tuple[object, ...], int] = {}
    return tuple(found.setdefault(key, place) for place, key in enumerate(keys))
