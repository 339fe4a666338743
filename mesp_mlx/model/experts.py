"""The MLP sublayer of a mixture of experts. Like the head it streams within itself: an expert's weights are read when tokens need them, and no others are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from mesp_mlx.model.spec import Experts, ModelSpec
from mesp_mlx.model.stages import Batch, Gradients, Lora, State
from mesp_mlx.model.sublayer import Sublayer

PARTS = ("gate", "up", "down")


class Routed(NamedTuple):
    """Where the tokens of a group go: h [B, T, D], the router's logits [N, E], the experts chosen [N, k], here and as NumPy sees them, and their weights."""

    h: Any
    logits: Any
    index: Any
    chosen: np.ndarray
    p: Any


class Served(NamedTuple):
    """One expert with the rows of h that it serves: which they are, of N, and which of N k weights is theirs; its linears, pairs and masks."""

    expert: int
    rows: Any
    slots: Any
    linears: list[Any]
    pairs: dict[str, Any]
    masks: dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class ExpertsStage:
    """y = m + sum of p_e MLP_e(h) over the experts e that a token chooses, with h = norm(m), and p_e and the choice from router(h).

    Evaluates expert by expert, as `evaluate` says. An expert's pair is its rows of A [E, R, in] and B [E, out, R]; rows of one that serves nobody get
    gradients of zero. Dropout leaves out the same of a token for every expert that it chooses.
    """

    spec: ModelSpec
    layer: int
    lora: Lora
    evaluate: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return f"{self.spec.layer_name(self.layer)}.mlp"

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The router; then what stacks the experts' gate, up and down."""
        return tuple(f"{self.spec.layer_name(self.layer)}.{key}" for key in self.spec.mlp_keys(self.layer))

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(module for module in self.spec.mlp_modules(self.layer) if module not in self.tables)

    @cached_property
    def sublayer(self) -> Sublayer:
        return Sublayer.of(self.spec, self.lora.ops, self.layer, self.spec.names.mlp_norms)

    @property
    def router(self) -> str:
        return self.adaptable[0]

    @property
    def tables(self) -> tuple[str, ...]:
        return self.adaptable[1:]

    @property
    def experts(self) -> Experts:
        experts = self.spec.experts[self.layer]
        assert experts is not None
        return experts

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The sublayer's output; and, if the plan keeps all, the router's logits and what gate and up of each expert gave."""
        arrays, x, kept, everything = self.lora.ops.arrays, state["x"], State(), self.lora.keeps("all")
        routed = self._route(w, adapter, x, batch, None)
        if everything:
            kept["logits"] = routed.logits
        y = arrays.zeros((x.shape[0] * x.shape[1], x.shape[2]), routed.p.dtype)
        for served in self._served(w, adapter, routed, batch):
            own: State | None = {} if everything else None
            part = self.lora.ops.experts.forward(*self._given(routed, served), served.masks, kept=own, **self._how)
            y = arrays.add_rows(y, part, served.rows)
            kept |= {f"{name}.{served.expert}": array for name, array in (own or {}).items()}
            del served, part  # the weights of an expert must be gone before those after the next are read
            self.evaluate((y, own))
        return {"x": self.sublayer.leave(w, x, arrays.astype(y, x.dtype).reshape(x.shape))}, kept

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapters. Recomputed: norm; the router, and gate and up of each expert, unless kept; never down."""
        ops, arrays, x, dy = self.lora.ops, self.lora.ops.arrays, state["x"], dstate["x"]
        kept = kept or {}
        routed = self._route(w, adapter, x, batch, kept.get("logits"))
        flat = self.sublayer.leave_backward(w, None, dy).reshape(-1, dy.shape[-1])
        gradients: Gradients = {}
        for module in self.tables:
            for half in "ab":
                if (tensor := adapter.get(f"{module}.lora_{half}")) is not None:
                    gradients[f"{module}.lora_{half}"] = arrays.zeros(tensor.shape, tensor.dtype)
        dp, dh = arrays.zeros((routed.chosen.size,), routed.p.dtype), arrays.zeros(flat.shape, routed.p.dtype) if need_dx else None
        for served in self._served(w, adapter, routed, batch):
            own = {name: kept[f"{name}.{served.expert}"] for name in ("gate", "up")} if kept else None
            given, dy_rows = self._given(routed, served), arrays.take_rows(flat, served.rows)
            dx, dp_rows, dpairs = ops.experts.backward(*given, dy_rows, served.masks, need_dx=need_dx, kept=own, **self._how)
            dp = arrays.add_rows(dp, dp_rows, served.slots)
            dh = None if dh is None else arrays.add_rows(dh, dx, served.rows)
            for name, module in zip(PARTS, self.tables, strict=True):
                for half, part in zip("ab", dpairs[name] or (), strict=False):
                    arrays.set_row(gradients[f"{module}.lora_{half}"], served.expert, part.T)
            del served, given, dy_rows, dx, dp_rows, dpairs, own
            self.evaluate((dp, dh, gradients))
        dlogits = ops.experts.route_backward(routed.logits, routed.index, dp.reshape(routed.chosen.shape), self.experts.over_all)
        part = self.lora.backward(w, adapter, self.router, routed.h, dlogits.reshape(*x.shape[:2], -1), batch, need_dx, gradients, {})
        if dh is None:
            return {}, gradients
        dh = arrays.astype(dh, x.dtype).reshape(x.shape) + part
        return {"x": dy + self.sublayer.enter_backward(w, x, dh)}, gradients

    @property
    def _how(self) -> dict[str, Any]:
        return {"activation": self.experts.activation, "tile": self.lora.strategy.width_tile or None}

    def _route(self, w: Any, adapter: State, x: Any, batch: Batch, logits: Any) -> Routed:
        """Computed now: which experts are needed must be known. `logits` where they were kept."""
        ops, h = self.lora.ops, self.sublayer.enter(w, x)
        if logits is None:
            logits = self.lora.forward(w, adapter, self.router, h, batch, {}).reshape(-1, self.experts.count)
        index, p = ops.experts.route(logits, self.experts.chosen, self.experts.over_all)
        h, logits, index, p = self.evaluate((h, logits, index, p))
        return Routed(h, logits, index, np.asarray(ops.arrays.to_numpy(index)), p)

    def pairs(self, adapter: State, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of gate, up and down: (A [E, R, in], B [E, out, R]), and (which inputs are kept [N, in], rate); None where there is none."""
        pairs, masks, lora = {}, {}, self.lora
        for name, module in zip(PARTS, self.tables, strict=True):
            pairs[name] = pair = lora.pair(adapter, module)
            drop = lora.dropout(pair, batch, module)
            masks[name] = drop and (drop[0].reshape(-1, drop[0].shape[-1]), drop[1])
        return pairs, masks

    def _served(self, w: Any, adapter: State, routed: Routed, batch: Batch) -> Iterator[Served]:
        """The experts that are needed, one after the other."""
        arrays, (pairs, masks) = self.lora.ops.arrays, self.pairs(adapter, batch)
        for expert, linears in w.each(self.tables, np.unique(routed.chosen).tolist()):
            rows, places = np.nonzero(routed.chosen == expert)
            at = arrays.asarray(rows)
            yield Served(
                expert,
                at,
                arrays.asarray(rows * routed.chosen.shape[1] + places),
                linears,
                {name: pair and (pair[0][expert].T, pair[1][expert].T) for name, pair in pairs.items()},
                {name: drop and (arrays.take_rows(drop[0], at), drop[1]) for name, drop in masks.items()} if any(masks.values()) else None,
            )
            del linears

    def _given(self, routed: Routed, served: Served) -> tuple[Any, ...]:
        """What forward and backward of an expert take first: its rows of h, their weights, linears, pairs and the scale."""
        take, h = self.lora.ops.arrays.take_rows, routed.h
        rows = take(h.reshape(-1, h.shape[-1]), served.rows)
        return rows, take(routed.p.reshape(-1), served.slots), *served.linears, served.pairs, self.lora.scale
