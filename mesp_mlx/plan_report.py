"""A plan in words, tables and JSON values. Sizes come in bytes and are printed in MB = 10^6 bytes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from mesp_mlx.memory.choose import as_budget
from mesp_mlx.memory.measured import Curve, Fit
from mesp_mlx.memory.plan import PARTS, Plan, Speeds, Workload
from mesp_mlx.memory.strategy import ALL
from mesp_mlx.report import duration
from mesp_mlx.units import megabytes

LARGEST = 8  # tensors named
KEPT = {
    "nothing": "backward recomputes each layer from its input",
    "replay": "backward recomputes each layer from its input, q, k and v once",
    "inputs": "backward recomputes each stage from its input",
    "attention": "backward recomputes only gate and up",
    "all": "backward recomputes no product",
}


def short(plan: Plan, allowed: str, peak_bytes: int, others_bytes: int, seconds: float, updates: int) -> dict[str, str]:
    """The short form, line by line.

    allowed: what --memory allows, in words; peak_bytes: that the operating system will count; others_bytes: what closing other programs would give to the
    plan; seconds: of all updates.
    """
    lines = body(plan, allowed, peak_bytes)
    if others_bytes and not fast(plan):
        lines["memory"] += f"; closing other programs would give up to {megabytes(others_bytes)} more"
    return lines | {"time": f"about {duration(seconds / max(1, updates))} per update, {duration(seconds)} in all"}


def faster(plan: Plan, saved: float) -> str:
    """What more memory than auto takes would buy; `saved` is the part of the time."""
    size = f"--memory {as_budget(plan.total_bytes)}"
    return f"{size} would take about {saved:.0%} less time" if saved >= 0.01 else f"no plan is more than a hundredth faster than this one (up to {size})"


def body(plan: Plan, allowed: str, peak_bytes: int | None = None) -> dict[str, str]:
    """What both forms say of a plan."""
    peak = f"{megabytes(peak_bytes or plan.total_bytes)} predicted peak, {megabytes(plan.arrays_peak_bytes)} of it arrays (in the phase '{plan.peak_phase}')"
    squares = dict.fromkeys(fit.kind for fit in plan.workload.measured if fit.grows_with_the_square)
    grows = {"length": f"memory grows with the square of the sequence in {', '.join(squares)} (and layers like it)"} if squares else {}
    return {
        "strategy": words(plan),
        "memory": f"{peak}; {allowed}",
        **grows,
        "disk": disk(plan),
    }


def time(plan: Plan, speeds: Speeds, measured: bool, seconds: float | None, updates: int | None) -> str:
    """What an update takes, and a run."""
    whose = "this machine's measured speed" if measured else "a typical machine's speed and this disk's"
    parts = f"{plan.flops / 1e12:,.2f} TFLOP per update: {duration(plan.compute_seconds(speeds))} of computing, {duration(plan.disk_seconds(speeds))} of disk, "
    together = f"{duration(plan.seconds(speeds))} together, at {whose} ({speeds.matrix_flops_per_second / 1e9:,.0f} GFLOP/s, "
    line = parts + together + f"{speeds.read_bytes_per_second / 1e9:.1f} GB/s read, {speeds.write_bytes_per_second / 1e9:.1f} GB/s written)"
    return line + (f"; {updates:,} updates in {seconds / 60:,.1f} minutes" if seconds is not None and updates else "")


def verdict(found: str, reason: str | None, limit_bytes: int, whose: str) -> str:
    """The verdict in words, with what would make it fit."""
    return f"{found} within the {megabytes(limit_bytes)} that {whose}" + (f": {reason}" if reason else "")


def fast(plan: Plan) -> bool:
    """Whether more memory would make a plan no faster."""
    strategy, workload = plan.strategy, plan.workload
    structured = workload.method == "mesp" and not workload.plain
    return _resident(plan) == workload.stages and (strategy.keep == "all" or not structured) and not strategy.needs_file


def words(plan: Plan) -> str:
    """A strategy in words."""
    strategy, workload = plan.strategy, plan.workload
    stages, count = workload.stages, _resident(plan)
    parts = []
    if count == stages:
        parts.append("all weights stay in memory")
    else:
        ahead = f"{strategy.prefetch} stage{'' if strategy.prefetch == 1 else 's'} ahead" if strategy.prefetch else "none ahead"
        parts.append(f"weights of {count} of {stages} stages stay in memory, others are read as they are needed, {ahead}")
    if workload.method == "mesp" and not workload.plain:
        parts.append(KEPT[strategy.keep])
    if count < stages and not strategy.hold and plan.shape.replays:
        parts.append("attention's weights are read three times")
    if any(layout.arrays for layout in workload.experts):
        parts.append("experts are read one by one, as tokens ask for them (memory is planned for all tokens asking for the same)")
    if workload.method != "mezo":
        parts.append({"applied": "gradients applied as they come", "held": "gradients held", "spilled": "gradients spilled to the file"}[strategy.gradients])
    places = {"checkpoints": strategy.checkpoints, "arrays between stages": strategy.states, "adapter and moments": strategy.adapter}
    if in_file := [name for name, place in places.items() if place == "file"]:
        parts.append(f"{', '.join(in_file)} in the run's file ({megabytes(plan.file_bytes)})")
    parts.append(f"groups of up to {plan.shape.tokens:,} positions")
    return "; ".join(parts)


def disk(plan: Plan) -> str:
    """What an update reads and writes."""
    read, written = plan.read_bytes + plan.spill_read_bytes, plan.spill_written_bytes
    return f"{megabytes(read)} read per update, which does not wear a disk; " + (f"{megabytes(written)} written, which does" if written else "nothing written")


def by_hand(fixed: Mapping[str, Any]) -> str:
    """Choices as flags."""
    flags = []
    for field, value in fixed.items():
        name = "adapters" if field == "adapter" else field.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{name}")
        else:
            flags.append(f"--{name} {'all' if field == 'resident' and value == ALL else value}")
    return " ".join(flags)


def facts(plan: Plan, speeds: Speeds) -> dict[str, Any]:
    """A plan as JSON values."""
    return {
        "strategy": dataclasses.asdict(plan.strategy),
        "predicted_bytes": plan.total_bytes,
        "predicted_arrays_bytes": plan.arrays_peak_bytes,
        "base_bytes": plan.base_bytes,
        "peak_phase": plan.peak_phase,
        "by_part": plan.by_part(),
        "by_phase": plan.by_phase(),
        "file_bytes": plan.file_bytes,
        "read_bytes_per_update": plan.read_bytes + plan.spill_read_bytes,
        "written_bytes_per_update": plan.spill_written_bytes,
        "flops_per_update": plan.flops,
        "evaluations_per_update": plan.evaluations,
        "compute_seconds_per_update": plan.compute_seconds(speeds),
        "disk_seconds_per_update": plan.disk_seconds(speeds),
        "seconds_per_update": plan.seconds(speeds),
        "speeds": dataclasses.asdict(speeds),
    }


def workload_facts(workload: Workload) -> dict[str, Any]:
    """What a plan is made for, as JSON values."""
    fields = [field.name for field in dataclasses.fields(workload) if field.name not in ("spec", "modules", "measured")]
    found = {name: getattr(workload, name) for name in fields} | {"modules": len(workload.modules), "layers": workload.spec.num_layers}
    return found | ({"measured": {fit.kind: _curves(fit) for fit in workload.measured}} if workload.measured else {})


def _curves(fit: Fit) -> dict[str, Any]:
    return {name: value._asdict() if isinstance(value, Curve) else value for name, value in fit._asdict().items() if name != "kind"}


def tensor_facts(plan: Plan) -> list[dict[str, Any]]:
    """Every tensor of a step, as JSON values."""
    return [
        {"name": t.name, "part": t.part, "shape": list(t.shape), "dtype": t.dtype, "count": t.count, "bytes": t.bytes, "phases": sorted(t.phases)}
        for t in plan.tensors
    ]


def print_tables(console: Console, plan: Plan) -> None:
    """By part and phase, then the largest tensors of the fullest phase."""
    phases = list(plan.by_phase())
    by_phase = {phase: plan.by_part(phase) for phase in phases}
    rows = [[part, *(_cell(found.get(part, 0)) for found in by_phase.values())] for part in PARTS if any(part in found for found in by_phase.values())]
    rows.append(["together", *(_cell(sum(found.values())) for found in by_phase.values())])
    tables = _pieces(console, ["MB", *phases], rows, right=len(phases))
    tables[0].title, tables[0].title_justify = "memory by part and phase", "left"
    largest = sorted((tensor for tensor in plan.tensors if plan.peak_phase in tensor.phases), key=lambda tensor: -tensor.bytes)[:LARGEST]
    right = (Column(name, justify="right", no_wrap=True) for name in ("shape", "type", "count", "MB"))
    tensors = Table(
        Column("part", no_wrap=True),
        Column("tensor", overflow="fold"),
        *right,
        box=_style(console),
        title=f"the largest in the phase '{plan.peak_phase}'",
        title_justify="left",
    )
    for tensor in largest:
        shape = " x ".join(map(str, tensor.shape)) if tensor.part not in ("slack", "base") else ""
        tensors.add_row(tensor.part, tensor.name, shape, tensor.dtype if shape else "", str(tensor.count) if shape else "", _cell(tensor.bytes))
    for each in (*tables, "", tensors, ""):
        console.print(each)


def print_matrix(console: Console, models: list[dict[str, Any]], devices: list[str]) -> None:
    """Models by devices: `models` as `plan_command` finds them."""
    rows = [[row["model"], _cell(row["least_bytes"]), _cell(row["fastest_bytes"]), *(row["verdicts"][name] for name in devices)] for row in models]
    for each in (*_pieces(console, ["model", "least, MB", "fastest, MB", *devices], rows, right=2), ""):
        console.print(each)


def print_lines(console: Console, lines: Mapping[str, str]) -> None:
    """Name and text, one under the other."""
    width = max(map(len, lines))
    for name, text in lines.items():
        console.print(f"{name:<{width}}  {text}", soft_wrap=not console.is_terminal)


def _pieces(console: Console, names: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> list[Table]:
    """A table, in as many pieces as the console is too narrow for, each with the first column; `right` columns after that one are numbers.

    Where it would take pieces, names are broken between words first.
    """

    def widths(names: Sequence[str]) -> list[int]:
        lines = [name.split("\n") for name in names]
        return [3 + max(map(len, (*above, *(row[column] for row in rows)))) for column, above in enumerate(lines)]

    if sum(widths(names)) >= console.width:
        names = [name.replace(" ", "\n") for name in names]
    pieces: list[list[int]] = [[]]
    taken, (first, *others) = 0, widths(names)
    for column, width in enumerate(others, start=1):
        if pieces[-1] and 1 + first + taken + width > console.width:
            pieces.append([])
            taken = 0
        pieces[-1].append(column)
        taken += width
    tables = []
    for piece in pieces:
        numbers = (Column(names[column], justify="right" if column <= right else "left", no_wrap=True) for column in piece)
        table = Table(Column(names[0], no_wrap=True), *numbers, box=_style(console))
        for row in rows:
            table.add_row(row[0], *(row[column] for column in piece), style="bold" if row[0] == "together" else None)
        tables.append(table)
    return tables


def _style(console: Console) -> box.Box | None:
    return box.SIMPLE if console.is_terminal else None


def _resident(plan: Plan) -> int:
    """Stages whose weights stay in memory."""
    stages, resident = plan.workload.stages, plan.strategy.resident
    return stages if resident == ALL or plan.workload.method == "backprop" else min(resident, stages)


def _cell(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f}" if size_bytes else ""
