"""The stages of a model, written once over a backend's ops: attention sublayer, MLP sublayer, and the two ends, embedding and head.

A stage is given its frozen weights `w` (see stream.store.Weights), the adapter (A and B by mlx-lm's names), the state that carries
gradient (`{"x": [B,T,D]}`) and the batch, which carries none. It never sees other stages, and evaluates nothing.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mesp_mlx.data.group import Group
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.stream.run_file import fetch
from mesp_mlx.stream.store import Reads

State = dict[str, Any]
Gradients = dict[str, Any]
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MODULES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Stage(Reads, Protocol):
    """What the loop needs of a stage beside its name and frozen modules: the modules that can be adapted, and both directions."""

    @property
    def adaptable(self) -> tuple[str, ...]: ...
    def forward(self, w: Any, adapter: State, state: State, batch: "Batch") -> tuple[State, State]: ...
    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: "Batch", need_dx: bool) -> tuple[State, Gradients]: ...


@dataclass(frozen=True)
class Dropout:
    """What names the dropout masks of one update."""

    seed: int
    update: int
    rate: float


@dataclass(frozen=True)
class Batch:
    """A group of rows of equal padded width, and the dropout of its update (None: none)."""

    group: Group
    dropout: Dropout | None = None


@dataclass(frozen=True)
class Lora:
    """The LoRA terms of a stage: the backend to compute with, mlx-lm's scale, the choices of the plan, and whether h = x̃ A is kept for backward."""

    ops: Any
    scale: float
    strategy: Strategy = Strategy()
    keep_h: bool = False

    def keeps(self, *levels: str) -> bool:
        """Whether the plan keeps what these of its levels keep."""
        return self.strategy.keep in levels

    def pair(self, adapter: State, module: str) -> tuple[Any, Any] | None:
        """(A, B) of a module, or None when it is not adapted."""
        a = adapter.get(f"{module}.lora_a")
        return None if a is None else (a, adapter[f"{module}.lora_b"])

    def dropout(self, pair: tuple[Any, Any] | None, batch: Batch, module: str) -> tuple[Any, float] | None:
        """(keep [B,T,in], rate) for an adapted module, drawn anew, and the same, whenever it is asked for."""
        drop = batch.dropout
        if pair is None or drop is None or drop.rate == 0:
            return None
        tokens, width = batch.group.ids.shape[1], pair[0].shape[0]
        rows = [self.ops.dropout.keep_mask(drop.seed, drop.update, int(row), module, tokens, width, drop.rate) for row in batch.group.rows]
        return self.ops.arrays.concatenate([keep.reshape(1, tokens, width) for keep in rows], 0), drop.rate

    def forward(self, w: Any, adapter: State, module: str, x: Any, batch: Batch, kept: State) -> Any:
        """y. What is kept of h is put into `kept`, and taken from there."""
        pair = self.pair(adapter, module)
        dropout = self.dropout(pair, batch, module)
        if self.keep_h and pair and module not in kept:
            kept[module] = self.ops.lora_linear.hidden(x, pair, dropout)
        return self.ops.lora_linear.forward(x, w[module], pair, self.scale, dropout, kept.get(module), self._tile)

    def backward(self, w: Any, adapter: State, module: str, x: Any, dy: Any, batch: Batch, need_dx: bool, gradients: Gradients, kept: State) -> Any:
        """dx, or None unless needed; the gradients of A and B go into `gradients`."""
        pair = self.pair(adapter, module)
        if pair is None and not need_dx:
            return None
        dropout = self.dropout(pair, batch, module)
        dx, dpair = self.ops.lora_linear.backward(x, w[module], pair, self.scale, dy, dropout, need_dx, kept.get(module), self._tile)
        collect(gradients, module, dpair)
        return dx

    @property
    def _tile(self) -> int | None:
        return self.strategy.weight_tile or None


def opened(adapter: State, stage: Any) -> State:
    """A stage's own tensors of an adapter, read from the run's file where the plan keeps them there."""
    names = (f"{module}.lora_{half}" for module in stage.adaptable for half in "ab")
    return {name: fetch(adapter[name]) for name in names if name in adapter}


def collect(gradients: Gradients, module: str, pair: tuple[Any, Any] | None) -> None:
    """Put a module's (dA, dB), if any, under mlx-lm's names."""
    if pair is not None:
        gradients[f"{module}.lora_a"], gradients[f"{module}.lora_b"] = pair


@dataclass(frozen=True, eq=False)
class AttentionStage:
    """m = x + o_proj(attention(rope(q), rope(k), v)), with q, k, v projected from norm(x); optional norms over each head's q and k."""

    spec: ModelSpec
    layer: int
    lora: Lora
    rope: dict[str, Any]

    @property
    def name(self) -> str:
        return f"model.layers.{self.layer}.self_attn"

    @property
    def norm(self) -> str:
        return f"model.layers.{self.layer}.input_layernorm"

    @property
    def adaptable(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{module}" for module in ATTENTION_MODULES)

    @property
    def modules(self) -> tuple[str, ...]:
        norms = (f"{self.name}.q_norm", f"{self.name}.k_norm") if self.spec.qk_norm else ()
        return (self.norm, *self.adaptable, *norms)

    @property
    def _scale(self) -> float:
        return self.spec.head_dim**-0.5

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The sublayer's output, and what backward is to be given back: what the plan keeps of the attention output and q, k, v; each h if it is kept."""
        x, kept = state["x"], {}
        raw = self._projections(w, adapter, self._normed(w, x), batch, kept)
        attention = self._attend(*self._heads(w, *raw))
        if not self.lora.keeps("inputs"):
            kept["attention"] = attention
        if self.lora.keeps("replay", "attention", "all"):
            kept["q"], kept["k"], kept["v"] = raw
        return {"x": x + self.lora.forward(w, adapter, self.adaptable[3], attention, batch, kept)}, kept

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapters. Recomputed: norm; q, k, v and the attention output unless kept; never o_proj."""
        ops, lora, x, dy = self.lora.ops, self.lora, state["x"], dstate["x"]
        gradients: Gradients = {}
        kept = kept or {}
        h = self._normed(w, x)
        raw = [kept["q"], kept["k"], kept["v"]] if "q" in kept else self._projections(w, adapter, h, batch, kept)
        q, k, v = self._heads(w, *raw)
        attention = kept["attention"] if "attention" in kept else self._attend(q, k, v)
        inner = need_dx or any(lora.pair(adapter, module) for module in self.adaptable[:3])
        dattention = lora.backward(w, adapter, self.adaptable[3], attention, dy, batch, inner, gradients, kept)
        if not inner:
            return {}, gradients
        window, tile = self.spec.windows[self.layer], lora.strategy.query_tile or None
        dheads = ops.attention.backward(q, k, v, self._scale, split_heads(dattention, self.spec.num_heads), window, tile)
        del q, k, v, attention, dattention
        dh = None
        for module, dprojection in zip(self.adaptable[:3], self._heads_backward(w, raw, dheads), strict=True):
            part = lora.backward(w, adapter, module, h, dprojection, batch, need_dx, gradients, kept)
            dh = part if dh is None else dh + part
        if not need_dx:
            return {}, gradients
        return {"x": dy + ops.rms_norm.backward(x, w[self.norm]["weight"], self.spec.rms_norm_eps, dh)}, gradients

    def _attend(self, q: Any, k: Any, v: Any) -> Any:
        window, tile = self.spec.windows[self.layer], self.lora.strategy.query_tile or None
        return merge_heads(self.lora.ops.attention.forward(q, k, v, self._scale, window, tile))

    def _normed(self, w: Any, x: Any) -> Any:
        return self.lora.ops.rms_norm.forward(x, w[self.norm]["weight"], self.spec.rms_norm_eps)

    def _projections(self, w: Any, adapter: State, h: Any, batch: Batch, kept: State) -> list[Any]:
        return [self.lora.forward(w, adapter, module, h, batch, kept) for module in self.adaptable[:3]]

    def _heads(self, w: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Projections [B,T,·] to heads [B,·,T,d]: split, normalised where the family does, turned by their positions."""
        ops, spec = self.lora.ops, self.spec
        q, k, v = split_heads(q, spec.num_heads), split_heads(k, spec.num_kv_heads), split_heads(v, spec.num_kv_heads)
        if spec.qk_norm:
            q = ops.rms_norm.forward(q, w[f"{self.name}.q_norm"]["weight"], spec.rms_norm_eps)
            k = ops.rms_norm.forward(k, w[f"{self.name}.k_norm"]["weight"], spec.rms_norm_eps)
        return ops.rope.forward(q, self.rope), ops.rope.forward(k, self.rope), v

    def _heads_backward(self, w: Any, raw: list[Any], dheads: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """The reverse of `_heads`, given the projections and the gradients of the heads."""
        ops, spec = self.lora.ops, self.spec
        dq, dk, dv = dheads
        dq, dk = ops.rope.backward(dq, self.rope), ops.rope.backward(dk, self.rope)
        if spec.qk_norm:
            dq = ops.rms_norm.backward(split_heads(raw[0], spec.num_heads), w[f"{self.name}.q_norm"]["weight"], spec.rms_norm_eps, dq)
            dk = ops.rms_norm.backward(split_heads(raw[1], spec.num_kv_heads), w[f"{self.name}.k_norm"]["weight"], spec.rms_norm_eps, dk)
        return merge_heads(dq), merge_heads(dk), merge_heads(dv)


def split_heads(x: Any, heads: int) -> Any:
    """[B,T,heads·d] to [B,heads,T,d]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Any) -> Any:
    """[B,heads,T,d] to [B,T,heads·d]."""
    batch, heads, tokens, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * width)


@dataclass(frozen=True, eq=False)
class MLPStage:
    """y = m + down(silu(gate(h)) * up(h)), with h = norm(m)."""

    spec: ModelSpec
    layer: int
    lora: Lora

    @property
    def name(self) -> str:
        return f"model.layers.{self.layer}.mlp"

    @property
    def norm(self) -> str:
        return f"model.layers.{self.layer}.post_attention_layernorm"

    @property
    def adaptable(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{module}" for module in MLP_MODULES.values())

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.norm, *self.adaptable)

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The sublayer's output, and what gate and up gave if the plan keeps it."""
        x, kept = state["x"], {}
        wanted = {"tile": self.lora.strategy.width_tile or None, "kept": kept if self.lora.keeps("all") else None}
        return {"x": x + self.lora.ops.gated_mlp.forward(self._normed(w, x), *self._linears(w), *self._lora(adapter, batch), **wanted)}, kept

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapters. Recomputed: norm; gate and up unless kept; never down."""
        ops, x, dy = self.lora.ops, state["x"], dstate["x"]
        pairs, scale, dropout = self._lora(adapter, batch)
        given = {"tile": self.lora.strategy.width_tile or None, "need_dx": need_dx, "kept": kept or None}
        dh, dpairs = ops.gated_mlp.backward(self._normed(w, x), *self._linears(w), pairs, scale, dy, dropout, **given)
        gradients: Gradients = {}
        for key, module in MLP_MODULES.items():
            collect(gradients, f"{self.name}.{module}", dpairs[key])
        if not need_dx:
            return {}, gradients
        return {"x": dy + ops.rms_norm.backward(x, w[self.norm]["weight"], self.spec.rms_norm_eps, dh)}, gradients

    def _normed(self, w: Any, x: Any) -> Any:
        return self.lora.ops.rms_norm.forward(x, w[self.norm]["weight"], self.spec.rms_norm_eps)

    def _linears(self, w: Any) -> list[Any]:
        return [w[module] for module in self.adaptable]

    def _lora(self, adapter: State, batch: Batch) -> tuple[dict[str, Any], float, dict[str, Any] | None]:
        pairs = {key: self.lora.pair(adapter, f"{self.name}.{module}") for key, module in MLP_MODULES.items()}
        dropout = {key: self.lora.dropout(pairs[key], batch, f"{self.name}.{module}") for key, module in MLP_MODULES.items()}
        return pairs, self.lora.scale, dropout if any(dropout.values()) else None


@dataclass(frozen=True)
class Embedding:
    """x = rows of the embedding table; only the rows that an update's tokens name are read."""

    ops: Any
    dtype: Any
    name: str = "model.embed_tokens"
    modules: tuple[str, ...] = ()

    def forward(self, w: Any, batch: Batch) -> State:
        """The state of a group: x [B,T,D]."""
        ids = batch.group.ids
        rows, place = np.unique(ids, return_inverse=True)
        table = self.ops.quantized.dequantize(w.take(self.name, rows), self.dtype)
        return {"x": self.ops.arrays.take_rows(table, self.ops.arrays.asarray(place.reshape(-1))).reshape(*ids.shape, -1)}
