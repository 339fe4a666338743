"""Norms, and what stands around a sublayer: the norm before it, the norm after it, and the sum with what goes past it."""

from dataclasses import dataclass
from typing import Any

from mesp_mlx.model.spec import ModelSpec


@dataclass(frozen=True)
class Norm:
    """A norm of the family's kind: RMSNorm or LayerNorm, with a weight (Gemma's stands for 1 + w) and a bias if the model has one."""

    spec: ModelSpec
    ops: Any
    module: str

    def forward(self, w: Any, x: Any) -> Any:
        """x [..., D], normalised."""
        weight, eps = self.weight(w, x), self.spec.norm_eps
        return self.ops.rms_norm.forward(x, weight, eps) if self.spec.norm == "rms" else self.ops.layer_norm.forward(x, weight, self._bias(w), eps)

    def backward(self, w: Any, x: Any, dy: Any) -> Any:
        """dx [..., D], given x and dy."""
        return (self.ops.rms_norm if self.spec.norm == "rms" else self.ops.layer_norm).backward(x, self.weight(w, x), self.spec.norm_eps, dy)

    def plain(self, ops: Any, w: Any, x: Any) -> Any:
        """The same as `forward` by a backend's plain operations."""
        weight, eps = self.weight(w, x), self.spec.norm_eps
        return ops.rms_norm(x, weight, eps) if self.spec.norm == "rms" else ops.layer_norm(x, weight, self._bias(w), eps)

    def weight(self, w: Any, x: Any) -> Any:
        """What the normalised numbers are multiplied by."""
        weight = w[self.module]["weight"]
        return self.ops.arrays.astype(weight, x.dtype) + self.spec.norm_offset if self.spec.norm_offset else weight

    def _bias(self, w: Any) -> Any:
        return w[self.module].get("bias")


@dataclass(frozen=True)
class Sublayer:
    """y = x + scale * after(f(before(x))), with neither norm where the family has none; f is the stage's own."""

    before: Norm | None
    after: Norm | None
    scale: float

    @classmethod
    def of(cls, spec: ModelSpec, ops: Any, layer: int, names: tuple[str | None, str | None]) -> "Sublayer":
        """names: of the norms before and after."""
        before, after = (None if name is None else Norm(spec, ops, f"{spec.layer_name(layer)}.{name}") for name in names)
        return cls(before, after, spec.residual_scale)

    def enter(self, w: Any, x: Any) -> Any:
        """h: what f is given."""
        return x if self.before is None else self.before.forward(w, x)

    def enter_backward(self, w: Any, x: Any, dh: Any) -> Any:
        """What x gets through f."""
        return dh if self.before is None else self.before.backward(w, x, dh)

    def leave(self, w: Any, x: Any, f: Any) -> Any:
        """y, given what f gave."""
        return x + self._scaled(f if self.after is None else self.after.forward(w, f))

    def leave_backward(self, w: Any, f: Any, dy: Any) -> Any:
        """The gradient of what f gave; f itself is looked at only where there is a norm after it."""
        dy = self._scaled(dy)
        return dy if self.after is None else self.after.backward(w, f, dy)

    def plain(self, ops: Any, w: Any, x: Any, f: Any, past: Any = None) -> Any:
        """past + scale * after(f(before(x))) by a backend's plain operations; past is x unless given."""
        y = f(x if self.before is None else self.before.plain(ops, w, x))
        return (x if past is None else past) + self._scaled(y if self.after is None else self.after.plain(ops, w, y))

    def _scaled(self, y: Any) -> Any:
        return y if self.scale == 1 else y * self.scale
