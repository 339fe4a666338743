"""The pictures of tools/reproduce_papers.py, and what theory expects in them."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import papers_published as published
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from papers_plan import RATES, SWEPT, Plan, Training

from mesp_mlx.plots import COLOURS, figure, plain_axes

Rows = Mapping[str, Any]
PEAKS, TOKENS, RANKS, COSINES, CURVES = "peaks.png", "tokens.png", "ranks.png", "cosines.png", "convergence.png"
LABELS = {"mesp": "MeSP", "mebp": "MeBP", "mebp-tiled": "MeBP with our loss", "mezo": "MeZO"}
THEIRS = "published: bfloat16, iPhone, sampled"


def draw(folder: Path, rows: Rows, plan: Plan) -> list[str]:
    """Draw what there are rows for; gives the names of the files."""
    drawn = {
        PEAKS: _peaks(rows, plan),
        TOKENS: _sweep(rows, plan, "tokens", "tokens of a row"),
        RANKS: _sweep(rows, plan, "ranks", "rank of the adapters"),
        COSINES: _cosines(rows, plan),
        CURVES: _curves(rows, plan),
    }
    for name, made in drawn.items():
        if made is not None:
            made.savefig(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return [name for name, made in drawn.items() if made is not None]


def mean_chi(n: int) -> float:
    """E[χ_n], the mean length of n standard normal numbers."""
    return math.sqrt(2) * math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2))


def expected_cosine(n: int, d: int) -> float:
    """Of a gradient in d dimensions and the mean of its n projections on random directions, n far below d.

    With a_i the gradient's slopes along directions z_i, the estimate's part along the gradient has length sum(a_i^2) / n, and the rest, of d dimensions,
    sqrt(d sum(a_i^2)) / n: the cosine is sqrt(sum(a_i^2) / d).
    """
    return mean_chi(n) / math.sqrt(d)


def best_runs(method: str, rows: Rows, plan: Plan) -> list[Training]:
    """The finished runs of a method at its best rate."""
    return [run for run in plan.best(method, rows) or [] if run.key in rows and "failed" not in rows[run.key]["result"]]


def mean_curve(results: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Over runs of the same updates: updates, and the means of seconds, passes and val_loss, and val_loss's standard deviation."""
    losses = np.array([result["val_loss"] for result in results])
    updates = np.array(results[0]["updates"])
    return {
        "updates": updates.tolist(),
        "seconds": np.mean([result["seconds"] for result in results], axis=0).tolist(),
        "passes": (updates * results[0]["passes_per_update"]).tolist(),
        "val_loss": losses.mean(axis=0).tolist(),
        "spread": (losses.std(axis=0, ddof=1) if len(losses) > 1 else 0 * losses[0]).tolist(),
    }


def _peaks(rows: Rows, plan: Plan) -> Any:
    if not any(bench.key in rows for bench in plan.benches("table")):
        return None
    made = figure(f"Peak memory of a training step, {plan.tokens} tokens, rank {plan.rank}", 9, 4.6)
    axes = plain_axes(made.subplots(), ylabel="peak memory, MB")
    axes.grid(axis="x", visible=False)
    bars = [(method, True) for method in ("mesp", "mebp-tiled", "mebp")] + [("mesp", False), ("mebp", False)]
    for place, shape in enumerate(plan.shapes):
        for i, (method, ours) in enumerate(bars):
            row = rows.get(plan.bench(method, shape=shape).key)
            measured = row["result"]["allocator_peak_bytes"] / 1e6 if row else None
            size = measured if ours else published.peak(shape, plan.tokens, plan.rank, method) if plan.layers is None else None
            if size is None:
                continue
            at, colour = place + (i - 2) * 0.165 + (0.03 if not ours else 0), COLOURS[method]
            axes.bar(at, size, 0.15, color=colour if ours else "white", edgecolor=colour, hatch=None if ours else "////", linewidth=1)
            axes.text(at, size, f"{size:,.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(plan.shapes)), [shape.replace("qwen", "Qwen").replace("b", "B") for shape in plan.shapes])
    keys = [Patch(color=COLOURS[method], label=f"{LABELS[method]}, ours: float32, allocator") for method in ("mesp", "mebp-tiled", "mebp")]
    theirs = ("mesp", "mebp") if plan.layers is None else ()
    keys += [Patch(facecolor="white", edgecolor=COLOURS[method], hatch="////", label=f"{LABELS[method]}, {THEIRS}") for method in theirs]
    axes.legend(handles=keys, frameon=False, fontsize=9, loc="upper left")
    axes.margins(y=0.08)
    return made


def _sweep(rows: Rows, plan: Plan, part: str, what: str) -> Any:
    benches = plan.benches(part)
    value = "tokens" if part == "tokens" else "rank"
    points = sorted({getattr(bench, value) for bench in benches})
    if not any(bench.key in rows for bench in benches):
        return None
    fixed = f"rank {plan.rank}" if part == "tokens" else f"{plan.tokens} tokens"
    made = figure(f"Peak memory against the {what}: {plan.shapes[0].replace('qwen', 'Qwen').replace('b', 'B')}, {fixed}", 8, 4.8)
    axes = plain_axes(made.subplots(), xlabel=what, ylabel="peak memory, MB")
    for method in SWEPT:
        ours = [(getattr(b, value), rows[b.key]["result"]["allocator_peak_bytes"] / 1e6) for b in benches if b.method == method and b.key in rows]
        like = [b for b in benches if b.method == method and b.layers is None]
        theirs = [(getattr(b, value), size) for b in like if (size := published.peak(b.shape, b.tokens, b.rank, method)) is not None]
        axes.plot(*zip(*ours, strict=True), color=COLOURS[method], marker="o", linewidth=2) if ours else None
        axes.plot(*zip(*theirs, strict=True), color=COLOURS[method], marker="s", markerfacecolor="white", linestyle="--", linewidth=1.5) if theirs else None
    _logarithmic(axes, points)
    keys = [Line2D([], [], color=COLOURS[method], marker="o", linewidth=2, label=f"{LABELS[method]}, ours: float32, allocator") for method in SWEPT]
    keys += [
        Line2D([], [], color=COLOURS[method], marker="s", markerfacecolor="white", linestyle="--", label=f"{LABELS[method]}, {THEIRS}")
        for method in (("mesp", "mebp") if plan.layers is None else ())
    ]
    made.legend(handles=keys, frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    return made


def _logarithmic(axes: Any, points: Sequence[int]) -> None:
    """Both axes, with ticks that read as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(points, [f"{point:,}" for point in points])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [size * ten for ten in (1, 10, 100, 1000, 10000) for size in (1, 2, 5) if low <= size * ten <= high]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])


def _cosines(rows: Rows, plan: Plan) -> Any:
    row = rows.get(plan.estimates()[0])
    if row is None:
        return None
    result = row["result"]
    counts, d = [int(n) for n in result["estimates"]], result["parameters"]
    made = figure(f"MeZO's estimate and the true gradient, {d:,} parameters", 8, 4.8)
    axes = plain_axes(made.subplots(), xlabel="random directions averaged, n", ylabel="cosine with the true gradient")
    means = [float(np.mean(result["estimates"][str(n)]["cosine"])) for n in counts]
    for n in counts:
        each = result["estimates"][str(n)]["cosine"]
        axes.scatter([n] * len(each), each, s=14, color=COLOURS["mezo"], alpha=0.35, linewidth=0, label="one estimate" if n == counts[0] else None)
    axes.plot(counts, means, color=COLOURS["mezo"], marker="o", linewidth=0, markersize=9, label="mean over estimates")
    line = np.unique(np.round(np.geomspace(counts[0], counts[-1], 60)).astype(int))
    axes.plot(line, [expected_cosine(int(n), d) for n in line], color="0.2", linewidth=1.3, label=r"expected of random directions, $E[\chi_n]/\sqrt{d}$")
    axes.axhline(published.MEZO_COSINE, color=COLOURS["mebp"], linestyle="--", linewidth=1.3, label="published by MeSP's authors: about 0.001")
    axes.axhline(1, color=COLOURS["mesp"], linewidth=2, label="exact methods: 1")
    for n, mean in zip(counts, means, strict=True):
        axes.annotate(f"{mean:.5f}", (n, mean), xytext=(10, -12), textcoords="offset points", fontsize=9)
    axes.set(xscale="log", yscale="log", ylim=(0.1 * expected_cosine(counts[0], d), 2))
    axes.set_xlim(counts[0] / 1.4, counts[-1] * 1.8)
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.02, 0.92))
    return made


def _curves(rows: Rows, plan: Plan) -> Any:
    curves = {}
    for method in RATES:
        if runs := best_runs(method, rows, plan):
            curves[method] = (mean_curve([rows[run.key]["result"] for run in runs]), runs[0].rate, len(runs))
    if not curves:
        return None
    seeds = max(count for _, _, count in curves.values())
    made = figure(f"Validation loss on the demo: mean of {seeds} seeds, shaded by one standard deviation", 13, 4.6)
    panels = made.subplots(1, 3, sharey=True)
    wanted = {"updates": "updates", "seconds": "seconds of training, one core", "passes": "forward passes, by floating-point operations"}
    for axes, (x, label) in zip(panels, wanted.items(), strict=True):
        plain_axes(axes, xlabel=label, ylabel="validation loss" if x == "updates" else "")
        for place, (method, (curve, rate, _)) in enumerate(curves.items()):
            loss, spread = np.array(curve["val_loss"]), np.array(curve["spread"])
            name = f"{LABELS[method]}, {'SGD' if method == 'mezo' else 'AdamW'}, rate {rate:g}"
            style = {"color": COLOURS[method], "linestyle": "--" if method == "mebp" else "-", "linewidth": 3 if method == "mesp" else 1.8, "zorder": 2 + place}
            axes.plot(curve[x], loss, label=name, marker="o", markersize=3, **style)
            axes.fill_between(curve[x], loss - spread, loss + spread, color=COLOURS[method], alpha=0.15, linewidth=0)
        axes.set_xlim(left=0)
    made.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return made
