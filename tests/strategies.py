"""What the tests of strategies share: rows of many lengths, and a few updates of training as a strategy says."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from backends import numbers
from engines import SCALE, random_adapter

from mesp_mlx import optim
from mesp_mlx.data import batches
from mesp_mlx.data.group import Group
from mesp_mlx.data.tokens import TokenSet
from mesp_mlx.engine import methods
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.stream.run_file import RunFile, fetch
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.shelves import shelves
from mesp_mlx.stream.store import Store

VOCABULARY, UPDATES, RATE = 160, 2, 1.0
LENGTHS = (4, 10, 18, 25, 34, 25)  # tokens of a row
DEFAULT = Strategy(group_tokens=64)  # five groups


def row_set() -> TokenSet:
    rng, total = np.random.default_rng(5), sum(LENGTHS)
    return TokenSet(rng.integers(0, VOCABULARY, total).astype(np.int32), (rng.random(total) < 0.8).astype(np.uint8), np.cumsum((0, *LENGTHS)))


def groups_for(strategy: Strategy) -> list[Group]:
    rows = row_set()
    return batches.groups(rows, range(len(LENGTHS)), 64, batches.padded_widths(rows.lengths()), strategy.group_tokens)


@dataclass
class Trained:
    losses: list[float]
    adapter: dict[str, np.ndarray]
    store: Store
    file: RunFile
    left: list[int]  # bytes in the file after each update


def train(
    folder: Path,
    backend: Any,
    strategy: Strategy,
    clip: float = 0.0,
    rate: float = 0.0,
    method: str = "mesp",
    updates: int = UPDATES,
    optimizer: str = "sgd",
    groups: list[Group] | None = None,
    run_file: Any = RunFile,
    store_type: Any = Store,
) -> Trained:
    """A few updates as a run makes them, on a file of its own wherever the strategy puts something there. rate: of dropout."""
    spec = load_spec(read_config(folder))
    model = build(spec, backend, SCALE, strategy, method=method)
    chosen: Any = SimpleNamespace(method=method, grad_clip=clip, grad_checkpoint=False, seed=3, mezo_perturbations=2, mezo_epsilon=1e-2)
    resident = model.resident_stages()
    file = run_file(folder, 0, backend)
    held = shelves(strategy, file)
    adapter = {name: held.adapter.put(backend.arrays.asarray(value)) for name, value in random_adapter(folder).items()}
    rule = optim.make(optimizer, {}, backend, held.adapter)
    losses, left = [], []

    def apply(name: str, gradient: Any) -> None:
        rule.apply(adapter, name, gradient, RATE if optimizer == "sgd" else 0.01)

    with store_type(read_folder(folder), spec, backend, resident, strategy.prefetch, strategy.hold) as store:
        for update in range(updates):
            dropout = Dropout(7, update, rate) if rate else None
            rule.start_update()
            inputs = [Batch(group, dropout) for group in groups or groups_for(strategy)]
            loss, finish = methods.update(chosen, update, model, store, adapter, inputs, apply, held)
            finish()
            losses.append(loss)
            left.append(file.used_bytes)
    found = {name: np.array(numbers(fetch(value))) for name, value in adapter.items()}
    file.close()
    return Trained(losses, found, store, file, left)
