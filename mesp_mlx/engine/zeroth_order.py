"""MeZO (arXiv 2305.17333): the gradient estimated from losses alone, with the memory of a forward pass.

The adapter theta is moved to both sides along a random direction z, drawn from a standard normal distribution: with L the mean loss,

    g = (L(theta + epsilon z) - L(theta - epsilon z)) / (2 epsilon)        gradient estimate: g z

averaged over n directions (n-SPSA). A direction is named by its key: it is drawn when a tensor is moved, drawn again when the tensor is updated, and
never stored whole. One pass over the streamed weights serves both sides of a direction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesp_mlx import keys
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, State, opened
from mesp_mlx.stream.run_file import fetch, take
from mesp_mlx.stream.shelves import IN_MEMORY, Shelves
from mesp_mlx.stream.store import Store


@dataclass(frozen=True)
class Perturbations:
    """The random directions of one update, and how far to move along them."""

    seed: int
    update: int
    count: int = 1
    epsilon: float = 1e-3

    def direction(self, backend: Any, index: int, name: str, shape: tuple[int, ...]) -> Any:
        """z of one adapter tensor, float32: the same whenever it is asked for."""
        key = keys.key("mezo", self.seed, self.update, index, name)
        return backend.random.normal(backend.arrays.asarray(np.array(key, np.uint32)), shape)


def slopes(
    model: Model, store: Store, adapter: State, batches: Sequence[Batch], perturbations: Perturbations, shelves: Shelves = IN_MEMORY
) -> tuple[float, list[float]]:
    """The loss summed over the update's supervised tokens, as the mean over all passes, and the slope g of its mean along each direction."""
    tokens = sum(int(batch.group.mask.sum()) for batch in batches)
    pairs = [_both_sides(model, store, adapter, batches, perturbations, index, shelves) for index in range(perturbations.count)]
    total = sum(plus + minus for plus, minus in pairs) / (2 * len(pairs))
    return total, [(plus - minus) / (2 * perturbations.epsilon * tokens) for plus, minus in pairs]


def estimate(backend: Any, adapter: State, perturbations: Perturbations, slopes: Sequence[float]) -> Iterator[tuple[str, Any]]:
    """The estimated gradient, tensor by tensor: the mean over directions of slope times z."""
    for name, parameter in adapter.items():
        shape, total = fetch(parameter).shape, None
        for index, slope in enumerate(slopes):
            part = perturbations.direction(backend, index, name, shape) * (slope / len(slopes))
            total = part if total is None else total + part
            backend.arrays.evaluate(total)
        yield name, total


def _both_sides(
    model: Model, store: Store, adapter: State, batches: Sequence[Batch], perturbations: Perturbations, index: int, shelves: Shelves
) -> tuple[float, float]:
    """The summed losses on either side of the adapter, by one pass that carries both through each stage while it is open."""
    backend, step = model.embedding.ops, perturbations.epsilon
    store.expect(model.forward_order())
    with store.open(model.embedding) as w:
        start = [shelves.states.put(model.evaluate(model.embedding.forward(w, batch))) for batch in batches]
    sides = [start, list(start)]
    del start
    for segment in model.segments:
        for stage in segment:
            own = opened(adapter, stage)
            with store.open(stage) as w:
                moved = {name: model.evaluate(theta + step * perturbations.direction(backend, index, name, theta.shape)) for name, theta in own.items()}
                for side in range(2):
                    if side:  # without drawing z again
                        moved = {name: model.evaluate(2 * own[name] - moved[name]) for name in own}
                    for i, batch in enumerate(batches):
                        sides[side][i] = shelves.states.put(model.evaluate(stage.forward(w, moved, take(sides[side], i), batch)[0]))
    states = sides.pop(0) + sides.pop(0)  # the only list that holds them, so that the head can let them go
    with store.open(model.head) as w:
        losses, _ = model.head.loss(w, states, [*batches, *batches], shelves.states, gradient=False)
    return sum(losses[: len(batches)]), sum(losses[len(batches) :])
