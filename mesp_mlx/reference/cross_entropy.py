"""The loss and its gradient in one sweep over tiles of the vocabulary: the twin of `mesp_mlx.ops.cross_entropy`.

logits = logit_scale * (h @ W.T + bias);  logits = logit_cap * tanh(logits / logit_cap)
loss = sum(logsumexp(logits, axis=1) - logits[range(N), targets]);  dh = softmax(logits) @ W - W[targets], with neither scale nor cap
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


def add(state: State, h: np.ndarray, linear_tile: Linear, logit_scale: float = 1.0, logit_cap: float | None = None) -> State:
    """The state with some rows of the head added: h [N, D], linear_tile [v, D]. Updates `state` in place."""
    if len(h) == 0:
        return state
    tile = quantized.unpacked(linear_tile, h.dtype)
    logits = _capped(quantized.matmul(h, tile), logit_scale, logit_cap)  # [N,D] @ [D,v] -> [N,v]
    slope = _slope(logits, logit_cap) if "sum" in state and logit_cap is not None else None
    maximum = np.maximum(state["maximum"], logits.max(axis=1))
    shrink = np.exp(state["maximum"] - maximum)
    logits -= maximum[:, None]
    p = np.exp(logits, out=logits)
    state["maximum"] = maximum
    state["total"] *= shrink
    state["total"] += p.sum(axis=1)
    if "sum" in state:
        if slope is not None:
            p *= slope
        state["sum"] *= shrink[:, None]
        state["sum"] += p @ tile["weight"]  # [N,v] @ [v,D] -> [N,D]
    return state


def finish(state: State, h: np.ndarray, target_rows: Linear, logit_scale: float = 1.0, logit_cap: float | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """(loss summed over positions, a scalar array; dh [N, D], or None without `gradient`); target_rows [N, D] are the head's at the N targets."""
    if len(h) == 0:
        return np.zeros((), h.dtype), state.get("sum")
    rows = quantized.dequantize(target_rows, h.dtype)
    logits = _capped(np.einsum("nd,nd->n", h, rows) + target_rows.get("bias", 0), logit_scale, logit_cap)
    loss = np.sum(state["maximum"] + np.log(state["total"]) - logits)
    if "sum" not in state:
        return loss, None
    dh = state["sum"] / state["total"][:, None]
    dh -= rows if logit_cap is None else rows * _slope(logits, logit_cap)[:, None]
    if logit_scale != 1:
        dh *= logit_scale
    return loss, dh


def best(h: np.ndarray, best_state: Best | None, first_row: int, linear_tile: Linear, logit_scale: float = 1.0, logit_cap: float | None = None) -> Best:
    """The largest logit so far and its vocabulary index, each [N] (the first of equals): greedy decoding, tile by tile."""
    logits = _capped(quantized.matmul(h, linear_tile), logit_scale, logit_cap)
    value, index = logits.max(axis=1), logits.argmax(axis=1) + first_row
    if best_state is None:
        return value, index
    better = value > best_state[0]
    return np.where(better, value, best_state[0]), np.where(better, index, best_state[1])


def _capped(logits: np.ndarray, scale: float, cap: float | None) -> np.ndarray:
    """In place."""
    if scale != 1:
        logits *= scale
    if cap is not None:
        logits /= cap
        np.tanh(logits, out=logits)
        logits *= cap
    return logits


def _slope(logits: np.ndarray, cap: float) -> np.ndarray:
    """The derivative of capped logits, 1 - (logits / cap)²."""
    slope = logits / cap
    slope *= slope
    return np.subtract(1, slope, out=slope)
