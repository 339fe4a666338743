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

    def loss(self, w: Any, states: list[State], batches: Sequence[Batch], gradient: bool = True) -> tuple[list[float], list[State]]:
        """Each group's loss, summed over its supervised tokens, and its gradient with respect to each state (none asked for: no list).

        Takes the states out of their list, and keeps of each what is supervised. Evaluates tile by tile: a tile's buffer is free before the next but
        one is read.
        """
        ops, arrays = self.ops, self.ops.arrays
        picked = [np.flatnonzero(batch.group.mask.reshape(-1)) for batch in batches]
        targets = [arrays.asarray(batch.group.targets.reshape(-1)[rows]) for batch, rows in zip(batches, picked, strict=True)]
        index = [arrays.asarray(rows) for rows in picked]
        shapes = [state["x"].shape for state in states]
        inputs = [self.evaluate(arrays.take_rows(_flat(states.pop(0)["x"]), rows)) for rows in index]
        normed = [self.evaluate(self._normed(w, inputs[i] if gradient else inputs.pop(0))) for i in range(len(inputs))]
        sweeps = [ops.cross_entropy.start(h, gradient) for h in normed]
        for first, tile in w.tiles(self.table, self._tile_rows(max(len(rows) for rows in picked))):
            tile = self.evaluate(ops.quantized.unpacked(tile, normed[0].dtype))
            for i, h in enumerate(normed):
                sweeps[i] = ops.cross_entropy.add(sweeps[i], h, targets[i], first, tile)
                self.evaluate(sweeps[i])
            del tile
        losses, dstates = [], []
        for rows, (batch, tokens, width) in zip(index, shapes, strict=True):
            del normed[0]
            loss, dh = ops.cross_entropy.finish(sweeps.pop(0))
            losses.append(float(loss))
            if gradient:
                x = inputs.pop(0)
                dx = ops.rms_norm.backward(x, w["model.norm"]["weight"], self.spec.rms_norm_eps, dh)
                dstates.append(self.evaluate({"x": arrays.scatter_rows(dx, rows, batch * tokens).reshape(batch, tokens, width)}))
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

    def _tile_rows(self, positions: int) -> int:
        rows = TILE_BYTES // (4 * max(positions, self.spec.hidden_size))
        return max(rows // 64 * 64, 64)


def _flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])
