"""Verbs and flags. No logic: what was given goes to `sources.load`, what comes back to `finetune.run`."""

import errno
import io
import sys
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from mesp_mlx import __version__, config, sources
from mesp_mlx.errors import RunStopped, UserError

app = typer.Typer(name="mesp-mlx", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _flag(name: str, *spellings: str) -> Any:
    """A flag whose help is the setting's own description and default."""
    homes = (config.LoraParameters, config.Choices, config.Settings)
    field = next(home.model_fields[name] for home in homes if name in home.model_fields)
    shown = f" [default: {field.default}]" if type(field.default) in (int, float, str) else ""
    return typer.Option(*spellings, help=f"{field.description}{shown}")


def _refused(name: str, *spellings: str) -> Any:
    return typer.Option(*spellings, help=f"mlx-lm's; not served: {config.NOT_SERVED[name]}", hidden=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mesp-mlx {__version__}")
        raise typer.Exit


@app.callback()
def verbs(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False) -> None:
    """Exact LoRA fine-tuning in flat memory: 4-bit weights streamed from disk, on MLX or NumPy."""


@app.command()
def finetune(
    model: Annotated[str | None, _flag("model")] = None,
    data: Annotated[str | None, _flag("data")] = None,
    config_file: Annotated[str | None, typer.Option("-c", "--config", help="YAML file with settings, mlx-lm's keys; flags override it")] = None,
    rank: Annotated[int | None, _flag("rank")] = None,
    scale: Annotated[float | None, _flag("scale")] = None,
    alpha: Annotated[float | None, _flag("alpha")] = None,
    dropout: Annotated[float | None, _flag("dropout")] = None,
    keys: Annotated[str | None, _flag("keys")] = None,
    target_modules: Annotated[str | None, typer.Option(help="another name for --keys")] = None,
    num_layers: Annotated[int | None, _flag("num_layers")] = None,
    optimizer: Annotated[str | None, _flag("optimizer")] = None,
    optimizer_config: Annotated[str | None, _flag("optimizer_config")] = None,
    learning_rate: Annotated[float | None, _flag("learning_rate")] = None,
    lr_schedule: Annotated[str | None, _flag("lr_schedule")] = None,
    warmup: Annotated[float | None, _flag("warmup")] = None,
    grad_clip: Annotated[float | None, _flag("grad_clip")] = None,
    batch_size: Annotated[int | None, _flag("batch_size")] = None,
    grad_accumulation_steps: Annotated[int | None, _flag("grad_accumulation_steps")] = None,
    iters: Annotated[int | None, _flag("iters")] = None,
    epochs: Annotated[int | None, _flag("epochs")] = None,
    mask_prompt: Annotated[bool | None, _flag("mask_prompt")] = None,
    max_seq_length: Annotated[int | None, _flag("max_seq_length")] = None,
    seed: Annotated[int | None, _flag("seed")] = None,
    method: Annotated[str | None, _flag("method")] = None,
    tiled_head: Annotated[bool | None, _flag("tiled_head", "--tiled-head")] = None,
    mezo_epsilon: Annotated[float | None, _flag("mezo_epsilon")] = None,
    mezo_perturbations: Annotated[int | None, _flag("mezo_perturbations")] = None,
    backend: Annotated[str | None, _flag("backend")] = None,
    quantize: Annotated[str | None, _flag("quantize")] = None,
    trust_remote_code: Annotated[bool | None, _flag("trust_remote_code", "--trust-remote-code")] = None,
    memory: Annotated[str | None, _flag("memory")] = None,
    dry_run: Annotated[bool | None, _flag("dry_run", "--dry-run")] = None,
    try_step: Annotated[bool | None, _flag("try_step", "--try-step")] = None,
    resident: Annotated[str | None, _flag("resident")] = None,
    prefetch: Annotated[int | None, _flag("prefetch")] = None,
    hold: Annotated[bool | None, _flag("hold")] = None,
    keep: Annotated[str | None, _flag("keep")] = None,
    checkpoints: Annotated[str | None, _flag("checkpoints")] = None,
    states: Annotated[str | None, _flag("states")] = None,
    gradients: Annotated[str | None, _flag("gradients")] = None,
    adapters: Annotated[str | None, _flag("adapter", "--adapters")] = None,
    group_tokens: Annotated[int | None, _flag("group_tokens")] = None,
    query_tile: Annotated[int | None, _flag("query_tile")] = None,
    width_tile: Annotated[int | None, _flag("width_tile")] = None,
    vocabulary_tile: Annotated[int | None, _flag("vocabulary_tile")] = None,
    weight_tile: Annotated[int | None, _flag("weight_tile")] = None,
    val_batches: Annotated[int | None, _flag("val_batches")] = None,
    steps_per_eval: Annotated[int | None, _flag("steps_per_eval")] = None,
    steps_per_report: Annotated[int | None, _flag("steps_per_report")] = None,
    save_every: Annotated[int | None, _flag("save_every")] = None,
    adapter_path: Annotated[str | None, _flag("adapter_path")] = None,
    overwrite: Annotated[bool | None, _flag("overwrite", "--overwrite")] = None,
    resume_adapter_file: Annotated[str | None, _flag("resume_adapter_file")] = None,
    json_log: Annotated[str | None, _flag("json_log")] = None,
    sample_prompt: Annotated[str | None, _flag("sample_prompt")] = None,
    reply_tokens: Annotated[int | None, _flag("reply_tokens")] = None,
    train: Annotated[bool | None, _flag("train", "--train")] = None,
    fine_tune_type: Annotated[str | None, _flag("fine_tune_type")] = None,
    grad_checkpoint: Annotated[bool | None, _flag("grad_checkpoint", "--grad-checkpoint")] = None,
    test: Annotated[bool | None, _refused("test", "--test")] = None,
    test_batches: Annotated[int | None, _refused("test_batches")] = None,
    report_to: Annotated[str | None, _refused("report_to")] = None,
    project_name: Annotated[str | None, _refused("project_name")] = None,
    clear_cache_threshold: Annotated[str | None, _refused("clear_cache_threshold")] = None,
) -> None:
    """Train a LoRA adapter for a language model."""
    flags = locals()
    settings = sources.load(flags.pop("config_file"), flags)
    from mesp_mlx.finetune import run  # here, so that --help and a bad flag answer at once

    run(settings)


@app.command("check-gradients")
def check_gradients(
    model: Annotated[str, _flag("model")],
    data: Annotated[str | None, typer.Option(help="rows to compute the gradients of: a folder, a .jsonl file, or demo (default: random tokens)")] = None,
    seq: Annotated[int, typer.Option(min=8, help="tokens of the row")] = 64,
    layers: Annotated[int | None, typer.Option(min=1, help="first layers also compared with NumPy in float64 (more than there are: all) [default: 2]")] = None,
    rank: Annotated[int, typer.Option(help="rank of the random adapter")] = 8,
    backend: Annotated[str, _flag("backend")] = "auto",
    quantize: Annotated[str, _flag("quantize")] = "4",
    trust_remote_code: Annotated[bool, _flag("trust_remote_code", "--trust-remote-code")] = False,
    seed: Annotated[int, typer.Option(help="seed of the adapter and of random tokens")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16: of activations on MLX (default: as in training)")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="file for the figures")] = None,
) -> int:
    """Compare the structured gradients of a model with autodiff's; exit code 1 if they differ."""
    from mesp_mlx.check_gradients import run

    flags = {"model": model, "data": data, "rank": rank, "backend": backend, "quantize": quantize, "seed": seed, "trust_remote_code": trust_remote_code}
    return run(flags, seq, layers, json_file, dtype)


@app.command()
def compare(
    out: Annotated[str, typer.Option(help="folder for compare.json and the pictures")],
    model: Annotated[str | None, _flag("model")] = None,
    data: Annotated[str | None, _flag("data")] = None,
    config_file: Annotated[str | None, typer.Option("-c", "--config", help="YAML file with settings, as finetune's; flags override it")] = None,
    methods: Annotated[str, typer.Option(help=f"comma-separated, of {', '.join(config.VARIANTS)}")] = "mesp,mebp,mezo,backprop",
    iters: Annotated[int, typer.Option(min=1, help="iterations of each method")] = 20,
    rank: Annotated[int | None, _flag("rank")] = None,
    num_layers: Annotated[int | None, _flag("num_layers")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd, adam or adamw, of the exact methods; mezo's is sgd")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="highest learning rate, of the exact methods")] = None,
    mezo_learning_rate: Annotated[float | None, typer.Option(help=f"mezo's rate [default: {config.METHOD_DEFAULTS['mezo']['learning_rate']:g}]")] = None,
    mezo_perturbations: Annotated[int | None, _flag("mezo_perturbations")] = None,
    batch_size: Annotated[int | None, _flag("batch_size")] = None,
    max_seq_length: Annotated[int | None, _flag("max_seq_length")] = None,
    seed: Annotated[int | None, _flag("seed")] = None,
    backend: Annotated[str | None, _flag("backend")] = None,
    quantize: Annotated[str | None, _flag("quantize")] = None,
    trust_remote_code: Annotated[bool | None, _flag("trust_remote_code", "--trust-remote-code")] = None,
) -> int:
    """Train by each method in turn, measure each in a process of its own, and draw what was measured."""
    flags = locals()
    out, file, names = flags.pop("out"), flags.pop("config_file"), flags.pop("methods")
    from mesp_mlx.compare import run

    return run(out, file, names, flags)


@app.command()
def plan(
    model: Annotated[str | None, typer.Option(help="a model folder, a config.json by any name, a GGUF file, a Hub id, demo, or a shape as qwen2.5-3b")] = None,
    data: Annotated[str | None, typer.Option(help="rows to plan for: a folder, a .jsonl file, or demo (default: rows of --seq positions)")] = None,
    config_file: Annotated[str | None, typer.Option("-c", "--config", help="YAML file with settings, as finetune's; flags override it")] = None,
    device: Annotated[str | None, typer.Option(help="a device to plan for instead of this machine, as mac-8gb; a wrong name lists them")] = None,
    memory: Annotated[str | None, _flag("memory")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="positions of a row; with --data where rows are cut [default: 512]")] = None,
    batch: Annotated[int | None, _flag("batch_size")] = None,
    rank: Annotated[int | None, _flag("rank")] = None,
    num_layers: Annotated[int | None, _flag("num_layers")] = None,
    keys: Annotated[str | None, _flag("keys")] = None,
    method: Annotated[str | None, _flag("method")] = None,
    optimizer: Annotated[str | None, _flag("optimizer")] = None,
    grad_clip: Annotated[float | None, _flag("grad_clip")] = None,
    iters: Annotated[int | None, _flag("iters")] = None,
    epochs: Annotated[int | None, _flag("epochs")] = None,
    backend: Annotated[str | None, _flag("backend")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16: of activations (default: as in training)")] = None,
    quantize: Annotated[str | None, _flag("quantize")] = None,
    trust_remote_code: Annotated[bool | None, _flag("trust_remote_code", "--trust-remote-code")] = None,
    find: Annotated[str | None, typer.Option(help="seq, batch or rank: say the largest that fits")] = None,
    matrix: Annotated[bool, typer.Option("--devices", help="this model, or popular ones, by all devices")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="file for the figures, - for standard output")] = None,
    resident: Annotated[str | None, _flag("resident")] = None,
    prefetch: Annotated[int | None, _flag("prefetch")] = None,
    hold: Annotated[bool | None, _flag("hold")] = None,
    keep: Annotated[str | None, _flag("keep")] = None,
    checkpoints: Annotated[str | None, _flag("checkpoints")] = None,
    states: Annotated[str | None, _flag("states")] = None,
    gradients: Annotated[str | None, _flag("gradients")] = None,
    adapters: Annotated[str | None, _flag("adapter", "--adapters")] = None,
    group_tokens: Annotated[int | None, _flag("group_tokens")] = None,
    query_tile: Annotated[int | None, _flag("query_tile")] = None,
    width_tile: Annotated[int | None, _flag("width_tile")] = None,
    vocabulary_tile: Annotated[int | None, _flag("vocabulary_tile")] = None,
    weight_tile: Annotated[int | None, _flag("weight_tile")] = None,
) -> int:
    """Say what a run will take, here or on another device, before anything is downloaded; exit code 1 if it does not fit."""
    flags = locals()
    own = {name: flags.pop(name) for name in ("device", "seq", "dtype", "find", "matrix", "json_file")}
    file, flags["batch_size"] = flags.pop("config_file"), flags.pop("batch")
    from mesp_mlx.plan_command import Asked, run

    return run(file, flags, Asked(**own))


@app.command()
def architectures(
    types: Annotated[list[str] | None, typer.Argument(help="model types of mlx-lm to try (default: all it has)")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="file for the figures")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print a table in Markdown")] = False,
) -> int:
    """Say which of mlx-lm's model types train here, and how, by training a tiny random model of each; exit code 1 if a gradient is wrong."""
    from mesp_mlx.architectures import run

    return run(types or [], json_file, markdown)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 2 for what the user can change, 1 for a run that can't go on, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model's reply may hold what a console can't show
    try:
        code = app(arguments or sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        code = _fail(_said(error), error.exit_code)
    except UserError as error:
        code = _fail(str(error), 2)
    except RunStopped as error:
        code = _fail(str(error), 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        code = _fail(f"no space left on the disk{where}: free some, or choose another --adapter-path or cache folder (MESP_MLX_CACHE)", 2)
    sys.exit(code)


def _said(error: typer.TyperException) -> str:
    """typer's message, but of a value that is no number the one that settings have."""
    cause, parameter = error.__cause__, getattr(error, "param", None)
    if isinstance(cause, ValidationError) and parameter is not None:
        return f"{parameter.opts[-1]}: {sources.found(cause.errors()[0])}"
    return error.format_message()


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
