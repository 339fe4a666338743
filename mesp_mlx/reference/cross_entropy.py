"""The loss and its gradient in one sweep over tiles of the vocabulary: the twin of `mesp_mlx.ops.cross_entropy`.

logits = h @ W.T + bias
loss = sum(logsumexp(logits, axis=1) - logits[range(N), targets]);  dh = softmax(logits) @ W - W[targets]
"""

import numpy as np

from mesp_mlx.reference import quantized
from mesp_mlx.reference.quantized import Linear

State = dict[str, np.ndarray]
Best = tuple[np.ndarray, np.ndarray]


def start(h: np.ndarray, gradient: bool = True) -> State:
    """The state before the first tile, for h [N, D]. Without `gradient`, only the loss is computed."""
    state = {"maximum": np.full(len(h), -np.inf, h.dtype), "total": np.zeros(len(h), h.dtype)}
    return state | ({"sum": np.zeros_like(h)} if gradient else {})


def add(state: State, h: np.ndarray, linear_tile: Linear) -> State:
    """The state with some rows of the head added: h [N, D], linear_tile [v, D]. Updates `state` in place."""
    if len(h) == 0:
        return state
    tile = quantized.unpacked(linear_tile, h.dtype)
    logits = quantized.matmul(h, tile)  # [N,D] @ [D,v] -> [N,v]
    maximum = np.maximum(state["maximum"], logits.max(axis=1))
    shrink = np.exp(state["maximum"] - maximum)
    logits -= maximum[:, None]
    p = np.exp(logits, out=logits)
    state["maximum"] = maximum
    state["total"] *= shrink
    state["total"] += p.sum(axis=1)
    if "sum" in state:
        state["sum"] *= shrink[:, None]
        state["sum"] += p @ tile["weight"]  # [N,v] @ [v,D] -> [N,D]
    return state


def finish(state: State, h: np.ndarray, target_rows: Linear) -> tuple[np.ndarray, np.ndarray | None]:
    """(loss summed over positions, a scalar array; dh [N, D], or None without `gradient`); target_rows [N, D] are the head's at the N targets."""
    if len(h) == 0:
        return np.zeros((), h.dtype), state.get("sum")
    rows = quantized.dequantize(target_rows, h.dtype)
    logits = np.einsum("nd,nd->n", h, rows) + target_rows.get("bias", 0)
    loss = np.sum(state["maximum"] + np.log(state["total"]) - logits)
    return loss, state["sum"] / state["total"][:, None] - rows if "sum" in state else None


def best(h: np.ndarray, best_state: Best | None, first_row: int, linear_tile: Linear) -> Best:
    """The largest logit so far and its vocabulary index, each [N] (the first of equals): greedy decoding, tile by tile."""
    logits = quantized.matmul(h, linear_tile)
    value, index = logits.max(axis=1), logits.argmax(axis=1) + first_row
    if best_state is None:
        return value, index
    better = value > best_state[0]
    return np.where(better, value, best_state[0]), np.where(better, index, best_state[1])
