"""`mesp-mlx plan`: what a run would take here, on another device, or within a size, from a model's config alone."""

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mesp_mlx import adapter as adapters
from mesp_mlx import backend as backends
from mesp_mlx import config, finetune, plan_report, planning, report, sources
from mesp_mlx.config import Settings
from mesp_mlx.data import formats
from mesp_mlx.data.rows import Rows, read_rows
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.memory import choose, devices, machine, measure
from mesp_mlx.memory import plan as plans
from mesp_mlx.memory.choose import DoesNotFit
from mesp_mlx.memory.devices import Device
from mesp_mlx.memory.machine import Memory
from mesp_mlx.memory.plan import Plan, Speeds, Workload
from mesp_mlx.model import source
from mesp_mlx.model.shapes import SHAPES
from mesp_mlx.model.spec import Spec
from mesp_mlx.planning import Room

SEQ = 512  # positions of a row, where neither --seq nor --data says
BASE_BYTES = {"numpy": 60_000_000, "mlx": 68_000_000}  # a run's process before its first array, measured on Linux
ROWS_NAMED = 5
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Asked:
    """What was asked for, beside a run's settings.

    Attributes:
        device: a name of memory.devices, whose memory counts instead of this machine's.
        seq: positions of a row, without data.
        dtype: of activations.
        find: what the largest that fits is wanted of.
        matrix: models by devices instead of one plan.
        json_file: for the figures; "-" is standard output.
    """

    device: str | None = None
    seq: int | None = None
    dtype: str | None = None
    find: Literal["seq", "batch", "rank"] | None = None
    matrix: bool = False
    json_file: str | None = None


@dataclass(frozen=True)
class Arrays:
    """What computes: a backend by name, whether on a CPU, and whether that is what this machine has."""

    name: str
    on_cpu: bool
    here: bool


def run(config_file: str | None, flags: dict[str, Any], asked: Asked) -> int:
    """Plan, print, and give 0 if the run fits, else 1.

    Raises:
        UserError: something the user can change.
    """
    try:
        return _run(config_file, flags, asked)
    except UserError as error:
        raise UserError(_own_flags(str(error))) from None


def _own_flags(message: str) -> str:
    """A message that names finetune's flags, for this verb."""
    return message.replace("--max-seq-length", "--seq").replace("--batch-size", "--batch")


def _run(config_file: str | None, flags: dict[str, Any], asked: Asked) -> int:
    if asked.matrix and (asked.device or asked.find):
        raise UserError(f"--devices plans for all devices: remove {'--device' if asked.device else '--find'}")
    data, model = flags.get("data"), flags.get("model")
    if model is None and asked.matrix:
        flags = flags | {"model": next(iter(SHAPES))}
    settings = sources.load(config_file, flags | {"data": data or "(none)"} | ({"max_seq_length": asked.seq} if data and asked.seq else {}))
    if asked.find not in (None, "seq", "batch", "rank"):
        raise UserError(f"--find: found {asked.find!r}, expected seq, batch or rank")
    if asked.dtype is not None and asked.dtype not in DTYPES:
        raise UserError(f"--dtype: found {asked.dtype!r}, expected {', '.join(DTYPES)}")
    device = devices.find(asked.device) if asked.device else None
    arrays = _arrays(settings.backend, device is not None or asked.matrix)
    if arrays.name == "numpy" and asked.dtype not in (None, "float32"):
        raise UserError(f"--dtype {asked.dtype}: NumPy computes in float32. Leave it out, or choose --backend mlx.")
    console = report.console(sys.stderr if asked.json_file == "-" else None)
    if not console.is_terminal:
        console.width = 160  # of the tables in a file
    with Interrupts(), ExitStack() as stack:
        if asked.matrix:
            content, lines, fits = _matrix(settings, asked, arrays, list(SHAPES) if model is None else [settings.model])
            plan_report.print_matrix(console, content["models"], [found.name for found in devices.DEVICES])
        else:
            given = settings.model, config.cache_folder(), settings.quantize, bool(data), arrays.name, settings.trust_remote_code
            shape = stack.enter_context(source.shape(*given))
            if not data and (asked.seq or 0) > shape.spec.max_positions:
                raise UserError(f"--seq is {asked.seq}, but the model was made for {shape.spec.max_positions} positions. Lower it.")
            content, lines, plan = _one(settings, asked, arrays, device, shape, data)
            plan_report.print_tables(console, plan)
            fits = content["verdict"] != "does not fit"
    plan_report.print_lines(console, lines)
    if asked.json_file:
        _write(asked.json_file, content)
    return 0 if fits else 1


def _one(
    settings: Settings, asked: Asked, arrays: Arrays, device: Device | None, shape: source.Shape, data: str | None
) -> tuple[dict[str, Any], dict[str, str], Plan]:
    """The figures, the lines to print, and the plan, of one model: the least one where none fits."""
    spec = shape.spec
    modules = adapters.choose_modules(spec, settings.num_layers, settings.lora_parameters.keys)
    rows, updates = None, -(-settings.iters // settings.grad_accumulation_steps) if settings.iters else None
    counts: tuple[int, int, int | None] = (settings.rows_per_update, asked.seq or min(SEQ, spec.max_positions), None)
    if data:
        if shape.folder is None:
            raise UserError(f"--data {data}: turning it into tokens takes the model's tokenizer. Give --model a folder or a Hub id, not {settings.model}.")
        files = finetune.data_files(settings)
        rows = read_rows(settings, files, shape.folder, spec, config.cache_folder() / "tokens")
        updates = finetune.count_updates(settings, len(rows.train))
        counts = planning.rows_shape(settings, rows, updates)
    load = planning.shaped(settings, spec, modules, arrays.name, _itemsize(asked.dtype, arrays, spec), arrays.on_cpu, *counts)
    have = Memory(device.memory_bytes, device.limit_bytes, 0) if device else machine.memory()
    working = machine.working_set_bytes(arrays.name) if arrays.here and not arrays.on_cpu and not device else None
    room = Room(settings.memory, have, _base_bytes(load), 0, working)
    fixed, why = settings.strategy.fixed, None
    try:
        plan = planning.within(room, load, fixed)
    except DoesNotFit as error:
        plan, why = error.plan, _own_flags(str(error))
    speeds, measured = _speeds(arrays, device, shape.folder)

    def seconds_of(plan: Plan) -> float:
        return planning.run_seconds(plan, speeds, rows, settings, updates) if rows and updates else (updates or 1) * plan.seconds(speeds)

    seconds = seconds_of(plan) if updates else None
    budget = max(planning.budget_bytes(room, load, fixed), 0 if why else plan.total_bytes)
    whose = f"{device.title} leaves one app" if device else "this machine can give"
    verdict = "does not fit" if why else devices.judged(room.budget_bytes, min(plan.total_bytes, planning.least_bytes(load, fixed, room.base_bytes)))
    lines = {
        "model": f"{shape.name} ({spec.model_type}), {spec.num_layers} layers; {len(modules)} modules of rank {load.rank}, {load.adapter_bytes / 1e6:,.1f} MB; "
        f"method {load.method} on {load.backend}, activations of {8 * load.itemsize} bits",
        "update": f"{load.rows} row{'' if load.rows == 1 else 's'} of {load.width:,} positions" + (" (the fullest update)" if rows else ""),
        **plan_report.body(plan, planning.allowed(room, budget, whose)),
        "time": plan_report.time(plan, speeds, measured, seconds, updates),
    }
    if more := planning.faster(room, load, fixed):
        lines["more"] = plan_report.faster(more, 1 - seconds_of(more) / seconds_of(plan))
    if settings.epochs and not rows:
        lines["epochs"] = "how many updates they are takes the rows: give --data, or --iters instead"
    content = {
        "model": shape.name, "memory": settings.memory, "budget_bytes": budget, "limit_bytes": room.budget_bytes, "device": device.name if device else None,
        "verdict": verdict, "reason": why, "updates": updates, "seconds": seconds, "speeds_measured": measured,
        "workload": plan_report.workload_facts(load), **plan_report.facts(plan, speeds), "tensors": plan_report.tensor_facts(plan),
    }  # fmt: skip
    if rows and updates:
        content["longest_rows"] = _longest(rows, finetune.data_files(settings)["train"])
        lines["longest rows"] = ", ".join(f"{row['file']}:{row['line']} ({row['tokens']:,} tokens)" for row in content["longest_rows"])
    if asked.find:
        largest = choose.find_largest(asked.find, load, room.budget_bytes, room.base_bytes, fixed)
        content["find"] = {asked.find: largest}
        what = {"seq": "longest row, in positions", "batch": "most rows of an update", "rank": "highest rank"}[asked.find]
        lines[f"largest {asked.find}"] = f"{largest:,}: the {what}, that fits with the least plan" if largest else f"no {asked.find} fits"
    lines["verdict"] = plan_report.verdict(
        verdict, why, room.budget_bytes, whose if room.cut or not isinstance(room.asked, int) else f"--memory {room.memory} allows"
    )
    if device:
        lines["device"] = ("estimated: " if device.estimate else "") + device.source
    return content, lines, plan


def _matrix(settings: Settings, asked: Asked, arrays: Arrays, models: list[str]) -> tuple[dict[str, Any], dict[str, str], bool]:
    """Models by devices: the least and the fastest plan's peak, and the verdict on the least."""
    found = []
    for model in models:
        with source.shape(model, config.cache_folder(), settings.quantize, False, arrays.name, settings.trust_remote_code) as shape:
            spec = shape.spec
        modules = adapters.choose_modules(spec, settings.num_layers, settings.lora_parameters.keys)
        width, size = min(asked.seq or SEQ, spec.max_positions), _itemsize(asked.dtype, arrays, spec)
        load = planning.shaped(settings, spec, modules, arrays.name, size, arrays.on_cpu, settings.rows_per_update, width, None)
        fixed, base = settings.strategy.fixed, _base_bytes(load)
        least = planning.least_bytes(load, fixed, base)
        fastest = plans.make(load, replace(choose.fastest(load), **fixed), base).total_bytes
        verdicts = {device.name: devices.verdict(device, least) for device in devices.DEVICES}
        found.append({"model": shape.name, "width": width, "rows": load.rows, "least_bytes": least, "fastest_bytes": fastest, "verdicts": verdicts})
    lines = {
        "update": f"{settings.rows_per_update} rows of up to {asked.seq or SEQ:,} positions, rank {settings.lora_parameters.rank}, method {settings.method}",
        "verdicts": "on the least plan: fits, tight (over four fifths of what the device leaves one app), does not fit",
        "devices": "what each leaves one app, and where that is from: see --device NAME",
    }
    return {"models": found}, lines, any(verdict != "does not fit" for row in found for verdict in row["verdicts"].values())


def _arrays(name: str, elsewhere: bool) -> Arrays:
    """The backend to plan for. Elsewhere, on a device of Apple's, MLX has a GPU unless NumPy is asked for; here it may not even be installed."""
    if elsewhere and name != "numpy":
        return Arrays("mlx", False, False)
    try:
        backend = backends.choose(name)
    except UserError:
        return Arrays("mlx", False, False)
    return Arrays(backend.arrays.name, backends.on_cpu(backend), not elsewhere)


def _base_bytes(load: Workload) -> int:
    """What a run's process takes before its first array. With mlx-lm in it, and its layers tried, that differs by model, and is what this process takes."""
    return measure.process_now_bytes() if load.generic else BASE_BYTES[load.backend]


def _itemsize(dtype: str | None, arrays: Arrays, spec: Spec) -> int:
    """Bytes of an activation: by the dtype policy of `backend.activation_dtype`, where none was asked for."""
    return DTYPES[dtype] if dtype else 4 if arrays.on_cpu or spec.dtype == "F32" else 2


def _speeds(arrays: Arrays, device: Device | None, folder: Path | None) -> tuple[Speeds, bool]:
    """This machine's where it computes as the run would; else the disk's alone is measured."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size) if folder else []
    here = arrays.here and device is None
    found = machine.speeds(backends.choose(arrays.name) if here else None, arrays.on_cpu, files[-1] if files else None)
    return machine.with_writing(found, Path.cwd(), read=not files), here


def _longest(rows: Rows, file: Path | None) -> list[dict[str, Any]]:
    """The longest training rows, with their lines."""
    wanted = {int(row): int(rows.train_set.lengths(rows.limit)[row]) for row in planning.longest_rows(rows, ROWS_NAMED)}
    lines = {index: row.line for index, row in enumerate(formats.read_rows(file)) if index in wanted} if file else {}
    return [{"file": str(file), "line": lines.get(row), "tokens": tokens} for row, tokens in wanted.items()]


def _write(file: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"writing --json {file}: {error.strerror}. Choose another file.") from None
