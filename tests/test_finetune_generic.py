"""The whole command on architectures that no structured family describes: mlx-lm's own modules, streamed. Held against mlx-lm."""

import json
import math

import numpy as np
import pytest
from runs import VOCABULARY, chat_rows, command, data_folder, needs_mlx, read_adapter, run
from test_architecture import as_published, rewritten
from tiny_tokenizers import TEMPLATES, make_tokenizer

from mesp_mlx.adapter import ADAPTER_FILE

KINDS = {  # one of each kind: experts and latent attention, a state space, a mixture of both in one model
    "deepseek_v2": {},
    "mamba2": {},
    "qwen3_next": {},
}
STEADY = {"backend": "mlx", "learning_rate": 2e-3, "rank": 4, "iters": 8, "val_batches": -1, "mask_prompt": False, "warmup": 0}


def model_folder(folder, model_type, bits=None, **overrides):
    """A random model with a ChatML tokenizer."""
    from samples_truth import make

    from mesp_mlx.model.samples import small_config

    make(folder, model_type, bits=bits, config=small_config(model_type) | KINDS[model_type] | {"vocab_size": VOCABULARY} | overrides)
    make_tokenizer(TEMPLATES["chatml"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"), chat_rows(10), chat_rows(3, first=50))


def loss_by_mlx_lm(model, adapter=None):
    """Over every token of the validation rows, by mlx-lm alone."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import load

    loaded, tokenizer = load(str(model), adapter_path=None if adapter is None else str(adapter))[:2]
    loaded.set_dtype(mx.float32)
    rows = [mx.array([tokenizer.apply_chat_template(row["messages"], return_dict=False)]) for row in chat_rows(3, first=50)]
    return mx.concatenate([nn.losses.cross_entropy(loaded(row[:, :-1]), row[:, 1:]).reshape(-1) for row in rows]).mean().item()


@needs_mlx
@pytest.mark.parametrize("model_type", KINDS)
def test_it_trains_and_mlx_lm_loads_the_adapter_and_loses_as_much(model_type, data, tmp_path, one_process):
    model = model_folder(tmp_path / "model", model_type, bits=4)
    done = run(model, data, tmp_path / "run", **STEADY)
    before, after = done.values("end", "val_loss_before")[0], done.values("end", "val_loss_after")[0]
    assert after < 0.95 * before and done.values("start", "family") == [model_type]
    assert [before, after] == pytest.approx([loss_by_mlx_lm(model), loss_by_mlx_lm(model, done.folder)], abs=1e-4)
    config = json.loads((done.folder / "adapter_config.json").read_text())
    assert config["num_layers"] == 4 and config["lora_parameters"]["keys"] and config["model"] == str(model)
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in done.adapter.values())


@needs_mlx
def test_resuming_continues_where_the_adapter_stands(data, tmp_path, one_process):
    """By plain SGD, whose state is the adapter alone: two runs of two updates are one of four."""
    model = model_folder(tmp_path / "model", "mamba2")
    steady = STEADY | {"optimizer": "sgd", "lr_schedule": "constant", "grad_clip": 0, "learning_rate": 0.05, "batch_size": 10, "val_batches": 0}
    whole = run(model, data, tmp_path / "whole", **steady | {"iters": 4})
    first = run(model, data, tmp_path / "first", **steady | {"iters": 2})
    second = run(model, data, tmp_path / "second", **steady | {"iters": 2, "resume_adapter_file": str(first.folder / ADAPTER_FILE)})
    assert all(np.allclose(second.adapter[name], array, atol=1e-5) for name, array in whole.adapter.items()) and second.adapter.keys() == whole.adapter.keys()
    assert any(np.abs(array - first.adapter[name]).max() > 1e-3 for name, array in whole.adapter.items())


@needs_mlx
def test_embeddings_are_trained_where_asked(data, tmp_path, one_process):
    model = model_folder(tmp_path / "model", "deepseek_v2")
    keys = ["model.embed_tokens", "self_attn.o_proj"]
    done = run(model, data, tmp_path / "run", **STEADY | {"keys": keys, "num_layers": 2, "quantize": "none"})
    names = {*(f"model.layers.{layer}.self_attn.o_proj" for layer in (2, 3)), "model.embed_tokens"}
    assert {name.rpartition(".")[0] for name in done.adapter} == names and all(np.abs(array).max() > 1e-4 for array in done.adapter.values())
    assert done.values("end", "val_loss_after")[0] == pytest.approx(loss_by_mlx_lm(model, done.folder), abs=1e-4)


@needs_mlx
def test_the_adapter_starts_as_mlx_lms_does(data, tmp_path, one_process):
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    model = model_folder(tmp_path / "model", "deepseek_v2")
    done = run(model, data, tmp_path / "run", **STEADY | {"iters": 1, "learning_rate": 1e-12, "seed": 7, "val_batches": 0, "optimizer": "sgd"})
    config = json.loads((done.folder / "adapter_config.json").read_text())
    theirs = load_model(model)[0]
    theirs.freeze()
    mx.random.seed(7)
    linear_to_lora_layers(theirs, config["num_layers"], config["lora_parameters"])
    started = {name: np.array(array) for name, array in tree_flatten(theirs.trainable_parameters())}
    assert started.keys() == done.adapter.keys()
    assert all(np.allclose(done.adapter[name], array, atol=1e-7) for name, array in started.items())


@needs_mlx
def test_a_published_checkpoint_is_converted_and_trained(data, tmp_path, one_process):
    model = model_folder(tmp_path / "model", "deepseek_v2")
    rewritten(model, as_published)
    done = run(model, data, tmp_path / "run", **STEADY)
    converted = json.loads((done.folder / "adapter_config.json").read_text())["model"]
    assert str(one_process) in converted and math.isfinite(done.values("end", "val_loss_after")[0])
    assert done.values("end", "val_loss_after")[0] == pytest.approx(loss_by_mlx_lm(converted, done.folder), abs=1e-4)


def test_numpy_refuses_it_with_both_ways_out(data, tmp_path, one_process, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "mamba2"}))
    code = command("finetune", "--model", str(tmp_path / "model"), "--data", str(data), "--backend", "numpy", "--adapter-path", str(tmp_path / "run"))
    said = capsys.readouterr().err
    assert code == 2 and "'mamba2'" in said and "--backend mlx" in said and "qwen2" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@needs_mlx
@pytest.mark.parametrize("verb", [("finetune",), ("check-gradients",)])
def test_a_broken_folder_is_one_message_and_exit_code_2(verb, data, tmp_path, one_process, capsys):
    model = model_folder(tmp_path / "model", "deepseek_v2", bits=4)
    rewritten_file = model / "model.safetensors"
    rewritten_file.write_bytes(rewritten_file.read_bytes()[:-1000])
    code = command(*verb, "--model", str(model), "--data", str(data), "--backend", "mlx")
    said = capsys.readouterr().err
    assert code == 2 and "truncated" in said and len(said.splitlines()) == 1


@needs_mlx
def test_check_gradients_compares_the_stream_with_the_whole(tmp_path, one_process, capsys):
    model = model_folder(tmp_path / "model", "deepseek_v2", bits=4)
    assert command("check-gradients", "--model", str(model), "--backend", "mlx", "--seq", "16", "--rank", "4", "--json", str(tmp_path / "found.json")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "structured: nothing" in said and "the gradients are exact" in said and "backward of" not in said
    found = json.loads((tmp_path / "found.json").read_text())
    (comparison,) = found["comparisons"]
    assert found["exact"] and found["ops"] == [] and max(comparison["errors"].values()) < 1e-5
    assert len(comparison["errors"]) == len(set(comparison["errors"])) > 40


@needs_mlx
@pytest.mark.parametrize("flag", [("--dtype", "bfloat16"), ("--layers", "1")])
def test_check_gradients_refuses_what_has_no_effect(flag, tmp_path, one_process, capsys):
    assert command("check-gradients", "--model", str(model_folder(tmp_path / "model", "mamba2")), "--backend", "mlx", *flag) == 2
    assert f"{flag[0]}: all layers of mamba2" in capsys.readouterr().err


@needs_mlx
def test_a_plan_counts_the_process_as_it_is_with_mlx_lm_in_it(tmp_path, capsys, monkeypatch):
    from mesp_mlx.memory import measure

    monkeypatch.setattr(measure, "process_now_bytes", lambda: 123_456_789)
    model, file = model_folder(tmp_path / "model", "mamba2"), tmp_path / "plan.json"
    assert command("plan", "--model", str(model), "--backend", "mlx", "--seq", "32", "--json", str(file)) == 0
    assert json.loads(file.read_text())["base_bytes"] == 123_456_789


@needs_mlx
def test_check_gradients_sees_a_wrong_gradient(tmp_path, one_process, capsys, monkeypatch):
    from mesp_mlx.model.generic_stages import LayerStage

    right = LayerStage.backward

    def wrong(self, *arguments):
        dstate, gradients = right(self, *arguments)
        return dstate, {name: 1.01 * gradient for name, gradient in gradients.items()}

    monkeypatch.setattr(LayerStage, "backward", wrong)
    model = model_folder(tmp_path / "model", "mamba2")
    assert command("check-gradients", "--model", str(model), "--backend", "mlx", "--seq", "16") == 1
    assert "NOT exact" in capsys.readouterr().out


@needs_mlx
def test_check_gradients_refuses_what_may_not_fit(tmp_path, one_process, capsys, monkeypatch):
    from mesp_mlx import check_gradients

    monkeypatch.setattr(check_gradients, "available_bytes", lambda: 1000)
    assert command("check-gradients", "--model", str(model_folder(tmp_path / "model", "mamba2")), "--backend", "mlx") == 2
    assert "Lower --seq" in capsys.readouterr().err


@needs_mlx
@pytest.mark.parametrize("method", ["mebp", "mezo"])
def test_other_methods(method, data, tmp_path, one_process):
    model = model_folder(tmp_path / "model", "mamba2")
    given = STEADY | {"method": method, "iters": 2, "learning_rate": 1e-4} | ({"grad_clip": 0} if method == "mezo" else {})
    done = run(model, data, tmp_path / "run", **given)
    assert math.isfinite(done.values("end", "val_loss_after")[0]) and read_adapter(done.folder / ADAPTER_FILE)


@needs_mlx
def test_backprop_takes_the_whole_at_once_and_the_same_steps(data, tmp_path, one_process):
    model = model_folder(tmp_path / "model", "deepseek_v2", bits=4)
    steady = STEADY | {"optimizer": "sgd", "lr_schedule": "constant", "grad_clip": 0, "learning_rate": 0.02, "iters": 3, "dropout": 0.1}
    whole, walked = (run(model, data, tmp_path / method, **steady | {"method": method}) for method in ("backprop", "mesp"))
    assert all(np.abs(whole.adapter[name] - array).max() < 1e-5 for name, array in walked.adapter.items()) and whole.adapter.keys() == walked.adapter.keys()
    assert max(np.abs(array).max() for name, array in walked.adapter.items() if name.endswith("lora_b")) > 1e-3


@needs_mlx
def test_backprop_is_offered_where_only_the_whole_has_a_gradient(data, tmp_path, one_process, monkeypatch):
    from mesp_mlx.errors import UserError
    from mesp_mlx.model import generic, generic_whole

    def refuse(*_, **__):
        raise UserError("walking this model layer by layer: it has no layers.")

    monkeypatch.setattr(generic, "build", refuse)
    model = model_folder(tmp_path / "model", "mamba2")
    with pytest.raises(UserError, match="it has no layers.*--method backprop"):
        run(model, data, tmp_path / "walked", **STEADY)
    assert math.isfinite(run(model, data, tmp_path / "whole", **STEADY | {"method": "backprop", "iters": 1}).values("end", "val_loss_after")[0])
    monkeypatch.setattr(generic_whole, "works", lambda model: False)
    with pytest.raises(UserError, match="it has no layers.$"):
        run(model, data, tmp_path / "walked", **STEADY)


@needs_mlx
def test_grad_checkpoint_of_the_whole_is_refused(data, tmp_path, one_process):
    from mesp_mlx.errors import UserError

    with pytest.raises(UserError, match="--grad-checkpoint"):
        run(model_folder(tmp_path / "model", "mamba2"), data, tmp_path / "run", **STEADY | {"method": "backprop", "grad_checkpoint": True})


@needs_mlx
def test_compare_takes_it_too(data, tmp_path, one_process, monkeypatch):
    from test_compare import flags, serve_here

    from mesp_mlx import compare

    serve_here(monkeypatch)
    model = model_folder(tmp_path / "model", "mamba2")
    assert compare.run(str(tmp_path / "out"), None, "mesp,backprop", flags(model, data, iters=1, backend="mlx")) == 0
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert all(method["gradient_cosine"] == pytest.approx(1, abs=1e-5) for method in found["methods"].values()) and found["true_gradient_dtype"] == "float32"
