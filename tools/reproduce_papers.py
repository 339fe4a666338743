"""The tables of the papers that this project implements, measured again: every figure beside the published one.

    python tools/reproduce_papers.py                          everything, into recipes/papers
    python tools/reproduce_papers.py --quick --out quick      a small version of everything, in minutes, to see that it works
    python tools/reproduce_papers.py --only table,tokens      some parts
    python tools/reproduce_papers.py --write                  the report again, from what was measured

Each row is kept in OUT/results.json as soon as it is measured, and a later call measures what is missing; --again measures the parts anew.
OUT/RESULTS.md and the pictures are made from results.json alone. Times mean something on an idle machine only.
"""

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import openblas
import papers_report
from papers_plan import FULL, PARTS, QUICK, RATES, Bench, Plan, Training

from mesp_mlx.errors import UserError

ROOT = Path(__file__).parent.parent
AT_ONCE = 2  # training runs, each on one core


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a reduced version; needs --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: recipes/papers")
    parser.add_argument("--only", type=_parts, default=tuple(PARTS), metavar="PART,…", help="; ".join(f"{name} ({what})" for name, what in PARTS.items()))
    parser.add_argument("--again", action="store_true", help="measure the parts' rows anew")
    parser.add_argument("--write", action="store_true", help="measure nothing, write the report")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out is None:
        parser.error("--quick needs --out DIR: its figures don't belong among the full ones")
    plan, out = QUICK if arguments.quick else FULL, arguments.out or ROOT / "recipes" / "papers"
    try:
        results = Results(out, plan)
        if not arguments.write:
            measure(plan, arguments.only, results, arguments.again)
        written = papers_report.write(out, results.content, plan)
    except (UserError, OSError) as error:
        print(f"reproduce_papers: {error}", file=sys.stderr)
        return 2
    print(f"written to {out}: {', '.join(written)}")
    return 0


class Results:
    """The rows in OUT/results.json, by key: {"command": text, "machine": place in machines, "result": what was measured}."""

    def __init__(self, folder: Path, plan: Plan):
        self.file, self._lock = folder / "results.json", threading.Lock()
        self.content: dict[str, Any] = {"plan": plan.name, "machines": [], "rows": {}}
        if self.file.exists():
            try:
                self.content = json.loads(self.file.read_text(encoding="utf-8"))
                found = self.content["plan"]
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(f"{self.file} isn't what this tool writes ({error}). Move it away, or give another --out.") from None
            if found != plan.name:
                raise UserError(f"{self.file} holds {found} results, and these would be {plan.name} ones. Give another --out.")

    @property
    def rows(self) -> dict[str, Any]:
        return self.content["rows"]

    def put(self, key: str, command: str, result: dict[str, Any]) -> None:
        """Keep a row, at once."""
        here = machine()
        with self._lock:
            if here not in self.content["machines"]:
                self.content["machines"].append(here)
            self.rows[key] = {"command": command, "machine": self.content["machines"].index(here), "result": result}
            self._write()

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.rows.pop(key, None)

    def _write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        new.replace(self.file)


def measure(plan: Plan, parts: Sequence[str], results: Results, again: bool = False) -> None:
    """Measure every row of the parts that is missing, or all of them again.

    Raises:
        UserError: a row can't be measured.
    """
    if again:
        on_demo = {"estimates": "estimates/", "convergence": "training/"}
        dropped = [key for part, start in on_demo.items() if part in parts for key in results.rows if key.startswith(start)]
        results.drop([*dropped, *(bench.key for part in parts for bench in plan.benches(part))])
    print(f"about {plan.seconds(parts, results.rows) / 60:.0f} minutes on two idle cores", flush=True)
    for bench in {bench.key: bench for part in parts for bench in plan.benches(part)}.values():
        _row(results, bench.key, bench.words, lambda bench=bench: step(bench))
    if "estimates" in parts:
        key, words = plan.estimates()
        _row(results, key, words, lambda: _last_line(words))
    if "convergence" in parts:
        _at_once([run for method in reversed(RATES) for run in plan.grid(method)], results)  # the longest first
        _at_once([run for method in reversed(RATES) for run in plan.best(method, results.rows) or []], results)


def step(bench: Bench) -> dict[str, Any]:
    """What tools/bench_step.py measures of it."""
    return _last_line([*bench.words, "--json"])


def train(run: Training) -> dict[str, Any]:
    """Train on the demo as a user would, and read the log: losses, seconds without validation, and passes, by update.

    A run that ends because its loss is not finite gives {"failed": why}.
    """
    with tempfile.TemporaryDirectory(prefix="reproduce-papers-") as name:
        log, adapter = Path(name) / "log.jsonl", Path(name) / "adapter"
        done = _run([*run.words, f"--json-log={log}", f"--adapter-path={adapter}"], {"OPENBLAS_NUM_THREADS": "1"})
        if done.returncode == 1 and (why := _last_error(done.stderr)).startswith("error: "):
            return {"failed": why.removeprefix("error: ")}
        _check(done, run.words)
        events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        model = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["model"]
    return read_log(events) | {"passes_per_update": passes(Path(model), run)}


def read_log(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The curves of a run: by update from 0, the loss of the validation rows and the seconds trained so far; and of the windows, the training loss."""
    trained = [event for event in events if event["event"] == "train"]
    validated = [event for event in events if event["event"] == "validation"]
    seconds, at = {0: 0.0}, 0
    for event in trained:
        seconds[event["iteration"]] = seconds[at] + (event["iteration"] - at) / event["iterations_per_second"]
        at = event["iteration"]
    return {
        "updates": [event["iteration"] for event in validated],
        "val_loss": [event["val_loss"] for event in validated],
        "seconds": [seconds[event["iteration"]] for event in validated],
        "train_updates": [event["iteration"] for event in trained],
        "train_loss": [event["train_loss"] for event in trained],
        "process_peak_bytes": events[-1]["process_peak_bytes"],
    }


def passes(model: Path, run: Training) -> float:
    """How many forward passes over its rows an update is worth, by floating-point operations, with adapters on all layers."""
    from mesp_mlx.model import work
    from mesp_mlx.model.spec import load_spec, read_config

    spec = load_spec(read_config(model))
    update, forward = (work.of_update(spec, method, run.rows, run.tokens, 8).flops for method in (run.method, "forward"))
    return update / forward


@functools.cache
def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    cpu = platform.processor() or platform.machine()
    if sys.platform == "linux":
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in described if line.startswith("model name")), cpu)
        system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    else:
        system = platform.platform(terse=True)
    about = {"cpu": cpu, "cores": os.cpu_count(), "system": system, "python": platform.python_version()}
    return about | {"mlx": _version("mlx"), "numpy": _version("numpy"), "openblas": bool(openblas.environment())}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _row(results: Results, key: str, words: Sequence[str], work: Callable[[], dict[str, Any]]) -> None:
    if key in results.rows:
        return
    print(f"{time.strftime('%H:%M:%S')} {key}", flush=True)
    results.put(key, _shown(words), work())


def _at_once(runs: Sequence[Training], results: Results) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = [pool.submit(_row, results, run.key, run.words, lambda run=run: train(run)) for run in runs]
        for each in started:
            try:
                each.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _shown(words: Sequence[str]) -> str:
    """The command as a reader types it."""
    words = ["mesp-mlx", *words[2:]] if words[:2] == ["-m", "mesp_mlx"] else ["python", *words]
    return " ".join(words)


def _last_line(words: Sequence[str]) -> dict[str, Any]:
    done = _run(words, {})
    _check(done, words)
    return json.loads(done.stdout.splitlines()[-1])


def _run(words: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path)
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths} | environment, capture_output=True, text=True, errors="replace"
    )


def _check(done: subprocess.CompletedProcess[str], words: Sequence[str]) -> None:
    if done.returncode:
        raise UserError(f"{_shown(words)}\nended with status {done.returncode}: {_last_error(done.stderr)}\nWhat was measured before is kept.")


def _last_error(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing; lack of memory?")


def _parts(text: str) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(",") if word.strip())
    if unknown := [word for word in chosen if word not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part is called {unknown[0]}; there are {', '.join(PARTS)}")
    if not chosen:
        raise argparse.ArgumentTypeError(f"no part was named; there are {', '.join(PARTS)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
