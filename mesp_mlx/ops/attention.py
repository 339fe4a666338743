"""Causal attention with grouped heads, over blocks of query rows (the tiling of FlashAttention-2, Dao, 2023, without its online softmax).

Equals, with k and v repeated for the H/K query heads that share them and `seen` the causal (and sliding-window) mask:

    S = scale * q @ k.T                               # [B, H, T, T]
    S = cap * tanh(S / cap)                           # with a cap (Gemma 2, arXiv 2408.00118, sec. 2)
    P = softmax(S, where seen)                        # with sinks: exp(S) / (sum(exp(S)) + exp(sink)) (Xiao et al., arXiv 2309.17453)
    o = P @ v                                         # [B, H, T, d]

A sink is one more logit of each head, which every query sees and which has no value (gpt-oss); it is frozen.

Saved for backward: q, k, v. Recomputed: P, one block of query rows at a time; neither P nor the mask exists whole, and a block touches only
the keys that it sees. The query heads of a group are folded into rows, so keys and values are never repeated. Softmax is float32.
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.memory import tiles
from mesp_mlx.ops import arrays, quantized


def forward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None = None,
    tile: int | None = None,
    cap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """q [B, H, T, d], k and v [B, K, T, d], sinks [H] -> o [B, H, T, d]. A window is the number of keys a query sees, itself included."""
    if window is None and cap is None and not quantized.on_cpu():
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal", sinks=None if sinks is None else sinks.astype(q.dtype))
    pieces: list[mx.array] = []
    for i, j, first in _blocks(q.shape, window, tile):
        rows = _fold(scale * _after(q, pieces[-1:])[:, :, i:j], k.shape[1])
        p = _probabilities(_scores(rows, k[:, :, first:j], cap), i, j, first, window, sinks)
        o = p.astype(v.dtype) @ v[:, :, first:j]  # [B,K,G*n,S] @ [B,K,S,d] -> [B,K,G*n,d]
        pieces.append(_unfold(o, q.shape[1]))
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    do: mx.array,
    window: int | None = None,
    tile: int | None = None,
    cap: float | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """(dq [B, H, T, d], dk and dv [B, K, T, d]), given do [B, H, T, d]. The query heads that share a key head sum into it.

    With dP = do vᵀ and dS = P (dP - rowsum(dP P)):  dv = Pᵀ do, dq = scale dS k, dk = scale dSᵀ q.
    Sinks change P alone, because they have no value; a cap multiplies dS by its derivative, 1 - (S / cap)².
    """
    heads = k.shape[1]
    dq: list[mx.array] = []
    dk, dv = _Sum(k), _Sum(v)
    for i, j, first in _blocks(q.shape, window, tile):
        keys, values = k[:, :, first:j], v[:, :, first:j]
        rows = _fold(scale * _after(q, [*dq[-1:], *dk.last, *dv.last])[:, :, i:j], heads)
        do_rows = _fold(do[:, :, i:j], heads)
        scores = _scores(rows, keys, cap)
        p = _probabilities(scores, i, j, first, window, sinks)
        dv.add(p.astype(v.dtype).swapaxes(-1, -2) @ do_rows, first)  # [B,K,S,G*n] @ [B,K,G*n,d] -> [B,K,S,d]
        dp = (do_rows @ values.swapaxes(-1, -2)).astype(mx.float32)  # [B,K,G*n,d] @ [B,K,d,S] -> [B,K,G*n,S]
        ds = p * (dp - arrays.row_sums(dp * p))
        ds = (ds if cap is None else ds * (1 - mx.square(scores / cap))).astype(q.dtype)
        dq.append(_unfold(scale * (ds @ keys), q.shape[1]))  # [B,K,G*n,S] @ [B,K,S,d] -> [B,K,G*n,d]
        dk.add(ds.swapaxes(-1, -2) @ rows, first)  # scaled in rows: [B,K,S,G*n] @ [B,K,G*n,d] -> [B,K,S,d]
    return mx.concatenate(dq, axis=2), dk.total(), dv.total()


def apply(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None = None,
    tile: int | None = None,
    cap: float | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; the frozen sinks get zeros."""
    return _apply(q, k, v, scale, window, tile, cap, sinks)


class _Sum:
    """A sum over blocks of gradients [B, K, S, d] of the keys first to first + S, in float32.

    Blocks come in order, so keys before a block's first are finished and keys after its last are not begun: only the open part is
    kept, and it grows. (Adding into a slice of a whole array would copy the array at each block.)
    """

    def __init__(self, like: mx.array):
        self.dtype, self.done, self.open, self.first = like.dtype, [], None, 0

    @property
    def last(self) -> list[mx.array]:
        """What the next block waits for: a finished piece not yet computed would keep the sum it is cut from alive."""
        return [] if self.open is None else [self.open, *self.done[-1:]]

    def add(self, part: mx.array, first: int) -> None:
        part = part.astype(mx.float32)
        if self.open is not None:
            finished = first - self.first
            if finished:
                self.done.append(mx.contiguous(self.open[:, :, :finished]).astype(self.dtype))
            kept = self.open[:, :, finished:]
            part = part + mx.pad(kept, [(0, 0), (0, 0), (0, part.shape[2] - kept.shape[2]), (0, 0)])
        self.open, self.first = part, first

    def total(self) -> mx.array:
        assert self.open is not None
        return mx.concatenate([*self.done, self.open.astype(self.dtype)], axis=2)


def _blocks(q_shape: tuple[int, ...], window: int | None, tile: int | None) -> list[tuple[int, int, int]]:
    """(first row, end row, first key) of each block."""
    batch, heads, tokens, _ = q_shape
    tile = tile or tiles.query_tile(batch, heads, tokens, window)
    return [(i, min(i + tile, tokens), 0 if window is None else max(0, i - window + 1)) for i in range(0, tokens, tile)]


def _after(q: mx.array, arrays: list[mx.array]) -> mx.array:
    return mx.depends([q], arrays)[0] if arrays else q


def _fold(rows: mx.array, heads: int) -> mx.array:
    """[B, H, n, d] -> [B, K, G*n, d]."""
    batch, _, _, width = rows.shape
    return rows.reshape(batch, heads, -1, width)


def _unfold(rows: mx.array, heads: int) -> mx.array:
    """[B, K, G*n, d] -> [B, H, n, d]."""
    batch, _, _, width = rows.shape
    return rows.reshape(batch, heads, -1, width)


def _scores(rows: mx.array, keys: mx.array, cap: float | None) -> mx.array:
    """Of query rows (scaled) against keys, capped, in float32: [B, K, G*n, S]."""
    scores = (rows @ keys.swapaxes(-1, -2)).astype(mx.float32)  # [B,K,G*n,d] @ [B,K,d,S] -> [B,K,G*n,S]
    return scores if cap is None else cap * mx.tanh(scores / cap)


def _probabilities(scores: mx.array, i: int, j: int, first: int, window: int | None, sinks: mx.array | None) -> mx.array:
    """softmax of the scores of query rows i to j against keys first to j, beside the sinks: [B, K, G*n, S]."""
    row, key = mx.arange(i, j)[:, None], mx.arange(first, j)[None]
    seen = key <= row if window is None else (key <= row) & (key > row - window)
    batch, heads, _, width = scores.shape
    masked = (scores.reshape(batch, heads, -1, j - i, width) + mx.where(seen, 0.0, -mx.inf)).reshape(scores.shape)
    top = mx.max(masked, axis=-1, keepdims=True)
    if sinks is None:
        p = arrays.exp(masked - top)
        return p / arrays.row_sums(p)
    sink = mx.repeat(sinks.astype(mx.float32).reshape(heads, -1), j - i, axis=1)[None, :, :, None]  # [1, K, G*n, 1]
    top = mx.maximum(top, sink)
    p = arrays.exp(masked - top)
    return p / (arrays.row_sums(p) + mx.exp(sink - top))


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, do: mx.array, _o: mx.array) -> Any:
    q, k, v, scale, window, tile, cap, sinks = primals
    return *backward(q, k, v, scale, do, window, tile, cap, sinks), scale, window, tile, cap, None if sinks is None else mx.zeros_like(sinks)
