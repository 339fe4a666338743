"""The demo model and its recipe: exact gradients on real weights, both backends alike, and training that shows."""

import json
import re
import shlex

import pytest
from engines import autodiff_of_mlx_lm, one_pass, random_adapter, random_group, worst_error
from models import PROJECTIONS
from runs import BACKENDS, Done, needs_mlx, read_log

from mesp_mlx import backend as backends
from mesp_mlx import config, sources

VOCABULARY = 49152
MANNER = ("Ahoy from the lighthouse!", "Keep your lamp lit, friend!")


@pytest.fixture(scope="module")
def truth(demo_model):
    """An adapter on all seven projections of every layer, B a tenth of A, a row, and the loss and gradients of mlx-lm's model by MLX's autodiff."""
    adapter = {name: value if name.endswith("lora_a") else 0.1 * value for name, value in random_adapter(demo_model.folder).items()}
    group = random_group(VOCABULARY, [24], supervised=1.0)
    return adapter, group, *autodiff_of_mlx_lm(demo_model.folder, adapter, [group], float64=True)


@needs_mlx
@pytest.mark.demo
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_those_of_mlx_lm(demo_model, truth, backend):
    adapter, group, loss, gradients = truth
    assert {name.split(".", 3)[3].rsplit(".", 1)[0] for name in adapter} == set(PROJECTIONS) and len(adapter) == 30 * 7 * 2
    found_loss, found, _ = one_pass(demo_model.folder, backends.choose(backend), adapter, [group])
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(found, gradients) <= 1e-4


@needs_mlx
@pytest.mark.demo
@pytest.mark.slow
def test_both_backends_lose_alike(demo_model, run_cli, tmp_path):
    """One row an update: MLX's CPU device multiplies slowly with the BLAS that it brings (with more rows it would take a quarter of an hour)."""
    losses = []
    for backend in ("numpy", "mlx"):
        flags = ["--iters", "10", "--batch-size", "1", "--steps-per-report", "1", "--val-batches", "0", "--reply-tokens", "1", "--sample-prompt", "Hi"]
        files = ["--adapter-path", f"{backend}", "--json-log", f"{backend}.jsonl"]
        done = run_cli("finetune", "--model", "demo", "--data", "demo", "--backend", backend, *flags, *files, cwd=tmp_path, timeout=1800)
        assert (done.returncode, done.stderr) == (0, "")
        losses.append(Done(tmp_path / backend, read_log(tmp_path / f"{backend}.jsonl")).values("train", "train_loss"))
    assert len(losses[0]) == 10 and losses[0][-1] != losses[0][0]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.demo
@pytest.mark.slow
def test_the_demo_changes_how_the_model_answers(demo_model, run_cli, tmp_path):
    """The README's command, as it stands there."""
    done = run_cli("finetune", "--model", "demo", "--data", "demo", "--json-log", "log.jsonl", cwd=tmp_path, timeout=1800)
    assert (done.returncode, done.stderr) == (0, "")
    log = Done(tmp_path / "adapters", read_log(tmp_path / "log.jsonl"))
    (end,) = log.of("end")
    assert end["val_loss_after"] <= 0.7 * end["val_loss_before"]
    assert "lighthouse" in end["reply_after"] and "lighthouse" not in end["reply_before"]
    assert f"mlx_lm.generate --model {shlex.quote(str(demo_model.folder))} --adapter-path adapters" in done.stdout


def test_the_demos_validation_rows_share_nothing_with_its_training_rows():
    """But the manner: no four words in a row; nor does the sample prompt with the training rows."""
    folder = config.demo_folder()
    train, valid = ([json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()] for name in ("train", "valid"))
    replies = [row["messages"][1]["content"] for row in train + valid]
    assert all(reply.startswith(MANNER[0]) and reply.endswith(MANNER[1]) for reply in replies)
    texts = [[message["content"] for row in rows for message in row["messages"]] for rows in (train, valid)]
    seen, unseen = (set().union(*map(phrases, part)) for part in texts)
    assert len(seen) > 500 and len(unseen) > 50 and not seen & unseen
    recipe = sources.load(None, {"model": "demo", "data": "demo"})
    assert recipe.sample_prompt is not None and phrases(recipe.sample_prompt) and not phrases(recipe.sample_prompt) & seen


def phrases(text: str, length: int = 4) -> set[tuple[str, ...]]:
    """The runs of so many words in a text, the manner apart."""
    words = re.findall(r"[a-z'-]+", text.removeprefix(MANNER[0]).removesuffix(MANNER[1]).lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}
