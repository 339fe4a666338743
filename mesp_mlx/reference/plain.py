"""A decoder layer's parts in naive code, with a tape that differentiates them: the twin of `mesp_mlx.ops.plain`.

For the methods that let autodiff find the gradient, and for checks: whole arrays, none of the blockwise backwards beside this file. An operation
on a `Traced` value gives another, which keeps its inputs and what its backward reads, until the sweep of `vjp` has passed it. On plain arrays
it gives a plain array and keeps nothing. Everything is computed in the dtype of the activations.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mesp_mlx.reference import quantized
from mesp_mlx.reference import rope as ropes
from mesp_mlx.reference.activations import LIMIT, Activation, normal
from mesp_mlx.reference.lora_linear import Dropout, drop
from mesp_mlx.reference.quantized import Linear

Backward = Callable[[np.ndarray], Sequence[np.ndarray | None]]  # from an output's gradient to those of the inputs, None for plain ones


class Traced:
    """A value on the tape: an array, the inputs it was made of, and how its gradient becomes theirs (None: a primal)."""

    __array_ufunc__ = None  # so that ndarray + Traced comes to __radd__

    def __init__(self, value: np.ndarray, inputs: Sequence[Any] = (), backward: Backward | None = None) -> None:
        self.value, self.backward = value, backward
        self.parents = [part if isinstance(part, Traced) else None for part in inputs]
        self.depth: int = 1 + max((parent.depth for parent in self.parents if parent), default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    def __add__(self, other: Any) -> "Traced":
        value = self.value + _value(other)
        if any(isinstance(part, Traced) and part.shape != value.shape for part in (self, other)):
            raise ValueError(f"adding shapes {self.shape} and {np.shape(_value(other))}: a traced value is not broadcast")
        return Traced(value, (self, other), lambda dy: (dy, dy))

    __radd__ = __add__

    def __mul__(self, factor: float) -> "Traced":
        return Traced(self.value * factor, (self,), lambda dy: (dy * factor,))

    def __getitem__(self, index: Any) -> "Traced":
        """Of slices and numbers: each element is taken once at most."""

        def backward(dy: np.ndarray) -> tuple[np.ndarray]:
            dx = np.zeros(self.shape, dy.dtype)
            dx[index] = dy
            return (dx,)

        return Traced(self.value[index], (self,), backward)

    def reshape(self, *shape: Any) -> "Traced":
        before = self.shape
        return Traced(self.value.reshape(*shape), (self,), lambda dy: (dy.reshape(before),))

    def transpose(self, *axes: Any) -> "Traced":
        inverse = np.argsort(np.reshape(axes, -1))
        return Traced(self.value.transpose(*axes), (self,), lambda dy: (dy.transpose(inverse),))


Array = np.ndarray | Traced


def vjp(function: Callable[[dict[str, Any]], Any], primals: Mapping[str, np.ndarray], cotangent: Any = None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(function(primals), the gradient of each primal by its name), given the output's gradient; None: the output is a scalar, its gradient 1.

    Raises:
        ValueError: the cotangent hasn't the output's shape.
    """
    leaves = {name: Traced(value) for name, value in primals.items()}
    output = function(dict(leaves))
    value = _value(output)
    dy = np.ones((), value.dtype) if cotangent is None else cotangent
    if dy.shape != value.shape:
        raise ValueError(f"a cotangent of shape {dy.shape} for an output of shape {value.shape}")
    gradients = _sweep(output, dy) if isinstance(output, Traced) else {}
    return value, {name: gradients[leaf] if leaf in gradients else np.zeros_like(leaf.value) for name, leaf in leaves.items()}


def checkpoint(function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """The same function of traced and plain arrays, which keeps its inputs alone: its backward computes it a second time.

    Raises:
        ValueError: the function uses a traced value that isn't among its inputs, whose gradient would be lost.
    """

    def checkpointed(inputs: dict[str, Any]) -> Any:
        plain = {name: _value(part) for name, part in inputs.items()}
        traced = [name for name, part in inputs.items() if isinstance(part, Traced)]
        value = function(dict(plain))
        if isinstance(value, Traced):
            raise ValueError("a checkpointed function uses a traced value that it was not given: pass it in the inputs")

        def backward(dy: np.ndarray) -> list[np.ndarray]:
            return list(vjp(lambda part: function(plain | part), {name: plain[name] for name in traced}, dy)[1].values())

        return _result(value, [inputs[name] for name in traced], backward)

    return checkpointed


def linear(x: Array, frozen: Linear, lora: tuple[Array, Array] | None, scale: float, dropout: Dropout | None = None) -> Any:
    """x [..., in] Wᵀ + bias + scale (x̃ A) B -> [..., out], with x̃ = dropout(x), A [in, R] and B [R, out]. Kept: x, x̃ and h = x̃ A."""
    values, need_dx = _value(x), isinstance(x, Traced)
    y = quantized.matmul(values, frozen)
    if lora is None:
        return _result(y, (x,), lambda dy: (quantized.matmul_transposed(dy, frozen),))
    a, b = _value(lora[0]), _value(lora[1])
    dropped = drop(values, dropout)
    h = dropped @ a  # [...,in] @ [in,R] -> [...,R]
    y += scale * (h @ b)  # [...,R] @ [R,out] -> [...,out]

    def backward(dy: np.ndarray) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
        g = scale * dy
        dh = g @ b.T  # [...,out] @ [out,R] -> [...,R]
        da = _rows(dropped).T @ _rows(dh)  # [in,N] @ [N,R] -> [in,R]
        db = _rows(h).T @ _rows(g)  # [R,N] @ [N,out] -> [R,out]
        dx = quantized.matmul_transposed(dy, frozen) + drop(dh @ a.T, dropout) if need_dx else None  # [N,out] @ [out,in] + [N,R] @ [R,in] -> [N,in]
        return dx, da, db

    return _result(y, (x, *lora), backward)


def rms_norm(x: Array, weight: np.ndarray | None, eps: float) -> Any:
    """x [..., D] r weight, r = (mean(x²) + eps)^-½. Kept: x, r. The weight, if any, is a constant."""
    values = _value(x)
    w = np.ones((), values.dtype) if weight is None else weight.astype(values.dtype, copy=False)
    r = 1 / np.sqrt(np.mean(values**2, axis=-1, keepdims=True) + eps)

    def backward(dy: np.ndarray) -> tuple[np.ndarray]:
        g = dy * w
        dr = np.sum(g * values, axis=-1, keepdims=True)
        return (g * r - values * (dr * r**3 / values.shape[-1]),)

    return _result(values * r * w, (x,), backward)


def layer_norm(x: Array, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> Any:
    """x [..., D] normalised, n = (x - mean(x)) r with r = (var(x) + eps)^-½, times weight and plus bias, constants, if any. Kept: n, r."""
    values = _value(x)
    w = np.ones((), values.dtype) if weight is None else weight.astype(values.dtype, copy=False)
    r = 1 / np.sqrt(np.var(values, axis=-1, keepdims=True) + eps)
    n = (values - np.mean(values, axis=-1, keepdims=True)) * r

    def backward(dy: np.ndarray) -> tuple[np.ndarray]:
        dn = dy * w
        return (r * (dn - np.mean(dn, axis=-1, keepdims=True) - n * np.mean(dn * n, axis=-1, keepdims=True)),)

    return _result(n * w if bias is None else n * w + bias.astype(values.dtype, copy=False), (x,), backward)


def rope(x: Array, rope: ropes.Rope) -> Any:
    """x [B, H, T, d] rotated by position."""
    return _result(ropes.forward(_value(x), rope), (x,), lambda dy: (ropes.backward(dy, rope),))


def attention(q: Array, k: Array, v: Array, scale: float, window: int | None = None, cap: float | None = None, sinks: np.ndarray | None = None) -> Any:
    """softmax(scale q kᵀ, where seen) v: q [B, H, T, d], k and v [B, K, T, d] -> [B, H, T, d]. Kept: q, k, v and the probabilities, B·H·T².

    A window is the number of keys a query sees, itself included. Scores are capped at `cap`, whose derivative is kept too. Each head's of sinks [H],
    which are constants, is one more logit, without a value.
    """
    keys, values = _value(k), _value(v)
    batch, heads, tokens, _ = q.shape
    groups = heads // keys.shape[1]
    rows = _value(q).reshape(batch, keys.shape[1], groups * tokens, -1)  # the query heads that share a key head are rows of one product
    i, j = np.arange(tokens)[:, None], np.arange(tokens)
    seen = (j <= i) & (j > i - (window or tokens))
    p = scale * (rows @ keys.swapaxes(-1, -2))  # [B,K,G*T,d] @ [B,K,d,T] -> [B,K,G*T,T]
    dcap = None
    if cap is not None:
        t = np.tanh(p / cap)
        p, dcap = cap * t, 1 - t * t
    np.copyto(p, -np.inf, where=~np.tile(seen, (groups, 1)))
    top = p.max(axis=-1, keepdims=True)
    rest = 0
    if sinks is not None:
        sink = np.repeat(sinks.astype(p.dtype, copy=False), tokens).reshape(1, keys.shape[1], groups * tokens, 1)  # of each row
        top = np.maximum(top, sink)
        rest = np.exp(sink - top)
    np.exp(p - top, out=p)
    p /= p.sum(axis=-1, keepdims=True) + rest

    def backward(do: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        do = do.reshape(*rows.shape[:-1], -1)
        dv = p.swapaxes(-1, -2) @ do  # [B,K,T,G*T] @ [B,K,G*T,d] -> [B,K,T,d]
        dp = do @ values.swapaxes(-1, -2)  # [B,K,G*T,d] @ [B,K,d,T] -> [B,K,G*T,T]
        ds = scale * p * (dp - np.sum(dp * p, axis=-1, keepdims=True))
        ds = ds if dcap is None else ds * dcap
        dq = ds @ keys  # [B,K,G*T,T] @ [B,K,T,d] -> [B,K,G*T,d]
        dk = ds.swapaxes(-1, -2) @ rows  # [B,K,T,G*T] @ [B,K,G*T,d] -> [B,K,T,d]
        return dq.reshape(batch, heads, tokens, -1), dk, dv

    return _result((p @ values).reshape(batch, heads, tokens, -1), (q, k, v), backward)  # [B,K,G*T,T] @ [B,K,T,d] -> [B,K,G*T,d]


def activate(g: Array, activation: Activation) -> Any:
    """phi(g) for g [..., F]: see `activations`. Kept: g, and what phi multiplies it by."""
    phi, slope = _activation(_value(g), activation)
    return _result(phi(), (g,), lambda dz: (dz * slope(),))


def gate(g: Array, u: Array, activation: Activation = "silu") -> Any:
    """phi(g) u, or what the activation makes of u, for g and u [..., F]. Kept: g, u and what phi multiplies g by."""
    if activation == "clipped_swiglu":
        u = _clipped(u)
    b = _value(u)
    phi, slope = _activation(_value(g), activation)
    return _result(phi() * b, (g, u), lambda dz: (dz * b * slope(), dz * phi()))


def route(logits: Array, chosen: int, over_all: bool) -> tuple[np.ndarray, Any]:
    """The chosen experts of each token and their weights: logits [N, E] -> index [N, k], p [N, k]; over_all: the softmax is over all experts. Kept: it."""
    values = _value(logits)
    index = np.sort(np.argpartition(-values, chosen - 1, axis=-1)[:, :chosen], axis=-1)
    among = values if over_all else np.take_along_axis(values, index, -1)
    s = np.exp(among - among.max(axis=-1, keepdims=True))
    s /= s.sum(axis=-1, keepdims=True)

    def backward(dp: np.ndarray) -> tuple[np.ndarray]:
        d = np.zeros_like(values)
        if over_all:
            np.put_along_axis(d, index, dp, -1)
            return (s * (d - np.sum(d * s, axis=-1, keepdims=True)),)
        np.put_along_axis(d, index, s * (dp - np.sum(dp * s, axis=-1, keepdims=True)), -1)
        return (d,)

    return index, _result(np.take_along_axis(s, index, -1) if over_all else s, (logits,), backward)


def experts(
    x: Array, p: Array, index: np.ndarray, linears: dict[str, Any], lora: dict[str, Any], scale: float, dropout: dict[str, Any], activation: Activation = "silu"
) -> Any:
    """x [N, D] -> sum over j of p[:, j] times the gated MLP of expert index[:, j], [N, D]. Kept: x and p; an expert is computed again for its gradients.

    `linears` has "gate", "up" and "down" of all experts [E, out, in], `lora` their pairs A [E, R, in] and B [E, out, R], `dropout` their masks [N, in].
    """
    values, weights = _value(x), _value(p)
    pairs = {f"{name}.{half}": part for name, pair in lora.items() if pair for half, part in zip("ab", pair, strict=True)}

    def mlp(expert: int, rows: np.ndarray, given: dict[str, Any]) -> Any:
        def part_of(x: Any, name: str) -> Any:
            frozen = {part: value[expert] if np.ndim(value) else value for part, value in linears[name].items()}
            pair, masks = lora[name] and (given[f"{name}.a"].transpose(1, 0), given[f"{name}.b"].transpose(1, 0)), dropout[name]
            return linear(x, frozen, pair, scale, masks and (masks[0][rows], masks[1]))

        return part_of(gate(part_of(given["x"], "gate"), part_of(given["x"], "up"), activation), "down")

    def served() -> Iterator[tuple[int, np.ndarray, np.ndarray, dict[str, Any]]]:
        for expert in np.unique(index).tolist():
            rows, places = np.nonzero(index == expert)
            yield expert, rows, places, {"x": values[rows]} | {name: _value(part)[expert] for name, part in pairs.items()}

    y = np.zeros_like(values)
    for expert, rows, places, given in served():
        y[rows] += weights[rows, places][:, None] * mlp(expert, rows, given)

    def backward(dy: np.ndarray) -> list[np.ndarray]:
        dx, dp, dpairs = np.zeros_like(values), np.zeros_like(weights), {name: np.zeros_like(_value(part)) for name, part in pairs.items()}
        for expert, rows, places, given in served():
            output, gradients = vjp(functools.partial(mlp, expert, rows), given, weights[rows, places][:, None] * dy[rows])
            dx[rows] += gradients.pop("x")
            dp[rows, places] = np.sum(dy[rows] * output, axis=-1)
            for name, gradient in gradients.items():
                dpairs[name][expert] = gradient
        return [dx, dp, *dpairs.values()]

    return _result(y, (x, p, *pairs.values()), backward)


def cap(logits: Array, scale: float = 1.0, cap: float | None = None) -> Any:
    """scale logits, softly held between -cap and cap: cap tanh(scale logits / cap). Kept: the tanh."""
    if cap is None:
        return logits if scale == 1 else _result(scale * _value(logits), (logits,), lambda dy: (scale * dy,))
    t = np.tanh(scale / cap * _value(logits))
    return _result(cap * t, (logits,), lambda dy: (dy * scale * (1 - t * t),))


def cross_entropy(logits: Array, targets: np.ndarray, mask: np.ndarray) -> Any:
    """The loss of logits [B, T, V] for integer targets [B, T], summed where mask [B, T] is set: a scalar. Kept: the logits and their logsumexp."""
    values = _value(logits)
    index, weights = targets[..., None], mask[..., None].astype(values.dtype)
    top = values.max(axis=-1, keepdims=True)
    total = top + np.log(np.sum(np.exp(values - top), axis=-1, keepdims=True))

    def backward(dy: np.ndarray) -> tuple[np.ndarray]:
        d = np.exp(values - total)  # softmax, less one at the target
        np.put_along_axis(d, index, np.take_along_axis(d, index, -1) - 1, -1)
        d *= dy * weights
        return (d,)

    return _result(np.sum(weights * (total - np.take_along_axis(values, index, -1))), (logits,), backward)


def _activation(a: np.ndarray, activation: Activation) -> tuple[Callable[[], np.ndarray], Callable[[], np.ndarray]]:
    """What gives phi(a), and what gives phi'(a), from a and what both need of it."""
    match activation:
        case "silu" | "gelu_sigmoid":
            steep = 1.0 if activation == "silu" else 1.702
            s = 0.5 * (1 + np.tanh(0.5 * steep * a))  # the sigmoid, without overflow
            return lambda: a * s, lambda: s * (1 + steep * (1 - s) * a)
        case "gelu":
            bend, cubic = math.sqrt(2 / math.pi), 0.044715
            t = np.tanh(bend * (a + cubic * a**3))
            return lambda: 0.5 * a * (1 + t), lambda: 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * bend * (1 + 3 * cubic * a * a)
        case "gelu_exact":
            s, _ = normal(a)
            return lambda: a * s, lambda: s + a * np.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
        case "relu":
            return lambda: np.maximum(a, 0), lambda: (a > 0).astype(a.dtype)
        case "relu_squared":
            return lambda: np.maximum(a, 0) ** 2, lambda: 2 * np.maximum(a, 0)
        case "clipped_swiglu":
            phi, slope = _activation(np.minimum(a, LIMIT), "gelu_sigmoid")
            return phi, lambda: slope() * (a < LIMIT)


def _clipped(u: Array) -> Any:
    """clip(u, -LIMIT, LIMIT) + 1. Kept: u."""
    b = _value(u)
    return _result(np.clip(b, -LIMIT, LIMIT) + 1, (u,), lambda dy: (dy * (np.abs(b) < LIMIT),))


def _value(a: Any) -> Any:
    return a.value if isinstance(a, Traced) else a


def _rows(a: np.ndarray) -> np.ndarray:
    """[..., n] -> [N, n]."""
    return a.reshape(-1, a.shape[-1])


def _result(value: Any, inputs: Sequence[Any], backward: Backward) -> Any:
    """What an operation gives: traced if an input is, or else the plain value, and `backward` is forgotten."""
    return Traced(value, inputs, backward) if any(isinstance(part, Traced) for part in inputs) else value


def _sweep(output: Traced, dy: np.ndarray) -> dict[Traced, np.ndarray]:
    """The gradients of the primals that output came from. The tape is taken apart on the way: what a value kept is free once it is passed."""
    reached = {output: None}  # a dict, whose order is the same in every run, and so are the sums
    stack = [output]
    while stack:
        for parent in stack.pop().parents:
            if parent and parent not in reached:
                reached[parent] = None
                stack.append(parent)
    order = sorted(reached, key=lambda node: node.depth)  # an input comes before what is made of it
    reached.clear()
    gradients = {output: dy}
    while order:
        node = order.pop()
        if node.backward is None:
            continue
        for parent, part in zip(node.parents, node.backward(gradients.pop(node)), strict=True):
            if parent and part is not None:
                gradients[parent] = gradients[parent] + part if parent in gradients else part
        node.parents, node.backward = [], None  # `output` is still held by the caller
    return gradients
