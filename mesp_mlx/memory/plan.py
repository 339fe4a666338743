"""A plan: what a strategy makes a step use, in memory, on disk and in time. Pure arithmetic: it needs a config.json, and neither weights nor MLX.

How the peak is found. A phase has arrays that are there when a stage begins to compute (weights, adapter, states, checkpoints, gradients), and arrays that
the stage makes; of those, what must exist at once. MLX allocates an operation's output when it is scheduled, up to ten operations ahead of the one that
computes, and waits while more than its limit is allocated. So the fullest phase is given somewhat more than must exist, and the limit is what that comes
to: `arrays_peak_bytes`. Other phases run ahead as far as the same limit lets them.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from mesp_mlx.memory import phases
from mesp_mlx.memory.measure import KEEP_BYTES
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.memory.table import Shape, merged
from mesp_mlx.memory.workload import PARTS, Part, Row, Tensor, Workload
from mesp_mlx.model import work
from mesp_mlx.model.spec import ModelSpec

__all__ = ["PARTS", "Plan", "Speeds", "Tensor", "Workload", "make"]

# What the operating system counts beyond arrays, measured as the most that small and large steps took:
MOST_KEPT_BYTES = 32_000_000  # with so much no page is cleared twice, measured
HEAP_BYTES, HEAP_SHARE = 4_000_000, 0.55  # what glibc keeps of smaller ones, and, of what a stage makes, the holes that arrays of many sizes leave
MLX_BYTES = 5_500_000  # MLX's and the BLAS's code and buffers, as they are first used
SLACK_BYTES = 8_500_000  # the same of Python and NumPy
SLACK, NUMPY_SLACK = 0.02, 0.12  # of the arrays' peak: pages partly used; and what glibc keeps of freed arrays, MLX's being given back at once
KEPT_STAGES = {"nothing": 1, "replay": 1, "inputs": 0, "attention": 1, "all": 2}  # of a layer, those that hand something on: it is computed on its own
HEAD_DIM = 128  # where a model's is not known
NORMED_KEPT_STAGES = KEPT_STAGES | {"attention": 2}  # where a norm reads what the MLP gave


@dataclass(frozen=True)
class Speeds:
    """What a machine does in a second: operations in a product (two to a multiply-add), numbers dequantised, exponentials, bytes read and written."""

    matrix_flops_per_second: float
    read_bytes_per_second: float
    write_bytes_per_second: float
    dequantised_per_second: float = 0.7e9
    exponentials_per_second: float = 0.1e9


TYPICAL = Speeds(150e9, 1e9, 0.5e9)  # what plans are ranked by, so that the same budget gives the same plan whatever else the machine does


@dataclass(frozen=True)
class Plan:
    """A strategy, and what a step takes under it. All sizes in bytes.

    Attributes:
        base_bytes: the process before the first array: interpreter, libraries.
        keep_bytes: freed buffers that allocators may keep for the next arrays.
    """

    workload: Workload
    strategy: Strategy
    base_bytes: int
    keep_bytes: int = KEEP_BYTES

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.workload, self.strategy)

    @cached_property
    def moments(self) -> dict[str, phases.Moment]:
        """The arrays of each phase, in the layer where they are most."""
        return {phase: max(phases.moments(self.shape, phase), key=lambda moment: moment.peak_bytes) for phase in phases.phases(self.shape)}

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every array of a step, with the phases in which it lives; last what only the operating system counts."""
        outside = [
            Row("tokens", "ids, targets, mask", (self.workload.rows, self.workload.width, 9), "uint8"),
            Row("slack", "cache and fragments of the allocator", (self.slack_bytes,), "uint8"),
            Row("base", "interpreter and libraries", (self.base_bytes,), "uint8"),
        ]
        return tuple(merged((phase, [*moment.given, *moment.made, *outside]) for phase, moment in self.moments.items()))

    @cached_property
    def arrays_peak_bytes(self) -> int:
        """The most that arrays take at a time: what the allocator's peak will be."""
        return max(self.by_phase().values())

    @property
    def peak_phase(self) -> str:
        by_phase = self.by_phase()
        return max(by_phase, key=by_phase.__getitem__)

    def by_phase(self) -> dict[str, int]:
        """What arrays take in each phase, those allocated ahead included: what the allocator's limit must leave it."""
        return {phase: moment.peak_bytes for phase, moment in self.moments.items()}

    def by_part(self, phase: str | None = None) -> dict[Part, int]:
        """What each part takes in a phase, the fullest unless one is named, with tokens, slack and base: their sum is total_bytes in the fullest."""
        phase = phase or self.peak_phase
        found: Counter[Part] = Counter()
        for row in self.moments[phase].given + self.moments[phase].made:
            found[row.part] += row.bytes
        found["stage"] += self.moments[phase].ahead_bytes
        found |= Counter({"tokens": self.tokens_bytes, "slack": self.slack_bytes, "base": self.base_bytes})
        return {part: found[part] for part in PARTS if found[part]}

    @property
    def tokens_bytes(self) -> int:
        """Ids, targets and mask of an update's rows, which are NumPy's."""
        return 9 * self.workload.rows * self.workload.width

    @property
    def slack_bytes(self) -> int:
        """What the operating system counts beyond arrays: freed buffers in the allocator's cache, pages not given back."""
        if self.workload.backend == "numpy":
            return SLACK_BYTES + int(NUMPY_SLACK * self.arrays_peak_bytes)
        holes = HEAP_SHARE * max(moment.made_bytes for moment in self.moments.values())
        return SLACK_BYTES + MLX_BYTES + HEAP_BYTES + self.keep_bytes + int(SLACK * self.arrays_peak_bytes + holes)

    @property
    def total_bytes(self) -> int:
        """The most that the operating system will count."""
        return self.base_bytes + self.tokens_bytes + self.arrays_peak_bytes + self.slack_bytes

    @property
    def limit_bytes(self) -> int:
        """Where MLX is to wait before it allocates more, in any phase: it passes this by an array at most."""
        return self.arrays_peak_bytes - max(moment.overshoot_bytes for moment in self.moments.values() if moment.peak_bytes == self.arrays_peak_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the run's file."""
        workload, strategy = self.workload, self.strategy
        adapters = workload.adapter_bytes * (1 + workload.moments) * (strategy.adapter == "file")
        spilled = workload.adapter_bytes * (strategy.gradients == "spilled")
        states = 2 * self._arrays_bytes(max(self._widths)) * (strategy.states == "file")
        if workload.method in ("mezo", "backprop"):
            return adapters + spilled + states * (2 if workload.method == "mezo" else 1)
        saved, replayed = self._saved_bytes(written=False), self._replayed_bytes // max(1, workload.trained)
        # On the way down the places of checkpoints become those of gradients, layer by layer.
        layers = workload.trained
        return adapters + states + max(saved + replayed, spilled * (layers - 1) // layers + saved // layers + replayed, spilled)

    @property
    def read_bytes(self) -> int:
        """Frozen weights read from disk in an update."""
        workload, strategy, shape = self.workload, self.strategy, self.shape
        if workload.method == "backprop":
            return 0
        total = 0
        for kind, layouts in workload.weights.items():
            times = 2 if kind == "attention" and self.shape.replays and not strategy.hold else 1
            for layer, layout in enumerate(layouts[: shape.first_staying[kind]]):
                total += layout.bytes * (1 + times * (layer >= workload.first and workload.method != "mezo"))
        for layer in range(shape.first_staying.get("mlp", 0)):  # of experts those that a token asks for, group by group; see Shape.asked
            passes = 2 if workload.method == "mezo" else 1 + (layer >= workload.first)
            total += int(shape.groups * shape.asked(layer) * workload.expert(layer).bytes) * passes
        vocabulary = workload.spec.vocab_size
        rows = min(workload.rows * workload.width, vocabulary)
        sides = 2 if workload.method == "mezo" else 1
        targets = 0 if shape.resident or workload.whole_head else sides * shape.groups * min(shape.supervised, vocabulary)
        total += (0 if shape.resident else workload.norm.bytes + workload.table.bytes) + workload.table.bytes * (rows + targets) // vocabulary
        total += shape.groups * workload.width * workload.position_bytes
        return total * (workload.perturbations if workload.method == "mezo" else 1)

    @property
    def spill_written_bytes(self) -> int:
        """Written to the run's file in an update."""
        workload, strategy = self.workload, self.strategy
        size = workload.adapter_bytes * ((1 + workload.moments) * (strategy.adapter == "file") + (strategy.gradients == "spilled"))
        if workload.method == "backprop":
            return size
        size += self._state_bytes(writes=True) if strategy.states == "file" else 0
        if strategy.checkpoints == "file" and workload.method != "mezo":
            size += self._saved_bytes(written=True) + self._replayed_bytes
        return size

    @property
    def spill_read_bytes(self) -> int:
        """Read from the run's file in an update."""
        workload, strategy = self.workload, self.strategy
        size = workload.adapter_bytes * (strategy.gradients == "spilled")
        if strategy.adapter == "file":  # on the way up, on the way down and in the update; attention's in a replay too
            opened = sum(layout.bytes for layout in workload.adapters["attention"]) if self.shape.replays else 0
            size += workload.adapter_bytes * (2 + (workload.method != "mezo") + workload.moments) + opened
        if workload.method == "backprop":
            return size
        size += self._state_bytes(writes=False) if strategy.states == "file" else 0
        if workload.method != "mezo":
            once_more = self.shape.replays and "file" in (strategy.checkpoints, strategy.states)
            size += self._saved_bytes(written=False) + self._replayed_bytes
            size += sum(self._arrays_bytes(workload.state(layer)) for layer in self._trained) if once_more else 0
        return size

    @cached_property
    def work(self) -> work.Work:
        """The products of an update."""
        workload, spec = self.workload, self.workload.spec
        method = "backprop-checkpointed" if workload.method == "backprop" and workload.grad_checkpoint else workload.method
        rows, width, rank = workload.rows, workload.width, workload.rank
        if isinstance(spec, ModelSpec):
            return work.of_update(spec, method, rows, width, rank, workload.perturbations, self.strategy.keep, workload.trained)
        adapted, squares = workload.adapter_bytes // 4, sum(fit.grows_with_the_square for fit in workload.measured)
        return work.of_generic(spec, method, rows, width, adapted, workload.perturbations, workload.trained, squares)

    @property
    def weight_products(self) -> int:
        """Multiply-adds with frozen weights in an update."""
        return self.work.weights

    @property
    def flops(self) -> int:
        """Floating-point operations of an update's products."""
        return self.work.flops

    @property
    def evaluations(self) -> int:
        """How often the engine has MLX compute, in an update, the optimizer apart."""
        workload, shape = self.workload, self.shape
        trained, groups = workload.trained, shape.groups
        if workload.method == "backprop":
            return groups + (groups - 1) * 2 * len(workload.modules)
        tiles, pieces = -(-workload.spec.vocab_size // shape.vocabulary_tile), -(-workload.spec.vocab_size // shape.packed_rows)
        if workload.method == "mezo":
            moved, swept = 4 * len(workload.modules), 2 * groups
            head = tiles * (1 + swept) if self.strategy.states == "memory" else swept * 2 * tiles
            return workload.perturbations * (groups + swept * (workload.stages - 1) + moved + head + swept * (3 + pieces))
        kept = (NORMED_KEPT_STAGES if workload.post_norm else KEPT_STAGES)[self.strategy.keep] if workload.method == "mesp" and not workload.plain else 0
        head = groups if workload.whole_head else 3 * groups
        if workload.generic and not workload.whole_head:
            head += tiles * (1 + groups)
        elif not workload.whole_head:
            head += pieces * groups + tiles * (1 + groups) if self.strategy.states == "memory" else groups * (pieces + 2 * tiles)
        sums = (groups - 1) * 2 * len(workload.modules)
        stages = workload.stages - 1
        # Experts compute one by one, after a router.
        routed = sum(int(shape.asked(layer) + 1) * (1 + (layer >= workload.first)) for layer, layout in enumerate(workload.experts) if layout.arrays)
        return groups * (1 + stages + trained * (shape.replays + kept + len(workload.kinds)) + routed) + head + sums

    def compute_seconds(self, speeds: Speeds) -> float:
        """Of an update: products, dequantised weights, softmax."""
        seconds = self.flops / speeds.matrix_flops_per_second
        tokens = self.workload.rows * self.workload.width
        if self.workload.on_cpu:  # each pass of a group dequantises each weight anew
            seconds += self.weight_products / tokens * self.shape.groups / speeds.dequantised_per_second
        spec = self.workload.spec
        width = spec.head_dim if isinstance(spec, ModelSpec) else HEAD_DIM
        return seconds + self.work.attention / width / 4 / speeds.exponentials_per_second

    def disk_seconds(self, speeds: Speeds) -> float:
        """Of an update: weights read, the run's file read and written."""
        return (self.read_bytes + self.spill_read_bytes) / speeds.read_bytes_per_second + self.spill_written_bytes / speeds.write_bytes_per_second

    def seconds(self, speeds: Speeds) -> float:
        """Of an update: weights read ahead hide behind computing, as far as there is any; the run's file is waited for."""
        weights, compute = self.read_bytes / speeds.read_bytes_per_second, self.compute_seconds(speeds)
        waits = self.disk_seconds(speeds) - weights
        return (max(compute, weights) if self.strategy.prefetch else compute + weights) + waits

    @property
    def _trained(self) -> range:
        return range(self.workload.first, self.workload.spec.num_layers)

    @cached_property
    def _widths(self) -> list[int]:
        """Numbers a token of what lies before each stage, and before the head."""
        workload = self.workload
        before = [self.shape.state(kind, layer) for layer in range(workload.spec.num_layers) for kind in workload.kinds]
        return [*before, workload.spec.hidden_size]

    def _arrays_bytes(self, *widths: int) -> int:
        """All groups' arrays [N, width]."""
        return self.shape.groups * self.shape.tokens * sum(widths) * self.workload.itemsize

    @property
    def _replayed_bytes(self) -> int:
        """What replays hand to backward through the file."""
        if self.strategy.checkpoints == "memory":
            return 0
        return sum(self._arrays_bytes(*(width for _, width in phases.replayed_arrays(self.shape, layer))) for layer in self._trained)

    def _saved_bytes(self, written: bool) -> int:
        """Of all checkpoints, what is in the file; or what is written for them, since a state that is there already is not written again."""
        shape, strategy = self.shape, self.strategy
        arrays = [array for layer in self._trained for kind in self.workload.kinds for array in phases.saved_arrays(shape, kind, layer)]
        inputs = [width for name, width in arrays if name == "x"]
        others = [width for name, width in arrays if name != "x"] if strategy.checkpoints == "file" else []
        there = strategy.states == "file"
        return self._arrays_bytes(*others, *(inputs if (not there and strategy.checkpoints == "file") or (there and not written) else []))

    def _state_bytes(self, writes: bool) -> int:
        """Written, or read, of the arrays between two stages."""
        workload, shape, widths = self.workload, self.shape, self._widths
        *before, last = widths
        pieces = -(-workload.spec.vocab_size // shape.packed_rows)
        if workload.method == "mezo":
            passes, head = before[0] + 2 * sum(widths[1:]) if writes else 2 * sum(widths), 1 if writes else pieces + 2
            return workload.perturbations * self._group_bytes(passes, 2 * head * workload.spec.hidden_size)
        reversed_ = widths[workload.first * len(workload.kinds) :]
        replayed = sum(shape.state("mlp", layer) for layer in self._trained) if shape.replays else 0
        if writes:  # of the gradients that of the lowest stage's input is not
            passes, head = sum(widths) + replayed + sum(reversed_[1:]), 2 + pieces
        else:
            passes, head = sum(widths) + replayed + sum(reversed_[1:]), 3 + 2 * pieces
        return self._group_bytes(passes, 0 if workload.whole_head else head * workload.spec.hidden_size)

    def _group_bytes(self, a_token: int, a_supervised: int) -> int:
        """So many numbers of each token of all groups, and of each supervised one."""
        return self.shape.groups * (a_token * self.shape.tokens + a_supervised * self.shape.supervised) * self.workload.itemsize


def roomier(plan: Plan, budget_bytes: int) -> Plan:
    """The plan with allocators that keep as much of freed buffers as the budget has room for: pages need not be cleared anew for every array."""
    if plan.workload.backend != "mlx":
        return plan
    return dataclasses.replace(plan, keep_bytes=max(plan.keep_bytes, min(MOST_KEPT_BYTES, plan.keep_bytes + budget_bytes - plan.total_bytes)))


def make(workload: Workload, strategy: Strategy, base_bytes: int) -> Plan:
    """The plan of a workload under a strategy, in a process that takes base_bytes before its first array."""
    return Plan(workload, strategy, base_bytes)
