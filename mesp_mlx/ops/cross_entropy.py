"""The loss and its gradient in one sweep over tiles of the vocabulary, logits never whole (Cut Cross-Entropy, Wijmans et al., 2024; the
running maximum: Milakov & Gimelshein, 2018).

Equals, for the hidden states h [N, D] of supervised positions:

    logits = h @ W.T + bias                                                     # [N, V]
    loss = sum(logsumexp(logits, axis=1) - logits[range(N), targets])
    dh = softmax(logits) @ W - W[targets]                                       # [N, D]

A tile of rows of W serves the logits and the gradient at once. With l the logits seen so far, the state keeps per position

    m = max(l);  Z = sum(exp(l - m));  U = sum(exp(l - m) W_row);  the target's logit and row

so that loss = m + log Z - target's logit and dh = U / Z - target's row. W is frozen, and nothing is recomputed.
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.ops import quantized
from mesp_mlx.ops.quantized import Linear

TILE_BYTES = 2_000_000  # of a dequantised tile of the head
State = dict[str, mx.array]
Best = tuple[mx.array, mx.array]


def start(h: mx.array, gradient: bool = True) -> State:
    """The state before the first tile, for h [N, D]. Without `gradient`, only the loss is computed."""
    n = h.shape[0]
    state = {"maximum": mx.full((n,), -mx.inf), "total": mx.zeros((n,)), "target": mx.zeros((n,))}
    return state | ({"sum": mx.zeros(h.shape), "row": mx.zeros(h.shape)} if gradient else {})


def add(state: State, h: mx.array, targets: mx.array, first_row: int, linear_tile: Linear) -> State:
    """The state with rows first_row to first_row + v of the head added: h [N, D], targets [N] integers, linear_tile [v, D].

    Everything is float32 but the products.
    """
    if h.shape[0] == 0:
        return state
    tile = quantized.unpacked(quantized.wait(linear_tile, list(state.values())), h.dtype)
    logits = quantized.matmul(h, tile).astype(mx.float32)  # [N,D] @ [D,v] -> [N,v]
    # An array and not a number: mx.compile writes numbers into its kernels, and would build one for each tile.
    local = targets - mx.arange(first_row, first_row + 1, dtype=targets.dtype)
    inside = (local >= 0) & (local < logits.shape[1])
    index = mx.where(inside, local, 0)
    picked = mx.take_along_axis(logits, index[:, None], axis=1)[:, 0]
    maximum = mx.maximum(state["maximum"], mx.max(logits, axis=1))
    shrink, p = mx.exp(state["maximum"] - maximum), mx.exp(logits - maximum[:, None])
    new = {"maximum": maximum, "total": state["total"] * shrink + mx.sum(p, axis=1), "target": mx.where(inside, picked, state["target"])}
    if "sum" in state:
        part = quantized.matmul_transposed(p.astype(h.dtype), tile)  # [N,v] @ [v,D] -> [N,D]
        new["sum"] = state["sum"] * shrink[:, None] + part
        new["row"] = mx.where(inside[:, None], quantized.take(tile, index, mx.float32), state["row"])
    return new


def finish(state: State) -> tuple[mx.array, mx.array | None]:
    """(loss summed over positions, float32 scalar; dh [N, D] float32, or None without `gradient`)."""
    loss = mx.sum(state["maximum"] + mx.log(state["total"]) - state["target"]) if state["total"].size else mx.zeros(())
    return loss, state["sum"] / state["total"][:, None] - state["row"] if "sum" in state else None


def best(h: mx.array, best_state: Best | None, first_row: int, linear_tile: Linear) -> Best:
    """The largest logit so far and its vocabulary index, each [N] (the first of equals): greedy decoding, tile by tile."""
    tile = linear_tile if best_state is None else quantized.wait(linear_tile, list(best_state))
    logits = quantized.matmul(h, tile).astype(mx.float32)
    value, index = mx.max(logits, axis=1), mx.argmax(logits, axis=1).astype(mx.int32) + first_row
    if best_state is None:
        return value, index
    better = value > best_state[0]
    return mx.where(better, value, best_state[0]), mx.where(better, index, best_state[1])


def apply(h: mx.array, linear: Linear, targets: mx.array, tile: int | None = None) -> mx.array:
    """The summed loss of h [N, D] as an ordinary MLX function whose gradient comes from the same sweep; the frozen head gets zeros."""
    return _apply(h, linear, targets, tile)[0]


def _sweep(h: mx.array, linear: Linear, targets: mx.array, tile: int | None) -> tuple[mx.array, mx.array]:
    """(loss, dh): the gradient is an output, so that the vjp finds it instead of sweeping again."""
    vocabulary, width = quantized.shape(linear)
    step = tile or max(32, TILE_BYTES // (4 * width) // 32 * 32)
    state = start(h)
    for i in range(0, vocabulary, step):
        state = add(state, h, targets, i, quantized.rows(linear, i, min(i + step, vocabulary)))
    loss, dh = finish(state)
    assert dh is not None
    return loss, dh


_apply: Any = mx.custom_function(_sweep)


@_apply.vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    h, linear, targets, tile = primals
    return (cotangents[0] * outputs[1]).astype(h.dtype), quantized.zeros_like(linear), mx.zeros_like(targets), tile
