"""Causal attention with grouped heads, over blocks of query rows: the twin of `mesp_mlx.ops.attention`.

P = softmax(scale * q @ k.T, where seen);  o = P @ v          # scores capped, and sinks beside them, where there are any
"""

import numpy as np

from mesp_mlx.memory import tiles


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    window: int | None = None,
    tile: int | None = None,
    cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """q [B, H, T, d], k and v [B, K, T, d], sinks [H] -> o [B, H, T, d]. A window is the number of keys a query sees, itself included."""
    out = np.empty((*q.shape[:3], v.shape[-1]), q.dtype)
    for i, j, first in _blocks(q.shape, window, tile):
        rows = _fold(q[:, :, i:j] * q.dtype.type(scale), k.shape[1])
        p, total = _exponentials(_scores(rows, k[:, :, first:j], cap), i, j, first, window, sinks)
        o = p @ v[:, :, first:j]  # [B,K,G*n,S] @ [B,K,S,d] -> [B,K,G*n,d]
        o /= total
        out[:, :, i:j] = _unfold(o, q.shape[1])
    return out


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    do: np.ndarray,
    window: int | None = None,
    tile: int | None = None,
    cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dq [B, H, T, d], dk and dv [B, K, T, d]), given do [B, H, T, d]. The query heads that share a key head sum into it.

    With dP = do vᵀ and dS = P (dP - rowsum(dP P)):  dv = Pᵀ do, dq = scale dS k, dk = scale dSᵀ q.
    Sinks change P alone, because they have no value; a cap multiplies dS by its derivative, 1 - (S / cap)².
    """
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    for i, j, first in _blocks(q.shape, window, tile):
        keys, values = k[:, :, first:j], v[:, :, first:j]
        rows, do_rows = _fold(q[:, :, i:j] * q.dtype.type(scale), k.shape[1]), _fold(do[:, :, i:j], k.shape[1])
        scores = _scores(rows, keys, cap)
        slope = None if cap is None else _slope(scores, cap)
        p, total = _exponentials(scores, i, j, first, window, sinks)
        p /= total
        dv[:, :, first:j] += p.swapaxes(-1, -2) @ do_rows  # [B,K,S,G*n] @ [B,K,G*n,d] -> [B,K,S,d]
        ds = do_rows @ values.swapaxes(-1, -2)  # dP: [B,K,G*n,d] @ [B,K,d,S] -> [B,K,G*n,S]
        ds -= np.einsum("...s,...s->...", ds, p)[..., None]
        ds *= p
        if slope is not None:
            ds *= slope
        dk[:, :, first:j] += ds.swapaxes(-1, -2) @ rows  # scaled in rows: [B,K,S,G*n] @ [B,K,G*n,d] -> [B,K,S,d]
        dq_rows = ds @ keys  # [B,K,G*n,S] @ [B,K,S,d] -> [B,K,G*n,d]
        dq_rows *= q.dtype.type(scale)
        dq[:, :, i:j] = _unfold(dq_rows, q.shape[1])
    return dq, dk, dv


def _blocks(q_shape: tuple[int, ...], window: int | None, tile: int | None) -> list[tuple[int, int, int]]:
    """(first row, end row, first key) of each block."""
    batch, heads, tokens, _ = q_shape
    tile = tile or tiles.query_tile(batch, heads, tokens, window)
    return [(i, min(i + tile, tokens), 0 if window is None else max(0, i - window + 1)) for i in range(0, tokens, tile)]


def _fold(rows: np.ndarray, heads: int) -> np.ndarray:
    """[B, H, n, d] -> [B, K, G*n, d]."""
    batch, _, _, width = rows.shape
    return rows.reshape(batch, heads, -1, width)


def _unfold(rows: np.ndarray, heads: int) -> np.ndarray:
    """[B, K, G*n, d] -> [B, H, n, d]."""
    batch, _, _, width = rows.shape
    return rows.reshape(batch, heads, -1, width)


def _scores(rows: np.ndarray, keys: np.ndarray, cap: float | None) -> np.ndarray:
    """Of query rows (scaled) against keys, capped: [B, K, G*n, S]."""
    scores = rows @ keys.swapaxes(-1, -2)  # [B,K,G*n,d] @ [B,K,d,S] -> [B,K,G*n,S]
    if cap is not None:
        scores /= cap
        np.tanh(scores, out=scores)
        scores *= cap
    return scores


def _slope(scores: np.ndarray, cap: float) -> np.ndarray:
    """The derivative of capped scores, 1 - (scores / cap)²."""
    slope = scores / cap
    slope *= slope
    return np.subtract(1, slope, out=slope)


def _exponentials(scores: np.ndarray, i: int, j: int, first: int, window: int | None, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of the scores of query rows i to j against keys first to j, as exponentials [B, K, G*n, S], in place of the scores, and their sums
    [B, K, G*n, 1], the sinks' among them."""
    row, key = np.arange(i, j)[:, None], np.arange(first, j)[None]
    seen = key <= row if window is None else (key <= row) & (key > row - window)
    batch, heads, _, width = scores.shape
    by_head = scores.reshape(batch, heads, -1, j - i, width)
    by_head += np.where(seen, scores.dtype.type(0), scores.dtype.type(-np.inf))
    top = scores.max(axis=-1, keepdims=True)
    if sinks is None:
        scores -= top
        np.exp(scores, out=scores)
        return scores, scores.sum(axis=-1, keepdims=True)
    sink = np.repeat(sinks.astype(scores.dtype, copy=False).reshape(heads, -1), j - i, axis=1)[None, :, :, None]  # [1, K, G*n, 1]
    np.maximum(top, sink, out=top)
    scores -= top
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True) + np.exp(sink - top)
