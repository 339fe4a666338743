"""The loop: one update's loss and gradients, with the frozen weights of two or three stages in memory."""

from collections.abc import Sequence

from mesp_mlx.engine.sink import HeldSink
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, Gradients, Stage, State
from mesp_mlx.stream.checkpoints import Checkpoints
from mesp_mlx.stream.store import Store


def forward(model: Model, store: Store, adapter: State, batches: Sequence[Batch], checkpoints: Checkpoints | None = None, first: int = 0) -> list[State]:
    """The state of each group of rows after the last layer; the inputs of segments from `first` on go to the checkpoints."""
    with store.open(model.embedding) as w:
        states = [model.evaluate(model.embedding.forward(w, batch)) for batch in batches]
    for index, segment in enumerate(model.segments):
        if checkpoints is not None and index >= first:
            checkpoints.put(states)
        for stage in segment:
            with store.open(stage) as w:
                states = [model.evaluate(stage.forward(w, adapter, x, batch)[0]) for x, batch in zip(states, batches, strict=True)]
    return states


def loss_and_gradients(model: Model, store: Store, adapter: State, batches: Sequence[Batch], sink: HeldSink) -> float:
    """The loss summed over an update's supervised tokens; its gradients go to the sink, stage by stage, last stage first."""

    def backward(stages: Sequence[Stage], states: list[State], dstates: list[State]) -> list[State]:
        """Replay stages but the last, then go back through them: each stays open while those above it are replayed and reversed."""
        (stage, *above), gradients, kept = stages, Gradients(), [None] * len(states)
        with store.open(stage) as w:
            if above:
                outputs = [model.evaluate(stage.forward(w, adapter, x, batch)) for x, batch in zip(states, batches, strict=True)]
                kept = [output[1] for output in outputs]
                dstates = backward(above, [output[0] for output in outputs], dstates)
                del outputs
            if lowest in above:  # nothing here has a gradient
                return []
            for i, (x, batch) in enumerate(zip(states, batches, strict=True)):
                dstates[i], part = model.evaluate(stage.backward(w, adapter, x, kept[i], dstates[i], batch, stage is not lowest))
                gradients = {name: model.evaluate(gradients[name] + part[name]) if i else part[name] for name in part}
        sink.put(gradients)
        return dstates

    first, lowest = model.lowest_adapted(adapter)
    checkpoints = Checkpoints()
    store.expect(model.training_order(first))
    states = forward(model, store, adapter, batches, checkpoints, first)
    with store.open(model.head) as w:
        losses, dstates = model.head.loss(w, states, batches)
    for segment in reversed(model.segments[first:]):
        dstates = backward(segment, checkpoints.pop(), dstates)
    return sum(losses)
