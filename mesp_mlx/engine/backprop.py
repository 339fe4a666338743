"""The loop: one update's loss and gradients, with the frozen weights of a few stages in memory."""

from collections.abc import Sequence
from typing import Any

from mesp_mlx.engine import groups
from mesp_mlx.engine.sink import Sink
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, Stage, State
from mesp_mlx.stream.shelves import IN_MEMORY, Shelves
from mesp_mlx.stream.store import Store


def forward(
    model: Model, store: Store, adapter: State, batches: Sequence[Batch], shelves: Shelves = IN_MEMORY, checkpoints: list[Any] | None = None, first: int = 0
) -> list[Any]:
    """Each group's state after the last layer; what segments from `first` on need for backward goes to the checkpoints."""
    with store.open(model.embedding) as w:
        states = [shelves.states.put(model.evaluate(model.embedding.forward(w, batch))) for batch in batches]
    for index, segment in enumerate(model.segments):
        save = checkpoints is not None and index >= first
        inputs = [shelves.checkpoints.put(state) for state in states] if save else []
        for stage in segment:
            with store.open(stage) as w:
                kept = groups.forward(model, stage, w, adapter, states, batches, shelves, keep=save and len(segment) == 1)
        if checkpoints is not None and save:
            checkpoints.append((inputs, kept))
    return states


def loss_and_gradients(model: Model, store: Store, adapter: State, batches: Sequence[Batch], sink: Sink, shelves: Shelves = IN_MEMORY) -> float:
    """The loss summed over an update's supervised tokens; its gradients go to the sink, stage by stage, last stage first."""

    def backward(stages: Sequence[Stage], states: list[Any], kept: list[Any]) -> None:
        """Replay stages but the last, then go back through them, dstates in place."""
        (stage, *above) = stages
        if above:
            outputs = list(states)
            with store.open(stage, again=lowest not in above) as w:
                kept = groups.forward(model, stage, w, adapter, outputs, batches, shelves, keep=True)
            backward(above, outputs, [None] * len(outputs))
        if lowest not in above:  # else nothing here has a gradient
            with store.open(stage) as w:
                gradients = groups.backward(model, stage, w, adapter, states, kept, dstates, batches, shelves, need_dx=stage is not lowest)
            sink.put(gradients)

    first, lowest = model.lowest_adapted(adapter)
    checkpoints: list[Any] = []
    store.expect(model.training_order(first, lowest))
    states = forward(model, store, adapter, batches, shelves, checkpoints, first)
    with store.open(model.head) as w:
        losses, dstates = model.head.loss(w, states, batches, shelves.states)
    sink.check(sum(losses))
    while checkpoints:
        backward(model.segments[first + len(checkpoints) - 1], *checkpoints.pop())
    return sum(losses)
