"""The attention sublayer, with its hand-written backward."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch, Gradients, Lora, State
from mesp_mlx.model.sublayer import Norm, Sublayer


@dataclass(frozen=True, eq=False)
class AttentionStage:
    """m = x + out(attention(rope(q), rope(k), v)), with q, k, v projected from norm(x), and what the spec puts around and into that.

    In a parallel block the state it gives has "residual" too: x, for the MLP to read.
    """

    spec: ModelSpec
    layer: int
    lora: Lora
    rope: dict[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.spec.layer_name(self.layer)}.self_attn"

    @property
    def adaptable(self) -> tuple[str, ...]:
        """The projections to q, k and v, or one for all three; then the one that leads out."""
        return tuple(f"{self.spec.layer_name(self.layer)}.{key}" for key in self.spec.attention_keys(self.layer))

    @property
    def modules(self) -> tuple[str, ...]:
        return self.spec.attention_modules(self.layer)

    @cached_property
    def sublayer(self) -> Sublayer:
        return Sublayer.of(self.spec, self.lora.ops, self.layer, self.spec.names.attention_norms)

    @cached_property
    def qk_norms(self) -> tuple[Norm, ...]:
        """Of q and of k, where the family has them."""
        names = self.spec.names.qk_norms if self.spec.qk_norm else ()
        return tuple(Norm(self.spec, self.lora.ops, f"{self.spec.layer_name(self.layer)}.{name}") for name in names)

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The sublayer's output, and what backward is to be given back: what the plan keeps of the attention output, q, k, v and y; each h if it is kept."""
        x, kept, lora = state["x"], {}, self.lora
        raw = self._projections(w, adapter, self.sublayer.enter(w, x), batch, kept)
        attention = self._attend(w, *self._heads(w, *raw))
        if not lora.keeps("inputs"):
            kept["attention"] = attention
        if lora.keeps("replay", "attention", "all"):
            kept["q"], kept["k"], kept["v"] = raw
        y = lora.forward(w, adapter, self.adaptable[-1], attention, batch, kept)
        if self.sublayer.after and lora.keeps("attention", "all"):
            kept["y"] = y
        return {"x": self.sublayer.leave(w, x, y), **({"residual": x} if self.spec.parallel else {})}, kept

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapters. Recomputed: norm; q, k, v and the attention output unless kept; what leads out for a norm after it."""
        ops, lora, x, dy = self.lora.ops, self.lora, state["x"], dstate["x"]
        gradients: Gradients = {}
        kept = kept or {}
        h, out = self.sublayer.enter(w, x), self.adaptable[-1]
        raw = [kept["q"], kept["k"], kept["v"]] if "q" in kept else self._projections(w, adapter, h, batch, kept)
        q, k, v = self._heads(w, *raw)
        attention = kept["attention"] if "attention" in kept else self._attend(w, q, k, v)
        inner = need_dx or any(lora.pair(adapter, module) for module in self.adaptable[:-1])
        y = kept.get("y")
        if y is None and self.sublayer.after:
            y = lora.forward(w, adapter, out, attention, batch, kept)
        dy_out = self.sublayer.leave_backward(w, y, dy)
        dattention = lora.backward(w, adapter, out, attention, dy_out, batch, inner, gradients, kept)
        if not inner:
            return {}, gradients
        dheads = ops.attention.backward(q, k, v, self.spec.attention_scale, split_heads(dattention, self.spec.num_heads), **self._seen(w))
        del q, k, v, attention, dattention, y, dy_out
        dh = None
        for module, dprojection in zip(self.adaptable[:-1], self._heads_backward(w, raw, dheads), strict=True):
            part = lora.backward(w, adapter, module, h, dprojection, batch, need_dx, gradients, kept)
            dh = part if dh is None else dh + part
        if not need_dx:
            return {}, gradients
        dx = dy + self.sublayer.enter_backward(w, x, dh)
        return {"x": dx + dstate["residual"] if "residual" in dstate else dx}, gradients

    def _attend(self, w: Any, q: Any, k: Any, v: Any) -> Any:
        return merge_heads(self.lora.ops.attention.forward(q, k, v, self.spec.attention_scale, **self._seen(w)))

    def _seen(self, w: Any) -> dict[str, Any]:
        """What limits the scores, and the queries of a block."""
        return {"window": self.spec.windows[self.layer], "tile": self.lora.strategy.query_tile or None, **limits(self.spec, self.layer, w)}

    def _projections(self, w: Any, adapter: State, h: Any, batch: Batch, kept: State) -> list[Any]:
        """q, k and v [B,T,·]."""
        return cut_projections(self.spec, [self.lora.forward(w, adapter, module, h, batch, kept) for module in self.adaptable[:-1]])

    def _heads(self, w: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Projections [B,T,·] to heads [B,·,T,d]: split, normalised where the family does, turned by their positions."""
        spec, heads = self.spec, []
        own = self.lora.ops.arrays.own if spec.fused_qkv else lambda x: x  # a part of a fused output would keep all of it alive
        for i, (x, count) in enumerate(zip((q, k), (spec.num_heads, spec.num_kv_heads), strict=True)):
            if spec.qk_norm == "width":
                x = self.qk_norms[i].forward(w, x)
            x = split_heads(x, count)
            if spec.qk_norm == "head":
                x = self.qk_norms[i].forward(w, x)
            heads.append(own(x) if self.rope is None else self.lora.ops.rope.forward(x, self.rope))
        return heads[0], heads[1], own(split_heads(v, spec.num_kv_heads))

    def _heads_backward(self, w: Any, raw: list[Any], dheads: tuple[Any, Any, Any]) -> list[Any]:
        """The reverse of `_heads` and of the cut, given the projections and the gradients of the heads: those of the linears' outputs."""
        spec, gradients = self.spec, []
        for i, (x, d) in enumerate(zip(raw[:2], dheads[:2], strict=True)):
            d = d if self.rope is None else self.lora.ops.rope.backward(d, self.rope)
            if spec.qk_norm == "head":
                d = self.qk_norms[i].backward(w, split_heads(x, d.shape[1]), d)
            d = merge_heads(d)
            gradients.append(self.qk_norms[i].backward(w, x, d) if spec.qk_norm == "width" else d)
        return join_projections(spec, self.lora.ops.arrays, [*gradients, merge_heads(dheads[2])])


def limits(spec: ModelSpec, layer: int, w: Any) -> dict[str, Any]:
    """The cap and the sinks of a layer's scores, where it has them."""
    sinks = w[spec.sinks_module(layer)]["sinks"] if spec.sinks else None
    return {"cap": spec.attention_cap, "sinks": sinks}


def split_heads(x: Any, heads: int) -> Any:
    """[B,T,heads·d] to [B,heads,T,d]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Any) -> Any:
    """[B,heads,T,d] to [B,T,heads·d]."""
    batch, heads, tokens, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, tokens, heads * width)


def cut_projections(spec: ModelSpec, outputs: list[Any]) -> list[Any]:
    """q, k and v [B,T,·] of the linears' outputs: themselves, or the parts of a fused one's."""
    if spec.fused_qkv is None:
        return outputs
    (fused,) = outputs
    batch, tokens, width = fused.shape
    if spec.fused_qkv == "heads":
        heads = fused.reshape(batch, tokens, spec.num_heads, 3, spec.head_dim)
        return [heads[:, :, :, i].reshape(batch, tokens, width // 3) for i in range(3)]
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return [fused[:, :, :q], fused[:, :, q : q + kv], fused[:, :, q + kv :]]


def join_projections(spec: ModelSpec, arrays: Any, gradients: list[Any]) -> list[Any]:
    """The reverse of `cut_projections`: the gradients of the linears' outputs."""
    if spec.fused_qkv is None:
        return gradients
    if spec.fused_qkv == "blocks":
        return [arrays.concatenate(gradients, 2)]
    batch, tokens, width = gradients[0].shape
    heads = [d.reshape(batch, tokens, spec.num_heads, 1, spec.head_dim) for d in gradients]
    return [arrays.concatenate(heads, 3).reshape(batch, tokens, 3 * width)]
