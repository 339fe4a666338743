"""The methods on the demo's real weights and rows. Rows are cut short, and one makes an update, so that it takes a minute or two."""

import json
import math

import numpy as np
import pytest
from runs import Done, read_log

pytestmark = [pytest.mark.demo, pytest.mark.slow]
SHORT = ["--batch-size", "1", "--max-seq-length", "48", "--val-batches", "0", "--reply-tokens", "0", "--steps-per-report", "1"]


@pytest.fixture
def train(demo_model, run_cli, tmp_path):
    """Train on the demo with NumPy; gives the run."""

    def run(name: str, *flags: str) -> Done:
        files = ["--adapter-path", name, "--json-log", f"{name}.jsonl"]
        done = run_cli("finetune", "--model", "demo", "--data", "demo", "--backend", "numpy", *SHORT, *flags, *files, cwd=tmp_path, timeout=1800)
        assert (done.returncode, done.stderr) == (0, "")
        return Done(tmp_path / name, read_log(tmp_path / f"{name}.jsonl"))

    return run


def test_the_exact_methods_train_alike(train):
    mesp, *others = (train(method, "--iters", "20", "--method", method) for method in ("mesp", "mebp", "backprop"))
    losses = mesp.values("train", "train_loss")
    assert len(losses) == 20 and max(losses) - min(losses) > 0.5
    for other in others:
        assert other.values("train", "train_loss") == pytest.approx(losses, abs=1e-4)
        assert other.adapter.keys() == mesp.adapter.keys()
        for name, value in mesp.adapter.items():
            assert np.linalg.norm(other.adapter[name] - value) <= 1e-3 * np.linalg.norm(value) > 0, name


def test_mezo_learns_and_repeats_to_the_byte(train):
    """Twenty updates of two rows: the validation loss falls from 5.0 to about 4.8 (recipes/papers/RESULTS.md has more)."""
    flags = ["--method", "mezo", "--lr-schedule", "constant", "--warmup", "0"]
    first, second = (train(name, *flags, "--iters", "3") for name in ("first", "second"))
    assert (first.folder / "adapters.safetensors").read_bytes() == (second.folder / "adapters.safetensors").read_bytes()
    longer = train("longer", *flags, "--iters", "20", "--num-layers", "-1", "--batch-size", "2", "--max-seq-length", "64", "--val-batches", "-1")
    (end,) = longer.of("end")
    assert math.isfinite(end["val_loss_after"]) and end["val_loss_after"] < end["val_loss_before"] - 0.1


def test_check_gradients_passes(demo_model, run_cli, tmp_path):
    done = run_cli("check-gradients", "--model", "demo", "--data", "demo", "--backend", "numpy", "--json", "figures.json", cwd=tmp_path, timeout=1800)
    assert (done.returncode, done.stderr) == (0, "") and "the gradients are exact" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert figures["exact"] and max(max(each["errors"].values()) for each in figures["comparisons"]) <= 1e-4
