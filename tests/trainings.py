"""What the tests of training share: a `Run` over rows of random tokens, without the command around it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from engines import SCALE, random_adapter

from mesp_mlx import adapter as adapters
from mesp_mlx import optim, sources
from mesp_mlx.data import batches
from mesp_mlx.data.rows import Rows
from mesp_mlx.data.tokens import TokenSet
from mesp_mlx.engine.train import Run
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.model.model import build
from mesp_mlx.model.spec import load_spec, read_config
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import Store

DEFAULT = Strategy()


class Told:
    """Stands for a report: keeps what it is told of each update, and lines."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.trains: list[dict[str, Any]] = []
        self.disks: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def disk(self, **told: Any) -> None:
        self.disks.append(told)

    def step(self, **told: Any) -> None:
        self.steps.append(told)

    def train(self, **told: Any) -> None:
        self.trains.append(told)

    def validation(self, **told: Any) -> None:
        pass

    def save(self, **told: Any) -> None:
        pass


def random_rows(lengths: Sequence[int], vocabulary: int, seed: int = 3) -> Rows:
    """Rows of so many tokens, all supervised but the first of each; none for validation."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, sum(lengths), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    held = TokenSet(tokens, np.ones(len(tokens), np.uint8), offsets)
    every = np.arange(len(lengths))
    return Rows(held, held, every, every[:0], max(lengths), batches.padded_widths(np.array(lengths)), 0, 0, "", [], [])


@contextmanager
def a_run(
    folder: Path,
    backend: Any,
    lengths: Sequence[int],
    updates: int,
    strategy: Strategy = DEFAULT,
    watch: Callable[[str], None] | None = None,
    limit_bytes: int | None = None,
    out: Path | None = None,
    told: Told | None = None,
    **given: Any,
) -> Iterator[Run]:
    """Training of the model in a folder on such rows by sgd, from an adapter whose B is not zero; it is saved into `out`."""
    steady = {"optimizer": "sgd", "learning_rate": 0.05, "lr_schedule": "constant", "warmup": 0, "grad_clip": 0.0, "steps_per_report": 1}
    settings = sources.load(None, {"model": str(folder), "data": "data", **steady, **given})
    spec = load_spec(read_config(folder))
    adapter = {name: backend.arrays.asarray(value) for name, value in random_adapter(folder).items()}
    model = build(spec, backend, SCALE, strategy, None, settings.method, limit_bytes=limit_bytes)

    def save(name: str) -> Path:
        return adapters.save(out, adapter, backend, name) if out else Path(name)

    resident = model.resident_stages()
    with Store(read_folder(folder), spec, backend, resident, strategy.prefetch, strategy.hold, watch) as store:
        optimizer = optim.make(settings.optimizer, settings.optimizer_arguments, backend)
        rows, report = random_rows(lengths, spec.vocab_size), cast(Any, Told() if told is None else told)
        yield Run(settings, rows, updates, model, store, adapter, optimizer, report, save, contextlib.nullcontext)
