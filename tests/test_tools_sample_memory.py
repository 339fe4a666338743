"""The sampler sees what real small children hold, keeps their streams and exit codes, and says what is true and what only sampled."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from models import tool

ROOT = Path(__file__).parent.parent
MB = 10**6
sampler = tool("sample_memory")
linux = pytest.mark.skipif(sys.platform != "linux", reason="by Linux's counts")


def sample(*words: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "tools" / "sample_memory.py"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)


def measured(tmp_path, code: str, *words: str) -> dict:
    done = sample("--json", str(tmp_path / "report.json"), *words, "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "report.json").read_text()) | {"printed": done.stderr}


@linux
def test_200_mb_above_the_base_and_a_spike_of_300_mb(tmp_path):
    """The whole of the promise, in one command."""
    code = "import time; time.sleep(.3); x = b'x' * 200_000_000; time.sleep(.4); y = b'y' * 100_000_000; time.sleep(.02); del y; time.sleep(.4)"
    report = measured(tmp_path, code)
    assert report["longest_bytes"] - report["base_bytes"] == pytest.approx(200 * MB, rel=0.05)
    assert report["high_water_at_most_bytes"] - report["base_bytes"] == pytest.approx(300 * MB, rel=0.05)
    assert report["high_water_at_most_bytes"] == report["high_water_at_least_bytes"] and report["high_water_is_one_process"]
    assert "true: the system's own" in report["printed"]


@linux
def test_a_spike_between_two_samples_is_in_the_mark(tmp_path):
    """Samples at the start, then one each second."""
    report = measured(tmp_path, "import time; time.sleep(.2); y = b'y' * 150_000_000; del y", "--interval-ms", "1000")
    assert report["sampled_peak_bytes"] < 60 * MB
    assert 150 * MB < report["high_water_at_most_bytes"] < 190 * MB
    assert report["reaped_peak_bytes"] == report["high_water_at_most_bytes"]


@linux
def test_what_exec_hands_down_is_not_taken_for_the_command_s():
    """wait4 tells of a small command what this large process had held."""
    block = b"x" * (100 * MB)
    recording = sampler.record([sys.executable, "-S", "-c", "import time; time.sleep(.1)"], 0.005)
    assert recording.reaped_peak_bytes > len(block)
    assert sampler.figures(recording)["high_water_at_most_bytes"] < 60 * MB


GRANDCHILD = "import time; y = b'y' * 60_000_000; time.sleep(.5)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {GRANDCHILD!r}])"


@linux
def test_children_that_come_and_go(tmp_path):
    code = f"import subprocess, sys; x = b'x' * 60_000_000; subprocess.run([sys.executable, '-c', {CHILD!r}])"
    report = measured(tmp_path, code)
    marks = [process["high_water_bytes"] for process in report["processes"]]
    assert len(marks) == 3 and sorted(mark // (50 * MB) for mark in marks) == [0, 1, 1]
    parents = {process["pid"]: process["parent"] for process in report["processes"]}
    assert sum(parent in parents for parent in parents.values()) == 2
    at_least, at_most = report["high_water_at_least_bytes"], report["high_water_at_most_bytes"]
    assert max(marks) <= at_least <= at_most and at_most <= sum(marks), "never more: a child between vfork and exec shows its parent's memory"
    assert report["sampled_peak_bytes"] <= at_most and report["pss_series"]["bytes"]
    assert "at least" in report["printed"] and "at most" in report["printed"] and "count once for each process" in report["printed"]


@linux
def test_processes_one_after_the_other_are_not_added(tmp_path):
    report = measured(tmp_path, f"import subprocess, sys, time; [(subprocess.run([sys.executable, '-c', {GRANDCHILD!r}]), time.sleep(.3)) for _ in range(2)]")
    assert len(report["processes"]) == 3
    assert 65 * MB < report["high_water_at_most_bytes"] < 110 * MB


@linux
def test_a_grandchild_whose_parent_ended_stays_in_sight(tmp_path):
    # The orphan holds its grandparent's pipe open, which so waits for it; without the pipe it outlives the command
    orphan = "import time; y = b'y' * 60_000_000; time.sleep(.3)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    report = measured(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {parent!r}], capture_output=True)")
    assert max(process["high_water_bytes"] for process in report["processes"]) > 60 * MB and report["outlived"] == 0
    report = measured(tmp_path, parent)
    assert report["outlived"] == 1 and "went on after" in report["printed"]


def test_streams_and_exit_code_pass_through():
    code = "import sys; print(input()); print('err', file=sys.stderr); sys.exit(7)"
    done = sample("--", sys.executable, "-c", code, input="hello\n")
    assert (done.returncode, done.stdout) == (7, "hello\n")
    assert done.stderr.startswith("err\n") and "MB" in done.stderr


def test_options_after_the_dashes_are_the_command_s():
    done = sample("--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--json", "--", "x")
    assert done.stdout == "['--json', '--', 'x']\n"


@pytest.mark.skipif(sys.platform == "win32", reason="by signals")
def test_ended_by_a_signal():
    assert sample("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 15)").returncode == 128 + 15


@pytest.mark.skipif(sys.platform == "win32", reason="by signals")
@pytest.mark.parametrize("to_group", [True, False], ids=["ctrl-c", "sigterm"])
def test_interrupted_it_still_reports(to_group):
    """A terminal sends Ctrl-C to the whole group; a SIGTERM sent to the tool alone is passed on."""
    code = (
        "import signal, sys, time\nfor s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, lambda n, _: sys.exit(40 + n))\nprint(flush=True)\ntime.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / "sample_memory.py"), "--", sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, env=environment, **pipes) as running:
        running.stdout.readline()
        os.killpg(running.pid, signal.SIGINT) if to_group else running.terminate()
        _, printed = running.communicate(timeout=30)
    assert running.returncode == 40 + (signal.SIGINT if to_group else signal.SIGTERM)
    assert "samples in" in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--", "no-such-command-here"), "sample_memory: no-such-command-here can't be run: "),
        ((), "sample_memory: no command to sample: put it after --"),
        (("--device", "mac-9gb", "--", "true"), "sample_memory: no device is called mac-9gb; there are mac-8gb, "),
        (("--json", "no/folder/x.json", "--", "true"), "x.json can't be written: there is no folder no/folder"),
        (("--interval-ms", "0", "--", "true"), "argument --interval-ms: 0 is not a positive number"),
        (("--base-after", "-1", "--", "true"), "argument --base-after: "),
        (("true",), "unrecognized arguments: true"),
    ],
)
def test_what_cannot_be_done(words, message):
    done = sample(*words)
    assert done.returncode == 2 and message in done.stderr.replace(os.sep, "/") and not done.stdout and "Traceback" not in done.stderr


def test_no_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert sampler.main(["--plot", "x.png", "--", "true"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_matplotlib_is_imported_for_a_plot_alone():
    code = "import sys; from models import tool; tool('sample_memory'); print(sorted({n.partition('.')[0] for n in sys.modules}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    loaded = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert "mesp_mlx" in loaded and not any(name in loaded for name in ("matplotlib", "numpy", "mlx.core", "psutil"))


def test_the_picture_and_the_verdict(tmp_path):
    pytest.importorskip("matplotlib")
    done = sample("--plot", str(tmp_path / "a.png"), "--device", "iphone-15", "--", sys.executable, "-c", "import time; time.sleep(.1)")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "iPhone 15, 6 GB: fits." in done.stderr and "(an estimate)" in done.stderr and "4,200 MB" in done.stderr and "pocketpal" in done.stderr
    assert "without the increased-memory-limit entitlement it gets 3,120 MB: fits" in done.stderr


def recorded(seconds: list[float], megabytes: list[float], processes=None, **others):
    recording = sampler.Recording(["x"], times=array("d", seconds), sizes=array("q", [int(size * MB) for size in megabytes]), **others)
    recording.processes = processes or [sampler.Process(1, 0, 0, 0, len(seconds) - 1, "x", max(recording.sizes))]
    return recording


def test_a_command_that_ended_before_the_first_sample():
    recording = sampler.Recording(["x"], reaped_peak_bytes=17 * MB, own_peak_bytes=17 * MB, seconds=0.001)
    found = sampler.figures(recording)
    assert found["base_bytes"] is found["high_water_at_least_bytes"] is None and found["high_water_at_most_bytes"] == 17 * MB
    assert sampler._table(recording, found, None) == "x ended before the first sample; it and each child it waited for held at most 17.0 MB"


def test_the_base_is_where_the_start_turns_into_the_rise():
    """An import to 28 MB in 0.1 s, then 200 MB in 0.1 s, held for a while; a spike above changes nothing."""
    seconds = [0.005 * i for i in range(100)]
    sizes = [min(28, 2 + 1.3 * i) + max(0, min(200, 10 * (i - 20))) for i in range(100)]
    found = sampler.figures(recorded(seconds, sizes))
    assert found["base_bytes"] == pytest.approx(28 * MB, abs=6 * MB) and found["longest_bytes"] == 228 * MB
    sizes[70:74] = [600, 900, 900, 500]
    found = sampler.figures(recorded(seconds, sizes))
    assert found["base_bytes"] == pytest.approx(28 * MB, abs=6 * MB) and found["longest_bytes"] == 228 * MB
    assert found["sampled_peak_bytes"] == found["high_water_at_most_bytes"] == 900 * MB


def test_the_base_at_a_moment():
    recording = recorded([0.0, 0.1, 0.2, 0.3], [5, 10, 15, 40])
    assert sampler.figures(recording, 0.15)["base_bytes"] == 15 * MB
    assert "ended before 9 s" in sampler.figures(recording, 9.0)["base_rule"]


def test_the_bounds_of_several_processes():
    """One of 50 MB all the time, one of 30 MB in samples 0 and 1, one of 40 MB in 4 and 5; what only wait4 saw is added."""
    spans = [(0, 5, 50), (0, 1, 30), (4, 5, 40)]
    processes = [sampler.Process(pid, 0, max(0, first - 1), first, last, "x", peak * MB) for pid, (first, last, peak) in enumerate(spans)]
    seconds = [0.01 * i for i in range(6)]
    found = sampler.figures(recorded(seconds, [60, 60, 50, 50, 70, 70], processes))
    assert (found["high_water_at_least_bytes"], found["high_water_at_most_bytes"]) == (70 * MB, 90 * MB)
    seen = {"shared_times": array("d", [0.0]), "shared_sizes": array("q", [55 * MB]), "reaped_peak_bytes": 62 * MB, "own_peak_bytes": 17 * MB}
    found = sampler.figures(recorded(seconds, [60, 60, 50, 50, 70, 70], processes, **seen))
    assert (found["high_water_at_least_bytes"], found["high_water_at_most_bytes"]) == (62 * MB, 102 * MB)
