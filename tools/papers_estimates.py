"""MeZO's estimate of a gradient beside the true one: cosine and agreement of signs, by layer and overall, for averages over several directions.

    python tools/papers_estimates.py --counts 1,10,100

One update of the demo model on real rows, in NumPy. The true gradient is mesp's. B, zero when training starts, holds random numbers a tenth of A's
size: otherwise A would have no gradient. The last count is how many directions are drawn; a smaller one divides them into groups of that size, each an
estimate of its own. The last line of output is a JSON object.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded: with two threads, cores that others use too make it many times slower

import numpy as np  # noqa: E402

B_SHARE = 0.1  # of A's standard deviation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", default="demo")
    parser.add_argument("--counts", type=_counts, default=(1, 10, 100), metavar="N,…", help="directions of an estimate, each a multiple of the one before")
    parser.add_argument("--rows", type=int, default=2, help="of the update")
    parser.add_argument("--tokens", type=int, default=64, help="of a row at most")
    parser.add_argument("--layers", type=int, default=-1, help="that hold an adapter, from the last; -1 = all")
    parser.add_argument("--epsilon", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    from mesp_mlx.errors import UserError

    try:
        print(json.dumps(measure(arguments)))
    except UserError as error:
        print(f"papers_estimates: {error}", file=sys.stderr)
        return 2
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Take the true gradient and the slopes along all directions, and compare.

    Raises:
        UserError: the model or the data can't be used.
    """
    from mesp_mlx import backend as backends
    from mesp_mlx import finetune, planning, sources
    from mesp_mlx.data import batches
    from mesp_mlx.engine import methods, zeroth_order
    from mesp_mlx.memory.strategy import Strategy
    from mesp_mlx.model.stages import Batch

    started = time.perf_counter()
    flags = {"model": arguments.model, "data": arguments.data, "backend": "numpy", "batch_size": arguments.rows, "max_seq_length": arguments.tokens}
    flags |= {"num_layers": arguments.layers, "seed": arguments.seed, "grad_clip": 0.0, "adapter_path": tempfile.gettempdir(), "reply_tokens": 0}
    settings, backend = sources.load(None, flags), backends.choose("numpy")
    found = finetune.find(settings, finetune.data_files(settings), backend)
    truth: dict[str, Any] = {}
    with finetune.prepare(found, planning.plan_of(found, Strategy())) as prepared, prepared.store() as store:
        rows, model, adapter = prepared.rows, prepared.model, with_random_b(prepared.adapter, arguments.seed)
        drawn = batches.updates(rows.train_set, rows.train, rows.limit, rows.widths, rows_per_update=arguments.rows, seed=arguments.seed, stop=1)
        held = [Batch(group) for groups in drawn for group in groups]
        perturbations = zeroth_order.Perturbations(arguments.seed, 0, arguments.counts[-1], arguments.epsilon)
        _, finish = methods.update(settings, 0, model, store, adapter, held, truth.__setitem__)
        finish()
        loss, slopes = zeroth_order.slopes(model, store, adapter, held, perturbations)
    supervised = sum(int(batch.group.mask.sum()) for batch in held)
    directions = ({name: perturbations.direction(backend, i, name, t.shape) for name, t in truth.items()} for i in range(len(slopes)))
    compared = compare(truth, directions, slopes, arguments.counts)
    about = {"rows": arguments.rows, "tokens": arguments.tokens, "supervised": supervised, "epsilon": arguments.epsilon, "b_share": B_SHARE}
    return about | {"loss": loss / supervised, "seconds": time.perf_counter() - started} | compared


def with_random_b(adapter: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The adapter, its B normally distributed with B_SHARE of A's standard deviation."""
    rng, filled = np.random.default_rng(seed), dict(adapter)
    for name, value in adapter.items():
        if name.endswith("lora_b"):
            size = B_SHARE * adapter[f"{name.removesuffix('b')}a"].std()
            filled[name] = (size * rng.standard_normal(value.shape)).astype(np.float32)
    return filled


def compare(truth: Mapping[str, np.ndarray], directions: Iterator[Mapping[str, np.ndarray]], slopes: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    """How near estimates of each count come to the truth: a list over estimates, and by layer their means.

    directions: z by tensor, one after another; slopes: the loss's slope along each, by differences. Also the true slopes, z times the gradient.
    """
    layers = sorted({layer_of(name) for name in truth})
    sums = {count: {name: np.zeros_like(value) for name, value in truth.items()} for count in counts}
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    true_slopes = []
    for i, (z, slope) in enumerate(zip(directions, slopes, strict=True), 1):
        true_slopes.append(sum(_dot(z[name], value) for name, value in truth.items()))
        for count, total in sums.items():
            for name, value in z.items():
                total[name] += np.float32(slope) * value
            if i % count == 0:
                found[count].append(nearness(total, truth, layers))
                for value in total.values():
                    value.fill(0)
    norms = [math.sqrt(sum(_dot(value, value) for name, value in truth.items() if layer_of(name) == layer)) for layer in layers]
    whole = math.hypot(*norms)
    absolute = sum(float(np.abs(value, dtype=np.float64).sum()) for value in truth.values())
    return {
        "parameters": sum(value.size for value in truth.values()),
        "gradient_norm": whole,
        "gradient_absolute_sum": absolute,
        "layers": layers,
        "layer_parameters": [sum(value.size for name, value in truth.items() if layer_of(name) == layer) for layer in layers],
        "layer_norms": norms,
        "slopes": list(slopes),
        "true_slopes": true_slopes,
        "estimates": {
            str(count): {
                "cosine": [each["cosine"] for each in of],
                "signs": [each["signs"] for each in of],
                "layer_cosine": np.mean([each["layer_cosine"] for each in of], axis=0).tolist(),
                "layer_signs": np.mean([each["layer_signs"] for each in of], axis=0).tolist(),
            }
            for count, of in found.items()
        },
    }


def nearness(estimate: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray], layers: Sequence[int]) -> dict[str, Any]:
    """Cosine, and share of equal signs where the truth isn't zero; over all tensors, and of each layer's."""
    sums = {layer: np.zeros(5) for layer in layers}
    for name, true in truth.items():
        ours, counted = estimate[name], true != 0
        same = int(((np.sign(ours) == np.sign(true)) & counted).sum())
        sums[layer_of(name)] += [_dot(ours, true), _dot(ours, ours), _dot(true, true), same, int(counted.sum())]
    return {
        "cosine": _cosine(sum(sums.values())),
        "signs": _signs(sum(sums.values())),
        "layer_cosine": [_cosine(sums[layer]) for layer in layers],
        "layer_signs": [_signs(sums[layer]) for layer in layers],
    }


def layer_of(name: str) -> int:
    """The layer that a tensor of an adapter belongs to, by its name."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    assert found, name
    return int(found[1])


def _cosine(sums: Any) -> float:
    size = math.sqrt(sums[1] * sums[2])
    return float(sums[0] / size) if size else 0.0


def _signs(sums: Any) -> float:
    return float(sums[3] / sums[4]) if sums[4] else 0.5


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.dot(a.ravel().astype(np.float64), b.ravel().astype(np.float64)))


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(word) if word.isdecimal() else 0 for word in text.split(","))
    if any(low < 1 or high % low for low, high in zip(counts, (*counts[1:], counts[-1]), strict=True)):
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers, each a multiple of the one before")
    return counts


if __name__ == "__main__":
    sys.exit(main())
