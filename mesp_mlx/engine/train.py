"""Updates in turn, with validation, reports and checkpoints between them."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesp_mlx import config
from mesp_mlx.adapter import ADAPTER_FILE
from mesp_mlx.config import Settings
from mesp_mlx.data import batches
from mesp_mlx.data.group import Group
from mesp_mlx.data.rows import Rows
from mesp_mlx.engine.backprop import forward
from mesp_mlx.engine.methods import update as make_update
from mesp_mlx.errors import RunStopped
from mesp_mlx.memory import measure
from mesp_mlx.model.model import Model
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.optim import Optimizer
from mesp_mlx.report import Report
from mesp_mlx.stream.shelves import IN_MEMORY, Shelves
from mesp_mlx.stream.store import Store


@dataclass(frozen=True)
class Run:
    """Everything that training needs, settled.

    `save` writes the adapter under a name, whole; `whole` is a block that no interruption cuts short; `after_update` is called between two updates, and
    gives a model to go on with where it changes.
    """

    settings: Settings
    rows: Rows
    updates: int
    model: Model
    store: Store
    adapter: dict[str, Any]
    optimizer: Optimizer
    report: Report
    save: Callable[[str], Path]
    whole: Callable[[], AbstractContextManager[None]]
    shelves: Shelves = IN_MEMORY
    after_update: Callable[[], Model | None] = lambda: None


@dataclass
class Window:
    """What has been trained since the last report; `loss` is a sum over `supervised` tokens, `tokens` leaves out padding."""

    started: float
    loss: float = 0.0
    supervised: int = 0
    tokens: int = 0
    iterations: int = 0

    def pace(self) -> dict[str, float]:
        """The mean loss and the speed so far."""
        seconds = time.perf_counter() - self.started
        return {
            "train_loss": self.loss / self.supervised,
            "iterations_per_second": self.iterations / seconds,
            "tokens_per_second": self.tokens / seconds,
        }


def train(run: Run) -> tuple[float | None, float | None]:
    """All updates of a run; the validation loss before and after, None when there are no validation rows.

    Raises:
        RunStopped: the loss or a gradient is not finite, and nothing of it reaches the adapter; or memory does not suffice.
    """
    settings, report = run.settings, run.report
    valid = validation_rows(run)
    before = after = validate(run, valid) if valid else None
    if before is not None:
        report.validation(iteration=0, val_loss=before)
    trained, window, per_update = 0, Window(time.perf_counter()), settings.grad_accumulation_steps
    updates, tokens_left, started = updates_from(run, 0), tokens_in_all(run), time.perf_counter()
    tokens_done = 0
    for update in range(run.updates):
        groups = next(updates)
        loss, supervised, rate = step(run, update, groups) if update else first_step(run, groups)
        if model := run.after_update():
            run = replace(run, model=model)
            updates = updates_from(run, update + 1)
        trained += supervised
        window.loss, window.supervised, window.iterations = window.loss + loss, window.supervised + supervised, window.iterations + per_update
        tokens = sum(sum(group.lengths) for group in groups)
        window.tokens, tokens_done, tokens_left = window.tokens + tokens, tokens_done + tokens, tokens_left - tokens
        iteration, last = (update + 1) * per_update, update == run.updates - 1

        def due(every: int, iteration: int = iteration) -> bool:
            return iteration // every > (iteration - per_update) // every

        pace = window.pace()
        left = (time.perf_counter() - started) / tokens_done * tokens_left
        report.step(iteration=iteration, learning_rate=rate, seconds_left=left, **pace)
        if last or due(settings.steps_per_report):
            peak, now = measure.allocator_peak_bytes(run.optimizer.backend.arrays.name), measure.process_now_bytes()
            peak = measure.process_peak_bytes() if peak is None else peak
            report.train(iteration=iteration, learning_rate=rate, trained_tokens=trained, peak_memory_bytes=peak, memory_bytes=now, seconds_left=left, **pace)
            window = Window(time.perf_counter())
        if valid and (last or due(settings.steps_per_eval)):
            paused = time.perf_counter()
            after = validate(run, valid)
            report.validation(iteration=iteration, val_loss=after)
            window.started += time.perf_counter() - paused
        if last or due(settings.save_every):
            if not last:
                run.save(f"{iteration:07d}_{ADAPTER_FILE}")
            report.save(iteration=iteration, path=str(run.save(ADAPTER_FILE)))
    return before, after


def updates_from(run: Run, start: int) -> Iterator[list[Group]]:
    """The groups of each update from number `start` on, as large as the model takes them."""
    rows, settings = run.rows, run.settings
    return batches.updates(
        rows.train_set,
        rows.train,
        rows.limit,
        rows.widths,
        rows_per_update=settings.rows_per_update,
        seed=settings.seed,
        start=start,
        stop=run.updates,
        tile_tokens=run.model.strategy.group_tokens,
    )


def tokens_in_all(run: Run) -> int:
    """Positions, without padding, of all the run's updates: rows differ in length, so updates do, and time follows positions."""
    rows, settings = run.rows, run.settings
    epochs, updates = divmod(run.updates, batches.updates_per_epoch(len(rows.train), settings.rows_per_update))
    part = batches.epoch_order(rows.train, settings.seed, epochs)[: updates * settings.rows_per_update]
    positions = rows.train_set.lengths(rows.limit) - 1
    return int(epochs * positions[rows.train].sum() + positions[part].sum())


def first_step(run: Run, groups: list[Group]) -> tuple[float, int, float]:
    """The first update; reports how fast the disk was in it."""
    store, started = run.store, time.perf_counter()
    before = store.bytes_read, store.read_seconds, store.waited_seconds
    made = step(run, 0, groups)
    read_bytes, read, waited = (now - then for now, then in zip((store.bytes_read, store.read_seconds, store.waited_seconds), before, strict=True))
    run.report.disk(read_bytes=int(read_bytes), read_seconds=read, waited_seconds=waited, seconds=time.perf_counter() - started)
    return made


def step(run: Run, update: int, groups: list[Group]) -> tuple[float, int, float]:
    """One optimizer update: the loss summed over its supervised tokens, their number, and the learning rate."""
    settings = run.settings
    rate, supervised = config.learning_rate(settings, update, run.updates), _supervised(groups)
    dropout = Dropout(settings.seed, update, settings.lora_parameters.dropout) if settings.lora_parameters.dropout else None
    batches = [Batch(group, dropout) for group in groups]
    run.optimizer.start_update()

    def apply(name: str, gradient: Any) -> None:
        run.optimizer.apply(run.adapter, name, gradient, rate)

    # An update that is applied stage by stage is made whole before an interruption is heard.
    try:
        with run.whole() if run.model.strategy.gradients == "applied" else nullcontext():
            loss, finish = make_update(settings, update, run.model, run.store, run.adapter, batches, apply, run.shelves)
            with run.whole():
                finish()
    except RunStopped as error:
        raise RunStopped(f"update {update + 1}: {error}") from None
    return loss, supervised, rate


def validation_rows(run: Run) -> int:
    """How many rows every validation measures: as many as were asked for, else so many that validating takes at most a tenth of the run's time.

    A forward pass costs about a third of an exact update's three (mezo's takes two for each direction, or more), so n validations of v tokens each stay
    below a tenth of the whole while n * v <= trained tokens / 3.
    """
    settings, rows = run.settings, run.rows
    count = len(rows.valid)
    if settings.val_batches is not None:
        count = count if settings.val_batches == -1 else settings.val_batches * settings.batch_size
    elif count:
        validations = 2 + run.updates * settings.grad_accumulation_steps // settings.steps_per_eval
        per_row = rows.tokens() / len(rows.train)
        budget = per_row * run.updates * min(settings.rows_per_update, len(rows.train)) / (3 * validations)
        lengths = rows.valid_set.lengths(rows.limit)[rows.valid].cumsum()
        count = max(int((lengths <= budget).sum()), 1)
    return min(count, len(rows.valid))


def validate(run: Run, rows: int) -> float:
    """The mean loss over the supervised tokens of the first so many validation rows.

    Raises:
        RunStopped: it is not finite.
    """
    total, supervised = 0.0, 0
    for groups in run.rows.validation_groups(rows, run.settings.rows_per_update, run.model.strategy.group_tokens):
        held, supervised = [Batch(group) for group in groups], supervised + _supervised(groups)
        run.store.expect(run.model.forward_order())
        states = forward(run.model, run.store, run.adapter, held, run.shelves)
        with run.store.open(run.model.head) as w:
            total += sum(run.model.head.loss(w, states, held, run.shelves.states, gradient=False)[0])
    if not math.isfinite(total):
        raise RunStopped(f"the validation loss is {total}: the model's weights, or the adapter, hold numbers that are not finite. It was not saved.")
    return total / supervised


def _supervised(groups: list[Group]) -> int:
    return sum(int(group.mask.sum()) for group in groups)
