"""The same recipe by mesp-mlx and by mlx-lm's own trainer, side by side: losses, final adapters, peak memory, seconds.

    python tools/compare_mlx_lm.py --model demo --data demo --iters 4 --batch-size 1 --json compared.json --plot compared.png

Any other flag is one of `mesp-mlx finetune`'s and means the same to both. Each run has a process of its own: `mesp-mlx finetune` on MLX, then
mlx_lm.tuner.trainer.train in each of --modes: compiled, as mlx-lm trains, or eagerly; with and without its checkpointing. Both have

- the initial adapter, bit for bit; the optimizer of mlx.optimizers with its arguments; the learning rate of each update; no clipping, which mlx-lm lacks;
- the rows of each update, as ours draws and pads them. mlx-lm takes an iteration's rows as one array, padded to its longest row, where ours takes groups of
  equal width; alone it would pad further, to multiples of 32;
- the mask, and each update's loss as the mean over its supervised tokens. Alone, mlx-lm would supervise one padding token after each row, mask prompts only up
  to the last turn, and weigh iterations of an update alike however many tokens they supervise;
- the cache limit.

What mlx-lm evaluates while it trains is not compared.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx_lm_step
import numpy as np
import openblas

from mesp_mlx.config import Settings, cache_folder, demo_folder, learning_rate
from mesp_mlx.data.group import Group
from mesp_mlx.errors import UserError
from mesp_mlx.sources import load

OURS, MODES = "mesp-mlx", ("eager", "eager-checkpoint", "compiled", "compiled-checkpoint")
PRINTED = 20  # iterations, at most: of a long run some are left out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("-c", "--config", metavar="YAML", help="settings, as for mesp-mlx finetune")
    parser.add_argument("--modes", type=_modes, default=MODES, help=f"of mlx-lm, comma-separated: {', '.join(MODES)} (default: all)")
    parser.add_argument("--mlx-lm-product", choices=("own", "mlx"), help="what multiplies by quantised weights in mlx-lm (default: own on a CPU device)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments, others = parser.parse_known_args()
    try:
        if arguments.child:
            request = json.loads(arguments.child.read_text(encoding="utf-8"))
            Path(request["result"]).write_text(json.dumps(train_by_mlx_lm(request)), encoding="utf-8")
            return 0
        _check(arguments)
        compared = compare(load(arguments.config, _flags(others)), arguments.modes, arguments.mlx_lm_product)
        print("\n".join(_table(compared)))
        if arguments.json:
            arguments.json.write_text(json.dumps(compared, indent=1) + "\n", encoding="utf-8")
        if arguments.plot:
            draw(compared, arguments.plot)
    except (UserError, OSError) as error:
        print(f"compare_mlx_lm: {error}", file=sys.stderr)
        return 2
    return 0


def compare(settings: Settings, modes: Sequence[str], product: str | None) -> dict[str, Any]:
    """Run everything: {"notes": lines, "runs": one dict each, ours first}; sizes in bytes, times in seconds.

    Raises:
        UserError: a run can't be done, or the settings ask for what the two don't do alike.
    """
    if settings.lora_parameters.dropout:
        raise UserError("dropout: mlx-lm draws its masks in another way, so that nothing could agree. Give --dropout 0.")
    if settings.method == "mezo":
        raise UserError("--method mezo: mlx-lm has no such method to compare it with.")
    import mlx.core as mx

    on_cpu = mx.default_device() == mx.cpu
    product = product or ("own" if on_cpu else "mlx")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)} | (openblas.environment() if on_cpu else {})
    with tempfile.TemporaryDirectory(prefix="compare-mlx-lm-") as name:
        folder = Path(name)
        ours, log = folder / "ours", folder / "log.jsonl"
        common = settings.model_copy(update=same_for_both(settings) | {"adapter_path": str(ours), "json_log": str(log)})
        file = folder / "settings.yaml"
        file.write_text(json.dumps(common.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")  # JSON is YAML
        print(f"training: {OURS}", file=sys.stderr)
        _run([sys.executable, "-m", "mesp_mlx", "finetune", "-c", str(file)], environment, OURS)
        runs = [_our_run(log, settings.grad_accumulation_steps)]
        model_folder = json.loads((ours / "adapter_config.json").read_text(encoding="utf-8"))["model"]
        for mode in modes:
            print(f"training: mlx-lm, {mode}", file=sys.stderr)
            request = {"settings": str(file), "model_folder": model_folder, "updates": len(runs[0]["losses"]), "mode": mode, "product": product}
            request |= {"result": str(folder / f"{mode}.json"), "adapter": str(folder / f"{mode}.safetensors")}
            (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
            _run([sys.executable, __file__, "--child", str(folder / "request.json")], environment, f"mlx-lm, {mode}")
            result = json.loads(Path(request["result"]).read_text(encoding="utf-8"))
            runs.append(result | differences(runs[0]["losses"], ours / "adapters.safetensors", result, Path(request["adapter"])))
    return {"notes": _notes(settings, product, on_cpu), "iterations_per_update": settings.grad_accumulation_steps, "runs": runs}


def same_for_both(settings: Settings) -> dict[str, Any]:
    """What is set whatever the recipe says: every update is reported, and nothing that mlx-lm's side doesn't do takes time.

    Validation is cut to one batch at either end, not to none, which would move the rows held out of train.jsonl back into it.
    """
    never = 2**31
    quiet = {"steps_per_report": 1, "steps_per_eval": never, "save_every": never, "reply_tokens": 0, "val_batches": 0 if settings.val_batches == 0 else 1}
    return quiet | {"backend": "mlx", "grad_clip": 0.0}


def train_by_mlx_lm(request: Mapping[str, Any]) -> dict[str, Any]:
    """The child's work: train as the request says, save the adapter, measure this process."""
    import mlx.core as mx
    from mlx import optimizers
    from mlx.utils import tree_flatten

    from mesp_mlx import adapter as adapters
    from mesp_mlx import backend as backends
    from mesp_mlx import ops
    from mesp_mlx.data import batches, rows
    from mesp_mlx.data.formats import find_files
    from mesp_mlx.memory import measure
    from mesp_mlx.model.spec import load_spec, read_config
    from mesp_mlx.stream.safetensors import read_folder

    step, settings, model_folder = mlx_lm_step, load(request["settings"], {}), Path(request["model_folder"])
    with measure.small_cache("mlx"):
        spec, entries = load_spec(read_config(model_folder)), read_folder(model_folder)
        files = find_files(demo_folder() if settings.data == "demo" else Path(settings.data))
        chosen = rows.read_rows(settings, files, model_folder, spec, cache_folder() / "tokens")
        lora, accumulation = settings.lora_parameters, settings.grad_accumulation_steps
        modules = adapters.choose_modules(spec, settings.num_layers, lora.keys)
        if settings.resume_adapter_file:
            adapter = adapters.load(Path(settings.resume_adapter_file), spec, modules, lora.rank, ops)
        else:
            adapter = adapters.initialise(spec, modules, lora.rank, settings.seed, ops)
        start = {name: np.array(value) for name, value in adapter.items()}
        dtype = backends.activation_dtype(ops, backends.stored_dtype(entries))
        model = step.load(model_folder, adapter, lora.rank, lora.effective_scale, dtype, request["product"] == "own")
        rates = mx.array([learning_rate(settings, update, request["updates"]) for update in range(request["updates"])])
        optimizer = {"sgd": optimizers.SGD, "adam": optimizers.Adam, "adamw": optimizers.AdamW}[settings.optimizer](
            learning_rate=lambda update: rates[update], **settings.optimizer_arguments
        )
        updates = batches.updates(
            chosen.train_set,
            chosen.train,
            chosen.limit,
            chosen.widths,
            rows_per_update=settings.rows_per_update,
            seed=settings.seed,
            stop=request["updates"],
        )
        handed = (tuple(mx.array(part) for part in batch) for groups in updates for batch in iterations(groups, accumulation))
        mode, _, checkpoint = request["mode"].partition("-")
        compiled = mode == "compiled"
        count, file = request["updates"] * accumulation, Path(request["adapter"])
        done = step.train(model, optimizer, handed, count, file, compiled=compiled, checkpoint=bool(checkpoint), accumulation=accumulation)
        changes = [np.array(value) - start[name] for name, value in tree_flatten(model.trainable_parameters())]
        return {
            "name": request["mode"],
            "losses": [update["loss"] for update in done],
            "step_seconds": statistics.median(update["seconds"] for update in done),
            "allocator_peak_bytes": measure.allocator_peak_bytes("mlx"),
            "process_peak_bytes": measure.process_peak_bytes(),
            "adapter_change": _norm(changes),
        }


def iterations(groups: Sequence[Group], accumulation: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """An update's rows as `accumulation` batches for mlx-lm: ids, targets and mask [B, T], and what the batch's summed loss is divided by.

    mlx-lm averages the batches' losses and gradients: with N / accumulation as divisor that is the mean over the update's N supervised tokens.
    A batch that no row is left for holds one without supervision.
    """
    rows = [row for group in groups for row in zip(group.ids, group.targets, group.mask, strict=True)]
    divisor = np.array(sum(int(group.mask.sum()) for group in groups) / accumulation, np.float32)
    for part in np.array_split(np.arange(len(rows)), accumulation):
        batch = [rows[i] for i in part] or [(rows[0][0], rows[0][1], np.zeros_like(rows[0][2]))]
        width = max(len(ids) for ids, _, _ in batch)
        ids, targets, mask = (np.stack([np.pad(array, (0, width - len(array))) for array in arrays]) for arrays in zip(*batch, strict=True))
        yield ids, targets, mask, divisor


def differences(losses: Sequence[float], adapter: Path, other: Mapping[str, Any], other_adapter: Path) -> dict[str, float]:
    """How far another run is from ours: its losses at most; its final adapter by Frobenius norm, relative to the adapter and to what training changed of it."""
    from mesp_mlx.stream.safetensors import read_array, read_header

    mine, theirs = ({name: read_array(entry) for name, entry in read_header(file)[0].items()} for file in (adapter, other_adapter))
    if mine.keys() != theirs.keys():
        raise UserError(f"mlx-lm trained other tensors: {', '.join(sorted(mine.keys() ^ theirs.keys())[:4])}")
    apart = _norm([mine[name] - theirs[name] for name in mine])
    return {
        "max_loss_difference": max(abs(a - b) for a, b in zip(losses, other["losses"], strict=True)),
        "adapter_difference": apart / _norm(list(theirs.values())),
        "adapter_change_difference": apart / other["adapter_change"],
    }


def draw(compared: Mapping[str, Any], file: Path) -> None:
    """Losses, their differences and peaks of memory, as a picture."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    runs, per_update = compared["runs"], compared["iterations_per_update"]
    steps = np.arange(1, len(runs[0]["losses"]) + 1) * per_update
    figure, (loss, apart, peak) = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    colours = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    widths = np.linspace(8, 1.5, len(runs))  # curves that lie on one another stay visible
    for i, (run, label) in enumerate(zip(runs, _labels(runs), strict=True)):
        loss.plot(steps, run["losses"], color=colours[i], linewidth=widths[i], label=label, marker="o" if len(steps) < 30 else "")
        if i:
            gaps = np.abs(np.subtract(run["losses"], runs[0]["losses"]))
            apart.plot(steps, np.where(gaps > 0, gaps, np.nan), color=colours[i], label=label, marker="o", markersize=4, linewidth=1)
    loss.set(xlabel="iteration", ylabel="training loss (mean over supervised tokens)", title="Loss")
    apart.set(xlabel="iteration", ylabel=f"|loss − loss of {OURS}|", title=f"Difference from {OURS} (equal losses not shown)", yscale="log")
    low, high = apart.get_ylim()
    apart.set_ylim(low / 3, high * 3)
    for axes in (loss, apart):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    loss.legend()
    places = np.arange(len(runs))[::-1]
    kinds = (0.2, "allocator_peak_bytes", "arrays, by the allocator", 1.0), (-0.2, "process_peak_bytes", "process, by the system", 0.5)
    for offset, field, label, alpha in kinds:
        bars = peak.barh(places + offset, [run[field] / 1e6 for run in runs], 0.38, color=colours[: len(runs)], alpha=alpha)
        peak.bar_label(bars, [f"{run[field] / 1e6:,.0f}" for run in runs], padding=3)
        peak.barh([0], [0], color="black", alpha=alpha * 0.7, label=label)
    peak.set_yticks(places, _labels(runs))
    peak.set(xlabel="MB (10⁶ bytes)", title="Peak memory", xlim=(0, 1.15 * max(run["process_peak_bytes"] for run in runs) / 1e6))
    peak.legend(loc="upper right")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _our_run(log: Path, accumulation: int) -> dict[str, Any]:
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    trained, end = [event for event in events if event["event"] == "train"], events[-1]
    return {
        "name": OURS,
        "losses": [event["train_loss"] for event in trained],
        "step_seconds": statistics.median(accumulation / event["iterations_per_second"] for event in trained),
        "allocator_peak_bytes": end["allocator_peak_bytes"],
        "process_peak_bytes": end["process_peak_bytes"],
    }


def _notes(settings: Settings, product: str, on_cpu: bool) -> list[str]:
    multiplies = {
        "own": "mesp-mlx's product by quantised weights, tile by tile (--mlx-lm-product mlx: MLX's own)",
        "mlx": "MLX's own product, as it does alone",
    }
    notes = [
        "mlx-lm is given our rows and our mask: alone it supervises one padding token after each row, and masks prompts only up to the last turn.",
        f"mlx-lm multiplies with {multiplies[product]}.",
        "Gradients are not clipped, as mlx-lm has no clipping (--grad-clip 0 on our side).",
    ]
    if settings.grad_clip and "grad_clip" in settings.model_fields_set:
        notes[-1] = f"Gradients are not clipped, as mlx-lm has no clipping: grad_clip {settings.grad_clip:g} is not used here."
    if on_cpu:
        if product == "own":
            notes[1] += " It is ten times as fast on this CPU device, and adds some 10 to 20 % to mlx-lm's peaks: see tools/mlx_lm_step.py."
        notes += [
            "No GPU: this is MLX's CPU device, in float32, whose seconds say little about a GPU's.",
            "Its logsumexp, mlx-lm's loss, adds up the vocabulary in one float32: over 49,152 words it is about 1e-4 too low.",
        ]
    return notes


def _table(compared: Mapping[str, Any]) -> list[str]:
    """The comparison as lines of text."""
    runs, per_update = compared["runs"], compared["iterations_per_update"]
    labels = _labels(runs)
    widths = [max(12, len(label)) for label in labels]
    count = len(runs[0]["losses"])
    shown = sorted({round(k) for k in np.linspace(0, count - 1, min(count, PRINTED))})

    def line(title: str, cells: Sequence[str]) -> str:
        return f"{title:<34}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    def row(title: str, field: str, form: str, unit: float = 1.0) -> str:
        return line(title, [format(run[field] / unit, form) if field in run else "" for run in runs])

    return [
        *compared["notes"],
        "",
        line("", labels),
        *(line(f"loss at iteration {(k + 1) * per_update}", [f"{run['losses'][k]:.6f}" for run in runs]) for k in shown),
        row("largest difference of a loss", "max_loss_difference", ".1e"),
        row("final adapters, relative difference", "adapter_difference", ".1e"),
        row("  relative to what changed", "adapter_change_difference", ".1e"),
        row("peak of arrays, MB", "allocator_peak_bytes", ",.1f", 1e6),
        row("peak of the process, MB", "process_peak_bytes", ",.1f", 1e6),
        row("seconds per update (median)", "step_seconds", ".2f"),
    ]


def _labels(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [OURS] + [f"mlx-lm {run['name'].replace('-', ', ')}" for run in runs[1:]]


def _run(command: Sequence[str], environment: Mapping[str, str], doing: str) -> None:
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"it ended with status {done.returncode}; lack of memory?")
        raise UserError(f"{doing}: {last.removeprefix('error: ').removeprefix('compare_mlx_lm: ')}")


def _check(arguments: argparse.Namespace) -> None:
    """Find now what would fail after the runs."""
    mlx_lm_step.require_mlx_lm()
    for file in filter(None, (arguments.json, arguments.plot)):
        if not file.absolute().parent.is_dir() or file.is_dir():
            raise UserError(f"{file} can't be written: there is no folder {file.absolute().parent}, or it is one itself.")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib. Install it: pip install matplotlib.")


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """The flags that are finetune's own, as settings; checked where settings are."""
    flags: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            key, given, value = word[2:].partition("=")
            name = key.replace("-", "_")
            flags[name] = value if given else True
            name = None if given else name
        elif name is None:
            raise UserError(f"{word}: expected a flag before it, as --iters {word}")
        else:
            flags[name], name = word, None
    return {key.removeprefix("no_"): False if key.startswith("no_") and value is True else value for key, value in flags.items()}


def _norm(arrays: Sequence[np.ndarray]) -> float:
    return math.sqrt(math.fsum(float(np.square(array, dtype=np.float64).sum()) for array in arrays))


def _modes(text: str) -> tuple[str, ...]:
    chosen = tuple(word.strip() for word in text.split(","))
    if unknown := [word for word in chosen if word not in MODES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(MODES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
