"""Where the gradients of an update go, one policy at a time: applied as they come, or kept until the update ends and clipped by their global norm."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from mesp_mlx.errors import RunStopped
from mesp_mlx.optim import clip_factor
from mesp_mlx.stream.run_file import take
from mesp_mlx.stream.shelves import Shelf

Apply = Callable[[str, Any], None]  # takes the name of an adapter tensor and the gradient of the mean loss


class Sink(Protocol):
    def check(self, loss: float) -> None: ...
    def put(self, gradients: dict[str, Any]) -> None: ...
    def finish(self) -> None: ...


@dataclass
class AppliedSink:
    """Hands the gradients of each stage, divided by the update's supervised tokens, to the optimizer as soon as they are there. No clipping."""

    backend: Any
    tokens: int
    apply: Apply

    def check(self, loss: float) -> None:
        """Told the summed loss before the first gradient.

        Raises:
            RunStopped: it is not finite.
        """
        must_be_finite(loss)

    def put(self, gradients: dict[str, Any]) -> None:
        """Take the gradients of one stage, summed over the update's rows.

        Raises:
            RunStopped: one is not finite.
        """
        for name in list(gradients):
            gradient = gradients.pop(name) * (1 / self.tokens)
            if not math.isfinite(self.backend.arrays.sum_squares(gradient)):
                raise RunStopped(f"{_not_finite(name)} What came before it in this update was applied: go on from the last saved adapter. {_TRY}")
            self.apply(name, gradient)

    def finish(self) -> None:
        """The update is over: nothing is left to do."""


class HeldSink:
    """Keeps the gradients of the summed loss on a shelf, in memory or in the run's file, while their squares are summed; then clips and applies them."""

    def __init__(self, backend: Any, shelf: Shelf, tokens: int, clip: float, apply: Apply) -> None:
        self._backend, self._shelf, self._tokens, self._clip, self._apply = backend, shelf, tokens, clip, apply
        self._held: list[Any] = []
        self._places: dict[str, int] = {}  # where in it a tensor's gradient is
        self._squares: dict[str, float] = {}

    def check(self, loss: float) -> None:
        """Told the summed loss before the first gradient.

        Raises:
            RunStopped: it is not finite.
        """
        must_be_finite(loss)

    def put(self, gradients: dict[str, Any]) -> None:
        """Take the gradients of one stage, summed over the update's rows. A tensor that several stages use gets the sum of what they give."""
        for name in [name for name in gradients if name in self._places]:
            place = self._places[name]
            held = take(self._held, place)
            held[name] = self._backend.arrays.evaluate(held[name] + gradients.pop(name))
            self._squares[name] = self._backend.arrays.sum_squares(held[name])
            self._held[place] = self._shelf.put(held)
        self._places |= dict.fromkeys(gradients, len(self._held))
        self._squares |= {name: self._backend.arrays.sum_squares(gradient) for name, gradient in gradients.items()}
        self._held.append(self._shelf.put(gradients))

    def finish(self) -> None:
        """Apply the gradients of the mean loss, clipped to a global norm (0 = not), stage by stage.

        Raises:
            RunStopped: a gradient is not finite; nothing was applied.
        """
        norm = math.sqrt(math.fsum(self._squares.values())) / self._tokens
        if not math.isfinite(norm):
            bad = next((name for name, square in self._squares.items() if not math.isfinite(square)), "their sum")
            raise RunStopped(f"{_not_finite(bad)} Nothing of it was applied. {_TRY}")
        factor = clip_factor(norm, self._clip) / self._tokens
        for stage in range(len(self._held)):
            gradients = take(self._held, stage)
            for name in list(gradients):
                self._apply(name, gradients.pop(name) * factor)


def must_be_finite(loss: float) -> None:
    """Raises RunStopped where it is not."""
    if not math.isfinite(loss):
        raise RunStopped(f"the loss is {loss}. Nothing of it was applied. {_TRY}")


_TRY = "Try a lower --learning-rate or --scale."


def _not_finite(name: str) -> str:
    return f"the gradient is not a finite number, first in {name}."
