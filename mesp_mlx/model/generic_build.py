"""From mlx-lm's model to stages: adapters in, weights out, recorders in place, and one stage for each call of a layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mesp_mlx.data.group import Group
from mesp_mlx.errors import UserError
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model import generic
from mesp_mlx.model.generic_ends import Done, Tail, WholeEnd
from mesp_mlx.model.generic_products import linear, multiply_here
from mesp_mlx.model.generic_recurrence import take_in_pieces
from mesp_mlx.model.generic_stages import Engine, LayerStage, Nothing, Start, StartStage
from mesp_mlx.model.generic_tree import rebuild
from mesp_mlx.model.generic_walk import Slots, Walk, module_of, modules_of, parameters
from mesp_mlx.model.generic_wiring import PROBE_TOKENS, Wiring, discover, refusal
from mesp_mlx.model.head import Head
from mesp_mlx.model.model import Evaluate, Model
from mesp_mlx.model.stages import Batch
from mesp_mlx.model.weights import listed
from mesp_mlx.stream.safetensors import Entry

HALVES = ("lora_a", "lora_b")


def build(
    spec: generic.GenericSpec,
    entries: Mapping[str, Entry],
    backend: Any,
    lora_scale: float,
    modules: Sequence[str],
    rank: int,
    strategy: Strategy,
    dtype: Any,
    limit_bytes: int | None,
    tiled_head: bool,
    products: bool,
) -> Model:
    """As `generic.build`, which says what the arguments are."""
    model = spec.made()
    _quantize(model, spec, entries)
    slots = parameters(model)
    _check(spec, slots, entries)
    dtype = dtype or mx.float32
    lazy = {name: _lazy(container[key], dtype) for name, (container, key) in slots.items()}
    adapters, engine_of = _adapt(model, modules, rank, lora_scale)
    lazy |= {name: mx.zeros(container[key].shape) for name, (container, key) in adapters.items()}
    generic.train_mode(model)
    layers, parts = generic.layer_paths(model), model.modules()
    take_in_pieces(parts)
    walk, both = Walk(model, layers, {id(container): module_of(name) for name, (container, _) in slots.items()}), slots | adapters
    for name, (container, key) in both.items():  # a layer's weights are gone; of others the type and shape can be asked, which the model's own code may do
        container[key] = None if _inside(name, layers) else lazy[name]
    wiring = discover(walk, both, lazy, set(modules), tiled_head)
    owners = _owners(wiring, adapters)
    engine = Engine(backend, walk, wiring, slots, adapters, dtype, _carried(wiring, owners), parts)
    engine_of.append(engine)
    twice = [module for module in modules if sum(module in adapted for adapted in owners.values()) > 1]
    if twice and strategy.gradients == "applied":
        why = f"{twice[0]} is used several times in a forward: its gradient can't be applied layer by layer"
        raise UserError(f"training {spec.model_type}: {why}. Give --grad-clip (1e9 clips nothing), and it is held.")
    found = _stages(engine, owners, strategy, Evaluate(backend, limit_bytes))
    _try(engine, found, lazy)
    if products:
        multiply_here(engine.parts, backend, engine.choices)
    return found


class _Lazy:
    """An open stage whose weights are never computed."""

    def __init__(self, lazy: Mapping[str, mx.array]):
        self._modules: dict[str, dict[str, mx.array]] = {}
        for name, array in lazy.items():
            module, _, parameter = name.rpartition(".")
            self._modules.setdefault(module, {})[parameter] = array

    def __getitem__(self, module: str) -> dict[str, mx.array]:
        return self._modules[module]


def _try(engine: Engine, model: Model, lazy: Mapping[str, mx.array]) -> None:
    """Take the gradient of one stage of each kind, without computing it: MLX says what has none when it is asked for the graph.

    Raises:
        UserError: a kind of stage has no gradient: why.
    """
    ids = np.arange(1, 1 + PROBE_TOKENS, dtype=np.int32)[None]
    batch, w = Batch(Group(ids, ids, np.ones(ids.shape, bool), (0,), (PROBE_TOKENS,))), _Lazy(lazy)
    calls, places = engine.wiring.calls, {}
    for index, call in enumerate(calls):
        engine.patterns[ids.shape, index] = call.pattern
        rebuild(call.pattern, lambda place, index=index: places.setdefault((index, place.index), mx.zeros(place.shape, place.dtype)))
    seen = set()
    for (stage,) in model.segments:
        if isinstance(stage, LayerStage):
            module = engine.walk.real(calls[stage.call].owner)
            kind = tuple(type(part).__name__ for part in module.modules())
            if kind not in seen:
                seen.add(kind)
                state = {engine.names[leaf]: places[leaf] for leaf in engine.live(stage.call - 1)}
                dstate = {engine.names[leaf]: places[leaf] for leaf in engine.live(stage.call) if leaf in engine.carried}
                adapter = {f"{module}.{half}": lazy[f"{module}.{half}"] for module in stage.adaptable for half in HALVES}
                try:
                    stage.backward(w, adapter, state, None, dstate, batch, True)
                except Exception as error:
                    raise refusal(f"{stage.name} ({type(module).__name__}) has no gradient", error) from error
    engine.batch = None


def _stages(engine: Engine, owners: dict[int, list[str]], strategy: Strategy, evaluate: Evaluate) -> Model:
    """The stages of a walked model."""
    calls, end = engine.wiring.calls, engine.wiring.end
    inside: dict[str, list[str]] = {}  # the parameters of each module that is called
    for name in engine.slots:
        for path in {call.owner for call in calls if name.startswith(f"{call.owner}.")}:
            inside.setdefault(path, []).append(name)

    def needed(index: int) -> tuple[str, ...]:
        call = calls[index]
        return modules_of(inside.get(call.owner, []) + sorted(name for name in call.parameters if name in engine.slots))

    starting = range(engine.starts)
    start = Start(engine, tuple(dict.fromkeys(module for index in starting for module in needed(index) if module not in engine.walk.tables)))
    stages: list[Any] = []
    if adapted := [module for index in starting for module in owners.get(index, [])]:
        stages.append(StartStage(start, tuple(adapted)))
    seen: dict[str, int] = {}
    for index, call in enumerate(calls):
        if call.layer:
            seen[call.owner] = seen.get(call.owner, 0) + 1
            name = call.owner if seen[call.owner] == 1 else f"{call.owner}#{seen[call.owner]}"
            stages.append(LayerStage(engine, index, name, needed(index), tuple(owners.get(index, []))))
    ending = modules_of(sorted(name for name in end.parameters if name in engine.slots))
    if engine.walk.head:
        width = engine.ops.quantized.shape(linear(engine.walk.head[0].real))[1]
        head: Any = Head(Tail(engine, ending, width), engine.ops, evaluate, strategy)
    else:
        stages.append(WholeEnd(engine, ending, tuple(owners.get(len(calls), []))))
        head = Done()
    embedding: Any = Nothing(engine.ops) if adapted else start
    return Model(embedding, tuple((stage,) for stage in stages), head, evaluate, strategy)


def _owners(wiring: Wiring, adapters: Slots) -> dict[int, list[str]]:
    """The adapted modules of each call, and of the end."""
    owners: dict[int, list[str]] = {}
    for module in modules_of(adapters):
        names = {f"{module}.{half}" for half in HALVES}
        for index, call in enumerate([*wiring.calls, wiring.end]):
            if names & call.parameters or (call.owner and f"{module}.".startswith(f"{call.owner}.")):
                owners.setdefault(index, []).append(module)
    return owners


def _carried(wiring: Wiring, owners: dict[int, list[str]]) -> set[Any]:
    """The leaves that depend on an adapter: those that are no whole numbers, of a call that has one, or is given such a leaf."""
    carried: set[Any] = set()
    for index, call in enumerate(wiring.calls):
        if index in owners or call.needs & carried:
            places: list[Any] = []
            rebuild(call.pattern, lambda place, places=places: places.append(place) or mx.zeros(()))
            carried |= {(index, place.index) for place in places if mx.issubdtype(place.dtype, mx.floating)}
    return carried


def _adapt(model: Any, modules: Sequence[str], rank: int, scale: float) -> tuple[Slots, list[Any]]:
    """mlx-lm's LoRA modules in place of those named. Where their tensors stand, and a list that is to hold the engine, which their dropout asks."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    linear_to_lora_layers(model, 0, {"rank": rank, "scale": scale, "dropout": 0.0, "keys": set(modules)})
    engine: list[Any] = []
    slots: Slots = {}
    found = dict(model.named_modules())
    for name in modules:
        adapted = found[name]
        adapted["dropout"] = Dropped(engine, name)
        slots |= {f"{name}.{half}": (adapted, half) for half in HALVES}
    return slots, engine


class Dropped:
    """Stands for a LoRA module's dropout: masks that are the same whenever they are drawn, forward and backward."""

    def __init__(self, engine: list[Engine], module: str):
        self._engine, self._module = engine, module

    def __call__(self, x: mx.array) -> mx.array:
        engine = self._engine[0] if self._engine else None
        drop = engine.batch.dropout if engine and engine.batch else None
        if engine is None or engine.batch is None or drop is None or drop.rate == 0:
            return x
        group, width = engine.batch.group, x.shape[-1]
        by_row = x.ndim == 3 and x.shape[:2] == group.ids.shape
        rows, tokens = (group.rows, x.shape[1]) if by_row else (group.rows[:1], x.size // width)  # experts see the tokens of all rows together
        keep = [engine.ops.dropout.keep_mask(drop.seed, drop.update, int(row), self._module, tokens, width, drop.rate) for row in rows]
        return engine.ops.lora_linear.drop(x, (mx.concatenate(keep).reshape(x.shape), drop.rate))


def _quantize(model: Any, spec: generic.GenericSpec, entries: Mapping[str, Entry]) -> None:
    """Modules become what their tensors on disk are, as mlx_lm.utils.load_model makes them."""
    import mlx_lm.utils as mlx_lm

    settings = spec.quantization
    if (theirs := spec.config.get("quantization_config")) and not settings:
        if theirs.get("quant_method") != "bitnet":
            raise UserError(f"reading {spec.source}: the weights are quantised by {theirs.get('quant_method')!r}. Give one that mlx_lm.convert made.")
        from mlx_lm.models.bitlinear_layers import bitnet_quantize

        bitnet_quantize(model, theirs)
    if not settings:
        return
    found = {name: _Shape(entry) for name, entry in entries.items()}

    def setting(path: str, module: Any) -> Any:
        if path in settings:
            return settings[path]
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in entries:
            return False
        inferred = mlx_lm.infer_quant_config(path, module, found)
        return inferred | ({"global_scale": True} if f"{path}.global_scale" in entries and mlx_lm._takes_global_scale(module) else {})

    common = {"group_size": settings["group_size"], "bits": settings["bits"], "mode": settings.get("mode", "affine")}
    nn.quantize(model, class_predicate=setting, **common)


class _Shape:
    """What mlx-lm asks of a tensor to tell how it is packed."""

    def __init__(self, entry: Entry):
        self.shape, self.dtype = entry.shape, mx.uint8 if entry.dtype == "U8" else mx.float32


def _check(spec: generic.GenericSpec, slots: Slots, entries: Mapping[str, Entry]) -> None:
    """Raise UserError when a tensor is missing, unknown or of another shape."""
    missing = [name for name in slots if name not in entries]
    unknown = [name for name in entries if name not in slots]
    wrong = [
        f"{name}: {list(entries[name].shape)}, expected {list(container[key].shape)}"
        for name, (container, key) in slots.items()
        if name in entries and entries[name].shape != container[key].shape
    ]
    for what, names in (("that the model needs are missing", missing), ("are no part of the model", unknown), ("do not fit config.json", wrong)):
        if names:
            raise UserError(f"reading weights for {spec.source}: {len(names)} tensors {what}:{listed(names)}\nConvert the model with mlx_lm.convert.")


def _lazy(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Zeros of a parameter's shape, never computed."""
    return mx.zeros(array.shape, dtype if mx.issubdtype(array.dtype, mx.floating) else array.dtype)


def _inside(name: str, layers: Mapping[int, str]) -> bool:
    return any(name.startswith(f"{path}.") for path in layers.values())
