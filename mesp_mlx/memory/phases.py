"""The phases of a step, and what is in memory in each: what lies between stages, the open stage's weights and adapter, and what is inside it."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mesp_mlx.memory import inside
from mesp_mlx.memory.table import Shape, counted
from mesp_mlx.memory.workload import Layout, Row

FORWARD_ATTENTION, FORWARD_MLP, REPLAY = "forward attention", "forward mlp", "replay attention"
BACKWARD_ATTENTION, BACKWARD_MLP = "backward attention", "backward mlp"
FORWARD_LAYER, BACKWARD_LAYER = "forward layer", "backward layer"
EMBEDDING, HEAD, UPDATE, WHOLE = "embedding", "head", "update", "forward and backward"
FORWARD = (FORWARD_ATTENTION, FORWARD_MLP, FORWARD_LAYER)
BACKWARD = (REPLAY, BACKWARD_MLP, BACKWARD_ATTENTION, BACKWARD_LAYER)
AHEAD = 0.3  # of what a stage makes: with this much more room a step takes as long as with any amount, with half of it a third longer (measured)
LITTLE_AHEAD = 0.05  # where what is made are many small blocks, or experts by autodiff, which wait for one another anyway
KINDS = {
    FORWARD_ATTENTION: "attention", REPLAY: "attention", BACKWARD_ATTENTION: "attention", FORWARD_MLP: "mlp", BACKWARD_MLP: "mlp",
    FORWARD_LAYER: "layer", BACKWARD_LAYER: "layer",
}  # fmt: skip


def phases(shape: Shape) -> tuple[str, ...]:
    """Those that a method has, in order."""
    workload = shape.workload
    if workload.method == "backprop":
        return EMBEDDING, WHOLE, UPDATE
    forward = (FORWARD_LAYER,) if workload.plain else (FORWARD_ATTENTION, FORWARD_MLP)
    if workload.method == "mezo":
        return EMBEDDING, *forward, HEAD, UPDATE
    replay = (REPLAY,) if shape.replays else ()
    backward = (BACKWARD_LAYER,) if workload.plain else (*replay, BACKWARD_MLP, BACKWARD_ATTENTION)
    return EMBEDDING, *forward, HEAD, *backward, UPDATE


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
    for layer in shape.edges(workload.first if phase in BACKWARD else 0):
        # The least plan has the smallest tiles: there memory comes before time.
        waits = shape.asked(layer) if phase == BACKWARD_LAYER else phase == BACKWARD_ATTENTION and shape.strategy.query_tile
        ahead = LITTLE_AHEAD if waits else AHEAD
        if workload.generic:
            ahead = min(AHEAD, max(0.0, workload.measured[layer].ahead - inside.OVERSHOOT))
        margin = ahead if workload.backend == "mlx" else None
        yield Moment(rest + _stage(shape, phase, layer), _inside(shape, phase, layer), margin)


def _ends(shape: Shape, phase: str) -> tuple[list[Row], list[Row]]:
    """What is given and what is made in a phase that is no layer's."""
    workload = shape.workload
    if phase == EMBEDDING:
        sides = 2 if workload.method == "mezo" else 1
        return _ahead(shape, phase, 0) + _states(shape, sides * shape.groups - 1, "between stages", workload.state(0)), inside.embedding(shape)
    if phase == UPDATE:
        return _update(shape)
    if phase == WHOLE:
        return _whole(shape)
    given, made = _head(shape)
    return _checkpoints(shape, workload.spec.num_layers) + _ahead(shape, phase, 0) + given, made


def _stage(shape: Shape, phase: str, layer: int) -> list[Row]:
    """What is given while a layer's stage computes."""
    workload, strategy, groups, kind = shape.workload, shape.strategy, shape.groups, KINDS[phase]
    rows = _weights(shape, phase, layer) + _adapter(shape, phase, layer) + _checkpoints(shape, layer)
    below = shape.state(kind, layer)
    above = shape.state("mlp", layer) if kind == "attention" else _after(shape, layer)
    if phase in FORWARD:
        sides = 2 if workload.method == "mezo" else 1
        saved = workload.method != "mezo" and layer >= workload.first
        in_memory = saved and (strategy.checkpoints, strategy.states) == ("memory", "memory")
        if in_memory and workload.parallel:  # the layer's input is there already
            below = above = workload.state(layer)
        rows += _states(shape, sides * groups - 1, "between stages", max(below, above))
        rows += _own_checkpoints(shape, phase, layer) if saved else []
        return rows if in_memory and _input_is_saved(shape, phase) else rows + _one_state(shape, "x", below)
    rows += _gradients(shape, phase, layer) + _saved(shape, phase, layer)
    if phase == REPLAY:
        rows += _states(shape, groups - 1, "m of other groups", workload.state(layer))
        return rows + (_states(shape, groups, "dy", _after(shape, layer)) if strategy.states == "memory" else [])
    if phase == BACKWARD_MLP and shape.replays:
        rows += _states(shape, groups, "m", workload.state(layer))
    if above == below:
        return rows + _states(shape, groups, "dy", above)
    return rows + _states(shape, 1, "dy", above) + _states(shape, groups - 1, "dy and dx of other groups", max(above, below))


def _inside(shape: Shape, phase: str, layer: int) -> list[Row]:
    kinds = () if shape.workload.generic else ("attention", "mlp") if shape.workload.plain else (KINDS[phase],)
    dropout = [row for kind in kinds for row in inside.dropout(shape, kind, layer)]
    match phase:
        case "forward attention" | "replay attention":
            return inside.attention_forward(shape, layer) + dropout
        case "backward attention":
            return inside.attention_backward(shape, layer) + dropout
        case "forward mlp":
            return inside.mlp_forward(shape, layer) + dropout
        case "backward mlp":
            return inside.mlp_backward(shape, layer) + dropout
        case "forward layer":
            return inside.layer_forward(shape, layer) + dropout
    return inside.layer_backward(shape, layer) + dropout


def _input_is_saved(shape: Shape, phase: str) -> bool:
    return phase in (FORWARD_ATTENTION, FORWARD_LAYER) or shape.strategy.keep in ("inputs", "attention", "all")


def _one_state(shape: Shape, name: str, width: int) -> list[Row]:
    return [Row("states", name, (shape.tokens, width), shape.workload.dtype)]


def _states(shape: Shape, groups: int, name: str, width: int) -> list[Row]:
    """So many groups' arrays between two stages: in the file, that of the group that computes alone."""
    groups = groups if shape.strategy.states == "memory" else min(groups, 1 if name in ("dy", "m", "x") else 0)
    row = Row("states", name, (shape.tokens, width), shape.workload.dtype, groups)
    return [row] if groups else []


def _after(shape: Shape, layer: int) -> int:
    """Numbers a token of what a layer gives."""
    return shape.workload.state(min(layer + 1, shape.workload.spec.num_layers - 1))


def saved_arrays(shape: Shape, kind: str, layer: int, in_memory: bool = False) -> list[tuple[str, int]]:
    """What is kept of a stage for its backward, as (name, width) of arrays [N, width]; replayed arrays are not among them.

    in_memory: without those that wait in the file, among them states that are there already.
    """
    workload, strategy, keep = shape.workload, shape.strategy, shape.strategy.keep
    if in_memory and strategy.checkpoints == "file":
        return []
    kept = [("x", shape.state(kind, layer))] if kind != "mlp" or keep not in ("nothing", "replay") else []
    if in_memory:  # what else is before a stage is there already, and counted there
        kept = [] if strategy.states == "file" else [(name, workload.fresh(layer)) for name, _ in kept]
    if kind == "attention" and keep in ("attention", "all"):
        kept += inside.attention_kept(shape, "q", "attention") + inside.normed(shape)
    if kind == "mlp" and keep == "all":
        kept += inside.mlp_kept(shape, layer)
    return kept + (inside.normed(shape) if kind == "mlp" and keep in ("attention", "all") else [])


def replayed_arrays(shape: Shape, layer: int) -> list[tuple[str, int]]:
    """What a replay hands to its layer's backward, as (name, width)."""
    if not shape.replays:
        return []
    names = ("attention", "q") if shape.strategy.keep == "replay" else ("attention",)
    return [(f"replay's {name}", width) for name, width in inside.attention_kept(shape, *names)]


def _checkpoints(shape: Shape, layers: int) -> list[Row]:
    """The checkpoints of the trained layers below `layers`."""
    workload = shape.workload
    if workload.method == "mezo":
        return []
    found: Counter[tuple[str, int]] = Counter()
    for layer, count in Counter(workload.alike[workload.first : layers]).items():
        for kind in workload.kinds:
            for name, width in saved_arrays(shape, kind, layer, in_memory=True):
                found[f"{kind}: {name}", width] += count * shape.groups
    return [Row("checkpoints", name, (shape.tokens, width), workload.dtype, count) for (name, width), count in found.items()]


def _own_checkpoints(shape: Shape, phase: str, layer: int) -> list[Row]:
    """What the layer itself has saved when one of its stages computes on the way up."""
    first, *_ = shape.workload.kinds
    arrays = saved_arrays(shape, first, layer, in_memory=True)
    if phase == FORWARD_MLP:
        arrays += [array for array in saved_arrays(shape, "mlp", layer, in_memory=True) if array[0] == "x"]
    else:
        arrays = [array for array in arrays if array[0] == "x"]
    return [Row("checkpoints", f"of this layer: {name}", (shape.tokens, width), shape.workload.dtype, shape.groups) for name, width in arrays]


def _saved(shape: Shape, phase: str, layer: int) -> list[Row]:
    """What was kept of the layer that is reversed: for all groups in memory, and for the one that computes what its own stage asks for."""
    strategy, groups, own = shape.strategy, shape.groups, KINDS[phase]
    own_arrays = [] if phase == BACKWARD_MLP and shape.replays else saved_arrays(shape, own, layer)
    in_memory = [name for name, _ in saved_arrays(shape, own, layer, in_memory=True)]
    arrays = [(f"{own}'s {name}", width, groups if name in in_memory else 1) for name, width in own_arrays]
    if phase == BACKWARD_MLP:
        arrays += [(f"attention's {name}", width, groups) for name, width in saved_arrays(shape, "attention", layer, in_memory=True)]
    if phase != REPLAY and (phase != BACKWARD_MLP or strategy.checkpoints == "memory"):
        arrays += [(name, width, groups if strategy.checkpoints == "memory" else 1) for name, width in replayed_arrays(shape, layer)]
    return [Row("checkpoints", name, (shape.tokens, width), shape.workload.dtype, count) for name, width, count in arrays]


def _weights(shape: Shape, phase: str, layer: int) -> list[Row]:
    """The open stage's frozen weights, those held for a moment longer, and those that are read ahead."""
    workload, strategy, kind = shape.workload, shape.strategy, KINDS[phase]
    own = workload.weights[kind][layer]
    rows = [] if shape.stays(kind, layer) else workload.opened(own).rows("weights", f"{kind}: ")
    if kind == "mlp" and not shape.stays(kind, layer):
        rows += workload.expert(layer).rows("weights", "one expert, the next: ", 2)
    if phase == BACKWARD_MLP and strategy.hold and shape.replays and not shape.stays("attention", layer):
        rows += workload.opened(workload.weights["attention"][layer]).rows("weights", "held attention: ")
    # What is read ahead is there as it is stored; where nothing is, the stage itself was, beside what became of it.
    return rows + (_ahead(shape, phase, layer) or _widening(shape, own, f"{kind}, as it is stored: "))


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
    workload = shape.workload
    layers, kinds, kind = workload.spec.num_layers, workload.kinds, KINDS.get(phase)
    if phase in (EMBEDDING, *FORWARD):
        rest = kinds[kinds.index(kind) + 1 :] if kind else kinds
        order = [(other, layer) for other in rest] + [(other, above) for above in range(layer + 1, layers) for other in kinds]
        yield from (stage for stage in order if not shape.stays(*stage))
        yield "", 0
        phase, kind = HEAD, None
    if workload.method == "mezo":
        return
    sequence = kinds[::-1]
    if shape.replays:
        sequence = ("attention", *sequence) if not shape.strategy.hold else kinds
    passed = sequence.index("mlp") + 1 if phase == BACKWARD_MLP else 1 if phase == REPLAY else len(sequence)
    order = [(other, layer) for other in sequence[passed:]] if kind else []
    order += [(other, below) for below in range(layers - 1 if phase == HEAD else layer - 1, workload.first - 1, -1) for other in sequence]
    yield from (stage for stage in order if not shape.stays(*stage))


def _adapter(shape: Shape, phase: str, layer: int) -> list[Row]:
    """The open stage's adapter where it comes from the file, and mezo's moved copy of it."""
    workload, kind = shape.workload, KINDS[phase]
    layout = workload.adapters[kind][layer]
    rows = layout.rows("adapter", f"open {kind}: ") if shape.strategy.adapter == "file" else []
    return rows + (layout.rows("adapter", f"moved {kind}: ") if workload.method == "mezo" else [])


def _gradients(shape: Shape, phase: str, layer: int) -> list[Row]:
    """The reversed stage's gradients of the groups before, and those held of the stages above it."""
    workload, kind = shape.workload, KINDS[phase]
    rows: list[Row] = []
    if phase != REPLAY and shape.groups > 1:
        rows += workload.adapters[kind][layer].rows("gradients", f"{kind}, other groups: ")
    if shape.strategy.gradients == "held":
        for other, layouts in workload.adapters.items():
            above = layer if other == "mlp" and phase == BACKWARD_ATTENTION else layer + 1
            rows += counted(layouts[above:], "gradients", f"held, {other}: ")
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
        rows += _states(shape, shape.groups, "dx", workload.spec.hidden_size) + _checkpoints(shape, workload.spec.num_layers) + _ahead(shape, HEAD, 0)
    return rows, new


def _head(shape: Shape) -> tuple[list[Row], list[Row]]:
    """Each group's supervised positions, U and statistics; two packed pieces of the table, unless it stays; one group's sweep over a tile."""
    workload, strategy = shape.workload, shape.strategy
    spec, n, groups, last = workload.spec, shape.supervised, shape.groups, workload.state(workload.spec.num_layers - 1)
    table, rows = workload.opened(workload.table), workload.opened(workload.norm).rows("weights", "")
    sides = 2 if workload.method == "mezo" else 1
    if workload.whole_head:
        rows += ([] if shape.resident else table.rows("weights", "")) + _widening(shape, workload.table, "as it is stored: ")
        return rows + _states(shape, groups, "x", last) + _one_state(shape, "dx of the group", spec.hidden_size), inside.whole_head(shape)
    in_memory = sides * groups if strategy.states == "memory" else 1
    if workload.generic:  # what is after the last layer is computed again, from all that was given
        rows += _states(shape, groups, "x", last)
    else:
        rows += [Row("head", "supervised x", (n, spec.hidden_size), workload.dtype, in_memory)]
    if workload.method != "mezo":
        rows += [Row("head", "U", (n, spec.hidden_size), "float32", in_memory)]
        rows += [Row("head", "h", (n, spec.hidden_size), workload.dtype, in_memory)]  # mezo keeps it in place of x
    if not shape.resident:
        pieces = 2 if shape.packed_rows < spec.vocab_size else 1
        rows += [Row("weights", f"piece of {name}", (min(shape.packed_rows, size[0]), *size[1:]), dtype, pieces) for name, size, dtype in table.arrays]
    else:
        rows += _widening(shape, workload.table, "as it is stored: ")
    if [dtype for _, _, dtype in table.arrays] != [workload.dtype]:
        rows += [Row("head", "dequantised tile", (shape.vocabulary_tile, spec.hidden_size), workload.dtype)]
    return rows, inside.head(shape)


def _whole(shape: Shape) -> tuple[list[Row], list[Row]]:
    """Whole-graph autodiff: all weights, all that every layer made and wants again, logits whole, gradients."""
    workload = shape.workload
    spec, layers, trained = workload.spec, workload.spec.num_layers, Counter(workload.alike[workload.first :])

    def total(found: list[Row]) -> int:
        return sum(row.bytes for row in found)

    rows = workload.opened(workload.norm).rows("weights", "")
    if not shape.resident:
        rows += workload.opened(workload.table).rows("weights", "") + _widening(shape, workload.table, "as it is stored: ")
    for kind, layouts in workload.weights.items():
        rows += counted((workload.opened(layout) for layer, layout in enumerate(layouts) if not shape.stays(kind, layer)), "weights", f"{kind}: ")
    if workload.grad_checkpoint:
        rows += [Row("checkpoints", "x", (shape.tokens, spec.hidden_size), workload.dtype, layers)]
    else:
        kept = ((row, count) for layer, count in trained.items() for row in inside.layer_kept(shape, layer))
        rows += [row._replace(part="checkpoints", count=row.count * count) for row, count in kept]
    for kind, layouts in workload.adapters.items():
        rows += counted(layouts, "gradients", f"{kind}: ")
    backward, head = max((inside.layer_backward(shape, layer) for layer in trained), key=total), inside.whole_head(shape)
    if workload.grad_checkpoint and workload.backend == "mlx":  # which recomputes layers while logits are still there (measured)
        return rows, inside.layer_forward(shape, workload.first) + backward + head
    return rows, max(backward, head, key=total)
