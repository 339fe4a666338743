"""Whatever ends the whole command early: one clear message, the right exit code, and nothing half-written left behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from runs import BACKENDS, chat_rows, command, data_folder, read_adapter, read_log, tiny_model
from tiny_tokenizers import write

from mesp_mlx.data import tokens
from mesp_mlx.model import convert, weights
from mesp_mlx.optim import Optimizer
from mesp_mlx.stream.safetensors import Writer, read_array, read_folder

MODEL_FILE = "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good_model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(good_model, tmp_path):
    """A model folder to spoil."""
    return Path(shutil.copytree(good_model, tmp_path / "model"))


@pytest.fixture
def data(tmp_path):
    return data_folder(tmp_path / "data", chat_rows(6), chat_rows(2, first=50))


@pytest.fixture
def fails(good_model, data, tmp_path, one_process, capsys):
    """Runs the command, which must fail; gives the message and checks that there is one only, and no trace of the run."""

    def run(*flags: str, code: int = 2, model: Path = good_model, data: Path = data, backend: str = "numpy", kept: tuple[str, ...] = ()) -> str:
        out = tmp_path / "out"
        given = ["finetune", "--model", str(model), "--data", str(data), "--backend", backend, "--iters", "3", "--reply-tokens", "1"]
        assert command(*given, "--adapter-path", str(out), *flags) == code
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("error: ") == 1 and "Traceback" not in said
        assert sorted(path.name for path in out.glob("*")) == sorted(kept)
        assert unfinished(tmp_path) == unfinished(one_process) == []
        return said

    return run


def unfinished(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if "partial" in path.name or "unfinished" in path.name]


def rewrite(model: Path, change) -> None:
    """Write the model's weights again as `change` leaves them: {name: (dtype, array)}."""
    tensors = {name: (entry.dtype, read_array(entry)) for name, entry in read_folder(model).items()}
    change(tensors)
    with Writer(model / MODEL_FILE, {name: (dtype, array.shape) for name, (dtype, array) in tensors.items()}) as writer:
        for name, (_, array) in tensors.items():
            writer.write(name, array)


def edit_config(model: Path, **changes) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def test_missing_and_empty_data(fails, tmp_path):
    assert f"{tmp_path / 'nowhere'}: no such file or folder" in fails(data=tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no train.jsonl, only nothing" in fails(data=empty)
    (empty / "train.jsonl").write_text("")
    assert "train.jsonl: the file is empty" in fails(data=empty)
    (empty / "train.jsonl").write_text("\n\n")
    assert "train.jsonl: the file holds no rows" in fails(data=empty)


def test_malformed_rows_are_named_by_file_and_line(fails, data):
    file = data / "train.jsonl"
    file.write_text(file.read_text() + '{"messages": [\n')
    assert f"{file}:7: malformed JSON" in fails()
    write(data / "valid.jsonl", [*chat_rows(2), {"nothing": 1}])
    write(file, chat_rows(6))
    assert f"{data / 'valid.jsonl'}:3: this row has none of the known sets of keys" in fails()
    write(data / "valid.jsonl", chat_rows(2))
    write(file, [{"messages": [{"role": "user", "content": "Hello?"}]}])
    assert "no row has an assistant turn or a completion to learn from" in fails()


def test_a_missing_tensor(fails, model):
    rewrite(model, lambda tensors: [tensors.pop(Q_PROJ.replace("weight", part)) for part in ("weight", "scales", "biases")])
    said = fails(model=model)
    assert str(model) in said and f"1 tensors that a llama model needs are missing:\n  {Q_PROJ}" in said


def test_a_wrong_shape(fails, model):
    def change(tensors):
        dtype, array = tensors[Q_PROJ]
        tensors[Q_PROJ] = dtype, array[:32]

    rewrite(model, change)
    assert f"{Q_PROJ} in {MODEL_FILE}: U32 [32, 8], expected U32 [64, 8]" in fails(model=model)


def test_truncated_and_corrupt_weights(fails, model):
    file = model / MODEL_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert f"{file}: tensor" in (said := fails(model=model)) and "it is truncated" in said
    file.write_bytes(whole[:5])
    assert f"{file}: the header should be" in fails(model=model)
    file.write_bytes(whole[:8] + b"#" + whole[9:])
    assert f"{file}: its header is not JSON" in fails(model=model)
    file.unlink()
    assert "no .safetensors file" in fails(model=model)
    shutil.rmtree(model)
    assert f"--model {model}: no such folder or file" in fails(model=model)


def test_models_that_are_not_served(fails, model):
    edit_config(model, model_type="mamba2")
    said = fails(model=model, backend="numpy")
    assert "model_type 'mamba2' is not served." in said and "NumPy runs these families: " in said and "qwen3" in said and "--backend mlx" in said
    (model / "config.json").unlink()
    assert "it has no config.json" in fails(model=model)


def test_a_model_without_its_tokenizer_or_with_anothers(fails, model):
    files = list(model.glob("tokenizer*"))
    edit_config(model, vocab_size=64)
    rewrite(model, lambda tensors: tensors.update({name: (kind, array[:64]) for name, (kind, array) in tensors.items() if "embed_tokens" in name}))
    assert "but the model has only 64. Use the tokenizer of this model." in fails(model=model)
    for file in files:
        file.unlink()
    assert "found neither tokenizer.json nor any other tokenizer file" in fails(model=model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_shrinks_under_the_reader(fails, model, monkeypatch, backend):
    """Truncated after its header was checked: the reader thread's error ends the run as any other."""
    check = weights.check

    def check_then_shrink(spec, entries):
        check(spec, entries)
        os.truncate(model / MODEL_FILE, (model / MODEL_FILE).stat().st_size // 2)

    monkeypatch.setattr(weights, "check", check_then_shrink)
    said = fails(model=model, backend=backend)
    assert f"from {model / MODEL_FILE}: the file ends" in said and "bytes early" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rank", "0"], "--rank: found 0, expected at least 1"),
        (["--optimizer", "muon"], "--optimizer: 'muon' comes in a later version; served: sgd, adam, adamw"),
        (["--num-layers", "3"], "3 layers were asked for, the model has 2"),
        (["--keys", "self_attn.qkv"], "no module is called 'self_attn.qkv'. Those that can be adapted: self_attn.q_proj"),
        (["--max-seq-length", "129"], "--max-seq-length is 129, but the model was made for 128 positions"),
        (["--max-seq-length", "4"], "nothing to learn stands within the first 4 tokens of any row. Raise --max-seq-length."),
        (["--resume-adapter-file", "absent.safetensors"], "absent.safetensors does not exist"),
        (["--json-log", "absent/log.jsonl"], "opening the log absent/log.jsonl: No such file or directory"),
    ],
)
def test_flags_that_cannot_be_used(fails, flags, message):
    assert message in fails(*flags)


def test_an_unknown_key_in_a_file(fails, tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text("learning_rat: 1e-4\n")
    assert f"unknown key learning_rat in {file}: did you mean learning_rate?" in fails("-c", str(file))


def test_the_adapters_folder(fails, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "adapters.safetensors").write_bytes(b"a run")
    assert f"{out} already holds a run (adapters.safetensors). Choose another folder, or give --overwrite" in fails(kept=("adapters.safetensors",))
    assert (out / "adapters.safetensors").read_bytes() == b"a run"
    shutil.rmtree(out)
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        (tmp_path / "file").write_text("here")
        assert f"{tmp_path / 'file'} is not a folder that can be written to" in fails("--adapter-path", str(taken))


def test_mlx_where_it_cannot_be_imported(fails, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "mlx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx", None)
    assert "--backend mlx: MLX can't be loaded here" in (said := fails(backend="mlx")) and "Install it: " in said and "--backend numpy" in said


def test_no_space_is_found_out_beforehand(fails, tmp_path, monkeypatch):
    """Of the adapter, and of the model that an unquantised one becomes."""
    plain = tiny_model(tmp_path / "plain", bits=None)
    full = shutil.disk_usage(tmp_path)._replace(free=9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    assert "saving an adapter of --rank 8 safely: it needs 0 MB" in (said := fails()) and "has 0 MB free" in said
    assert "writing the converted model: it needs" in (said := fails(model=plain)) and "has 0 MB free" in said


@pytest.mark.skipif(sys.platform == "win32", reason="files can't be limited in size")
@pytest.mark.parametrize("where", ["model", "tokens", "adapter"])
def test_a_write_that_fails_leaves_nothing_half_written(fails, tmp_path, data, where):
    """No file may grow beyond a size that the model, the tokens or the adapter needs: what a full disk does, too, in the middle of a file."""
    import resource

    plain = tiny_model(tmp_path / "plain", bits=None)
    if where == "tokens":
        write(data / "train.jsonl", chat_rows(600))
    limits, size = resource.getrlimit(resource.RLIMIT_FSIZE), {"model": 60_000, "tokens": 20_000, "adapter": 40_000}[where]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        said = fails(model=plain) if where == "model" else fails()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    doing = {"model": "building the model folder", "tokens": "Writing the tokens of", "adapter": "saving the adapter in"}[where]
    assert doing in said and "File too large" in said


def test_a_full_disk_in_the_middle_of_a_run_keeps_the_last_whole_checkpoint(fails, tmp_path, monkeypatch):
    sync, calls = os.fsync, []

    def fill(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    names = ("0000001_adapters.safetensors", "adapter_config.json", "adapters.safetensors")
    said = fails("--save-every", "1", kept=names)
    assert f"saving the adapter in {tmp_path / 'out' / '0000002_adapters.safetensors'}: No space left on device. Free some space" in said
    assert len(read_adapter(tmp_path / "out" / names[0])) == len(read_adapter(tmp_path / "out" / names[2])) == 28


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_is_not_finite(fails, model, backend):
    """Found out by validation, or else by the first update."""

    def spoil(tensors):
        tensors["model.embed_tokens.scales"][1][:] = np.nan

    rewrite(model, spoil)
    assert "the validation loss is nan" in fails(model=model, backend=backend, code=1)
    assert "update 1: the loss is nan. Nothing of it was applied." in fails("--val-batches", "0", model=model, backend=backend, code=1)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rate", "kept"),
    [
        # the first update still gives finite numbers, and is saved; the loss after it is not one
        ("1e20", ("0000001_adapters.safetensors", "adapter_config.json", "adapters.safetensors")),
        # the first update overflows
        ("1e39", ()),
    ],
)
def test_a_learning_rate_that_overflows(fails, tmp_path, backend, rate, kept):
    flags = ["--optimizer", "sgd", "--grad-clip", "0", "--warmup", "0", "--save-every", "1", "--learning-rate", rate]
    said = fails(*flags, code=1, kept=kept, backend=backend)
    assert "lower --learning-rate" in said and ("Nothing of it was applied" in said or "nothing was written" in said)
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert all(np.isfinite(array).all() for array in read_adapter(file).values())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no process groups to interrupt")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_in_a_terminal(good_model, data, tmp_path, backend):
    """The signal goes to every process of the group, while training; what had been trained is saved, and it is said where."""
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    flags = ["--iters", "1000000", "--steps-per-report", "1", "--reply-tokens", "1", "--val-batches", "0", "--learning-rate", "1e-3", "--warmup", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mesp_mlx", "finetune", "--model", str(good_model), "--data", str(data), "--backend", backend]
        + ["--adapter-path", str(out), "--json-log", str(log), *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "MESP_MLX_CACHE": str(tmp_path / "cache")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None and not (log.exists() and '"train"' in log.read_text()):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        said, complained = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, complained) == (130, "")
    assert said.splitlines()[-1] == f"interrupted: the adapter as it stands is in {out / 'adapters.safetensors'}"
    assert [event["event"] for event in read_log(log)][:3] == ["plan", "start", "train"]
    adapter = read_adapter(out / "adapters.safetensors")
    assert any(np.abs(array).max() > 0 for name, array in adapter.items() if name.endswith("lora_b"))
    assert sorted(os.listdir(out)) == ["adapter_config.json", "adapters.safetensors"] and unfinished(tmp_path) == []
    resumed = ["--resume-adapter-file", str(out), "--adapter-path", str(tmp_path / "next"), "--iters", "1", "--reply-tokens", "1"]
    assert command("finetune", "--model", str(good_model), "--data", str(data), "--backend", backend, *resumed) == 0


def interrupt_at(count: int, inner):
    """A function as `inner` that is interrupted in the call of that number."""
    calls = []

    def call(*arguments, **options):
        calls.append(None)
        if len(calls) == count:
            signal.raise_signal(signal.SIGINT)
        return inner(*arguments, **options)

    return call


@pytest.mark.parametrize("where", ["converting", "tokenising"])
def test_an_interruption_before_training_leaves_nothing(good_model, data, tmp_path, one_process, monkeypatch, capsys, where):
    model = tiny_model(tmp_path / "plain", bits=None) if where == "converting" else good_model
    module, name = (convert, "quantize") if where == "converting" else (tokens, "token_mask")
    monkeypatch.setattr(module, name, interrupt_at(4, getattr(module, name)))
    flags = ["--backend", "numpy", "--adapter-path", str(tmp_path / "out"), "--json-log", str(tmp_path / "log.jsonl")]
    assert command("finetune", "--model", str(model), "--data", str(data), *flags) == 130
    said = capsys.readouterr()
    assert said.err == "" and said.out.splitlines()[-1] == "interrupted: nothing was written"
    assert [path.name for path in one_process.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    assert unfinished(one_process) == [] and not (tmp_path / "out").exists() and not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize("where", ["applying", "writing"])
def test_an_interruption_waits_for_an_update_or_a_file_to_be_whole(good_model, data, tmp_path, one_process, monkeypatch, where):
    given = ["finetune", "--model", str(good_model), "--data", str(data), "--backend", "numpy", "--reply-tokens", "1", "--learning-rate", "1e-3"]
    given += ["--lr-schedule", "constant", "--warmup", "0", "--val-batches", "0", "--save-every", "2"]
    assert command(*given, "--iters", "2", "--adapter-path", str(tmp_path / "whole")) == 0
    if where == "applying":  # the sixth tensor of the second update
        monkeypatch.setattr(Optimizer, "apply", interrupt_at(28 + 6, Optimizer.apply))
    else:  # the sixth tensor of the checkpoint after it
        monkeypatch.setattr(Writer, "write", interrupt_at(6, Writer.write))
    assert command(*given, "--iters", "9", "--adapter-path", str(tmp_path / "out")) == 130
    names = ["adapter_config.json", "adapters.safetensors"]
    assert sorted(os.listdir(tmp_path / "out")) == (names if where == "applying" else ["0000002_adapters.safetensors", *names])
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "whole" / "adapters.safetensors").read_bytes()
