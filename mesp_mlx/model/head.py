"""The head: final norm, output table in one sweep of tiles, cross-entropy. The one stage that streams within itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch, State

TILE_BYTES = 2_000_000  # of a tile's dequantised rows, and of a group's logits over a tile


@dataclass(frozen=True)
class Head:
    """Loss over the vocabulary at supervised positions, or the likeliest next token.

    The table is the embedding's when the model ties them. Each of its rows is read, and multiplied, once.
    """

    spec: ModelSpec
    ops: Any
    evaluate: Callable[[Any], Any]
    name: str = "head"
    modules: tuple[str, ...] = ("model.norm",)

    @property
    def table(self) -> str:
        return "model.embed_tokens" if self.spec.tied else "lm_head"

    def loss(self, w: Any, states: list[State], batches: Sequence[Batch], gradient: bool = True) -> tuple[float, list[State]]:
        """The loss summed over the supervised tokens of all groups, and its gradient with respect to each state (none asked for: no list).

        Evaluates tile by tile: a tile's buffer is free before the next but one is read.
        """
        ops, arrays = self.ops, self.ops.arrays
        picked = [np.flatnonzero(batch.group.mask.reshape(-1)) for batch in batches]
        targets = [arrays.asarray(batch.group.targets.reshape(-1)[rows]) for batch, rows in zip(batches, picked, strict=True)]
        index = [arrays.asarray(rows) for rows in picked]
        inputs = [arrays.take_rows(_flat(state["x"]), rows) for state, rows in zip(states, index, strict=True)]
        normed = [self._normed(w, x) for x in inputs]
        sweeps = [ops.cross_entropy.start(h, gradient) for h in normed]
        for first, tile in w.tiles(self.table, self._tile_rows(max(len(rows) for rows in picked))):
            for i, h in enumerate(normed):
                sweeps[i] = ops.cross_entropy.add(sweeps[i], h, targets[i], first, tile)
                self.evaluate(sweeps[i])
            del tile
        total, dstates = 0.0, []
        for i, state in enumerate(states):
            loss, dh = ops.cross_entropy.finish(sweeps[i])
            total += float(loss)
            if gradient:
                dx = ops.rms_norm.backward(inputs[i], w["model.norm"]["weight"], self.spec.rms_norm_eps, dh)
                shape = state["x"].shape
                dstates.append({"x": arrays.scatter_rows(dx, index[i], shape[0] * shape[1]).reshape(shape)})
                self.evaluate(dstates[-1])
        return total, dstates

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

    def _tile_rows(self, positions: int) -> int:
        rows = TILE_BYTES // (4 * max(positions, self.spec.hidden_size))
        return max(rows // 64 * 64, 64)


def _flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])
