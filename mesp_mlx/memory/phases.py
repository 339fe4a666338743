"""The phases of a step, and what is in memory in each: what lies between stages, the open stage's weights and adapter, and what is inside it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mesp_mlx.memory import inside
from mesp_mlx.memory.table import Layout, Row, Shape, counted

FORWARD_ATTENTION, FORWARD_MLP, REPLAY = "forward attention", "forward mlp", "replay attention"
BACKWARD_ATTENTION, BACKWARD_MLP = "backward attention", "backward mlp"
FORWARD_LAYER, BACKWARD_LAYER = "forward layer", "backward layer"
EMBEDDING, HEAD, UPDATE, WHOLE = "embedding", "head", "update", "forward and backward"
FORWARD = (FORWARD_ATTENTION, FORWARD_MLP, FORWARD_LAYER)
BACKWARD = (REPLAY, BACKWARD_MLP, BACKWARD_ATTENTION, BACKWARD_LAYER)
AHEAD = 0.3  # of what a stage makes: with this much more room a step takes as long as with any amount, with half of it a third longer (measured)
ATTENTION_AHEAD = 0.05  # attention's backward: what it makes is many small blocks, which wait for one another anyway
KINDS = {FORWARD_ATTENTION: "attention", REPLAY: "attention", BACKWARD_ATTENTION: "attention", FORWARD_MLP: "mlp", BACKWARD_MLP: "mlp"}


def phases(shape: Shape) -> tuple[str, ...]:
    """Those that a method has, in order."""
    method = shape.workload.method
    if method == "backprop":
        return EMBEDDING, WHOLE, UPDATE
    if method == "mebp":
        return EMBEDDING, FORWARD_LAYER, HEAD, BACKWARD_LAYER, UPDATE
    if method == "mezo":
        return EMBEDDING, FORWARD_ATTENTION, FORWARD_MLP, HEAD, UPDATE
    replay = (REPLAY,) if shape.strategy.keep in ("nothing", "replay") else ()
    return EMBEDDING, FORWARD_ATTENTION, FORWARD_MLP, HEAD, *replay, BACKWARD_MLP, BACKWARD_ATTENTION, UPDATE


@dataclass(frozen=True)
class Moment:
    """The arrays that are there when a stage begins to compute, and those that it makes.

    margin: how much more than these MLX is given, so that operations need not wait for one another; None: nothing is made ahead.
    """

    given: list[Row]
    made: list[Row]
    margin: float | None = None

    @cached_property
    def given_bytes(self) -> int:
        return sum(row.bytes for row in self.given)

    @cached_property
    def made_bytes(self) -> int:
        return sum(row.bytes for row in self.made)

    @cached_property
    def overshoot_bytes(self) -> int:
        """The largest array: MLX looks at its limit before it allocates, and not at what it is about to."""
        return 0 if self.margin is None else max((row.bytes // row.count for row in self.made), default=0)

    @cached_property
    def ahead_bytes(self) -> int:
        """What is allocated ahead of need."""
        return self.overshoot_bytes + int((self.margin or 0) * self.made_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        return self.given_bytes + self.made_bytes + self.ahead_bytes


def moments(shape: Shape, phase: str) -> Iterator[Moment]:
    """What is in memory in a phase, in each of the layers that may be the worst."""
    workload, rest = shape.workload, shape.persistent
    if phase not in FORWARD + BACKWARD:
        given, made = _ends(shape, phase)
        yield Moment(rest + given, made, AHEAD if phase == HEAD and workload.backend == "mlx" else None)
        return
    top, first = workload.spec.num_layers - 1, workload.first if phase in BACKWARD else 0
    _, mlps, attentions = shape.resident
    edges = {first, workload.first, top, top - mlps, top - mlps + 1, top - attentions, top - attentions + 1}
    for layer in sorted(edge for edge in edges if first <= edge <= top):
        # The least plan has the smallest tiles: there memory comes before time.
        ahead = ATTENTION_AHEAD if phase == BACKWARD_ATTENTION and shape.strategy.query_tile else AHEAD
        margin = ahead if workload.backend == "mlx" else None
        yield Moment(rest + _stage(shape, phase, layer), _inside(shape, phase, layer), margin)


def _ends(shape: Shape, phase: str) -> tuple[list[Row], list[Row]]:
    """What is given and what is made in a phase that is no layer's."""
    workload = shape.workload
    if phase == EMBEDDING:
        sides = 2 if workload.method == "mezo" else 1
        return _ahead(shape, phase, 0) + _states(shape, sides * shape.groups - 1, "between stages"), inside.embedding(shape)
    if phase == UPDATE:
        return _update(shape)
    if phase == WHOLE:
        return _whole(shape)
    given, made = _head(shape)
    return _checkpoints(shape, workload.spec.num_layers) + _ahead(shape, phase, 0) + given, made


def _stage(shape: Shape, phase: str, layer: int) -> list[Row]:
    """What is given while a layer's stage computes."""
    workload, strategy, groups = shape.workload, shape.strategy, shape.groups
    rows = _weights(shape, phase, layer) + _adapter(shape, phase, layer)
    if phase in FORWARD:
        sides = 2 if workload.method == "mezo" else 1
        saved = workload.method != "mezo" and layer >= workload.first
        rows += _checkpoints(shape, layer) + _states(shape, sides * groups - 1, "between stages")
        aliased = saved and (strategy.checkpoints, strategy.states) == ("memory", "memory") and _input_is_saved(shape, phase)
        rows += _own_checkpoints(shape, phase) if saved else []
        return rows if aliased else rows + _one_state(shape, "x")
    replayed = strategy.keep in ("nothing", "replay") and not workload.plain
    rows += _checkpoints(shape, layer) + _gradients(shape, phase, layer)
    rows += _saved(shape, phase, replayed)
    if phase == BACKWARD_MLP and replayed:
        rows += _states(shape, groups, "m")
    if phase == REPLAY:
        rows += _states(shape, groups - 1, "m of other groups")
        return rows + (_states(shape, groups, "dy") if strategy.states == "memory" else [])
    return rows + _states(shape, groups, "dy")


def _inside(shape: Shape, phase: str, layer: int) -> list[Row]:
    dropout = [row for kind in ([KINDS[phase]] if phase in KINDS else ["attention", "mlp"]) for row in inside.dropout(shape, kind)]
    match phase:
        case "forward attention" | "replay attention":
            return inside.attention_forward(shape, layer) + dropout
        case "backward attention":
            return inside.attention_backward(shape, layer) + dropout
        case "forward mlp":
            return inside.mlp_forward(shape) + dropout
        case "backward mlp":
            return inside.mlp_backward(shape, layer) + dropout
        case "forward layer":
            return inside.layer_forward(shape, layer) + dropout
    return inside.layer_backward(shape, layer) + dropout


def _input_is_saved(shape: Shape, phase: str) -> bool:
    return phase in (FORWARD_ATTENTION, FORWARD_LAYER) or shape.strategy.keep in ("inputs", "attention", "all")


def _one_state(shape: Shape, name: str) -> list[Row]:
    return [Row("states", name, (shape.tokens, shape.workload.spec.hidden_size), shape.workload.dtype)]


def _states(shape: Shape, groups: int, name: str) -> list[Row]:
    """So many groups' arrays between two stages: in the file, that of the group that computes alone."""
    groups = groups if shape.strategy.states == "memory" else min(groups, 1 if name in ("dy", "m", "x") else 0)
    row = Row("states", name, (shape.tokens, shape.workload.spec.hidden_size), shape.workload.dtype, groups)
    return [row] if groups else []


def saved_arrays(shape: Shape, kind: str, in_memory: bool = False) -> list[tuple[str, int]]:
    """What is kept of a stage for its backward, as (name, width) of arrays [N, width]; replayed arrays are not among them.

    in_memory: without those that wait in the file, among them states that are there already.
    """
    spec, strategy, keep = shape.workload.spec, shape.strategy, shape.strategy.keep
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if in_memory and strategy.checkpoints == "file":
        return []
    kept = [("x", spec.hidden_size)] if kind == "attention" or keep not in ("nothing", "replay") or shape.workload.plain else []
    if in_memory and strategy.states == "file":
        kept = []
    if kind == "attention" and keep in ("attention", "all"):
        kept += [("q", heads), ("k", kv), ("v", kv), ("attention", heads)]
    if kind == "mlp" and keep == "all":
        kept += [("gate", spec.intermediate_size), ("up", spec.intermediate_size)]
    return kept


def replayed_arrays(shape: Shape) -> list[tuple[str, int]]:
    """What a replay hands to its layer's backward, as (name, width)."""
    spec, keep = shape.workload.spec, shape.strategy.keep
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if shape.workload.method != "mesp" or keep not in ("nothing", "replay"):
        return []
    return [("replay's attention", heads)] + ([("replay's q", heads), ("replay's k", kv), ("replay's v", kv)] if keep == "replay" else [])


def _checkpoints(shape: Shape, layers: int) -> list[Row]:
    """The checkpoints of the trained layers below `layers`."""
    count = max(0, layers - shape.workload.first) * shape.groups
    if not count or shape.workload.method == "mezo":
        return []
    kinds = ("attention",) if shape.workload.plain else ("attention", "mlp")
    arrays = [(f"{kind}: {name}", width) for kind in kinds for name, width in saved_arrays(shape, kind, in_memory=True)]
    return [Row("checkpoints", name, (shape.tokens, width), shape.workload.dtype, count) for name, width in arrays]


def _own_checkpoints(shape: Shape, phase: str) -> list[Row]:
    """What the layer itself has saved when one of its stages computes on the way up."""
    arrays = saved_arrays(shape, "attention", in_memory=True)
    if phase == FORWARD_MLP:
        arrays += [array for array in saved_arrays(shape, "mlp", in_memory=True) if array[0] == "x"]
    else:
        arrays = [array for array in arrays if array[0] == "x"]
    return [Row("checkpoints", f"of this layer: {name}", (shape.tokens, width), shape.workload.dtype, shape.groups) for name, width in arrays]


def _saved(shape: Shape, phase: str, replayed: bool) -> list[Row]:
    """What was kept of the layer that is reversed: for all groups in memory, and for the one that computes what its own stage asks for."""
    strategy, groups = shape.strategy, shape.groups
    own = "mlp" if phase == BACKWARD_MLP else "attention"
    own_arrays = [] if phase == BACKWARD_MLP and replayed else saved_arrays(shape, own)
    in_memory = [name for name, _ in saved_arrays(shape, own, in_memory=True)]
    arrays = [(f"{own}'s {name}", width, groups if name in in_memory else 1) for name, width in own_arrays]
    if phase == BACKWARD_MLP:
        arrays += [(f"attention's {name}", width, groups) for name, width in saved_arrays(shape, "attention", in_memory=True)]
    if phase != REPLAY and (phase != BACKWARD_MLP or strategy.checkpoints == "memory"):
        arrays += [(name, width, groups if strategy.checkpoints == "memory" else 1) for name, width in replayed_arrays(shape)]
    return [Row("checkpoints", name, (shape.tokens, width), shape.workload.dtype, count) for name, width, count in arrays]


def _weights(shape: Shape, phase: str, layer: int) -> list[Row]:
    """The open stage's frozen weights, those held for a moment longer, and those that are read ahead."""
    workload, strategy = shape.workload, shape.strategy
    kinds = ("attention", "mlp") if workload.plain else (KINDS[phase],)
    own = [(kind, workload.weights[kind][layer]) for kind in kinds]
    rows = [row for kind, layout in own if not shape.stays(kind, layer) for row in workload.opened(layout).rows("weights", f"{kind}: ")]
    if phase == BACKWARD_MLP and strategy.hold and strategy.keep in ("nothing", "replay") and not shape.stays("attention", layer):
        rows += workload.opened(workload.weights["attention"][layer]).rows("weights", "held attention: ")
    # What is read ahead is there as it is stored; where nothing is, the stage itself was, beside what became of it.
    return rows + (_ahead(shape, phase, layer) or [row for kind, layout in own for row in _widening(shape, layout, f"{kind}, as it is stored: ")])


def _widening(shape: Shape, layout: Layout, what: str) -> list[Row]:
    """What weights were read as, while they become another type; nothing where they are computed with as they are."""
    return layout.rows("weights", what) if shape.workload.opened(layout) is not layout else []


def _ahead(shape: Shape, phase: str, layer: int) -> list[Row]:
    """The stages that are read ahead while another computes."""
    rows: list[Row] = []
    for kind, at in itertools.islice(_next(shape, phase, layer), shape.strategy.prefetch):
        rows += shape.workload.weights[kind][at].rows("weights", f"read ahead, {kind}: ") if kind else []
    return rows


def _next(shape: Shape, phase: str, layer: int) -> Iterator[tuple[str, int]]:
    """The stages after one, as (kind, layer), ("", 0) for the head; those that stay are not read."""
    workload, strategy = shape.workload, shape.strategy
    top = workload.spec.num_layers - 1
    kinds = ("attention", "mlp")
    if phase in (EMBEDDING, *FORWARD):
        start = layer if phase in (EMBEDDING, FORWARD_ATTENTION) else layer + 1
        for above in range(start, top + 1):
            for kind in kinds:
                if not (above == layer and phase == FORWARD_ATTENTION and kind == "attention") and not shape.stays(kind, above):
                    yield kind, above
        yield "", 0
        phase = HEAD
    if workload.method == "mezo":
        return
    replayed = strategy.keep in ("nothing", "replay") and not workload.plain
    sequence = ("attention", "mlp", *(() if strategy.hold else ("attention",))) if replayed else ("mlp", "attention")
    if phase == REPLAY:
        rest = sequence[1:]
    elif phase == BACKWARD_MLP:
        rest = sequence[2:] if replayed else sequence[1:]
    else:
        rest = ()
    for kind in rest:
        if not shape.stays(kind, layer):
            yield kind, layer
    for below in range(top if phase == HEAD else layer - 1, workload.first - 1, -1):
        for kind in sequence:
            if not shape.stays(kind, below):
                yield kind, below


def _adapter(shape: Shape, phase: str, layer: int) -> list[Row]:
    """The open stage's adapter where it comes from the file, and mezo's moved copy of it."""
    workload = shape.workload
    kinds = ("attention", "mlp") if workload.plain else (KINDS[phase],)
    rows: list[Row] = []
    for kind in kinds:
        layout = workload.adapters[kind][layer]
        rows += layout.rows("adapter", f"open {kind}: ") if shape.strategy.adapter == "file" else []
        rows += layout.rows("adapter", f"moved {kind}: ") if workload.method == "mezo" else []
    return rows


def _gradients(shape: Shape, phase: str, layer: int) -> list[Row]:
    """The reversed stage's gradients of the groups before, and those held of the stages above it."""
    workload = shape.workload
    rows: list[Row] = []
    if phase != REPLAY and shape.groups > 1:
        for kind in ("attention", "mlp") if workload.plain else (KINDS[phase],):
            rows += workload.adapters[kind][layer].rows("gradients", f"{kind}, other groups: ")
    if shape.strategy.gradients == "held":
        for kind in ("attention", "mlp"):
            above = layer if kind == "mlp" and phase == BACKWARD_ATTENTION else layer + 1
            rows += counted(workload.adapters[kind][above:], "gradients", f"held, {kind}: ")
    return rows


def _update(shape: Shape) -> tuple[list[Row], list[Row]]:
    """Gradients held, or one stage's; beside them one tensor's new values. A stage whose tensors come from the file is open meanwhile."""
    workload, strategy = shape.workload, shape.strategy
    new = [Row("optimizer", "new values of one tensor", (workload.largest_pair_tensor,), "float32", 2 + workload.moments)]
    stages = [layout for layouts in workload.adapters.values() for layout in layouts]
    largest = max(stages, key=lambda layout: layout.bytes)
    rows = largest.rows("adapter", "open: ") + largest.rows("optimizer", "open moments: ", workload.moments) if strategy.adapter == "file" else []
    if workload.method == "mezo":
        return rows, new + [Row("gradients", "estimate of one tensor", (workload.largest_pair_tensor,), "float32", 2)]
    if strategy.gradients == "held":
        return rows + [row for kind, layouts in workload.adapters.items() for row in counted(layouts, "gradients", f"held, {kind}: ")], new
    rows += largest.rows("gradients", "one stage: ")
    if strategy.gradients == "applied":
        rows += _states(shape, shape.groups, "dx") + _checkpoints(shape, workload.spec.num_layers) + _ahead(shape, HEAD, 0)
    return rows, new


def _head(shape: Shape) -> tuple[list[Row], list[Row]]:
    """Each group's supervised positions, U and statistics; two packed pieces of the table, unless it stays; one group's sweep over a tile."""
    workload, strategy = shape.workload, shape.strategy
    spec, n, groups = workload.spec, shape.supervised, shape.groups
    table, rows = workload.opened(workload.table), workload.opened(workload.norm).rows("weights", "")
    sides = 2 if workload.method == "mezo" else 1
    if workload.whole_head:
        rows += ([] if shape.resident[0] else table.rows("weights", "")) + _widening(shape, workload.table, "as it is stored: ")
        return rows + _states(shape, groups, "x") + _one_state(shape, "dx of the group"), inside.whole_head(shape)
    in_memory = sides * groups if strategy.states == "memory" else 1
    rows += [Row("head", "supervised x", (n, spec.hidden_size), workload.dtype, in_memory)]
    if workload.method != "mezo":
        rows += [Row("head", "U", (n, spec.hidden_size), "float32", in_memory)]
        rows += [Row("head", "h", (n, spec.hidden_size), workload.dtype, in_memory)]  # mezo keeps it in place of x
    if not shape.resident[0]:
        pieces = 2 if shape.packed_rows < spec.vocab_size else 1
        rows += [Row("weights", f"piece of {name}", (min(shape.packed_rows, size[0]), *size[1:]), dtype, pieces) for name, size, dtype in table.arrays]
    else:
        rows += _widening(shape, workload.table, "as it is stored: ")
    return [*rows, Row("head", "dequantised tile", (shape.vocabulary_tile, spec.hidden_size), workload.dtype)], inside.head(shape)


def _whole(shape: Shape) -> tuple[list[Row], list[Row]]:
    """Whole-graph autodiff: all weights, all that every layer made and wants again, logits whole, gradients."""
    workload = shape.workload
    spec, layers = workload.spec, workload.spec.num_layers
    rows = workload.opened(workload.norm).rows("weights", "")
    if not shape.resident[0]:
        rows += workload.opened(workload.table).rows("weights", "") + _widening(shape, workload.table, "as it is stored: ")
    for kind, layouts in workload.weights.items():
        rows += counted((workload.opened(layout) for layer, layout in enumerate(layouts) if not shape.stays(kind, layer)), "weights", f"{kind}: ")
    if workload.grad_checkpoint:
        rows += [Row("checkpoints", "x", (shape.tokens, spec.hidden_size), workload.dtype, layers)]
    else:
        rows += [row._replace(part="checkpoints", count=row.count * workload.trained) for row in inside.layer_kept(shape)]
    for kind, layouts in workload.adapters.items():
        rows += counted(layouts, "gradients", f"{kind}: ")
    backward, head = inside.layer_backward(shape, workload.first), inside.whole_head(shape)
    if workload.grad_checkpoint and workload.backend == "mlx":  # which recomputes layers while logits are still there (measured)
        return rows, inside.layer_forward(shape, workload.first) + backward + head
    return rows, max(backward, head, key=lambda found: sum(row.bytes for row in found))
