"""The table of a step: every array that exists in it, by part, name, shape, dtype and phase. Pure arithmetic on a model's config.

A step is cut into phases. In each, what must be in memory depends on the layer: on the way up checkpoints become more, on the way down they become fewer
and gradients more, and resident weights belong to the layers at the top. All of it changes linearly from layer to layer, so that the worst layer is the
lowest, the highest, or one of the two where residence begins: those are looked at, and no other, however deep the model.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from mesp_mlx.memory import tiles
from mesp_mlx.memory.strategy import ALL, Strategy
from mesp_mlx.model.spec import PROJECTIONS, ModelSpec

Part = Literal["adapter", "gradients", "optimizer", "weights", "checkpoints", "states", "stage", "head", "tokens", "slack", "base"]
PARTS: tuple[Part, ...] = ("adapter", "gradients", "optimizer", "weights", "checkpoints", "states", "stage", "head", "tokens", "slack", "base")
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint32": 4, "int32": 4, "uint8": 1, "bool": 1}
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ATTENTION, MLP = PROJECTIONS[:4], PROJECTIONS[4:]


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

    arrays: tuple[tuple[str, tuple[int, ...], str], ...] = ()

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
    """

    spec: ModelSpec
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

    @property
    def dtype(self) -> str:
        return "float32" if self.itemsize == 4 else "bfloat16"

    @property
    def plain(self) -> bool:
        """Whether a layer is one stage that autodiff reverses."""
        return self.method in ("mebp", "backprop")

    @property
    def whole_head(self) -> bool:
        return self.plain and not self.tiled_head

    @cached_property
    def first(self) -> int:
        """The lowest layer with an adapter."""
        return min((int(module.split(".")[2]) for module in self.modules), default=0)

    @property
    def trained(self) -> int:
        """Layers that are reversed."""
        return self.spec.num_layers - self.first

    @cached_property
    def projections(self) -> tuple[frozenset[str], ...]:
        """What is adapted in each layer."""
        found: list[set[str]] = [set() for _ in range(self.spec.num_layers)]
        for module in self.modules:
            _, _, layer, projection = module.split(".", 3)
            found[int(layer)].add(projection)
        return tuple(frozenset(names) for names in found)

    @cached_property
    def weights(self) -> dict[str, tuple[Layout, ...]]:
        """The frozen weights of each layer's "attention" and "mlp"."""
        shared: dict[tuple[tuple[str, tuple[int, ...], str], ...], Layout] = {}
        result: dict[str, list[Layout]] = {"attention": [], "mlp": []}
        for layer in range(self.spec.num_layers):
            kind = "attention"
            arrays: dict[str, list[tuple[str, tuple[int, ...], str]]] = {"attention": [], "mlp": []}
            prefix = f"model.layers.{layer}."
            for name, shape in self.spec.layer_tensors(layer).items():
                short = name.removeprefix(prefix)
                kind = "mlp" if short.startswith(("mlp.", "post_attention")) else "attention"
                arrays[kind] += self.stored(name.rpartition(".")[0], short, shape)
            for kind, found in arrays.items():
                key = tuple(found)
                result[kind].append(shared.setdefault(key, Layout(key)))
        return {kind: tuple(layouts) for kind, layouts in result.items()}

    @cached_property
    def adapters(self) -> dict[str, tuple[Layout, ...]]:
        """The adapter tensors of each layer's "attention" and "mlp"."""
        shared: dict[tuple[str, frozenset[str]], Layout] = {}
        result: dict[str, list[Layout]] = {"attention": [], "mlp": []}
        for names in self.projections:
            for kind, own in (("attention", ATTENTION), ("mlp", MLP)):
                if (kind, names) not in shared:
                    arrays = []
                    for projection in own:
                        if projection in names:
                            width_out, width_in = self.spec.linear_shape(projection)
                            arrays += [(f"{projection}.lora_a", (width_in, self.rank), "float32"), (f"{projection}.lora_b", (self.rank, width_out), "float32")]
                    shared[kind, names] = Layout(tuple(arrays))
                result[kind].append(shared[kind, names])
        return {kind: tuple(layouts) for kind, layouts in result.items()}

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
        name = "model.embed_tokens" if self.spec.tied else "lm_head"
        return Layout(tuple(self.stored(name, f"{name}.weight", (self.spec.vocab_size, self.spec.hidden_size))))

    @cached_property
    def norm(self) -> Layout:
        return Layout((("model.norm.weight", (self.spec.hidden_size,), STORED[self.spec.dtype]),))

    def opened(self, layout: Layout) -> Layout:
        """Frozen weights as they are computed with: NumPy's are float32."""
        return layout.widened if self.backend == "numpy" else layout

    def stored(self, module: str, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], str]]:
        """How a tensor of the model is stored: itself, or packed words, scales and biases."""
        kind, setting = STORED[self.spec.dtype], self.spec.quantized_as(module) if len(shape) == 2 else None
        if setting is None:
            return [(name, shape, kind)]
        bits, group = setting
        grouped, short = (shape[0], shape[1] // group), name.removesuffix(".weight")
        return [(name, (shape[0], shape[1] * bits // 32), "uint32"), (f"{short}.scales", grouped, kind), (f"{short}.biases", grouped, kind)]


@dataclass(frozen=True)
class Shape:
    """The sizes of the arrays of a step that depend on the strategy: groups of rows, tiles."""

    workload: Workload
    strategy: Strategy

    @cached_property
    def group_rows(self) -> int:
        """Rows of a group of the widest rows."""
        return min(self.workload.rows, max(1, self.strategy.group_tokens // self.workload.width))

    @cached_property
    def groups(self) -> int:
        return -(-self.workload.rows // self.group_rows)

    @cached_property
    def tokens(self) -> int:
        """N: positions of a group."""
        return self.group_rows * self.workload.width

    @cached_property
    def supervised(self) -> int:
        """Supervised positions of a group."""
        width = self.workload.width
        return self.group_rows * min(width, width if self.workload.supervised is None else self.workload.supervised)

    @cached_property
    def width_tile(self) -> int:
        """Columns of F in a tile."""
        spec = self.workload.spec
        return min(spec.intermediate_size, self.strategy.width_tile or tiles.width_tile(self.tokens, spec.hidden_size))

    @cached_property
    def vocabulary_tile(self) -> int:
        """Rows of the head's table that are multiplied at once."""
        spec = self.workload.spec
        return min(spec.vocab_size, self.strategy.vocabulary_tile or tiles.vocabulary_tile(self.supervised, spec.hidden_size))

    @cached_property
    def packed_rows(self) -> int:
        """Rows of the head's table that are read at once."""
        if self.strategy.states == "memory":
            return self.vocabulary_tile
        return tiles.packed_rows(self.vocabulary_tile, self.workload.spec.hidden_size)

    def query_tile(self, window: int | None) -> int:
        """Query rows in a block."""
        found = self.strategy.query_tile or tiles.query_tile(self.group_rows, self.workload.spec.num_heads, self.workload.width, window)
        return min(found, self.workload.width)

    def keys(self, window: int | None) -> int:
        """Keys of the widest block."""
        width = self.workload.width
        return width if window is None else min(width, window + self.query_tile(window))

    @cached_property
    def resident(self) -> tuple[bool, int, int]:
        """(the table, MLPs, attentions) that stay, counted from the output down."""
        layers = self.workload.spec.num_layers
        count = 2 * layers + 1 if self.strategy.resident == ALL else min(self.strategy.resident, 2 * layers + 1)
        return count > 0, count // 2, max(0, count - 1) // 2

    @cached_property
    def persistent(self) -> list[Row]:
        """What lives all through a step: adapters and moments, unless they are in the file; resident weights."""
        workload = self.workload
        rows: list[Row] = []
        if self.strategy.adapter == "memory":
            for kind, layouts in workload.adapters.items():
                rows += counted(layouts, "adapter", f"{kind}: ")
                if workload.moments:
                    rows += [row._replace(count=row.count * workload.moments) for row in counted(layouts, "optimizer", f"moments of {kind}: ")]
        table, mlps, attentions = self.resident
        for kind, count in (("attention", attentions), ("mlp", mlps)):
            rows += counted(map(workload.opened, workload.weights[kind][workload.spec.num_layers - count :]), "weights", f"resident {kind}: ")
        return rows + (workload.opened(workload.table).rows("weights", "resident ") if table else [])

    def stays(self, kind: str, layer: int) -> bool:
        """Whether a stage is resident."""
        _, mlps, attentions = self.resident
        return layer >= self.workload.spec.num_layers - (mlps if kind == "mlp" else attentions)


def merged(moments: Iterable[tuple[str, Iterable[Row]]]) -> Iterator[Tensor]:
    """The rows of each phase as tensors that know all their phases."""
    phases: dict[Row, set[str]] = {}
    for phase, rows in moments:
        counts: Counter[Row] = Counter()
        for row in rows:
            counts[row._replace(count=1)] += row.count
        for row, count in counts.items():
            phases.setdefault(row._replace(count=count), set()).add(phase)
    for row, found in phases.items():
        yield Tensor(row.name, row.part, row.shape, row.dtype, row.count, frozenset(found))


def counted(layouts: Iterable[Layout], part: Part, what: str) -> list[Row]:
    """The rows of many stages, equal ones together."""
    return [row for layout, count in Counter(layouts).items() for row in layout.rows(part, what, count)]
