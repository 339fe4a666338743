"""How an update gets its gradient: the four methods, behind one call."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mesp_mlx.engine import backprop, whole_graph, zeroth_order
from mesp_mlx.engine.sink import AppliedSink, Apply, HeldSink, Sink, must_be_finite
from mesp_mlx.engine.zeroth_order import Perturbations
from mesp_mlx.model.model import Model
from mesp_mlx.model.plain import WholeHead
from mesp_mlx.model.stages import Batch, State
from mesp_mlx.stream.shelves import IN_MEMORY, Shelves
from mesp_mlx.stream.store import Store

if TYPE_CHECKING:  # pydantic is 10 MB resident
    from mesp_mlx.config import Settings

LossAndGradients = Callable[[Model, Store, State, Sequence[Batch], Sink], float]


def exact(method: str, grad_checkpoint: bool = False, shelves: Shelves = IN_MEMORY) -> LossAndGradients:
    """The function that takes an exact method's summed loss and hands its gradients to a sink: mesp and mebp walk the same loop over other stages."""
    loop = functools.partial(backprop.loss_and_gradients, shelves=shelves)
    if method != "backprop":
        return loop

    def whole(model: Model, store: Store, adapter: State, batches: Sequence[Batch], sink: Sink) -> float:
        """A generic model is one stage, whose backward is that of the whole."""
        if isinstance(model.head, WholeHead):
            return whole_graph.loss_and_gradients(model, store, adapter, batches, sink, checkpoint=grad_checkpoint)
        return loop(model, store, adapter, batches, sink)

    return whole


def update(
    settings: "Settings",
    number: int,
    model: Model,
    store: Store,
    adapter: State,
    batches: Sequence[Batch],
    apply: Apply,
    shelves: Shelves = IN_MEMORY,
) -> tuple[float, Callable[[], None]]:
    """Update `number`: the loss summed over its supervised tokens, and what ends it, which hands `apply` those gradients that it has not had yet.

    Args:
        apply: takes a tensor's name and the gradient of the mean loss, clipped.
        shelves: where arrays wait.

    Raises:
        RunStopped: the loss or a gradient is not finite.
    """
    backend, tokens = model.embedding.ops, sum(int(batch.group.mask.sum()) for batch in batches)
    if settings.method == "mezo":
        perturbations = Perturbations(settings.seed, number, settings.mezo_perturbations, settings.mezo_epsilon)
        loss, slopes = zeroth_order.slopes(model, store, adapter, batches, perturbations, shelves)
        must_be_finite(loss)

        def finish() -> None:
            for name, gradient in zeroth_order.estimate(backend, adapter, perturbations, slopes):
                apply(name, gradient)

        return loss, finish
    at_once = model.strategy.gradients == "applied" and settings.method != "backprop"
    sink = AppliedSink(backend, tokens, apply) if at_once else HeldSink(backend, shelves.gradients, tokens, settings.grad_clip, apply)
    return exact(settings.method, settings.grad_checkpoint, shelves)(model, store, adapter, batches, sink), sink.finish
