"""The table of predictions is made from what was measured, and a second call measures only what is missing."""

import json
import sys
from types import ModuleType

import pytest
from models import tool

pytest.importorskip("matplotlib")


@pytest.fixture
def table(monkeypatch) -> ModuleType:
    module = tool("bench_plan")
    monkeypatch.setattr(sys.modules["reproduce_papers"], "machine", lambda: {"cpu": "A processor", "cores": 2})
    return module


@pytest.fixture
def asked(table, monkeypatch) -> list[str]:
    """The steps that would be measured: the second of them is off by a quarter, and takes 50 MB."""
    calls: list[str] = []

    def step(words):
        calls.append(" ".join(words))
        ratio, measured = (0.75, 50_000_000) if len(calls) == 2 else (1.02, 40_000_000)
        sizes = {"allocator_peak_bytes": measured, "arrays_peak_predicted_bytes": round(ratio * measured), "predicted_over_measured": ratio}
        return sizes | {"process_peak_bytes": measured + 50_000_000, "process_peak_predicted_bytes": measured + 48_000_000, "step_seconds": 2.0}

    monkeypatch.setattr(table.bench_step, "step", step)
    return calls


def call(table, monkeypatch, *flags: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["bench_plan.py", *flags])
    try:
        return table.main()
    except SystemExit as left:  # argparse's
        return left.code


def test_every_case_is_understood(table):
    """By the program that measures it; no step twice."""
    cases = list(table.cases())
    assert len({case.flags for case in cases}) == len(cases) and {case.group for case in cases} == set(table.GROUPS)
    parsed = [table.bench_step.parse(case.words) for case in cases]
    assert {(of.shape, of.seq) for of in parsed} >= {("qwen2.5-0.5b", tokens) for tokens in (128, 256, 1024)} | {("qwen2.5-1.5b", 256), ("qwen2.5-3b", 256)}
    assert {of.batch for of in parsed} >= {1, 4} and {of.rank for of in parsed} >= {4, 32} and {of.optimizer for of in parsed} == {"sgd", "adam"}
    promised = {(of.shape, of.seq, of.adapter, of.dtype): case.promised for of, case in zip(parsed, cases, strict=True) if case.promised}
    assert promised == {
        ("qwen2.5-0.5b", 256, None, "float32"): 42,
        ("qwen2.5-0.5b", 1024, None, "float32"): 72,
        ("qwen2.5-1.5b", 256, None, "float32"): 90,
        ("qwen2.5-3b", 256, None, "float32"): 140,
        ("qwen2.5-0.5b", 256, "file", "float32"): 35,
        ("qwen2.5-3b", 256, "file", "float32"): 90,
        ("qwen2.5-0.5b", 256, None, "bfloat16"): 34,
    }


def test_the_table(table, asked, monkeypatch, tmp_path, capsys):
    """What is off, or above what was promised, stands out; a second call measures nothing, --again one group."""
    assert call(table, monkeypatch, "--only", "limits", "--out", str(tmp_path)) == 0
    assert asked == [case.flags for case in table.cases() if case.group == "limits"]
    written = (tmp_path / "RESULTS.md").read_text()
    worst = "--shape qwen2.5-0.5b --seq 1024 --memory least"
    assert f"6 of 7 predictions are within 10% of the measured peak. The lowest is 0.750 of it (`{worst}`)" in written and "cpu A processor" in written
    rows = [line for line in written.splitlines() if line.startswith("| `--shape")]
    assert rows[0] == "| `--shape qwen2.5-0.5b --seq 256 --memory least` | 40.8 | 40.0 | 1.020 | 42 | 88.0 | 90.0 | 2.0 |"
    assert rows[1] == f"| `{worst}` | 37.5 | 50.0 | **0.750** | 72 | 98.0 | 100.0 | 2.0 |" and "| **35** |" in rows[4]
    assert "6 of 7" in capsys.readouterr().out
    before = len(asked)
    assert call(table, monkeypatch, "--only", "limits", "--out", str(tmp_path)) == 0 and len(asked) == before
    assert call(table, monkeypatch, "--only", "limits", "--again", "--out", str(tmp_path)) == 0 and len(asked) == 2 * before
    assert call(table, monkeypatch, "--write", "--out", str(tmp_path)) == 0 and len(asked) == 2 * before
    assert json.loads((tmp_path / "results.json").read_text())["rows"].keys() == set(asked)


def test_what_cannot_be_asked_for(table, asked, monkeypatch, tmp_path, capsys):
    assert call(table, monkeypatch, "--quick") == 2 and "--quick needs --out DIR" in capsys.readouterr().err
    assert call(table, monkeypatch, "--only", "limits,widths") == 2 and "no group is called widths" in capsys.readouterr().err
    assert call(table, monkeypatch, "--only", ",") == 2 and "no group was named" in capsys.readouterr().err
    assert call(table, monkeypatch, "--quick", "--only", "limits", "--out", str(tmp_path)) == 0
    assert call(table, monkeypatch, "--out", str(tmp_path)) == 2 and "holds quick results" in capsys.readouterr().err
    assert len(asked) == 1
