"""The head: an end of the model, mostly a norm, the output table in one sweep of tiles, cross-entropy. The one stage that streams within itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mesp_mlx.memory import tiles
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch, State
from mesp_mlx.model.sublayer import Norm
from mesp_mlx.stream.run_file import fetch, take
from mesp_mlx.stream.shelves import IN_MEMORY, Shelf


class End(Protocol):
    """What is between the last layer's state and the head's table."""

    @property
    def table(self) -> str: ...
    @property
    def modules(self) -> tuple[str, ...]: ...
    @property
    def width(self) -> int: ...
    @property
    def limits(self) -> tuple[float, float | None]: ...
    def start(self, w: Any, state: State, batch: Batch, rows: np.ndarray, gradient: bool) -> tuple[Any, State]: ...
    def hidden(self, w: Any, kept: Any, gradient: bool) -> Any: ...
    def backward(self, w: Any, kept: Any, rest: State, batch: Batch, rows: np.ndarray, dh: Any) -> State: ...
    def last(self, w: Any, state: State) -> Any: ...


@dataclass(frozen=True)
class FinalNorm:
    """The end of structured families: a norm, position by position."""

    spec: ModelSpec
    ops: Any

    @property
    def table(self) -> str:
        return self.spec.table

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.spec.names.norm,)

    @property
    def width(self) -> int:
        return self.spec.hidden_size

    @property
    def limits(self) -> tuple[float, float | None]:
        """What logits are multiplied by, and their cap."""
        return self.spec.logit_scale, self.spec.logit_cap

    @property
    def norm(self) -> Norm:
        return Norm(self.spec, self.ops, self.spec.names.norm)

    def start(self, w: Any, state: State, batch: Batch, rows: np.ndarray, gradient: bool) -> tuple[Any, State]:
        """What is kept of a group's state until its loss is known, of its supervised rows [n, D]: x, or h where no gradient is asked for; and nothing else."""
        x = self.ops.arrays.take_rows(state["x"].reshape(-1, self.width), self.ops.arrays.asarray(rows))
        return (x if gradient else self.norm.forward(w, x)), {}  # what only the norm's gradient asks for is let go

    def hidden(self, w: Any, kept: Any, gradient: bool) -> Any:
        """h [n, D] of what was kept."""
        return self.norm.forward(w, kept) if gradient else kept

    def backward(self, w: Any, kept: Any, rest: State, batch: Batch, rows: np.ndarray, dh: Any) -> State:
        """The gradient of the state, of dh [n, D]."""
        shape, arrays = batch.group.ids.shape, self.ops.arrays
        dx = arrays.scatter_rows(self.norm.backward(w, kept, dh), arrays.asarray(rows), shape[0] * shape[1])
        return {"x": dx.reshape(*shape, self.width)}

    def last(self, w: Any, state: State) -> Any:
        """h [1, D] of the last position of a single row."""
        return self.norm.forward(w, state["x"][0, -1:])


@dataclass(frozen=True)
class Head:
    """Loss over the vocabulary at supervised positions, or the likeliest next token.

    The table is the embedding's when the model ties them. Each of its rows is read, and multiplied by each group, once.
    """

    end: End
    ops: Any
    evaluate: Callable[[Any], Any]
    strategy: Strategy = Strategy()
    name: str = "head"

    @property
    def table(self) -> str:
        return self.end.table

    @property
    def modules(self) -> tuple[str, ...]:
        return self.end.modules

    def loss(
        self, w: Any, states: list[Any], batches: Sequence[Batch], shelf: Shelf = IN_MEMORY.states, gradient: bool = True
    ) -> tuple[list[float], list[Any]]:
        """Each group's loss, summed over its supervised tokens, and its gradient with respect to each state (none asked for: no list).

        Takes the states off their list, and keeps of each what its end asks for. Groups whose arrays are in the run's file pass one by one over a larger
        piece of the table. Evaluates tile by tile: a tile's buffer is free before the next but one is read.
        """
        sweep, end, limits = self.ops.cross_entropy, self.end, self.end.limits
        picked = [np.flatnonzero(batch.group.mask.reshape(-1)) for batch in batches]
        kept: list[Any] = []
        rests: list[Any] = []
        for i, (batch, rows) in enumerate(zip(batches, picked, strict=True)):
            found, rest = self.evaluate(end.start(w, take(states, i), batch, rows, gradient))
            kept.append(shelf.put(found))
            rests.append(shelf.put(rest) if rest else rest)
            del found, rest
        sweeps = [shelf.put(self.evaluate(sweep.start(fetch(found), gradient))) for found in kept]
        in_file = self.strategy.states == "file"
        rows_at_once = self._tile_rows(max(len(rows) for rows in picked))
        for _, packed in w.tiles(self.table, self._packed_rows(rows_at_once) if in_file else rows_at_once):
            for block in [[i] for i in range(len(picked))] if in_file else [range(len(picked))]:
                hidden = [self.evaluate(end.hidden(w, fetch(kept[i]), gradient)) for i in block]
                swept = [take(sweeps, i) for i in block]
                for first in range(0, packed["weight"].shape[0], rows_at_once):
                    tile = self.ops.quantized.rows(packed, first, first + rows_at_once)
                    tile = self.evaluate(self.ops.quantized.unpacked(tile, hidden[0].dtype))
                    for k, h in enumerate(hidden):
                        swept[k] = self.evaluate(sweep.add(swept[k], h, tile, *limits))
                    del tile
                for i in block:
                    sweeps[i] = shelf.put(swept.pop(0))
            del packed
        losses, dstates = [], []
        for i, (batch, rows) in enumerate(zip(batches, picked, strict=True)):
            found = take(kept, i)
            loss, dh = sweep.finish(take(sweeps, i), end.hidden(w, found, gradient), self._targets(w, batch, rows), *limits)
            losses.append(float(loss))
            if gradient:
                dstate = end.backward(w, found, take(rests, i), batch, rows, dh)
                del found, dh
                dstates.append(shelf.put(self.evaluate(dstate)))
                del dstate
        return losses, dstates

    def likeliest(self, w: Any, state: State) -> int:
        """The token with the largest logit after the last position of a single row."""
        h = self.end.last(w, state)
        best = None
        for first, tile in w.tiles(self.table, self._tile_rows(1)):
            best = self.ops.cross_entropy.best(h, best, first, tile, *self.end.limits)
            self.evaluate(best)
            del tile
        assert best is not None
        return int(self.ops.arrays.to_numpy(best[1])[0])

    def _targets(self, w: Any, batch: Batch, rows: np.ndarray) -> dict[str, Any]:
        """The table's rows of the targets at supervised positions, as a linear."""
        if not len(rows):
            return {}  # and the sweep, which has no position, looks at none
        targets, place = np.unique(batch.group.targets.reshape(-1)[rows], return_inverse=True)
        found = w.take(self.table, targets)
        return self.ops.quantized.take(found, self.ops.arrays.asarray(place.reshape(-1)))

    def _tile_rows(self, positions: int) -> int:
        return self.strategy.vocabulary_tile or tiles.vocabulary_tile(positions, self.end.width)

    def _packed_rows(self, rows: int) -> int:
        return tiles.packed_rows(rows, self.end.width)
