"""One method of a comparison, in a process of its own: its gradient at the start, or its training, measured."""

import json
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mesp_mlx import adapter as adapters
from mesp_mlx import backend as backends
from mesp_mlx import child, finetune, optim, planning, sources
from mesp_mlx.data import batches
from mesp_mlx.engine.methods import update
from mesp_mlx.engine.train import Run, train
from mesp_mlx.errors import RunStopped, UserError
from mesp_mlx.finetune import Prepared
from mesp_mlx.memory import measure
from mesp_mlx.memory.strategy import Strategy
from mesp_mlx.memory.timeline import Timeline, phases
from mesp_mlx.model.stages import Batch, Dropout
from mesp_mlx.optim import Optimizer
from mesp_mlx.report import Report

B_SHARE = 0.1  # of A's size: with B zero, as training starts, A has no gradient


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """`config_file` and `flags` are for `sources.load`; with `gradient`, a file to write it to, nothing is trained."""
    try:
        settings = sources.load(request["config_file"], request["flags"])
        backend = backends.choose(settings.backend)
        optimizer = optim.make(settings.optimizer, settings.optimizer_arguments, backend)  # imports MLX's
        base = measure.process_now_bytes()
        with np.errstate(over="ignore", invalid="ignore"), measure.small_cache(backend.arrays.name):
            found = finetune.find(settings, finetune.data_files(settings), backend)
            # The same choices for all methods, so that their figures can be compared.
            with finetune.prepare(found, planning.plan_of(found, Strategy())) as prepared:
                if request["gradient"]:
                    return write_gradient(prepared, Path(request["gradient"]))
                return {"base_bytes": base} | train_measured(prepared, optimizer)
    except UserError as error:  # not for child.answer: the parent must tell what the user can change from a crash
        return {"refused": str(error)}
    except (RunStopped, MemoryError) as error:
        return {"failed": str(error) or type(error).__name__}


def write_gradient(prepared: Prepared, file: Path) -> dict[str, Any]:
    """Write the gradient of the first update, of the mean loss, at the first adapter with random numbers in its B."""
    settings, rows, backend, adapter = prepared.settings, prepared.rows, prepared.backend, dict(prepared.adapter)
    rng = np.random.default_rng(settings.seed)
    for name in adapter:
        if name.endswith("lora_b"):
            a = backend.arrays.to_numpy(adapter[f"{name.removesuffix('b')}a"])
            adapter[name] = backend.arrays.asarray((B_SHARE * a.std() * rng.normal(size=adapter[name].shape)).astype(np.float32))
    (groups,) = batches.updates(rows.train_set, rows.train, rows.limit, rows.widths, rows_per_update=settings.rows_per_update, seed=settings.seed, stop=1)
    share = settings.lora_parameters.dropout
    held = [Batch(group, Dropout(settings.seed, 0, share) if share else None) for group in groups]
    with prepared.store() as store:
        gradients: dict[str, Any] = {}
        loss, finish = update(settings, 0, prepared.model, store, adapter, held, gradients.__setitem__, prepared.shelves)
        finish()
        adapters.save(file.parent, gradients, backend, file.name)
    dtype = prepared.activation_dtype
    named = "float32" if dtype == backend.arrays.float32 else str(dtype).removeprefix("mlx.core.")
    return {"loss": loss / sum(int(group.mask.sum()) for group in groups), "activation_dtype": named}


def train_measured(prepared: Prepared, optimizer: Optimizer) -> dict[str, Any]:
    """Train as `finetune` does, adapter and log in its folder, and give what was measured, as JSON values."""
    settings, backend, folder = prepared.settings, prepared.backend, Path(prepared.settings.adapter_path)
    updates = batches.count_updates(len(prepared.rows.train), settings.batch_size, settings.grad_accumulation_steps, iters=settings.iters)
    timeline = Timeline(backend.arrays.name, sampled=updates // 2)

    def save(name: str) -> Path:
        file = adapters.save(folder, prepared.adapter, backend, name)
        finetune.write_config(folder, settings, prepared.spec, prepared.source)
        return file

    @contextmanager
    def whole() -> Iterator[None]:
        timeline.mark("update")
        yield
        timeline.end_step()

    assert settings.json_log is not None
    with ExitStack() as stack:
        store = stack.enter_context(prepared.store(phases(prepared.model, settings.method, timeline.mark, lambda: timeline.phase)))
        report = stack.enter_context(Report(settings.json_log, stack.enter_context(open(os.devnull, "w"))))
        train(Run(settings, prepared.rows, updates, prepared.model, store, prepared.adapter, optimizer, report, save, whole))
    events = [json.loads(line) for line in Path(settings.json_log).read_text(encoding="utf-8").splitlines()]
    reports = [event for event in events if event["event"] == "train"]
    seconds = timeline.step_seconds()
    return {
        "backend": backend.arrays.name,
        "allocator_peak_bytes": measure.allocator_peak_bytes(backend.arrays.name),
        "process_peak_bytes": measure.process_peak_bytes(),
        "seconds_per_step": statistics.median(seconds),
        "step_seconds": seconds,
        "iterations": [event["iteration"] for event in reports],
        "losses": [event["train_loss"] for event in reports],
        "timeline": timeline.sampled_step(),
    }


if __name__ == "__main__":
    child.answer(serve)
