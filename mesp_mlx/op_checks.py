"""Each op's backward, then each stage's, at a model's own first-layer weights and shapes: so that a fault in a gradient has a name.

The truth is NumPy in float64 on the same inputs: the op in plain code (`reference.plain`), differentiated by its tape. Two backwards serve that tape too,
and are judged without it: rope's by the matrix of the forward rotation, column by column, and the frozen products', which every autodiff shares, by dense
products with weights unpacked here, for each kind of linear that the layers have. Cross-entropy's truth is the softmax of whole float64 logits, of weights
unpacked here too. A stage's is a plain layer whose other half adds nothing.

An output's error is max|difference| / max|truth|. It may be as large as its dtype's floor, or as SLACK times the largest that autodiff of the op's plain code
makes with the run's own arrays and dtype, whichever is more: where a dtype or a device rounds coarsely, nobody can do better. In float32, where
CPUs stay below the floor by a factor of ten or more, that goes as far as MOST.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mesp_mlx import reference
from mesp_mlx.engine import backprop
from mesp_mlx.expert_checks import Frozen, experts
from mesp_mlx.model.attention import AttentionStage, cut_projections, limits, merge_heads, split_heads
from mesp_mlx.model.experts import ExpertsStage
from mesp_mlx.model.mlp import MLPStage
from mesp_mlx.model.model import Model, build
from mesp_mlx.model.plain import DecoderLayer
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch, State
from mesp_mlx.model.sublayer import Norm, Sublayer
from mesp_mlx.op_truths import TABLE_ROWS, numbers, products, softmax_gradient
from mesp_mlx.stream.store import Store

FLOORS = {"float32": 1e-4, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of the 16-bit types: a rounding of the largest number
SLACK = 2.0  # of two largest errors. Measured in 16 bits on tiny models: their ratio is 0.7 to 1.0 in the mean, by op, and by chance up to 1.5
MOST = 1e-3  # that autodiff may excuse in float32
FAINT = 1e-6  # a tensor this much smaller than its fellows is measured by them: it may hold nothing but their rounding
BLOCK_ROWS = 16  # query rows in a block of attention, so that there are several


def dtype_name(dtype: Any) -> str:
    """`float32` of either backend's."""
    return getattr(dtype, "__name__", str(dtype)).rpartition(".")[2]


def bound(dtype: str, autodiff: dict[str, float] | None, most: float = MOST) -> float:
    """The largest error let pass, given those of plain autodiff, if they were taken. most: that these may excuse in float32."""
    largest = max((autodiff or {}).values(), default=0.0)
    excused = SLACK * largest if math.isfinite(largest) else 0.0
    return max(FLOORS[dtype], min(excused, most) if dtype == "float32" else excused)


def error(found: np.ndarray, truth: np.ndarray, largest: float = 0.0) -> float:
    """max|found - truth| / max|truth|; infinite if a number is not finite or the shapes differ. largest: of all the truths beside this one, see FAINT."""
    if found.shape != truth.shape or not (np.isfinite(found).all() and np.isfinite(truth).all()):
        return math.inf
    off = float(np.abs(found.astype(np.float64) - truth).max(initial=0.0))
    return off / max(float(np.abs(truth).max(initial=0.0)), FAINT * largest, 1e-30)


@dataclass(frozen=True)
class Check:
    """How far the outputs of one backward are off, by name, and those of plain autodiff."""

    name: str
    dtype: str
    errors: dict[str, float]
    autodiff: dict[str, float]

    @property
    def bound(self) -> float:
        return bound(self.dtype, self.autodiff)

    @property
    def worst(self) -> str:
        """The output that is furthest off."""
        return max(self.errors, key=lambda output: self.errors[output])

    @property
    def passed(self) -> bool:
        return self.errors[self.worst] <= self.bound


def check(model: Model, spec: ModelSpec, store: Store, adapter: State, batch: Batch, seed: int) -> Iterator[Check]:
    """The ops of the first layer and the head, those that others use before them, then the stages: the first to fail is the culprit.

    Args:
        model: of structured stages, in the dtype to check.
        adapter: arrays of the model's backend; every projection of the first layer has its pair.
        batch: one group, whose first layer's inputs and last state are what the ops are given; cotangents are random.
    """
    (attention, mlp), backend, dtype = model.segments[0], model.embedding.ops, model.embedding.dtype
    assert isinstance(attention, AttentionStage)
    layer, exact = (_plain_layer(spec, side, attention.lora.scale, to) for side, to in ((backend, dtype), (reference, np.float64)))
    bench = Bench(spec, backend, dtype, attention.lora.scale, adapter, batch, np.random.default_rng([seed, 1]), layer, exact, Frozen(), {})
    with store.open(model.embedding) as w:
        bench.arrays["x"] = model.evaluate(model.embedding.forward(w, batch)["x"])
    yield _quantized(bench, model, store)
    with store.open(layer) as w:
        bench.frozen.update({module: w[module] for module in layer.modules})
        bench.prepare()
        for one_op in (_norms, _rope, _attention, _lora_linear, _mlp):
            if (found := one_op(bench)) is not None:
                yield found
        halves = [
            _stage(bench, "attention stage", attention, "x", mlp.adaptable[-1]),
            _stage(bench, "MLP stage", mlp, "x" if spec.parallel else "m", attention.adaptable[-1]),
        ]
        bench.frozen.clear()
    store.expect(model.forward_order())
    (state,) = backprop.forward(model, store, adapter, [batch])
    cross_entropy, head = _head(bench, model, store, state)
    yield from (cross_entropy, *halves, head)


def _plain_layer(spec: ModelSpec, backend: ModuleType, scale: float, dtype: Any) -> DecoderLayer:
    """The first layer in a backend's plain code."""
    (layer,) = build(spec.first_layers(1), backend, scale, dtype=dtype, method="mebp").segments[0]
    assert isinstance(layer, DecoderLayer)
    return layer


@dataclass(frozen=True)
class Bench:
    """The first layer in plain code on both sides, the run's and float64's, its weights, and what comes to each op."""

    spec: ModelSpec
    backend: ModuleType
    dtype: Any
    scale: float
    adapter: State
    batch: Batch
    rng: np.random.Generator
    layer: DecoderLayer
    exact: DecoderLayer
    frozen: dict[str, Any]
    arrays: dict[str, Any]

    def prepare(self) -> None:
        """From the layer's input x: the inputs h and h2 of its two halves' projections, m between the halves, and its heads, raw, normalised and turned."""
        plain, spec, attention, mlp = self.backend.plain, self.spec, self.layer.attention, self.layer.mlp
        x = self.arrays["x"]
        h = self.entered(attention.sublayer, x)
        found = {"h": h}
        outputs = [plain.linear(h, self.frozen[module], self.pair(module), self.scale) for module in attention.adaptable[:-1]]
        norms = dict(zip("qk", attention.qk_norms, strict=False))
        for name, raw, heads in zip("qkv", cut_projections(spec, outputs), (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True):
            over_width = spec.qk_norm == "width"
            found[f"raw {name}"] = head = raw if over_width else split_heads(raw, heads)
            head = norms[name].plain(plain, self.frozen, head) if name in norms else head
            head = split_heads(head, heads) if over_width else head
            if name != "v" and attention.rope is not None:
                found[f"unturned {name}"] = head
                head = plain.rope(head, attention.rope)
            found[name] = head
        found["m"] = self.layer.layer(self.without(mlp.adaptable[-1]), self.own(attention), x, self.batch)
        found["h2"] = self.entered(mlp.sublayer, x if spec.parallel else found["m"])
        self.arrays.update(self.backend.arrays.evaluate(found))

    def entered(self, sublayer: Sublayer, x: Any) -> Any:
        return x if sublayer.before is None else sublayer.before.plain(self.backend.plain, self.frozen, x)

    def pair(self, module: str) -> Any:
        return self.layer.attention.lora.pair(self.adapter, module)

    def own(self, stage: AttentionStage | MLPStage | ExpertsStage) -> State:
        """A stage's tensors of the adapter."""
        return {f"{module}.lora_{half}": self.adapter[f"{module}.lora_{half}"] for module in stage.adaptable for half in "ab"}

    def without(self, module: str) -> dict[str, Any]:
        """The layer's weights with one linear that gives zeros."""
        return self.frozen | {module: {name: value * 0 if hasattr(value, "shape") else value for name, value in self.frozen[module].items()}}

    def random(self, like: Any) -> Any:
        """A cotangent for an output of that shape."""
        return self.in_dtype(self.rng.standard_normal(like.shape, np.float32))

    def in_dtype(self, array: np.ndarray) -> Any:
        return self.backend.arrays.astype(self.backend.arrays.asarray(array.astype(np.float32)), self.dtype)

    def autodiff(self, form: Callable[..., Any], primals: State, dy: Any, *frozen: Any, parts: tuple[Any, Any] | None = None) -> tuple[State, State]:
        """Gradients of form(part, primals, *frozen) by autodiff of plain code, by the run's side and in float64. parts: what the plain code of each is."""
        ours, exact = parts or (self.backend.plain, reference.plain)
        naive = self.backend.plain.vjp(lambda given: form(ours, given, *frozen), primals, dy)[1]
        constants = [numbers(part) for part in frozen]
        return naive, reference.plain.vjp(lambda given: form(exact, given, *constants), numbers(primals), numbers(dy))[1]

    def judge(self, name: str, found: State, naive: State, truth: State) -> Check:
        found, naive, truth = numbers(found), numbers(naive), numbers(truth)
        largest = max(float(np.abs(array).max(initial=0.0)) for array in truth.values())
        ours, theirs = ({output: error(side[output], truth[output], largest) for output in truth} for side in (found, naive))
        return Check(name, dtype_name(self.dtype), ours, theirs)


def _quantized(bench: Bench, model: Model, store: Store) -> Check:
    """Both products, and the first rows dequantised, of the first linear of each kind, by shape and quantisation, in any layer."""
    ops, kinds, found, naive, truth = bench.backend.quantized, set(), {}, {}, {}
    stages = [stage for segment in model.segments for stage in segment]
    store.expect(stages)
    for stage in stages:
        with store.open(stage) as w:
            for module in stage.adaptable:
                linear = w[module] if module in stage.modules else next(w.each([module], [0]))[1][0]
                kind = frozenset((name, getattr(value, "shape", value)) for name, value in linear.items())
                if kind in kinds:
                    continue
                kinds.add(kind)
                out, width = bench.spec.tensors()[f"{module}.weight"][-2:]
                x, dy = (bench.in_dtype(bench.rng.standard_normal((*bench.batch.group.ids.shape, size))) for size in (width, out))
                ours = ops.matmul(x, linear), ops.matmul_transposed(dy, linear), ops.dequantize(ops.rows(linear, 0, TABLE_ROWS), bench.dtype)
                sides = ours, products(linear, x, dy, bench.in_dtype), products(linear, numbers(x), numbers(dy), np.float64)
                for whole, side in zip((found, naive, truth), sides, strict=True):
                    names = (f"{what} of {module.removeprefix('model.')}" for what in ("y", "dx", "W"))
                    whole |= dict(zip(names, map(numbers, side), strict=True))
    return bench.judge("quantized", found, naive, truth)


def _norms(bench: Bench) -> Check | None:
    """The layer's first norm, and those of q and k where the family has them."""
    attention, mlp = bench.layer.attention, bench.layer.mlp
    first = attention.sublayer.before or attention.sublayer.after or mlp.sublayer.before
    inputs = {"x": (bench.arrays["x"], first)} | {name: (bench.arrays[f"raw {name}"], norm) for name, norm in zip("qk", attention.qk_norms, strict=False)}
    found, naive, truth = {}, {}, {}
    for name, (x, norm) in inputs.items():
        if norm is None:
            continue
        dy = bench.random(x)
        found[name] = norm.backward(bench.frozen, x, dy)
        exact = dataclasses.replace(norm, ops=reference)
        sides = bench.autodiff(
            lambda part, given, w, norm=norm, exact=exact: (exact if part is reference.plain else norm).plain(part, w, given["x"]),
            {"x": x}, dy, {norm.module: bench.frozen[norm.module]},
        )  # fmt: skip
        naive[name], truth[name] = (side["x"] for side in sides)
    return bench.judge(f"{bench.spec.norm}_norm", found, naive, truth)


def _rope(bench: Bench) -> Check | None:
    """Nothing where the first layer rotates nothing."""
    rope, exact = bench.layer.attention.rope, bench.exact.attention.rope
    if rope is None or exact is None:
        return None
    dy = bench.random(bench.arrays["unturned q"])
    naive = _turned_back(bench.backend, rope, bench.dtype, dy)
    truth = _turned_back(reference, exact, np.float64, numbers(dy))
    return bench.judge("rope", {"x": bench.backend.rope.backward(dy, rope)}, {"x": naive}, {"x": truth})


def _turned_back(backend: ModuleType, rope: dict[str, Any], dtype: Any, dy: Any) -> np.ndarray:
    """The gradient at x from dy [B, H, T, d] by the forward rotation alone, which is linear: feature i of dx is dy times the turned unit vector i."""
    dx = np.empty(dy.shape)
    for i in range(dy.shape[-1]):
        unit = np.zeros((1, 1, *dy.shape[-2:]), np.float32)
        unit[..., i] = 1
        dx[..., i] = numbers((dy * backend.rope.forward(backend.arrays.astype(backend.arrays.asarray(unit), dtype), rope)).sum(-1))
    return dx


def _attention(bench: Bench) -> Check:
    """In several blocks, with each of the model's windows."""
    heads, scale = {name: bench.arrays[name] for name in "qkv"}, bench.spec.attention_scale
    how = limits(bench.spec, 0, bench.frozen)
    found, naive, truth = {}, {}, {}
    for window in dict.fromkeys(bench.spec.windows):
        dy = bench.random(heads["q"])
        gradients = bench.backend.attention.backward(*heads.values(), scale, dy, window, BLOCK_ROWS, **how)

        def form(part: Any, given: State, how: dict[str, Any], window: int | None = window) -> Any:
            return part.attention(given["q"], given["k"], given["v"], scale, window, **how)

        sides = bench.autodiff(form, heads, dy, how)
        for whole, side in zip((found, naive, truth), (dict(zip("qkv", gradients, strict=True)), *sides), strict=True):
            whole |= {name if window is None else f"{name} (window {window})": array for name, array in side.items()}
    return bench.judge("attention", found, naive, truth)


def _lora_linear(bench: Bench) -> Check:
    """The second one's: k_proj's, or that of what leads out where q, k and v are one."""
    module = bench.layer.attention.adaptable[1]
    h = bench.arrays["h"]
    if module == bench.layer.attention.adaptable[-1]:
        h = merge_heads(bench.random(bench.arrays["q"]))
    linear, (a, b) = bench.frozen[module], bench.pair(module)
    dy = bench.in_dtype(bench.rng.standard_normal((*h.shape[:2], b.shape[1])))
    dx, (da, db) = bench.backend.lora_linear.backward(h, linear, (a, b), bench.scale, dy)

    def form(part: Any, given: State, linear: dict[str, Any]) -> Any:
        return part.linear(given["x"], linear, (given["A"], given["B"]), bench.scale)

    sides = bench.autodiff(form, {"x": h, "A": a, "B": b}, dy, linear)
    return bench.judge("lora_linear", {"x": dx, "A": da, "B": db}, *sides)


def _mlp(bench: Bench) -> Check:
    mlp, h = bench.layer.mlp, bench.arrays["h2"]
    if isinstance(mlp, ExpertsStage):
        return experts(bench, mlp)
    linears, pairs = mlp.linears(bench.frozen), mlp.pairs(bench.adapter)

    def form(part: Any, given: State, linears: dict[str, Any]) -> Any:
        def linear(name: str, x: Any) -> Any:
            return part.linear(x, linears[name], (given[f"{name} A"], given[f"{name} B"]), bench.scale)

        up = linear("up", given["x"])
        return linear("down", part.gate(linear("gate", given["x"]), up, mlp.spec.activation) if mlp.spec.gated else part.activate(up, mlp.spec.activation))

    def named(x: Any, pairs: dict[str, Any]) -> State:
        return {"x": x} | {f"{name} {half}": array for name, pair in pairs.items() for half, array in zip("AB", pair, strict=True)}

    dy = bench.random(h)
    dx, dpairs = mlp.op.backward(h, *linears.values(), pairs, bench.scale, dy, activation=mlp.spec.activation)
    return bench.judge("gated_mlp" if mlp.spec.gated else "mlp", named(dx, dpairs), *bench.autodiff(form, named(h, pairs), dy, linears))


def _stage(bench: Bench, name: str, stage: Any, start: str, other: str) -> Check:
    """A stage from its input; `other` is the last linear of the layer's other half."""
    x, own, batch = bench.arrays[start], bench.own(stage), bench.batch
    dy, state = bench.random(x), {"x": x}
    if bench.spec.parallel:
        state["residual"] = x
    _, kept = stage.forward(bench.frozen, own, state, batch)
    dstate, gradients = stage.backward(bench.frozen, own, state, kept, {"x": dy}, batch, True)
    if "residual" in dstate:  # which is x here
        dstate = {"x": dstate["x"] + dstate["residual"]}
    parts = bench.layer, bench.exact
    sides = bench.autodiff(lambda part, given, w: part.layer(w, given, given["x"], batch), {"x": x} | own, dy, bench.without(other), parts=parts)
    layer = f"{bench.spec.layer_name(0)}."
    return bench.judge(name, *({tensor.removeprefix(layer): array for tensor, array in side.items()} for side in (dstate | gradients, *sides)))


def _head(bench: Bench, model: Model, store: Store, state: State) -> tuple[Check, Check]:
    """Cross-entropy's sweep at the model's last state, and the head stage around it, at supervised positions."""
    ops, arrays, group, head = bench.backend, bench.backend.arrays, bench.batch.group, model.head
    norm, exact = (Norm(bench.spec, side, bench.spec.names.norm) for side in (ops, reference))
    limits = bench.spec.logit_scale, bench.spec.logit_cap
    picked = np.flatnonzero(group.mask.reshape(-1))
    targets = group.targets.reshape(-1)[picked]
    x = arrays.take_rows(state["x"].reshape(-1, bench.spec.hidden_size), arrays.asarray(picked))
    with store.open(head) as w:
        h = model.evaluate(norm.plain(ops.plain, w, x))
        sweep = ops.cross_entropy.start(h)
        for _, tile in w.tiles(bench.spec.table, TABLE_ROWS):
            sweep = model.evaluate(ops.cross_entropy.add(sweep, h, tile, *limits))
        words, place = np.unique(targets, return_inverse=True)
        dh = ops.cross_entropy.finish(sweep, h, ops.quantized.take(w.take(bench.spec.table, words), arrays.asarray(place)), *limits)[1]
        sides = [softmax_gradient(w, bench.spec.table, *side, targets, *limits) for side in ((bench.in_dtype, h), (np.float64, numbers(h)))]
        one = bench.judge("cross_entropy", {"h": dh}, {"h": sides[0]}, {"h": sides[1]})
        naive = ops.plain.vjp(lambda given: norm.plain(ops.plain, w, given["x"]), {"x": x}, bench.in_dtype(sides[0]))[1]
        frozen = {norm.module: numbers(w[norm.module])}
        truth = reference.plain.vjp(lambda given: exact.plain(reference.plain, frozen, given["x"]), {"x": numbers(x)}, sides[1])[1]
        found = head.loss(w, [state], [bench.batch])[1][0]["x"].reshape(-1, bench.spec.hidden_size)
    wholes = [np.zeros(found.shape) for _ in range(2)]
    for whole, side in zip(wholes, (naive, truth), strict=True):
        whole[picked] = numbers(side["x"])
    return one, bench.judge("head", {"x": found}, {"x": wholes[0]}, {"x": wholes[1]})
