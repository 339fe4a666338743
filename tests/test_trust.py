"""Code that comes with a model or its tokenizer is run where the user says so with --trust-remote-code, as mlx-lm's flag is called, and nowhere else."""

import json

import pytest
from runs import VOCABULARY, chat_rows, command, data_folder, needs_mlx, run
from tiny_tokenizers import TEMPLATES, make_tokenizer

from mesp_mlx.errors import UserError
from mesp_mlx.model import architecture

OWN = """
from pathlib import Path

(Path(__file__).parent / "ran").touch()
from mlx_lm.models.mamba2 import Model, ModelArgs
"""
OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def data(tmp_path):
    return data_folder(tmp_path / "data", chat_rows(6), chat_rows(2, first=50))


def own_model(folder, model_type="mine"):
    """A random model whose config names a file of its own; that file leaves another beside it when it is run."""
    from samples_truth import make

    from mesp_mlx.model.samples import small_config

    make(folder, "mamba2", config=small_config("mamba2") | {"vocab_size": VOCABULARY})
    make_tokenizer(TEMPLATES["chatml"]).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type, "model_file": "own.py"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN)
    return folder


@needs_mlx
@pytest.mark.parametrize("model_type", ["mine", "llama"])
@pytest.mark.parametrize("verb", ["finetune", "plan", "check-gradients", "compare"])
def test_no_verb_runs_a_models_code_unasked(verb, model_type, data, tmp_path, one_process, capsys):
    """Neither of a type that only the code knows nor of one with a family of ours, which is not what the code may describe."""
    model = own_model(tmp_path / "model", model_type)
    more = {"finetune": ["--data", data], "compare": ["--data", data, "--out", tmp_path / "out"]}.get(verb, [])
    assert command(verb, "--model", str(model), "--backend", "mlx", *map(str, more)) == 2
    said = capsys.readouterr().err
    assert "own.py" in said and "--trust-remote-code" in said and len(said.splitlines()) == 1 and not (model / "ran").exists()


@needs_mlx
@pytest.mark.parametrize("quantize", ["4", "none"])
def test_a_model_of_its_own_code_trains_where_it_is_trusted_and_mlx_lm_loads_the_adapter(quantize, data, tmp_path, one_process, capsys):
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import load

    given = {"backend": "mlx", "trust_remote_code": True, "iters": 3, "learning_rate": 2e-3, "warmup": 0, "val_batches": -1, "mask_prompt": False}
    done = run(own_model(tmp_path / "model"), data, tmp_path / "run", quantize=quantize, **given)
    assert capsys.readouterr().out.splitlines()[-1].endswith(" --trust-remote-code")
    model = json.loads((done.folder / "adapter_config.json").read_text())["model"]
    theirs, tokenizer = load(model, adapter_path=str(done.folder), trust_remote_code=True)[:2]
    theirs.set_dtype(mx.float32)
    rows = [mx.array([tokenizer.apply_chat_template(row["messages"], return_dict=False)]) for row in chat_rows(2, first=50)]
    losses = mx.concatenate([nn.losses.cross_entropy(theirs(row[:, :-1]), row[:, 1:]).reshape(-1) for row in rows])
    assert done.values("end", "val_loss_after")[0] == pytest.approx(losses.mean().item(), abs=1e-4)


def test_on_numpy_the_backend_is_named(tmp_path):
    with pytest.raises(UserError, match=r"own\.py.*--backend mlx"):
        architecture.open_spec({"model_type": "llama", "model_file": "own.py"}, "config.json", "numpy", trust_remote_code=True)


@needs_mlx
@pytest.mark.parametrize("code", ["import sys\nprint('install the package own')\nsys.exit(1)", "raise OSError('install the package own')"])
def test_code_that_fails_is_said_with_what_it_says(code, tmp_path):
    """mlx-lm's own olmo prints and ends the process where a package is missing."""
    model = own_model(tmp_path / "model")
    (model / "own.py").write_text(code)
    with pytest.raises(UserError, match=r"install the package own\)\. Correct own\.py\.$"):
        architecture.open_folder(model, trust_remote_code=True)


def test_a_tokenizers_code_too(data, tmp_path, one_process):
    from models import make_model, tiny_config

    model = make_model(tmp_path / "model", tiny_config("llama", vocab_size=VOCABULARY))
    make_tokenizer(TEMPLATES["chatml"]).save_pretrained(model)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}))
    (model / "own.py").write_text(OWN_TOKENIZER)
    given = {"iters": 1, "val_batches": 0, "reply_tokens": 0}
    with pytest.raises(UserError, match=r"tokenizer in .*code of its own.*--trust-remote-code"):
        run(model, data, tmp_path / "unasked", **given)
    assert run(model, data, tmp_path / "asked", **given, trust_remote_code=True).adapter
