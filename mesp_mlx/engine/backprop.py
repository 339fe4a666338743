"""The loop: one update's loss and gradients, with one stage's frozen weights in memory at a time (DESIGN.md, section 2)."""

from collections.abc import Sequence
from typing import Any

from mesp_mlx.engine.sink import HeldSink
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, Stage, State
from mesp_mlx.stream.checkpoints import Checkpoints
from mesp_mlx.stream.store import Store


def forward(model: Model, store: Store, adapter: State, batches: Sequence[Batch], checkpoints: Checkpoints | None = None, first: int = 0) -> list[State]:
    """The state of each group after the last layer; the inputs of segments from `first` on go to the checkpoints."""
    done = model.evaluate
    with store.open(model.embedding) as w:
        states = [done(model.embedding.forward(w, batch)) for batch in batches]
    for index, segment in enumerate(model.segments):
        if checkpoints is not None and index >= first:
            checkpoints.put(states)
        for stage in segment:
            with store.open(stage) as w:
                states = [done(stage.forward(w, adapter, state, batch)[0]) for state, batch in zip(states, batches, strict=True)]
    return states


def loss_and_gradients(model: Model, store: Store, adapter: State, batches: Sequence[Batch], sink: HeldSink) -> float:
    """The loss summed over an update's supervised tokens; its gradients go to the sink, stage by stage, last stage first."""
    first, lowest = model.lowest_adapted(adapter)
    store.expect(model.training_order(first))
    checkpoints = Checkpoints()
    states = forward(model, store, adapter, batches, checkpoints, first)
    with store.open(model.head) as w:
        loss, dstates = model.head.loss(w, states, batches)
    del states
    for segment in reversed(model.segments[first:]):
        dstates = backward(model, segment, store, adapter, checkpoints.pop(), dstates, batches, lowest, sink)
    return loss


def backward(
    model: Model, stages: Sequence[Stage], store: Store, adapter: State, states: list[State], dstates: list[State], batches: Sequence[Batch], lowest: Stage, sink: HeldSink
) -> list[State]:
    """Replay a segment's stages but the last, then go back through them: a stage stays open while those above it are replayed and reversed."""
    stage, above = stages[0], stages[1:]
    done, kept, gradients = model.evaluate, [None] * len(states), {}
    with store.open(stage) as w:
        if above:
            outputs = [done(stage.forward(w, adapter, state, batch)) for state, batch in zip(states, batches, strict=True)]
            kept = [output[1] for output in outputs]
            dstates = backward(model, above, store, adapter, [output[0] for output in outputs], dstates, batches, lowest, sink)
            del outputs
        if any(stage is lowest for stage in above):
            return []
        for i, batch in enumerate(batches):
            dstates[i], part = done(stage.backward(w, adapter, states[i], kept[i], dstates[i], batch, stage is not lowest))
            gradients = {name: done(gradients[name] + part[name]) if i else part[name] for name in part}
    sink.put(gradients)
    return dstates
