"""The methods side by side: each trains in a process of its own, from the same adapter on the same rows, and is measured alike."""

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mesp_mlx import __version__, child, config, finetune, plots, sources
from mesp_mlx.config import METHOD_DEFAULTS, VARIANTS, Settings
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.memory import measure
from mesp_mlx.model import source
from mesp_mlx.report import megabytes
from mesp_mlx.stream.safetensors import read_array, read_header

TRUTH = "mebp"  # whose gradient is the true one: by autodiff, and layer by layer, so that it fits where whole autodiff doesn't
RESULT = "compare.json"
PICTURES = ("timeline.png", "peaks.png", "losses.png")
OWN = ("learning_rate", "optimizer", "mezo_learning_rate", "mezo_perturbations")  # flags that aren't for all methods


def run(out: str, config_file: str | None, methods: str, flags: dict[str, Any]) -> int:
    """Compare the methods named, comma-separated; 1 if one of them failed, 0 otherwise.

    Leaves in the folder `out` compare.json, the pictures, and a folder of each method with its adapter and log; what an earlier comparison left is replaced.

    Raises:
        UserError: something the user can change.
        KeyboardInterrupt: it was interrupted.
    """
    names, folder = _chosen(methods), Path(out)
    given = {name: overrides(name, folder, flags) for name in names}
    truth = given.get(TRUTH) or overrides(TRUTH, folder, flags)
    settings = {name: _settings(name, config_file, given[name]) for name in names}
    shared = settings[names[0]]
    finetune.data_files(shared)
    _make_folders(folder, names)
    console = _console()
    with Interrupts(), tempfile.TemporaryDirectory(prefix="mesp-mlx-") as temporary:
        model = source.resolve_apart(shared.model, config.cache_folder(), shared.quantize).name
        true_gradient = Path(temporary) / "truth.safetensors"
        console.print(f"the true gradient, by {TRUTH}", soft_wrap=True)
        why_no_truth = _ask("the true gradient", config_file, truth, true_gradient).get("failed")
        results: dict[str, dict[str, Any]] = {}
        for name in names:
            console.print(f"{name}: its gradient, then {shared.iters} iterations", soft_wrap=True)
            gradient, why_none = true_gradient, why_no_truth
            if name != TRUTH and not why_none:
                gradient = Path(temporary) / "gradient.safetensors"
                why_none = _ask(f"the gradient of {name}", config_file, given[name], gradient).get("failed")
            cosine = None if why_none else cosine_similarity(gradient, true_gradient)
            measured = _ask(f"training by {name}", config_file, given[name])
            result = {"settings": settings[name].model_dump(mode="json"), "gradient_cosine": cosine, "gradient_failed": why_none}
            results[name] = result | measured
            console.print(f"  {_outcome(results[name])}", soft_wrap=True)
    title = f"{model}, {shared.rows_per_update} row{'' if shared.rows_per_update == 1 else 's'} per update"
    done = {name: result for name, result in results.items() if "failed" not in result}
    backend = next((result["backend"] for result in done.values()), shared.backend)
    _write(folder, {"model": model, "backend": backend, **_conditions(shared, backend), "methods": results})
    _draw(folder, done, f"{title}, {'MLX' if backend == 'mlx' else 'NumPy'}")
    _show(console, results, title, shared.iters or 0)
    console.print(f"written to {folder}: {', '.join([RESULT, *(PICTURES if done else ())])}; adapters and logs in its folders", soft_wrap=True)
    return int(any("failed" in result or result["gradient_failed"] for result in results.values()))


def overrides(name: str, folder: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of one method's run: those of all, its own, and no validation or reply."""
    mezo = VARIANTS[name]["method"] == "mezo"
    shared = {key: value for key, value in flags.items() if key not in OWN}
    own = {key: flags.get(key) for key in ("learning_rate", "optimizer")}
    if mezo:
        own = METHOD_DEFAULTS["mezo"] | {key: value for key, value in _mezo(flags).items() if value is not None}
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


def _mezo(flags: dict[str, Any]) -> dict[str, Any]:
    return {"learning_rate": flags.get("mezo_learning_rate"), "mezo_perturbations": flags.get("mezo_perturbations")}


def _chosen(methods: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or not names:
        found = f"no method is called {' or '.join(map(repr, unknown))}" if unknown else "no method was named"
        raise UserError(f"--methods: {found}. Those that can be compared: {', '.join(VARIANTS)}.")
    return names


def _settings(name: str, config_file: str | None, given: dict[str, Any]) -> Settings:
    try:
        return sources.load(config_file, given)
    except UserError as error:
        raise UserError(f"method {name}: {error}") from None


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
    return answer


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
        "iters": settings.iters,
        "rows_per_update": settings.rows_per_update,
        "true_gradient": TRUTH,
        "cache_limit_bytes": measure.CACHE_BYTES if backend == "mlx" else None,
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


def _console() -> Console:
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return Console(force_terminal=terminal, markup=False, highlight=False, emoji=False)


def _show(console: Console, results: dict[str, dict[str, Any]], title: str, iters: int) -> None:
    """The table, with what has to be said about it."""
    header = ["method", "allocator peak, MB", "process peak, MB", "above its base, MB", "s per step", "first loss", f"loss at {iters}", "gradient cosine"]
    rows = []
    for name, result in results.items():
        cosine = "failed" if result["gradient_failed"] else f"{result['gradient_cosine']:.6f}"
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
        f"True gradient: that of {TRUTH} (autodiff, layer by layer, whole head), of the first update, with random numbers a tenth of A's size in B. "
        "The process's peak is the system's own high-water mark. Loss at N: of update N's rows, the same for all.",
        soft_wrap=True,
    )
    for name, result in results.items():
        for what, why in (("", result.get("failed")), ("gradient of ", result["gradient_failed"])):
            if why:
                console.print(f"{what}{name} failed: {why}", soft_wrap=True)
