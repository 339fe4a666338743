"""What the stages of a model share, written once over a backend's ops, and the first of them, the embedding.

A stage is given its frozen weights `w` (see stream.store.Weights), the adapter (A and B by mlx-lm's names), the state that carries
gradient (`{"x": [B,T,D]}`; inside a parallel block "residual" too, its input) and the batch, which carries none. It never sees other stages, and
evaluates nothing.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mesp_mlx.data.group import Group
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.stream.run_file import fetch
from mesp_mlx.stream.store import Reads

State = dict[str, Any]
Gradients = dict[str, Any]


class Stage(Reads, Protocol):
    """What the loop needs of a stage beside its name and frozen modules: the modules that can be adapted, and both directions."""

    @property
    def adaptable(self) -> tuple[str, ...]: ...
    def forward(self, w: Any, adapter: State, state: State, batch: "Batch") -> tuple[State, State]: ...
    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: "Batch", need_dx: bool) -> tuple[State, Gradients]: ...


@dataclass(frozen=True)
class Dropout:
    """What names the dropout masks of one update."""

    seed: int
    update: int
    rate: float


@dataclass(frozen=True)
class Batch:
    """A group of rows of equal padded width, and the dropout of its update (None: none)."""

    group: Group
    dropout: Dropout | None = None


@dataclass(frozen=True)
class Lora:
    """The LoRA terms of a stage: the backend to compute with, mlx-lm's scale, the choices of the plan, and whether h = x̃ A is kept for backward."""

    ops: Any
    scale: float
    strategy: Strategy = Strategy()
    keep_h: bool = False

    def keeps(self, *levels: str) -> bool:
        """Whether the plan keeps what these of its levels keep."""
        return self.strategy.keep in levels

    def pair(self, adapter: State, module: str) -> tuple[Any, Any] | None:
        """(A, B) of a module, or None when it is not adapted."""
        a = adapter.get(f"{module}.lora_a")
        return None if a is None else (a, adapter[f"{module}.lora_b"])

    def dropout(self, pair: tuple[Any, Any] | None, batch: Batch, module: str) -> tuple[Any, float] | None:
        """(keep [B,T,in], rate) for an adapted module, drawn anew, and the same, whenever it is asked for."""
        drop = batch.dropout
        if pair is None or drop is None or drop.rate == 0:
            return None
        shape = pair[0].shape
        tokens, width = batch.group.ids.shape[1], shape[0] if len(shape) == 2 else shape[-1]  # experts' A are [E, R, in]
        rows = [self.ops.dropout.keep_mask(drop.seed, drop.update, int(row), module, tokens, width, drop.rate) for row in batch.group.rows]
        return self.ops.arrays.concatenate([keep.reshape(1, tokens, width) for keep in rows], 0), drop.rate

    def forward(self, w: Any, adapter: State, module: str, x: Any, batch: Batch, kept: State) -> Any:
        """y. What is kept of h is put into `kept`, and taken from there."""
        pair = self.pair(adapter, module)
        dropout = self.dropout(pair, batch, module)
        if self.keep_h and pair and module not in kept:
            kept[module] = self.ops.lora_linear.hidden(x, pair, dropout)
        return self.ops.lora_linear.forward(x, w[module], pair, self.scale, dropout, kept.get(module), self._tile)

    def backward(self, w: Any, adapter: State, module: str, x: Any, dy: Any, batch: Batch, need_dx: bool, gradients: Gradients, kept: State) -> Any:
        """dx, or None unless needed; the gradients of A and B go into `gradients`."""
        pair = self.pair(adapter, module)
        if pair is None and not need_dx:
            return None
        dropout = self.dropout(pair, batch, module)
        dx, dpair = self.ops.lora_linear.backward(x, w[module], pair, self.scale, dy, dropout, need_dx, kept.get(module), self._tile)
        collect(gradients, module, dpair)
        return dx

    @property
    def _tile(self) -> int | None:
        return self.strategy.weight_tile or None


def opened(adapter: State, stage: Any) -> State:
    """A stage's own tensors of an adapter, read from the run's file where the plan keeps them there."""
    names = (f"{module}.lora_{half}" for module in stage.adaptable for half in "ab")
    return {name: fetch(adapter[name]) for name in names if name in adapter}


def collect(gradients: Gradients, module: str, pair: tuple[Any, Any] | None) -> None:
    """Put a module's (dA, dB), if any, under mlx-lm's names."""
    if pair is not None:
        gradients[f"{module}.lora_a"], gradients[f"{module}.lora_b"] = pair


@dataclass(frozen=True)
class Embedding:
    """x = embedding_scale * rows of the embedding table + rows of the table of positions, if there is one; of both, only the rows that are named are read."""

    spec: ModelSpec
    ops: Any
    dtype: Any
    modules: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.spec.names.embedding

    def forward(self, w: Any, batch: Batch) -> State:
        """The state of a group: x [B,T,D]."""
        spec, ids, arrays = self.spec, batch.group.ids, self.ops.arrays
        rows, place = np.unique(ids, return_inverse=True)
        table = self.ops.quantized.dequantize(w.take(self.name, rows), self.dtype)
        x = arrays.take_rows(table, arrays.asarray(place.reshape(-1))).reshape(*ids.shape, -1)
        x = x if spec.embedding_scale == 1 else x * spec.embedding_scale
        if not spec.positions:
            return {"x": x}
        first = spec.positions - spec.max_positions
        return {"x": x + self.ops.quantized.dequantize(w.take(spec.names.positions, np.arange(first, first + ids.shape[1])), self.dtype)}
