"""`mesp-mlx architectures`: what it finds out about model types by running them, and how it says so."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from backends import needs_mlx
from conftest import ROOT
from runs import command

from mesp_mlx import architecture_check, architectures, child
from mesp_mlx.errors import UserError

FOUND = [
    {"model_type": "llama", "status": "structured", "numpy": True, "error": 1e-6, "reason": None},
    {"model_type": "gpt_oss", "status": "structured", "numpy": False, "error": 2e-6, "reason": None},
    {"model_type": "mamba2", "status": "generic", "numpy": False, "error": 3e-6, "reason": None},
    {"model_type": "olmo", "status": "refused", "numpy": False, "error": None, "reason": "it needs\nai2-olmo."},
]


@pytest.fixture
def in_this_process(monkeypatch):
    """The child's work is done here; gives what was asked of it."""
    asked = []

    def ask(module, request, doing):
        assert module == "mesp_mlx.architecture_check"
        asked.append(request["types"])
        return architecture_check.serve(request)

    monkeypatch.setattr(child, "ask", ask)
    return asked


@needs_mlx
def test_the_verb_in_processes_of_its_own(tmp_path, run_cli):
    done = run_cli("architectures", "qwen2", "deepseek_v2", "--json", "found.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["qwen2", "structured", "yes"] in [line[:3] for line in lines] and ["deepseek_v2", "generic"] in [line[:2] for line in lines]
    assert "2 model types of mlx-lm" in done.stdout and "1 structured, 1 generic" in done.stdout and "\x1b" not in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["counts"] == {"structured": 1, "generic": 1, "refused": 0, "wrong": 0} and set(found["versions"]) == {"mesp_mlx", "mlx_lm", "mlx"}
    assert [each["model_type"] for each in found["types"]] == ["qwen2", "deepseek_v2"]
    assert all(0 < each["error"] < 1e-5 and each["reason"] is None for each in found["types"])


@needs_mlx
def test_all_types_that_mlx_lm_has_are_tried_in_batches(monkeypatch, capsys):
    from mesp_mlx.model.samples import model_types

    asked = []

    def ask(_, request, doing):
        asked.append(request["types"])
        return {"found": [FOUND[0] | {"model_type": name} for name in request["types"]]} if request["types"] else {"types": model_types()}

    monkeypatch.setattr(child, "ask", ask)
    assert architectures.run([]) == 0
    assert asked[0] == [] and sum(asked, []) == model_types() and max(map(len, asked)) == architectures.AT_ONCE and len(asked) < len(model_types()) / 4
    assert f"{len(model_types())} model types" in capsys.readouterr().out


@needs_mlx
def test_a_wrong_gradient_is_found(in_this_process, monkeypatch, capsys):
    from mesp_mlx.model.generic_stages import LayerStage

    right = LayerStage.backward

    def wrong(self, *arguments):
        dstate, gradients = right(self, *arguments)
        return dstate, {name: gradient * (1.001 if name.endswith("o_proj.lora_a") and ".1." in name else 1) for name, gradient in gradients.items()}

    monkeypatch.setattr(LayerStage, "backward", wrong)
    assert architectures.run(["deepseek_v2", "qwen2"]) == 1
    said = capsys.readouterr().out
    assert "off by 1.0e-03" in said and "1 structured, 1 wrong" in said


@needs_mlx
def test_numpy_is_judged_by_itself(in_this_process, monkeypatch, capsys):
    from mesp_mlx import reference

    right = reference.rms_norm.backward
    monkeypatch.setattr(reference.rms_norm, "backward", lambda *arguments: 1.01 * right(*arguments))
    assert architectures.run(["qwen2"]) == 1 and "on NumPy is off" in capsys.readouterr().out


@needs_mlx
def test_what_can_not_be_walked_is_refused_with_its_reason(in_this_process, monkeypatch, capsys):
    from mesp_mlx.model import generic

    def refuse(*_, **__):
        raise UserError("walking this model layer by layer: it has no layers.")

    monkeypatch.setattr(generic, "build", refuse)
    assert architectures.run(["mamba2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mamba2 refused" in said and "it has no layers" in said


@needs_mlx
def test_what_fails_in_no_known_way_is_wrong_not_refused(in_this_process, monkeypatch, capsys):
    from mesp_mlx.model import generic

    monkeypatch.setattr(generic, "build", lambda *_, **__: 1 / 0)
    assert architectures.run(["mamba2"]) == 1 and "ZeroDivisionError" in capsys.readouterr().out


@needs_mlx
def test_a_process_that_crashes_takes_no_other_type_with_it(monkeypatch):
    def ask(_, request, doing):
        if "mamba2" in request["types"]:
            raise UserError(f"{doing} failed: the process that does it ended with status -11.")
        return {"found": [{"model_type": name, "status": "generic"} for name in request["types"]]}

    monkeypatch.setattr(child, "ask", ask)
    found = list(architectures.tried(["gear", "mamba2", "qwen"]))
    assert [(each["model_type"], each["status"]) for each in found] == [("gear", "generic"), ("mamba2", "wrong"), ("qwen", "generic")]
    assert "mamba2" in found[1]["reason"] and "-11" in found[1]["reason"] and "gear" not in found[1]["reason"]


@needs_mlx
def test_a_type_that_mlx_lm_does_not_have_is_named(in_this_process, capsys):
    assert command("architectures", "qwen4") == 2
    said = capsys.readouterr().err
    assert "'qwen4'" in said and "qwen3" in said and len(said.splitlines()) == 1 and in_this_process == [[]]


def test_without_mlx_lm_the_error_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(architectures, "has_mlx_lm", lambda: False)
    assert command("architectures") == 2 and "pip install" in capsys.readouterr().err


@needs_mlx
def test_the_file_is_checked_before_anything_runs(in_this_process, tmp_path, capsys):
    assert command("architectures", "--json", str(tmp_path / "no" / "found.json")) == 2
    assert "--json" in capsys.readouterr().err and in_this_process == []


def test_the_markdown_has_every_type_once_and_the_reasons():
    lines = architectures.as_markdown(FOUND, "1.2.3").splitlines()
    assert lines == [
        "mlx-lm 1.2.3 has 4 model types, of which 3 train here.",
        "",
        "| here | model types |",
        "|---|---|",
        "| structured, on MLX and NumPy (1) | `llama` |",
        "| structured, on MLX (1) | `gpt_oss` |",
        "| generic, on MLX (1) | `mamba2` |",
        "| refused (1) | `olmo` |",
        "",
        "- `olmo`: it needs ai2-olmo.",
    ]


@needs_mlx
def test_the_check_compares_the_loss_and_every_tensor():
    """A gradient that is missing, or not a number, is infinitely wrong."""
    truth = 2.0, {"a": np.array([1.0, -4.0]), "b": np.array([2.0])}
    assert architecture_check._worst(truth, truth) == 0
    assert architecture_check._worst((2.0, {"a": np.array([1.0, -4.2]), "b": np.array([2.0])}), truth) == pytest.approx(0.05)
    assert architecture_check._worst((2.2, truth[1]), truth) == pytest.approx(0.1)
    assert architecture_check._worst((2.0, {"a": truth[1]["a"]}), truth) == np.inf
    assert architecture_check._worst((2.0, truth[1] | {"b": np.array([np.nan])}), truth) == np.inf
    assert architecture_check._worst((np.nan, truth[1]), truth) == np.inf


@needs_mlx
@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_ctrl_c_ends_it_and_its_process_at_once(tmp_path):
    """As a terminal sends it: to the parent and to the child alike."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mesp_mlx", "architectures", "--json", str(tmp_path / "found.json")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    time.sleep(4)
    import os

    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and not (tmp_path / "found.json").exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
