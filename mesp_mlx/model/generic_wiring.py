"""Which outputs of earlier calls, and which parameters beside the layers, each call of a walk needs: read off the model's own graph.

All of it is lazy. The model is walked once with weights that are never computed, to see its calls; then once more under `mx.export_function`, every call
answered with an input of that trace, so that the primitives between the calls, which it lists, say what depends on what.

What layers hand on through an object that they hold themselves, instead of an argument or what they return, is not seen: no architecture of mlx-lm's does that.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mesp_mlx.errors import UserError
from mesp_mlx.model.generic_tree import arguments, arrays_in, flatten, put, rebuild
from mesp_mlx.model.generic_walk import LINEARS, TABLES, Slots, Station, Walk, placed

PROBE_TOKENS = 6
Leaf = tuple[int, int]  # a call, and which of its output's arrays


@dataclass
class Call:
    """One call of a walk. `pattern` is its output's tree (see generic_tree.flatten), `needs` the arrays and `parameters` the weights that its arguments
    are made of; `owner` the path of the module that is called."""

    owner: str
    layer: bool
    pattern: Any
    leaves: int
    needs: set[Leaf] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)


@dataclass
class Wiring:
    """The calls of a model, the end (what its head's input, or without a tiled head its logits, are made of), and that head: path, scale and cap."""

    calls: list[Call]
    end: Call
    head: tuple[str, float, float | None] | None


def discover(walk: Walk, slots: Slots, lazy: dict[str, mx.array], adapted: set[str], tiled: bool = True) -> Wiring:
    """Walk a model whose parameters are `lazy` zeros.

    Args:
        slots: where they stand.
        adapted: modules whose adapters keep them from being a tiled head.
        tiled: whether a head may be.

    Raises:
        UserError: the model can't be walked: why.
    """
    ids = mx.arange(1, 1 + PROBE_TOKENS)[None]
    calls: list[Call] = []

    def watch(_: int, station: Station) -> Any:
        leaves, pattern = flatten(station.compute())
        calls.append(Call(station.recorder.path, station.recorder.layer, pattern, len(leaves)))
        return answer(pattern, station, lambda place: leaves[place.index])

    for walk.nested in (False, True):  # whole layers, or, where the model calls none, their parts
        calls.clear()
        with placed(slots, lazy):
            walk.watching = True
            try:
                logits = walk.run(ids, watch)
            except Exception as error:
                raise refusal("its forward fails", error) from error
            finally:
                walk.watching = False
        if any(call.layer for call in calls):
            break
    else:
        raise refusal("its forward calls neither its layers nor parts of them")
    if not isinstance(logits, mx.array) or logits.ndim != 3:
        raise refusal(f"its forward gives {type(logits).__name__}, not logits of [rows, tokens, words]")
    walk.head = _head(walk, logits.shape, adapted) if tiled else None
    for head in (walk.head, None):
        walk.head = head
        found = _trace(walk, ids, calls, slots, lazy, logits)
        if found and (wiring := _wired(walk, found, calls, ids, slots, lazy, logits)):
            return wiring
    raise refusal("what its logits depend on can't be told")


def refusal(reason: str, error: Exception | None = None) -> UserError:
    """Why a model is not served."""
    said = f": {type(error).__name__}: {error}".rstrip(".") if error else ""
    return UserError(f"walking this model layer by layer: {reason}{said}. It can't be trained here.")


def answer(pattern: Any, station: Station, leaf: Any) -> Any:
    """Let a call return its stored output, and repeat what it changed in its arguments."""
    given = arguments(station.args, station.kwargs)
    output, changes = rebuild(pattern, leaf, given)
    for key, changed in changes.items():
        put(given[key], changed)
    return output


def _head(walk: Walk, shape: tuple[int, ...], adapted: set[str]) -> Any:
    """The last call that is a plain linear with as many outputs as there are logits."""
    for recorder, method, given, output in reversed(walk.late):
        linear = type(recorder.real) in LINEARS and method == "__call__"
        table = type(recorder.real) in TABLES and method == "as_linear"
        if (linear or table) and output == shape and given is not None and given[:2] == shape[:2] and recorder.path not in adapted:
            return recorder, method
    return None


def _trace(walk: Walk, ids: mx.array, calls: list[Call], slots: Slots, lazy: dict[str, mx.array], logits: mx.array) -> tuple[list[Leaf], list[Any]] | None:
    """What each call, and at last the end, depends on: a set of numbers of inputs for each array in its arguments, and all leaves, which come first."""
    places: list[tuple[Leaf, Any]] = []
    for index, call in enumerate(calls):
        rebuild(call.pattern, lambda place, index=index: places.append(((index, place.index), place)) or mx.zeros(()))
    given = [mx.zeros(place.shape, place.dtype) for _, place in places] + ([mx.zeros(logits.shape, logits.dtype)] if walk.head else []) + list(lazy.values())
    number = {leaf: i for i, (leaf, _) in enumerate(places)}
    owners: list[list[int]] = []  # for each call, and the end: which outputs of the trace are its arguments
    events: list[Any] = []

    def all_arguments(*inputs: mx.array) -> list[mx.array]:
        outputs: list[mx.array] = []
        owners.clear()

        def visit(index: int, station: Station) -> Any:
            arrays = [array[...] for array in arrays_in([*station.args, station.kwargs])]  # aliases: they may be changed in place
            owners.append(list(range(len(outputs), len(outputs) + len(arrays))))
            outputs.extend(arrays)
            if index == len(calls):
                return inputs[len(places)]
            return answer(calls[index].pattern, station, lambda place: inputs[number[index, place.index]][...])

        with placed(slots, dict(zip(lazy, inputs[len(inputs) - len(lazy) :], strict=True))):
            final = walk.run(ids, visit)
        owners.append([len(outputs)])
        return [*outputs, final]

    try:
        mx.export_function(events.append, all_arguments, *given)
    except Exception as error:
        raise refusal("what it does between its layers can't be traced", error) from error
    if len(owners) != len(calls) + 1 + (walk.head is not None):
        return None
    kinds = {event["type"]: event for event in events}
    reach: dict[str, int] = {name: 1 << i for i, (name, *_) in enumerate(kinds["inputs"]["inputs"])}
    for event in events:
        if event["type"] == "primitive":
            bits = 0
            for name, *_ in event["inputs"]:
                bits |= reach.get(name, 0)
            for name, *_ in event["outputs"]:
                reach[name] = bits
    outputs = [reach.get(name, 0) for name, *_ in kinds["outputs"]["outputs"]]
    found = []
    for owned in owners:
        bits = 0
        for place in owned:
            bits |= outputs[place]
        found.append({i for i in range(bits.bit_length()) if bits >> i & 1})
    return [leaf for leaf, _ in places], found


def _wired(walk: Walk, traced: Any, calls: list[Call], ids: mx.array, slots: Slots, lazy: dict[str, mx.array], logits: mx.array) -> Wiring | None:
    """The wiring that a trace shows; None where the model does more after its head than a tiled one can."""
    leaves, found = traced
    first = len(leaves) + (walk.head is not None)
    names = list(lazy)

    def fill(call: Call, numbers: set[int]) -> Call:
        call.needs = {leaves[i] for i in numbers if i < len(leaves)}
        call.parameters = {names[i - first] for i in numbers if i >= first}
        return call

    for call, numbers in zip(calls, found, strict=False):
        fill(call, numbers)
    end = fill(Call("", False, None, 0), found[len(calls)])
    if walk.head is None:
        return Wiring(calls, end, None)
    if found[-1] != {len(leaves)}:
        return None
    measured = _after_head(walk, calls, ids, slots, lazy, logits.shape)
    return measured and Wiring(calls, end, (walk.head[0].path, *measured))


def _after_head(
    walk: Walk, calls: list[Call], ids: mx.array, slots: Slots, lazy: dict[str, mx.array], shape: tuple[int, ...]
) -> tuple[float, float | None] | None:
    """(scale, cap) if the model makes cap * tanh(scale * l / cap), or scale * l, of its head's output l; None if it makes anything else of it."""

    def ends(given: np.ndarray) -> np.ndarray:
        def visit(index: int, station: Station) -> Any:
            if index == len(calls):
                return mx.array(given)
            return answer(calls[index].pattern, station, lambda place: mx.zeros(place.shape, place.dtype))

        with placed(slots, lazy):
            return np.array(walk.run(ids, visit).astype(mx.float32), np.float64)

    def constant(value: float) -> np.ndarray:
        return np.full(shape, value, np.float32)

    scale = float(ends(constant(1e-3)).flat[0]) / float(np.float32(1e-3))
    largest = float(ends(constant(1e6)).flat[0])
    cap = None if abs(largest - scale * 1e6) <= 1e-4 * abs(scale * 1e6) else largest
    if not (np.isfinite(scale) and np.isfinite(largest) and scale != 0 and (cap is None or cap > 0)):
        return None
    scale, cap = _rounded(scale), cap and _rounded(cap)
    given = np.random.default_rng(0).normal(0, 10, shape).astype(np.float32)
    expected = scale * given.astype(np.float64) if cap is None else cap * np.tanh(scale * given.astype(np.float64) / cap)
    return (scale, cap) if np.abs(ends(given) - expected).max() <= 1e-6 * np.abs(expected).max() else None


def _rounded(value: float) -> float:
    """The number of five digits that a measured one stands for, if it is one of them to float32's precision."""
    short = float(f"{value:.5g}")
    return short if abs(short - value) <= 2e-7 * abs(value) else value
