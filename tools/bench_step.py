"""Time and memory of one training step on a random model of a real shape, in a process of its own, beside what the plan says.

    python tools/bench_step.py --shape qwen2.5-0.5b --seq 256 --batch 1 --rank 8 --dtype float32 --backend mlx --method mesp --json
    python tools/bench_step.py --shape qwen2.5-0.5b --method mesp,mebp-tiled,mebp --rounds 3 --against mlx-lm
    python tools/bench_step.py --shape qwen2.5-3b --memory least --adapters file --optimizer adam
    python tools/bench_step.py --shape llama-3-70b --layers 4 --seq 512 --memory least --plan-layers 80

Random tokens, all supervised, nothing clipped. The last line of output is one JSON object: of the one step, or with `results` of all. Methods are those of
`mesp-mlx compare`, and `forward`, a pass without gradients; each is measured in turn, as often as --rounds says, and has the medians of its rounds.
--against mlx-lm adds mlx-lm's own step, eager and compiled, with and without its checkpointing; on a CPU device with our product, because its own is
scalar code there. With more layers than the shape has, its own depth is measured too, and a table shows what depth adds. MLX's Linux wheel links a slow
BLAS: OpenBLAS is put before it where it is installed.

--memory says how memory is spent: `default` as memory.strategy's Strategy() does, `least` and `fastest` are the ends of what memory.choose knows, and a size
is the most that arrays may take, for which it finds the fastest plan. Each field of Strategy can be set by hand besides. --plan-layers plans other depths
alike, and measures nothing of them.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_random_model
import openblas
import step_plan
from step_plan import positive

from mesp_mlx.errors import UserError
from mesp_mlx.memory.strategy import Strategy

MLX_LM = {"mlx-lm": [], "mlx-lm compiled": ["--compile"], "mlx-lm checkpointed": ["--grad-checkpoint"]}
MLX_LM["mlx-lm checkpointed, compiled"] = ["--compile", "--grad-checkpoint"]
SCALE, LEARNING_RATE = 20.0, 1e-5


def main() -> int:
    arguments = parse()
    try:
        if arguments.child:
            print(json.dumps(measure_step(arguments.child, arguments)))
            return 0
        own = make_random_model.SHAPES[arguments.shape]["num_hidden_layers"]
        wanted = arguments.layers or own
        depths = ([own] if wanted > own and len(arguments.method) == 1 else []) + [wanted]
        steps = [(name, layers) for name in arguments.method for layers in depths] + [(name, wanted) for name in MLX_LM if arguments.against]
        rounds = [[_in_child(arguments, name, layers) for name, layers in steps] for _ in range(arguments.rounds)]
        results = [_median(measured) for measured in zip(*rounds, strict=True)]
        plans = [_planned(arguments, layers) for layers in arguments.plan_layers]
    except (UserError, OSError) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    _print_table([*results, *plans])
    if len(depths) == 2:
        _print_added(*results[:2])
    if not arguments.json:
        _print_work(results)
    last = results[-1] if len(arguments.method) == 1 and not arguments.against else {"results": results}
    print(json.dumps(last | ({"plans": plans} if plans else {})))
    return 0


def step(words: Sequence[str], name: str | None = None) -> dict[str, Any]:
    """The result of the one step that a command line asks for, or of mlx-lm's step of that name: what other tools call.

    Raises:
        UserError: the shape can't be used, or its plan does not fit.
    """
    arguments = parse(words)
    layers = arguments.layers or make_random_model.SHAPES[arguments.shape]["num_hidden_layers"]
    return _median([_in_child(arguments, name or arguments.method[0], layers) for _ in range(arguments.rounds)])


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's values. Those of Strategy's fields that were not given are None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = make_random_model.SHAPES
    parser.add_argument("--shape", required=True, choices=sorted(shapes), metavar="NAME", help=", ".join(sorted(shapes)))
    parser.add_argument("--layers", type=positive, help="instead of the shape's own depth")
    parser.add_argument("--seq", type=positive, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=positive, default=1, help="rows of the update")
    parser.add_argument("--rank", type=positive, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations; bfloat16 on MLX")
    parser.add_argument("--backend", choices=("mlx", "numpy"), default="mlx")
    parser.add_argument("--method", type=lambda text: text.split(","), default=["mesp"], metavar="NAME,…", help="of `mesp-mlx compare`'s, and forward")
    parser.add_argument("--against", choices=("mlx-lm",), help="measure its step too")
    parser.add_argument("--optimizer", choices=sorted(step_plan.MOMENTS), default="sgd")
    parser.add_argument("--iters", type=positive, default=1, help="steps; the time is their median, the loss the first's")
    parser.add_argument("--rounds", type=positive, default=1, help="times each method is measured, in turn")
    step_plan.add_flags(parser)
    parser.add_argument("--plan-layers", type=step_plan.depths, default=[], metavar="N,…", help="print the plan of so many layers too")
    parser.add_argument("--limit", type=positive, help="bytes at which MLX waits before it allocates more, instead of what the plan says")
    parser.add_argument("--keep-h", action="store_true", help="mesp: keep h = x A of the attention's modules instead of computing it again")
    parser.add_argument("--json", action="store_true", help="only the JSON object on the last line, tables apart")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--given", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if not arguments.child:
        from mesp_mlx.config import VARIANTS  # and so pydantic, which a measured process does without

        for name in arguments.method:
            if name not in (*VARIANTS, "forward"):
                parser.error(f"--method {name} is none of {', '.join(VARIANTS)}, forward")
    if arguments.backend == "numpy" and arguments.dtype != "float32":
        parser.error("--dtype bfloat16: NumPy has none, use --backend mlx")
    if arguments.backend == "numpy" and arguments.against:
        parser.error("--against mlx-lm: use --backend mlx")
    if arguments.against and arguments.optimizer != "sgd":
        parser.error("--against mlx-lm: use --optimizer sgd")
    return arguments


def measure_step(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps here and measure this process."""
    import numpy as np

    from mesp_mlx import adapter as adapters
    from mesp_mlx import backend as backends
    from mesp_mlx import optim
    from mesp_mlx.data.group import Group
    from mesp_mlx.engine import methods
    from mesp_mlx.engine.backprop import forward
    from mesp_mlx.memory import measure
    from mesp_mlx.memory.timeline import phases
    from mesp_mlx.model.model import build
    from mesp_mlx.model.spec import load_spec, read_config
    from mesp_mlx.model.stages import Batch
    from mesp_mlx.stream.run_file import InMemory, RunFile
    from mesp_mlx.stream.safetensors import read_folder
    from mesp_mlx.stream.shelves import shelves
    from mesp_mlx.stream.store import ALL_STAGES, Store

    # Not config's Settings, which imports pydantic: this process's peak shouldn't hold it.
    defaults = {"method": "mesp", "tiled_head": False, "grad_checkpoint": False, "seed": 0, "mezo_perturbations": 1, "mezo_epsilon": 1e-3, "grad_clip": 0.0}
    settings: Any = SimpleNamespace(**defaults | arguments.given["settings"])
    (name,), strategy = arguments.method, Strategy(**arguments.given["strategy"])
    backend = backends.choose(arguments.backend)
    dtype = backend.arrays.float32
    if arguments.dtype == "bfloat16":
        import mlx.core as mx

        dtype = mx.bfloat16
    optim.make(arguments.optimizer, {}, backend)  # imports MLX's
    spec = load_spec(read_config(folder))
    modules, rows = adapters.choose_modules(spec), min(arguments.batch, max(1, strategy.group_tokens // arguments.seq))
    losses, seconds, cpu_seconds, marks = [], [], [], []

    def mark(phase: str) -> None:
        marks.append((phase, time.perf_counter()))

    def apply(tensor: str, gradient: Any) -> None:
        optimizer.apply(adapter, tensor, gradient, LEARNING_RATE)

    with ExitStack() as stack:
        stack.enter_context(measure.small_cache(arguments.backend, arguments.given["keep_bytes"]))
        base_bytes = measure.process_now_bytes()
        file = stack.enter_context(closing(RunFile(folder, arguments.given["file_bytes"], backend))) if strategy.needs_file else None
        places = shelves(strategy, file)
        adapter = adapters.initialise(spec, modules, arguments.rank, 0, backend, places.adapter)
        limit = arguments.limit or arguments.given["limit_bytes"]
        model = build(spec, backend, SCALE, strategy, dtype, settings.method, settings.tiled_head, limit, arguments.keep_h)
        optimizer = optim.make(arguments.optimizer, {}, backend, places.adapter)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, spec.vocab_size, (arguments.batch, arguments.seq + 1), dtype=np.int32)
        parts = [tokens[start : start + rows] for start in range(0, arguments.batch, rows)]
        # data.batches would make the same groups, but imports what reads files.
        everywhere = [np.ones((len(part), arguments.seq), bool) for part in parts]
        batches = [
            Batch(Group(part[:, :-1], part[:, 1:], mask, tuple(range(len(part))), (arguments.seq,) * len(part)))
            for part, mask in zip(parts, everywhere, strict=True)
        ]
        supervised = tokens[:, 1:].size
        watch = phases(model, settings.method, mark, lambda: marks[-1][0] if marks else None)
        resident = ALL_STAGES if settings.method == "backprop" else model.resident_stages()
        store = stack.enter_context(Store(read_folder(folder), spec, backend, resident, strategy.prefetch, strategy.hold, watch))
        for number in range(arguments.iters):
            started, cpu_started = time.perf_counter(), time.process_time()
            marks.clear()
            if name == "forward":
                store.expect(model.forward_order())
                states = forward(model, store, adapter, batches, places)
                with store.open(model.head) as w:
                    loss = sum(model.head.loss(w, states, batches, places.states, gradient=False)[0])
            else:
                optimizer.start_update()
                loss, finish = methods.update(settings, number, model, store, adapter, batches, apply, places)
                mark("update")
                finish()
                del finish  # which holds the gradients
            losses.append(loss / supervised)
            seconds.append(time.perf_counter() - started)
            cpu_seconds.append(time.process_time() - cpu_started)
        used, often = file or InMemory(), arguments.iters
        return {
            "loss": losses[0],
            "step_seconds": statistics.median(seconds),
            "cpu_seconds": statistics.median(cpu_seconds),
            "phase_seconds": _phase_seconds(marks, started + seconds[-1]),
            "allocator_peak_bytes": measure.allocator_peak_bytes(arguments.backend),
            "process_peak_bytes": measure.process_peak_bytes(),
            "base_bytes": base_bytes,
            **{key: getattr(arguments, key) for key in ("shape", "seq", "batch", "rank", "dtype", "backend", "optimizer", "iters")},
            "evaluations_per_step": model.evaluate.count / often,
            "bytes_read_per_step": store.bytes_read // often,
            "loads_per_step": {
                kind: max((count for module, count in store.loads.items() if part in module), default=0) / often
                for kind, part in (("attention", ".self_attn."), ("mlp", ".mlp."))
            },
            "file_written_per_step": used.bytes_written // often,
            "file_read_per_step": used.bytes_read // often,
            "file_peak_bytes": used.peak_bytes,
        }


def _phase_seconds(marks: list[tuple[str, float]], end: float) -> dict[str, float]:
    """Seconds of the last step, by phase."""
    times = dict.fromkeys((phase for phase, _ in marks), 0.0)
    for (phase, start), after in zip(marks, [*(at for _, at in marks[1:]), end], strict=True):
        times[phase] += after - start
    return times


def _in_child(arguments: argparse.Namespace, name: str, layers: int) -> dict[str, Any]:
    """What a process of its own measures, and, of our methods, what the plan says."""
    from mesp_mlx.config import VARIANTS

    folder = model_folder(arguments.shape, layers)
    environment = os.environ | (openblas.environment() if arguments.backend == "mlx" else {})
    chosen = {key: getattr(arguments, key) for key in ("seq", "batch", "rank", "dtype", "iters")}
    flags = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    plan = None
    if name in MLX_LM:
        command = [str(Path(__file__).with_name("mlx_lm_step.py")), "--model", str(folder), *flags, *MLX_LM[name], "--own-product"]
    else:
        plan = step_plan.plan_of(arguments, name, layers)
        given = {"settings": VARIANTS.get(name, {}), "strategy": dataclasses.asdict(plan.strategy)}
        given |= {"limit_bytes": plan.limit_bytes, "keep_bytes": plan.keep_bytes, "file_bytes": plan.file_bytes}
        command = [__file__, "--child", str(folder), "--shape", arguments.shape, "--method", name, "--backend", arguments.backend, *flags]
        command += ["--optimizer", arguments.optimizer, "--given", json.dumps(given)]
        command += (["--limit", str(arguments.limit)] if arguments.limit else []) + (["--keep-h"] if arguments.keep_h else [])
    done = subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    measured = json.loads(done.stdout.splitlines()[-1]) | {"method": name, "layers": layers}
    if plan is None:
        return measured
    plan = dataclasses.replace(plan, base_bytes=measured["base_bytes"])
    return measured | step_plan.of_plan(plan, name) | ({"limit_bytes": arguments.limit} if arguments.limit else {})


def model_folder(shape: str, layers: int) -> Path:
    """The random model of a shape in the cache, written where it is missing.

    Raises:
        UserError: the shape can't be used, or the disk is too full.
    """
    from mesp_mlx.config import cache_folder

    folder = cache_folder() / "bench" / f"{shape}-{layers}-layers-{make_random_model.FORMAT}"
    if not (folder / "config.json").is_file():
        print(f"writing a random model of {layers} layers into the cache", file=sys.stderr)
        make_random_model.make(make_random_model.SHAPES[shape] | {"num_hidden_layers": layers}, folder)
    return folder


def _planned(arguments: argparse.Namespace, layers: int) -> dict[str, Any]:
    """The plan of another depth."""
    name = arguments.method[0]
    return step_plan.of_plan(step_plan.plan_of(arguments, name, layers), name) | {"method": name, "layers": layers, "planned": True}


def _median(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first round's result, with the medians of all rounds' times and the largest of their peaks."""
    peaks = [key for key in ("allocator_peak_bytes", "process_peak_bytes") if measured[0][key] is not None]
    seconds = [result["step_seconds"] for result in measured]
    found = measured[0] | {key: max(result[key] for result in measured) for key in peaks}
    found |= {key: statistics.median(result[key] for result in measured) for key in ("step_seconds", "cpu_seconds") if key in measured[0]}
    if "allocator_peak_bytes" in peaks and "arrays_peak_predicted_bytes" in found:
        found["predicted_over_measured"] = found["arrays_peak_predicted_bytes"] / found["allocator_peak_bytes"]
    return found | {"rounds": seconds}


def _print_table(results: list[dict[str, Any]]) -> None:
    """What each peak is made of, in MB, what the plan said of it, and the time of a step."""
    columns = {"adapter": "adapter", "gradient": "gradient", "checkpoint": "checkpoint", "arrays_peak_predicted": "predicted peak"}
    columns |= {"allocator_peak": "allocator peak", "process_peak": "process peak"}
    names = [f"{result['layers']} layers" + ("" if result["method"] == "mesp" else f" {result['method']}") for result in results]
    names = [name + (", planned" if "planned" in result else "") for name, result in zip(names, results, strict=True)]
    width = max(12, *map(len, names))
    print(f"{'MB':>{width}}" + "".join(f"{column:>16}" for column in columns.values()) + f"{'seconds':>10}")
    for name, result in zip(names, results, strict=True):
        missing = "" if "planned" in result or result["method"] in MLX_LM else "not counted"
        sizes = (missing if (size := result.get(f"{column}_bytes")) is None else f"{size / 1e6:.2f}" for column in columns)
        seconds = f"{result['step_seconds']:>10.2f}" if "step_seconds" in result else ""
        print((f"{name:>{width}}" + "".join(f"{size:>16}" for size in sizes) + seconds).rstrip())


def _print_added(early: dict[str, Any], late: dict[str, Any]) -> None:
    """What the deeper of two models adds."""
    adapter, gradient, checkpoint = (late[f"{key}_bytes"] - early[f"{key}_bytes"] for key in ("adapter", "gradient", "checkpoint"))
    if late["allocator_peak_bytes"] is not None:
        added = late["allocator_peak_bytes"] - early["allocator_peak_bytes"]
        held = adapter + max(gradient, checkpoint)  # backward gives up a layer's checkpoint as it gains its gradients
        print(f"added: {adapter / 1e6:.2f} MB adapter, {gradient / 1e6:.2f} gradients, {checkpoint / 1e6:.2f} checkpoints, {added / 1e6:.2f} allocator's peak")
        print(f"added beyond adapters and the larger of gradients and checkpoints: {(added - held) / 1e6:.2f} MB")


def _print_work(results: list[dict[str, Any]]) -> None:
    """Of each of our methods what it multiplies, reads and writes, and where its time goes; peaks and times against the first."""
    first = results[0]
    for result in results:
        line = f"{result['method']}: loss {result['loss']:.4f}, {result['step_seconds']:.2f} s ({result['step_seconds'] / first['step_seconds']:.2f} x)"
        if first["allocator_peak_bytes"] is not None:
            line += f", peak {result['allocator_peak_bytes'] / 1e6:.1f} MB"
            line += f" (predicted {result['predicted_over_measured']:.3f} of it)" if "predicted_over_measured" in result else ""
            below = 1 - first["allocator_peak_bytes"] / result["allocator_peak_bytes"]
            line += f" ({first['method']} is {below:.1%} below)" if below > 0 else ""
        print(line)
        if "flops" in result:
            print(f"  {result['weight_products_per_token'] / 1e6:.0f} M weight products a token, {result['flops'] / 1e9:.0f} GFLOP; ", end="")
            print(", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in result["phase_seconds"].items()))
            print(f"  {result['evaluations_per_step']:.0f} evaluations; MLX's limit {result['limit_bytes'] / 1e6:.1f} MB; ", end="")
            print(f"read {result['bytes_read_per_step'] / 1e6:.1f} MB of weights; ", end="")
            print(f"the run's file: written {result['file_written_per_step'] / 1e6:.1f}, read {result['file_read_per_step'] / 1e6:.1f} MB")
            print("  " + ", ".join(f"{field} {value}" for field, value in result["strategy"].items()))


if __name__ == "__main__":
    sys.exit(main())
