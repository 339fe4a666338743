"""A decoder layer as one stage, and a head with whole logits, that leave differentiation to the backend's autodiff.

What the methods mebp (MeBP, arXiv 2510.03425: the same streamed loop, one checkpoint per layer) and backprop (the whole graph at once) are made of.
They share nothing with `stages` and `head` but names and shapes, so that they can be trusted to judge them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesp_mlx.model.attention import AttentionStage, cut_projections, limits, merge_heads, split_heads
from mesp_mlx.model.experts import ExpertsStage
from mesp_mlx.model.mlp import MLPStage
from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import Batch, Gradients, State, opened
from mesp_mlx.model.sublayer import Norm
from mesp_mlx.stream.run_file import take
from mesp_mlx.stream.shelves import IN_MEMORY, Shelf


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """y = m + mlp(norm(m)), m = x + attention(norm(x)), as its spec has it; backward is the backend's vjp of the whole layer.

    `attention` and `mlp` are the stages that a structured layer consists of; they name its modules and hold its settings.
    """

    attention: AttentionStage
    mlp: MLPStage | ExpertsStage

    @property
    def name(self) -> str:
        return self.attention.spec.layer_name(self.attention.layer)

    @property
    def adaptable(self) -> tuple[str, ...]:
        return self.attention.adaptable + self.mlp.adaptable

    @property
    def modules(self) -> tuple[str, ...]:
        spec, layer = self.attention.spec, self.attention.layer
        return tuple(dict.fromkeys(spec.attention_modules(layer) + spec.mlp_modules(layer)))  # of experts all, whoever is served

    def forward(self, w: Any, adapter: State, state: State, batch: Batch) -> tuple[State, State]:
        """The layer's output; nothing is kept."""
        return {"x": self.layer(w, adapter, state["x"], batch)}, {}

    def backward(self, w: Any, adapter: State, state: State, kept: State | None, dstate: State, batch: Batch, need_dx: bool) -> tuple[State, Gradients]:
        """Gradients of the state and of the adapters, by autodiff: the layer is run forward, all it makes is kept, and then it is walked back."""
        x = state["x"]
        primals = opened(adapter, self) | ({"x": x} if need_dx else {})
        _, gradients = self.attention.lora.ops.plain.vjp(lambda given: self.layer(w, given, given.get("x", x), batch), primals, dstate["x"])
        return ({"x": gradients.pop("x")} if need_dx else {}), gradients

    def layer(self, w: Any, adapter: State, x: Any, batch: Batch) -> Any:
        """x [B, T, D] -> y [B, T, D] in plain operations."""
        attention, mlp = self.attention, self.mlp
        ops, spec, layer = attention.lora.ops.plain, attention.spec, attention.layer

        def linear(module: str, x: Any) -> Any:
            pair = attention.lora.pair(adapter, module)
            return ops.linear(x, w[module], pair, attention.lora.scale, attention.lora.dropout(pair, batch, module))

        def attend(h: Any) -> Any:
            q, k, v = cut_projections(spec, [linear(module, h) for module in attention.adaptable[:-1]])
            for_q, for_k = attention.qk_norms or (None, None)
            q, k, v = head(q, spec.num_heads, for_q), head(k, spec.num_kv_heads, for_k), split_heads(v, spec.num_kv_heads)
            if attention.rope is not None:
                q, k = ops.rope(q, attention.rope), ops.rope(k, attention.rope)
            scores = {"window": spec.windows[layer], **limits(spec, layer, w)}
            return linear(attention.adaptable[-1], merge_heads(ops.attention(q, k, v, spec.attention_scale, **scores)))

        def head(x: Any, count: int, norm: Norm | None) -> Any:
            if norm is None:
                return split_heads(x, count)
            return norm.plain(ops, w, split_heads(x, count)) if spec.qk_norm == "head" else split_heads(norm.plain(ops, w, x), count)

        def feed(h: Any) -> Any:
            if isinstance(mlp, ExpertsStage):
                experts, (pairs, masks) = mlp.experts, mlp.pairs(adapter, batch)
                index, p = ops.route(linear(mlp.router, h).reshape(-1, experts.count), experts.chosen, experts.over_all)
                linears = {name: w[module] for name, module in zip(pairs, mlp.tables, strict=True)}
                y = ops.experts(h.reshape(-1, spec.hidden_size), p, index, linears, pairs, mlp.lora.scale, masks, experts.activation)
                return y.reshape(h.shape)
            *inner, down = mlp.adaptable
            g, *u = (linear(module, h) for module in inner)
            if not spec.gated:
                return linear(down, ops.activate(g, spec.activation))
            if spec.fused_gate_up:
                g, u = g[..., : spec.intermediate_size], [g[..., spec.intermediate_size :]]
            return linear(down, ops.gate(g, u[0], spec.activation))

        m = attention.sublayer.plain(ops, w, x, attend)
        return mlp.sublayer.plain(ops, w, x, feed, past=m) if spec.parallel else mlp.sublayer.plain(ops, w, m, feed)


@dataclass(frozen=True)
class WholeHead:
    """Final norm, output table and cross-entropy at all positions, logits whole, differentiated by autodiff."""

    spec: ModelSpec
    ops: Any
    evaluate: Callable[[Any], Any]
    name: str = "head"

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.spec.names.norm, self.spec.table)

    def loss(
        self, w: Any, states: list[Any], batches: Sequence[Batch], shelf: Shelf = IN_MEMORY.states, gradient: bool = True
    ) -> tuple[list[float], list[Any]]:
        """As `Head.loss`."""
        losses, dstates = [], []
        for i, batch in enumerate(batches):
            state = take(states, i)
            if gradient:
                loss, dstate = self.evaluate(self.ops.plain.vjp(lambda given, batch=batch: self.loss_of(w, given["x"], batch), state))
                dstates.append(shelf.put(dstate))
            else:
                loss = self.evaluate(self.loss_of(w, state["x"], batch))
            losses.append(float(loss))
        return losses, dstates

    def loss_of(self, w: Any, x: Any, batch: Batch) -> Any:
        """The loss of x [B, T, D], summed over the supervised positions of a group."""
        arrays, group = self.ops.arrays, batch.group
        return self.ops.plain.cross_entropy(self._logits(w, x), arrays.asarray(group.targets), arrays.asarray(group.mask))

    def likeliest(self, w: Any, state: State) -> int:
        """The token with the largest logit after the last position of a single row."""
        return int(self.ops.arrays.to_numpy(self._logits(w, state["x"][:, -1:])).argmax())

    def _logits(self, w: Any, x: Any) -> Any:
        spec, plain = self.spec, self.ops.plain
        h = Norm(spec, self.ops, spec.names.norm).plain(plain, w, x)
        return plain.cap(plain.linear(h, w[spec.table], None, 1.0), spec.logit_scale, spec.logit_cap)
