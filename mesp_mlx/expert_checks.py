"""What `op_checks` looks at in a layer of experts: the router, and the expert that serves most."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mesp_mlx.model.experts import PARTS, ExpertsStage
from mesp_mlx.model.stages import State

if TYPE_CHECKING:
    from mesp_mlx.op_checks import Bench, Check


class Frozen(dict[str, Any]):
    """A layer's weights, all in memory, as a stage is given them."""

    def each(self, modules: Sequence[str], places: Sequence[int]) -> Iterator[tuple[int, list[State]]]:
        """As `Weights.each`."""
        for place in places:
            yield place, [cut(self[module], place) for module in modules]


def cut(stack: State, place: int | slice) -> State:
    """One of the linears that a module stacks, or some."""
    return {name: value[place] if getattr(value, "ndim", 0) else value for name, value in stack.items()}


def experts(bench: "Bench", stage: ExpertsStage) -> "Check":
    """Against plain code: the router's logits, then one expert's rows, their weights and its pairs."""
    backend, how, h = bench.backend, stage.experts, bench.arrays["h2"]
    take, as_array = backend.arrays.take_rows, backend.arrays.asarray
    logits = backend.plain.linear(h, bench.frozen[stage.router], bench.pair(stage.router), bench.scale).reshape(-1, how.count)
    index, p = backend.experts.route(logits, how.chosen, how.over_all)
    chosen = np.array(backend.arrays.to_numpy(index))
    cotangent = backend.arrays.astype(bench.random(p), p.dtype)
    found: State = {"logits": backend.experts.route_backward(logits, index, cotangent, how.over_all)}

    def routed(part: Any, given: State) -> Any:
        return part.route(given["logits"], how.chosen, how.over_all)[1]

    expert = int(np.bincount(chosen.reshape(-1)).argmax())
    rows, places = np.nonzero(chosen == expert)
    x, own = take(h.reshape(-1, h.shape[-1]), as_array(rows)), take(p.reshape(-1), as_array(rows * how.chosen + places))
    stacks = {name: bench.frozen[module] for name, module in zip(PARTS, stage.tables, strict=True)}
    pairs = {name: bench.pair(module) for name, module in zip(PARTS, stage.tables, strict=True)}
    dy = bench.random(x)
    given = {name: (a[expert].T, b[expert].T) for name, (a, b) in pairs.items()}
    dx, dp, dpairs = backend.experts.backward(x, own, *(cut(stack, expert) for stack in stacks.values()), given, bench.scale, dy, activation=how.activation)
    found |= {"x": dx, "p": dp} | {f"{name} {half}": d.T for name, pair in dpairs.items() for half, d in zip("AB", pair, strict=True)}

    def alone(part: Any, given: State, frozen: State) -> Any:
        lora = {name: (given[f"{name} A"], given[f"{name} B"]) for name in PARTS}
        return part.experts(given["x"], given["p"], frozen["index"], frozen["stacks"], lora, bench.scale, dict.fromkeys(PARTS), how.activation)

    only = slice(expert, expert + 1)
    primals = {"x": x, "p": own[:, None]} | {f"{name} {half}": part[only] for name, pair in pairs.items() for half, part in zip("AB", pair, strict=True)}
    frozen = {"index": as_array(np.zeros((len(rows), 1), np.int32)), "stacks": {name: cut(stack, only) for name, stack in stacks.items()}}
    sides = zip(bench.autodiff(routed, {"logits": logits}, cotangent), bench.autodiff(alone, primals, dy, frozen), strict=True)
    naive, truth = (router | {name: d[:, 0] if name == "p" else d if name == "x" else d[0] for name, d in one.items()} for router, one in sides)
    return bench.judge("experts", found, naive, truth)
