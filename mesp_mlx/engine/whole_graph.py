"""Backprop as mlx-lm does it: the graph of the whole model at once, differentiated by autodiff, weights resident. The baseline of baselines."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from mesp_mlx.engine.sink import Sink
from mesp_mlx.model.model import Model
from mesp_mlx.model.plain import DecoderLayer, WholeHead
from mesp_mlx.model.stages import Batch, State, opened
from mesp_mlx.stream.store import Store


def loss_and_gradients(model: Model, store: Store, adapter: State, batches: Sequence[Batch], sink: Sink, checkpoint: bool = False) -> float:
    """The loss summed over an update's supervised tokens; its gradients go to the sink, all at once. Groups of rows are one graph each.

    Every stage is open at the same time. `checkpoint` keeps only each layer's input for backward, as mlx-lm's grad_checkpoint.
    """
    plain = model.embedding.ops.plain
    total, gradients = 0.0, {}
    with ExitStack() as stack:
        w = {stage.name: stack.enter_context(store.open(stage)) for stage in model.forward_order()}
        for batch in batches:
            start = model.embedding.forward(w[model.embedding.name], batch)["x"]

            def loss_of(adapter: State, x: Any = start, batch: Batch = batch) -> Any:
                for (layer,) in model.segments:
                    assert isinstance(layer, DecoderLayer)

                    def run(given: State, layer: DecoderLayer = layer) -> Any:
                        return layer.layer(w[layer.name], given, given["x"], batch)

                    x = (plain.checkpoint(run) if checkpoint else run)({"x": x, **opened(adapter, layer)})
                assert isinstance(model.head, WholeHead)
                return model.head.loss_of(w[model.head.name], x, batch)

            loss, part = model.evaluate(plain.vjp(loss_of, adapter))
            total += float(loss)
            gradients = {name: model.evaluate(gradients[name] + part[name]) if gradients else part[name] for name in part}
    sink.check(total)
    sink.put(gradients)
    return total
