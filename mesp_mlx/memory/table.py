"""The table of a step: every array that exists in it, by part, name, shape, dtype and phase. Pure arithmetic on a model's config.

A step is cut into phases. In each, what must be in memory depends on the layer: on the way up checkpoints become more, on the way down they become fewer
and gradients more, and resident weights belong to the layers at the top. All of it changes linearly from one layer to the next of its kind, so that the
worst layer is the lowest or the highest of a kind, or one of those where residence begins: those are looked at, and no other, however deep the model.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from mesp_mlx.memory import tiles
from mesp_mlx.memory.strategy import ALL, Strategy
from mesp_mlx.memory.workload import Layout, Part, Row, Tensor, Workload
from mesp_mlx.model.spec import ModelSpec


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

    def width_tile(self, layer: int) -> int:
        """Columns of F in a tile."""
        width, _ = self.workload.mlp(layer)
        return min(width, self.strategy.width_tile or tiles.width_tile(self.tokens, self.workload.spec.hidden_size))

    @cached_property
    def vocabulary_tile(self) -> int:
        """Rows of the head's table that are multiplied at once."""
        spec = self.workload.spec
        return min(spec.vocab_size, self.strategy.vocabulary_tile or tiles.vocabulary_tile(self.supervised, spec.hidden_size))

    @cached_property
    def packed_rows(self) -> int:
        """Rows of the head's table that are read at once."""
        if self.strategy.states == "memory" or self.workload.generic:
            return self.vocabulary_tile
        return tiles.packed_rows(self.vocabulary_tile, self.workload.spec.hidden_size)

    def query_tile(self, window: int | None) -> int:
        """Query rows in a block."""
        spec = self.workload.spec
        heads = spec.num_heads if isinstance(spec, ModelSpec) else 1
        found = self.strategy.query_tile or tiles.query_tile(self.group_rows, heads, self.workload.width, window)
        return min(found, self.workload.width)

    def keys(self, window: int | None) -> int:
        """Keys of the widest block."""
        width = self.workload.width
        return width if window is None else min(width, window + self.query_tile(window))

    @property
    def replays(self) -> bool:
        """Whether attention is replayed on the way down."""
        return self.workload.method == "mesp" and not self.workload.plain and self.strategy.keep in ("nothing", "replay")

    def asked(self, layer: int) -> float:
        """The experts of a layer that a group of tokens asks for, where each is as likely as any other."""
        experts = self.workload.spec.experts[layer] if isinstance(self.workload.spec, ModelSpec) else None
        return 0 if experts is None else experts.count * (1 - (1 - experts.chosen / experts.count) ** self.tokens)

    def state(self, kind: str, layer: int) -> int:
        """Numbers a token of what lies before a stage. The MLP of a parallel block is given its layer's input too."""
        return 2 * self.workload.spec.hidden_size if kind == "mlp" and self.workload.parallel else self.workload.state(layer)

    @cached_property
    def resident(self) -> int:
        """Stages that stay, counted from the output down, the table first."""
        stages = self.workload.stages
        return stages if self.strategy.resident == ALL else min(self.strategy.resident, stages)

    @cached_property
    def first_staying(self) -> dict[str, int]:
        """The lowest layer whose stage of a kind stays; the number of layers where none does."""
        kinds, layers = self.workload.kinds, self.workload.spec.num_layers
        return {kind: layers - max(0, self.resident - 1 + place) // len(kinds) for place, kind in enumerate(kinds)}

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
        last = workload.kinds[-1]
        for kind, layouts in (*workload.weights.items(), (last, workload.experts)):  # experts stay once a token has asked for them
            rows += counted(map(workload.opened, layouts[self.first_staying[kind] :]), "weights", f"resident {kind}: ")
        return rows + (workload.opened(workload.table).rows("weights", "resident ") if self.resident else [])

    def stays(self, kind: str, layer: int) -> bool:
        """Whether a stage is resident."""
        return layer >= self.first_staying[kind]

    def edges(self, lowest: int) -> list[int]:
        """The layers from `lowest` on that may be the worst of a phase."""
        found: dict[tuple[object, ...], list[int]] = {}
        for layer in range(lowest, self.workload.spec.num_layers):
            found.setdefault(self.workload.sorts[layer], []).append(layer)
        ends = {layer for layers in found.values() for layer in (layers[0], layers[-1])}
        borders = {layer - back for layer in (*self.first_staying.values(), self.workload.first) for back in (0, 1)}
        return sorted(ends | {layer for layer in borders if lowest <= layer < self.workload.spec.num_layers})


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
