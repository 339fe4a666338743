"""Peaks of structured stages beside generic ones: a step on the first layers of a random model of each family's real shape.

    python tools/bench_families.py                                  # all of them, 4 layers, 512 tokens; recipes/families/RESULTS.md
    python tools/bench_families.py --shapes gemma-2-2b,gpt2 --layers 2 --seq 64 --out DIR

Each step runs in a process of its own on MLX, float32, rank 8 on all linears of a layer, one row, SGD, default choices, beside its plan. The generic step
is autodiff's of mlx-lm's own layers, one at a time, from the same files; its products with packed weights are ours on a CPU device, as its own are scalar
code there. Each is held back at its own plan's limit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_random_model
import openblas
from step_plan import positive

from mesp_mlx.errors import UserError
from mesp_mlx.model.shapes import SHAPES

OUT = Path(__file__).resolve().parents[1] / "recipes" / "families"
STAGES = ("structured", "generic")
WITHOUT = ("opt",)  # model types that mlx-lm lacks
PROMISED = 0.6  # of the generic stage's peak
SCALE, RANK = 20.0, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help="names, with commas between; default: one of each family")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--seq", type=positive, default=512)
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    parser.add_argument("--again", action="store_true", help="measure anew what is known already")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "STAGES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(Path(arguments.child[0]), arguments.child[1], arguments.seq)))
        return 0
    names = arguments.shapes.split(",") if arguments.shapes else one_each()
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"--shapes: no shape is called {unknown[0]}; there are {', '.join(SHAPES)}")
    file = arguments.out / "results.json"
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        key = f"{name}, {arguments.layers} layers, {arguments.seq} tokens"
        if key not in rows or arguments.again:
            try:
                rows[key] = compare(name, arguments.layers, arguments.seq)
            except UserError as error:
                print(f"bench_families: {error}", file=sys.stderr)
                return 2
            file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            (arguments.out / "RESULTS.md").write_text(report(rows), encoding="utf-8")
            print(line(key, rows[key]), flush=True)
    print(f"written to {arguments.out}")
    return 0


def one_each() -> list[str]:
    """The first shape of each model type."""
    found: dict[str, str] = {}
    for name, config in SHAPES.items():
        found.setdefault(config["model_type"], name)
    return list(found.values())


def compare(name: str, layers: int, seq: int) -> dict[str, Any]:
    """Write the model, and measure both steps on it; the model is deleted."""
    config = shortened(SHAPES[name], layers)
    kinds = STAGES[:1] if config["model_type"] in WITHOUT else STAGES
    result: dict[str, Any] = {"model_type": config["model_type"]}
    with tempfile.TemporaryDirectory() as made:
        folder = make_random_model.make(config, Path(made), mode="affine")
        for kind in kinds:
            print(f"{name}: {kind}", file=sys.stderr, flush=True)
            command = [sys.executable, __file__, "--child", str(folder), kind, "--seq", str(seq)]
            done = subprocess.run(command, env=os.environ | openblas.environment(), stdout=subprocess.PIPE, text=True)
            result[kind] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    return result


def shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """A config with so many layers."""
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    cut = {key: value[:layers] for key, value in config.items() if isinstance(value, list) and len(value) == config[depth]}
    pattern = {key: min(config[key], layers) for key in ("sliding_window_pattern",) if key in config}
    return {**config, **cut, **pattern, depth: layers}


def measure(folder: Path, kind: str, seq: int) -> dict[str, Any]:
    """One update here: the allocator's peak, what was planned, and the loss."""
    import mlx.core as mx
    import numpy as np

    from mesp_mlx import adapter as adapters
    from mesp_mlx import ops, optim
    from mesp_mlx.data.group import Group
    from mesp_mlx.engine import methods
    from mesp_mlx.memory import measure as measuring
    from mesp_mlx.memory.plan import make
    from mesp_mlx.memory.strategy import Strategy
    from mesp_mlx.memory.workload import Workload
    from mesp_mlx.model import generic, generic_measured, model
    from mesp_mlx.model.spec import load_spec, read_config
    from mesp_mlx.model.stages import Batch
    from mesp_mlx.stream.safetensors import read_folder
    from mesp_mlx.stream.store import Store

    config, entries, strategy = read_config(folder), read_folder(folder), Strategy()
    settings: Any = SimpleNamespace(method="mesp", tiled_head=False, grad_checkpoint=False, seed=0, grad_clip=0.0)
    shapes = {name: entry.shape for name, entry in entries.items()}
    spec: Any = generic.load_spec(config, str(folder / "config.json"), shapes) if kind == "generic" else load_spec(config)
    modules = adapters.choose_modules(spec)
    with measuring.small_cache("mlx"):
        adapter = adapters.initialise(spec, modules, RANK, 0, ops)
        load = Workload(spec, tuple(modules), rank=RANK, moments=0, clip=False, width=seq)
        plan = make(generic_measured.measure(load) if kind == "generic" else load, strategy, 0)
        if kind == "generic":
            built = generic.build(spec, entries, ops, SCALE, modules, RANK, strategy, limit_bytes=plan.limit_bytes)
        else:
            built = model.build(spec, ops, SCALE, strategy, limit_bytes=plan.limit_bytes)
        tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (1, seq + 1), dtype=np.int32)
        batch = Batch(Group(tokens[:, :-1], tokens[:, 1:], np.ones((1, seq), bool), (0,), (seq,)))
        optimizer = optim.make("sgd", {}, ops)
        mx.reset_peak_memory()
        with Store(entries, spec, ops) as store:
            optimizer.start_update()
            loss, finish = methods.update(settings, 0, built, store, adapter, [batch], lambda name, grad: optimizer.apply(adapter, name, grad, 1e-5))
            finish()
        peak = measuring.allocator_peak_bytes("mlx")
    return {"loss": loss / seq, "allocator_peak_bytes": peak, "predicted_bytes": plan.arrays_peak_bytes}


def report(rows: dict[str, Any]) -> str:
    """The table, in Markdown."""
    head = ["step", "model_type", "structured MB", "predicted", "generic MB", "predicted", "structured / generic"]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * 2 + ["---:"] * 5)] + [line(*row) for row in rows.items()]
    about = (__doc__ or "").split("\n\n")
    parts = ["# Structured and generic stages", f"{about[0]} {about[-1].strip()} Made by `python tools/bench_families.py`.", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def line(key: str, row: dict[str, Any]) -> str:
    """A row of the table."""
    peaks = [row.get(kind) for kind in STAGES]
    cells = [cell for found in peaks for cell in (("", "") if not found else (_mb(found["allocator_peak_bytes"]), _mb(found["predicted_bytes"])))]
    ours, theirs = peaks
    ratio = ours["allocator_peak_bytes"] / theirs["allocator_peak_bytes"] if ours and theirs else None
    cells.append("" if ratio is None else f"{ratio:.2f}" if ratio <= PROMISED else f"**{ratio:.2f}**")
    return f"| {' | '.join([key, row['model_type'], *cells])} |"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


if __name__ == "__main__":
    sys.exit(main())
