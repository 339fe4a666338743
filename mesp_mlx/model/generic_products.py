"""Products with a layer's frozen weights on a CPU device, where MLX multiplies packed ones number by number: tiles are dequantised, as structured stages do it.

mlx-lm's modules stay where they are, with their parameters and their names; what is called is `Product` or `ChosenProduct`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

PACKED = ("weight", "scales", "biases", "global_scale")
SETTINGS = ("bits", "group_size", "mode")


class Product(nn.Module):
    """A Linear or QuantizedLinear. What it dequantises, or makes float32, is made anew for backward."""

    ops: Any

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., in] -> [..., out]."""
        x = x.astype(mx.result_type(x, self["weight"]))
        return self.ops.quantized.apply(x, linear(self) | ({"bias": self["bias"]} if "bias" in self else {}))


class Choices:
    """The experts that products are asked for: computed when they are called, or known from a run before, since autodiff keeps all that is computed meanwhile.

    Attributes:
        asked_for: whether any product asks.
    """

    def __init__(self) -> None:
        self.asked_for = False
        self._seen: deque[np.ndarray] | None = None
        self._known: deque[np.ndarray] = deque()

    @contextmanager
    def known(self, run: Callable[[], Any]) -> Iterator[None]:
        """Those of a run are known while the block makes the same calls again."""
        if self.asked_for:
            self._seen = deque()
            run()
            self._seen, self._known = None, self._seen
        try:
            yield
        finally:
            self._known = deque()

    def of(self, indices: mx.array) -> np.ndarray:
        """A call's indices, flat."""
        if self._known:
            return self._known.popleft()
        found = np.array(indices).reshape(-1)
        if self._seen is not None:
            self._seen.append(found)
        return found


class ChosenProduct(nn.Module):
    """A QuantizedSwitchLinear: only experts that serve are dequantised, one after another. Asks for the indices when it is called."""

    ops: Any
    choices: Choices

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1, in], for each index (broadcast) by that expert -> [..., 1, out]."""
        chosen = self.choices.of(indices)
        order = np.argsort(chosen, kind="stable")
        experts, first = np.unique(chosen[order], return_index=True)
        runs = list(zip(experts.tolist(), first.tolist(), [*first[1:].tolist(), chosen.size], strict=True))
        x = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:])).reshape(chosen.size, x.shape[-1])
        x = x if sorted_indices else mx.take(x, mx.array(order), axis=0)
        y = _by_runs(self.ops, runs)(x, linear(self))
        y = y if sorted_indices else mx.take(y, mx.array(np.argsort(order)), axis=0)
        y = y.reshape(*indices.shape, 1, -1)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


def _by_runs(ops: Any, runs: list[tuple[int, int, int]]) -> Any:
    """A product in which expert e serves rows i to j, for each (e, i, j); experts wait for one another, forward and backward."""

    def in_turn(product: Any, x: mx.array, stack: dict[str, Any]) -> mx.array:
        pieces: list[mx.array] = []
        for expert, i, j in runs:
            own = {name: value[expert] if isinstance(value, mx.array) else value for name, value in stack.items()}
            pieces.append(product(x[i:j], ops.quantized.wait(own, pieces[-1:] or [x])))
        return mx.concatenate(pieces)

    products: Any = mx.custom_function(lambda x, stack: in_turn(ops.quantized.matmul, x, stack))

    @products.vjp
    def _(primals: Any, dy: mx.array, _y: mx.array) -> Any:
        return in_turn(ops.quantized.matmul_transposed, dy, primals[1]), ops.quantized.zeros_like(primals[1])

    return products


KINDS: dict[type, type] = {nn.Linear: Product, nn.QuantizedLinear: Product, QuantizedSwitchLinear: ChosenProduct}


def linear(module: Any) -> dict[str, Any]:
    """A module's weight as ops.quantized takes it, stacked where it is."""
    arrays = {name: module[name] for name in PACKED if module.get(name) is not None}
    return arrays | ({name: getattr(module, name) for name in SETTINGS} if "scales" in arrays else {})


def multiply_here(modules: Iterable[nn.Module], ops: Any, choices: Choices | None = None) -> None:
    """Let the linears among the modules of a model, which is this run's own, multiply by these products where the device is a CPU."""
    choices = choices or Choices()
    for module in modules if ops.quantized.on_cpu() else ():
        if kind := KINDS.get(type(module)):
            module.__class__, vars(module)["ops"], vars(module)["choices"] = kind, ops, choices
            choices.asked_for |= kind is ChosenProduct
