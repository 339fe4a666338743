"""The head: final norm, output table in one sweep of tiles, cross-entropy. The one stage that streams within itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_mlx.memory import tiles
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch, State
from mesp_mlx.stream.run_file import fetch, take
from mesp_mlx.stream.shelves import IN_MEMORY, Shelf


@dataclass(frozen=True)
class Head:
    """Loss over the vocabulary at supervised positions, or the likeliest next token.

    The table is the embedding's when the model ties them. Each of its rows is read, and multiplied by each group, once.
    """

    spec: ModelSpec
    ops: Any
    evaluate: Callable[[Any], Any]
    strategy: Strategy = Strategy()
    name: str = "head"
    modules: tuple[str, ...] = ("model.norm",)

    @property
    def table(self) -> str:
        return "model.embed_tokens" if self.spec.tied else "lm_head"

    def loss(
        self, w: Any, states: list[Any], batches: Sequence[Batch], shelf: Shelf = IN_MEMORY.states, gradient: bool = True
    ) -> tuple[list[float], list[Any]]:
        """Each group's loss, summed over its supervised tokens, and its gradient with respect to each state (none asked for: no list).

        Takes the states off their list, and keeps of each what is supervised. Groups whose arrays are in the run's file pass one by one over a larger
        piece of the table. Evaluates tile by tile: a tile's buffer is free before the next but one is read.
        """
        arrays, sweep = self.ops.arrays, self.ops.cross_entropy
        picked = [np.flatnonzero(batch.group.mask.reshape(-1)) for batch in batches]
        shapes = [(*batch.group.ids.shape, self.spec.hidden_size) for batch in batches]
        inputs: list[Any] = []

        def normed(x: Any) -> Any:
            return self._normed(w, x) if gradient else x

        for i, rows in enumerate(picked):
            x = take(states, i)["x"]
            x = self.evaluate(arrays.take_rows(x.reshape(-1, x.shape[-1]), arrays.asarray(rows)))
            inputs.append(shelf.put(x if gradient else self.evaluate(self._normed(w, x))))  # what only the norm's gradient asks for is let go
            del x
        sweeps = [shelf.put(self.evaluate(sweep.start(fetch(x), gradient))) for x in inputs]
        in_file = self.strategy.states == "file"
        rows_at_once = self._tile_rows(max(len(rows) for rows in picked))
        for _, packed in w.tiles(self.table, self._packed_rows(rows_at_once) if in_file else rows_at_once):
            for block in [[i] for i in range(len(picked))] if in_file else [range(len(picked))]:
                hidden = [self.evaluate(normed(fetch(inputs[i]))) for i in block]
                swept = [take(sweeps, i) for i in block]
                for first in range(0, packed["weight"].shape[0], rows_at_once):
                    tile = self.ops.quantized.rows(packed, first, first + rows_at_once)
                    tile = self.evaluate(self.ops.quantized.unpacked(tile, hidden[0].dtype))
                    for k, h in enumerate(hidden):
                        swept[k] = self.evaluate(sweep.add(swept[k], h, tile))
                    del tile
                for i in block:
                    sweeps[i] = shelf.put(swept.pop(0))
            del packed
        losses, dstates = [], []
        for i, (batch, rows, shape) in enumerate(zip(batches, picked, shapes, strict=True)):
            x = take(inputs, i)
            loss, dh = sweep.finish(take(sweeps, i), normed(x), self._targets(w, batch, rows))
            losses.append(float(loss))
            if gradient:
                dx = self.ops.rms_norm.backward(x, w["model.norm"]["weight"], self.spec.rms_norm_eps, dh)
                dx = arrays.scatter_rows(dx, arrays.asarray(rows), shape[0] * shape[1]).reshape(shape)
                del x, dh
                dstates.append(shelf.put(self.evaluate({"x": dx})))
        return losses, dstates

    def likeliest(self, w: Any, state: State) -> int:
        """The token with the largest logit after the last position of a single row."""
        h = self._normed(w, state["x"][0, -1:])
        best = None
        for first, tile in w.tiles(self.table, self._tile_rows(1)):
            best = self.ops.cross_entropy.best(h, best, first, tile)
            self.evaluate(best)
            del tile
        assert best is not None
        return int(self.ops.arrays.to_numpy(best[1])[0])

    def _normed(self, w: Any, x: Any) -> Any:
        return self.ops.rms_norm.forward(x, w["model.norm"]["weight"], self.spec.rms_norm_eps)

    def _targets(self, w: Any, batch: Batch, rows: np.ndarray) -> dict[str, Any]:
        """The table's rows of the targets at supervised positions, as a linear."""
        if not len(rows):
            return {}  # and the sweep, which has no position, looks at none
        targets, place = np.unique(batch.group.targets.reshape(-1)[rows], return_inverse=True)
        found = w.take(self.table, targets)
        return self.ops.quantized.take(found, self.ops.arrays.asarray(place.reshape(-1)))

    def _tile_rows(self, positions: int) -> int:
        return self.strategy.vocabulary_tile or tiles.vocabulary_tile(positions, self.spec.hidden_size)

    def _packed_rows(self, rows: int) -> int:
        return tiles.packed_rows(rows, self.spec.hidden_size)
