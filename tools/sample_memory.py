"""The memory of any command and its children, over time and at its highest.

    python tools/sample_memory.py --device mac-8gb --json run.json --plot run.png -- mesp-mlx finetune --model demo --data demo

The command keeps its standard streams and its exit code; the report goes to standard error. What is counted: the resident set on Linux, the physical
footprint on macOS (which alone counts Metal's buffers), the working set on Windows. A high-water mark is the kernel's own for one process, so that a
spike between two samples is in it; for several processes together no kernel keeps one, and the report gives what it must lie between.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from mesp_mlx.errors import UserError
from mesp_mlx.memory import devices, measure

MEASURES = {"linux": "resident set", "darwin": "physical footprint", "win32": "working set"}  # where the system keeps a high-water mark
MEASURE = MEASURES.get(sys.platform, "resident set")
HELD_SECONDS = 0.05
START_SECONDS, START_INTERVAL = 0.1, 0.001  # the start is sampled closer: it passes fast, and the base lies in it
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


@dataclass
class Process:
    """One process of the command, from one exec to the next; first and last are the samples it was seen in, after the last one it was looked for in vain."""

    pid: int
    parent: int
    after: int
    first: int
    last: int
    name: str = ""
    peak_bytes: int = 0


@dataclass
class Recording:
    """What was seen.

    Attributes:
        reaped_peak_bytes: on Linux, by wait4: the mark of the largest of the command and the children that it waited for. Exec hands down the mark of
            the caller, so that it tells of them only where it is above own_peak_bytes, this tool's own.
        shared_times, shared_sizes: Linux's PSS, summed, at a slower pace.
    """

    command: list[str]
    exit_code: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    outlived: int = 0
    reaped_peak_bytes: int = 0
    own_peak_bytes: int = 0
    times: array = field(default_factory=lambda: array("d"))
    sizes: array = field(default_factory=lambda: array("q"))
    shared_times: array = field(default_factory=lambda: array("d"))
    shared_sizes: array = field(default_factory=lambda: array("q"))
    processes: list[Process] = field(default_factory=list)


def main(words: list[str]) -> int:
    cut = words.index("--") if "--" in words else len(words)
    options, command = _parser().parse_args(words[:cut]), words[cut + 1 :]
    try:
        if not command:
            raise UserError("no command to sample: put it after --, as in sample_memory.py --interval-ms 5 -- python train.py")
        device = devices.find(options.device) if options.device else None
        for file in filter(None, (options.json, options.plot)):
            if not file.parent.is_dir():
                raise UserError(f"{file} can't be written: there is no folder {file.parent}")
        if options.plot and importlib.util.find_spec("matplotlib") is None:
            raise UserError("--plot needs matplotlib, which is not installed here: pip install matplotlib, or leave --plot out")
        recording = record(command, options.interval_ms / 1000)
    except UserError as error:
        print(f"sample_memory: {error}", file=sys.stderr)
        return 2
    found = figures(recording, options.base_after)
    print(_table(recording, found, device), file=sys.stderr)
    try:
        if options.json:
            options.json.write_text(json.dumps(_everything(recording, found, device, options.interval_ms)), encoding="utf-8")
        if options.plot and recording.times:
            _plot(recording, found, device, options.plot)
    except OSError as error:
        print(f"sample_memory: the command ended with {recording.exit_code}, but its report was not written: {error}", file=sys.stderr)
        return recording.exit_code or 2
    return recording.exit_code


def record(command: list[str], interval: float) -> Recording:
    """Run the command to its end, sampling it and its descendants every `interval` seconds.

    Raises:
        UserError: it could not be started.
    """
    recording, child = Recording(command), None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # a grandchild whose parent ended becomes ours, and so stays in sight

    def pass_on(number: int, _: object) -> None:
        # The terminal sends Ctrl-C to the command too; a handler, unlike ignoring, does not outlive the command's exec
        if number != signal.SIGINT and child:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    recording.own_peak_bytes = measure.process_peak_bytes()
    try:
        others = measure.all_pids()
        try:
            child = subprocess.Popen(command)
        except (OSError, ValueError) as error:
            raise UserError(f"{command[0]} can't be run: {getattr(error, 'strerror', None) or error}") from None
        started, cpu = time.perf_counter(), time.process_time()
        tree, tick = _Tree(child.pid, others), started
        tree.sample(recording, 0.0)
        while True:
            over = _ended(child)
            tree.sample(recording, time.perf_counter() - started, over)  # once more when it is over: macOS still tells of a process not yet reaped
            if over:
                break
            now = time.perf_counter()
            tick = max(tick + (min(interval, START_INTERVAL) if now - started < START_SECONDS else interval), now)
            time.sleep(tick - now)
        recording.seconds, recording.cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        recording.outlived = sum(measure.process_bytes(pid) is not None for pid in tree.alive - {child.pid})
        recording.exit_code, recording.reaped_peak_bytes = _reap(child)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return recording


class _Tree:
    """The command's processes now, and what each held at most."""

    def __init__(self, root: int, others: set[int]) -> None:
        self.root, self.alive = root, {root}
        self._parents, self._listed, self._records = {root: os.getpid()}, others, {}
        self._next_listing = self._next_shared = 0.0
        self._looked = self._looked_before = 0

    def sample(self, recording: Recording, now: float, last: bool = False) -> None:
        """Add one sample to the recording."""
        if now >= self._next_listing or last:
            self._looked_before, self._looked = self._looked, len(recording.times)
            self._find(now)
        index = len(recording.times)
        counts = {pid: counted for pid in self.alive if (counted := measure.process_bytes(pid)) is not None}
        total = 0
        for pid, (size, peak) in counts.items():
            known = self._records.get(pid)
            if known is None and counts.get(self._parents[pid]) == (size, peak):
                continue  # between vfork and exec it is its parent's memory, seen twice
            peak = max(size, known.peak_bytes if known else 0) if peak is None else peak
            if known is None or peak < 0.9 * known.peak_bytes:  # a mark falls when exec brings new memory (by less, when the kernel has recounted)
                known = self._records[pid] = Process(pid, self._parents[pid], max(0, index - 1) if known else self._looked_before, index, index)
                recording.processes.append(known)
            if known.last - known.first < 2:
                known.name = measure.process_name(pid)
            known.last, known.peak_bytes = index, max(known.peak_bytes, peak)
            total += size
        if not counts:
            return  # it has ended, and its memory has gone before it
        recording.times.append(now)
        recording.sizes.append(total)
        if sys.platform == "linux" and now >= self._next_shared:
            began = time.process_time()
            shared = [size for pid in counts if (size := measure.proportional_bytes(pid)) is not None]
            if len(shared) == len(counts):
                recording.shared_times.append(now)
                recording.shared_sizes.append(sum(shared))
            self._next_shared = now + max(0.1, 50 * (time.process_time() - began))  # 2 % too

    def _find(self, now: float) -> None:
        began = time.process_time()  # not the clock, which runs on while a busy machine keeps us waiting
        if sys.platform == "linux":
            listed = measure.all_pids()
            fresh = {pid: parent for pid in listed - self._listed if (parent := measure.parent_pid(pid)) is not None}
            self.alive &= listed
            while found := {pid for pid, parent in fresh.items() if pid not in self.alive and parent in self.alive | {os.getpid()}}:
                self.alive |= found
            self._parents |= {pid: fresh[pid] for pid in self.alive & fresh.keys()}
            self._listed = listed
            for pid in self._records.keys() - listed:
                del self._records[pid]  # its number may come again
        else:
            self.alive, waiting = set(), [self.root]
            while waiting:
                self.alive.add(pid := waiting.pop())
                for child in measure.child_pids(pid):
                    if child not in self.alive:
                        self._parents[child] = pid
                        waiting.append(child)
        self._next_listing = now + 50 * (time.process_time() - began)  # at most 2 % of the time, however many processes the machine runs


def _ended(child: subprocess.Popen) -> bool:
    """Whether the command has ended; it is left to be reaped. Adopted grandchildren are reaped on the way."""
    if not hasattr(os, "waitid"):  # Windows, and macOS before Python 3.13
        return child.poll() is not None
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == child.pid:
            return True
        os.waitpid(ended.si_pid, 0)
    return False


def _reap(child: subprocess.Popen) -> tuple[int, int]:
    """(exit code as a shell gives it, the high-water mark in bytes of the largest of the command and the children that it waited for, or 0)."""
    highest = 0
    if child.returncode is None and hasattr(os, "wait4"):
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        highest = usage.ru_maxrss * 1024 if sys.platform == "linux" else 0  # a resident set, which is not what macOS's footprint counts
    code = child.wait()
    return (128 - code if code < 0 else code), highest


def figures(recording: Recording, base_after: float | None = None) -> dict[str, Any]:
    """The sizes that sum a recording up, in bytes, and how they came about; None where there was no time to take a sample.

    The base is what the command held before its work began, which nobody can know in general. Without `base_after` (in seconds) it is the corner where a
    slow start turned into the rise: up to the moment when it first held half of what it kept up for 0.05 s, the first sample nearly as far below the straight
    line to that moment as any. "Longest" is the level above the base at which it spent the most time, within 5 %; None if less than a tenth of all.
    """
    times, sizes, marks = recording.times, recording.sizes, [process.peak_bytes for process in recording.processes]
    reaped = recording.reaped_peak_bytes
    if not marks:
        none = dict.fromkeys(("base_bytes", "base_rule", "longest_bytes", "longest_seconds", "sampled_peak_bytes", "high_water_at_least_bytes"))
        return none | {"high_water_at_most_bytes": reaped or None, "high_water_is_one_process": True}
    if base_after is not None and base_after <= times[-1]:
        base, rule = next(size for moment, size in zip(times, sizes, strict=True) if moment >= base_after), f"after {base_after:g} s, as asked"
    else:
        base, rule = _corner(times, sizes), "where its start turned into its rise"
        rule += f" (it ended before {base_after:g} s)" if base_after is not None else ""
    longest, seconds = _longest(times, sizes, 1.1 * base)
    single = max(marks)
    highest = max(single, reaped if reaped > recording.own_peak_bytes else 0)
    steps = [0] * (len(sizes) + 3)
    for process in recording.processes:  # it may have lived from just after it was looked for in vain to just before the sample after its last
        steps[process.after] += process.peak_bytes
        steps[process.last + 2] -= process.peak_bytes
    together = max(recording.shared_sizes or sizes)  # without PSS, pages in common count once for each process
    one = len(marks) == 1
    return {
        "base_bytes": base,
        "base_rule": rule,
        "longest_bytes": longest,
        "longest_seconds": seconds,
        "sampled_peak_bytes": max(sizes),
        "high_water_at_least_bytes": highest if one else max(highest, together),
        "high_water_at_most_bytes": highest if one else max(accumulate(steps)) + highest - single,
        "high_water_is_one_process": one,
    }


def _corner(times: array, sizes: array) -> int:
    kept, start = 0, 0
    for end in range(len(sizes)):
        while times[end] - times[start] >= HELD_SECONDS:
            kept = max(kept, min(sizes[start : end + 1]))
            start += 1
    half = max(kept, max(sizes) / 2) / 2  # a short run keeps nothing up
    end = next(index for index, size in enumerate(sizes) if size >= half)
    slope = (sizes[end] - sizes[0]) / (times[end] - times[0]) if end else 0.0
    below = [slope * (times[index] - times[0]) + sizes[0] - sizes[index] for index in range(end + 1)]
    return next(size for size, depth in zip(sizes, below, strict=False) if depth >= 0.8 * max(below))  # a stall on the way up makes a deeper corner


def _longest(times: array, sizes: array, above: float) -> tuple[int | None, float | None]:
    spans = sorted((sizes[i], times[i + 1] - times[i]) for i in range(len(sizes) - 1) if sizes[i] > above)
    longest, seconds, start, total = None, 0.0, 0, 0.0
    for end, (size, span) in enumerate(spans):
        total += span
        while spans[start][0] * 1.05 < size:
            total -= spans[start][1]
            start += 1
        if total > seconds:
            longest, seconds = spans[(start + end) // 2][0], total
    return (longest, seconds) if seconds >= max(HELD_SECONDS, times[-1] / 10) else (None, None)


def _table(recording: Recording, found: dict[str, Any], device: devices.Device | None) -> str:
    base, count, samples, used = found["base_bytes"], len(recording.processes), len(recording.times), found["high_water_at_most_bytes"]
    if not samples:
        most = "" if used is None else f"; it and each child it waited for held at most {used / 1e6:.1f} MB"
        return f"{recording.command[0]} ended before the first sample{most}"
    one = found["high_water_is_one_process"]
    summed = "" if one else ", summed; pages in common count once for each process"
    rows = [("base", base, f"sampled: {found['base_rule']}"), ("highest sample", found["sampled_peak_bytes"], f"sampled{summed}")]
    if found["longest_bytes"]:
        rows.insert(1, ("stayed longest at", found["longest_bytes"], f"sampled: for {found['longest_seconds']:.2f} s, within 5 %"))
    if sys.platform not in MEASURES:
        rows.append(("high water, at least", found["high_water_at_least_bytes"], "only sampled: this system keeps no high-water mark"))
    elif one:
        rows.append(("high-water mark", used, "true: the system's own, no spike is missed"))
    else:
        sampled = "PSS" if recording.shared_sizes else "sizes"
        rows.append(("high water, at least", found["high_water_at_least_bytes"], f"the sampled {sampled} summed, or the largest true mark"))
        rows.append(("high water, at most", used, f"the true marks of those alive together, of {count} processes, added"))
    lines = [f"{MEASURE + ', MB':<24}{'':>9}{'above base':>12}"]
    lines += [f"{label:<24}{size / 1e6:>9.1f}{'' if label == 'base' else f'{(size - base) / 1e6:.1f}':>12}  {kind}" for label, size, kind in rows]
    if not one:
        for process in sorted(recording.processes, key=lambda process: -process.peak_bytes)[:5]:
            lines.append(f"  {process.name[:21]:<22}{process.peak_bytes / 1e6:>9.1f}{'':>12}  the own mark of process {process.pid}")
    share = 100 * recording.cpu_seconds / recording.seconds
    lines.append(f"{samples} samples in {recording.seconds:.2f} s, every {1000 * recording.seconds / samples:.1f} ms; sampling took {share:.1f} % of one core")
    if recording.outlived:
        lines.append(f"{recording.outlived} of its processes went on after the command's end, unsampled from then on")
    if device:
        lines.append(
            f"{device.title}: {devices.verdict(device, used)}. {used / 1e6:,.1f} MB is {100 * used / device.limit_bytes:.1f} % of the "
            f"{device.limit_bytes / 1e6:,.0f} MB that one app gets{' (an estimate)' if device.estimate else ''} of {device.memory_bytes / 1e6:,.0f} MB"
        )
        if device.plain_bytes:
            fits = "fits" if used <= device.plain_bytes else "does not fit"
            lines.append(f"  without the increased-memory-limit entitlement it gets {device.plain_bytes / 1e6:,.0f} MB: {fits}")
        lines.append(f"  source: {device.source}")
    return "\n".join(lines)


def _everything(recording: Recording, found: dict[str, Any], device: devices.Device | None, interval_ms: float) -> dict[str, Any]:
    times = recording.times
    result = {key: getattr(recording, key) for key in ("command", "exit_code", "seconds", "outlived", "own_peak_bytes", "reaped_peak_bytes")}
    result |= {"measure": MEASURE, "interval_ms": interval_ms, "sampling_cpu_share": recording.cpu_seconds / recording.seconds, **found}
    result["processes"] = [
        {"pid": p.pid, "parent": p.parent, "name": p.name, "high_water_bytes": p.peak_bytes, "first_seconds": times[p.first], "last_seconds": times[p.last]}
        for p in recording.processes
    ]
    result["series"] = {"seconds": list(times), "bytes": list(recording.sizes)}
    result["pss_series"] = {"seconds": list(recording.shared_times), "bytes": list(recording.shared_sizes)}
    if device and (used := found["high_water_at_most_bytes"]) is not None:
        result["device"] = asdict(device) | {"limit_bytes": device.limit_bytes, "verdict": devices.verdict(device, used)}
    return result


def _plot(recording: Recording, found: dict[str, Any], device: devices.Device | None, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    megabytes = [size / 1e6 for size in recording.sizes]
    axes.fill_between(recording.times, megabytes, alpha=0.25, color="tab:blue", linewidth=0)
    axes.plot(recording.times, megabytes, color="tab:blue", linewidth=1.2, label=f"{MEASURE}, sampled")
    several = not found["high_water_is_one_process"]
    if several and recording.shared_sizes:
        axes.plot(recording.shared_times, [size / 1e6 for size in recording.shared_sizes], ".", color="tab:green", label="PSS, sampled")
    high = found["high_water_at_most_bytes"] / 1e6
    axes.axhline(high, color="tab:red", linestyle="--", linewidth=1.2, label=f"high-water mark{', at most' if several else ''}: {high:,.1f} MB")
    base = found["base_bytes"] / 1e6
    axes.axhline(base, color="0.4", linestyle=":", linewidth=1.2, label=f"base: {base:,.1f} MB")
    top = high
    if device:
        limit = device.limit_bytes / 1e6
        label = f"{device.title}, one app: {limit:,.0f} MB{' (estimate)' if device.estimate else ''}"
        if limit <= 2 * high:
            top = max(top, limit)
            axes.axhline(limit, color="black", linewidth=1.5, label=label)
        else:
            axes.plot([], [], color="black", linewidth=1.5, label=f"{label}, above this picture")
    axes.set(xlabel="time since the start, s", ylabel="memory, MB (10⁶ bytes)", ylim=(0, 1.08 * top), xlim=(0, max(recording.times[-1], 1e-3)))
    name = " ".join(recording.command).replace("\n", " ").replace("$", r"\$")
    axes.set_title(name if len(name) <= 90 else f"{name[:87]}...", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.savefig(file, format="png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sample_memory.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s [options] -- COMMAND ..."
    )
    parser.add_argument("--interval-ms", type=_positive, default=5.0, metavar="MS", help="time between samples (default 5)")
    parser.add_argument("--base-after", type=_positive, metavar="SECONDS", help="take the size at this moment as the base, instead of finding it")
    parser.add_argument("--device", metavar="NAME", help=f"would it fit there? {', '.join(device.name for device in devices.DEVICES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, samples too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory over time (needs matplotlib)")
    return parser


def _positive(text: str) -> float:
    if not text.replace(".", "", 1).isdecimal() or not float(text):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return float(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
