"""The methods side by side: each trains in a process of its own, from the same adapter on the same rows, and is measured alike."""

import json
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mesp_mlx import __version__, child, finetune, plots, report, sources
from mesp_mlx import backend as backends
from mesp_mlx.config import METHOD_DEFAULTS, VARIANTS, Settings
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.memory import measure
from mesp_mlx.stream.safetensors import read_array, read_header
from mesp_mlx.units import megabytes

TRUTH = "mebp"  # whose gradient is the true one: by autodiff, and layer by layer, so that it fits where whole autodiff doesn't
RESULT = "compare.json"
PICTURES = ("timeline.png", "peaks.png", "losses.png")
EXACT_FLAGS, MEZO_FLAGS = ("learning_rate", "optimizer"), ("mezo_learning_rate", "mezo_perturbations")  # the others are for all methods


def run(out: str, config_file: str | None, methods: str, flags: dict[str, Any]) -> int:
    """Compare the methods named, comma-separated; 1 if one of them failed, 0 otherwise.

    Leaves in the folder `out` compare.json, the pictures, and a folder of each method with its adapter and log; what an earlier comparison left is replaced.

    Raises:
        UserError: something the user can change.
        KeyboardInterrupt: it was interrupted.
    """
    names, folder = _chosen(methods, flags), Path(out)
    truth = overrides(TRUTH, folder, flags)
    shared = sources.load(config_file, truth)  # as of any method, but for what is a method's own
    scheduled = bool(shared.lr_schedule.arguments)
    given = {name: overrides(name, folder, flags, scheduled) for name in names}
    settings = {name: _settings(name, config_file, given[name]) for name in names}
    finetune.data_files(shared)
    _make_folders(folder, names)
    console, accumulation, asked = report.console(), shared.grad_accumulation_steps, shared.iters or 0
    iterations = asked + -asked % accumulation
    if iterations != asked:
        console.print(f"--iters {asked} is rounded up to whole updates of {accumulation} iterations", soft_wrap=True)
    if scheduled and "mezo" in names:
        rate = f"{settings['mezo'].learning_rate:g} by a {settings['mezo'].lr_schedule.name}"
        console.print(f"lr_schedule's arguments are the other methods' rate; mezo's is {rate}: see --mezo-learning-rate", soft_wrap=True)
    with Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="mesp-mlx-") as temporary:
        model = finetune.open_model(shared, backends.choose(shared.backend))[0].name
        true_gradient = Path(temporary) / "truth.safetensors"
        console.print(f"the true gradient, by {TRUTH}", soft_wrap=True)
        true = _ask("the true gradient", config_file, truth, true_gradient)
        results: dict[str, dict[str, Any]] = {}
        done: dict[str, dict[str, Any]] = {}
        content: dict[str, Any] = {}
        for name in names:
            console.print(f"{name}: {'' if name == TRUTH else 'its gradient, then '}{iterations} iterations", soft_wrap=True)
            cosine, why_none = None, true.get("failed")
            if name != TRUTH and not why_none:
                gradient = Path(temporary) / "gradient.safetensors"
                why_none = _ask(f"the gradient of {name}", config_file, given[name], gradient).get("failed")
                cosine = None if why_none else cosine_similarity(gradient, true_gradient)
            measured = _ask(f"training by {name}", config_file, given[name])
            result = {"settings": settings[name].model_dump(mode="json"), "gradient_is_truth": name == TRUTH}
            results[name] = result | {"gradient_cosine": cosine, "gradient_failed": why_none} | measured
            done = {name: result for name, result in results.items() if "failed" not in result}
            backend = next((result["backend"] for result in done.values()), shared.backend)
            conditions = {"iters": iterations, "true_gradient": TRUTH, "true_gradient_dtype": true.get("activation_dtype")}
            content = {"model": model, "backend": backend, **conditions, **_conditions(shared, backend), "methods": results}
            with interrupts.held():
                _write(folder, content)
            console.print(f"  {_outcome(results[name])}", soft_wrap=True)
    title = f"{model}, {shared.rows_per_update} row{'' if shared.rows_per_update == 1 else 's'} per update"
    _draw(folder, done, f"{title}, {'MLX' if content['backend'] == 'mlx' else 'NumPy'}")
    _show(console, content, title)
    console.print(f"written to {folder}: {', '.join([RESULT, *(PICTURES if done else ())])}; adapters and logs in its folders", soft_wrap=True)
    return int(any("failed" in result or result["gradient_failed"] for result in results.values()))


def overrides(name: str, folder: Path, flags: dict[str, Any], scheduled: bool = False) -> dict[str, Any]:
    """The flags of one method's run: those of all, its own, and no validation or reply.

    scheduled: a file's lr_schedule has arguments, and so a rate, which is the exact methods': mezo has its own, on the schedule of the defaults.
    """
    shared = {key: value for key, value in flags.items() if key not in EXACT_FLAGS + MEZO_FLAGS}
    own = {key: flags.get(key) for key in EXACT_FLAGS}
    if VARIANTS[name]["method"] == "mezo":
        mezo = {"learning_rate": flags.get("mezo_learning_rate"), "mezo_perturbations": flags.get("mezo_perturbations")}
        own = METHOD_DEFAULTS["mezo"] | {key: value for key, value in mezo.items() if value is not None}
        own |= {"lr_schedule": Settings.model_fields["lr_schedule"].default.name} if scheduled else {}
    else:  # whatever a file says of mezo is for mezo
        own |= {key: Settings.model_fields[key].default for key in ("mezo_epsilon", "mezo_perturbations")}
    place = {"adapter_path": str(folder / name), "json_log": str(folder / name / "log.jsonl"), "overwrite": True}
    quiet = {"val_batches": 0, "reply_tokens": 0, "steps_per_report": 1, "save_every": flags["iters"]}
    return shared | own | {"tiled_head": False, "grad_checkpoint": False} | VARIANTS[name] | place | quiet


def cosine_similarity(found: Path, truth: Path) -> float:
    """Of two gradients, all tensors together, in files as `adapter.save` writes them."""
    ours, theirs = read_header(found)[0], read_header(truth)[0]
    assert ours.keys() == theirs.keys()
    product = square = true_square = 0.0
    for name in ours:
        a, b = (read_array(entry).astype(float).ravel() for entry in (ours[name], theirs[name]))
        product, square, true_square = product + float(a @ b), square + float(a @ a), true_square + float(b @ b)
    norms = math.sqrt(square * true_square)
    return product / norms if norms else 0.0


def _chosen(methods: str, flags: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names:
        found = f"no method is called {' or '.join(map(repr, unknown))}" if unknown else "no method was named"
        raise UserError(f"--methods: {found}. Those that can be compared: {', '.join(VARIANTS)}.")
    mezo = [VARIANTS[name]["method"] == "mezo" for name in names]
    idle = [(key, "mezo") for key in MEZO_FLAGS if not any(mezo)] + [(key, "the exact methods") for key in EXACT_FLAGS if all(mezo)]
    for key, whose in idle:
        if flags.get(key) is not None:
            hint = " (mezo's is --mezo-learning-rate)" if key == "learning_rate" else ""
            raise UserError(f"--{key.replace('_', '-')} is for {whose}, and --methods names {', '.join(names)}: remove one or the other{hint}.")
    return names


def _settings(name: str, config_file: str | None, given: dict[str, Any]) -> Settings:
    try:
        return sources.load(config_file, given)
    except UserError as error:
        raise UserError(f"method {name}: {_in_its_flags(given, str(error))}") from None


def _in_its_flags(given: dict[str, Any], message: str) -> str:
    return message.replace("--learning-rate", "--mezo-learning-rate") if given["method"] == "mezo" else message


def _make_folders(folder: Path, names: Sequence[str]) -> None:
    try:
        for name in names:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name in (RESULT, *PICTURES):  # or a comparison that fails would stand beside an earlier one's pictures
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: {error.filename}: {error.strerror}. Choose another folder.") from None


def _ask(doing: str, config_file: str | None, given: dict[str, Any], gradient: Path | None = None) -> dict[str, Any]:
    """The child's answer; `failed` in it says why there is no other. Raises UserError for what the user can change."""
    request = {"config_file": config_file, "flags": given, "gradient": None if gradient is None else str(gradient)}
    try:
        answer = child.ask("mesp_mlx.compare_child", request, doing)
    except UserError as error:  # it ended without an answer: for lack of memory, say
        return {"failed": str(error)}
    if "refused" in answer:
        raise UserError(answer["refused"])
    return answer | {key: _in_its_flags(given, answer[key]) for key in ("failed",) if key in answer}


def _outcome(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    peak = megabytes(result["process_peak_bytes"])
    return f"{result['seconds_per_step']:.2f} s per step, peak {peak}, loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}"


def _conditions(settings: Settings, backend: str) -> dict[str, Any]:
    """What a reader needs to judge the figures by."""
    versions = {"mesp_mlx": __version__, "python": platform.python_version(), "numpy": metadata.version("numpy")}
    if backend == "mlx":
        versions["mlx"] = metadata.version("mlx")
    return {
        "data": settings.data,
        "rows_per_update": settings.rows_per_update,
        "cache_limit_bytes": measure.KEEP_BYTES if backend == "mlx" else None,
        "versions": versions,
        "platform": {"system": platform.platform(), "machine": platform.machine(), "processors": os.cpu_count()},
    }


def _write(folder: Path, content: dict[str, Any]) -> None:
    file = folder / RESULT
    try:
        file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"writing {file}: {error.strerror}. Choose another --out.") from None


def _draw(folder: Path, done: dict[str, dict[str, Any]], title: str) -> None:
    if not done:
        return
    timeline, peaks, losses = (folder / name for name in PICTURES)
    bases = {name: result["base_bytes"] for name, result in done.items()}
    steps = {name: result["timeline"] for name, result in done.items()}
    first = next(iter(done.values()))
    plots.timelines(steps, bases, f"Memory within update {first['timeline']['step'] + 1} of {len(first['step_seconds'])}: {title}", timeline)
    plots.peaks(done, f"Peak memory: {title}", peaks)
    lines = {name: (result["iterations"], result["losses"]) for name, result in done.items()}
    plots.curves(lines, f"Training loss: {title}", "iteration", "loss per supervised token", losses)


def _show(console: Console, content: dict[str, Any], title: str) -> None:
    """The table, with what has to be said about it."""
    header = ["method", "allocator peak, MB", "process peak, MB", "above its base, MB", "s per step", "first loss"]
    header += [f"loss at {content['iters']}", "gradient cosine"]
    rows, results = [], content["methods"]
    for name, result in results.items():
        cosine = "failed" if result["gradient_failed"] else "the truth" if result["gradient_is_truth"] else f"{result['gradient_cosine']:.6f}"
        if "failed" in result:
            rows.append([name, *["failed"] * (len(header) - 2), cosine])
            continue
        allocator, peak = result["allocator_peak_bytes"], result["process_peak_bytes"]
        sizes = ["not counted" if size is None else f"{size / 1e6:,.1f}" for size in (allocator, peak, peak - result["base_bytes"])]
        rows.append([name, *sizes, f"{result['seconds_per_step']:.2f}", *(f"{result['losses'][place]:.4f}" for place in (0, -1)), cosine])
    if console.is_terminal:
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for place, column in enumerate(header):
            table.add_column(column, justify="right" if place else "left", overflow="fold", min_width=max(map(len, column.split())))
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]
        console.print(title)
        for row in [header, *rows]:
            cells = (cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True)))
            console.print("  ".join(cells), soft_wrap=True)
    console.print(
        f"True gradient: that of {TRUTH} (autodiff, layer by layer, whole head), of the first update, with random numbers a tenth of A's size in B"
        + (f" and activations in {dtype}. " if (dtype := content["true_gradient_dtype"]) else ". ")
        + "The process's peak is the system's own high-water mark. Losses are of the rows of that iteration's update, the same for all.",
        soft_wrap=True,
    )
    for name, result in results.items():
        for what, why in (("", result.get("failed")), ("gradient of ", result["gradient_failed"])):
            if why:
                console.print(f"{what}{name} failed: {why}", soft_wrap=True)
