"""Fits and findings of the sweeps, of peaks that are invented."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from models import tool

ADAPTER, LAYER = 325_000, 8_000_000


@pytest.fixture
def scaling() -> ModuleType:
    return tool("bench_scaling")


def invent(scaling, monkeypatch, peak) -> list[dict[str, str]]:
    """Steps whose peak is `peak` of their flags; gives the flags asked for."""
    asked: list[dict[str, str]] = []

    def step(words):
        given = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        asked.append(given)
        rank, layers = int(given["rank"]), int(given.get("layers", 24))
        sizes = {"layers": layers, "batch": int(given.get("batch", 1)), "seq": int(given["seq"]), "rank": rank, "adapter_bytes": ADAPTER * layers * rank // 8}
        counted = {"loads_per_step": {"attention": 3.0, "mlp": 2.0}, "bytes_read_per_step": 10**8, "file_written_per_step": 10**6}
        return sizes | counted | {"allocator_peak_bytes": peak(given), "predicted_over_measured": 1.0, "layer_bytes": LAYER, "step_seconds": 1.0}

    monkeypatch.setattr(scaling.bench_step, "step", step)
    return asked


def call(scaling, monkeypatch, capsys, *flags: str) -> tuple[list[str], dict]:
    monkeypatch.setattr(sys, "argv", ["bench_scaling.py", *flags])
    assert scaling.main() == 0
    printed = capsys.readouterr().out.splitlines()
    return printed[:-1], json.loads(printed[-1])


@pytest.mark.parametrize("coefficients", [(5.0, -2.0), (7e7, 3e4, 0.25), (0.0, 0.0, 4.0)])
def test_a_polynomial_is_found_again(scaling, coefficients):
    x = [512, 1024, 2048, 4096]
    y = [sum(c * at**power for power, c in enumerate(coefficients)) for at in x]
    assert np.array(scaling.fit(x, y, len(coefficients) - 1)) == pytest.approx(np.array(coefficients), rel=1e-6, abs=1e-6 * max(map(abs, y)) / 4096)


@pytest.mark.parametrize(("extra", "said"), [(0, "peaks are 0.0% apart (at most 5%)"), (600_000, "peaks are 7.5% apart (at most 5%: MISSED)")])
def test_rows(scaling, monkeypatch, capsys, extra, said):
    asked = invent(scaling, monkeypatch, lambda given: 8_000_000 + extra * (given["batch"] == "16"))
    lines, found = call(scaling, monkeypatch, capsys, "batch")
    assert [given["batch"] for given in asked] == ["1", "4", "16"] and {given["memory"] for given in asked} == {"least"}
    assert found["findings"] == [said, "weights read in an update, at most: attention 3 times, mlp 2 times"] == lines[-2:]
    assert [point["batch"] for point in found["points"]] == [1, 4, 16] and "layers" not in asked[0]


def test_layers(scaling, monkeypatch, capsys, tmp_path):
    """What grows in memory is the adapter, and a little too much at rank 1."""

    def peak(given):
        own = ADAPTER * int(given["rank"]) // 8 if given["adapters"] == "memory" else 0
        return 20_000_000 + int(given["layers"]) * (own + (200_000 if given["rank"] == "1" else 0))

    asked = invent(scaling, monkeypatch, peak)
    _, found = call(scaling, monkeypatch, capsys, "depth", "--values", "8,24,80", "--out", str(tmp_path / "depth.json"))
    assert json.loads((tmp_path / "depth.json").read_text()) == found
    assert [(given["layers"], given["rank"], given["adapters"]) for given in asked[::3]] == [("8", "8", "memory"), ("8", "8", "file"), ("8", "1", "memory")]
    memory, file, rank_1 = found["findings"]
    assert memory.startswith("adapters in memory: 20.00 MB + 325.0 kB a layer, 0.0 kB from the line at most; adapters are 325.0 kB a layer: beyond them")
    assert "beyond them 0.0 kB" in memory.replace("-0.0", "0.0") and file.startswith("adapters in the file: 20.00 MB + ") and "0.00% of a layer's size" in file
    assert "240.6 kB a layer" in rank_1 and rank_1.endswith("in all 3.01% (at most 2%: MISSED)")


def test_tokens(scaling, monkeypatch, capsys):
    invent(scaling, monkeypatch, lambda given: 10**7 + 10_000 * int(given["seq"]) + int(given["seq"]) ** 2 // 8)
    lines, found = call(scaling, monkeypatch, capsys, "length")
    assert found["findings"][0].startswith("peak = 10.00 MB + 10.00 kB a token + 0.1250 bytes a token squared")
    assert found["findings"][1] == "the square at 4096 tokens: 2.10 MB, 3.95% of the peak there (at most 2%: MISSED)"
    assert [line.split()[:3] for line in lines[1:5]] == [["4", "1", str(tokens)] for tokens in (512, 1024, 2048, 4096)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("depth", "--values", "8"), "--values: a fit takes 2 or more"),
        (("length", "--values", "512,1024"), "--values: a fit takes 3 or more"),
        (("batch", "--values", "1,0"), "argument --values: 0 is not a positive whole number"),
        (("width",), "argument kind: invalid choice"),
    ],
)
def test_flags_that_make_no_sense(scaling, monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["bench_scaling.py", *flags])
    with pytest.raises(SystemExit) as left:
        scaling.main()
    assert left.value.code == 2 and message in capsys.readouterr().err
