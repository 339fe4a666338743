"""An open stage, and all groups of an update through it, one after another. What waits in the run's file is in memory only while its group passes."""

from collections.abc import Sequence
from typing import Any

from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, Gradients, Stage, State, opened
from mesp_mlx.stream.run_file import take
from mesp_mlx.stream.shelves import Shelves


def forward(model: Model, stage: Stage, w: Any, adapter: State, states: list[Any], batches: Sequence[Batch], shelves: Shelves, keep: bool) -> list[Any]:
    """Each group's state goes forward, in place in its list; gives what backward is to be given back, where it is to be kept."""
    tensors, kept = opened(adapter, stage), []
    for i, batch in enumerate(batches):
        output, found = stage.forward(w, tensors, take(states, i), batch)
        if keep and found:
            model.evaluate((output, found))
        kept.append(shelves.checkpoints.put(found) if keep and found else None)
        del found
        states[i] = shelves.states.put(model.evaluate(output))
        del output
    return kept


def backward(
    model: Model,
    stage: Stage,
    w: Any,
    adapter: State,
    states: list[Any],
    kept: list[Any],
    dstates: list[Any],
    batches: Sequence[Batch],
    shelves: Shelves,
    need_dx: bool,
) -> Gradients:
    """Each group's dstate goes backward, in place in its list; gives the gradients summed over groups. Takes states and what was kept off their lists."""
    tensors, gradients = opened(adapter, stage), Gradients()
    for i, batch in enumerate(batches):
        x, found, dy = take(states, i), take(kept, i), take(dstates, i)
        result = stage.backward(w, tensors, x, found, dy, batch, need_dx)
        del x, found, dy  # MLX computes later, and frees each of them at its last use
        dx, part = model.evaluate(result)
        del result
        dstates[i] = shelves.states.put(dx) if need_dx else None
        for name in part:
            gradients[name] = model.evaluate(gradients[name] + part[name]) if i else part[name]
        del dx, part
    return gradients
