"""Which plan a run takes: what it is made for, what memory there is for it, and how the choice falls."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mesp_mlx import backend as backends
from mesp_mlx import optim, plan_report
from mesp_mlx.config import Settings, without_effect
from mesp_mlx.data import batches
from mesp_mlx.data.rows import Rows
from mesp_mlx.engine.train import Run, step
from mesp_mlx.errors import UserError
from mesp_mlx.memory import choose, machine, measure
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory.choose import DoesNotFit
from mesp_mlx.memory.machine import Memory
from mesp_mlx.memory.plan import Plan, Workload
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.convert import nearest_folder
from mesp_mlx.model.spec import Spec
from mesp_mlx.report import Report
from mesp_mlx.units import megabytes

if TYPE_CHECKING:
    from mesp_mlx.finetune import Found

MARGIN = 0.05  # of the machine's memory, which auto leaves alone while any plan fits without it


@dataclass(frozen=True)
class Room:
    """What a run may take, in bytes.

    Attributes:
        memory: as --memory was given.
        have: the machine's.
        base_bytes: what the process takes before its first array.
        peak_bytes: the most that it has taken so far.
        working_set_bytes: what Metal recommends for its buffers, where it says.
    """

    memory: str
    have: Memory
    base_bytes: int
    peak_bytes: int = 0
    working_set_bytes: int | None = None

    @property
    def asked(self) -> Literal["auto", "least", "fastest"] | int:
        """What --memory means here."""
        return choose.parse_budget(self.memory, self.have.total_bytes)

    @property
    def cut(self) -> bool:
        """Whether a size was given that the machine does not have."""
        return isinstance(self.asked, int) and self.asked > self.have.most_bytes

    @property
    def budget_bytes(self) -> int:
        """What the process may take in all: the size that was given, as far as the machine has it, or what the machine can spare."""
        given = self.asked
        if isinstance(given, int):
            return min(given, self.have.most_bytes)
        spare = self.have.available_bytes if self.working_set_bytes is None else min(self.have.available_bytes, self.working_set_bytes + self.base_bytes)
        return spare if given == "auto" else self.have.most_bytes


def decide(found: "Found", updates: int, report: Report) -> tuple[Plan, int]:
    """The plan of a run, printed in its short form, and the bytes that the process may take.

    Raises:
        UserError: it does not fit.
    """
    settings, load = found.settings, workload(found, updates)
    optim.make(settings.optimizer, settings.optimizer_arguments, found.backend)  # imports MLX's
    base = measure.process_now_bytes()  # the plan adds what libraries take as they are first used, as now
    speeds = machine.speeds(found.backend, load.on_cpu, _largest_file(found))
    room = room_of(found, base)
    plan = within(room, load, settings.strategy.fixed)
    if plan.strategy.needs_file:
        speeds = machine.with_writing(speeds, nearest_folder(Path(settings.adapter_path)))
    seconds = run_seconds(plan, speeds, found.rows, settings, updates)
    peak = max(plan.total_bytes, room.peak_bytes)
    budget = max(budget_bytes(room, load, settings.strategy.fixed), plan.total_bytes)
    binds = room.asked == "auto" and room.budget_bytes <= budget  # what others hold, and not that auto stays flat
    lines = plan_report.short(plan, allowed(room, budget), peak, room.have.others_bytes if binds else 0, seconds, updates)
    if more := faster(room, load, settings.strategy.fixed):
        lines["more"] = plan_report.faster(more, 1 - run_seconds(more, speeds, found.rows, settings, updates) / seconds)
    report.panel(
        "plan",
        "plan",
        lines,
        plan_report.facts(plan, speeds) | {"memory": room.memory, "budget_bytes": budget, "predicted_peak_bytes": peak, "updates": updates, "seconds": seconds},
    )
    return plan, budget


def budget_bytes(room: Room, load: Workload, fixed: Mapping[str, Any]) -> int:
    """What a run may take: what its room allows, and as long as nobody says how much, no more than stays flat."""
    return min(room.budget_bytes, choose.flat_bytes(load, room.base_bytes, fixed)) if room.asked == "auto" else room.budget_bytes


def allowed(room: Room, budget: int, whose: str = "this machine can give") -> str:
    """--memory and what it allows, in words."""
    if room.asked in ("least", "fastest"):
        return f"--memory {room.memory}"
    return f"--memory {room.memory}" + (f", cut to the {megabytes(budget)} that {whose}" if room.cut else f": {megabytes(budget)} may be taken")


def least_bytes(load: Workload, fixed: Mapping[str, Any], base_bytes: int) -> int:
    """The smallest peak there is, with choices by hand."""
    return min(plans.make(load, dataclasses.replace(choose.least(load, place), **fixed), base_bytes).total_bytes for place in choose.PLACES)


def try_step(run: Run, plan: Plan) -> None:
    """Make one update with the longest rows, as many as the plan is made for, and report what it took beside what was planned.

    Raises:
        RunStopped: the loss or a gradient is not finite.
    """
    rows, before = run.rows, measure.process_peak_bytes()
    chosen = longest_rows(rows, plan.workload.rows)
    groups = batches.groups(rows.train_set, chosen, rows.limit, rows.widths, plan.strategy.group_tokens)
    started = time.perf_counter()
    loss, supervised, _ = step(run, 0, groups)
    seconds, peak = time.perf_counter() - started, measure.process_peak_bytes()
    arrays = measure.allocator_peak_bytes(run.optimizer.backend.arrays.name)
    planned = max(plan.total_bytes, before)
    allocator = "not counted on NumPy" if arrays is None else f"{megabytes(arrays)} (planned: {megabytes(plan.arrays_peak_bytes)})"
    lines = {
        "memory": f"{megabytes(peak)} by the operating system (planned: {megabytes(planned)})",
        "arrays": allocator,
        "time": f"{seconds:.2f} s, rows of {', '.join(str(group.ids.shape[0]) + ' x ' + str(group.ids.shape[1]) for group in groups)} positions",
        "loss": f"{loss / supervised:.4f}; nothing was saved",
    }
    fields = {"process_peak_bytes": peak, "predicted_peak_bytes": planned, "allocator_peak_bytes": arrays, "predicted_arrays_bytes": plan.arrays_peak_bytes}
    run.report.panel("try_step", "one update, on the longest rows", lines, fields | {"seconds": seconds, "train_loss": loss / supervised})


def plan_of(found: "Found", strategy: Strategy) -> Plan:
    """The plan of a strategy chosen beforehand, for runs that are compared: nothing is refused."""
    return plans.make(workload(found), strategy, measure.process_now_bytes())


def within(room: Room, load: Workload, fixed: Mapping[str, Any]) -> Plan:
    """The plan that --memory asks for; `fixed` are choices by hand.

    Raises:
        UserError: it does not fit; the message says what would help.
    """
    asked = room.asked
    if isinstance(asked, int) and asked < room.peak_bytes:
        needed = max(room.peak_bytes, least_bytes(load, fixed, room.base_bytes))
        raise UserError(
            f"--memory {room.memory}: before the first step this process has taken {megabytes(room.peak_bytes)} already: the interpreter, its libraries, "
            f"reading the model's shape and the rows. Raise --memory to {choose.as_budget(needed)}."
        )
    typical, budget = machine.typical(load.on_cpu), room.budget_bytes
    try:
        if asked in ("least", "fastest"):
            plan = _refused_beyond(budget, _by_name(asked, load, room.base_bytes, fixed))
        elif isinstance(asked, int):
            plan = choose.choose(load, budget, room.base_bytes, typical, fixed)
        else:
            plan = _automatic(room, load, fixed)
    except DoesNotFit as error:
        raise DoesNotFit(_advice(str(error), error.plan, room, fixed), error.plan) from None
    # Rows shorter than the widest then come in groups of no more positions than the plan counts.
    plan = plans.make(load, dataclasses.replace(plan.strategy, group_tokens=plan.shape.tokens), room.base_bytes)
    return plan if asked == "least" else plans.roomier(plan, budget_bytes(room, load, fixed))


def workload(found: "Found", updates: int = 1) -> Workload:
    """What a run is planned for."""
    itemsize = 4 if found.activation_dtype == found.backend.arrays.float32 else 2
    shape = rows_shape(found.settings, found.rows, updates)
    return shaped(found.settings, found.spec, found.modules, found.backend.arrays.name, itemsize, backends.on_cpu(found.backend), *shape)


def rows_shape(settings: Settings, rows: Rows, updates: int) -> tuple[int, int, int]:
    """(rows, width, supervised positions of a row) of the update to plan for: rows of the longest one's width, as many as have the fullest's positions."""
    width = rows.widths[-1]
    count = -(-int(update_positions(rows, settings.rows_per_update, settings.seed, updates).max()) // width)
    return count, width, _supervised(rows, width, count, settings.rows_per_update)


def shaped(
    settings: Settings, spec: Spec, modules: Sequence[str], backend: str, itemsize: int, cpu: bool, rows: int, width: int, supervised: int | None
) -> Workload:
    """The workload of settings on a model, for rows of that width. Of a model of no family with stages of its own layers are measured.

    Raises:
        UserError: the rank is above the model's width; a choice by hand means nothing for the model; it can't be walked layer by layer.
    """
    if settings.lora_parameters.rank > spec.hidden_size:
        raise UserError(f"--rank is {settings.lora_parameters.rank}, above the model's width of {spec.hidden_size}, which no update can fill. Lower it.")
    load = Workload(
        spec=spec,
        modules=tuple(modules),
        method=settings.method,
        tiled_head=settings.tiled_head,
        grad_checkpoint=settings.grad_checkpoint,
        backend="numpy" if backend == "numpy" else "mlx",
        itemsize=itemsize,
        rank=settings.lora_parameters.rank,
        moments=2 if settings.optimizer != "sgd" else int(settings.optimizer_config.sgd.momentum > 0),
        clip=settings.grad_clip > 0,
        dropout=settings.lora_parameters.dropout > 0,
        perturbations=settings.mezo_perturbations,
        rows=rows,
        width=width,
        supervised=supervised,
        on_cpu=cpu,
    )
    if not load.generic:
        return load
    given = {field: value for field, value in settings.strategy.fixed.items() if field in without_effect("mebp", tiled_head=True)}
    if given:
        raise UserError(f"{plan_report.by_hand(given)}: layers of {spec.model_type} are reversed by autodiff, which makes no use of that. Leave it out.")
    from mesp_mlx.model import generic_measured  # imports MLX and mlx-lm

    return generic_measured.measure(load)


def update_positions(rows: Rows, rows_per_update: int, seed: int, updates: int) -> np.ndarray:
    """Positions, padding included, of each update of a run, int64 [updates]."""
    widths = np.asarray(rows.widths)
    padded = widths[np.minimum(np.searchsorted(widths, rows.train_set.lengths(rows.limit) - 1), len(widths) - 1)]
    starts = np.arange(0, len(rows.train), rows_per_update)
    epochs = -(-updates // len(starts))
    each = [np.add.reduceat(padded[batches.epoch_order(rows.train, seed, epoch)], starts) for epoch in range(epochs)]
    return np.concatenate(each)[:updates]


def longest_rows(rows: Rows, count: int) -> np.ndarray:
    """The indices of the longest training rows, the very longest first."""
    lengths = rows.train_set.lengths(rows.limit)[rows.train]
    return rows.train[np.argsort(-lengths, kind="stable")[:count]]


def run_seconds(plan: Plan, speeds: plans.Speeds, rows: Rows, settings: Settings, updates: int) -> float:
    """Of all updates: each costs as an update of rows of equal width with the mean of their positions."""
    mean = float(update_positions(rows, settings.rows_per_update, settings.seed, updates).mean())
    count = min(settings.rows_per_update, len(rows.train))
    typical = dataclasses.replace(plan.workload, rows=count, width=max(1, round(mean / count)))
    return updates * dataclasses.replace(plan, workload=typical).seconds(speeds)


def room_of(found: "Found", base_bytes: int) -> Room:
    """What a run in this process may take."""
    backend = found.backend
    working = None if backends.on_cpu(backend) else machine.working_set_bytes(backend.arrays.name)
    return Room(found.settings.memory, machine.memory(), base_bytes, measure.process_peak_bytes(), working)


def _by_name(name: str, load: Workload, base_bytes: int, fixed: Mapping[str, Any]) -> Plan:
    strategy = choose.least(load) if name == "least" else choose.fastest(load)
    return plans.make(load, dataclasses.replace(strategy, **fixed), base_bytes)


def _refused_beyond(budget_bytes: int, plan: Plan) -> Plan:
    if plan.total_bytes > budget_bytes:
        raise DoesNotFit(choose.reason(plan, budget_bytes), plan)
    return plan


def _automatic(room: Room, load: Workload, fixed: Mapping[str, Any]) -> Plan:
    """The fastest that is flat and leaves a margin; else that fits at all; else the least, while the machine has the memory if others are pushed aside."""
    spare, typical = room.budget_bytes, machine.typical(load.on_cpu)
    flat = choose.flat_bytes(load, room.base_bytes, fixed)
    for budget in (min(flat, spare - int(MARGIN * room.have.total_bytes)), min(flat, spare)):
        try:
            return choose.choose(load, budget, room.base_bytes, typical, fixed)
        except DoesNotFit:
            continue
    return choose.choose(load, max(spare, room.have.most_bytes), room.base_bytes, typical, fixed)


def faster(room: Room, load: Workload, fixed: Mapping[str, Any]) -> Plan | None:
    """The fastest plan that the machine has room for, where auto, which stays flat, may not take it."""
    if room.asked != "auto":
        return None
    budget = room.budget_bytes - int(MARGIN * room.have.total_bytes)
    if choose.flat_bytes(load, room.base_bytes, fixed) >= budget:
        return None
    return choose.choose(load, budget, room.base_bytes, machine.typical(load.on_cpu), fixed)


def _advice(reason: str, plan: Plan, room: Room, fixed: Mapping[str, Any]) -> str:
    """A refusal with what else would help."""
    more = []
    if fixed:
        more.append(f"Chosen by hand: {plan_report.by_hand(fixed)}; leave that to the plan.")
    if room.asked == "fastest":
        more.append("--memory auto takes the fastest plan that fits.")
    if not isinstance(room.asked, int) and room.have.others_bytes > 0:
        more.append(f"Closing other programs would give up to {megabytes(room.have.others_bytes)}.")
    if plan.strategy.adapter == "memory" and plan.workload.method != "backprop" and plan.workload.adapter_bytes > 0:
        more.append("--adapters file keeps adapter and moments on disk. A smaller --batch-size changes little.")
    return " ".join([reason, *more])


def _largest_file(found: "Found") -> Path:
    return max((entry.file for entry in found.entries.values()), key=lambda file: file.stat().st_size)


def _supervised(rows: Rows, width: int, count: int, rows_per_update: int) -> int:
    """Supervised positions to count for a row of that width, so that no group has more than as many for each such row that it could hold.

    Short rows share a group: where one wide row fits, several of them do, and theirs may be more.
    """
    most: dict[int, int] = {}  # of the rows that are padded to a width
    for held, chosen in ((rows.train_set, rows.train), (rows.valid_set, rows.valid)):
        padded = np.asarray(rows.widths)[np.searchsorted(rows.widths, held.lengths(rows.limit)[chosen] - 1)]
        for own, supervised in zip(padded.tolist(), held.supervised(rows.limit)[chosen].tolist(), strict=True):
            most[own] = max(most.get(own, 0), supervised)
    wide = np.arange(1, count + 1)  # rows of the full width that a group may hold
    found = [supervised * np.minimum(rows_per_update, np.maximum(1, wide * width // own)) / wide for own, supervised in most.items()]
    return min(width, int(np.ceil(np.max(found))))
