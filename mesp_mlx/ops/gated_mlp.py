"""Gated MLP (SwiGLU, GeGLU) with low-rank adapters, over tiles of its width F (Shazeer, 2020, eq. 6; backward: MeSP, arXiv 2602.13069).

Equals, each of gate, up and down being a `lora_linear`:

    g, u = gate(x), up(x)                 # [N, F]
    z = phi(g) * u                        # phi: see `activations`
    y = down(z)                           # [N, D]

Saved for backward: x. Recomputed: g, u and z, a tile [N, f] at a time; the product with down is not. Each tile of gate and up rows, and of
down columns, is dequantised once per pass and serves every product with it, so no array of width F exists. The adapters' terms are sums
over tiles too, and exact. Tiles wait for one another. Without a gate (None, as `mlp` calls it) there is no g, and z = phi(u).
"""

from typing import Any

import mlx.core as mx

from mesp_mlx.memory import tiles
from mesp_mlx.ops import quantized
from mesp_mlx.ops.activations import Activation, activate, activate_with_slope, factor, through_factor
from mesp_mlx.ops.arrays import row_sums
from mesp_mlx.ops.lora_linear import Dropout, Pair, drop
from mesp_mlx.ops.quantized import Linear

NAMES = ("gate", "up", "down")
Loras = dict[str, Pair | None]
Dropouts = dict[str, Dropout | None] | None
Kept = dict[str, mx.array]


def forward(
    x: mx.array,
    gate: Linear | None,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    kept: Kept | None = None,
) -> mx.array:
    """x [..., D] -> y [..., D] in the dtype of x. `tile` is a multiple of 32 and of the group size.

    A dict given as `kept` receives what `backward` need not compute again: {"gate": g, "up": u}, each [N, F].
    """
    flat = x.reshape(-1, x.shape[-1])
    drops = _flat(dropout)
    inner = {"up": up} if gate is None else {"gate": gate, "up": up}
    hidden = {name: scale * (drop(flat, drops[name]) @ pair[0]) for name in inner if (pair := lora[name])}
    down_pair = lora["down"]
    y = h_down = None
    outputs: dict[str, list[mx.array]] = {name: [] for name in inner}
    for i, j in _tiles(flat, up, tile):
        after = [a for a in (y, h_down) if a is not None] or [flat]
        g, *u = (_project(flat, _rows(linear, i, j, x.dtype, after), lora[name], hidden.get(name), i, j) for name, linear in inner.items())
        if kept is not None:
            for pieces, piece in zip(outputs.values(), (g, *u), strict=True):
                pieces.append(piece)
        z = activate(g, activation)
        z = z * factor(u[0], activation) if u else z
        y = _sum(y, quantized.matmul(z, _columns(down, i, j, x.dtype, after)))
        if down_pair:
            h_down = _sum(h_down, drop(z, _part(drops["down"], i, j)) @ down_pair[0][i:j])
    assert y is not None
    if kept is not None:
        kept.update({name: pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1) for name, pieces in outputs.items()})
    if down_pair and h_down is not None:
        y = y + scale * (h_down @ down_pair[1])
    if "bias" in down:
        y = y + down["bias"]
    return y.astype(x.dtype).reshape(x.shape)


def backward(
    x: mx.array,
    gate: Linear | None,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: mx.array,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[mx.array | None, Loras]:
    """(dx [..., D] or None, {"gate", "up", "down": (dA [in, R], dB [R, out]) float32, or None without an adapter}), given dy [..., D].

    With z̃ = dropout(z) and dh_down = scale dy B_downᵀ:

        dz = dy W_down + dropoutᵀ(dh_down A_downᵀ);  du = dz phi(g);  dg = dz u phi'(g)
        dA_down = z̃ᵀ dh_down;  dB_down = scale (sum over tiles of z̃ A_down)ᵀ dy
    """
    dx, grads, _ = weighted_backward(x, None, gate, up, down, lora, scale, dy, dropout, activation, tile, need_dx, kept)
    return dx, grads


def weighted_backward(
    x: mx.array,
    p: mx.array | None,
    gate: Linear | None,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: mx.array,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[mx.array | None, Loras, mx.array | None]:
    """`backward` of p * MLP(x), where each row has its own p [N] (None: 1): (dx, adapters' gradients, dp [N] or None).

    With dz as if p were 1, dp = rowsum(z dz) + dy · bias_down: no product with W_down is needed but the one of dz. Then dz, dh_down and z̃ A_down are times p.
    """
    flat, dy_flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    drops = _flat(dropout)
    inner = {"up": up} if gate is None else {"gate": gate, "up": up}
    dropped = {name: drop(flat, drops[name]) for name in inner if lora[name]}
    hidden = {name: scale * (dropped[name] @ pair[0]) for name in dropped if (pair := lora[name])}  # [N,D] @ [D,R] -> [N,R]
    down_pair = lora["down"]
    dh_down = scale * (dy_flat @ down_pair[1].T) if down_pair else None  # [N,D] @ [D,R] -> [N,R]
    by_row = None if p is None else p[:, None].astype(x.dtype)
    dx = h_down = dp = None
    dh: dict[str, mx.array | None] = dict.fromkeys(dropped)
    db: dict[str, list[mx.array]] = {name: [] for name in dropped}
    da_down: list[mx.array] = []
    for i, j in _tiles(flat, up, tile):
        # Every result of a tile comes before the next tile: one left over would keep the tile's arrays alive.
        last = (dx, h_down, dp, *dh.values(), *da_down[-1:], *(piece for pieces in db.values() for piece in pieces[-1:]))
        after = [a for a in last if a is not None] or [dy_flat]
        weights = {name: _rows(linear, i, j, x.dtype, after) for name, linear in inner.items()}
        g, *u = (kept[name][:, i:j] if kept else _project(flat, weights[name], lora[name], hidden.get(name), i, j) for name in inner)
        others = factor(u[0], activation) if u else None
        phi, slope = activate_with_slope(g, activation)
        dz = quantized.matmul_transposed(dy_flat, _columns(down, i, j, x.dtype, after))  # [N,D] @ [D,f] -> [N,f]
        if down_pair and dh_down is not None:
            part, a = _part(drops["down"], i, j), down_pair[0][i:j]
            z = drop(phi if others is None else phi * others, part)
            h_down = _sum(h_down, z @ a)  # [N,f] @ [f,R] -> [N,R]
            da_down.append(z.T @ (dh_down if by_row is None else by_row * dh_down))  # [f,N] @ [N,R] -> [f,R]
            dz = dz + drop(dh_down @ a.T, part).astype(dz.dtype)  # [N,R] @ [R,f] -> [N,f]
        if by_row is not None:
            dp = _sum(dp, row_sums(dz * phi if others is None else dz * phi * others))
            dz = dz * by_row
        parts = (dz * slope,) if others is None else (dz * others * slope, through_factor(dz * phi, u[0], activation))
        for name, d in zip(inner, parts, strict=True):
            if pair := lora[name]:
                db[name].append(hidden[name].T @ d)  # [R,N] @ [N,f] -> [R,f]
                dh[name] = _sum(dh[name], scale * (d @ pair[1][:, i:j].T))  # [N,f] @ [f,R] -> [N,R]
            if need_dx:
                dx = _sum(dx, quantized.matmul_transposed(d, weights[name]))  # [N,f] @ [f,D] -> [N,D]
    grads: Loras = dict.fromkeys(lora)
    for name, pair in lora.items():
        if pair is None:
            continue
        if name == "down":
            assert h_down is not None
            grads[name] = mx.concatenate(da_down), scale * ((h_down if by_row is None else by_row * h_down).T @ dy_flat)  # [R,N] @ [N,D] -> [R,D]
        else:
            d_hidden = dh[name]
            assert d_hidden is not None
            grads[name] = dropped[name].T @ d_hidden, mx.concatenate(db[name], axis=1)  # [D,N] @ [N,R] -> [D,R]
            if dx is not None:
                dx = dx + drop(d_hidden @ pair[0].T, drops[name])  # [N,R] @ [R,D] -> [N,D]
    if dp is not None:
        dp = dp[:, 0] + (dy_flat @ down["bias"] if "bias" in down else 0)
    return None if dx is None else dx.astype(x.dtype).reshape(x.shape), grads, dp


def apply(
    x: mx.array,
    gate: Linear,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; frozen linears get zeros."""
    return _apply(x, gate, up, down, lora, scale, dropout, activation, tile)


def cotangents(lora: Loras, grads: Loras, scale: float, dropout: Dropouts) -> tuple[Any, float, Any]:
    """Those of (lora, scale, dropout): the gradients in the dtype of the adapter, and zeros for the masks."""
    d_lora = {name: pair and tuple(d.astype(p.dtype) for d, p in zip(grads[name] or (), pair, strict=True)) for name, pair in lora.items()}
    return d_lora, scale, dropout and {name: mask and (mx.zeros_like(mask[0]), mask[1]) for name, mask in dropout.items()}


def _tiles(flat: mx.array, up: Linear, tile: int | None) -> list[tuple[int, int]]:
    width, _ = quantized.shape(up)
    tile = tile or tiles.width_tile(*flat.shape)
    return [(i, min(i + tile, width)) for i in range(0, width, tile)]


def _rows(linear: Linear, i: int, j: int, dtype: mx.Dtype, after: list[mx.array]) -> Linear:
    return quantized.unpacked(quantized.wait(quantized.rows(linear, i, j), after), dtype)


def _columns(linear: Linear, i: int, j: int, dtype: mx.Dtype, after: list[mx.array]) -> Linear:
    return quantized.unpacked(quantized.wait(quantized.columns(linear, i, j), after), dtype)


def _project(x: mx.array, tile: Linear, pair: Pair | None, hidden: mx.array | None, i: int, j: int) -> mx.array:
    """Outputs i to j of gate or up: [N, f]. `hidden` is scale * (x̃ A)."""
    y = quantized.matmul(x, tile)
    return y if pair is None or hidden is None else y + (hidden @ pair[1][:, i:j]).astype(y.dtype)


def _sum(total: mx.array | None, part: mx.array) -> mx.array:
    """Running sums are float32 whatever the dtype of their terms."""
    return part.astype(mx.float32) if total is None else total + part


def _flat(dropout: Dropouts) -> dict[str, Dropout | None]:
    """The masks with their tokens in one axis."""
    masks = dropout or {}
    return {name: mask and (mask[0].reshape(-1, mask[0].shape[-1]), mask[1]) for name in NAMES for mask in (masks.get(name),)}


def _part(dropout: Dropout | None, i: int, j: int) -> Dropout | None:
    return dropout and (dropout[0][:, i:j], dropout[1])


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    x, gate, up, down, lora, scale, dropout, activation, tile = primals
    dx, grads = backward(x, gate, up, down, lora, scale, dy, dropout, activation, tile)
    return dx, *map(quantized.zeros_like, (gate, up, down)), *cotangents(lora, grads, scale, dropout), activation, tile
