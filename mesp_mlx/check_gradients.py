"""`mesp-mlx check-gradients`: are the structured gradients of this model, on this machine, the true ones?

What is compared, in float32, on one row and an adapter whose B is random (a B of zero hides dA):

- Each op's backward, and each stage's, with NumPy in float64 (see `op_checks`): what names a fault.
- The whole model with autodiff by layer. Both take the loss by the tiled head, which `op_checks` has judged: so the layers are compared, nothing else.
- The whole model with autodiff of the graph at once, logits whole, if it fits in memory.
- The first layers, as a model of their own, with NumPy in float64: its tape, plain code, logits whole.

In the run's own dtype of activations, where that has 16 bits: ops, stages and the whole model, against the same truths or float32 autodiff. Nothing is exact
there; the structured gradient may be off by SLACK times what autodiff by layer is off by at worst in that dtype, no more. A whole model with experts
isn't compared there: rounding sends tokens to others, and neither gradient is then the float32 one's.

A tensor's error is max|difference| / max|truth|; in float32 it may be 1e-4. Where two float32 gradients differ by more, neither is a truth to judge the other
by: whole autodiff on MLX's CPU device, for one, is 1e-4 off with a large vocabulary. Then NumPy in float64 walks the whole model and judges instead: structured
gradients may be 1e-4 from it, or SLACK times what the better autodiff is, but never over 2e-3. NaN never passes. GPUs are told to multiply in whole float32.

A generic model (see model/generic.py) has no structured backward: its streamed gradients are compared with those of mlx-lm's own modules, by whole autodiff.

No more of the model is held than in training, but by whole autodiff; of gradients, two sets, and whole autodiff's.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from mesp_mlx import adapter as adapters
from mesp_mlx import backend as backends
from mesp_mlx import config, finetune, op_checks, reference, report, sources
from mesp_mlx.config import Settings
from mesp_mlx.data import batches
from mesp_mlx.data.group import Group
from mesp_mlx.data.rows import read_rows
from mesp_mlx.engine.backprop import loss_and_gradients
from mesp_mlx.engine.sink import HeldSink
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.memory import measure
from mesp_mlx.model import architecture
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import ModelSpec, Spec
from mesp_mlx.model.stages import Batch
from mesp_mlx.model_checks import MOST, SCALE, Comparison, Gradients, Subject, available_bytes, compare, errors_of
from mesp_mlx.op_checks import FLOORS, SLACK, Check, dtype_name
from mesp_mlx.stream.safetensors import Entry
from mesp_mlx.stream.shelves import IN_MEMORY
from mesp_mlx.stream.store import Store
from mesp_mlx.units import megabytes

if TYPE_CHECKING:
    from mesp_mlx.model.generic import GenericSpec

B_SHARE = 0.1  # of A's size, for B
LAYERS = 2  # the first so many are compared with float64
ARRAYS_OF_A_LAYER = 60  # of the model's width, for each position, that a graph keeps


def run(flags: dict[str, Any], seq: int, layers: int | None, json_file: str | None = None, dtype: str | None = None) -> int:
    """Compare, print, and give 0 if the gradients are exact, else 1.

    Args:
        flags: finetune's: model, data (None: random tokens), rank, backend, quantize, seed.
        seq: tokens of the row.
        layers: the first so many are compared with float64 too, if not LAYERS.
        json_file: for the figures.
        dtype: of activations, one of FLOORS, if not the backend's own for the model.

    Raises:
        UserError: something the user can change.
    """
    started = time.perf_counter()
    console = report.console()
    if not console.is_terminal:
        console.width = 160  # of the tables in a file
    data = flags.get("data")
    settings = sources.load(None, flags | {"data": "demo" if data is None else data, "val_batches": 0})
    files = finetune.data_files(settings) if data else {}
    if json_file and Path(json_file).is_dir():
        raise UserError(f"--json {json_file}: it is a folder. Choose a file.")
    if json_file and not Path(json_file).absolute().parent.is_dir():
        raise UserError(f"--json {json_file}: its folder does not exist. Make it, or choose another file.")

    def note(line: str) -> None:
        console.print(f"{time.perf_counter() - started:6.1f} s  {line}", soft_wrap=True)

    os.environ["MLX_ENABLE_TF32"] = "0"  # MLX reads it once, at a GPU's first product: with TF32's ten bits, thirty layers are 1e-2 off
    arrays = backends.choose(settings.backend)
    asked = _asked_dtype(dtype, arrays)
    with ExitStack() as stack:
        stack.enter_context(Interrupts())
        stack.enter_context(np.errstate(over="ignore", invalid="ignore"))  # what is not finite fails
        stack.enter_context(measure.small_cache(arrays.arrays.name))
        found, spec, entries = finetune.open_model(settings, arrays)
        if seq > spec.max_positions:
            raise UserError(f"--seq is {seq}, but the model was made for {spec.max_positions} positions. Lower it.")
        structured = isinstance(spec, ModelSpec)
        if not structured and (given := [flag for flag, value in {"--dtype": dtype, "--layers": layers}.items() if value is not None]):
            raise UserError(f"{' and '.join(given)}: all layers of {spec.model_type} are compared with whole autodiff, in float32. Leave it out.")
        rank, seed = settings.lora_parameters.rank, settings.seed
        group = _data_row(settings, files, seq, spec, found.folder) if data else _random_row(spec, seq, seed)
        activations = (asked or backends.activation_dtype(arrays, backends.stored_dtype(entries))) if structured else arrays.arrays.float32
        adapter = _random_adapter(spec, rank, seed)
        facts = {
            "model": found.name, "family": spec.model_type, "backend": arrays.arrays.name, "dtype": dtype_name(activations), "layers": spec.num_layers,
            "data": data or "random tokens", "positions": group.ids.size, "supervised": int(group.mask.sum()), "rank": rank, "scale": SCALE, "seed": seed,
        }  # fmt: skip
        console.print(", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in facts.items()), soft_wrap=True)
        if isinstance(spec, ModelSpec):
            subject = Subject(spec, entries, arrays, group, adapter)
            checks = _op_checks(subject, activations, seed)
            note(f"ops and stages of the first layer, and the head: {sum(check.passed for check in checks)} of {len(checks)} within their bounds")
            comparisons = compare(subject, layers or LAYERS, activations, all(check.passed for check in checks), note)
        else:
            checks, comparisons = [], [_by_whole_autodiff(found.folder, spec, entries, arrays, group, adapter, rank, note)]
    line = verdict(checks, comparisons)
    exact = all(check.passed for check in checks) and all(comparison.passed for comparison in comparisons)
    _print(console, checks, comparisons)
    console.print(line, soft_wrap=True, style="bold green" if exact else "bold red")
    if json_file:
        _write(Path(json_file), {**facts, "exact": exact, "verdict": line, "seconds": time.perf_counter() - started}, checks, comparisons)
    return 0 if exact else 1


def _asked_dtype(name: str | None, backend: Any) -> Any:
    """The dtype that was asked for by name."""
    if name is None:
        return None
    if name not in FLOORS:
        raise UserError(f"--dtype: found {name!r}, expected {', '.join(FLOORS)}")
    if backend.arrays.name == "numpy":
        raise UserError(f"--dtype {name}: NumPy computes in float32. Leave it out, or choose --backend mlx.")
    import mlx.core as mx

    return getattr(mx, name)


def _op_checks(subject: Subject, dtype: Any, seed: int) -> list[Check]:
    """In float32, and at the run's own dtype if that is another."""
    arrays, checks = subject.backend.arrays, []
    adapter = {name: arrays.asarray(array) for name, array in subject.adapter.items()}
    for each in dict.fromkeys((arrays.float32, dtype)):
        model = build(subject.spec, subject.backend, SCALE, dtype=each)
        with Store(subject.entries, subject.spec, subject.backend) as store:
            checks += op_checks.check(model, subject.spec, store, adapter, Batch(subject.group), seed)
    return checks


def _by_whole_autodiff(
    folder: Path,
    spec: "GenericSpec",
    entries: Mapping[str, Entry],
    backend: ModuleType,
    group: Group,
    adapter: Gradients,
    rank: int,
    note: Callable[[str], None],
) -> Comparison:
    """A generic model's gradients, streamed, beside those of mlx-lm's modules by autodiff of the whole. No backward of it is written by hand.

    Raises:
        UserError: the whole may not fit in memory.
    """
    note(f"structured: nothing. {spec.model_type} is trained through mlx-lm's own modules, a layer at a time: that is compared with the whole at once")
    needed, room = whole_bytes(spec, entries, group, adapter), available_bytes()
    if needed > room:
        raise UserError(
            f"checking the gradients of {spec.model_type}, which has no structured ones: the whole model in one graph may need {megabytes(needed)}, and "
            f"{megabytes(room)} of memory are free. Lower --seq, or take a smaller model of this type."
        )
    from mesp_mlx.model import generic_truth

    modules, streamed = adapters.choose_modules(spec), Gradients()
    model = architecture.build(spec, entries, backend, SCALE, modules, rank)
    sink = HeldSink(backend, IN_MEMORY.gradients, 1, 0.0, lambda name, gradient: streamed.update({name: np.array(backend.arrays.to_numpy(gradient))}))
    with Store(entries, spec, backend) as store:
        given = {name: backend.arrays.asarray(array) for name, array in adapter.items()}
        loss_and_gradients(model, store, given, [Batch(group)], sink)
    sink.finish()
    _, truth = generic_truth.whole_gradients(folder, spec.adaptable_keys(), spec.num_layers, rank, SCALE, adapter, [group])
    comparison = Comparison("mlx-lm's whole autodiff", spec.num_layers, "float32", errors_of(streamed, truth))
    note(f"streamed against {comparison.summary().removeprefix('structured against ')}")
    return comparison


def whole_bytes(spec: "GenericSpec", entries: Mapping[str, Entry], group: Group, adapter: Gradients) -> int:
    """What autodiff of a whole generic model may take, in bytes: its weights, so many arrays of each layer, of which nothing closer is known, and logits."""
    stored = sum(entry.size_bytes * (2 if entry.dtype in ("F16", "BF16") else 1) for entry in entries.values())
    arrays = spec.num_layers * ARRAYS_OF_A_LAYER * spec.hidden_size + 5 * spec.vocab_size
    return int(1.2 * (stored + 4 * group.ids.size * arrays + 3 * sum(array.nbytes for array in adapter.values())))


def _random_adapter(spec: Spec, rank: int, seed: int) -> Gradients:
    """A as training starts, B uniform and a tenth of its size: what can be adapted, in every layer."""
    modules, rng = adapters.choose_modules(spec), np.random.default_rng([seed, 0])
    adapter = adapters.initialise(spec, modules, rank, seed, reference)
    for module in modules:
        a, b = adapter[f"{module}.lora_a"], adapter[f"{module}.lora_b"]
        b[:] = rng.uniform(-B_SHARE, B_SHARE, b.shape) / np.sqrt(a.shape[-1] if a.ndim > 2 else len(a))
    return adapter


def _random_row(spec: Spec, seq: int, seed: int) -> Group:
    tokens = np.random.default_rng([seed, 2]).integers(0, spec.vocab_size, (1, seq), dtype=np.int32)
    return Group(tokens[:, :-1], tokens[:, 1:], np.ones((1, seq - 1), bool), (0,), (seq - 1,))


def _data_row(settings: Settings, files: Mapping[str, Path | None], seq: int, spec: Spec, folder: Path) -> Group:
    """The first row of the data that is long enough and has something supervised, cut, masked as finetune masks it."""
    rows = read_rows(settings, files, folder, spec, config.cache_folder() / "tokens").train_set
    lengths = rows.lengths()
    usable = np.flatnonzero((lengths >= seq) & (rows.supervised(seq) > 0))
    if not len(usable):
        longest = int(lengths[rows.supervised(seq) > 0].max(initial=0))
        what = f"no row has {seq} tokens with one among them to learn; the longest that has one to learn has {longest}"
        raise UserError(f"--data {settings.data}: {what}. Change --seq.")
    (group,) = batches.groups(rows, usable[:1], seq, [seq - 1])
    return group


def _print(console: Console, checks: list[Check], comparisons: list[Comparison]) -> None:
    """A table of ops, and one of projections."""
    style = box.SIMPLE if console.is_terminal else None
    ops = Table("backward of", "in", "worst output", "error", "autodiff", "bound", "", box=style)
    for check in checks:
        figures = (f"{figure:.1e}" for figure in (check.errors[check.worst], max(check.autodiff.values()), check.bound))
        ops.add_row(check.name, check.dtype, check.worst, *figures, "ok" if check.passed else "WRONG")
    projections = Table("worst, median", *(f"{comparison.title}{' (settled)' if comparison.settled else ''}" for comparison in comparisons), box=style)
    for name in comparisons[0].rows():
        cells = []
        for comparison in comparisons:
            row = comparison.rows().get(name)  # of the first layers alone there may be no experts
            fine = row is None or comparison.settled or row["worst"] <= comparison.bound
            cells.append(f"{row['worst']:.1e} {row['median']:.1e}{'' if fine else ' WRONG'}" if row else "")
        projections.add_row(name.replace(".lora_a", " A").replace(".lora_b", " B"), *cells)
    for part in (*(("", ops) if checks else ()), "", projections, ""):
        console.print(part)


def _write(file: Path, facts: dict[str, Any], checks: list[Check], comparisons: list[Comparison]) -> None:
    """All the figures as one JSON object; what isn't finite is null."""
    ops = [dataclasses.asdict(check) | {"bound": check.bound, "passed": check.passed} for check in checks]
    compared = [dataclasses.asdict(each) | {"projections": each.rows(), "bound": each.bound, "passed": each.passed} for each in comparisons]
    try:
        file.write_text(json.dumps(_finite(facts | {"ops": ops, "comparisons": compared}), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"writing --json {file}: {error.strerror}. Choose another file.") from None


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _finite(part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(part) for part in tree]
    return None if isinstance(tree, float) and not np.isfinite(tree) else tree


def verdict(checks: list[Check], comparisons: list[Comparison]) -> str:
    """In one line: exact or not, how far off at worst, and where."""
    failed, over = [check for check in checks if not check.passed], [comparison for comparison in comparisons if not comparison.passed]
    if failed:
        first = failed[0]
        others = ", ".join(dict.fromkeys(check.name for check in failed if check.name != first.name))
        line = f"NOT exact: the backward of {first.name} is off by {first.errors[first.worst]:.1e} in {first.worst} (bound {first.bound:.1e})"
        return line + (f"; so are those of {others}, perhaps because they use it" if others else "")
    if over:
        first = over[0]
        line = f"NOT exact: {first.worst} is off by {first.errors[first.worst]:.1e} from {first.title}"
        return line + ", though each op and stage of the first layer passes by itself"
    judges = [comparison for comparison in comparisons if comparison.dtype == "float32" and not comparison.settled]
    worst = max(judges, key=lambda comparison: comparison.errors[comparison.worst])
    error = worst.errors[worst.worst]
    line = f"the gradients are exact: worst error {error:.1e} (bound {FLOORS['float32']:.0e}"
    line += ")" if error <= FLOORS["float32"] else f", or {SLACK:g} x autodiff's error, here {worst.bound:.1e} and never over {MOST:.0e})"
    low = next((comparison for comparison in comparisons if comparison.dtype != "float32"), None)
    return line + (f" in float32, and {low.errors[low.worst]:.1e} in {low.dtype}, within {SLACK:g} x of autodiff's error" if low else "")
