"""mlx-lm's trainer, given our rows, mask and rates, computes what ours does; where it does not, the comparison shows it."""

import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from models import make_model, tiny_config, tool
from runs import Done, chat_rows, data_folder, needs_mlx, run, tiny_model

from mesp_mlx.adapter import ADAPTER_FILE
from mesp_mlx.data.group import Group

compare = tool("compare_mlx_lm")
RECIPE = {"iters": 6, "batch_size": 3, "num_layers": 1, "keys": "self_attn.q_proj,mlp.down_proj", "learning_rate": 1e-2, "lr_schedule": "linear", "warmup": 2}
LOSS, ADAPTER = 1e-5, 1e-5  # of losses, absolute; of final adapters, relative to what training changed (measured: 2e-6 and 5e-7)

pytestmark = needs_mlx


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen2", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"), chat_rows(11), chat_rows(3, first=50))


@pytest.fixture
def both(model, data, tmp_path, one_process):
    """A recipe by ours and then, in this process too, by mlx-lm in some modes: (ours, results and differences). `changes` are to mlx-lm's settings alone."""

    def both(modes, changes=({},), product="own", **given) -> tuple[Done, list[dict]]:
        recipe, places = RECIPE | given, {"model": str(model), "data": str(data)}
        ours = run(model, data, tmp_path / "ours", **(recipe | compare.same_for_both(compare.load(None, recipe | places))))
        results = []
        for mode, change in itertools.product(modes, changes):
            changed = compare.load(None, recipe | places | change).model_dump(mode="json", exclude_unset=True)
            (tmp_path / "settings.yaml").write_text(json.dumps(changed))
            request = {"settings": str(tmp_path / "settings.yaml"), "model_folder": str(model), "mode": mode, "product": product}
            request |= {"updates": len(ours.of("train")), "adapter": str(tmp_path / "theirs.safetensors")}
            result = compare.train_by_mlx_lm(request)
            apart = compare.differences(ours.values("train", "train_loss"), ours.folder / ADAPTER_FILE, result, tmp_path / "theirs.safetensors")
            results.append(result | apart)
        return ours, results

    return both


def test_sgd_in_every_mode(both):
    """Equal to ours, and every mode to the others, on padded rows of several lengths with some modules left out."""
    results = both(compare.MODES, optimizer="sgd")[1]
    for result in results:
        assert result["max_loss_difference"] < LOSS and result["adapter_change_difference"] < ADAPTER
    losses = [result["losses"] for result in results]
    assert np.allclose(losses, losses[0], rtol=0, atol=2e-6)
    assert losses[0][0] - losses[0][-1] > 0.01, "something was learnt, so that the order of updates shows"


@pytest.mark.parametrize("given", [{"optimizer": "adamw", "optimizer_config": "{adamw: {weight_decay: 0.1}}"}, {"optimizer": "adam"}], ids=str)
def test_adam(both, given):
    """Its first steps are gradients over their own size, so that a gradient's rounding (1e-6) counts in full where the gradient is small."""
    (result,) = both(["eager"], **given)[1]
    assert result["max_loss_difference"] < LOSS and result["adapter_change_difference"] < ADAPTER


def test_accumulation_and_mlx_products(both):
    """Updates of 2 x 4 rows, of which the second has only three left; by MLX's own quantised product."""
    given = {"optimizer": "sgd", "batch_size": 4, "grad_accumulation_steps": 2, "iters": 8}
    ours, results = both(["compiled", "eager"], product="mlx", **given)
    assert ours.values("train", "iteration") == [2, 4, 6, 8]
    for result in results:
        assert len(result["losses"]) == 4
        assert result["max_loss_difference"] < LOSS and result["adapter_change_difference"] < ADAPTER


def test_a_difference_is_seen(both):
    changes = [{"scale": 21.0}, {"learning_rate": 1.1e-2}, {"seed": 1}, {"max_seq_length": 24}, {"mask_prompt": False}, {"warmup": 3}]
    for change, result in zip(changes, both(["eager"], changes, optimizer="sgd")[1], strict=True):
        assert result["max_loss_difference"] > 1000 * LOSS and result["adapter_change_difference"] > 1000 * ADAPTER, change


def test_the_command(model, data, tmp_path):
    """In processes of its own, with everything written; --grad-clip, which mlx-lm has not, is said to be left out."""
    flags = [word for key, value in RECIPE.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    flags += ["--optimizer=sgd", "--grad-clip", "0.001", "--modes", "compiled-checkpoint", "--json", "out.json"]
    picture = ["--plot", "out.png"] if compare.importlib.util.find_spec("matplotlib") else []
    done = tool_run("compare_mlx_lm", "--model", str(model), "--data", str(data), *flags, *picture, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    compared = json.loads((tmp_path / "out.json").read_text())
    ours, theirs = compared["runs"]
    assert (ours["name"], theirs["name"]) == ("mesp-mlx", "compiled-checkpoint") and len(ours["losses"]) == len(theirs["losses"]) == 6
    assert theirs["max_loss_difference"] < LOSS and theirs["adapter_change_difference"] < ADAPTER
    assert 0 < ours["allocator_peak_bytes"] < theirs["allocator_peak_bytes"] < theirs["process_peak_bytes"]
    assert ours["step_seconds"] > 0 and theirs["step_seconds"] > 0
    assert not picture or (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    text = " ".join(done.stdout.split())
    assert "given our rows and our mask" in text and "grad_clip 0.001 is not used" in text and "mlx-lm compiled, checkpoint" in text
    assert f"loss at iteration 6 {ours['losses'][5]:.6f} {theirs['losses'][5]:.6f}" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", *(["out.png"] if picture else [])]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "nowhere", "--data", "demo"), "compare_mlx_lm: mesp-mlx: --model nowhere: no such folder or file"),
        (("--model", "demo", "--data", "nowhere"), "compare_mlx_lm: mesp-mlx: Looking for training data in nowhere: no such file or folder"),
        (("--data", "demo"), "compare_mlx_lm: no model is given"),
        (("--model", "demo", "--data", "demo", "--rnk", "4"), "compare_mlx_lm: unknown key --rnk"),
        (("--model", "demo", "--data", "demo", "4"), "compare_mlx_lm: 4: expected a flag before it"),
        (("--model", "demo", "--data", "demo", "--dropout", "0.1"), "compare_mlx_lm: dropout: mlx-lm draws its masks in another way"),
        (("--model", "demo", "--data", "demo", "--modes", "fast"), "'fast' is none of eager"),
        (("--model", "demo", "--data", "demo", "--json", "no/folder.json"), "compare_mlx_lm: no/folder.json can't be written"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare_mlx_lm.py", *flags])
    try:
        code = compare.main()
    except SystemExit as left:  # argparse's
        code = left.code
    output, errors = capsys.readouterr()
    assert code == 2 and message in errors and not output and len(errors.splitlines()) < 12


@pytest.mark.parametrize("name", ["compare_mlx_lm", "mlx_lm_step"])
def test_without_mlx_lm(monkeypatch, capsys, name):
    module = tool(name)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--model", "demo", *(["--data", "demo"] if name == "compare_mlx_lm" else [])])
    assert module.main() == 2
    assert capsys.readouterr().err == f"{name}: mlx-lm, which this compares with, is not installed. Install it: pip install 'mlx-lm>=0.32.2,<0.33'.\n"


def test_iterations_of_an_update():
    """Two groups of other widths in three batches: every row once, padding unsupervised, and the batches' mean loss is that over all supervised tokens."""
    narrow = Group(np.full((1, 4), 1), np.full((1, 4), 2), np.array([[True, False, True, True]]), (0,), (4,))
    wide = Group(np.full((1, 6), 3), np.full((1, 6), 4), np.ones((1, 6), bool), (1,), (6,))
    first, second, empty = compare.iterations([narrow, wide], 3)
    assert [batch[0].shape for batch in (first, second, empty)] == [(1, 4), (1, 6), (1, 4)]
    assert first[2].sum() == 3 and second[2].sum() == 6 and empty[2].sum() == 0
    assert np.mean([(batch[2] * 5.0).sum() / batch[3] for batch in (first, second, empty)]) == 5
    (joined,) = compare.iterations([narrow, wide], 1)
    assert joined[0].tolist() == [[1, 1, 1, 1, 0, 0], [3] * 6] and joined[2].tolist() == [[True, False, True, True, False, False], [True] * 6]


@pytest.mark.parametrize(("tied", "quantization"), [(True, {"model.embed_tokens": {"bits": 8, "group_size": 32}}), (False, {"lm_head": False})])
def test_our_product_in_mlx_lms_model(tmp_path, tied, quantization):
    """Same logits as mlx-lm's; every quantised module is replaced, and a plain one is left as it is."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import load_model

    folder = make_model(tmp_path, tiny_config("qwen2", tie_word_embeddings=tied), quantization=quantization)
    ids = mx.array(np.random.default_rng(0).integers(0, 160, (2, 9)))
    model = load_model(folder)[0]
    want = np.array(model(ids))
    tool("mlx_lm_step").multiply_our_way(model)
    left = [name for name, module in model.named_modules() if type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding)]
    assert not left
    assert np.abs(np.array(model(ids)) - want).max() < 1e-5 * np.abs(want).max()


def test_a_step(tmp_path):
    folder = make_model(tmp_path / "model", tiny_config("llama"))
    flags = ("--seq", "12", "--batch", "2", "--rank", "4", "--iters", "2", "--compile", "--grad-checkpoint", "--own-product")
    done = tool_run("mlx_lm_step", "--model", str(folder), *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["mode"] == "compiled-checkpoint" and result["iters"] == 2 and result["step_seconds"] > 0
    assert abs(result["loss"] - math.log(160)) < 2
    assert 0 < result["allocator_peak_bytes"] < 20e6 < result["process_peak_bytes"]


def tool_run(name: str, *flags: str, cwd) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return subprocess.run([sys.executable, str(ROOT / "tools" / f"{name}.py"), *flags], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300)
