"""Time and memory of one training step on a random model of a real shape, in a process of its own.

    python tools/bench_step.py --shape qwen2.5-0.5b --seq 256 --batch 1 --rank 8 --dtype float32 --backend mlx --method mesp --json
    python tools/bench_step.py --shape qwen2.5-0.5b --method mesp,mebp-tiled,mebp --rounds 3 --against mlx-lm

SGD on random tokens, all of them supervised. The last line of output is one JSON object: of the one step, or with `results` of all. Methods are those of
`mesp-mlx compare`, and `forward`, a pass without gradients; each is measured in turn, as often as --rounds says, and has the medians of its rounds.
--against mlx-lm adds mlx-lm's own step, eager and compiled, with and without its checkpointing; on a CPU device with our product, because its own is
scalar code there. With more layers than the shape has, its own depth is measured too, and a table shows what depth adds. MLX's Linux wheel links a slow
BLAS: OpenBLAS is put before it where it is installed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_random_model
import openblas

from mesp_mlx.errors import UserError

MLX_LM = {"mlx-lm": [], "mlx-lm compiled": ["--compile"], "mlx-lm checkpointed": ["--grad-checkpoint"]}
MLX_LM["mlx-lm checkpointed, compiled"] = ["--compile", "--grad-checkpoint"]


def main() -> int:
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
    parser.add_argument("--iters", type=positive, default=1, help="steps; the time is their median, the loss the first's")
    parser.add_argument("--rounds", type=positive, default=1, help="times each method is measured, in turn")
    parser.add_argument("--room", type=positive, help="bytes that MLX may run ahead by, instead of what the model's shape says")
    parser.add_argument("--keep-h", action="store_true", help="mesp: keep h = x A of the attention's modules instead of computing it again")
    parser.add_argument("--json", action="store_true", help="only the JSON object on the last line, tables apart")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--variant", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    own = shapes[arguments.shape]["num_hidden_layers"]
    if not arguments.child:
        from mesp_mlx.config import VARIANTS  # and so pydantic, which a measured process does without

        for name in arguments.method:
            if name not in (*VARIANTS, "forward"):
                parser.error(f"--method {name} is none of {', '.join(VARIANTS)}, forward")
    if arguments.backend == "numpy" and arguments.dtype != "float32":
        parser.error("--dtype bfloat16: NumPy has none, use --backend mlx")
    if arguments.backend == "numpy" and arguments.against:
        parser.error("--against mlx-lm: use --backend mlx")
    try:
        if arguments.child:
            from mesp_mlx.memory.measure import small_cache

            with small_cache(arguments.backend):
                print(json.dumps(measure_step(arguments.child, arguments)))
            return 0
        wanted = arguments.layers or own
        depths = ([own] if wanted > own and len(arguments.method) == 1 else []) + [wanted]
        steps = [(name, layers) for name in arguments.method for layers in depths] + [(name, wanted) for name in MLX_LM if arguments.against]
        rounds = [[_in_child(arguments, name, layers) for name, layers in steps] for _ in range(arguments.rounds)]
        results = [_median(measured) for measured in zip(*rounds, strict=True)]
    except (UserError, OSError) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    _print_table(results)
    if len(depths) == 2:
        _print_added(*results[:2])
    if not arguments.json:
        _print_work(results)
    print(json.dumps(results[-1] if len(arguments.method) == 1 and not arguments.against else {"results": results}))
    return 0


def measure_step(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps here and measure this process."""
    import numpy as np

    from mesp_mlx import adapter as adapters
    from mesp_mlx import backend as backends
    from mesp_mlx import optim
    from mesp_mlx.data.group import TILE_TOKENS, Group
    from mesp_mlx.engine import methods
    from mesp_mlx.engine.backprop import forward
    from mesp_mlx.memory import measure
    from mesp_mlx.memory.timeline import phases
    from mesp_mlx.model import work
    from mesp_mlx.model.model import build
    from mesp_mlx.model.spec import load_spec, read_config
    from mesp_mlx.model.stages import Batch
    from mesp_mlx.stream.safetensors import read_folder
    from mesp_mlx.stream.store import Store

    # Not config's Settings, which imports pydantic: this process's peak shouldn't hold it.
    defaults = {"method": "mesp", "tiled_head": False, "grad_checkpoint": False, "seed": 0, "mezo_perturbations": 1, "mezo_epsilon": 1e-3, "grad_clip": 0.0}
    settings: Any = SimpleNamespace(**defaults | arguments.variant)
    (name,) = arguments.method
    backend = backends.choose(arguments.backend)
    dtype = backend.arrays.float32
    if arguments.dtype == "bfloat16":
        import mlx.core as mx

        dtype = mx.bfloat16
    spec = load_spec(read_config(folder))
    modules, rows = adapters.choose_modules(spec), min(arguments.batch, max(1, TILE_TOKENS // arguments.seq))
    adapter = adapters.initialise(spec, modules, arguments.rank, 0, backend)
    model = build(spec, backend, 20.0, rows * arguments.seq, dtype, settings.method, settings.tiled_head, arguments.room, arguments.keep_h)
    optimizer = optim.make("sgd", {}, backend)
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
    losses, seconds, marks = [], [], []

    def mark(phase: str) -> None:
        marks.append((phase, time.perf_counter()))

    watch = phases(model, settings.method, mark, lambda: marks[-1][0] if marks else None)
    with Store(read_folder(folder), spec, backend, settings.method == "backprop", watch) as store:
        for step in range(arguments.iters):
            started = time.perf_counter()
            marks.clear()
            if name == "forward":
                store.expect(model.forward_order())
                states = forward(model, store, adapter, batches)
                with store.open(model.head) as w:
                    loss = sum(model.head.loss(w, states, batches, gradient=False)[0])
            else:
                loss, gradients = methods.loss_and_gradients(settings, step, model, store, adapter, batches)
                mark("update")
                optimizer.apply(adapter, gradients, 1e-5)
                del gradients
            losses.append(loss / supervised)
            seconds.append(time.perf_counter() - started)
        bytes_read = store.bytes_read
    adapter_bytes = sum(array.nbytes for array in adapter.values())
    counted = work.of_update(spec, name, arguments.batch, arguments.seq, arguments.rank)
    exact = settings.method in ("mesp", "mebp", "backprop") and name != "forward"
    checkpointed = exact and settings.method != "backprop"
    state_bytes = arguments.batch * arguments.seq * spec.hidden_size * (2 if arguments.dtype == "bfloat16" else 4)
    return {
        "loss": losses[0],
        "step_seconds": statistics.median(seconds),
        "phase_seconds": _phase_seconds(marks, started + seconds[-1]),
        "allocator_peak_bytes": measure.allocator_peak_bytes(arguments.backend),
        "process_peak_bytes": measure.process_peak_bytes(),
        "shape": arguments.shape,
        "layers": spec.num_layers,
        "seq": arguments.seq,
        "batch": arguments.batch,
        "rank": arguments.rank,
        "dtype": arguments.dtype,
        "backend": arguments.backend,
        "method": name,
        "iters": arguments.iters,
        "adapter_bytes": adapter_bytes,
        "gradient_bytes": adapter_bytes if exact else 0,
        "checkpoint_bytes": spec.num_layers * state_bytes if checkpointed else 0,
        "state_bytes": state_bytes,
        "bytes_read_per_step": bytes_read // arguments.iters,
        "weight_products_per_token": counted.weights // (arguments.batch * arguments.seq),
        "flops": counted.flops,
    }


def _phase_seconds(marks: list[tuple[str, float]], end: float) -> dict[str, float]:
    """Seconds of the last step, by phase."""
    times = dict.fromkeys((phase for phase, _ in marks), 0.0)
    for (phase, start), after in zip(marks, [*(at for _, at in marks[1:]), end], strict=True):
        times[phase] += after - start
    return times


def _in_child(arguments: argparse.Namespace, name: str, layers: int) -> dict[str, Any]:
    from mesp_mlx.config import VARIANTS, cache_folder

    config = make_random_model.SHAPES[arguments.shape] | {"num_hidden_layers": layers}
    folder = cache_folder() / "bench" / f"{arguments.shape}-{layers}-layers-{make_random_model.FORMAT}"
    if not (folder / "config.json").is_file():
        print(f"writing a random model of {layers} layers into the cache", file=sys.stderr)
        make_random_model.make(config, folder)
    environment = os.environ | (openblas.environment() if arguments.backend == "mlx" else {})
    chosen = {key: getattr(arguments, key) for key in ("seq", "batch", "rank", "dtype", "iters")}
    flags = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    if name in MLX_LM:
        command = [str(Path(__file__).with_name("mlx_lm_step.py")), "--model", str(folder), *flags, *MLX_LM[name], "--own-product"]
    else:
        command = [__file__, "--child", str(folder), "--shape", arguments.shape, "--method", name, "--backend", arguments.backend, *flags]
        command += ["--variant", json.dumps(VARIANTS.get(name, {}))]
        command += (["--room", str(arguments.room)] if arguments.room else []) + (["--keep-h"] if arguments.keep_h else [])
    done = subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1]) | {"method": name, "layers": layers}


def _median(measured: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The first round's result, with the medians of all rounds' times and the largest of their peaks."""
    peaks = [key for key in ("allocator_peak_bytes", "process_peak_bytes") if measured[0][key] is not None]
    seconds = [result["step_seconds"] for result in measured]
    return measured[0] | {key: max(result[key] for result in measured) for key in peaks} | {"step_seconds": statistics.median(seconds), "rounds": seconds}


def _print_table(results: list[dict[str, Any]]) -> None:
    """What each peak is made of, in MB, and the time of a step."""
    columns = ("adapter_bytes", "gradient_bytes", "checkpoint_bytes", "allocator_peak_bytes", "process_peak_bytes")
    names = [f"{result['layers']} layers" + ("" if result["method"] == "mesp" else f" {result['method']}") for result in results]
    width = max(12, *map(len, names))
    print(f"{'MB':>{width}}" + "".join(f"{column.removesuffix('_bytes').replace('_', ' '):>17}" for column in columns) + f"{'seconds':>10}")
    for name, result in zip(names, results, strict=True):
        sizes = (_megabytes(result.get(column, 0)) for column in columns)
        print(f"{name:>{width}}" + "".join(f"{size:>17}" for size in sizes) + f"{result['step_seconds']:>10.2f}")


def _print_added(early: dict[str, Any], late: dict[str, Any]) -> None:
    """What the deeper of two models adds."""
    adapter, gradient, checkpoint = (late[f"{key}_bytes"] - early[f"{key}_bytes"] for key in ("adapter", "gradient", "checkpoint"))
    if late["allocator_peak_bytes"] is not None:
        added = late["allocator_peak_bytes"] - early["allocator_peak_bytes"]
        held = adapter + max(gradient, checkpoint)  # backward gives up a layer's checkpoint as it gains its gradients
        print(f"added: {adapter / 1e6:.2f} MB adapter, {gradient / 1e6:.2f} gradients, {checkpoint / 1e6:.2f} checkpoints, {added / 1e6:.2f} allocator's peak")
        print(f"added beyond adapters and the larger of gradients and checkpoints: {(added - held) / 1e6:.2f} MB")


def _print_work(results: list[dict[str, Any]]) -> None:
    """Products and floating-point operations of each of our methods, and where its time goes; peaks and times against the first."""
    first = results[0]
    for result in results:
        line = f"{result['method']}: loss {result['loss']:.4f}, {result['step_seconds']:.2f} s ({result['step_seconds'] / first['step_seconds']:.2f} x)"
        if first["allocator_peak_bytes"] is not None:
            line += f", peak {result['allocator_peak_bytes'] / 1e6:.1f} MB"
            below = 1 - first["allocator_peak_bytes"] / result["allocator_peak_bytes"]
            line += f" ({first['method']} is {below:.1%} below)" if below > 0 else ""
        if "flops" in result:
            line += f"; {result['weight_products_per_token'] / 1e6:.0f} M weight products a token, {result['flops'] / 1e9:.0f} GFLOP"
            line += "; " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in result["phase_seconds"].items())
        print(line)


def _megabytes(size: int | None) -> str:
    return "not counted" if size is None else f"{size / 1e6:.2f}"


def positive(text: str) -> int:
    """A flag's whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
