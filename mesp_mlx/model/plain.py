"""A decoder layer as one stage, and a head with whole logits, that leave differentiation to the backend's autodiff.

What the methods mebp (MeBP, arXiv 2510.03425: the same streamed loop, one checkpoint per layer) and backprop (the whole graph at once) are made of.
They share nothing with `stages` and `head` but names and shapes, so that they can be trusted to judge them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.model.stages import AttentionStage, Batch, Gradients, MLPStage, State, merge_heads, opened, split_heads
from mesp_mlx.stream.run_file import take
from mesp_mlx.stream.shelves import IN_MEMORY, Shelf


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """y = m + mlp(norm(m)), m = x + attention(norm(x)); backward is the backend's vjp of the whole layer.

    `attention` and `mlp` are the stages that a structured layer consists of; they name its modules and hold its settings.
    """

    attention: AttentionStage
    mlp: MLPStage

    @property
    def name(self) -> str:
        return f"model.layers.{self.attention.layer}"

    @property
    def adaptable(self) -> tuple[str, ...]:
        return self.attention.adaptable + self.mlp.adaptable

    @property
    def modules(self) -> tuple[str, ...]:
        return self.attention.modules + self.mlp.modules

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
        ops, spec = attention.lora.ops.plain, attention.spec

        def linear(module: str, x: Any) -> Any:
            pair = attention.lora.pair(adapter, module)
            return ops.linear(x, w[module], pair, attention.lora.scale, attention.lora.dropout(pair, batch, module))

        def normed(norm: str, x: Any) -> Any:
            return ops.rms_norm(x, w[norm]["weight"], spec.rms_norm_eps)

        h = normed(attention.norm, x)
        projected = [linear(module, h) for module in attention.adaptable[:3]]
        q, k, v = (split_heads(y, heads) for y, heads in zip(projected, (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), strict=True))
        if spec.qk_norm:
            q, k = normed(f"{attention.name}.q_norm", q), normed(f"{attention.name}.k_norm", k)
        q, k = ops.rope(q, attention.rope), ops.rope(k, attention.rope)
        m = x + linear(attention.adaptable[3], merge_heads(ops.attention(q, k, v, spec.head_dim**-0.5, spec.windows[attention.layer])))
        h = normed(mlp.norm, m)
        gate, up, down = mlp.adaptable
        return m + linear(down, ops.gate(linear(gate, h), linear(up, h)))


@dataclass(frozen=True)
class WholeHead:
    """Final norm, output table and cross-entropy at all positions, logits whole, differentiated by autodiff."""

    spec: ModelSpec
    ops: Any
    evaluate: Callable[[Any], Any]
    name: str = "head"

    @property
    def table(self) -> str:
        return "model.embed_tokens" if self.spec.tied else "lm_head"

    @property
    def modules(self) -> tuple[str, ...]:
        return ("model.norm", self.table)

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
        return self.ops.plain.linear(self.ops.plain.rms_norm(x, w["model.norm"]["weight"], self.spec.rms_norm_eps), w[self.table], None, 1.0)
