"""Where gradients go. Here they are held until the update ends, then divided, clipped and handed to the optimizer."""

import math
from typing import Any

from mesp_mlx.errors import RunStopped
from mesp_mlx.optim import clip_factor, global_norm


class HeldSink:
    """Holds the gradients of the summed loss, by adapter tensor name, until the update ends."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._gradients: dict[str, Any] = {}

    def put(self, gradients: dict[str, Any]) -> None:
        """Take the gradients of one stage, summed over the update's rows."""
        self._gradients |= gradients

    def finish(self, tokens: int, clip: float = 0.0) -> tuple[dict[str, Any], float]:
        """The gradients of the mean loss over `tokens` supervised tokens, clipped to a global norm (0 = not), and the norm before clipping.

        Raises:
            RunStopped: a gradient is not finite.
        """
        gradients, self._gradients = self._gradients, {}
        norm = global_norm(gradients, self._backend) / tokens
        if not math.isfinite(norm):
            bad = next((name for name, gradient in gradients.items() if not math.isfinite(global_norm({name: gradient}, self._backend))), "their sum")
            raise RunStopped(f"the gradient is not a finite number, first in {bad}. Nothing of it was applied. Try a lower --learning-rate or --scale.")
        factor = clip_factor(norm, clip) / tokens
        for name in gradients:
            gradients[name] = gradients[name] * factor
            self._backend.arrays.evaluate(gradients[name])
        return gradients, norm
