"""The loss and its gradient in one sweep over tiles of the vocabulary, logits never whole (Cut Cross-Entropy, Wijmans et al., 2024; the
running maximum: Milakov & Gimelshein, 2018).

Equals, for the hidden states h [N, D] of supervised positions:

    logits = logit_scale * (h @ W.T + bias)                                     # [N, V]
    logits = logit_cap * tanh(logits / logit_cap)                               # with a cap (Gemma 2, arXiv 2408.00118, sec. 2)
    loss = sum(logsumexp(logits, axis=1) - logits[range(N), targets])
    dh = softmax(logits) @ W - W[targets]                                       # [N, D], with neither scale nor cap

A tile of rows of W serves the logits and the gradient at once. With l the logits seen so far, and l' = 1 - (l / logit_cap)² the derivative of their
cap (1 without one), the state keeps per position

    m = max(l);  Z = sum(exp(l - m));  U = sum(exp(l - m) l' W_row)

so that, with the targets' rows of W, loss = m + log Z - l_target and dh = logit_scale (U / Z - l'_target W_target). W is frozen, and nothing is
recomputed. All tiles of a sweep, and its end, are given the same scale and cap.
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.memory import tiles
from mesp_mlx.ops import arrays, quantized
from mesp_mlx.ops.quantized import Linear

State = dict[str, mx.array]
Best = tuple[mx.array, mx.array]


def start(h: mx.array, gradient: bool = True) -> State:
    """The state before the first tile, for h [N, D]. Without `gradient`, only the loss is computed."""
    n = h.shape[0]
    state = {"maximum": mx.full((n,), -mx.inf), "total": mx.zeros((n,))}
    return state | ({"sum": mx.zeros(h.shape)} if gradient else {})


def add(state: State, h: mx.array, linear_tile: Linear, logit_scale: float = 1.0, logit_cap: float | None = None) -> State:
    """The state with some rows of the head added: h [N, D], linear_tile [v, D]. Everything is float32 but the products."""
    if h.shape[0] == 0:
        return state
    tile = quantized.unpacked(quantized.wait(linear_tile, list(state.values())), h.dtype)
    logits = _capped(quantized.matmul(h, tile).astype(mx.float32), logit_scale, logit_cap)  # [N,D] @ [D,v] -> [N,v]
    maximum = mx.maximum(state["maximum"], mx.max(logits, axis=1))
    shrink, p = mx.exp(state["maximum"] - maximum), arrays.exp(logits - maximum[:, None])
    new = {"maximum": maximum, "total": state["total"] * shrink + arrays.row_sums(p)[:, 0]}
    if "sum" in state:
        p = p if logit_cap is None else p * _slope(logits, logit_cap)
        new["sum"] = state["sum"] * shrink[:, None] + quantized.matmul_transposed(p.astype(h.dtype), tile)  # [N,v] @ [v,D] -> [N,D]
    return new


def finish(state: State, h: mx.array, target_rows: Linear, logit_scale: float = 1.0, logit_cap: float | None = None) -> tuple[mx.array, mx.array | None]:
    """(loss summed over positions, float32 scalar; dh [N, D] float32, or None without `gradient`); target_rows [N, D] are the head's at the N targets."""
    if h.shape[0] == 0:
        return mx.zeros(()), state.get("sum")
    rows = quantized.dequantize(target_rows, h.dtype).astype(mx.float32)
    # Rounded as the products were: what rounding does to a target that dominates Z must cancel.
    logits = mx.sum(h.astype(mx.float32) * rows, axis=1).astype(h.dtype)
    if "bias" in target_rows:
        logits = logits + target_rows["bias"].astype(h.dtype)
    logits = _capped(logits.astype(mx.float32), logit_scale, logit_cap)
    loss = mx.sum(state["maximum"] + mx.log(state["total"]) - logits)
    if "sum" not in state:
        return loss, None
    dh = state["sum"] / state["total"][:, None] - (rows if logit_cap is None else rows * _slope(logits, logit_cap)[:, None])
    return loss, dh if logit_scale == 1 else logit_scale * dh


def best(h: mx.array, best_state: Best | None, first_row: int, linear_tile: Linear, logit_scale: float = 1.0, logit_cap: float | None = None) -> Best:
    """The largest logit so far and its vocabulary index, each [N] (the first of equals): greedy decoding, tile by tile."""
    tile = linear_tile if best_state is None else quantized.wait(linear_tile, list(best_state))
    logits = _capped(quantized.matmul(h, tile).astype(mx.float32), logit_scale, logit_cap)
    value, index = mx.max(logits, axis=1), mx.argmax(logits, axis=1).astype(mx.int32) + first_row
    if best_state is None:
        return value, index
    better = value > best_state[0]
    return mx.where(better, value, best_state[0]), mx.where(better, index, best_state[1])


def apply(h: mx.array, linear: Linear, targets: mx.array, tile: int | None = None, logit_scale: float = 1.0, logit_cap: float | None = None) -> mx.array:
    """The summed loss of h [N, D] as an ordinary MLX function whose gradient comes from the same sweep; the frozen head gets zeros."""
    return _apply(h, linear, targets, tile, logit_scale, logit_cap)[0]


def _capped(logits: mx.array, scale: float, cap: float | None) -> mx.array:
    logits = logits if scale == 1 else scale * logits
    return logits if cap is None else cap * mx.tanh(logits / cap)


def _slope(logits: mx.array, cap: float) -> mx.array:
    return 1 - mx.square(logits / cap)


def _sweep(h: mx.array, linear: Linear, targets: mx.array, tile: int | None, logit_scale: float, logit_cap: float | None) -> tuple[mx.array, mx.array]:
    """(loss, dh): the gradient is an output, so that the vjp finds it instead of sweeping again."""
    vocabulary, width = quantized.shape(linear)
    step = tile or tiles.weight_rows(width, 4)
    state = start(h)
    for i in range(0, vocabulary, step):
        state = add(state, h, quantized.rows(linear, i, min(i + step, vocabulary)), logit_scale, logit_cap)
    loss, dh = finish(state, h, quantized.take(linear, targets), logit_scale, logit_cap)
    assert dh is not None
    return loss, dh


_apply: Any = mx.custom_function(_sweep)


@_apply.vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    h, linear, targets, *rest = primals
    return (cotangents[0] * outputs[1]).astype(h.dtype), quantized.zeros_like(linear), mx.zeros_like(targets), *rest
