"""Time and memory of a training step as mlx-lm takes it: what bench_step.py and compare_mlx_lm.py hold ours against.

    python tools/mlx_lm_step.py --model FOLDER --seq 256 --batch 1 --rank 8 --dtype float32 --iters 3 [--compile] [--grad-checkpoint] [--own-product]

SGD on the random tokens of bench_step.py, all supervised; the last line of output is one JSON object. The steps are those of
mlx_lm.tuner.trainer.train itself, which is called, not imitated: its model, LoRA modules, optimizer and checkpointing. Only these are ours:

- The initial adapter, which has the bits that mlx-lm would draw; and the batches and loss handed to the trainer, so that its mask is ours.
- Without --compile (compiling is what mlx-lm does) mx.disable_compile makes it run eagerly; the small functions that mlx-lm compiles by themselves,
  such as the product in SwiGLU, run eagerly then too.
- With --own-product quantised linears and embeddings are replaced by modules that hold the same arrays and multiply as mesp_mlx.ops.quantized does:
  on a CPU device tile by tile of dequantised rows, dequantised again in backward and never kept. MLX's own CPU kernel is scalar code and would take
  minutes. On a GPU both are mx.quantized_matmul. The price is in mlx-lm's peak: 345 MB for 302 run eagerly, 353 for 310 compiled, with its checkpointing
  290 for 245 and 297 for 263 (SmolLM2-135M's shape cut to 4 layers, 256 tokens).

mlx-lm's peak is higher from the second step on (302 MB, the first 203, same case): measure two or more.

MLX's limits are left as its trainer leaves them: freed buffers are kept for reuse, and the process takes more than the allocator counts.
"""

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from step_plan import positive

from mesp_mlx.errors import UserError

SCALE, LEARNING_RATE = 20.0, 1e-5  # bench_step.py's
Batch = tuple[Any, Any, Any, Any]  # ids, targets and mask [B, T], and what the summed loss is divided by


def load(folder: Path, adapter: Mapping[str, Any], rank: int, scale: float, dtype: Any, own_product: bool) -> Any:
    """mlx-lm's model, frozen but for LoRA on the modules that `adapter` names, which starts as those arrays.

    dtype is that of activations and of all weights that are not packed; the adapter stays float32, as mlx-lm has it.

    Raises:
        UserError: mlx-lm can't load the model, or puts adapters elsewhere.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    try:
        model: Any = load_model(folder)[0]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"mlx-lm can't load {folder}: {error}") from None
    model.set_dtype(dtype)
    if own_product:
        multiply_our_way(model)
    model.freeze()
    places = [name.split(".", 3)[2:] for name in adapter]  # model.layers.3.self_attn.q_proj.lora_a
    layers, keys = {layer for layer, _ in places}, sorted({name.rpartition(".")[0] for _, name in places})
    linear_to_lora_layers(model, len(layers), {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys})
    found: dict[str, Any] = dict(tree_flatten(model.trainable_parameters()))  # type: ignore[arg-type]
    if {name: value.shape for name, value in found.items()} != {name: tuple(value.shape) for name, value in adapter.items()}:
        different = sorted(found.keys() ^ adapter.keys())
        raise UserError(f"mlx-lm adapts other modules of {folder}: {', '.join(different[:4]) or 'the same, in other shapes'}")
    model.load_weights(list(adapter.items()), strict=False)
    mx.eval(model.parameters())
    return model


def multiply_our_way(model: Any) -> None:
    """Replace every quantised linear and embedding (a tied head multiplies by it) by one of the same arrays that multiplies as ours do."""
    import mlx.nn as nn
    from mlx.utils import tree_map

    from mesp_mlx.ops import quantized

    def product(module: Any, x: Any) -> Any:
        names = [name for name in ("weight", "scales", "biases", "bias") if name in module]
        return quantized.apply(x, {name: module[name] for name in names} | {name: getattr(module, name) for name in ("bits", "group_size", "mode")})

    def take_over(new: Any, old: Any) -> None:
        nn.Module.__init__(new)
        dict.update(new, old)
        vars(new).update({name: value for name, value in vars(old).items() if not name.startswith("_")})

    class Linear(nn.QuantizedLinear):
        def __init__(self, old: Any):
            take_over(self, old)

        def __call__(self, x: Any) -> Any:
            return product(self, x)

    class Embedding(nn.QuantizedEmbedding):
        def __init__(self, old: Any):
            take_over(self, old)

        def as_linear(self, x: Any) -> Any:
            return product(self, x)

    def ours(module: Any) -> Any:
        replacement = {nn.QuantizedLinear: Linear, nn.QuantizedEmbedding: Embedding}.get(type(module))
        return replacement(module) if replacement and module.mode == "affine" else module

    model.update_modules(tree_map(ours, model.leaf_modules(), is_leaf=nn.Module.is_module))


def train(
    model: Any, optimizer: Any, batches: Iterable[Batch], iterations: int, file: Path, *, compiled: bool, checkpoint: bool, accumulation: int = 1
) -> list[dict[str, float]]:
    """Train by mlx_lm.tuner.trainer.train, whose final adapter goes to `file`; {"loss", "seconds", "cpu_seconds"} of each update of `accumulation` batches.

    Each loss is the mean over its batches of their summed loss over their divisor. What the trainer prints goes to standard error.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback

    def loss(model: Any, ids: Any, targets: Any, mask: Any, divisor: Any) -> tuple[Any, Any]:
        each = nn.losses.cross_entropy(model(ids), targets) * mask
        return each.astype(mx.float32).sum() / divisor, mask.sum()

    updates: list[dict[str, float]] = []
    processor = [time.process_time()]

    class Record(TrainingCallback):
        def on_train_loss_report(self, train_info: dict) -> None:
            processor.append(time.process_time())
            seconds = {"seconds": accumulation / train_info["iterations_per_second"], "cpu_seconds": processor[-1] - processor[-2]}
            updates.append({"loss": train_info["train_loss"], **seconds})

    arguments = trainer.TrainingArgs(
        iters=iterations,
        steps_per_report=accumulation,
        steps_per_save=iterations + 1,
        adapter_file=str(file),
        grad_checkpoint=checkpoint,
        grad_accumulation_steps=accumulation,
    )
    layer = type(model.layers[0])
    call = layer.__call__
    if not compiled:
        mx.disable_compile()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            trainer.train(model, optimizer, None, args=arguments, loss=loss, iterate_batches=lambda **_: iter(batches), training_callback=Record())
    finally:
        mx.enable_compile()
        layer.__call__ = call  # mlx-lm's checkpointing replaces it
    return updates


def measure_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the steps here and measure this process."""
    import mlx.core as mx
    from mlx import optimizers

    from mesp_mlx import adapter as adapters
    from mesp_mlx import ops
    from mesp_mlx.memory import measure
    from mesp_mlx.model.spec import load_spec, read_config

    spec = load_spec(read_config(arguments.model))
    adapter = adapters.initialise(spec, adapters.choose_modules(spec), arguments.rank, 0, ops)
    model = load(arguments.model, adapter, arguments.rank, SCALE, getattr(mx, arguments.dtype), arguments.own_product)
    del adapter
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (arguments.batch, arguments.seq + 1), dtype=np.int32)
    ids, targets = mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])
    batch = ids, targets, mx.ones(ids.shape, mx.bool_), mx.array(float(ids.size))
    with tempfile.TemporaryDirectory() as folder:
        updates = train(
            model,
            optimizers.SGD(LEARNING_RATE),
            [batch] * arguments.iters,
            arguments.iters,
            Path(folder, adapters.ADAPTER_FILE),
            compiled=arguments.compile,
            checkpoint=arguments.grad_checkpoint,
        )
    return {
        "loss": updates[0]["loss"],
        "step_seconds": statistics.median(update["seconds"] for update in updates),
        "cpu_seconds": statistics.median(update["cpu_seconds"] for update in updates),
        "allocator_peak_bytes": measure.allocator_peak_bytes("mlx"),
        "process_peak_bytes": measure.process_peak_bytes(),
        "iters": arguments.iters,
        "mode": ("compiled" if arguments.compile else "eager") + ("-checkpoint" if arguments.grad_checkpoint else ""),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="an MLX model folder, as make_random_model.py writes")
    parser.add_argument("--seq", type=positive, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=positive, default=1, help="rows of the update")
    parser.add_argument("--rank", type=positive, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--iters", type=positive, default=1, help="steps; the time is their median, the loss the first's")
    parser.add_argument("--compile", action="store_true", help="as mlx-lm's trainer does; else eagerly")
    parser.add_argument("--grad-checkpoint", action="store_true", help="mlx-lm's checkpointing")
    parser.add_argument("--own-product", action="store_true", help="multiply by quantised weights as ours does")
    arguments = parser.parse_args()
    try:
        require_mlx_lm()
        print(json.dumps(measure_step(arguments)))
    except (UserError, OSError) as error:
        print(f"mlx_lm_step: {error}", file=sys.stderr)
        return 2
    return 0


def require_mlx_lm() -> None:
    """Raises UserError where MLX or mlx-lm can't be imported."""
    from mesp_mlx import backend

    backend.choose("mlx")
    if importlib.util.find_spec("mlx_lm") is None:
        raise UserError("mlx-lm, which this compares with, is not installed. Install it: pip install 'mlx-lm>=0.32.2,<0.33'.")


if __name__ == "__main__":
    sys.exit(main())
