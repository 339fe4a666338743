"""Greedy replies through the streamed stages: to show what training changed, not to serve a model."""

from collections.abc import Sequence

import numpy as np

from mesp_mlx.data.group import Group
from mesp_mlx.engine.backprop import forward
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, State
from mesp_mlx.stream.store import Store


def greedy_reply(model: Model, store: Store, adapter: State, prompt: Sequence[int], stops: Sequence[int], most: int) -> list[int]:
    """The likeliest tokens after a prompt, up to a stop token (left out) or `most` of them.

    Each token is one forward pass over all there is so far: no keys and values are kept, so memory is that of a forward pass.
    """
    ids, reply = list(prompt), []
    while len(reply) < most:
        row = np.array([ids], np.int32)
        group = Group(ids=row, targets=row, mask=np.zeros(row.shape, bool), rows=(0,), lengths=(len(ids),))
        store.expect(model.forward_order())
        (state,) = forward(model, store, adapter, [Batch(group)])
        with store.open(model.head) as w:
            token = model.head.likeliest(w, state)
        if token in stops:
            break
        ids.append(token)
        reply.append(token)
    return reply
