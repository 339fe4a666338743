"""SwiGLU or GeGLU MLP with low-rank adapters, over tiles of its width F (Shazeer, 2020, eq. 6; backward: MeSP, arXiv 2602.13069).

Equals, each of gate, up and down being a `lora_linear`:

    g, u = gate(x), up(x)                 # [N, F]
    z = phi(g) * u                        # phi = silu, or gelu by its tanh form
    y = down(z)                           # [N, D]

Saved for backward: x. Recomputed: g, u and z, a tile [N, f] at a time; the product with down is not. Each tile of gate and up rows, and of
down columns, is dequantised once per pass and serves every product with it, so no array of width F exists. The adapters' terms are sums
over tiles too, and exact. Tiles wait for one another.
"""

from typing import Any, Literal

import mlx.core as mx

from mesp_mlx.memory import tiles
from mesp_mlx.ops import arrays, quantized
from mesp_mlx.ops.lora_linear import Dropout, Pair, drop
from mesp_mlx.ops.quantized import Linear

NAMES = ("gate", "up", "down")
GELU, CUBIC = 1.5957691216, 0.044715  # 2 sqrt(2 / pi), and gelu's coefficient
Activation = Literal["silu", "gelu"]
Loras = dict[str, Pair | None]
Dropouts = dict[str, Dropout | None] | None
Kept = dict[str, mx.array]


def forward(
    x: mx.array,
    gate: Linear,
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
    hidden = {name: scale * (drop(flat, drops[name]) @ pair[0]) for name in ("gate", "up") if (pair := lora[name])}
    down_pair = lora["down"]
    y = h_down = None
    outputs: dict[str, list[mx.array]] = {"gate": [], "up": []}
    for i, j in _tiles(flat, gate, tile):
        after = [a for a in (y, h_down) if a is not None] or [flat]
        g, u = (_project(flat, _rows(linear, i, j, x.dtype, after), lora[name], hidden.get(name), i, j) for name, linear in (("gate", gate), ("up", up)))
        if kept is not None:
            outputs["gate"].append(g)
            outputs["up"].append(u)
        z = _activate(g, activation) * u
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
    gate: Linear,
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
    flat, dy_flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    drops = _flat(dropout)
    dropped = {name: drop(flat, drops[name]) for name in ("gate", "up") if lora[name]}
    hidden = {name: scale * (dropped[name] @ pair[0]) for name in dropped if (pair := lora[name])}  # [N,D] @ [D,R] -> [N,R]
    down_pair = lora["down"]
    dh_down = scale * (dy_flat @ down_pair[1].T) if down_pair else None  # [N,D] @ [D,R] -> [N,R]
    dx = h_down = None
    dh: dict[str, mx.array | None] = dict.fromkeys(dropped)
    db: dict[str, list[mx.array]] = {name: [] for name in dropped}
    da_down: list[mx.array] = []
    for i, j in _tiles(flat, gate, tile):
        # Every result of a tile comes before the next tile: one left over would keep the tile's arrays alive.
        last = (dx, h_down, *dh.values(), *da_down[-1:], *(piece for pieces in db.values() for piece in pieces[-1:]))
        after = [a for a in last if a is not None] or [dy_flat]
        weights = {"gate": _rows(gate, i, j, x.dtype, after), "up": _rows(up, i, j, x.dtype, after)}
        if kept:
            g, u = (kept[name][:, i:j] for name in ("gate", "up"))
        else:
            g, u = (_project(flat, weights[name], lora[name], hidden.get(name), i, j) for name in ("gate", "up"))
        phi, slope = _activate_with_slope(g, activation)
        dz = quantized.matmul_transposed(dy_flat, _columns(down, i, j, x.dtype, after))  # [N,D] @ [D,f] -> [N,f]
        if down_pair and dh_down is not None:
            part, a = _part(drops["down"], i, j), down_pair[0][i:j]
            z = drop(phi * u, part)
            h_down = _sum(h_down, z @ a)  # [N,f] @ [f,R] -> [N,R]
            da_down.append(z.T @ dh_down)  # [f,N] @ [N,R] -> [f,R]
            dz = dz + drop(dh_down @ a.T, part).astype(dz.dtype)  # [N,R] @ [R,f] -> [N,f]
        for name, d in (("gate", dz * u * slope), ("up", dz * phi)):
            if pair := lora[name]:
                db[name].append(hidden[name].T @ d)  # [R,N] @ [N,f] -> [R,f]
                dh[name] = _sum(dh[name], scale * (d @ pair[1][:, i:j].T))  # [N,f] @ [f,R] -> [N,R]
            if need_dx:
                dx = _sum(dx, quantized.matmul_transposed(d, weights[name]))  # [N,f] @ [f,D] -> [N,D]
    grads: Loras = dict.fromkeys(NAMES)
    for name, pair in lora.items():
        if pair is None:
            continue
        if name == "down":
            assert h_down is not None
            grads[name] = mx.concatenate(da_down), scale * (h_down.T @ dy_flat)  # [R,N] @ [N,D] -> [R,D]
        else:
            d_hidden = dh[name]
            assert d_hidden is not None
            grads[name] = dropped[name].T @ d_hidden, mx.concatenate(db[name], axis=1)  # [D,N] @ [N,R] -> [D,R]
            if dx is not None:
                dx = dx + drop(d_hidden @ pair[0].T, drops[name])  # [N,R] @ [R,D] -> [N,D]
    return None if dx is None else dx.astype(x.dtype).reshape(x.shape), grads


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


def _tiles(flat: mx.array, gate: Linear, tile: int | None) -> list[tuple[int, int]]:
    width, _ = quantized.shape(gate)
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


def _activate(g: mx.array, activation: Activation) -> mx.array:
    """phi(g) = g sigmoid(inner(g)): inner(g) = g for silu; gelu's (1 + tanh(t)) / 2 is sigmoid(2 t)."""
    return g * arrays.sigmoid(g if activation == "silu" else GELU * g * (1 + CUBIC * g * g))


def _activate_with_slope(g: mx.array, activation: Activation) -> tuple[mx.array, mx.array]:
    """phi(g) and phi'(g) = s + phi(g) (1 - s) inner'(g), with s = sigmoid(inner(g))."""
    if activation == "silu":
        s = arrays.sigmoid(g)
        phi = g * s
        return phi, s + phi * (1 - s)
    cube = CUBIC * g * g
    s = arrays.sigmoid(GELU * g * (1 + cube))
    phi = g * s
    return phi, s + GELU * phi * (1 - s) * (1 + 3 * cube)


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    x, gate, up, down, lora, scale, dropout, activation, tile = primals
    dx, grads = backward(x, gate, up, down, lora, scale, dy, dropout, activation, tile)
    frozen = [quantized.zeros_like(linear) for linear in (gate, up, down)]
    d_lora = {name: pair and tuple(d.astype(p.dtype) for d, p in zip(grads[name] or (), pair, strict=True)) for name, pair in lora.items()}
    d_dropout = dropout and {name: mask and (mx.zeros_like(mask[0]), mask[1]) for name, mask in dropout.items()}
    return dx, *frozen, d_lora, scale, d_dropout, activation, tile
