"""The frontier's plans, order, medians, ratios and picture; what is measured is invented, but for one slow test."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from backends import needs_mlx
from models import tool

ROOT = Path(__file__).parent.parent
PLAIN, CHECKPOINTED = "mlx-lm compiled", "mlx-lm checkpointed, compiled"
SMALL = ["--layers", "2", "--seq", "32", "--batch", "2"]


@pytest.fixture
def frontier() -> ModuleType:
    return tool("bench_frontier")


@pytest.fixture
def asked(frontier, monkeypatch) -> list[tuple[str | None, list[str]]]:
    """(mlx-lm's name or None, flags) of each step that would be measured: it takes as many seconds as steps were asked for, and as many MB."""
    calls: list[tuple[str | None, list[str]]] = []

    def step(words, name=None):
        calls.append((name, list(words)))
        ours = {"weight_products_per_token": 269_000_000, "predicted_over_measured": 1.0} if name is None else {}
        peaks = {"allocator_peak_bytes": 10**6 * len(calls), "process_peak_bytes": 10**8}
        return {"method": name or "mesp", "step_seconds": float(len(calls)), "cpu_seconds": 1.0, **peaks, **ours}

    monkeypatch.setattr(frontier.bench_step, "step", step)
    return calls


def call(frontier, monkeypatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_frontier.py", *flags])
    return frontier.main()


def test_budgets_grow_by_equal_factors(frontier):
    assert frontier.budgets(10**6, 16 * 10**6, 3) == [2 * 10**6, 4 * 10**6, 8 * 10**6]


@needs_mlx
def test_plans_lie_between_the_least_and_the_fastest(frontier):
    plans = frontier.frontier(["--shape", "smollm2-135m", *SMALL], 2, 4)
    names, sizes = list(plans), [plan.arrays_peak_bytes for plan in plans.values()]
    assert names[0] == "least" and names[-1] == "fastest" and len(names) > 2
    assert sizes == sorted(sizes) and len({plan.strategy for plan in plans.values()}) == len(plans)
    for name in names[1:-1]:
        assert plans[name].arrays_peak_bytes <= 1.03e6 * int(name.removesuffix(" MB")), "the name is rounded"


@needs_mlx
def test_points_are_measured_in_turn(frontier, asked, tmp_path, monkeypatch, capsys):
    """Every other round backwards; each has its median, its largest peak and the flags that give it."""
    assert call(frontier, monkeypatch, *SMALL, "--points", "1", "--rounds", "3", "--out", str(tmp_path)) == 0
    found = json.loads((tmp_path / "frontier.json").read_text())
    names = [each["name"] for each in found["points"]]
    count = len(names)
    assert names[0] == "least" and names[-3:] == ["fastest", PLAIN, CHECKPOINTED]
    order = [name for name, _ in asked]
    assert order[:count] == order[2 * count :] == order[count : 2 * count][::-1] == [None] * (count - 2) + [PLAIN, CHECKPOINTED]
    assert found["points"][0]["rounds"] == [1, 2 * count, 2 * count + 1] and found["points"][0]["step_seconds"] == 2 * count
    assert found["points"][0]["allocator_peak_bytes"] == (2 * count + 1) * 10**6
    assert "--checkpoints file" in found["points"][0]["flags"] and "--resident all" in found["points"][count - 3]["flags"]
    by_hand = frontier.step_plan.plan_of(frontier.bench_step.parse(asked[0][1]), "mesp", 2).strategy
    assert by_hand == frontier.frontier(asked[-1][1], 2, 0)["least"].strategy
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "fastest / mlx-lm compiled, seconds" in printed and "M products a token" in printed


@needs_mlx
def test_the_picture_again(frontier, asked, tmp_path, monkeypatch):
    assert call(frontier, monkeypatch, *SMALL, "--points", "1", "--rounds", "1", "--out", str(tmp_path)) == 0
    (tmp_path / "frontier.png").unlink()
    before = len(asked)
    assert call(frontier, monkeypatch, "--draw", "--out", str(tmp_path)) == 0
    assert len(asked) == before and (tmp_path / "frontier.png").exists()


def test_nothing_to_draw(frontier, tmp_path, monkeypatch, capsys):
    assert call(frontier, monkeypatch, "--draw", "--out", str(tmp_path)) == 2
    assert "bench_frontier: " in capsys.readouterr().err


@needs_mlx
def test_products_are_counted(frontier):
    """SmolLM2's 30 layers of 3,538,944 weights under a table of 28,311,552; mlx-lm passes each twice, the lowest q, k and v have no dx."""
    workload = frontier.frontier(["--shape", "smollm2-135m", "--batch", "4"], 30, 0)["least"].workload
    lowest = 576 * 576 + 2 * 576 * 192
    assert frontier.products(workload, "backprop") == 2 * (30 * 3_538_944 + 28_311_552) - lowest
    assert round(frontier.products(workload, "backprop") / 1e6) == 268


def test_ratios_by_hand(frontier):
    def point(name, rounds, peak):
        return {"name": name, "rounds": rounds, "step_seconds": sorted(rounds)[1], "allocator_peak_bytes": peak}

    points = [
        point("least", [3.0, 2.0, 4.0], 10),
        point("fastest", [1.0, 2.0, 3.0], 60),
        point(PLAIN, [2.0, 2.0, 2.0], 100),
        point(CHECKPOINTED, [4.0] * 3, 40),
    ]
    found = {(each["ours"], each["theirs"], each["of"]): each for each in frontier.ratios(points)}
    assert found["fastest", PLAIN, "seconds"]["ratio"] == 1.0 and found["fastest", PLAIN, "seconds"]["by_round"] == [0.5, 1.0, 1.5]
    assert found["fastest", PLAIN, "peak"]["ratio"] == 0.6 and found["least", PLAIN, "peak"]["ratio"] == 0.1
    assert found["least", PLAIN, "seconds"]["ratio"] == 1.5 and found["least", CHECKPOINTED, "seconds"]["ratio"] == 0.75
    said = [frontier.said(each) for each in frontier.ratios(points)]
    assert said[0] == "fastest / mlx-lm compiled, seconds: 1.000, 0.500 to 1.500 by round (at most 1.00)"
    assert said[1] == "fastest / mlx-lm compiled, peak: 0.600 (at most 0.50: MISSED)" and said[2].endswith("(at most 1.40: MISSED)")
    assert said[3] == "least / mlx-lm compiled, peak: 0.100" and said[4].endswith("(at most 1.00)")


@pytest.mark.parametrize("points", [[(0.0, 0.0), (1.0, 0.0), (2.0, 3.0)], [(50.0, 50.0)] * 4, [(10.0 * i, 7.0 * (i % 3)) for i in range(10)]])
def test_numbers_hide_nothing(frontier, points):
    numbers = [(x + a, y + b) for (x, y), (a, b) in zip(points, frontier.offsets(points), strict=True)]
    for i, number in enumerate(numbers):
        assert all(math.dist(number, other) >= frontier.CLEAR for other in (*points, *numbers[:i]))
        assert math.dist(number, points[i]) < 30, "beside its own point"


@needs_mlx
@pytest.mark.slow
def test_for_real(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "MESP_MLX_CACHE": str(tmp_path), "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "bench_frontier.py"), "--layers", "1", "--seq", "16", "--points", "1", "--rounds", "1", "--iters", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path / "out")], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "frontier.json").read_text())
    losses = [each["loss"] for each in found["points"]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    peaks = {each["name"]: each["allocator_peak_bytes"] for each in found["points"]}
    assert peaks["least"] < peaks["fastest"] < peaks[PLAIN] and all(math.isfinite(each["ratio"]) for each in found["ratios"])
