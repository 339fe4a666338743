"""Time and memory of one training step on a random model of a real shape, in a process of its own.

    python tools/bench_step.py --shape qwen2.5-0.5b --seq 256 --batch 1 --rank 8 --dtype float32 --backend mlx --method mesp --json

SGD on random tokens, all of them supervised. The last line of output is one JSON object. With more layers than the shape has, its own depth is
measured too, and a table shows what depth adds. MLX's Linux wheel links a slow BLAS: OpenBLAS is put before it where it is installed.
"""

import argparse
import glob
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from mesp_mlx.errors import UserError

OPENBLAS = ("/usr/lib/*/openblas-pthread/libopenblas.so.0", "/usr/lib/*/libopenblas.so.0", "/usr/lib64/libopenblas*.so.0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = _tool("make_random_model").SHAPES
    parser.add_argument("--shape", required=True, choices=sorted(shapes), metavar="NAME", help=", ".join(sorted(shapes)))
    parser.add_argument("--layers", type=_positive, help="instead of the shape's own depth")
    parser.add_argument("--seq", type=_positive, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=_positive, default=1, help="rows of the update")
    parser.add_argument("--rank", type=_positive, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations; bfloat16 on MLX")
    parser.add_argument("--backend", choices=("mlx", "numpy"), default="mlx")
    parser.add_argument("--method", choices=("mesp",), default="mesp")
    parser.add_argument("--iters", type=_positive, default=1, help="steps; the time is their median, the loss the first's")
    parser.add_argument("--json", action="store_true", help="only the JSON object on the last line, tables apart")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    own = shapes[arguments.shape]["num_hidden_layers"]
    if arguments.backend == "numpy" and arguments.dtype != "float32":
        parser.error("--dtype bfloat16: NumPy has none, use --backend mlx")
    try:
        if arguments.child:
            from mesp_mlx.memory.measure import small_cache

            with small_cache(arguments.backend):
                print(json.dumps(measure_step(arguments.child, arguments)))
            return 0
        wanted = arguments.layers or own
        results = [_in_child(arguments, layers) for layers in ([own] if wanted > own else []) + [wanted]]
    except (UserError, OSError) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    _print_table(results)
    if not arguments.json:
        print(f"one step: {results[-1]['step_seconds']:.2f} s, loss {results[-1]['loss']:.4f}")
    print(json.dumps(results[-1]))
    return 0


def measure_step(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps here and measure this process."""
    import numpy as np

    from mesp_mlx import adapter as adapters
    from mesp_mlx import backend as backends
    from mesp_mlx import optim
    from mesp_mlx.data.group import TILE_TOKENS, Group
    from mesp_mlx.engine.backprop import loss_and_gradients
    from mesp_mlx.engine.sink import HeldSink
    from mesp_mlx.memory import measure
    from mesp_mlx.model.model import build
    from mesp_mlx.model.spec import load_spec, read_config
    from mesp_mlx.model.stages import Batch
    from mesp_mlx.stream.safetensors import read_folder
    from mesp_mlx.stream.store import Store

    backend = backends.choose(arguments.backend)
    dtype = backend.arrays.float32
    if arguments.dtype == "bfloat16":
        import mlx.core as mx

        dtype = mx.bfloat16
    spec = load_spec(read_config(folder))
    modules, rows = adapters.choose_modules(spec), min(arguments.batch, max(1, TILE_TOKENS // arguments.seq))
    adapter = adapters.initialise(spec, modules, arguments.rank, 0, backend)
    model, optimizer = build(spec, backend, 20.0, rows * arguments.seq, dtype), optim.make("sgd", {}, backend)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, spec.vocab_size, (arguments.batch, arguments.seq + 1), dtype=np.int32)
    parts = [tokens[start : start + rows] for start in range(0, arguments.batch, rows)]
    # data.batches would make the same groups, but imports what reads files, which this process's peak shouldn't hold.
    everywhere = [np.ones((len(part), arguments.seq), bool) for part in parts]
    batches = [
        Batch(Group(part[:, :-1], part[:, 1:], mask, tuple(range(len(part))), (arguments.seq,) * len(part)))
        for part, mask in zip(parts, everywhere, strict=True)
    ]
    losses, seconds = [], []
    with Store(read_folder(folder), spec, backend) as store:
        for _ in range(arguments.iters):
            started = time.perf_counter()
            sink = HeldSink(backend)
            losses.append(loss_and_gradients(model, store, adapter, batches, sink) / tokens[:, 1:].size)
            gradients, _ = sink.finish(tokens[:, 1:].size)
            optimizer.apply(adapter, gradients, 1e-3)
            del gradients
            seconds.append(time.perf_counter() - started)
        bytes_read = store.bytes_read
    adapter_bytes = sum(array.nbytes for array in adapter.values())
    itemsize = 2 if arguments.dtype == "bfloat16" else 4
    return {
        "loss": losses[0],
        "step_seconds": statistics.median(seconds),
        "allocator_peak_bytes": measure.allocator_peak_bytes(arguments.backend),
        "process_peak_bytes": measure.process_peak_bytes(),
        "shape": arguments.shape,
        "layers": spec.num_layers,
        "seq": arguments.seq,
        "batch": arguments.batch,
        "rank": arguments.rank,
        "dtype": arguments.dtype,
        "backend": arguments.backend,
        "method": arguments.method,
        "iters": arguments.iters,
        "adapter_bytes": adapter_bytes,
        "gradient_bytes": adapter_bytes,
        "checkpoint_bytes": spec.num_layers * arguments.batch * arguments.seq * spec.hidden_size * itemsize,
        "bytes_read_per_step": bytes_read // arguments.iters,
    }


def _in_child(arguments: argparse.Namespace, layers: int) -> dict[str, Any]:
    from mesp_mlx.config import cache_folder

    maker = _tool("make_random_model")
    config = maker.SHAPES[arguments.shape] | {"num_hidden_layers": layers}
    folder = cache_folder() / "bench" / f"{arguments.shape}-{layers}-layers-{maker.FORMAT}"
    if not (folder / "config.json").is_file():
        print(f"writing a random model of {layers} layers into the cache", file=sys.stderr)
        maker.make(config, folder)
    environment = dict(os.environ)
    if arguments.backend == "mlx":
        environment |= _openblas()
    chosen = {key: getattr(arguments, key) for key in ("shape", "seq", "batch", "rank", "dtype", "backend", "method", "iters")}
    flags = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    done = subprocess.run([sys.executable, __file__, "--child", str(folder), *flags], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def _openblas() -> dict[str, str]:
    """The environment that puts OpenBLAS, with kernels for this processor, before the BLAS that MLX's Linux wheel links."""
    if not sys.platform.startswith("linux"):
        return {}
    found = next((file for pattern in OPENBLAS for file in sorted(glob.glob(pattern))), None)
    if found is None:
        print("OpenBLAS not found: MLX uses its bundled BLAS, which is many times slower (on Debian: apt install libopenblas0-pthread)", file=sys.stderr)
        return {}
    if platform.machine() != "x86_64":
        print(f"OpenBLAS preloaded from {found}", file=sys.stderr)
        return {"LD_PRELOAD": found}
    kernel = "SkylakeX" if "avx512f" in Path("/proc/cpuinfo").read_text() else "Haswell"
    print(f"OpenBLAS preloaded from {found}, {kernel} kernels", file=sys.stderr)
    return {"LD_PRELOAD": found, "OPENBLAS_CORETYPE": kernel}


def _print_table(results: list[dict[str, Any]]) -> None:
    """What the peak is made of, in MB; with two depths, what the deeper one adds."""
    columns = ("adapter_bytes", "gradient_bytes", "checkpoint_bytes", "allocator_peak_bytes", "process_peak_bytes")
    print(f"{'MB':>12}" + "".join(f"{column.removesuffix('_bytes').replace('_', ' '):>17}" for column in columns))
    rows = [(f"{result['layers']} layers", [result[column] for column in columns]) for result in results]
    if len(results) == 2:
        rows.append(("added", [None if late is None or early is None else late - early for early, late in zip(rows[0][1], rows[1][1], strict=True)]))
    for name, values in rows:
        print(f"{name:>12}" + "".join(f"{'not counted' if value is None else f'{value / 1e6:.2f}':>17}" for value in values))
    if len(results) == 2:
        adapter, gradient, checkpoint, peak, _ = rows[2][1]
        held = adapter + max(gradient, checkpoint)  # backward gives up a layer's checkpoint as it gains its gradients
        if peak is not None:
            print(f"added beyond adapters and the larger of gradients and checkpoints: {(peak - held) / 1e6:.2f} MB")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _tool(name: str) -> ModuleType:
    description = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
