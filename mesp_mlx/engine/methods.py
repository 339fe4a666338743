"""How an update gets its gradient: the four methods, behind one call."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mesp_mlx.engine import backprop, whole_graph, zeroth_order
from mesp_mlx.engine.sink import HeldSink
from mesp_mlx.engine.zeroth_order import Perturbations
from mesp_mlx.errors import RunStopped
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, State
from mesp_mlx.stream.store import Store

if TYPE_CHECKING:  # pydantic is 10 MB resident
    from mesp_mlx.config import Settings

LossAndGradients = Callable[[Model, Store, State, Sequence[Batch], HeldSink], float]


def exact(method: str, grad_checkpoint: bool = False) -> LossAndGradients:
    """The function that takes an exact method's summed loss and hands its gradients to a sink: mesp and mebp walk the same loop over other stages."""
    return functools.partial(whole_graph.loss_and_gradients, checkpoint=grad_checkpoint) if method == "backprop" else backprop.loss_and_gradients


def loss_and_gradients(
    settings: "Settings", update: int, model: Model, store: Store, adapter: State, batches: Sequence[Batch]
) -> tuple[float, Iterable[tuple[str, Any]]]:
    """The loss summed over the supervised tokens of update number `update`, and the gradients of its mean by name, clipped; mezo's one at a time.

    Raises:
        RunStopped: the loss or a gradient is not finite.
    """
    backend = model.embedding.ops
    if settings.method == "mezo":
        perturbations = Perturbations(settings.seed, update, settings.mezo_perturbations, settings.mezo_epsilon)
        loss, slopes = zeroth_order.slopes(model, store, adapter, batches, perturbations)
        _must_be_finite(loss, update)
        return loss, zeroth_order.estimate(backend, adapter, perturbations, slopes)
    sink = HeldSink(backend)
    loss = exact(settings.method, settings.grad_checkpoint)(model, store, adapter, batches, sink)
    _must_be_finite(loss, update)
    gradients, _ = sink.finish(sum(int(batch.group.mask.sum()) for batch in batches), settings.grad_clip)
    return loss, gradients.items()


def _must_be_finite(loss: float, update: int) -> None:
    if not math.isfinite(loss):
        raise RunStopped(f"update {update + 1}: the loss is {loss}. Nothing of it was applied. Try a lower --learning-rate or --scale.")
