"""What plans predict beside what is measured, on models of real shapes: a table of steps, each by bench_step.py.

    python tools/bench_plan.py                            what is missing, into recipes/memory
    python tools/bench_plan.py --only ranks,strategies    some groups
    python tools/bench_plan.py --quick --out quick        small models, in a minute or two, to see that it works
    python tools/bench_plan.py --write                    the table again, from what was measured

Each step is kept in OUT/results.json as soon as it is measured, and a later call measures what is missing; --again measures the groups anew. OUT/RESULTS.md
is made from results.json alone. Times mean something on an idle machine only; peaks on any.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_step
from reproduce_papers import Results

from mesp_mlx.errors import UserError

OUT = Path(__file__).parent.parent / "recipes" / "memory"
WITHIN = 0.1  # of the measured peak, that a prediction is promised to be
GROUPS = {
    "limits": "The least plan, and what is promised of it",
    "lengths": "Lengths and rows of an update, Qwen2.5-0.5B's shape",
    "shapes": "Larger shapes",
    "ranks": "Ranks and optimizers",
    "strategies": "One choice at a time, beside the defaults: two rows of 256 tokens",
    "methods": "Other methods",
}
ENDS = ("default", "least", "fastest")
CHOICES = (
    "--keep replay", "--keep inputs", "--keep attention", "--keep all", "--no-hold", "--prefetch 0", "--prefetch 3", "--resident 1", "--resident 20",
    "--resident all", "--checkpoints file", "--checkpoints file --keep all", "--states file", "--states file --group-tokens 256", "--group-tokens 256",
    "--gradients applied", "--gradients spilled", "--gradients spilled --optimizer adam", "--adapters file", "--adapters file --optimizer adam",
    "--query-tile 16", "--width-tile 256", "--vocabulary-tile 512", "--weight-tile 1000000", "--memory 60MB", "--memory 100MB", "--memory 200MB",
)  # fmt: skip
SMALL, BASE, MIDDLE, LARGE = "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"


@dataclasses.dataclass(frozen=True)
class Case:
    """A step: bench_step.py's flags, and the most MB that its arrays are promised to take."""

    group: str
    flags: str
    promised: float | None = None

    @property
    def words(self) -> list[str]:
        return self.flags.split()


def cases() -> Iterator[Case]:
    """All of them."""
    for shape, tokens, promised in ((BASE, 256, 42), (BASE, 1024, 72), (MIDDLE, 256, 90), (LARGE, 256, 140)):
        yield Case("limits", f"--shape {shape} --seq {tokens} --memory least", promised)
    for shape, promised in ((BASE, 35), (LARGE, 90)):
        yield Case("limits", f"--shape {shape} --seq 256 --memory least --adapters file --optimizer adam", promised)
    yield Case("limits", f"--shape {BASE} --seq 256 --memory least --dtype bfloat16", 34)
    for tokens in (128, 256, 1024):
        for rows in (1, 4):
            for memory in ENDS:
                yield Case("lengths", f"--shape {BASE} --seq {tokens} --batch {rows} --memory {memory}")
    for shape in (MIDDLE, LARGE):
        yield from (Case("shapes", f"--shape {shape} --seq 256 --memory {memory}") for memory in ("default", "fastest"))
        yield Case("shapes", f"--shape {shape} --seq 256 --batch 4 --memory least")
    for rank in (4, 16, 32):
        for optimizer in ("sgd", "adam"):
            steps = " --iters 2" if optimizer == "adam" else ""  # its moments are there from the end of the first step on
            flags = f"--shape {BASE} --seq 256 --rank {rank} --optimizer {optimizer}{steps}"
            yield from (Case("ranks", f"{flags} --memory {memory}") for memory in ("default", "least"))
    yield from (Case("strategies", f"--shape {BASE} --seq 256 --batch 2 {choice}") for choice in CHOICES)
    yield from (Case("methods", f"--shape {BASE} --seq 256 --method {method}") for method in ("mebp", "mebp-tiled", "mezo", "backprop"))


def quick() -> Iterator[Case]:
    """A few, of a small model and short rows."""
    yield Case("limits", f"--shape {SMALL} --layers 2 --seq 32 --memory least", 42)
    yield from (Case("lengths", f"--shape {SMALL} --layers 2 --seq {tokens} --batch 2 --memory {memory}") for tokens in (16, 64) for memory in ENDS)
    yield from (Case("strategies", f"--shape {SMALL} --layers 2 --seq 16 {choice}") for choice in CHOICES[:2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models; needs --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: recipes/memory")
    parser.add_argument("--only", type=_groups, default=tuple(GROUPS), metavar="GROUP,…", help="; ".join(f"{name} ({what})" for name, what in GROUPS.items()))
    parser.add_argument("--again", action="store_true", help="measure the groups' steps anew")
    parser.add_argument("--write", action="store_true", help="measure nothing, write the table")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out is None:
        parser.error("--quick needs --out DIR: its figures don't belong among the full ones")
    chosen, out = list(quick() if arguments.quick else cases()), arguments.out or OUT
    try:
        out.mkdir(parents=True, exist_ok=True)
        results: Any = Results(out, SimpleNamespace(name="quick" if arguments.quick else "full"))  # type: ignore[arg-type]
        wanted = [] if arguments.write else [case for case in chosen if case.group in arguments.only]
        if arguments.again:
            results.drop(case.flags for case in wanted)
        for case in wanted:
            if case.flags not in results.rows:
                print(f"{time.strftime('%H:%M:%S')} {case.flags}", flush=True)
                results.put(case.flags, f"python tools/bench_step.py {case.flags}", bench_step.step(case.words))
        (out / "RESULTS.md").write_text(report(chosen, results.content), encoding="utf-8")
    except (UserError, OSError) as error:
        print(f"bench_plan: {error}", file=sys.stderr)
        return 2
    print(summary(chosen, results.rows))
    print(f"written to {out}: results.json, RESULTS.md")
    return 0


def summary(chosen: Sequence[Case], rows: Mapping[str, Any]) -> str:
    """How near the predictions are, in a line."""
    found = {case.flags: rows[case.flags]["result"]["predicted_over_measured"] for case in chosen if case.flags in rows}
    if not found:
        return "Nothing was measured."
    lowest, highest = (end(found, key=found.__getitem__) for end in (min, max))
    near = sum(off(ratio) <= WITHIN for ratio in found.values())
    return (
        f"{near} of {len(found)} predictions are within {WITHIN:.0%} of the measured peak. "
        f"The lowest is {found[lowest]:.3f} of it (`{lowest}`), the highest {found[highest]:.3f} (`{highest}`)."
    )


def off(ratio: float) -> float:
    """How far a prediction is from the measured peak, as a part of that."""
    return abs(ratio - 1)


def report(chosen: Sequence[Case], content: Mapping[str, Any]) -> str:
    """The tables, in Markdown."""
    rows = content["rows"]
    machines = ["; ".join(f"{key} {value}" for key, value in machine.items()) for machine in content["machines"]]
    parts = [
        "# Peaks: predicted and measured\n",
        "One training step on a random model of a real shape, float32 unless said otherwise, adapters on all seven projections, all tokens supervised, "
        "on MLX's CPU device. Predicted is what `mesp_mlx.memory.plan` says before the run, from config.json alone; measured is the allocator's peak; "
        "process is what the operating system counted at most. MB = 10^6 bytes. Made by `python tools/bench_plan.py`.\n",
        summary(chosen, rows) + "\n",
        *(f"Machine: {machine}.\n" for machine in machines),
    ]
    for group, title in GROUPS.items():
        measured = [case for case in chosen if case.group == group and case.flags in rows]
        if not measured:
            continue
        with_promise = any(case.promised for case in measured)
        head = [
            "step",
            "predicted MB",
            "measured MB",
            "predicted / measured",
            *(["promised MB"] if with_promise else []),
            "process: predicted",
            "measured",
            "s",
        ]
        lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
        lines += [_line(_cells(case, rows[case.flags]["result"], with_promise)) for case in measured]
        parts += [f"## {title}\n", "\n".join(lines) + "\n"]
    return "\n".join(parts)


def _cells(case: Case, result: Mapping[str, Any], with_promise: bool) -> list[str]:
    ratio, measured = result["predicted_over_measured"], result["allocator_peak_bytes"]
    cells = [f"`{case.flags}`", _mb(result["arrays_peak_predicted_bytes"]), _mb(measured), f"{ratio:.3f}" if off(ratio) <= WITHIN else f"**{ratio:.3f}**"]
    if with_promise:
        kept = case.promised is None or measured <= case.promised * 1e6
        cells.append("" if case.promised is None else f"{case.promised:g}" if kept else f"**{case.promised:g}**")
    return [*cells, _mb(result["process_peak_predicted_bytes"]), _mb(result["process_peak_bytes"]), f"{result['step_seconds']:.1f}"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _groups(text: str) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(",") if word.strip())
    if unknown := [word for word in chosen if word not in GROUPS]:
        raise argparse.ArgumentTypeError(f"no group is called {unknown[0]}; there are {', '.join(GROUPS)}")
    if not chosen:
        raise argparse.ArgumentTypeError(f"no group was named; there are {', '.join(GROUPS)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
