"""Recurrences over time in pieces: backward remembers the state between two pieces, and makes what lies within one again when it gets there.

mlx-lm runs the gated delta rule token by token while it trains, and autodiff keeps about two states [H, D, D] for each token: at T = 256 that is 550 of
them, in pieces of 16 tokens it is 60. Mamba-2's state space keeps matrices of [H, 256, 256], and beyond 256 tokens a state for each token besides.
MLX orders what it computes by breadth. So pieces wait for one another, forward and backward: else all would be made before the first was used up, and
mx.checkpoint changes nothing.

A layer's code looks its recurrence up by name. Here it runs as it is with another function under that name, in a class of our own for each of its modules.
"""

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn


class Recurrence(NamedTuple):
    """A function that gives (y, state after): which arguments have time as this axis, y too, what it calls its state, and how many tokens make a piece."""

    timed: frozenset[str]
    tokens: int
    axis: int = 1
    state: str = "state"


RECURRENCES = {
    "gated_delta.gated_delta_update": Recurrence(frozenset("qkvab"), 16),  # Qwen3-Next, Qwen3.5, Kimi, OLMo hybrid, Ling
    "ssm.ssm_update": Recurrence(frozenset({"hidden_states", "B", "C", "dt"}), 32),  # Mamba-2, Falcon-H1, Nemotron-H, Granite 4, PLaMo 2
    "rwkv7.Rwkv7TimeMixing._wkv7": Recurrence(frozenset("rwkvab"), 16),
    "bailing_moe_linear.recurrent_gla": Recurrence(frozenset("qkv"), 16, axis=2, state="h"),
}


def take_in_pieces(modules: Iterable[nn.Module]) -> None:
    """Let those modules of a model, which is this run's own, that have such a recurrence run it in pieces."""
    made: dict[type, type] = {}
    for module in modules:
        kind = type(module)
        if kind not in made:
            methods = inspect.getmembers(kind, inspect.isfunction)
            changed = {name: with_pieces for name, method in methods if (with_pieces := _with_pieces(method)) is not method}
            made[kind] = type(kind.__name__, (kind,), changed) if changed else kind
        if made[kind] is not kind:
            module.__class__ = made[kind]


def _recurrence(function: Any) -> Recurrence | None:
    return RECURRENCES.get(f"{function.__module__}.{function.__qualname__}".removeprefix("mlx_lm.models.")) if inspect.isfunction(function) else None


def _with_pieces(method: FunctionType) -> Any:
    """A method that is such a recurrence, or that calls some by name, with pieces; any other itself."""
    if own := _recurrence(method):
        return in_pieces(method, own)
    called = {name: method.__globals__.get(name) for name in method.__code__.co_names}
    pieces = {name: in_pieces(function, found) for name, function in called.items() if function and (found := _recurrence(function))}
    if not pieces:
        return method
    made = FunctionType(method.__code__, {**method.__globals__, **pieces}, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return made


def in_pieces(function: Callable[..., Any], recurrence: Recurrence) -> Callable[..., Any]:
    """The function, piece by piece; as it is where one is enough, or where rows are masked, as only in generation they are."""
    signature, (timed, tokens, axis, state) = inspect.signature(function), recurrence

    def pieces(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        along = {name: value for name, value in given.items() if name in timed}
        length = next(iter(along.values())).shape[axis]
        if length <= tokens or given.get("mask") is not None or given.get("lengths") is not None:
            return function(**given)
        ys = []
        for part in zip(*(mx.split(value, range(tokens, length, tokens), axis=axis) for value in along.values()), strict=True):
            y, given[state] = _made_again(function, given | dict(zip(along, part, strict=True)))
            ys.append(y)
        return mx.concatenate(ys, axis=axis), given[state]

    return pieces


def _made_again(function: Callable[..., Any], given: dict[str, Any]) -> list[mx.array]:
    """What a function gives, of which only the arrays that it was given are kept for backward."""
    names = [name for name, value in given.items() if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)]
    rest = {name: value for name, value in given.items() if name not in names}

    def call(*arrays: mx.array) -> list[mx.array]:
        return list(function(**rest, **dict(zip(names, arrays, strict=True))))

    again: Any = mx.custom_function(call)

    @again.vjp
    def _(primals: Any, cotangents: Any, _outputs: Any) -> Any:
        gradients = mx.vjp(call, mx.depends(list(primals), list(cotangents)), list(cotangents))[1]
        return tuple(mx.depends(gradients, gradients))

    outputs = again(*(given[name] for name in names))
    return mx.depends(outputs, outputs)
