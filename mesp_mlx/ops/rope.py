"""Rotary position embedding (Su et al., 2021, eq. 15), with the scalings of long-context models.

Equals, for the first `dims` features of x [B, H, T, d], in pairs (x1, x2): neighbours if `traditional`, else feature i and i + dims/2:

    angle[t, i] = t * scale / freqs[i]          # freqs[i] = base ** (2 i / dims) unless given
    y1 = magnitude * (x1 cos(angle) - x2 sin(angle))
    y2 = magnitude * (x1 sin(angle) + x2 cos(angle))

The other features pass through. Positions start at 0. A rotation's transpose is the rotation by the opposite angle, so nothing is
saved and backward is forward with `scale` negated.

A rope is a dict: dims, traditional, base (None when freqs is given), scale, freqs (float32 [dims/2] or None), magnitude (YaRN's, else 1).
"""

from typing import Any

import mlx.core as mx

Rope = dict[str, Any]


def forward(x: mx.array, rope: Rope) -> mx.array:
    """Rotate x [B, H, T, d] by position, in the dtype of x."""
    return _rotate(x, rope, rope["scale"])


def backward(dy: mx.array, rope: Rope) -> mx.array:
    """The gradient with respect to x [B, H, T, d], given dy."""
    return _rotate(dy, rope, -rope["scale"])


def apply(x: mx.array, rope: Rope) -> mx.array:
    """`forward` as an ordinary MLX function whose gradient is `backward`; given frequencies get zeros."""
    return _apply(x, rope)


def _rotate(x: mx.array, rope: Rope, scale: float) -> mx.array:
    if rope["magnitude"] != 1:
        x = mx.concatenate([rope["magnitude"] * x[..., : rope["dims"]], x[..., rope["dims"] :]], axis=-1)
    return mx.fast.rope(x, rope["dims"], traditional=rope["traditional"], base=rope["base"], scale=scale, offset=0, freqs=rope["freqs"])


_apply: Any = mx.custom_function(forward)


@_apply.vjp
def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
    _x, rope = primals
    return backward(dy, rope), {name: mx.zeros_like(value) if isinstance(value, mx.array) else value for name, value in rope.items()}
