"""What --model may name: demo, folders, GGUF files, Hub ids (test_model_hub.py); and that the cache never holds a half-built folder."""

import json
import os
import shutil
import subprocess
import sys
import time

import filelock
import numpy as np
import pytest
from hugging_face import write_hugging_face_folder

from mesp_mlx.errors import UserError
from mesp_mlx.model import cache, convert, source
from mesp_mlx.model.architecture import open_folder
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.stream.safetensors import Writer

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 96,
    "tie_word_embeddings": True, "torch_dtype": "float16",
}  # fmt: skip


def write_folder(folder, config=CONFIG, names=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {name: ("F16", shape) for name, shape in load_spec(CONFIG).tensors().items() if names is None or name in names}
    with Writer(folder / "model.safetensors", shapes) as writer:
        for name, (_, shape) in shapes.items():
            writer.write(name, np.ones(shape, np.float16))
    return folder


@pytest.fixture
def resolve(tmp_path):
    """source.resolve with the cache in tmp_path; the lines it notes are in resolve.notes."""

    def call(model, **settings):
        return source.resolve(str(model), tmp_path / "cache", note=call.notes.append, **settings)

    call.notes = []
    return call


def cached(tmp_path):
    return sorted(file.name for file in (tmp_path / "cache" / "models").glob("*") if not file.name.endswith(".lock"))


def test_a_quantised_folder_is_used_as_it_is(tmp_path, resolve):
    folder = write_folder(tmp_path / "mlx", {**CONFIG, "quantization": {"group_size": 64, "bits": 4}})
    assert resolve(folder) == source.ModelFolder(folder, "mlx", False)
    assert not (tmp_path / "cache").exists() and not resolve.notes


def test_a_float_folder_is_used_as_it_is_when_asked(tmp_path, resolve):
    folder = write_folder(tmp_path / "dense")
    assert resolve(folder, quantize="none") == source.ModelFolder(folder, "dense", False)


def test_a_float_folder_is_quantised_once_and_again_when_it_changes(tmp_path, resolve, monkeypatch):
    folder = write_folder(tmp_path / "dense")
    first = resolve(folder)
    assert first.converted and first.name == "dense" and first.folder.parent == tmp_path / "cache" / "models"
    assert read_config(first.folder)["quantization"] == {"group_size": 64, "bits": 4}
    assert len(resolve.notes) == 1 and "4-bit" in resolve.notes[0]
    with monkeypatch.context() as patch:
        patch.setattr(convert, "quantize_folder", None)  # would fail if it were called
        assert resolve(folder) == first
    os.utime(folder / "model.safetensors", (1, 1))
    second = resolve(folder)
    assert second.folder != first.folder and cached(tmp_path) == sorted([first.folder.name, second.folder.name])


def test_the_same_folder_under_a_relative_name_is_the_same_model(tmp_path, resolve, monkeypatch):
    folder = write_folder(tmp_path / "dense")
    monkeypatch.chdir(tmp_path)
    assert resolve("dense") == resolve(folder) == resolve("./dense/")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "no-such-model", "a/b/c", "~/no/such", "file.gguf"])
def test_a_name_that_is_nothing_is_refused(resolve, model):
    with pytest.raises(UserError, match="no such folder or file.*demo"):
        resolve(model)


def refusal(resolve, model, **settings):
    with pytest.raises(UserError) as refused:
        resolve(model, **settings)
    return str(refused.value)


def test_folders_that_hold_no_usable_model_are_refused(tmp_path, resolve):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(resolve, tmp_path / "empty")
    (tmp_path / "empty" / "x.Q4_0.gguf").touch()
    assert "x.Q4_0.gguf" in refusal(resolve, tmp_path / "empty")
    torch = write_folder(tmp_path / "torch")
    (torch / "model.safetensors").rename(torch / "pytorch_model.bin")
    assert "PyTorch's pytorch_model.bin" in refusal(resolve, torch) and "PyTorch" in refusal(resolve, torch, quantize="none")
    (torch / "pytorch_model.bin").unlink()
    assert "no .safetensors" in refusal(resolve, torch)
    assert "'bert'" in refusal(resolve, write_folder(tmp_path / "other", {**CONFIG, "model_type": "bert"}))
    awq = {**CONFIG, "quantization_config": {"quant_method": "awq"}}
    assert "'awq'" in refusal(resolve, write_folder(tmp_path / "awq", awq))
    (tmp_path / "notes.txt").write_text("hello")
    assert "not in GGUF format" in refusal(resolve, tmp_path / "notes.txt")
    assert not (tmp_path / "cache").exists()


def test_an_error_leaves_nothing_behind(tmp_path, resolve):
    assert "input_layernorm" in refusal(resolve, write_folder(tmp_path / "part", names=["model.embed_tokens.weight", "model.norm.weight"]))
    assert cached(tmp_path) == []


def test_a_truncated_file_is_refused_and_leaves_nothing_behind(tmp_path, resolve):
    file = write_folder(tmp_path / "cut") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated" in refusal(resolve, tmp_path / "cut") and cached(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(28, "No space left on device")])
def test_an_interruption_in_the_middle_leaves_nothing_behind(tmp_path, resolve, monkeypatch, error):
    folder, written, write = write_folder(tmp_path / "dense"), [], Writer.write

    def stop(self, name, array):
        written.append(name)
        if len(written) == 5:
            assert cached(tmp_path)[0].endswith(".partial")
            raise error
        write(self, name, array)

    monkeypatch.setattr(Writer, "write", stop)
    with pytest.raises(UserError if isinstance(error, OSError) else error):
        resolve(folder)
    assert cached(tmp_path) == []


def test_what_a_killed_run_left_is_removed_at_the_next_start(tmp_path, resolve):
    left = tmp_path / "cache" / "models" / ".gone-0123456789abcdef.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    resolve(write_folder(tmp_path / "mlx", {**CONFIG, "quantization": {"group_size": 64, "bits": 4}}))
    assert not left.exists()


def test_what_another_process_is_building_is_left_alone(tmp_path):
    building = tmp_path / ".model.partial"
    building.mkdir()
    with filelock.FileLock(tmp_path / ".model.lock"):
        cache.sweep(tmp_path)
        assert building.exists()
    cache.sweep(tmp_path)
    assert not building.exists()


def test_two_processes_build_a_folder_once(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from mesp_mlx.model import cache\n"
        "with cache.building(Path(sys.argv[1])) as partial:\n"
        "    if partial:\n"
        "        (partial / 'made').write_text(sys.argv[2]); print('built', flush=True); time.sleep(1)\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "m"), str(i)], stdout=subprocess.PIPE, text=True) for i in range(3)]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert sorted(said) == ["", "", "built\n"] and [process.returncode for process in started] == [0, 0, 0]
    assert (tmp_path / "m" / "made").read_text() == str(said.index("built\n"))


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is POSIX's")
def test_a_killed_build_is_taken_over(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from mesp_mlx.model import cache\n"
        "with cache.building(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'half').touch(); print('going', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "m")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "going\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert (tmp_path / ".m.partial" / "half").exists()
    started = time.monotonic()
    with cache.building(tmp_path / "m") as partial:
        assert list(partial.iterdir()) == []
        (partial / "whole").touch()
    assert time.monotonic() - started < 5 and [file.name for file in (tmp_path / "m").iterdir()] == ["whole"]


def test_too_little_space_is_found_before_anything_is_written(tmp_path, resolve, monkeypatch):
    folder = write_folder(tmp_path / "dense")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    monkeypatch.setattr(Writer, "__init__", None)
    assert "0 MB free" in refusal(resolve, folder) and cached(tmp_path) == []


def test_a_file_in_place_of_the_cache_is_named(tmp_path, resolve):
    (tmp_path / "cache").write_text("")
    assert "MESP_MLX_CACHE" in refusal(resolve, write_folder(tmp_path / "dense"))


def test_a_gguf_file_is_converted_once(tmp_path, resolve, monkeypatch):
    from gguf_files import Type, random_weights, write_gguf

    file = write_gguf(tmp_path / "tiny.Q4_0.gguf", random_weights(), kind=Type.Q4_0)
    first = resolve(file)
    assert first.name == "tiny.Q4_0" and first.converted and {"config.json", "tokenizer.json"} < {made.name for made in first.folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("mesp_mlx.model.gguf.convert", None)
        assert resolve(file) == first
    assert resolve(file, quantize="none").folder != first.folder  # float matrices of another file would come out differently
    assert refusal(resolve, tmp_path / "tiny.Q4_0")  # the suffix is part of the name


@pytest.mark.parametrize(("variant", "written"), [("gpt2", True), ("gpt_neox", True), ("gemma3", False), ("cohere2", False)])
def test_hugging_face_s_own_names_are_written_anew_without_mlx(tmp_path, variant, written):
    """Even where nothing is to be quantised; a folder whose names are mlx-lm's is used as it is then."""
    write_hugging_face_folder(tmp_path / "model", variant)
    for quantize in ("none", "4"):
        found = source.resolve(str(tmp_path / "model"), tmp_path / "cache", quantize, backend="numpy")
        assert (found.folder == tmp_path / "model") == (quantize == "none" and not written)
        spec, entries = open_folder(found.folder, "numpy")
        assert entries.keys() >= spec.tensors().keys() and any(name.endswith("scales") for name in entries) == (quantize == "4")
