"""What memory buys: step time against peak memory, for budgets from the least plan to the fastest, beside mlx-lm's own step.

    python tools/bench_frontier.py                               SmolLM2-135M's shape, 4 rows of 256 tokens, into recipes/memory
    python tools/bench_frontier.py --layers 2 --points 2 --rounds 1 --out quick
    python tools/bench_frontier.py --draw                        the picture again, from what was measured

Between the least plan and the fastest lie budgets whose sizes grow by equal factors; for each, memory.choose finds the fastest plan. Every point is measured
once a round, by bench_step.py in a process of its own, one point after the other, and every other round backwards, so that a machine that slows down does so
for all; times are medians of the rounds, peaks the largest. Random tokens, all supervised; SGD. OUT/frontier.json and OUT/frontier.png are written.

mlx-lm plain and with its checkpointing are two more points: its trainer's own step, compiled as it compiles it. Both sides have the same matrix product. On a
CPU device, where mx.quantized_matmul is scalar code, that is ours: rows of a weight are dequantised tile by tile and multiplied through OpenBLAS, and mlx-lm's
quantised linears are replaced by modules that do the same and dequantise again in their vjp (mlx_lm_step.py --own-product). On a GPU both multiply packed
weights. Beside each time stands how many multiply-adds with frozen weights a token takes, by count: what is left to explain is not arithmetic.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_step
import make_random_model
import step_plan
from step_plan import positive

from mesp_mlx.errors import UserError
from mesp_mlx.memory.plan import Plan

OUT = Path(__file__).parent.parent / "recipes" / "memory"
PLAIN, CHECKPOINTED = "mlx-lm compiled", "mlx-lm checkpointed, compiled"
THEIRS = {PLAIN: ("mlx-lm, plain", "backprop"), CHECKPOINTED: ("mlx-lm, checkpointed", "backprop-checkpointed")}
# Ours, theirs, of what, and the most that is promised of SmolLM2's shape.
RATIOS = (
    ("fastest", PLAIN, "seconds", 1.0),
    ("fastest", PLAIN, "peak", 0.5),
    ("least", PLAIN, "seconds", 1.4),
    ("least", PLAIN, "peak", None),
    ("least", CHECKPOINTED, "seconds", 1.0),
    ("least", CHECKPOINTED, "peak", None),
)
CLEAR = 11.0  # typographic points between a number and what else is drawn
KEYS = {"seconds": "step_seconds", "peak": "allocator_peak_bytes"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(make_random_model.SHAPES), metavar="NAME")
    parser.add_argument("--layers", type=positive, help="instead of the shape's own depth")
    parser.add_argument("--batch", type=positive, default=4, help="rows of the update")
    parser.add_argument("--seq", type=positive, default=256, help="tokens of a row")
    parser.add_argument("--rank", type=positive, default=8)
    parser.add_argument("--points", type=positive, default=6, help="budgets between the least plan and the fastest")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--iters", type=positive, default=3, help="steps of a round; the first also reads what stays, and compiles")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    file = arguments.out / "frontier.json"
    try:
        if not arguments.draw:
            arguments.out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(measure(arguments), indent=1) + "\n", encoding="utf-8")
        found = json.loads(file.read_text(encoding="utf-8"))
        draw(found, file.with_suffix(".png"))
    except (UserError, OSError) as error:
        print(f"bench_frontier: {error}", file=sys.stderr)
        return 2
    print("\n".join([*table(found["points"]), "", *(said(ratio) for ratio in found["ratios"])]))
    print(f"written to {arguments.out}: {file.name}, {file.with_suffix('.png').name}")
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All points, in rounds.

    Raises:
        UserError: the shape can't be used.
    """
    about = {"shape": arguments.shape, "batch": arguments.batch, "seq": arguments.seq, "rank": arguments.rank, "iters": arguments.iters}
    words = [word for key, value in about.items() for word in (f"--{key}", str(value))]
    layers = arguments.layers or make_random_model.SHAPES[arguments.shape]["num_hidden_layers"]
    words += ["--layers", str(layers)]
    plans = frontier(words, layers, arguments.points)
    tasks: dict[str, list[str]] = {name: [*words, *step_plan.flags_of(plan.strategy)] for name, plan in plans.items()} | dict.fromkeys(THEIRS, words)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    for number in range(arguments.rounds):
        for name in tasks if number % 2 == 0 else reversed(tasks):
            print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr, flush=True)
            rounds[name].append(bench_step.step(tasks[name], name if name in THEIRS else None))
    points = [point(name, results) | {"flags": " ".join(tasks[name])} for name, results in rounds.items()]
    workload = plans["least"].workload
    for each in points:
        if each["name"] in THEIRS:
            each["weight_products_per_token"] = products(workload, THEIRS[each["name"]][1])
    return about | {"layers": layers, "rounds": arguments.rounds, "on_cpu": workload.on_cpu, "points": points, "ratios": ratios(points)}


def frontier(words: Sequence[str], layers: int, between: int) -> dict[str, Plan]:
    """Plans by name, from the least to the fastest: those that differ."""

    def plan(memory: str) -> Plan:
        return step_plan.plan_of(bench_step.parse([*words, "--memory", memory]), "mesp", layers)

    least, fastest = plan("least"), plan("fastest")
    found = {"least": least}
    for size in budgets(least.arrays_peak_bytes, fastest.arrays_peak_bytes, between):
        chosen = plan(f"{size}B")
        if chosen.strategy not in [other.strategy for other in (*found.values(), fastest)]:
            found[f"{size / 1e6:.0f} MB"] = chosen
    return found | {"fastest": fastest}


def budgets(least: int, most: int, between: int) -> list[int]:
    """Sizes between two, each larger than the one before by the same factor."""
    return [round(least * (most / least) ** (i / (between + 1))) for i in range(1, between + 1)]


def products(workload: Any, method: str) -> int:
    """Multiply-adds with frozen weights that a token takes by a method."""
    from mesp_mlx.model import work

    return work.of_update(workload.spec, method, workload.rows, workload.width, workload.rank).weights // (workload.rows * workload.width)


def point(name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of all rounds' times and the largest of their peaks, with what else was measured in the first."""
    found = {"name": name, **results[0], "rounds": [result["step_seconds"] for result in results]}
    found["step_seconds"] = statistics.median(found["rounds"])
    found["cpu_seconds"] = statistics.median(result["cpu_seconds"] for result in results)
    return found | {key: max(result[key] for result in results) for key in ("allocator_peak_bytes", "process_peak_bytes")}


def ratios(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours over theirs, and what it should be at most. `by_round` shows how sure a ratio of medians is."""
    named, found = {each["name"]: each for each in points}, []
    for ours, theirs, of, most in RATIOS:
        one, other = named[ours], named[theirs]
        by_round = [a / b for a, b in zip(one["rounds"], other["rounds"], strict=True)] if of == "seconds" else []
        found.append({"ours": ours, "theirs": theirs, "of": of, "ratio": one[KEYS[of]] / other[KEYS[of]], "at_most": most, "by_round": by_round})
    return found


def said(ratio: Mapping[str, Any]) -> str:
    """A ratio in words."""
    spread = f", {min(ratio['by_round']):.3f} to {max(ratio['by_round']):.3f} by round" if ratio["by_round"] else ""
    line = f"{ratio['ours']} / {ratio['theirs']}, {ratio['of']}: {ratio['ratio']:.3f}{spread}"
    if (most := ratio["at_most"]) is None:
        return line
    return f"{line} (at most {most:.2f}{'' if ratio['ratio'] <= most else ': MISSED'})"


def table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Peak, prediction, times and products of each point, line by line."""
    lines = [f"{'':>30}{'peak MB':>10}{'predicted':>11}{'process MB':>12}{'seconds':>9}{'CPU s':>8}{'M products a token':>20}"]
    for each in points:
        predicted = f"{each['predicted_over_measured']:.3f}" if "predicted_over_measured" in each else ""
        peaks = f"{each['allocator_peak_bytes'] / 1e6:>10.1f}{predicted:>11}{each['process_peak_bytes'] / 1e6:>12.1f}"
        lines.append(f"{each['name']:>30}{peaks}{each['step_seconds']:>9.2f}{each['cpu_seconds']:>8.2f}{each['weight_products_per_token'] / 1e6:>20.0f}")
    return lines


def draw(found: Mapping[str, Any], file: Path) -> None:
    """The picture: numbered points, explained beside it, so that no label hides another."""
    from mesp_mlx.plots import COLOURS, MEGABYTE, figure, plain_axes

    tokens = f"{found['layers']} layers, {found['batch']} × {found['seq']} tokens, rank {found['rank']}, float32; medians, rounds: {found['rounds']}"
    how = "multiplied by mx.quantized_matmul"
    if found["on_cpu"]:
        how = "dequantised in tiles and multiplied by OpenBLAS, mlx-lm's too (again in its vjp)"
    made = figure(f"A training step of {found['shape']}: time against memory\n{tokens}\nweights are {how}", 11, 5.2)
    axes = plain_axes(made.subplots(), xlabel="peak of arrays, MB", ylabel="seconds a step")
    ours = sorted((each for each in found["points"] if each["name"] not in THEIRS), key=lambda each: each["allocator_peak_bytes"])
    axes.plot([each["allocator_peak_bytes"] / MEGABYTE for each in ours], [each["step_seconds"] for each in ours], color=COLOURS["mesp"], linewidth=1.2)
    places: list[tuple[float, float]] = []
    for number, each in enumerate([*ours, *(each for each in found["points"] if each["name"] in THEIRS)], 1):
        label, method = THEIRS.get(each["name"], (each["name"] if each["name"] in ("least", "fastest") else f"at most {each['name']}", "mesp"))
        x, y = each["allocator_peak_bytes"] / MEGABYTE, each["step_seconds"]
        text = f"{number}  {label}: {x:,.0f} MB, {y:.2f} s, {each['weight_products_per_token'] / 1e6:.0f} M products a token"
        shape = "o" if method == "mesp" else "s"
        axes.plot(x, y, shape, color=COLOURS[method], markersize=8, markeredgecolor="white", linestyle="none", label=text)
        places.append((x, y))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(_ticks())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")
    axes.set_ylim(0, 1.1 * max(each["step_seconds"] for each in found["points"]))
    made.legend(loc="outside right center", fontsize=8.5, frameon=False, labelspacing=0.9)
    made.draw_without_rendering()  # the layout is settled, so that distances can be measured
    points = [tuple(axes.transData.transform(place) * 72 / made.dpi) for place in places]
    for number, (place, offset) in enumerate(zip(places, offsets(points), strict=True), 1):
        axes.annotate(str(number), place, offset, textcoords="offset points", ha="center", va="center", fontsize=8.5, fontweight="bold")
    made.savefig(file)


def offsets(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Where each point's number stands beside it, clear of other points and numbers as far as can be: all in typographic points."""
    taken, found = list(points), []
    for x, y in points:
        around = [(reach * a, reach * b) for reach in (12, 20, 28) for a, b in ((0.75, 0.75), (0, 1), (0, -1), (1, 0), (-1, 0), (-0.75, 0.75))]
        clear = {offset: min(math.dist((x + offset[0], y + offset[1]), other) for other in taken) for offset in around}
        chosen = next((offset for offset in around if clear[offset] >= CLEAR), max(around, key=clear.__getitem__))
        taken.append((x + chosen[0], y + chosen[1]))
        found.append(chosen)
    return found


def _ticks() -> Any:
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1, 2, 5))


if __name__ == "__main__":
    sys.exit(main())
