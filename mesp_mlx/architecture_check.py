"""Does a model type train here? Found out in a process of its own, on a tiny random model that is streamed from disk."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx import adapter as adapters
from mesp_mlx import child, reference
from mesp_mlx.data.group import Group
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.engine.sink import HeldSink
from mesp_mlx.errors import UserError
from mesp_mlx.model import architecture, samples, source
from mesp_mlx.model.spec import ModelSpec, Spec
from mesp_mlx.model.stages import Batch
from mesp_mlx.op_checks import error
from mesp_mlx.stream.safetensors import Entry
from mesp_mlx.stream.shelves import IN_MEMORY
from mesp_mlx.stream.store import Store

RANK, SCALE, BOUND = 4, 2.0, 1e-4
LENGTHS = (11, 7)  # positions of the two rows


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """`types`: model types to try, or none: then the types there are."""
    if not request["types"]:
        return {"types": samples.model_types()}
    return {"found": [check(model_type) for model_type in request["types"]]}


def check(model_type: str) -> dict[str, Any]:
    """What became of a model type, as JSON values.

    `status`: "structured" or "generic", whose loss and gradients of an update are those of whole autodiff; "refused", with the reason; or "wrong". `numpy`:
    whether NumPy's are too. `error`: the worst of all tensors, max|difference| / max|truth|, and of the loss.
    """
    found: dict[str, Any] = {"model_type": model_type, "status": "refused", "numpy": False, "error": None, "reason": None}
    with tempfile.TemporaryDirectory(prefix="mesp-mlx-") as temporary:
        try:
            return found | _trained(Path(temporary) / "model", samples.small_config(model_type))
        except UserError as refused:
            return found | {"reason": str(refused)}
        except Exception as failed:  # mlx-lm's code, or this program's, does not stand what it was given
            return found | {"status": "wrong", "reason": f"{type(failed).__name__}: {failed}"}


def _trained(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    from mesp_mlx import ops
    from mesp_mlx.model import generic_truth

    generic_truth.write_random(folder, config)
    folder = source.resolve(str(folder), folder.parent / "cache", quantize="none", note=lambda line: None).folder
    spec, entries = architecture.open_folder(folder)
    modules = adapters.choose_modules(spec)
    rng = np.random.default_rng(1)
    sizes = {"a": 0.1, "b": 0.01}
    adapter = {name: (sizes[name[-1]] * rng.standard_normal(shape)).astype(np.float32) for name, shape in adapters.shapes(spec, modules, RANK).items()}
    group = _rows(spec.vocab_size)
    backends = [ops, reference] if isinstance(spec, ModelSpec) else [ops]
    ours = [_streamed(spec, entries, backend, modules, adapter, group) for backend in backends]
    truth = generic_truth.whole_gradients(folder, spec.adaptable_keys(), spec.num_layers, RANK, SCALE, adapter, [group])
    errors = [_worst(each, truth) for each in ours]
    result: dict[str, Any] = {"error": errors[0], "numpy": len(errors) == 2 and errors[1] <= BOUND}
    if max(errors) <= BOUND:
        return result | {"status": "structured" if isinstance(spec, ModelSpec) else "generic"}
    on = "NumPy" if errors[0] <= BOUND else "MLX"
    return result | {"status": "wrong", "error": _finite(errors[0]), "reason": f"the gradient on {on} is off by {max(errors):.1e} from whole autodiff's"}


def _streamed(
    spec: Spec, entries: dict[str, Entry], backend: Any, modules: list[str], adapter: dict[str, np.ndarray], group: Group
) -> tuple[float, dict[str, np.ndarray]]:
    model = architecture.build(spec, entries, backend, SCALE, modules, RANK)
    found: dict[str, np.ndarray] = {}
    sink = HeldSink(backend, IN_MEMORY.gradients, 1, 0.0, lambda name, gradient: found.update({name: np.array(backend.arrays.to_numpy(gradient))}))
    with Store(entries, spec, backend) as store:
        loss = loss_and_gradients(model, store, {name: backend.arrays.asarray(array) for name, array in adapter.items()}, [Batch(group)], sink)
    sink.finish()
    return loss, found


def _rows(vocabulary: int) -> Group:
    """Two rows of random tokens, the shorter one padded; a few positions teach nothing."""
    rng, width = np.random.default_rng(2), max(LENGTHS)
    tokens = rng.integers(0, vocabulary, (len(LENGTHS), width + 1), dtype=np.int32)
    mask = (rng.random((len(LENGTHS), width)) < 0.7) & (np.arange(width) < np.array(LENGTHS)[:, None])
    return Group(tokens[:, :-1], tokens[:, 1:], mask, tuple(range(len(LENGTHS))), LENGTHS)


def _worst(found: tuple[float, dict[str, np.ndarray]], truth: tuple[float, dict[str, np.ndarray]]) -> float:
    """Of the loss and all gradients; infinite where a tensor is missing."""
    largest = max(float(np.abs(array).max(initial=0.0)) for array in truth[1].values())
    missing = np.full(1, np.inf, np.float32)
    errors = [error(found[1].get(name, missing), array, largest) for name, array in truth[1].items()]
    return max(*errors, error(np.array([found[0]]), np.array([truth[0]])))


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


if __name__ == "__main__":
    child.answer(serve)
