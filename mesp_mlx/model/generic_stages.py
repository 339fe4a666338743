"""Stages of a model that is walked by its own forward: the start, one for each call of a layer, and the end where no tiled head serves.

F_i is the model's forward up to its i-th call: earlier calls answer from the state, or, where nothing asks for them any more, with zeros that are never
computed; the i-th is computed, and the forward is left. So what a model does between its layers is part of the stage after it, and MLX's vjp of F_i with
respect to the state and the layer's adapter is the stage's backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mesp_mlx.model.generic_products import SETTINGS, Choices, ChosenProduct, Product
from mesp_mlx.model.generic_tree import Place, flatten
from mesp_mlx.model.generic_walk import Left, Slots, Station, Walk, placed
from mesp_mlx.model.generic_wiring import Leaf, Wiring, answer
from mesp_mlx.model.stages import Batch, Gradients, State


@dataclass
class Engine:
    """A walk and its wiring, as the stages share them.

    Args:
        slots, adapters: where parameters stand, of the model and of its adapter.
        dtype: of activations; 16-bit weights become it where it is float32.
        carried: the leaves that depend on an adapter.
        parts: all modules of the model.
        choices: the experts that its products are asked for.

    Attributes:
        last: the last call that asks for a leaf; the end counts as one.
        starts: how many calls come before the first layer's.
        names: what a leaf is called in the state.
        batch: the batch of the walk that is under way, or was last.
        patterns: what a call's output looked like in this pass, by the shape of ids and the call, for walks that do not ask for it.
        starting: whether a pass has come no further than the start of its groups.
    """

    ops: Any
    walk: Walk
    wiring: Wiring
    slots: Slots
    adapters: Slots
    dtype: mx.Dtype
    carried: set[Leaf]
    parts: list[nn.Module] = field(default_factory=list)
    choices: Choices = field(default_factory=Choices)
    batch: Batch | None = None
    patterns: dict[tuple[Any, int], Any] = field(default_factory=dict)
    starting: bool = False

    def __post_init__(self) -> None:
        self.last: dict[Leaf, int] = {}
        for index, call in enumerate([*self.wiring.calls, self.wiring.end]):
            self.last |= dict.fromkeys(call.needs, index)
        self.starts = next((index for index, call in enumerate(self.wiring.calls) if call.layer), 0)
        # A leaf that only the next call asks for is "x" in the state, the first of them; all others have names of their own.
        self.names: dict[Leaf, str] = {}
        for leaf in sorted(self.last):
            following = max(leaf[0] + 1, self.starts)
            first = self.last[leaf] == following and not any(self.last[other] == following for other in self.live(following - 1) if other < leaf)
            self.names[leaf] = "x" if first else f"{leaf[0]}.{leaf[1]}"

    def live(self, call: int) -> list[Leaf]:
        """What is asked for after a call, of all that there is by then."""
        return sorted(leaf for leaf, last in self.last.items() if leaf[0] <= call < last)

    def weights(self, w: Any, modules: Sequence[str]) -> dict[str, mx.array]:
        """An open stage's parameters by name."""
        named = ((f"{module}.{name}".removeprefix("."), value) for module in modules for name, value in w[module].items() if name not in SETTINGS)
        return {name: self._cast(name, value) for name, value in named if name in self.slots}

    def forward(self, batch: Batch, call: int, state: State) -> Any:
        """What the model's forward leaves with at a call: (output, changes) of a layer; the arguments of the head; or its logits, where there is none."""
        self.batch, self.starting = batch, False
        ids = mx.array(batch.group.ids)
        names = {self.names[leaf]: leaf for leaf in self.live(call - 1)}
        stored = {leaf: state[name] for name, leaf in names.items()}

        def visit(index: int, station: Station) -> Any:
            if index < call:

                def leaf(place: Place) -> mx.array:
                    found = stored.get((index, place.index))  # an alias: what the model changes in place must not change in the state
                    return mx.zeros(place.shape, place.dtype) if found is None else found[...]

                return answer(self.patterns[ids.shape, index], station, leaf)
            raise Left(station.compute() if station.recorder.layer else station.args)

        return self.walk.run(ids, visit)

    def outputs(self, batch: Batch, call: int, tree: Any) -> dict[Leaf, mx.array]:
        """A call's output by leaf; what it looks like is remembered for walks that do not ask for it."""
        leaves, self.patterns[batch.group.ids.shape, call] = flatten(tree)
        return {(call, k): leaf for k, leaf in enumerate(leaves)}

    def differentiate(self, function: Callable[[State], list[mx.array]], primals: State, cotangents: list[mx.array], adapter: State) -> State:
        """The gradient of what a function of the primals gives, by their names; those of an adapter stand in their modules while it runs."""
        names = list(primals)
        if not cotangents:
            return {name: mx.zeros_like(value) for name, value in primals.items()}

        def given(*arrays: mx.array) -> list[mx.array]:
            own = dict(zip(names, arrays, strict=True))
            with placed(self.adapters, {name: own.get(name, value) for name, value in adapter.items()}):
                return function(own)

        with self.choices.known(lambda: given(*primals.values())):
            _, gradients = mx.vjp(given, list(primals.values()), cotangents)
        return dict(zip(names, gradients, strict=True))

    def _cast(self, name: str, array: mx.array) -> mx.array:
        narrow = self.dtype == mx.float32 and array.dtype in (mx.float16, mx.bfloat16)
        return array.astype(mx.float32) if narrow and not isinstance(self.slots[name][0], Product | ChosenProduct) else array  # those widen it by the tile


@dataclass(frozen=True, eq=False)
class LayerStage:
    """One call of a layer, and what the model does between the call before it and this one."""

    engine: Engine
    call: int
    name: str
    modules: tuple[str, ...]
    adaptable: tuple[str, ...]

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The state after the call; nothing is kept."""
        engine = self.engine
        with placed(engine.slots, engine.weights(w, self.modules)), placed(engine.adapters, adapter):
            outputs = engine.outputs(batch, self.call, engine.forward(batch, self.call, state))
        before = {leaf: engine.names[leaf] for leaf in engine.live(self.call - 1)}
        return {engine.names[leaf]: outputs[leaf] if leaf in outputs else state[before[leaf]] for leaf in engine.live(self.call)}, {}

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapter, by MLX's vjp of the call; all it makes is kept while it is walked back."""
        engine = self.engine
        results = [leaf for leaf in engine.live(self.call) if leaf[0] == self.call and leaf in engine.carried]
        inputs = [engine.names[leaf] for leaf in engine.live(self.call - 1) if leaf in engine.carried] if need_dx else []
        asked = {engine.names[leaf] for leaf in engine.wiring.calls[self.call].needs}

        def function(own: State) -> list[mx.array]:
            leaves, _ = flatten(engine.forward(batch, self.call, {**state, **own}))
            return [leaves[index] for _, index in results]

        primals = {name: state[name] for name in inputs if name in asked} | adapter
        with placed(engine.slots, engine.weights(w, self.modules)):
            gradients = engine.differentiate(function, primals, [dstate[engine.names[leaf]] for leaf in results], adapter)
        own = {name: gradients.pop(name) for name in adapter}
        return passed_on(engine, self.call, inputs, gradients, dstate), own


def passed_on(engine: Engine, call: int, inputs: list[str], gradients: State, dstate: State) -> State:
    """The gradient of the state before a call: what the call gives, and what is asked for later."""
    later = {engine.names[leaf] for leaf in engine.live(call - 1) if engine.last[leaf] > call}
    result = {}
    for name in inputs:
        parts = [given[name] for given, has in ((gradients, name in gradients), (dstate, name in later)) if has]
        result[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return result


@dataclass(frozen=True, eq=False)
class Start:
    """All calls before the first layer's: embeddings, of which only the rows that the tokens name are read, and what else a model begins with."""

    engine: Engine
    modules: tuple[str, ...]
    name: str = "start"

    @property
    def ops(self) -> Any:
        return self.engine.ops

    def forward(self, w: Any, batch: Batch) -> State:
        """The state before the first layer."""
        engine, found = self.engine, {}
        ids = mx.array(batch.group.ids)
        if not engine.starting:  # the shapes of the pass before this one are many, over a long run
            engine.patterns.clear()
        engine.batch, engine.starting = batch, True

        def visit(index: int, station: Station) -> Any:
            if station.recorder.layer:
                raise Left(None)
            found.update(engine.outputs(batch, index, station.compute()))
            return answer(engine.patterns[ids.shape, index], station, lambda place: found[index, place.index][...])

        def rows(path: str, ids: mx.array) -> mx.array:
            wanted = np.array(ids)
            named, place = np.unique(wanted, return_inverse=True)
            table = engine.ops.quantized.dequantize(w.take(path, named), engine.dtype)
            return mx.take(table, mx.array(place.reshape(-1)), axis=0).reshape(*wanted.shape, -1)

        engine.walk.rows = rows
        try:
            with placed(engine.slots, engine.weights(w, self.modules)):
                engine.walk.run(ids, visit)
        finally:
            engine.walk.rows = None
        return {engine.names[leaf]: found[leaf] for leaf in engine.live(engine.starts - 1)}


@dataclass(frozen=True, eq=False)
class StartStage:
    """The start where something in it is adapted: a stage over a state of nothing, after an embedding that is `Nothing`."""

    start: Start
    adaptable: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def modules(self) -> tuple[str, ...]:
        return self.start.modules

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The state before the first layer."""
        with placed(self.start.engine.adapters, adapter):
            return self.start.forward(w, batch), {}

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the adapter."""
        engine = self.start.engine
        results = [engine.names[leaf] for leaf in engine.live(engine.starts - 1) if leaf in engine.carried]

        def function(own: State) -> list[mx.array]:
            found = self.start.forward(w, batch)
            return [found[name] for name in results]

        return {}, engine.differentiate(function, adapter, [dstate[name] for name in results], adapter)


@dataclass(frozen=True, eq=False)
class Nothing:
    """What stands for the embedding where the start is a stage."""

    ops: Any
    name: str = "nothing"
    modules: tuple[str, ...] = ()

    def forward(self, w: Any, batch: Batch) -> State:
        """An empty state."""
        return {}
