"""What a step's peak memory grows with: the rows of an update, the depth of the model, the length of a row. Each point is a step by bench_step.py.

    python tools/bench_scaling.py batch     1, 4 and 16 rows of 256 tokens: the same peak, and no weight read more often
    python tools/bench_scaling.py depth     8, 24 and 80 layers: a line; with adapters in memory, in the file, and of rank 1
    python tools/bench_scaling.py length    512 to 4096 tokens, 4 layers: a + bT + cT², and what the square adds to the longest

Qwen2.5-0.5B's shape, the least plan, SGD. A table, then what the points show against what is promised; the last line is a JSON object, also written to --out.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_step
import make_random_model
import numpy as np
import step_plan
from step_plan import positive

from mesp_mlx.errors import UserError

BATCHES, DEPTHS, LENGTHS = (1, 4, 16), (8, 24, 80), (512, 1024, 2048, 4096)
# What is promised.
FLAT, SQUARE, RANK_1 = 0.05, 0.02, 0.02  # of peaks by rows; of the longest row's peak; of a layer's size a layer
Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    values = {"batch": ("rows of the update", BATCHES, 256, None), "depth": ("layers", DEPTHS, 128, None), "length": ("tokens of a row", LENGTHS, None, 4)}
    for kind, (what, default, seq, layers) in values.items():
        chosen = kinds.add_parser(kind, help=f"peaks by {what}")
        chosen.add_argument("--values", type=step_plan.depths, default=list(default), metavar="N,…", help=f"{what}; default: %(default)s")
        chosen.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(make_random_model.SHAPES), metavar="NAME")
        if kind != "depth":
            chosen.add_argument("--layers", type=positive, default=layers, help="instead of the shape's own depth")
        if seq:
            chosen.add_argument("--seq", type=positive, default=seq, help="tokens of a row")
        chosen.add_argument("--memory", default="least", metavar="PLAN", help="as bench_step.py takes it")
        chosen.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
        chosen.add_argument("--rank", type=positive, default=8)
        chosen.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.kind != "batch" and len(set(arguments.values)) < (needed := 2 if arguments.kind == "depth" else 3):
        parser.error(f"--values: a fit takes {needed} or more")
    try:
        run: Callable[[argparse.Namespace], tuple[list[Result], list[str]]] = {"batch": batch, "depth": depth, "length": length}[arguments.kind]
        points, findings = run(arguments)
        found = json.dumps({"kind": arguments.kind, "shape": arguments.shape, "points": points, "findings": findings})
        if arguments.out:
            arguments.out.write_text(found + "\n", encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"bench_scaling: {error}", file=sys.stderr)
        return 2
    print("\n".join([*table(points), "", *findings]))
    print(found)
    return 0


def batch(arguments: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """Peaks and reads by rows of an update."""
    points = [_step(arguments, batch=rows, seq=arguments.seq, layers=arguments.layers) for rows in arguments.values]
    peaks = [_peak(point) for point in points]
    apart = max(peaks) / min(peaks) - 1
    loads = {kind: max(point["loads_per_step"][kind] for point in points) for kind in points[0]["loads_per_step"]}
    reads = ", ".join(f"{kind} {times:g} times" for kind, times in loads.items())
    return points, [f"peaks are {apart:.1%} apart{_against(apart, FLAT)}", f"weights read in an update, at most: {reads}"]


def depth(arguments: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """Peaks by layers, with a line through them: adapters in memory, in the file, in memory with rank 1."""
    cases: dict[str, tuple[int, str]] = {
        "adapters in memory": (arguments.rank, "memory"),
        "adapters in the file": (arguments.rank, "file"),
        "rank 1, in memory": (1, "memory"),
    }
    points: list[Result] = []
    findings: list[str] = []
    for name, (rank, place) in cases.items():
        found = [{**_step(arguments, seq=arguments.seq, layers=layers, rank=rank, adapters=place), "case": name} for layers in arguments.values]
        start, slope = fit(arguments.values, [_peak(point) for point in found], 1)
        own, size = int(found[0]["adapter_bytes"]) / arguments.values[0], int(found[0]["layer_bytes"])
        line = (
            f"{name}: {start / 1e6:.2f} MB + {slope / 1e3:.1f} kB a layer, {_off(arguments.values, found, (start, slope)) / 1e3:.1f} kB from the line at most"
        )
        beyond = slope - (own if place == "memory" else 0)
        held = f"adapters are {own / 1e3:.1f} kB a layer" if place == "memory" else "no adapters are in memory"
        findings.append(f"{line}; {held}: beyond them {beyond / 1e3:.1f} kB, {beyond / size:.2%} of a layer's size")
        if rank == 1:
            findings[-1] += f"; in all {slope / size:.2%}{_against(slope / size, RANK_1)}"
        points += found
    return points, findings


def length(arguments: argparse.Namespace) -> tuple[list[Result], list[str]]:
    """Peaks by tokens of a row, with a parabola through them."""
    points = [_step(arguments, seq=tokens, layers=arguments.layers) for tokens in arguments.values]
    a, b, c = fit(arguments.values, [_peak(point) for point in points], 2)
    longest = max(points, key=lambda point: point["seq"])
    square, off = c * longest["seq"] ** 2, _off(arguments.values, points, (a, b, c))
    line = f"peak = {a / 1e6:.2f} MB + {b / 1e3:.2f} kB a token + {c:.4f} bytes a token squared, {off / 1e3:.0f} kB off at most"
    share = square / _peak(longest)
    return points, [line, f"the square at {longest['seq']} tokens: {square / 1e6:.2f} MB, {share:.2%} of the peak there{_against(share, SQUARE)}"]


def fit(x: Sequence[float], y: Sequence[float], degree: int) -> tuple[float, ...]:
    """Coefficients of the polynomial of that degree nearest to the points, by least squares, constant first."""
    scale = max(x)
    powers = np.vander(np.array(x, float) / scale, degree + 1, increasing=True)
    found = np.linalg.lstsq(powers, np.array(y, float), rcond=None)[0]
    return tuple(float(value / scale**power) for power, value in enumerate(found))


def table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """The points, line by line."""
    lines = [f"{'':>22}{'layers':>8}{'rows':>6}{'tokens':>8}{'rank':>6}{'peak MB':>10}{'predicted':>11}{'read MB':>9}{'file MB':>9}{'seconds':>9}"]
    for each in points:
        size = f"{each['layers']:>8}{each['batch']:>6}{each['seq']:>8}{each['rank']:>6}"
        peak, predicted = f"{_peak(each) / 1e6:>10.2f}", f"{each['predicted_over_measured']:>11.3f}"
        disk = f"{each['bytes_read_per_step'] / 1e6:>9.1f}{each['file_written_per_step'] / 1e6:>9.1f}"
        lines.append(f"{each.get('case', ''):>22}{size}{peak}{predicted}{disk}{each['step_seconds']:>9.2f}")
    return lines


def _step(arguments: argparse.Namespace, **own: Any) -> Result:
    """One step, with flags of its own."""
    flags = {key: getattr(arguments, key) for key in ("shape", "memory", "dtype", "rank")} | own
    words = [word for key, value in flags.items() if value is not None for word in (f"--{key}", str(value))]
    print(" ".join(["bench_step.py", *words]), file=sys.stderr, flush=True)
    return bench_step.step(words)


def _peak(point: Mapping[str, Any]) -> int:
    return point["allocator_peak_bytes"]


def _off(x: Sequence[int], points: Sequence[Mapping[str, Any]], coefficients: Sequence[float]) -> float:
    """The largest distance of a point from the fit."""
    return max(abs(_peak(point) - sum(c * at**power for power, c in enumerate(coefficients))) for at, point in zip(x, points, strict=True))


def _against(found: float, most: float) -> str:
    return f" (at most {most:.0%}{'' if found <= most else ': MISSED'})"


if __name__ == "__main__":
    sys.exit(main())
