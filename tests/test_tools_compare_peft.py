"""The comparison with PEFT measures in turn, says what it found in a table and as JSON, and says plainly what is missing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import tool

from mesp_mlx.errors import UserError

ROOT = Path(__file__).parent.parent
NAMES = ["PEFT", "PEFT, checkpointed", "mesp-mlx", "mesp-mlx, least"]
FLAGS = ["--batch", "2", "--seq", "8", "--rank", "4", "--iters", "2", "--layers", "1"]


@pytest.fixture
def compare_peft(monkeypatch):
    """The tool, its changes to the environment undone."""
    module = tool("compare_peft")
    monkeypatch.setattr(module.os, "environ", dict(os.environ))
    return module


def measured(step_seconds: float, peak_bytes: int) -> dict:
    return {"step_seconds": step_seconds, "cpu_seconds": 2 * step_seconds, "process_peak_bytes": peak_bytes, "loss": 10.8, "else": "not kept"}


def found(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def test_what_is_measured_and_said(compare_peft, monkeypatch, capsys, tmp_path):
    """In turn; of the rounds the median time and the largest high-water mark; against the checkpointed mode of the same run."""
    rounds = {"PEFT": [(1, 9), (2, 9), (4, 9)], "PEFT, checkpointed": [(3, 8), (2, 7), (1, 7)], "mesp-mlx": [(1, 1), (1, 2), (9, 1)]}
    waiting, asked = {name: iter(results) for name, results in rounds.items()}, []

    def in_child(name, flags, threads):
        asked.append((name, flags, threads))
        seconds, megabytes = next(waiting[name])
        return measured(seconds, megabytes * 10**6)

    monkeypatch.setattr(compare_peft, "in_child", in_child)
    monkeypatch.setattr(compare_peft.importlib.util, "find_spec", lambda name: "somewhere")
    file = tmp_path / "compared.json"
    assert compare_peft.main([*FLAGS, "--threads", "3", "--variants", "PEFT;PEFT, checkpointed; mesp-mlx", "--json", str(file)]) == 0
    assert asked == [(name, FLAGS, 3) for name in rounds] * 3 and compare_peft.os.environ["OPENBLAS_NUM_THREADS"] == "3"
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(file.read_text()) == (compared := json.loads(last))
    assert {key: compared[key] for key in ("shape", "batch", "seq", "rank", "layers", "iters", "rounds", "threads")} == {
        "shape": "smollm2-135m", "batch": 2, "seq": 8, "rank": 4, "layers": 1, "iters": 2, "rounds": 3, "threads": 3,
    }  # fmt: skip
    ours = compared["results"]["mesp-mlx"]
    assert (ours["tokens_per_second"], ours["step_seconds"], ours["cpu_seconds"], ours["process_peak_bytes"]) == (16, 1, 2, 2e6)
    assert [set(part) for part in ours["rounds"]] == [{"step_seconds", "cpu_seconds", "process_peak_bytes", "loss"}] * 3
    assert [line.split()[-13:] for line in lines[1:4]] == [
        ["PEFT", "8", "2.00", "4.00", "9", "1.00", "x", "the", "speed,", "1/0.9", "of", "the", "memory"],
        ["checkpointed", "8", "2.00", "4.00", "8", "1.00", "x", "the", "speed,", "1/1.0", "of", "the", "memory"],
        ["mesp-mlx", "16", "1.00", "2.00", "2", "2.00", "x", "the", "speed,", "1/4.0", "of", "the", "memory"],
    ]
    assert lines[4].startswith("2 x 8 tokens, rank 4, 3 threads, rounds: 3; ") and "numpy" in lines[4]


def test_the_table_without_peft(compare_peft):
    result = compare_peft.summary(16, [measured(0.5, 10**8)])
    settings = {"batch": 2, "seq": 8, "rank": 4, "threads": 1, "rounds": 1, "versions": {"numpy": "2"}}
    lines = compare_peft.table({**settings, "results": {"mesp-mlx": result}})
    assert [line.split() for line in lines[:2]] == [["tokens/s", "step,", "s", "processor,", "s", "resident", "MB"], ["mesp-mlx", "32", "0.50", "1.00", "100"]]
    assert lines[2:] == ["2 x 8 tokens, rank 4, 1 thread, rounds: 1; numpy 2"]


def test_what_each_process_is_told(compare_peft, monkeypatch):
    """Ours are bench_step's; PEFT's is this file again, whose last line is its answer."""
    told = []
    monkeypatch.setattr(compare_peft.bench_step, "step", lambda words: told.append(words) or {"loss": 1.0})

    def run(command, **_):
        told.append(command)
        return subprocess.CompletedProcess(command, 0, 'a warning\n{"loss": 2.0}\n')

    monkeypatch.setattr(compare_peft.subprocess, "run", run)
    assert [compare_peft.in_child(name, FLAGS, 2)["loss"] for name in NAMES] == [2, 2, 1, 1]
    plain, checkpointed, _, least = told
    assert checkpointed == [*plain, "--grad-checkpoint"] and plain[plain.index("--child") :] == ["--child", *FLAGS, "--threads", "2"]
    assert least == ["--shape", "smollm2-135m", "--backend", "numpy", "--optimizer", "adamw", *FLAGS, "--memory", "least"]
    for words in compare_peft.OURS.values():
        compare_peft.bench_step.parse(["--shape", "smollm2-135m", "--backend", "numpy", "--optimizer", "adamw", *FLAGS, *words])  # or it exits


@pytest.mark.parametrize("output", ["", "Killed\n", '{"loss":\n'])
def test_a_process_without_an_answer(compare_peft, monkeypatch, output):
    monkeypatch.setattr(compare_peft.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, -9, output))
    with pytest.raises(UserError, match="measuring PEFT, checkpointed: its process ended with status -9 and no result"):
        compare_peft.in_child("PEFT, checkpointed", FLAGS, 1)


def test_without_torch(compare_peft, monkeypatch, capsys):
    """One message that says what to install; ours can be measured all the same."""
    monkeypatch.setattr(compare_peft.importlib.util, "find_spec", lambda name: None if name in ("torch", "peft") else "somewhere")
    monkeypatch.setattr(compare_peft, "in_child", lambda *_: measured(1, 10**6))
    assert compare_peft.main(["--variants", "PEFT;mesp-mlx, least"]) == 2
    out, error = capsys.readouterr()
    assert not out and error == (
        "compare_peft: measuring PEFT: not installed: torch, peft. Run pip install 'mesp-mlx[bench]', or measure ours alone: --variants 'mesp-mlx, least'.\n"
    )
    assert compare_peft.main(["--variants", "mesp-mlx, least"]) == 0


def test_a_variant_that_is_not_there(compare_peft, capsys):
    with pytest.raises(SystemExit) as stopped:
        compare_peft.main(["--variants", "PEFT;unsloth"])
    assert stopped.value.code == 2 and "'unsloth' is none of: PEFT; PEFT, checkpointed; mesp-mlx" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["mesp-mlx", pytest.param("PEFT;PEFT, checkpointed", marks=pytest.mark.slow)])
def test_a_real_run(tmp_path, names):
    """One layer, two steps: a random model knows nothing of the next token, and PEFT's checkpointing changes no loss."""
    if "PEFT" in names and not all(found(name) for name in ("torch", "peft", "transformers")):
        pytest.skip("needs PyTorch and PEFT")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tools" / "compare_peft.py"), *FLAGS, "--rounds", "1", "--threads", "1", "--variants", names]
    done = subprocess.run(command, env={**os.environ, "MESP_MLX_CACHE": str(tmp_path), "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    losses = [result["rounds"][0]["loss"] for result in results.values()]
    assert list(results) == names.split(";") and losses == pytest.approx([losses[0]] * len(losses), rel=1e-5) and 9 < losses[0] < 13
    assert all(result["tokens_per_second"] > 0 and result["process_peak_bytes"] > 10e6 for result in results.values())
