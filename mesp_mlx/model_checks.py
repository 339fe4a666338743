"""A whole model's structured gradients beside those of other methods, tensor by tensor. Why these, and what may be off: see `check_gradients`."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mesp_mlx import adapter as adapters
from mesp_mlx import config, reference
from mesp_mlx.data.group import Group
from mesp_mlx.engine.methods import exact as exact_method
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch
from mesp_mlx.op_checks import bound, dtype_name, error
from mesp_mlx.stream.safetensors import Entry
from mesp_mlx.stream.store import ALL_STAGES, Store
from mesp_mlx.units import megabytes

SCALE = config.LoraParameters.model_fields["scale"].default  # mlx-lm's
MOST = 2e-3  # that autodiff may excuse in float32, through many layers

Errors = dict[str, float]
Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """What is looked into: a model on disk, the arrays to compute it with, one row, and an adapter in NumPy (float32, B random)."""

    spec: ModelSpec
    entries: Mapping[str, Entry]
    backend: ModuleType
    group: Group
    adapter: Gradients

    def walk(self, method: str, visit: Callable[[str, np.ndarray], Any], dtype: Any = None, layers: int | None = None) -> None:
        """Hand each gradient of the summed loss, in NumPy, to `visit` as it comes, last layer first.

        dtype: of activations, float32 unless given; np.float64 is NumPy's, with whole logits, where mebp has the tiled head else.
        layers: of a model of the first so many alone.
        """
        exact, layers = dtype is np.float64, layers or self.spec.num_layers
        backend = reference if exact else self.backend
        spec = self.spec.first_layers(layers)
        model = build(spec, backend, SCALE, Strategy(), dtype, method, tiled_head=method == "mebp" and not exact)
        names = adapters.shapes(spec, adapters.choose_modules(spec), 1)
        adapter = {name: backend.arrays.asarray(self.adapter[name].astype(np.float64 if exact else np.float32, copy=False)) for name in names}
        with Store(self.entries, spec, backend, ALL_STAGES if method == "backprop" else ()) as store:
            exact_method(method)(model, store, adapter, [Batch(self.group)], _Visits(backend, visit))

    def gradients(self, method: str, layers: int | None = None) -> Gradients:
        """All of them, in float32."""
        found: Gradients = {}
        self.walk(method, found.__setitem__, layers=layers)
        return found


@dataclass(frozen=True)
class _Visits:
    """A sink that holds nothing: it hands over each gradient as it comes, finite or not."""

    backend: ModuleType
    visit: Callable[[str, np.ndarray], Any]

    def check(self, loss: float) -> None:
        """Any loss will do."""

    def finish(self) -> None:
        """Nothing is left to do."""

    def put(self, gradients: dict[str, Any]) -> None:
        for name, gradient in gradients.items():
            self.visit(name, self.backend.arrays.to_numpy(gradient))


@dataclass(frozen=True)
class Comparison:
    """Errors of the structured gradients by adapter tensor.

    autodiff, whole: those of autodiff by layer and of whole autodiff against the same truth, if they were taken.
    settled: over the bound, and no matter: float64 has judged instead.
    """

    truth: str
    layers: int
    dtype: str
    errors: Errors
    autodiff: Errors | None = None
    whole: Errors | None = None
    settled: bool = False

    @property
    def title(self) -> str:
        return f"{self.truth}, {self.layers} layer" + ("" if self.layers == 1 else "s")

    @property
    def bound(self) -> float:
        """By the better autodiff: that by layer has the structured head, whose faults may excuse nothing, and the other's whole logits may be coarse."""
        taken = [side for side in (self.autodiff, self.whole) if side]
        return bound(self.dtype, min(taken, key=lambda side: max(side.values()), default=None), MOST)

    @property
    def passed(self) -> bool:
        return self.settled or self.errors[self.worst] <= self.bound

    @property
    def worst(self) -> str:
        """The tensor that is furthest off."""
        return max(self.errors, key=lambda name: self.errors[name])

    def rows(self) -> dict[str, dict[str, float]]:
        """{"worst", "median"} over layers, for each projection's A and B."""
        parts: dict[str, list[float]] = {}
        for name, value in self.errors.items():
            parts.setdefault(".".join(name.split(".")[-2:]), []).append(value)
        return {row: {"worst": max(part), "median": statistics.median(part)} for row, part in parts.items()}

    def summary(self) -> str:
        line = f"structured against {self.title}: worst {max(self.errors.values()):.1e}, median {statistics.median(self.errors.values()):.1e}"
        for name, errors in (("autodiff by layer", self.autodiff), ("whole autodiff", self.whole)):
            line += f"; {name}: worst {max(errors.values()):.1e}" if errors else ""
        return line


def compare(subject: Subject, layers: int, dtype: Any, settle: bool, note: Callable[[str], None]) -> list[Comparison]:
    """The comparisons of whole models. settle: walk the whole model in float64 where float32 gradients differ. note: is told each result.

    layers: of the model that is compared with float64. dtype: the run's own, of activations.
    """
    structured, by_layer, whole, count = subject.gradients("mesp"), subject.gradients("mebp"), None, subject.spec.num_layers
    found = [Comparison("autodiff by layer", count, "float32", errors_of(structured, by_layer))]
    note(found[-1].summary())
    low = dtype_name(dtype)
    if low != "float32" and any(subject.spec.experts):
        note(f"in {low} ops and stages alone are compared: a token whose experts are as good as others is sent to others there than in float32")
    elif low != "float32":
        ours, theirs = (_walk_errors(subject, method, dtype, by_layer) for method in ("mesp", "mebp"))
        found.append(Comparison(f"float32 autodiff, in {low}", count, low, ours, theirs))
        note(found[-1].summary())
    needed, room = whole_graph_bytes(subject), available_bytes()
    if needed > room:
        note(f"whole autodiff is left out: it may need {megabytes(needed)}, and {megabytes(room)} of memory are free")
    else:
        whole = subject.gradients("backprop")
        found.append(Comparison("whole autodiff", count, "float32", errors_of(structured, whole)))
        note(found[-1].summary())
    if layers < count:
        methods = ("mesp", "mebp") if whole is None else ("mesp", "mebp", "backprop")
        found.append(_with_float64(subject, layers, *(subject.gradients(method, layers) for method in methods)))
        note(found[-1].summary())
    differ = [comparison for comparison in found if comparison.autodiff is None and not comparison.passed]
    if layers >= count or (differ and settle):
        found = [dataclasses.replace(comparison, settled=True) if comparison in differ else comparison for comparison in found]
        found.append(_with_float64(subject, count, structured, by_layer, whole))
        note(found[-1].summary())
    return found


def errors_of(found: Gradients, truth: Gradients) -> Errors:
    largest = _largest(truth)
    return {name: error(found[name], truth[name], largest) for name in truth}


def _walk_errors(subject: Subject, method: str, dtype: Any, truth: Gradients) -> Errors:
    """`errors_of` of gradients that are not held."""
    errors, largest = Errors(), _largest(truth)

    def visit(name: str, found: np.ndarray) -> None:
        errors[name] = error(found, truth[name], largest)

    subject.walk(method, visit, dtype)
    return errors


def _largest(gradients: Gradients) -> float:
    return max(float(np.abs(array).max()) for array in gradients.values())


def _with_float64(subject: Subject, layers: int, structured: Gradients, by_layer: Gradients, whole: Gradients | None = None) -> Comparison:
    """Gradients of the first layers beside NumPy's in float64, of which none is held."""
    largest = _largest(by_layer)
    ours, theirs, wholes = Errors(), Errors(), Errors()

    def visit(name: str, truth: np.ndarray) -> None:
        for held, errors in ((structured, ours), (by_layer, theirs), (whole, wholes)):
            if held is not None:
                errors[name] = error(held[name], truth, largest)

    subject.walk("mebp", visit, np.float64, layers)
    return Comparison("NumPy in float64", layers, "float32", ours, theirs, wholes or None)


def whole_graph_bytes(subject: Subject) -> int:
    """What whole autodiff may take, in bytes: weights as they are stored, every array that its graph keeps, logits several times; a fifth for the rest."""
    spec, tokens = subject.spec, subject.group.ids.size
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    kept = tokens * (7 * spec.hidden_size + 5 * heads + 4 * kv + 6 * spec.intermediate_size) + 4 * spec.num_heads * tokens * tokens
    stored = sum(entry.size_bytes * (2 if entry.dtype in ("F16", "BF16") else 1) for entry in subject.entries.values())
    adapter = sum(array.nbytes for array in subject.adapter.values())
    return int(1.2 * (stored + 4 * (spec.num_layers * kept + 5 * tokens * spec.vocab_size) + 3 * adapter))


def available_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available
