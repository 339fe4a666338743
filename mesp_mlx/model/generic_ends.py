"""How a walked model ends: before a head that is swept in tiles, or, where it does more than that, in logits whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mesp_mlx.model.generic_stages import Engine
from mesp_mlx.model.generic_walk import placed
from mesp_mlx.model.stages import Batch, Gradients, State
from mesp_mlx.stream.run_file import take
from mesp_mlx.stream.shelves import IN_MEMORY, Shelf


@dataclass(frozen=True, eq=False)
class Tail:
    """The end of a walked model whose loss is taken in tiles (see model.head): everything after the last layer up to the head, by MLX's vjp."""

    engine: Engine
    modules: tuple[str, ...]
    width: int

    @property
    def table(self) -> str:
        return self._head[0]

    @property
    def limits(self) -> tuple[float, float | None]:
        """What logits are multiplied by, and their cap."""
        return self._head[1:]

    def start(self, w: Any, state: State, batch: Batch, rows: np.ndarray, gradient: bool) -> tuple[Any, State]:
        """The head's input at supervised rows, h [n, D], and the state, of which backward makes it again."""
        return mx.take(self._hidden(w, state, batch).reshape(-1, self.width), mx.array(rows), axis=0), state if gradient else {}

    def hidden(self, w: Any, kept: Any, gradient: bool) -> mx.array:
        """h itself."""
        return kept

    def backward(self, w: Any, kept: Any, rest: State, batch: Batch, rows: np.ndarray, dh: mx.array) -> State:
        """The gradient of the state, of dh [n, D]."""
        engine, shape = self.engine, batch.group.ids.shape
        dh = engine.ops.arrays.scatter_rows(dh.astype(kept.dtype), mx.array(rows), batch.group.ids.size).reshape(*shape, self.width)
        primals = {name: rest[name] for leaf, name in engine.names.items() if leaf in engine.wiring.end.needs & engine.carried}
        return engine.differentiate(lambda own: [self._hidden(w, {**rest, **own}, batch)], primals, [dh], {})

    def last(self, w: Any, state: State) -> mx.array:
        """h [1, D] of the last position of a single row, that of the last walk."""
        assert self.engine.batch is not None
        return self._hidden(w, state, self.engine.batch)[0, -1:]

    @property
    def _head(self) -> tuple[str, float, float | None]:
        assert self.engine.wiring.head is not None
        return self.engine.wiring.head

    def _hidden(self, w: Any, state: State, batch: Batch) -> mx.array:
        """The head's input [B, T, D]."""
        engine = self.engine
        with placed(engine.slots, engine.weights(w, self.modules)):
            return engine.forward(batch, len(engine.wiring.calls), state)[0]


@dataclass(frozen=True, eq=False)
class WholeEnd:
    """Everything after the last layer as a stage, logits whole: its state after is the loss summed over supervised tokens, and the likeliest next token."""

    engine: Engine
    modules: tuple[str, ...]
    adaptable: tuple[str, ...]
    name: str = "end"

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """{"loss": scalar, "best": index}."""
        with placed(self.engine.adapters, adapter):
            logits = self._logits(w, state, batch)
        return {"loss": self._loss(logits, batch), "best": mx.argmax(logits[0, -1])}, {}

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapter, by MLX's vjp."""
        engine = self.engine
        carried = engine.wiring.end.needs & engine.carried if need_dx else set()
        inputs = {name: state[name] for leaf, name in engine.names.items() if leaf in carried}
        gradients = engine.differentiate(lambda own: [self._loss(self._logits(w, {**state, **own}, batch), batch)], inputs | adapter, [dstate["loss"]], adapter)
        own = {name: gradients.pop(name) for name in adapter}
        return gradients, own

    def _logits(self, w: Any, state: State, batch: Batch) -> mx.array:
        engine = self.engine
        with placed(engine.slots, engine.weights(w, self.modules)):
            return engine.forward(batch, len(engine.wiring.calls), state)

    def _loss(self, logits: mx.array, batch: Batch) -> mx.array:
        return self.engine.ops.plain.cross_entropy(logits, mx.array(batch.group.targets), mx.array(batch.group.mask))


@dataclass(frozen=True, eq=False)
class Done:
    """The head after a `WholeEnd`, which did its work."""

    name: str = "head"
    modules: tuple[str, ...] = ()

    def loss(
        self, w: Any, states: list[Any], batches: Sequence[Batch], shelf: Shelf = IN_MEMORY.states, gradient: bool = True
    ) -> tuple[list[float], list[Any]]:
        """As model.head.Head.loss."""
        losses = [float(take(states, i)["loss"]) for i in range(len(batches))]
        return losses, [shelf.put({"loss": mx.ones(())}) for _ in losses] if gradient else []

    def likeliest(self, w: Any, state: State) -> int:
        """The token with the largest logit after the last position of a single row."""
        return int(state["best"].item())
