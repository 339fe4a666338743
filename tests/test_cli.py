"""Every flag reaches the settings, every mistake is one message and exit code 2, and asking for help costs nothing."""

import errno
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from mesp_mlx import __version__, cli, config, sources
from mesp_mlx.errors import RunStopped, UserError

# A value unlike the default for every flag, as typed, and where it is to arrive. None: accepted, with nothing to change.
GIVEN = {
    "--model": ("other/model", lambda s: s.model),
    "--data": ("rows.jsonl", lambda s: s.data),
    "--rank": ("3", lambda s: s.lora_parameters.rank),
    "--scale": ("7.5", lambda s: s.lora_parameters.scale),
    "--dropout": ("0.25", lambda s: s.lora_parameters.dropout),
    "--keys": ("self_attn.q_proj", lambda s: ",".join(s.lora_parameters.keys)),
    "--memory": ("512MB", lambda s: s.memory),
    "--dry-run": (None, lambda s: s.dry_run),
    "--resident": ("7", lambda s: s.strategy.resident),
    "--prefetch": ("3", lambda s: s.strategy.prefetch),
    "--no-hold": (None, lambda s: s.strategy.hold is False),
    "--keep": ("inputs", lambda s: s.strategy.keep),
    "--checkpoints": ("file", lambda s: s.strategy.checkpoints),
    "--states": ("memory", lambda s: s.strategy.states),
    "--gradients": ("spilled", lambda s: s.strategy.gradients),
    "--adapters": ("file", lambda s: s.strategy.adapter),
    "--group-tokens": ("300", lambda s: s.strategy.group_tokens),
    "--query-tile": ("48", lambda s: s.strategy.query_tile),
    "--width-tile": ("384", lambda s: s.strategy.width_tile),
    "--vocabulary-tile": ("320", lambda s: s.strategy.vocabulary_tile),
    "--weight-tile": ("70000", lambda s: s.strategy.weight_tile),
    "--num-layers": ("5", lambda s: s.num_layers),
    "--optimizer": ("sgd", lambda s: s.optimizer),
    "--optimizer-config": ("{sgd: {momentum: 0.5}}", lambda s: f"{{sgd: {{momentum: {s.optimizer_config.sgd.momentum}}}}}"),
    "--learning-rate": ("0.003", lambda s: s.learning_rate),
    "--lr-schedule": ("linear", lambda s: s.lr_schedule.name),
    "--warmup": ("9", lambda s: int(s.warmup)),
    "--grad-clip": ("0.5", lambda s: s.grad_clip),
    "--batch-size": ("2", lambda s: s.batch_size),
    "--grad-accumulation-steps": ("6", lambda s: s.grad_accumulation_steps),
    "--iters": ("17", lambda s: s.iters),
    "--no-mask-prompt": (None, lambda s: not s.mask_prompt),
    "--max-seq-length": ("99", lambda s: s.max_seq_length),
    "--seed": ("11", lambda s: s.seed),
    "--method": ("mebp", lambda s: s.method),
    "--tiled-head": (None, lambda s: s.tiled_head),
    "--backend": ("numpy", lambda s: s.backend),
    "--quantize": ("none", lambda s: s.quantize),
    "--val-batches": ("4", lambda s: s.val_batches),
    "--steps-per-eval": ("12", lambda s: s.steps_per_eval),
    "--steps-per-report": ("13", lambda s: s.steps_per_report),
    "--save-every": ("14", lambda s: s.save_every),
    "--adapter-path": ("out", lambda s: s.adapter_path),
    "--overwrite": (None, lambda s: s.overwrite),
    "--trust-remote-code": (None, lambda s: s.trust_remote_code),
    "--resume-adapter-file": ("a.safetensors", lambda s: s.resume_adapter_file),
    "--json-log": ("log.jsonl", lambda s: s.json_log),
    "--sample-prompt": ("Hello?", lambda s: s.sample_prompt),
    "--reply-tokens": ("21", lambda s: s.reply_tokens),
    "--grad-checkpoint": (None, lambda s: s.grad_checkpoint),
    "--train": (None, lambda s: s.train),
    "--fine-tune-type": ("lora", lambda s: s.fine_tune_type),
    # these exclude others above, so each is given by itself
    "--mezo-epsilon": ("0.02", lambda s: s.mezo_epsilon),
    "--mezo-perturbations": ("3", lambda s: s.mezo_perturbations),
    "--epochs": ("8", lambda s: s.epochs),
    "--alpha": ("4.5", lambda s: s.lora_parameters.alpha),
    "--target-modules": ("mlp.up_proj", lambda s: ",".join(s.lora_parameters.keys)),
    "--mask-prompt": (None, lambda s: s.mask_prompt),
    "--try-step": (None, lambda s: s.try_step),
    "--hold": (None, lambda s: s.strategy.hold),
}
MEZO = ("--method", "mezo")
ALONE = {"--mezo-epsilon": MEZO, "--mezo-perturbations": MEZO, "--epochs": (), "--alpha": (), "--target-modules": (), "--mask-prompt": ()}
ALONE |= {"--try-step": (), "--hold": (), "--method": (), "--tiled-head": ("--method", "mebp")}  # mebp has no use for some choices above
# What `plan` takes of finetune's, and what it takes besides, with where that arrives.
PLANNED = {
    "--model", "--data", "--memory", "--rank", "--num-layers", "--keys", "--method", "--optimizer", "--grad-clip", "--iters", "--backend", "--quantize",
    "--trust-remote-code",
    "--resident", "--prefetch", "--no-hold", "--keep", "--checkpoints", "--states", "--gradients", "--adapters", "--group-tokens", "--query-tile",
    "--width-tile", "--vocabulary-tile", "--weight-tile",
}  # fmt: skip
PLAN_ONLY = {
    "--device": ("mac-8gb", lambda asked: asked.device),
    "--seq": ("99", lambda asked: asked.seq),
    "--dtype": ("float32", lambda asked: asked.dtype),
    "--find": ("batch", lambda asked: asked.find),
    "--devices": (None, lambda asked: asked.matrix),
    "--json": ("plan.json", lambda asked: asked.json_file),
}
REFUSED = {
    "--test": None,
    "--test-batches": "3",
    "--report-to": "wandb",
    "--project-name": "p",
    "--clear-cache-threshold": "1GB",
}


@pytest.fixture
def ran(monkeypatch):
    """The settings that `finetune.run` was called with."""
    seen: list[config.Settings] = []
    monkeypatch.setitem(sys.modules, "mesp_mlx.finetune", types.SimpleNamespace(run=seen.append))  # type: ignore[arg-type]
    return seen


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    return left.value.code or 0  # type: ignore[return-value]


def typed(*flags: str) -> list[str]:
    return [word for flag in flags for word in (flag, GIVEN[flag][0]) if word is not None]


def test_every_flag_is_in_the_table_above():
    names = {"--" + name.replace("_", "-") for name in inspect.signature(cli.finetune).parameters} - {"--config-file"}
    assert names == set(GIVEN) - {"--no-mask-prompt", "--no-hold"} | set(REFUSED)
    sections = {"lora_parameters": config.LoraParameters, "strategy": config.Choices}
    settings = set(config.Settings.model_fields) | {name for section in sections.values() for name in section.model_fields}
    settings = settings - set(sections) - {"adapter"} | {"adapters"}
    assert settings <= {name[2:].replace("-", "_") for name in names}, "a setting without a flag"


def test_every_flag_reaches_the_settings(ran):
    together = [flag for flag in GIVEN if flag not in ALONE]
    assert call("finetune", *typed(*together)) == 0
    for flag, beside in ALONE.items():
        assert call("finetune", "--model", "m", "--data", "d", *typed(flag), *beside) == 0
    default = sources.load(None, {"model": "m", "data": "d"})
    same_as_default = {"--train", "--fine-tune-type", "--mask-prompt"}
    for flag, settings in [(flag, ran[0]) for flag in together] + list(zip(ALONE, ran[1:], strict=True)):
        text, arrived = GIVEN[flag]
        assert str(arrived(settings)) == (text if text is not None else "True"), flag
        if flag not in same_as_default and flag not in ("--keys", "--target-modules"):
            assert arrived(settings) != arrived(default), f"{flag} is given its default, which shows nothing"


def test_every_flag_of_plan_reaches_it(monkeypatch):
    seen = []
    stub = types.SimpleNamespace(Asked=types.SimpleNamespace, run=lambda file, flags, asked: seen.append((file, flags, asked)))
    monkeypatch.setitem(sys.modules, "mesp_mlx.plan_command", stub)  # type: ignore[arg-type]
    names = {"--" + name.replace("_", "-") for name in inspect.signature(cli.plan).parameters}
    renamed = {"--matrix", "--json-file", "--config-file", "--hold", "--batch", "--epochs"}
    assert names - renamed == (PLANNED | set(PLAN_ONLY)) - {"--no-hold", "--devices", "--json"}
    own = [word for flag, (value, _) in PLAN_ONLY.items() for word in (flag, value) if word is not None]
    together = PLANNED - {"--method"}  # another than mesp has no use for some of them
    assert call("plan", *typed(*together), "--batch", "2", *own, "-c", "x.yaml") == 0
    assert call("plan", "--model", "m", "--epochs", "8", "--hold", *typed("--method")) == 0
    (file, flags, asked), (_, other, _) = seen
    settings = sources.load(None, flags)
    assert file == "x.yaml" and settings.batch_size == 2 and other["epochs"] == 8 and other["hold"] is True and other["method"] == GIVEN["--method"][0]
    for flag in together:
        text, arrived = GIVEN[flag]
        assert str(arrived(settings)) == (text if text is not None else "True"), flag
    for flag, (text, arrived) in PLAN_ONLY.items():
        assert str(arrived(asked)) == (text if text is not None else "True"), flag


def test_all_weights_may_be_resident(ran):
    assert call("finetune", "--model", "m", "--data", "d", "--resident", "all") == 0
    assert ran[0].strategy.fixed == {"resident": -1}


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_of_mlx_lm_that_are_not_served_are_refused_by_name(flag, ran, capsys):
    value = REFUSED[flag]
    assert call("finetune", "--model", "m", "--data", "d", flag, *([value] if value else [])) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} isn't served: ")
    assert not ran


def test_a_file_is_read_and_flags_override_it(ran, tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "data": "d", "seed": 5, "batch_size": 6}), encoding="utf-8")
    assert call("finetune", "-c", str(file), "--seed", "8") == 0
    assert (ran[0].model, ran[0].batch_size, ran[0].seed) == ("m", 6, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["finetune", "--rank", "x"], "error: --rank: found 'x', expected a whole number"),
        (["finetune", "--prefetch", "1.5"], "error: --prefetch: found '1.5', expected a whole number"),
        (["plan", "--grad-clip", "x"], "error: --grad-clip: found 'x', expected a number"),
        (["plan", "--seq", "0"], "error: --seq: found '0', expected at least 1"),
        (["finetune", "--model", "m", "--data", "d", "--rank", "0"], "error: --rank: found 0, expected at least 1"),
        (["finetune", "--learning-rat", "1"], "--learning-rate"),
        (["finetun"], "finetune"),
        (["finetune", "--model"], "--model"),
        (["finetune"], "no model is given"),
        (["finetune", "-c", "absent.yaml"], "absent.yaml"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(arguments, message, ran, capsys):
    assert call(*arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err and said.err.count("error:") == 1 and said.out == ""
    assert not ran


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("the data is empty"), 2, "error: the data is empty\n"),
        (RunStopped("the loss is nan"), 1, "error: the loss is nan\n"),
        (OSError(errno.ENOSPC, "No space left on device", "x/y.safetensors"), 2, "error: no space left on the disk while writing x/y.safetensors: "),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: no space left on the disk: "),
    ],
)
def test_how_a_run_ends_is_its_exit_code(raised, code, message, monkeypatch, capsys):
    def run(_):
        raise raised

    monkeypatch.setitem(sys.modules, "mesp_mlx.finetune", types.SimpleNamespace(run=run))  # type: ignore[arg-type]
    assert call("finetune", "--model", "m", "--data", "d") == code
    assert capsys.readouterr().err.startswith(message)


def test_ctrl_c_is_130_and_a_bug_keeps_its_traceback(monkeypatch):
    def run(_):
        raise raised

    monkeypatch.setitem(sys.modules, "mesp_mlx.finetune", types.SimpleNamespace(run=run))  # type: ignore[arg-type]
    raised: BaseException = KeyboardInterrupt()
    assert call("finetune", "--model", "m", "--data", "d") == 130
    for raised in (ZeroDivisionError(), OSError(errno.EIO, "Input/output error")):
        with pytest.raises(type(raised)):
            cli.main(["finetune", "--model", "m", "--data", "d"])


def test_help_and_version_as_a_process(run_cli):
    done = run_cli("finetune", "--help", env={"COLUMNS": "200"})
    assert done.returncode == 0 and done.stderr == ""
    assert "rank of every adapter [default: 8]" in done.stdout and "--report-to" not in done.stdout
    assert run_cli("--version").stdout == f"mesp-mlx {__version__}\n"
    assert run_cli().returncode == 0
    wrong = run_cli("finetune", "--model", "m", "--data", "d", "--rank", "0")
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", "error: --rank: found 0, expected at least 1\n")


def test_a_bad_flag_answers_without_loading_what_trains():
    code = """
import sys
from mesp_mlx import cli
try:
    cli.main(["finetune", "--model", "m", "--data", "d", "--rank", "0"])
except SystemExit as left:
    print(left.code, sorted({name.split(".")[0] for name in sys.modules} & {"mlx", "numpy", "transformers", "rich"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.stdout == "2 []\n", done.stderr
