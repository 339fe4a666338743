"""Gated MLP (SwiGLU, GeGLU) with low-rank adapters, over tiles of its width F: the twin of `mesp_mlx.ops.gated_mlp`.

g, u = gate(x), up(x);  z = phi(g) * u;  y = down(z)          # each a lora_linear; without a gate (None) z = phi(u)
"""

import numpy as np

from mesp_mlx.memory import tiles
from mesp_mlx.reference import quantized
from mesp_mlx.reference.activations import Activation, activate, activate_with_slope, factor, through_factor
from mesp_mlx.reference.lora_linear import Dropout, Pair, drop
from mesp_mlx.reference.quantized import Linear

NAMES = ("gate", "up", "down")
Loras = dict[str, Pair | None]
Dropouts = dict[str, Dropout | None] | None
Kept = dict[str, np.ndarray]


def forward(
    x: np.ndarray,
    gate: Linear | None,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    kept: Kept | None = None,
) -> np.ndarray:
    """x [..., D] -> y [..., D] in the dtype of x. `tile` is a multiple of 32 and of the group size.

    A dict given as `kept` receives what `backward` need not compute again: {"gate": g, "up": u}, each [N, F].
    """
    flat = x.reshape(-1, x.shape[-1])
    drops = _flat(dropout)
    inner = {"up": up} if gate is None else {"gate": gate, "up": up}
    hidden = {name: scale * (drop(flat, drops[name]) @ pair[0]) for name in inner if (pair := lora[name])}
    down_pair = lora["down"]
    y = np.zeros(flat.shape, x.dtype)
    if kept is not None:
        kept.update({name: np.empty((len(flat), quantized.shape(up)[0]), x.dtype) for name in inner})
    h_down = np.zeros((len(flat), down_pair[0].shape[1]), x.dtype) if down_pair else None
    for i, j in _tiles(flat, up, tile):
        g, *u = (
            _project(flat, quantized.unpacked(quantized.rows(linear, i, j), x.dtype), lora[name], hidden.get(name), i, j) for name, linear in inner.items()
        )
        if kept is not None:
            for name, output in zip(inner, (g, *u), strict=True):
                kept[name][:, i:j] = output
        z = activate(g, activation)
        if u:
            z *= factor(u[0], activation)
        y += quantized.matmul(z, quantized.columns(down, i, j))
        if down_pair and h_down is not None:
            h_down += drop(z, _part(drops["down"], i, j)) @ down_pair[0][i:j]
    if down_pair and h_down is not None:
        y += scale * h_down @ down_pair[1]
    if "bias" in down:
        y += down["bias"]
    return y.reshape(x.shape)


def backward(
    x: np.ndarray,
    gate: Linear | None,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: np.ndarray,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[np.ndarray | None, Loras]:
    """(dx [..., D] or None, {"gate", "up", "down": (dA [in, R], dB [R, out]), or None without an adapter}), given dy [..., D].

    With z̃ = dropout(z) and dh_down = scale dy B_downᵀ:

        dz = dy W_down + dropoutᵀ(dh_down A_downᵀ);  du = dz phi(g);  dg = dz u phi'(g)
        dA_down = z̃ᵀ dh_down;  dB_down = scale (sum over tiles of z̃ A_down)ᵀ dy
    """
    dx, grads, _ = weighted_backward(x, None, gate, up, down, lora, scale, dy, dropout, activation, tile, need_dx, kept)
    return dx, grads


def weighted_backward(
    x: np.ndarray,
    p: np.ndarray | None,
    gate: Linear | None,
    up: Linear,
    down: Linear,
    lora: Loras,
    scale: float,
    dy: np.ndarray,
    dropout: Dropouts = None,
    activation: Activation = "silu",
    tile: int | None = None,
    need_dx: bool = True,
    kept: Kept | None = None,
) -> tuple[np.ndarray | None, Loras, np.ndarray | None]:
    """`backward` of p * MLP(x), where each row has its own p [N] (None: 1): (dx, adapters' gradients, dp [N] or None).

    With dz as if p were 1, dp = rowsum(z dz) + dy · bias_down: no product with W_down is needed but the one of dz. Then dz, dh_down and z̃ A_down are times p.
    """
    flat, dy_flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    drops = _flat(dropout)
    inner = {"up": up} if gate is None else {"gate": gate, "up": up}
    dropped = {name: drop(flat, drops[name]) for name in inner if lora[name]}
    hidden = {name: scale * (dropped[name] @ pair[0]) for name in dropped if (pair := lora[name])}  # [N,D] @ [D,R] -> [N,R]
    grads: Loras = {name: pair and (np.empty(pair[0].shape, x.dtype), np.empty(pair[1].shape, x.dtype)) for name, pair in lora.items()}
    dh = {name: np.zeros_like(h) for name, h in hidden.items()}
    if pair := lora["down"]:
        dh["down"] = scale * (dy_flat @ pair[1].T)  # [N,D] @ [D,R] -> [N,R]
        hidden["down"] = np.zeros_like(dh["down"])
    by_row, dp = None if p is None else p[:, None].astype(x.dtype), None if p is None else np.zeros(len(flat), x.dtype)
    dx = np.zeros(flat.shape, x.dtype) if need_dx else None
    for i, j in _tiles(flat, up, tile):
        needed = inner if need_dx or not kept else {}
        weights = {name: quantized.unpacked(quantized.rows(linear, i, j), x.dtype) for name, linear in needed.items()}
        g, *u = (kept[name][:, i:j] if kept else _project(flat, weights[name], lora[name], hidden.get(name), i, j) for name in inner)
        others = factor(u[0], activation) if u else None
        phi, slope = activate_with_slope(g, activation)
        dz = quantized.matmul_transposed(dy_flat, quantized.columns(down, i, j))  # [N,D] @ [D,f] -> [N,f]
        if (pair := lora["down"]) and (grad := grads["down"]):
            part, a = _part(drops["down"], i, j), pair[0][i:j]
            z = drop(phi if others is None else phi * others, part)
            hidden["down"] += scale * (z @ a)  # [N,f] @ [f,R] -> [N,R]
            np.matmul(z.T, dh["down"] if by_row is None else by_row * dh["down"], out=grad[0][i:j])  # [f,N] @ [N,R] -> [f,R]
            dz += drop(dh["down"] @ a.T, part)  # [N,R] @ [R,f] -> [N,f]
        if by_row is not None and dp is not None:
            dp += np.einsum("nf,nf->n", dz, phi if others is None else phi * others)
            dz *= by_row
        slope *= dz
        if others is not None:
            slope *= others
            phi *= dz
        for name, d in zip(inner, (slope, through_factor(phi, u[0], activation)) if u else (slope,), strict=True):
            if (pair := lora[name]) and (grad := grads[name]):
                np.matmul(hidden[name].T, d, out=grad[1][:, i:j])  # [R,N] @ [N,f] -> [R,f]
                dh[name] += scale * (d @ pair[1][:, i:j].T)  # [N,f] @ [f,R] -> [N,R]
            if dx is not None:
                dx += d @ weights[name]["weight"]  # [N,f] @ [f,D] -> [N,D]
    if grad := grads["down"]:
        np.matmul((hidden["down"] if by_row is None else by_row * hidden["down"]).T, dy_flat, out=grad[1])  # [R,N] @ [N,D] -> [R,D]
    for name in dropped:
        if (pair := lora[name]) and (grad := grads[name]):
            np.matmul(dropped[name].T, dh[name], out=grad[0])  # [D,N] @ [N,R] -> [D,R]
            if dx is not None:
                dx += drop(dh[name] @ pair[0].T, drops[name])  # [N,R] @ [R,D] -> [N,D]
    if dp is not None and "bias" in down:
        dp += dy_flat @ down["bias"]
    return None if dx is None else dx.reshape(x.shape), grads, dp


def _tiles(flat: np.ndarray, up: Linear, tile: int | None) -> list[tuple[int, int]]:
    width, _ = quantized.shape(up)
    tile = tile or tiles.width_tile(*flat.shape)
    return [(i, min(i + tile, width)) for i in range(0, width, tile)]


def _project(x: np.ndarray, tile: Linear, pair: Pair | None, hidden: np.ndarray | None, i: int, j: int) -> np.ndarray:
    """Outputs i to j of gate or up: [N, f]. `hidden` is scale * (x̃ A)."""
    y = quantized.matmul(x, tile)
    if pair is not None and hidden is not None:
        y += hidden @ pair[1][:, i:j]
    return y


def _flat(dropout: Dropouts) -> dict[str, Dropout | None]:
    """The masks with their tokens in one axis."""
    masks = dropout or {}
    return {name: mask and (mask[0].reshape(-1, mask[0].shape[-1]), mask[1]) for name in NAMES for mask in (masks.get(name),)}


def _part(dropout: Dropout | None, i: int, j: int) -> Dropout | None:
    return dropout and (dropout[0][:, i:j], dropout[1])
