"""What the layers of a model of mlx-lm's take in memory, measured before a run is planned: see memory.measured. No weight is read: all are drawn.

They are drawn of a trained model's size, and so are states: of experts as many serve as would, each a part of the tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mesp_mlx import ops
from mesp_mlx.data.group import Group
from mesp_mlx.errors import UserError
from mesp_mlx.memory import measured
from mesp_mlx.memory.measured import Curve, Fit, Tried
from mesp_mlx.memory.workload import STORED, Workload
from mesp_mlx.model import generic, generic_whole
from mesp_mlx.model.generic_ends import Done
from mesp_mlx.model.generic_products import multiply_here
from mesp_mlx.model.generic_stages import LayerStage
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, State
from mesp_mlx.stream.safetensors import Entry

NAMES = {name: short for short, name in STORED.items()} | {"uint32": "U32", "uint8": "U8"}
DRAWN_ROWS = 257  # different ones of a weight, more than a router has experts
HEAD_DIM = 64  # of heads that are not known
SLOW_NUMBERS = 100_000_000  # of a layer's weights: with more, a CPU takes so long that shorter rows are tried


def measure(load: Workload) -> Workload:
    """The workload of a generic model with what each of its layers takes, and how the model ends.

    Raises:
        UserError: the model can't be walked layer by layer.
    """
    spec = load.spec
    assert isinstance(spec, generic.GenericSpec)
    arrays = [part for name, shape in spec.tensors().items() for part in load.stored(name, name, shape)]
    entries = {name: Entry(name, Path("drawn"), NAMES[dtype], shape, 0, 0) for name, shape, dtype in arrays}
    try:
        return _measured(load, spec, arrays, entries)
    except UserError as refused:
        if load.method != "backprop":
            raise generic_whole.offered(refused, spec, entries, ops, load.modules, load.rank) from None
    # As a whole it may train: a guess from its width, since no layer of it runs on its own.
    array = 4 * load.spec.hidden_size
    guess = Fit("a layer, by its width", Curve(0, array), Curve(0, array), Curve(0, 16 * array), Curve(0, 48 * array, 3 * array / HEAD_DIM), 0.25)
    return replace(load, measured=(guess,) * load.spec.num_layers, whole_end=True)


def _measured(load: Workload, spec: generic.GenericSpec, arrays: list[tuple[str, tuple[int, ...], str]], entries: Mapping[str, Entry]) -> Workload:
    dtype = mx.float32 if load.itemsize == 4 else mx.bfloat16
    tiled = load.tiled_head or load.method != "mebp"
    model = generic.build(spec, entries, ops, 1.0, load.modules, load.rank, dtype=dtype, tiled_head=tiled, products=False)
    weights = _Drawn(spec, arrays)
    stages = [stage for segment in model.segments for stage in segment]
    pairs = {module: spec.pair_shapes(module, load.rank) for module in load.modules}
    adapter = _evaluated({f"{module}.lora_{half}": mx.zeros(shape) for module, pair in pairs.items() for half, shape in zip("ab", pair, strict=True)})
    lengths = _lengths(load)
    numbers = [i for i, stage in enumerate(stages) if isinstance(stage, LayerStage)]
    engine, states, patterns = stages[numbers[0]].engine, {}, {}
    for length in lengths:
        states[length] = _states(model, weights, adapter, length)
        patterns |= engine.patterns
    engine.patterns |= patterns  # a pass of each length goes on
    multiply_here(engine.parts, ops, engine.choices)
    layers = [spec.layer_of(f"{stages[i].name.partition('#')[0]}.") for i in numbers]
    given = [tuple((name, x.shape, str(x.dtype)) for name, x in states[lengths[-1]][i].items()) for i in numbers]
    kinds = [(load.alike[layer], shapes) for layer, shapes in zip(layers, given, strict=True)]
    names = {kind: f"{type(spec.skeleton.layers[layer]).__name__} {layer}" for kind, layer in reversed(list(zip(kinds, layers, strict=True)))}

    def at(place: int, length: int) -> Tried:
        stage, before, after = stages[numbers[place]], *states[length][numbers[place] : numbers[place] + 2]
        own = {name: tensor for name, tensor in adapter.items() if name.rpartition(".")[0] in stage.adaptable}
        passed_on = {id(x) for x in states[length][numbers[place] - 1].values()} if numbers[place] else set()
        state, dstate, w = _evaluated(before), _evaluated(after), weights.opened(stage.modules)
        batch = _batch(length)
        return Tried(
            sum(x.nbytes for x in before.values()),
            sum(x.nbytes for x in before.values() if id(x) not in passed_on),
            lambda: stage.forward(w, own, state, batch)[0],
            lambda: stage.backward(w, own, state, None, dstate, batch, True),
        )

    fits = measured.each(names, kinds, at, lengths)
    by_layer: dict[int, Fit] = {}
    for layer, fit in zip(layers, fits, strict=True):  # of a layer that is called twice the call that takes more
        by_layer[layer] = max(by_layer.get(layer, fit), fit, key=lambda found: found.backward.bytes(1, lengths[-1]))
    mx.clear_cache()  # what is kept of this is no run's
    idle = next(iter(by_layer.values()))
    found = tuple(by_layer.get(layer, idle) for layer in range(spec.num_layers))
    return replace(load, measured=found, whole_end=isinstance(model.head, Done))


class _Drawn:
    """Gives stages weights as a store does: lazy zeros, or drawn ones of an open stage."""

    def __init__(self, spec: generic.GenericSpec, arrays: list[tuple[str, tuple[int, ...], str]]):
        self._spec, self._made = spec, {}
        for name, shape, dtype in arrays:
            module, _, parameter = name.rpartition(".")
            self._made.setdefault(module, {})[parameter] = shape, getattr(mx, dtype)

    def __getitem__(self, module: str) -> dict[str, Any]:
        return {name: mx.zeros(shape, dtype) for name, (shape, dtype) in self._made[module].items()}

    def opened(self, modules: tuple[str, ...]) -> Mapping[str, dict[str, Any]]:
        weights = {module: self._drawn(module) for module in modules}
        mx.eval(weights)
        return weights

    def _drawn(self, module: str) -> dict[str, Any]:
        made, setting = self._made[module], self._spec.quantized_as(module)
        found = {name: _numbers(name, shape, dtype) for name, (shape, dtype) in made.items()}
        if setting and "scales" in made:
            parts = mx.quantize(_rows(made["scales"][0][-1] * setting.group_size), setting.group_size, setting.bits, setting.mode)
            found |= {name: _in_turn(part, *made[name]) for name, part in zip(("weight", "scales", "biases"), parts, strict=False)}
        return found

    def take(self, module: str, rows: np.ndarray) -> dict[str, Any]:
        setting = self._spec.quantized_as(module)
        linear = {name: mx.zeros((len(rows), *shape[1:]), dtype) for name, (shape, dtype) in self._made[module].items()}
        return linear | ({"bits": setting.bits, "group_size": setting.group_size, "mode": setting.mode} if setting and "scales" in linear else {})


def _lengths(load: Workload) -> tuple[int, ...]:
    numbers = max(sum(int(np.prod(shape)) for _, shape, _ in layout.arrays) for layout in load.weights["layer"])
    longest = 64 if load.on_cpu and numbers > SLOW_NUMBERS else measured.LENGTHS[-1]
    longest = min(longest, load.spec.max_positions)
    return tuple(sorted({max(1, longest // 4), max(1, longest // 2), longest}))


def _batch(length: int) -> Batch:
    ids = np.zeros((1, length), np.int32)
    return Batch(Group(ids, ids, np.ones((1, length), bool), (0,), (length,)))


def _states(model: Model, w: Any, adapter: State, length: int) -> list[State]:
    """The state before each stage, and after the last, never computed."""
    batch = _batch(length)
    states = [model.embedding.forward(w, batch)]
    for segment in model.segments:
        for stage in segment:
            own = {name: tensor for name, tensor in adapter.items() if name.rpartition(".")[0] in stage.adaptable}
            states.append(stage.forward(w, own, states[-1], batch)[0])
    return states


def _numbers(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Weights of about 1 / sqrt(in), biases of 0; what else has one axis, as norms have, is 1."""
    if not mx.issubdtype(dtype, mx.floating) or "bias" in name:
        return mx.zeros(shape, dtype)
    return _in_turn(_rows(shape[-1]), shape, dtype) if len(shape) > 1 else mx.ones(shape, dtype)


def _rows(width: int) -> mx.array:
    """Rows that a weight is made of."""
    return mx.random.normal((DRAWN_ROWS, width), scale=width**-0.5, key=mx.random.key(width))


def _in_turn(rows: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.take(rows, mx.arange(math.prod(shape[:-1])) % len(rows), axis=0).reshape(shape).astype(dtype)


def _evaluated(state: State) -> State:
    """Arrays of such shapes: numbers drawn, or where they are no fractions 0."""
    fractions = {name: mx.issubdtype(x.dtype, mx.floating) for name, x in state.items()}
    drawn = {name: mx.random.normal(x.shape, x.dtype, key=mx.random.key(0)) if fractions[name] else mx.zeros(x.shape, x.dtype) for name, x in state.items()}
    mx.eval(drawn)
    return drawn
