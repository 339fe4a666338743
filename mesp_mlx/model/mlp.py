"""The MLP sublayer, with its hand-written backward: gated (gate and up in two linears or in one), or plain."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch, Gradients, Lora, State, collect
from mesp_mlx.model.sublayer import Sublayer


@dataclass(frozen=True, eq=False)
class MLPStage:
    """y = m + down(activation(gate(h)) * up(h)), with h = norm(m), and what the spec puts around and into that.

    In a parallel block h is made of the state's "residual", the block's input.
    """

    spec: ModelSpec
    layer: int
    lora: Lora

    @property
    def name(self) -> str:
        return f"{self.spec.layer_name(self.layer)}.mlp"

    @property
    def adaptable(self) -> tuple[str, ...]:
        """Gate and up, or the one that holds both or stands for both; then down."""
        return tuple(f"{self.spec.layer_name(self.layer)}.{key}" for key in self.spec.mlp_keys(self.layer))

    @property
    def modules(self) -> tuple[str, ...]:
        return self.spec.mlp_modules(self.layer)

    @cached_property
    def sublayer(self) -> Sublayer:
        return Sublayer.of(self.spec, self.lora.ops, self.layer, self.spec.names.mlp_norms)

    @cached_property
    def parts(self) -> dict[str, str]:
        """The module that each of the op's linears is, or is the half of."""
        if self.spec.fused_gate_up:
            return {"gate": self.adaptable[0], "up": self.adaptable[0], "down": self.adaptable[1]}
        return dict(zip(("gate", "up", "down") if self.spec.gated else ("up", "down"), self.adaptable, strict=True))

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The sublayer's output, and what gate and up gave, and y, if the plan keeps them."""
        kept: State = {}
        y = self._mlp(w, adapter, self.sublayer.enter(w, self._input(state)), batch, kept if self.lora.keeps("all") else None)
        if self.sublayer.after and self.lora.keeps("attention", "all"):
            kept["y"] = y
        return {"x": self.sublayer.leave(w, state["x"], y)}, kept

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapters. Recomputed: norm; gate and up unless kept; all of it for a norm after it, unless y was kept."""
        x, dy, kept = self._input(state), dstate["x"], dict(kept or {})
        h, y = self.sublayer.enter(w, x), kept.pop("y", None)
        if y is None and self.sublayer.after:
            y = self._mlp(w, adapter, h, batch, None)
        given = {**self._how, "need_dx": need_dx, "kept": kept or None}
        dy_mlp = self.sublayer.leave_backward(w, y, dy)
        arguments = self.pairs(adapter), self.lora.scale, dy_mlp, self._dropout(adapter, batch)
        dh, dpairs = self.op.backward(h, *self.linears(w).values(), *arguments, **given)
        gradients: Gradients = {}
        if self.spec.fused_gate_up:
            collect(gradients, self.parts["up"], self._joined(dpairs["gate"], dpairs["up"]))
            collect(gradients, self.parts["down"], dpairs["down"])
        else:
            for part, module in self.parts.items():
                collect(gradients, module, dpairs[part])
        if not need_dx:
            return {}, gradients
        dx = self.sublayer.enter_backward(w, x, dh)
        return ({"x": dy, "residual": dx} if self.spec.parallel else {"x": dy + dx}), gradients

    def _input(self, state: State) -> Any:
        return state["residual" if self.spec.parallel else "x"]

    @property
    def op(self) -> Any:
        return self.lora.ops.gated_mlp if self.spec.gated else self.lora.ops.mlp

    @property
    def _how(self) -> dict[str, Any]:
        return {"activation": self.spec.activation, "tile": self.lora.strategy.width_tile or None}

    def _mlp(self, w: Any, adapter: State, h: Any, batch: Batch, kept: State | None) -> Any:
        arguments = self.pairs(adapter), self.lora.scale, self._dropout(adapter, batch)
        return self.op.forward(h, *self.linears(w).values(), *arguments, **self._how, kept=kept)

    def linears(self, w: Any) -> dict[str, Any]:
        """By the op's names, in its order; gate and up of a fused one are its upper and its lower rows."""
        if not self.spec.fused_gate_up:
            return {part: w[module] for part, module in self.parts.items()}
        fused, rows, width = w[self.parts["up"]], self.lora.ops.quantized.rows, self.spec.intermediate_size
        return {"gate": rows(fused, 0, width), "up": rows(fused, width, 2 * width), "down": w[self.parts["down"]]}

    def pairs(self, adapter: State) -> dict[str, Any]:
        """(A, B) by the op's names. The halves of a fused linear have its A, and a half of its B."""
        pairs = {part: self.lora.pair(adapter, module) for part, module in self.parts.items()}
        if self.spec.fused_gate_up and (pair := pairs["up"]):
            width = self.spec.intermediate_size
            pairs |= {"gate": (pair[0], pair[1][:, :width]), "up": (pair[0], pair[1][:, width:])}
        return pairs

    def _dropout(self, adapter: State, batch: Batch) -> dict[str, Any] | None:
        """By the op's names; the halves of a fused linear have the same."""
        drops = {module: self.lora.dropout(self.lora.pair(adapter, module), batch, module) for module in self.adaptable}
        return {part: drops[module] for part, module in self.parts.items()} if any(drops.values()) else None

    def _joined(self, gate: tuple[Any, Any] | None, up: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
        """The gradients of a fused linear's pair, given its halves'."""
        if gate is None or up is None:
            return None
        return gate[0] + up[0], self.lora.ops.arrays.concatenate([gate[1], up[1]], 1)
