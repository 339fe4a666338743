"""Optimizers over a flat dict of adapter tensors, one tensor at a time: mlx.optimizers on MLX, its NumPy twins elsewhere.

A tensor's new value and state replace the old ones before the next tensor is touched, so memory never holds a second adapter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mesp_mlx.stream.run_file import fetch
from mesp_mlx.stream.shelves import IN_MEMORY, Shelf, replace

# Adam's and AdamW's, where none are given: bias correction on and no weight decay, unlike mlx.optimizers'.
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True}
SGD = {"momentum": 0.0, "weight_decay": 0.0, "dampening": 0.0, "nesterov": False}

# (gradient, parameter, state of this tensor, update counted from 1, learning rate) -> new parameter; puts the new state into `state`
Rule = Callable[[Any, Any, dict[str, Any], int, float], Any]


@dataclass
class Optimizer:
    """An optimizer and what it remembers: the number of updates begun, and each tensor's moments, by adapter tensor name, on a shelf.

    begun and applied count tensors, of all updates: those that `apply` was given, and those that it is done with.
    """

    backend: Any
    rule: Rule
    slots: tuple[str, ...]
    shelf: Shelf = IN_MEMORY.adapter
    updates: int = 0
    begun: int = 0
    applied: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    def start_update(self) -> None:
        """Count an update, whose tensors `apply` will take one at a time."""
        self.updates += 1

    def apply(self, adapter: dict[str, Any], name: str, gradient: Any, learning_rate: float) -> None:
        """Replace one tensor of the adapter, in the update that `start_update` began."""
        self.begun += 1
        parameter = fetch(adapter[name])
        if self.slots and name not in self.state:
            self.state[name] = self.shelf.put({slot: self.backend.arrays.zeros(parameter.shape, parameter.dtype) for slot in self.slots})
        state = fetch(self.state.get(name, {}))
        new = self.rule(gradient, parameter, state, self.updates, learning_rate)
        self.backend.arrays.evaluate(new, state)
        replace(adapter, name, new)
        if self.slots:
            replace(self.state, name, state)
        self.applied += 1

    def between_updates(self, tensors: int) -> bool:
        """Whether an adapter of so many tensors is whole: all of them are of the same update."""
        return self.begun == self.applied and self.applied % tensors == 0


def make(name: str, options: Mapping[str, Any], backend: Any, shelf: Shelf = IN_MEMORY.adapter) -> Optimizer:
    """An optimizer, "sgd", "adam" or "adamw", with options named as mlx.optimizers names them, checked where they came from (config.py)."""
    full = {"sgd": SGD, "adam": ADAM, "adamw": ADAM | {"weight_decay": 0.0}}[name] | dict(options)
    slots = (("v",) if full["momentum"] > 0 else ()) if name == "sgd" else ("m", "v")
    rule = _mlx_rule(name, full) if backend.arrays.name == "mlx" else _numpy_rule(name, full)
    return Optimizer(backend, rule, slots, shelf)


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply all gradients by so that their global norm stays below the limit; 0 = no limit. As mlx.optimizers.clip_grad_norm."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def _mlx_rule(name: str, options: dict[str, Any]) -> Rule:
    """The rule of mlx.optimizers itself, called for one tensor."""
    import mlx.core as mx
    from mlx import optimizers

    optimizer = {"sgd": optimizers.SGD, "adam": optimizers.Adam, "adamw": optimizers.AdamW}[name](learning_rate=0.0, **options)

    def rule(gradient: Any, parameter: Any, state: dict[str, Any], update: int, learning_rate: float) -> Any:
        optimizer.learning_rate = learning_rate
        optimizer.state["step"] = mx.array(update, mx.uint64)
        return optimizer.apply_single(gradient, parameter, state)

    return rule


def _numpy_rule(name: str, options: dict[str, Any]) -> Rule:
    if name == "sgd":
        return lambda *tensor: _sgd(*tensor, **options)
    return lambda *tensor: _adam(*tensor, **options)


def _sgd(
    gradient: np.ndarray,
    parameter: np.ndarray,
    state: dict[str, np.ndarray],
    update: int,
    learning_rate: float,
    *,
    momentum: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
) -> np.ndarray:
    """v = mu v + (1 - tau) g; w -= lr v; nesterov takes g + mu v instead of v. Twin of mlx.optimizers.SGD."""
    if weight_decay:
        gradient = gradient + weight_decay * parameter
    if momentum > 0:
        state["v"] = momentum * state["v"] + (1 - dampening) * gradient
        gradient = gradient + momentum * state["v"] if nesterov else state["v"]
    return parameter - np.float32(learning_rate) * gradient


def _adam(
    gradient: np.ndarray,
    parameter: np.ndarray,
    state: dict[str, np.ndarray],
    update: int,
    learning_rate: float,
    *,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool,
    weight_decay: float = 0.0,
) -> np.ndarray:
    """m = b1 m + (1-b1) g; v = b2 v + (1-b2) g²; w = (1 - lr decay) w - lr m̂ / (sqrt(v̂) + eps). Twin of mlx.optimizers.Adam and AdamW."""
    b1, b2, lr, one = np.float32(betas[0]), np.float32(betas[1]), np.float32(learning_rate), np.float32(1)
    parameter = parameter * (one - lr * np.float32(weight_decay)) if weight_decay else parameter
    state["m"] = b1 * state["m"] + np.float32(1 - betas[0]) * gradient
    state["v"] = b2 * state["v"] + np.float32(1 - betas[1]) * np.square(gradient)
    if not bias_correction:
        return parameter - lr * state["m"] / (np.sqrt(state["v"]) + np.float32(eps))
    # In float32, as mlx.optimizers does: 1 - b2^t has few correct digits at first, and twins must round alike.
    step = np.float32(update)
    c1, c2 = lr / (one - b1**step), one / np.sqrt(one - b2**step)
    return parameter - c1 * state["m"] / (np.sqrt(state["v"]) * c2 + np.float32(eps))
