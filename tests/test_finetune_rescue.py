"""What was trained outlives whatever ends a run; and what only plans or tries leaves no folder behind."""

import os

import numpy as np
import pytest
from runs import chat_rows, command, data_folder, read_adapter, tiny_model

from mesp_mlx import finetune
from mesp_mlx.engine import train as training
from mesp_mlx.errors import RunStopped
from mesp_mlx.optim import Optimizer


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    rows = data_folder(folder / "data", chat_rows(6))
    steady = ["--lr-schedule", "constant", "--warmup", "0", "--learning-rate", "1e-3", "--val-batches", "0", "--reply-tokens", "0", "--memory", "fastest"]
    return ["finetune", "--model", str(tiny_model(folder / "tiny")), "--data", str(rows), "--backend", "numpy", "--iters", "5", *steady]


def fail_at(monkeypatch, owner, name, count, error):
    """The call of that number raises."""
    inner, calls = getattr(owner, name), []

    def call(*arguments, **named):
        calls.append(None)
        if len(calls) == count:
            raise error
        return inner(*arguments, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of buffers"), RunStopped("the disk is full")])
def test_what_was_trained_is_saved_whatever_ends_the_run(given, tmp_path, one_process, monkeypatch, capsys, error):
    assert command(*given, "--iters", "2", "--adapter-path", str(tmp_path / "two")) == 0
    fail_at(monkeypatch, training, "make_update", 3, error)
    if isinstance(error, RunStopped):
        assert command(*given, "--adapter-path", str(tmp_path / "out")) == 1
    else:
        with pytest.raises(type(error)):
            command(*given, "--adapter-path", str(tmp_path / "out"))
    said = capsys.readouterr()
    assert f"the run failed: the adapter after 2 updates is in {tmp_path / 'out' / 'adapters.safetensors'}" in said.out
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter_config.json", "adapters.safetensors"]
    for name, array in read_adapter(tmp_path / "two" / "adapters.safetensors").items():
        assert np.array_equal(read_adapter(tmp_path / "out" / "adapters.safetensors")[name], array)


@pytest.mark.parametrize("every", ["1", "100"])
def test_an_adapter_in_the_middle_of_an_update_is_not_saved(given, tmp_path, one_process, monkeypatch, capsys, every):
    """The sixth tensor of the second update fails, after gradients were applied as they came: the last save is named, if there is one."""
    fail_at(monkeypatch, Optimizer, "apply", 28 + 6, RunStopped("a gradient is not finite"))
    saves = []
    inner = finetune.adapters.save
    monkeypatch.setattr(finetune.adapters, "save", lambda *given: saves.append(given[-1]) or inner(*given))
    flags = ["--gradients", "applied", "--grad-clip", "0", "--save-every", every, "--adapter-path", str(tmp_path / "out")]
    assert command(*given, *flags) == 1
    said = capsys.readouterr()
    assert "error: update 2: a gradient is not finite" in said.err
    assert ("the adapter after 1 updates is in" if every == "1" else "the run failed: nothing was saved") in said.out
    assert len(saves) == (2 if every == "1" else 0)


def test_a_run_that_saved_before_it_stopped_saves_once(given, tmp_path, one_process, monkeypatch, capsys):
    """As the watchdog does."""
    saves, inner = [], finetune.adapters.save
    monkeypatch.setattr(finetune.adapters, "save", lambda *given: saves.append(given[-1]) or inner(*given))

    class Stops(finetune.Watchdog):
        def after_update(self):
            self._save()
            raise RunStopped("too much memory")

    monkeypatch.setattr(finetune, "Watchdog", Stops)
    assert command(*given, "--adapter-path", str(tmp_path / "out")) == 1
    assert saves == ["adapters.safetensors"] and "the adapter after 1 updates is in" in capsys.readouterr().out


def test_a_save_that_fails_too_hides_nothing(given, tmp_path, one_process, monkeypatch, capsys):
    fail_at(monkeypatch, training, "make_update", 3, RunStopped("the disk is full"))
    fail_at(monkeypatch, finetune.adapters, "save", 1, MemoryError())
    assert command(*given, "--adapter-path", str(tmp_path / "out")) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: update 3: the disk is full") and "the run failed: nothing was saved" in said.out


@pytest.mark.parametrize("flag", ["--dry-run", "--try-step"])
def test_a_folder_that_holds_a_run_is_no_reason_to_refuse_a_plan(given, tmp_path, one_process, capsys, flag):
    held = tmp_path / "held"
    held.mkdir()
    (held / "adapters.safetensors").write_bytes(b"a run")
    for folder in (held, tmp_path / "new"):
        assert command(*given, flag, "--adapters", "file", "--adapter-path", str(folder)) == 0
    assert os.listdir(held) == ["adapters.safetensors"] and not (tmp_path / "new").exists()
    assert (held / "adapters.safetensors").read_bytes() == b"a run"


def test_the_runs_file_is_not_put_into_memory(given, tmp_path, one_process, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "in_memory", lambda folder: folder == tmp_path)
    assert command(*given, "--adapters", "file", "--adapter-path", str(tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert f"the run's temporary file would lie in {tmp_path}, which is in memory itself" in said and "--adapter-path" in said
    assert command(*given, "--iters", "1", "--adapter-path", str(tmp_path / "out")) == 0
