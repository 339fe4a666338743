"""The papers' figures are theirs, ours are computed from what was measured, and a second call measures only what is missing."""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from models import TOOLS, tool
from runs import chat_rows, data_folder, tiny_model

pytest.importorskip("matplotlib")

MACHINE = {"cpu": "A processor", "cores": 2, "system": "A system", "python": "3.12", "mlx": "0.32.4", "numpy": "2.3", "openblas": True}
RATES = {"mesp": (1e-4, 3e-4, 1e-3), "mebp": (1e-4, 3e-4, 1e-3), "mezo": (1e-6, 3e-6, 1e-5)}
# As the issue gives them: shape, tokens, rank; MB of MeBP and MeSP; seconds of both.
PAPER = [
    ("qwen2.5-0.5b", 256, 8, 360.8, 136.2, 0.68, 0.86),
    ("qwen2.5-1.5b", 256, 8, 516.2, 262.6, 1.66, 2.17),
    ("qwen2.5-3b", 256, 8, 637.6, 368.4, 3.21, 4.09),
    ("qwen2.5-0.5b", 128, 8, 252.7, 110.7, None, None),
    ("qwen2.5-0.5b", 512, 8, 582.4, 245.8, None, None),
    ("qwen2.5-0.5b", 1024, 8, 1050.3, 513.6, None, None),
    ("qwen2.5-0.5b", 256, 4, 355.2, 132.8, None, None),
    ("qwen2.5-0.5b", 256, 16, 372.4, 143.5, None, None),
    ("qwen2.5-0.5b", 256, 32, 395.8, 158.2, None, None),
]


@pytest.fixture
def papers(monkeypatch) -> ModuleType:
    """tools/reproduce_papers.py, which imports the files beside it, as a script does."""
    monkeypatch.syspath_prepend(str(TOOLS))
    module = tool("reproduce_papers")
    monkeypatch.setattr(module, "machine", lambda: MACHINE)
    return module


@pytest.fixture
def measured(papers, monkeypatch) -> list[str]:
    """What would be measured is invented; gives the commands that were asked for."""
    asked: list[str] = []
    for method, rates in RATES.items():
        monkeypatch.setitem(papers.RATES, method, rates)
    sized = {"updates": {"mesp": 40, "mebp": 40, "mezo": 200}, "every": {"mesp": 5, "mebp": 5, "mezo": 20}, "rounds": 3, "seeds": (0, 1, 2)}
    monkeypatch.setattr(papers, "FULL", dataclasses.replace(papers.FULL, **sized))  # those may be tuned

    def last_line(words):
        asked.append(" ".join(words))
        return estimates() if "tools/papers_estimates.py" in words else step(words)

    def train(run):
        asked.append(run.key)
        return training(run)

    monkeypatch.setattr(papers, "_last_line", last_line)
    monkeypatch.setattr(papers, "train", train)
    return asked


@pytest.fixture
def undrawn(papers, monkeypatch) -> None:
    """Pictures take a second each."""
    monkeypatch.setattr(papers.papers_report.papers_plots, "draw", lambda folder, rows, plan: [])


def call(papers, monkeypatch, *flags: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["reproduce_papers.py", *flags])
    try:
        return papers.main()
    except SystemExit as left:  # argparse's
        return left.code


def step(words) -> dict:
    """An invented step: its peak, in MB, is a number of the method, plus a thousandth of its tokens, plus its layers."""
    of = dict(zip(words[1::2], words[2::2], strict=False))
    layers = int(of.get("--layers", 24))
    peak = {"mesp": 10, "mebp": 50, "mebp-tiled": 20, "mezo": 11, "forward": 8}[of["--method"]] + int(of["--seq"]) / 1000 + layers
    sizes = {"allocator_peak_bytes": round(1e6 * peak), "process_peak_bytes": round(1e6 * peak) + 50_000_000, "state_bytes": 2_000_000}
    sizes |= dict.fromkeys(("adapter_bytes", "gradient_bytes"), 1_000_000 * int(of["--rank"]))
    return sizes | {"step_seconds": peak / 10, "layers": layers}


def training(run) -> dict:
    """An invented run: MeSP's and MeBP's losses fall to 1 + their rate, MeZO's to 3; MeZO's highest rate fails."""
    if run.method == "mezo" and run.rate == 1e-5:
        return {"failed": "update 3: the loss is nan"}
    end = 3.0 if run.method == "mezo" else 1 + run.rate
    updates = list(range(0, run.updates + 1, run.every))
    losses = np.linspace(5.0, end + run.seed / 100, len(updates)).tolist()
    return {"updates": updates, "val_loss": losses, "seconds": [2.0 * n for n in updates], "passes_per_update": 2.0 if run.method == "mezo" else 3.5}


def estimates() -> dict:
    of = {"cosine": [0.001, 0.003], "signs": [0.5, 0.502], "layer_cosine": [0.01, 0.02], "layer_signs": [0.5, 0.51]}
    sizes = {
        "parameters": 1000,
        "gradient_norm": 5.0,
        "gradient_absolute_sum": 20.0,
        "layers": [0, 1],
        "layer_parameters": [500, 500],
        "layer_norms": [3.0, 4.0],
    }
    about = {"rows": 2, "tokens": 64, "supervised": 48, "epsilon": 1e-3, "slopes": [1.0, 2.0, 4.0], "true_slopes": [1.0, 2.0, 4.1]}
    return sizes | about | {"estimates": {n: of for n in ("1", "10", "100")}}


def tables(report: str) -> list[list[str]]:
    """The cells of every row of every table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if line.startswith("| ")]


def section(report: str, number: int) -> str:
    return report.split("\n## ")[number]


@pytest.mark.parametrize(("shape", "tokens", "rank", "mebp", "mesp", "mebp_seconds", "mesp_seconds"), PAPER)
def test_the_published_figures(papers, shape, tokens, rank, mebp, mesp, mebp_seconds, mesp_seconds):
    published = tool("papers_published")
    assert len(published.FIGURES) == len(PAPER)
    assert [published.peak(shape, tokens, rank, method) for method in ("mebp", "mesp", "mebp-tiled", "mezo")] == [mebp, mesp, None, None]
    assert [published.seconds(shape, tokens, rank, method) for method in ("mebp", "mesp")] == [mebp_seconds, mesp_seconds]
    assert published.peak(shape, 300, rank, "mesp") is None
    assert "2602.13069" in published.MESP and "bfloat16" in published.CONDITIONS and "half second" in published.CONDITIONS


def test_every_named_row_is_in_the_report(papers, measured, monkeypatch, tmp_path, capsys):
    """Ours, theirs, what lies between, and the command; the whole set, invented."""
    assert call(papers, monkeypatch, "--out", str(tmp_path)) == 0
    assert "RESULTS.md, peaks.png, tokens.png, ranks.png, cosines.png, convergence.png" in capsys.readouterr().out
    report = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert papers.papers_report.MISSING not in report and "A processor, 2 cores, A system; MLX 0.32.4" in report and "differs in kind" in report
    assert str(tmp_path) not in report and str(TOOLS.parent) not in report
    rows = tables(report)
    for shape, tokens, rank, mebp, mesp, mebp_seconds, mesp_seconds in PAPER:
        label = shape if tokens == 256 and rank == 8 else str(rank) if tokens == 256 else f"{tokens:,}"
        of = {row[1].split(" ")[0]: row for row in rows if len(row) == 10 and row[0] == label and "our loss" not in row[1]}
        ours = {"MeBP": 74 + tokens / 1000, "MeSP": 34 + tokens / 1000}
        for method, paper, seconds in (("MeBP", mebp, mebp_seconds), ("MeSP", mesp, mesp_seconds)):
            below, published = ("–", "–") if method == "MeBP" else (f"{1 - ours['MeSP'] / ours['MeBP']:.1%}", f"{1 - mesp / mebp:.1%}")
            expected = [f"{ours[method]:,.1f}", below, f"{paper:,.1f}", published, f"{ours[method] + 50:,.1f}", f"{ours[method] / 10:.2f}"]
            assert of[method][2:8] == expected
            assert of[method][8] == ("–" if seconds is None else f"{seconds:.2f}")
            command = f"python tools/bench_step.py --shape {shape} --seq {tokens} --rank {rank} --method {method.lower()}"
            assert of[method][9].removesuffix(" --rounds 3`") == f"`{command}" or of[method][9] == f"`{command}`"
    assert "MeSP takes 0.46 × the time of MeBP's, 0.77 × if that has our loss (published: 1.26 × MeBP's)" in report
    assert "16.0 MB at rank 8, 32.0 MB at rank 16" in section(report, 3)
    kept = [row for row in tables(section(report, 4)) if row[0] == "32"]
    assert [row[1] for row in kept] == ["recomputed", "the attention's kept"] and {row[4] for row in kept} == {f"{24 * 7 * 256 * 32 * 4 / 1e6:.2f}"}
    assert "--keep-h" in kept[1][5] and "--keep-h" not in kept[0][5] and "not at hand" in section(report, 4)
    for shape in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"):
        (row,) = [row for row in tables(section(report, 7)) if row[0] == shape]
        assert row[1:5] == ["32.3", "35.3", f"{35.256 / 32.256:.3f}", f"{35.256 / 34.256:.3f}"]
    half = {(row[0], row[1]): row for row in tables(section(report, 8))}
    row = half["MeSP (`mesp`)", "bfloat16"]
    assert row[2:7] == ["12.1", "14.1", "34.1", "–", "110.7"], "10.128 + 2, 10.128 + 4, and on that line 10.128 + 24"
    assert half["MeSP (`mesp`)", "float32"][4:6] == ["34.1", "34.1"]


def test_the_analysis_of_mezo_in_the_report(papers, measured, undrawn, monkeypatch, tmp_path):
    call(papers, monkeypatch, "--out", str(tmp_path), "--only", "estimates")
    text = section((tmp_path / "RESULTS.md").read_text(encoding="utf-8"), 5)
    first = next(row for row in tables(text) if row[0] == "1" and len(row) == 8)
    signs = 0.5 + 20 / 1000 / 5 * math.sqrt(2 / math.pi) / math.sqrt(2 * math.pi)
    assert first == ["1", "2", "0.00200", "0.00141", f"{math.sqrt(2 / math.pi / 1000):.5f}", "about 0.001", "50.100%", f"{signs:.3%}"]
    layer = next(row for row in tables(text) if row[0] == "0")
    assert layer[1:5] == ["0.600", "+0.01000", "+0.01000", "+0.01000"] and float(layer[5]) == pytest.approx(0.6 * math.sqrt(100 / 500), rel=0.01)
    assert "tenth of A's size" in text and "--counts 1,10,100" in text


def test_convergence_in_the_report(papers, measured, undrawn, monkeypatch, tmp_path):
    """The best rate, the mean over seeds, and when MeSP passes MeZO."""
    call(papers, monkeypatch, "--out", str(tmp_path), "--only", "convergence")
    text = section((tmp_path / "RESULTS.md").read_text(encoding="utf-8"), 6)
    best = {row[0]: row for row in tables(text) if len(row) == 7}
    assert best["MeSP (`mesp`)"][1:] == ["0.0001 of 0.0001, 0.0003, 0.001", "40", "5.0000", "1.0101 ± 0.0100", "80 ± 0", "140"]
    assert best["MeZO (`mezo`)"][1].startswith("1e-06 of ") and best["MeZO (`mezo`)"][4:] == ["3.0100 ± 0.0100", "400 ± 0", "400"]
    assert "MeSP (`mesp`) is first seen at or below MeZO's final loss after 20 updates, 40 s, 70 forward passes." in text
    every = [row for row in tables(text) if len(row) == 6]
    assert len(every) == 2 + 3 * (3 + 2) and sum("the loss is nan" in row[3] for row in every) == 1
    assert sum("`mesp-mlx finetune --model=demo" in row[5] for row in every) == 15


def test_nothing_measured(papers, tmp_path):
    """Every row is there, and says so; nothing is drawn."""
    written = papers.papers_report.write(tmp_path, {"plan": "full", "machines": [], "rows": {}}, papers.FULL)
    report = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert written == ["RESULTS.md"] and "](" not in report.replace("](../memory/RESULTS.md)", ""), "no picture"
    bodies = [row for row in tables(report) if row[0] != "---" and papers.papers_report.MISSING in row]
    steps = sum(len(papers.FULL.benches(part)) for part in ("table", "tokens", "ranks", "ablation"))
    assert len(bodies) == steps + 3 + 3 + 9 + 3 + 6, "steps; n; methods; their grids; shapes; methods by dtype"


def test_a_second_call_measures_what_is_missing(papers, measured, undrawn, monkeypatch, tmp_path):
    call(papers, monkeypatch, "--out", str(tmp_path), "--only", "tokens")
    assert len(measured) == 12 and len(set(measured)) == 12
    measured.clear()
    call(papers, monkeypatch, "--out", str(tmp_path), "--only", "tokens,ranks")
    assert len(measured) == 9, "of four ranks times three methods, those of rank 8 are in the sweep of tokens"
    assert not any("--rank 8" in command for command in measured)
    measured.clear()
    call(papers, monkeypatch, "--out", str(tmp_path), "--write")
    assert not measured
    call(papers, monkeypatch, "--out", str(tmp_path), "--only", "ranks", "--again")
    assert len(measured) == 12
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 21


def test_another_machine_is_named(papers, measured, undrawn, monkeypatch, tmp_path):
    call(papers, monkeypatch, "--out", str(tmp_path), "--only", "ablation")
    monkeypatch.setattr(papers, "machine", lambda: MACHINE | {"cpu": "Another"})
    call(papers, monkeypatch, "--out", str(tmp_path), "--only", "inference")
    report = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert (
        "Machine 1, 4 of 10 rows (`machine` 0 in results.json): A processor" in report and "Machine 2, 6 of 10 rows" in report and "Another, 2 cores" in report
    )


def test_what_was_measured_before_a_failure_is_kept(papers, monkeypatch, tmp_path, capsys):
    done = iter([subprocess.CompletedProcess([], 0, json.dumps(step(["x", "--seq", "128", "--method", "mesp", "--rank", "8"])), "")] * 2)
    failed = subprocess.CompletedProcess([], 137, "", "Traceback\nMemoryError: no room\n")
    monkeypatch.setattr(papers, "_run", lambda words, environment: next(done, failed))
    assert call(papers, monkeypatch, "--out", str(tmp_path), "--only", "tokens") == 2
    errors = capsys.readouterr().err
    assert "--method mebp-tiled --json\nended with status 137: MemoryError: no room" in errors and "Traceback" not in errors
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 2


def test_a_truncated_model_stands_beside_nothing_published(papers, measured, undrawn, monkeypatch, tmp_path):
    call(papers, monkeypatch, "--quick", "--out", str(tmp_path), "--only", "table,tokens,ranks")
    report = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    rows = [row for row in tables(report) if len(row) == 10 and "`python" in row[9]]
    assert len(rows) == 5 + 9 + 6 and {(row[4], row[5], row[8]) for row in rows} == {("–", "–", "–")}
    assert "A reduced version" in report and "(published" not in report


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--only", "tables"), "argument --only: no part is called tables; there are table, tokens, ranks"),
        (("--only", ","), "argument --only: no part was named"),
        (("--quick",), "--quick needs --out DIR"),
    ],
)
def test_flags_that_make_no_sense(papers, measured, monkeypatch, capsys, flags, message):
    assert call(papers, monkeypatch, *flags) == 2
    assert message in capsys.readouterr().err and not measured


@pytest.mark.parametrize(
    ("text", "message"), [('{"plan": "full", "rows": {}}', "holds full results, and these would be quick ones"), ("{", "isn't what this tool writes")]
)
def test_quick_results_are_never_put_among_others(papers, measured, monkeypatch, tmp_path, capsys, text, message):
    (tmp_path / "results.json").write_text(text)
    assert call(papers, monkeypatch, "--quick", "--out", str(tmp_path)) == 2
    assert message in capsys.readouterr().err and not measured
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"] and (tmp_path / "results.json").read_text() == text


def test_the_log_of_a_run(papers):
    events = [
        {"event": "start"},
        {"event": "validation", "iteration": 0, "val_loss": 5.0},
        {"event": "train", "iteration": 4, "train_loss": 4.5, "iterations_per_second": 2.0},
        {"event": "validation", "iteration": 4, "val_loss": 4.0},
        {"event": "train", "iteration": 6, "train_loss": 3.5, "iterations_per_second": 0.5},
        {"event": "validation", "iteration": 6, "val_loss": 3.0},
        {"event": "end", "process_peak_bytes": 7},
    ]
    found = papers.read_log(events)
    assert found == {
        "updates": [0, 4, 6],
        "val_loss": [5.0, 4.0, 3.0],
        "seconds": [0, 2, 6],
        "train_updates": [4, 6],
        "train_loss": [4.5, 3.5],
        "process_peak_bytes": 7,
    }


def test_commands_are_understood(papers, monkeypatch):
    """By the programs that they call, with the values meant."""
    from mesp_mlx import cli, finetune

    bench, asked = tool("bench_step"), []
    monkeypatch.setattr(
        bench,
        "_in_child",
        lambda arguments, name, layers: (
            asked.append((arguments, name, layers))
            or {"step_seconds": 1.0, "allocator_peak_bytes": 1} | {"process_peak_bytes": 1, "method": name, "layers": layers}
        ),
    )
    plan = papers.FULL
    for each in {bench.key: bench for part in papers.PARTS for bench in plan.benches(part)}.values():
        monkeypatch.setattr(sys, "argv", [*each.words, "--json"])
        assert bench.main() == 0
        arguments, name, layers = asked[-1]
        assert (arguments.shape, arguments.seq, arguments.rank, name) == (each.shape, each.tokens, each.rank, each.method)
        assert (arguments.dtype, arguments.keep_h, arguments.rounds) == (each.dtype, each.keep_h, each.rounds) and (
            each.layers is None or layers == each.layers
        )
    seen = []
    monkeypatch.setattr(finetune, "run", seen.append)
    for method in papers.RATES:
        run = plan.grid(method)[0]
        with pytest.raises(SystemExit) as left:
            cli.main(run.words[2:])
        assert not left.value.code and seen[-1].method == method and seen[-1].learning_rate == run.rate and seen[-1].iters == run.updates
        assert seen[-1].grad_clip == 0 and seen[-1].num_layers == -1 and seen[-1].warmup == 0 and seen[-1].optimizer == ("sgd" if method == "mezo" else "adamw")


def test_nearness_by_hand(papers):
    of = tool("papers_estimates")
    truth = {"model.layers.0.a.lora_a": np.array([[3.0, 4.0]]), "model.layers.1.a.lora_a": np.array([[0.0, 12.0]])}
    estimate = {"model.layers.0.a.lora_a": np.array([[4.0, -3.0]]), "model.layers.1.a.lora_a": np.array([[5.0, 5.0]])}
    found = of.nearness(estimate, truth, [0, 1])
    assert found["layer_cosine"] == pytest.approx([0.0, 60 / (12 * math.sqrt(50))], rel=1e-12)
    assert found["cosine"] == pytest.approx(60 / (13 * math.sqrt(75)), rel=1e-12)
    assert found["layer_signs"] == [0.5, 1.0] and found["signs"] == pytest.approx(2 / 3), "of three that aren't zero"


def test_estimates_by_hand(papers):
    """Slopes 2 and -1 along (1, 0) and (1, 1): the mean is (1, -1) / 2."""
    of = tool("papers_estimates")
    name = "model.layers.3.a.lora_b"
    z = [np.array([[1.0, 0.0]], np.float32), np.array([[1.0, 1.0]], np.float32)]
    truth = {name: np.array([[3.0, -4.0]])}
    found = of.compare(truth, ({name: each} for each in z * 2), [2.0, -1.0, 1.0, 1.0], (1, 2))
    assert found["estimates"]["2"]["cosine"] == pytest.approx([7 / (5 * math.sqrt(2)), 2 / (5 * math.sqrt(5))]), "then (2, 1)"
    assert found["estimates"]["1"]["cosine"] == pytest.approx([3 / 5, 1 / (5 * math.sqrt(2)), 3 / 5, -1 / (5 * math.sqrt(2))])
    assert found["true_slopes"] == [3, -1, 3, -1] and found["gradient_norm"] == 5 and found["gradient_absolute_sum"] == 7 and found["layers"] == [3]


@pytest.mark.parametrize("n", [1, 10])
def test_what_is_expected_of_random_directions(papers, n):
    """Against a simulation: slopes exact, directions drawn."""
    rng, d = np.random.default_rng(0), 4000
    truth = rng.normal(size=d) * np.geomspace(1, 50, d)
    cosines, signs = [], []
    for _ in range(400):
        z = rng.normal(size=(n, d))
        estimate = (z @ truth) @ z
        cosines.append(estimate @ truth / np.linalg.norm(estimate) / np.linalg.norm(truth))
        signs.append((np.sign(estimate) == np.sign(truth)).mean())
    sizes = {"gradient_absolute_sum": np.abs(truth).sum(), "parameters": d, "gradient_norm": np.linalg.norm(truth)}
    assert np.mean(cosines) == pytest.approx(papers.papers_report.papers_plots.expected_cosine(n, d), rel=0.08 if n == 1 else 0.02)
    assert np.mean(signs) - 0.5 == pytest.approx(papers.papers_report.expected_signs(sizes, n) - 0.5, rel=0.2)


def test_estimates_on_a_model(papers, tmp_path, one_process):
    """The slopes are right, B isn't zero, and more directions come nearer."""
    of = tool("papers_estimates")
    model, data = tiny_model(tmp_path / "model"), data_folder(tmp_path / "data", chat_rows(8), chat_rows(2, first=50))
    found = of.measure(argparse.Namespace(model=str(model), data=str(data), counts=(1, 64), rows=2, tokens=64, layers=-1, epsilon=1e-3, seed=0))
    assert np.corrcoef(found["slopes"], found["true_slopes"])[0, 1] > 0.999
    assert found["layers"] == [0, 1] and math.hypot(*found["layer_norms"]) == pytest.approx(found["gradient_norm"])
    single, many = (np.mean(found["estimates"][n]["cosine"]) for n in ("1", "64"))
    assert many > 3 * single > 0 and many == pytest.approx(papers.papers_report.papers_plots.expected_cosine(64, found["parameters"]), rel=0.35)


@pytest.mark.parametrize("text", ["1,10,25", "0,1", "10,1", "a"])
def test_counts_that_make_no_groups(papers, text):
    of = tool("papers_estimates")
    with pytest.raises(argparse.ArgumentTypeError, match="multiple"):
        of._counts(text)


@pytest.mark.slow
@pytest.mark.demo
def test_the_demos_parts_for_real(papers, demo_model):
    runs = {method: papers.train(papers.QUICK.grid(method)[1]) for method in papers.RATES}
    mesp, mebp, mezo = (runs[method] for method in ("mesp", "mebp", "mezo"))
    assert mesp["val_loss"] == pytest.approx(mebp["val_loss"], abs=1e-3) and mesp["val_loss"][-1] < mesp["val_loss"][0]
    assert mesp["updates"] == [0, 2, 4] and mesp["seconds"][0] == 0 < mesp["seconds"][1] < mesp["seconds"][2]
    assert mezo["val_loss"][0] == mesp["val_loss"][0] and mezo["passes_per_update"] == 2 < mebp["passes_per_update"] <= mesp["passes_per_update"] < 4
    found = papers._last_line(papers.QUICK.estimates()[1])
    assert list(found["estimates"]) == ["1", "2", "4"] and found["parameters"] == sum(found["layer_parameters"])
