"""The whole command on a tiny model: what it computes, writes and says, held against mlx-lm, its own twin, and itself with other settings."""

import json
import math
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from engines import SCALE, autodiff_of_mlx_lm, random_adapter, worst_error
from models import PROJECTIONS
from runs import BACKENDS, Done, chat_rows, command, data_folder, needs_mlx, read_log, run, tiny_model
from tiny_tokenizers import user, write

from mesp_mlx import adapter as adapters
from mesp_mlx import reference
from mesp_mlx.data.group import Group
from mesp_mlx.engine import train
from mesp_mlx.model.spec import load_spec, read_config

TRAIN_FIELDS = {"iteration", "train_loss", "learning_rate", "iterations_per_second", "tokens_per_second", "trained_tokens", "peak_memory_bytes"}
END_FIELDS = {"val_loss_before", "val_loss_after", "reply_before", "reply_after", "allocator_peak_bytes", "process_peak_bytes", "seconds"}
END_FIELDS |= {"predicted_arrays_bytes", "predicted_peak_bytes"}
PLAN_FIELDS = {
    "memory", "budget_bytes", "predicted_peak_bytes", "predicted_bytes", "predicted_arrays_bytes", "base_bytes", "strategy", "peak_phase", "by_part",
    "by_phase", "file_bytes", "read_bytes_per_update", "written_bytes_per_update", "flops_per_update", "evaluations_per_update",
    "compute_seconds_per_update", "disk_seconds_per_update", "seconds_per_update", "speeds", "updates", "seconds",
}  # fmt: skip
STEADY = {"optimizer": "sgd", "lr_schedule": "constant", "warmup": 0, "grad_clip": 0}  # an update is the gradient times the learning rate


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("data"), chat_rows(10), chat_rows(3, first=50))


@pytest.fixture
def go(model, data, tmp_path, one_process):
    """A run of the tiny model, by default on that data, in a folder of its own, with other settings as given."""
    count = iter(range(100))
    return lambda data=data, **given: run(model, data, tmp_path / f"run{next(count)}", **given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_command(backend, model, data, tmp_path, run_cli):
    """In processes of its own; on NumPy where importing MLX fails, which it must not try."""
    absent = tmp_path / "absent" / "mlx"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('no MLX here')\n")
    paths = [str(absent.parent)] * (backend == "numpy") + [str(ROOT)]
    flags = ["--iters", "10", "--learning-rate", "1e-3", "--save-every", "4", "--steps-per-report", "5", "--steps-per-eval", "5", "--reply-tokens", "4"]
    done = run_cli(
        *("finetune", "--model", str(model), "--data", str(data), "--backend", backend, "--json-log", "log.jsonl", *flags),
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join(paths), "MESP_MLX_CACHE": str(tmp_path / "cache")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    names = ["0000004_adapters.safetensors", "0000008_adapters.safetensors", "adapter_config.json", "adapters.safetensors"]
    assert sorted(os.listdir(tmp_path / "adapters")) == names
    assert f"mlx_lm.generate --model {shlex.quote(str(model))} --adapter-path adapters" in done.stdout

    log = Done(tmp_path / "adapters", read_log(tmp_path / "log.jsonl"))
    assert [event["event"] for event in log.events] == [
        "plan", "start", "validation", "save", "train", "validation", "save", "train", "validation", "save", "end",
    ]  # fmt: skip
    assert [event.keys() - {"event"} for event in log.of("train")] == [TRAIN_FIELDS] * 2
    assert [event.keys() - {"event"} for event in log.of("end")] == [END_FIELDS]
    assert [event.keys() - {"event"} for event in log.of("plan")] == [PLAN_FIELDS]
    assert log.values("validation", "iteration") == [0, 5, 10] and log.values("train", "iteration") == [5, 10]
    assert all(math.isfinite(value) and value > 0 for event in log.of("train") for field, value in event.items() if field not in ("event", "iteration"))
    (end,) = log.of("end")
    assert end["val_loss_after"] < 0.6 * end["val_loss_before"] and log.values("train", "train_loss")[1] < log.values("train", "train_loss")[0]
    assert [end["val_loss_before"], end["val_loss_after"]] == log.values("validation", "val_loss")[::2]
    assert end["reply_before"] != end["reply_after"] and "noon" in end["reply_after"]
    assert end["process_peak_bytes"] > 20e6 and (end["allocator_peak_bytes"] is None) == (backend == "numpy")


@needs_mlx
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_both_backends_lose_alike(go, dropout):
    numpy, mlx = (go(backend=backend, iters=10, learning_rate=1e-3, dropout=dropout) for backend in ("numpy", "mlx"))
    for kind, field in (("train", "train_loss"), ("validation", "val_loss")):
        assert mlx.values(kind, field) == pytest.approx(numpy.values(kind, field), abs=1e-4)
    assert len(numpy.of("train")) == 10
    without = go(iters=10, learning_rate=1e-3).values("train", "train_loss")
    apart = max(abs(a - b) for a, b in zip(numpy.values("train", "train_loss"), without, strict=True))
    assert (apart > 1e-3) == bool(dropout)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_seed_gives_the_same_bytes(model, data, tmp_path, one_process, backend):
    written = []
    for seed in (3, 3, 4):
        done = run(model, data, tmp_path / "same", backend=backend, iters=3, seed=seed, dropout=0.1, overwrite=True)
        written.append([(done.folder / name).read_bytes() for name in ("adapters.safetensors", "adapter_config.json")])
    assert written[0] == written[1] and written[0][0] != written[2][0]


@needs_mlx
@pytest.mark.parametrize("backend", BACKENDS)
def test_mlx_lm_loads_the_adapter_and_loses_as_much(go, model, backend):
    """Over every token, so that nothing of our masks is needed to say what the loss is."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.utils import load

    done = go(backend=backend, iters=4, learning_rate=1e-3, val_batches=-1, mask_prompt=False, alpha=24)
    logits, losses = [], []
    for adapter_path in (None, str(done.folder)):
        loaded, tokenizer = load(str(model), adapter_path=adapter_path)[:2]
        rows = [mx.array([tokenizer.apply_chat_template(row["messages"], return_dict=False)]) for row in chat_rows(3, first=50)]
        logits.append([loaded(row[:, :-1]) for row in rows])
        each = [nn.losses.cross_entropy(found, row[:, 1:]).reshape(-1) for found, row in zip(logits[-1], rows, strict=True)]
        losses.append(mx.concatenate(each).mean().item())
    assert [done.values("end", "val_loss_before")[0], done.values("end", "val_loss_after")[0]] == pytest.approx(losses, abs=1e-4)
    assert np.abs(np.array(logits[0][0]) - np.array(logits[1][0])).max() > 0.1


@needs_mlx
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_is_a_step_along_the_gradient_of_mlx_lm(go, model, tmp_path, backend):
    """Four unequal rows in two iterations, from an adapter whose B is not zero: it moves by the gradient of their mean loss over all tokens."""
    from transformers import AutoTokenizer

    start, rows = random_adapter(model), chat_rows(4)
    data = data_folder(tmp_path / "data", rows, chat_rows(1, first=50))
    given = {"rank": 4, "scale": SCALE, "mask_prompt": False, "backend": backend, "resume_adapter_file": str(adapters.save(tmp_path, start, reference))}
    done = go(data=data, iters=2, batch_size=2, grad_accumulation_steps=2, learning_rate=1.0, **given, **STEADY)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [np.array([tokenizer.apply_chat_template(row["messages"], return_dict=False)], np.int32) for row in rows]
    groups = [Group(row[:, :-1], row[:, 1:], np.ones_like(row[:, 1:], bool), (0,), (row.shape[1] - 1,)) for row in ids]
    loss, gradients = autodiff_of_mlx_lm(model, start, groups)
    tokens = sum(group.lengths[0] for group in groups)
    assert len({group.lengths for group in groups}) == 4
    assert done.values("train", "train_loss") == [pytest.approx(loss / tokens, rel=1e-5)] and done.values("train", "trained_tokens") == [tokens]
    assert worst_error(difference(start, done.adapter), {name: value / tokens for name, value in gradients.items()}) <= 1e-4


def test_batches_accumulate_to_the_same_adapter(go):
    """Rows of four lengths, with dropout: only the rows of an update count, not how many iterations bring them."""
    given = {"dropout": 0.3, "learning_rate": 0.05, "steps_per_report": 100, **STEADY}
    whole = go(iters=4, batch_size=4, **given)
    for batch_size, accumulation in ((1, 4), (2, 2)):
        parts = go(iters=4 * accumulation, batch_size=batch_size, grad_accumulation_steps=accumulation, **given)
        assert parts.values("start", "updates") == [4] and parts.values("start", "iterations") == [4 * accumulation]
        assert parts.values("train", "iteration") == [4 * accumulation]
        assert frobenius_error(parts.adapter, whole.adapter) <= 1e-5
        assert parts.values("train", "train_loss") == pytest.approx(whole.values("train", "train_loss"), rel=1e-6)
    other = go(iters=4, batch_size=3, **given)
    assert frobenius_error(other.adapter, whole.adapter) > 1e-3


def test_an_epoch_trains_every_row_once(go, monkeypatch):
    """Ten rows in updates of four, so the last update of an epoch is short."""
    seen, inner = [], train.make_update

    def spy(settings, number, model, store, adapter, batches, *others):
        seen.append([row for batch in batches for row in batch.group.rows])
        return inner(settings, number, model, store, adapter, batches, *others)

    monkeypatch.setattr(train, "make_update", spy)
    done = go(epochs=2)
    assert [len(rows) for rows in seen] == [4, 4, 2] * 2
    first, second = sum(seen[:3], []), sum(seen[3:], [])
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    trained = done.values("train", "trained_tokens")
    assert trained[5] == 2 * trained[2] and trained == sorted(set(trained))
    assert go().values("start", "iterations") == [9], "three epochs when neither epochs nor iters is given"


def test_resuming_starts_from_the_file(go, model, data, capsys):
    given = {"learning_rate": 1e-3, "val_batches": -1}
    first = go(iters=4, **given)
    then = go(iters=2, resume_adapter_file=str(first.folder / "adapters.safetensors"), **given)
    before, between, after = (done.values("end", f"val_loss_{when}") for done, when in ((first, "before"), (first, "after"), (then, "after")))
    assert then.values("end", "val_loss_before") == between and before > between > after
    assert go(iters=1, resume_adapter_file=str(first.folder), **given).values("end", "val_loss_before") == between
    capsys.readouterr()

    wrong = ["--rank", "4", "--keys", "self_attn.q_proj,mlp.up_proj", "--adapter-path", str(first.folder / "next")]
    flags = ["finetune", "--model", str(model), "--data", str(data), "--backend", "numpy", "--resume-adapter-file", str(first.folder)]
    assert command(*flags, *wrong) == 2
    said = capsys.readouterr().err
    for name, array in first.adapter.items():
        expected = "shape" if "q_proj" in name or "up_proj" in name else "unexpected"
        assert f"{name}: {expected}" in said, array.shape
    assert "model.layers.0.self_attn.q_proj.lora_a: shape [64, 8], expected [64, 4]" in said and "The file's rank is 8." in said
    assert not (first.folder / "next").exists()


def test_the_adapter_is_what_the_flags_say(go):
    q_and_up = ("self_attn.q_proj", "mlp.up_proj")
    for given in ({"keys": ",".join(q_and_up)}, {"target_modules": ",".join(q_and_up)}):
        done = go(iters=1, num_layers=1, rank=3, alpha=12, dropout=0.1, **given)
        assert {name: array.shape for name, array in done.adapter.items()} == {
            "model.layers.1.self_attn.q_proj.lora_a": (64, 3), "model.layers.1.self_attn.q_proj.lora_b": (3, 64),
            "model.layers.1.mlp.up_proj.lora_a": (64, 3), "model.layers.1.mlp.up_proj.lora_b": (3, 96),
        }  # fmt: skip
        written = json.loads((done.folder / "adapter_config.json").read_text())
        assert written["lora_parameters"] == {"rank": 3, "scale": 4.0, "dropout": 0.1, "keys": list(q_and_up)}
        assert (written["fine_tune_type"], written["num_layers"]) == ("lora", 1)
        assert done.values("start", "effective_scale") == [4.0] and done.values("start", "modules") == [2]
    done = go(iters=1)
    assert {name.split(".", 3)[3].rsplit(".", 1)[0] for name in done.adapter} == set(PROJECTIONS) and len(done.adapter) == 2 * 2 * len(PROJECTIONS)
    assert json.loads((done.folder / "adapter_config.json").read_text())["lora_parameters"]["keys"] == list(PROJECTIONS)


def test_the_scale_is_the_factor_on_the_adapters_output(go, model, tmp_path):
    resumed = str(adapters.save(tmp_path, random_adapter(model), reference))
    alike = [go(iters=1, rank=4, resume_adapter_file=resumed, **given).values("end", "val_loss_before") for given in ({"alpha": 12}, {"scale": 3})]
    assert alike[0] == alike[1] != go(iters=1, rank=4, resume_adapter_file=resumed, scale=4).values("end", "val_loss_before")


def test_clipping_shortens_an_update_and_does_not_turn_it(go, model):
    spec = load_spec(read_config(model))
    start = adapters.initialise(spec, adapters.choose_modules(spec), 8, 0, reference)
    free, clipped, within = (difference(start, go(iters=1, learning_rate=0.1, **STEADY | {"grad_clip": clip}).adapter) for clip in (0, 1, 1000))
    norm = math.sqrt(sum(float(np.square(step).sum()) for step in free.values())) / 0.1
    assert 2 < norm < 1000
    assert frobenius_error({name: step * norm for name, step in clipped.items()}, free) <= 1e-4
    assert frobenius_error(within, free) == 0


def test_the_schedule_reaches_the_log(go):
    rates = go(iters=6, learning_rate=9e-4, lr_schedule="linear", warmup=2).values("train", "learning_rate")
    assert rates == pytest.approx([3e-4, 6e-4, 9e-4, 6.3e-4, 3.6e-4, 0.9e-4])
    rates = go(iters=6, grad_accumulation_steps=2, learning_rate=9e-4, lr_schedule="cosine", warmup=0, steps_per_report=2).values("train", "learning_rate")
    assert rates == pytest.approx([9e-4, 4.95e-4, 0.9e-4]), "counted in updates, not iterations"


def test_validation_leaves_training_alone(go):
    """Whatever is validated, and how often, the same rows are trained in the same order under the same dropout."""
    given = {"iters": 7, "dropout": 0.2, "learning_rate": 1e-3}
    often = go(steps_per_eval=1, val_batches=-1, **given)
    never = go(steps_per_eval=1000, val_batches=0, **given)
    assert often.values("validation", "iteration") == list(range(8)) and never.of("validation") == []
    assert often.values("train", "train_loss") == never.values("train", "train_loss")
    assert (often.folder / "adapters.safetensors").read_bytes() == (never.folder / "adapters.safetensors").read_bytes()
    assert never.values("end", "val_loss_before") == [None]
    third = go(steps_per_eval=3, val_batches=-1, **given)
    assert third.values("validation", "iteration") == [0, 3, 6, 7]
    assert third.values("validation", "val_loss") == [often.values("validation", "val_loss")[i] for i in (0, 3, 6, 7)]


def test_which_rows_are_validated(go, tmp_path):
    """The first so many batches of valid.jsonl; the loss over several rows is the mean over their tokens."""
    one = [go(data=data_folder(tmp_path / f"{i}", chat_rows(4), chat_rows(3, first=50)[i : i + 1]), iters=1, val_batches=-1) for i in range(3)]
    losses = [done.values("end", "val_loss_before")[0] for done in one]
    few = go(iters=1, batch_size=2, val_batches=1).values("end", "val_loss_before")[0]
    assert min(losses[:2]) < few < max(losses[:2])
    assert go(iters=1, batch_size=1, val_batches=2).values("end", "val_loss_before") == [pytest.approx(few, rel=1e-6)]
    assert go(iters=1, batch_size=1, val_batches=1).values("end", "val_loss_before") == [pytest.approx(losses[0], rel=1e-6)]


def test_rows_are_held_out_where_there_is_no_file_for_validation(go, data, tmp_path):
    single = write(tmp_path / "rows.jsonl", chat_rows(30))
    done = go(data=single, iters=1)
    (start,) = done.of("start")
    assert (start["held_out"], start["rows"], start["validation_rows"]) == (True, 20, 10)
    assert done.values("end", "val_loss_after")[0] > 0
    assert go(iters=1).values("start", "held_out") == [False]


def test_checkpoints_hold_the_adapter_of_their_iteration(go):
    """A checkpoint equals what a shorter run ends with."""
    given = {"lr_schedule": "constant", "warmup": 0, "learning_rate": 1e-3, "save_every": 2}
    long = go(iters=5, **given)
    for iterations in (2, 4):
        short = go(iters=iterations, **given)
        assert (long.folder / f"{iterations:07d}_adapters.safetensors").read_bytes() == (short.folder / "adapters.safetensors").read_bytes()
    assert long.values("save", "iteration") == [2, 4, 5]


def test_long_rows_are_cut_and_rows_with_nothing_to_learn_skipped(go, tmp_path):
    """The chat rows are 25, 29, 33 and 37 tokens long, and so on; a row of a question alone has no reply to learn."""
    text = {"text": "The sea is calm tonight, the tide is full. " * 4}
    data = data_folder(tmp_path / "data", [*chat_rows(8), text, {"messages": [user("Hello?")]}], chat_rows(1, first=53))
    (start,) = go(data=data, iters=1, max_seq_length=33).of("start")
    assert (start["rows_cut"], start["rows_skipped"], start["rows"], start["max_seq_length"]) == (2 + 1, 1, 9, 33)


def test_an_unquantised_model_is_converted_once_and_named_at_the_end(data, tmp_path, one_process, capsys):
    plain = tiny_model(tmp_path / "plain", bits=None)
    first = run(plain, data, tmp_path / "first", iters=1)
    said = capsys.readouterr().out
    converted = json.loads((first.folder / "adapter_config.json").read_text())["model"]
    assert converted.startswith(str(one_process)) and json.loads(Path(converted, "config.json").read_text())["quantization"]["bits"] == 4
    assert f"--model {shlex.quote(converted)} --adapter-path" in said and "Quantising plain to 4-bit, once" in said
    second = run(plain, data, tmp_path / "second", iters=1)
    assert "Quantising" not in capsys.readouterr().out and second.values("validation", "val_loss") == first.values("validation", "val_loss")
    as_it_is = run(plain, data, tmp_path / "third", iters=1, quantize="none")
    assert json.loads((as_it_is.folder / "adapter_config.json").read_text())["model"] == str(plain)
    assert as_it_is.values("validation", "val_loss") != first.values("validation", "val_loss")


def difference(start: dict[str, np.ndarray], end: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert start.keys() == end.keys()
    return {name: start[name] - end[name] for name in start}


def frobenius_error(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    """The distance of two adapters, relative to the size of the second."""
    apart, size = (sum(float(np.square(array).sum()) for array in arrays.values()) for arrays in (difference(found, truth), truth))
    return math.sqrt(apart / size)


def test_no_reply_is_asked_for(go):
    end = go(reply_tokens=0, iters=1).events[-1]
    assert (end["event"], end["reply_before"], end["reply_after"]) == ("end", None, None)


def test_what_is_asked_is_short(go, tmp_path, capsys):
    """Without --sample-prompt the shortest question of the file is asked: every token of a reply is a pass over all of it."""
    rows = chat_rows(12)
    rows[0]["messages"][0]["content"] = "word " * 40
    rows[5]["messages"][0]["content"] = "Hm?"
    go(data_folder(tmp_path / "long", rows), iters=1)
    assert "Hm?" in capsys.readouterr().out


def test_no_row_is_held_out_where_no_validation_is_asked_for(go, tmp_path):
    (start,) = go(data_folder(tmp_path / "ten", chat_rows(10)), iters=1, val_batches=0).of("start")
    assert (start["rows"], start["validation_rows"]) == (10, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_methods_train_alike(go, backend):
    """The same rows in the same order, losses, adapter, replies and files; the configuration says which method made them."""
    given = {"backend": backend, "iters": 4, "learning_rate": 1e-3, "dropout": 0.1, "steps_per_eval": 2, "val_batches": -1, "reply_tokens": 3}
    mesp = go(**given)
    for method, more in (("mebp", {}), ("mebp", {"tiled_head": True}), ("backprop", {}), ("backprop", {"grad_checkpoint": True})):
        done = go(method=method, **given, **more)
        for kind, field in (("train", "train_loss"), ("validation", "val_loss")):
            assert done.values(kind, field) == pytest.approx(mesp.values(kind, field), abs=1e-5)
        assert done.values("train", "trained_tokens") == mesp.values("train", "trained_tokens") and done.values("start", "method") == [method]
        assert {name: array.shape for name, array in done.adapter.items()} == {name: array.shape for name, array in mesp.adapter.items()}
        assert frobenius_error(done.adapter, mesp.adapter) <= 1e-3
        assert [done.events[-1][f"reply_{when}"] for when in ("before", "after")] == [mesp.events[-1][f"reply_{when}"] for when in ("before", "after")]
        assert sorted(os.listdir(done.folder)) == sorted(os.listdir(mesp.folder))
        ours, theirs = (json.loads((folder / "adapter_config.json").read_text()) for folder in (mesp.folder, done.folder))
        assert {key for key in ours if ours[key] != theirs[key]} == {"method", "adapter_path", "json_log", *more} and theirs["method"] == method
    resumed = go(method="mebp", resume_adapter_file=str(mesp.folder), **given | {"iters": 1})
    assert resumed.values("end", "val_loss_before") == pytest.approx(mesp.values("end", "val_loss_after"), abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mezo_repeats_to_the_byte(model, data, tmp_path, one_process, backend):
    written, given = [], {"method": "mezo", "backend": backend, "iters": 3, "mezo_perturbations": 2, "overwrite": True}
    for seed in (3, 3, 4):
        done = run(model, data, tmp_path / "same", seed=seed, **given)
        written.append([(done.folder / name).read_bytes() for name in ("adapters.safetensors", "adapter_config.json")])
    assert written[0] == written[1] and written[0][0] != written[2][0]
    config = json.loads(written[2][1])
    assert [config[key] for key in ("method", "optimizer", "learning_rate", "grad_clip", "mezo_perturbations")] == ["mezo", "sgd", 3e-5, 0.0, 2]
    assert done.adapter.keys() == run(model, data, tmp_path / "other", iters=1).adapter.keys()


@needs_mlx
def test_mezo_on_both_backends(go):
    """The same directions, and slopes that differ by rounding, which a division by epsilon makes a thousand times larger."""
    numpy, mlx = (go(method="mezo", backend=backend, iters=4, mezo_epsilon=1e-2) for backend in ("numpy", "mlx"))
    assert mlx.values("train", "train_loss") == pytest.approx(numpy.values("train", "train_loss"), abs=1e-4)
    assert frobenius_error(mlx.adapter, numpy.adapter) <= 1e-3


def test_mezo_learns(go, tmp_path):
    """Four rows, sixty updates at its paper's learning rate: what a few directions of tens of thousands can do."""
    data = data_folder(tmp_path / "four", chat_rows(4), chat_rows(3, first=50))
    done = go(data=data, method="mezo", learning_rate=1e-4, iters=60, rank=4, keys="mlp.down_proj", lr_schedule="constant", val_batches=-1, reply_tokens=0)
    losses = done.values("train", "train_loss")
    assert np.mean(losses[-10:]) < 0.95 * np.mean(losses[:10]) and done.values("end", "val_loss_after")[0] < 0.95 * done.values("end", "val_loss_before")[0]


@pytest.mark.parametrize(
    "flags",
    [
        *(["--method", "mezo", *flag] for flag in (["--grad-clip", "1"], ["--dropout", "0.1"], ["--grad-checkpoint"], ["--tiled-head"])),
        *(["--method", method, "--tiled-head"] for method in ("mesp", "backprop")),
        *(["--method", "mebp", *flag] for flag in (["--mezo-epsilon", "0.1"], ["--mezo-perturbations", "2"])),
        ["--method", "mezzo"],
    ],
    ids=" ".join,
)
def test_what_a_method_ignores_is_refused(model, data, tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    assert command("finetune", "--model", str(model), "--data", str(data), "--backend", "numpy", "--json-log", "log", *flags) == 2
    said, name = capsys.readouterr().err, [flag for flag in flags if flag.startswith("--")][-1]
    assert name.removeprefix("--").replace("-", "_") in said.replace("-", "_") and flags[1] in said
    assert os.listdir(tmp_path) == []
