"""SwiGLU or GeGLU MLP with low-rank adapters, over tiles of its width F: the twin of `mesp_mlx.ops.gated_mlp`.

g, u = gate(x), up(x);  z = phi(g) * u;  y = down(z)          # each a lora_linear
"""

import math
from typing import Literal

import numpy as np

from mesp_mlx.memory import tiles
from mesp_mlx.reference import quantized
from mesp_mlx.reference.lora_linear import Dropout, Pair, drop
from mesp_mlx.reference.quantized import Linear

NAMES = ("gate", "up", "down")
Activation = Literal["silu", "gelu"]
Loras = dict[str, Pair | None]
Dropouts = dict[str, Dropout | None] | None
Kept = dict[str, np.ndarray]


def forward(
    x: np.ndarray,
    gate: Linear,
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
    hidden = {name: scale * (drop(flat, drops[name]) @ pair[0]) for name in ("gate", "up") if (pair := lora[name])}
    down_pair = lora["down"]
    y = np.zeros(flat.shape, x.dtype)
    if kept is not None:
        kept.update({name: np.empty((len(flat), quantized.shape(gate)[0]), x.dtype) for name in ("gate", "up")})
    h_down = np.zeros((len(flat), down_pair[0].shape[1]), x.dtype) if down_pair else None
    for i, j in _tiles(flat, gate, tile):
        g, u = (
            _project(flat, quantized.unpacked(quantized.rows(linear, i, j), x.dtype), lora[name], hidden.get(name), i, j)
            for name, linear in (("gate", gate), ("up", up))
        )
        if kept is not None:
            kept["gate"][:, i:j], kept["up"][:, i:j] = g, u
        z = _activate(g, activation)
        z *= u
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
    gate: Linear,
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
    flat, dy_flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    drops = _flat(dropout)
    dropped = {name: drop(flat, drops[name]) for name in ("gate", "up") if lora[name]}
    hidden = {name: scale * (dropped[name] @ pair[0]) for name in dropped if (pair := lora[name])}  # [N,D] @ [D,R] -> [N,R]
    grads: Loras = {name: pair and (np.empty(pair[0].shape, x.dtype), np.empty(pair[1].shape, x.dtype)) for name, pair in lora.items()}
    dh = {name: np.zeros_like(h) for name, h in hidden.items()}
    if pair := lora["down"]:
        dh["down"] = scale * (dy_flat @ pair[1].T)  # [N,D] @ [D,R] -> [N,R]
        hidden["down"] = np.zeros_like(dh["down"])
    dx = np.zeros(flat.shape, x.dtype) if need_dx else None
    for i, j in _tiles(flat, gate, tile):
        needed = {"gate": gate, "up": up} if need_dx or not kept else {}
        weights = {name: quantized.unpacked(quantized.rows(linear, i, j), x.dtype) for name, linear in needed.items()}
        if kept:
            g, u = (kept[name][:, i:j] for name in ("gate", "up"))
        else:
            g, u = (_project(flat, weights[name], lora[name], hidden.get(name), i, j) for name in ("gate", "up"))
        phi, slope = _activate_with_slope(g, activation)
        dz = quantized.matmul_transposed(dy_flat, quantized.columns(down, i, j))  # [N,D] @ [D,f] -> [N,f]
        if (pair := lora["down"]) and (grad := grads["down"]):
            part, a = _part(drops["down"], i, j), pair[0][i:j]
            z = drop(phi * u, part)
            hidden["down"] += scale * (z @ a)  # [N,f] @ [f,R] -> [N,R]
            np.matmul(z.T, dh["down"], out=grad[0][i:j])  # [f,N] @ [N,R] -> [f,R]
            dz += drop(dh["down"] @ a.T, part)  # [N,R] @ [R,f] -> [N,f]
        slope *= dz
        slope *= u
        phi *= dz
        for name, d in (("gate", slope), ("up", phi)):
            if (pair := lora[name]) and (grad := grads[name]):
                np.matmul(hidden[name].T, d, out=grad[1][:, i:j])  # [R,N] @ [N,f] -> [R,f]
                dh[name] += scale * (d @ pair[1][:, i:j].T)  # [N,f] @ [f,R] -> [N,R]
            if dx is not None:
                dx += d @ weights[name]["weight"]  # [N,f] @ [f,D] -> [N,D]
    if grad := grads["down"]:
        np.matmul(hidden["down"].T, dy_flat, out=grad[1])  # [R,N] @ [N,D] -> [R,D]
    for name in dropped:
        if (pair := lora[name]) and (grad := grads[name]):
            np.matmul(dropped[name].T, dh[name], out=grad[0])  # [D,N] @ [N,R] -> [D,R]
            if dx is not None:
                dx += drop(dh[name] @ pair[0].T, drops[name])  # [N,R] @ [R,D] -> [N,D]
    return None if dx is None else dx.reshape(x.shape), grads


def _tiles(flat: np.ndarray, gate: Linear, tile: int | None) -> list[tuple[int, int]]:
    width, _ = quantized.shape(gate)
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


def _sigmoid(g: np.ndarray) -> np.ndarray:
    """By tanh, which doesn't overflow."""
    s = g * 0.5
    np.tanh(s, out=s)
    s += 1
    s *= 0.5
    return s


def _gelu_tanh(g: np.ndarray) -> np.ndarray:
    """tanh(sqrt(2/pi) (g + 0.044715 g³))."""
    t = g * g
    t *= 0.044715
    t += 1
    t *= g
    t *= math.sqrt(2 / math.pi)
    return np.tanh(t, out=t)


def _activate(g: np.ndarray, activation: Activation) -> np.ndarray:
    if activation == "silu":
        s = _sigmoid(g)
    else:
        s = _gelu_tanh(g)
        s += 1
        s *= 0.5
    s *= g
    return s


def _activate_with_slope(g: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray]:
    """phi(g) and phi'(g)."""
    if activation == "silu":
        slope = _sigmoid(g)
        phi = g * slope
        s = 1 - slope
        s *= phi
        slope += s  # s + phi (1 - s)
        return phi, slope
    t = _gelu_tanh(g)
    half = 0.5 * (1 + t)
    return g * half, half + 0.5 * math.sqrt(2 / math.pi) * g * (1 - t * t) * (1 + 3 * 0.044715 * g * g)
