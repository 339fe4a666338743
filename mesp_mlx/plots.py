"""Pictures of what was measured, as PNG. The one place that draws: a process that trains never loads it."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's, which the colour-blind can tell apart.
COLOURS = {
    "mesp": "#0072B2", "mebp": "#D55E00", "mebp-tiled": "#E69F00", "mezo": "#009E73", "backprop": "#555555", "backprop-checkpointed": "#CC79A7",
}  # fmt: skip
PHASES = {
    "forward": "#DCEBF7", "head": "#FBE7B5", "backward": "#EADCF4", "update": "#BFE3C5", "build": "#C9C9C9", "forward and backward, one graph": "#EBEBEB",
}  # fmt: skip
MARKERS = (("o", 11), ("s", 8), ("D", 4.5), ("^", 7), ("x", 5), ("+", 12))  # and their sizes: one fits inside another
MOST_MARKERS = 25  # on a line
MEGABYTE = 1e6
LABEL_POINTS = 22  # the height that a highest point's label takes, above the point
SEEN = 0.002  # of a step: a phase shorter than this can't be seen


def figure(title: str, width: float, height: float) -> Figure:
    """An empty picture of that many inches; the title stands above it, to the left."""
    made = Figure(figsize=(width, height), dpi=150, layout="constrained")
    made.suptitle(title, x=0.01, ha="left", fontsize=12, wrap=True)
    return made


def plain_axes(axes: Axes, **labels: str) -> Axes:
    """The axes with their labels (xlabel, ylabel, title), a faint grid and no frame."""
    axes.set(**labels)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def timelines(steps: Mapping[str, Mapping[str, Any]], bases: Mapping[str, int], title: str, file: Path) -> None:
    """Memory within one step of each method: a panel each on the same scale, phases shaded and named.

    steps: by method, as `Timeline.sampled_step` gives them; bases: what each process held before it began, in bytes.
    """
    columns = min(len(steps), 3 if len(steps) != 4 else 2)
    lines = -(-len(steps) // columns)
    made = figure(title, max(4.2 * columns, 6.5), 0.9 + 3.1 * lines)
    grid = made.subplots(lines, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(steps) :]:
        axes.set_axis_off()
    highest = max(max(step["process_bytes"] + (step["allocator_bytes"] or [])) for step in steps.values()) / MEGABYTE
    for place, (axes, (name, step)) in enumerate(zip(grid.flat, steps.items(), strict=False)):
        plain_axes(axes, title=name, xlabel="time within the step, s", ylabel="memory, MB" if place % columns == 0 else "")
        axes.title.set(color=COLOURS.get(name, "black"), fontweight="bold", fontsize=11)
        end = step["phases"][-1]["end_seconds"]
        axes.set(xlim=(0, end), ylim=(0, highest))
        for phase in step["phases"]:
            axes.axvspan(phase["start_seconds"], phase["end_seconds"], color=PHASES[phase["name"]], linewidth=0)
        process = [size / MEGABYTE for size in step["process_bytes"]]
        axes.plot(step["seconds"], process, color=COLOURS.get(name, "black"), linewidth=1.4)
        _point_out(axes, step["seconds"][process.index(max(process))], max(process), end)
        if step["allocator_bytes"]:
            allocator = [size / MEGABYTE for size in step["allocator_bytes"]]
            axes.fill_between(step["seconds"], allocator, color=COLOURS.get(name, "black"), alpha=0.45, linewidth=0)
        axes.axhline(bases[name] / MEGABYTE, color="0.3", linestyle=":", linewidth=1.1)
    seen = dict.fromkeys(phase["name"] for step in steps.values() for phase in step["phases"] if _share(phase, step) >= SEEN)
    keys: list[Any] = [Patch(facecolor=PHASES[phase], edgecolor="0.6", linewidth=0.5, label=phase) for phase in seen]
    drawn = grid.flat[0].plot([], [], color="0.15", linewidth=1.4, label="process, by the operating system")
    drawn += grid.flat[0].plot([], [], color="0.3", linestyle=":", linewidth=1.1, label="process before it began")
    if any(step["allocator_bytes"] for step in steps.values()):
        drawn.append(Patch(facecolor="0.15", alpha=0.45, label="arrays, by the allocator"))
    made.legend(handles=drawn + keys, loc="outside lower center", ncols=columns + 1, fontsize=9, frameon=False)
    made.draw_without_rendering()  # the layout is settled, so that what is written can be measured
    lowest = min(_name_phases(axes, step) for axes, step in zip(grid.flat, steps.values(), strict=False))
    label = LABEL_POINTS / 72 * made.dpi / grid.flat[0].bbox.height
    grid.flat[0].set_ylim(0, highest / (lowest - label))  # of all: they share it
    made.savefig(file)


def _name_phases(axes: Axes, step: Mapping[str, Any]) -> float:
    """Write the phases' names at the top, along each or across it, as it has the room; their lowest point, of the axes' height."""
    lowest = 1.0
    for phase in step["phases"]:
        room = axes.bbox.width * _share(phase, step)
        middle = (phase["start_seconds"] + phase["end_seconds"]) / 2
        text = axes.text(middle, 0.98, phase["name"], transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=9)
        if text.get_window_extent().width > room:
            text.set_rotation(90)
        taken = text.get_window_extent()
        if taken.width > room or taken.height > axes.bbox.height / 3:
            text.remove()  # the legend has it
        else:
            lowest = min(lowest, (taken.y0 - axes.bbox.y0) / axes.bbox.height)
    return lowest


def _share(phase: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    return (phase["end_seconds"] - phase["start_seconds"]) / step["phases"][-1]["end_seconds"]


def _point_out(axes: Axes, x: float, y: float, end: float) -> None:
    """A dot at a line's highest point, and its height in words above it."""
    axes.plot(x, y, "o", color="0.15", markersize=3.5, clip_on=False)  # whole at an edge too
    side = "left" if x < 0.15 * end else "right" if x > 0.85 * end else "center"
    axes.annotate(f"{y:,.0f} MB", (x, y), (0, 5), textcoords="offset points", ha=side, fontsize=9)


def peaks(sizes: Mapping[str, Mapping[str, int | None]], title: str, file: Path) -> None:
    """The highest memory of each method: bars of the process, what it held before apart, and of the allocator where it counts.

    sizes: by method base_bytes, process_peak_bytes and allocator_peak_bytes.
    """
    counted = any(of["allocator_peak_bytes"] is not None for of in sizes.values())
    made = figure(title, 9, 1.7 + (0.75 if counted else 0.5) * len(sizes))
    axes = plain_axes(made.subplots(), xlabel="peak memory, MB")
    axes.grid(axis="y", visible=False)
    widest = max(of["process_peak_bytes"] or 0 for of in sizes.values()) / MEGABYTE
    thick, shift = (0.36, 0.2) if counted else (0.6, 0.0)
    for place, (name, of) in enumerate(sizes.items()):
        colour = COLOURS.get(name, "black")
        base, peak = (of["base_bytes"] or 0) / MEGABYTE, (of["process_peak_bytes"] or 0) / MEGABYTE
        axes.barh(place - shift, base, thick, color="0.75")
        axes.barh(place - shift, peak - base, thick, left=base, color=colour)
        axes.text(peak + 0.01 * widest, place - shift, f"{peak:,.1f} MB, {peak - base:,.1f} above its base", va="center", fontsize=9)
        if (allocated := of["allocator_peak_bytes"]) is not None:
            axes.barh(place + shift, allocated / MEGABYTE, thick, color=colour, alpha=0.45)
            axes.text(allocated / MEGABYTE + 0.01 * widest, place + shift, f"{allocated / MEGABYTE:,.1f} MB of arrays", va="center", fontsize=9)
    axes.set_yticks(range(len(sizes)), list(sizes))
    axes.set(xlim=(0, 1.46 * widest))
    axes.invert_yaxis()
    keys = [Patch(color="0.75", label="process before it began"), Patch(color="0.25", label="process, by the operating system")]
    if counted:
        keys.append(Patch(color="0.25", alpha=0.45, label="arrays, by the allocator"))
    made.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    made.savefig(file)


def curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], title: str, xlabel: str, ylabel: str, file: Path) -> None:
    """Lines (x, y) by name on the same axes. Where they lie on each other, markers that fit into each other still tell them apart."""
    made = figure(title, 8.5, 4.8)
    axes = plain_axes(made.subplots(), xlabel=xlabel, ylabel=ylabel)
    for (name, (x, y)), (marker, size) in zip(series.items(), itertools.cycle(MARKERS)):
        every = -(-len(x) // MOST_MARKERS)
        axes.plot(x, y, color=COLOURS.get(name), linewidth=1.4, marker=marker, markersize=size, markerfacecolor="none", markevery=every, label=name)
    if all(isinstance(value, int) for x, _ in series.values() for value in x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, handlelength=3)
    made.savefig(file)
