"""The main path: settle on model, data and adapter; train; show and save what came of it."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mesp_mlx import adapter as adapters
from mesp_mlx import backend as backends
from mesp_mlx import config, optim
from mesp_mlx.config import Settings
from mesp_mlx.data import batches, tokens
from mesp_mlx.data.formats import find_files
from mesp_mlx.data.rows import Rows, read_rows
from mesp_mlx.engine.generate import greedy_reply
from mesp_mlx.engine.train import Run, train
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.memory import measure
from mesp_mlx.model import source, weights
from mesp_mlx.model.convert import require_space
from mesp_mlx.model.model import Model, build
from mesp_mlx.model.source import ModelFolder
from mesp_mlx.model.spec import PROJECTIONS, ModelSpec, load_spec, read_config
from mesp_mlx.report import Report
from mesp_mlx.stream.safetensors import Entry, read_folder
from mesp_mlx.stream.store import Store


@dataclass(frozen=True)
class Prepared:
    """A model, rows and a first adapter, settled but for the weights, which are read from a `store`."""

    settings: Settings
    backend: ModuleType
    source: ModelFolder
    spec: ModelSpec
    entries: Mapping[str, Entry]
    rows: Rows
    modules: list[str]
    adapter: dict[str, Any]
    model: Model

    def store(self, watch: Callable[[str], None] | None = None) -> Store:
        """The model's weights, as the method reads them. `watch` is called with the name of each stage that is opened."""
        return Store(self.entries, self.spec, self.backend, resident=self.settings.method == "backprop", watch=watch)


def open_model(settings: Settings) -> tuple[ModelFolder, ModelSpec, dict[str, Entry]]:
    """The folder of the model, its shape, and where its tensors are, checked against each other.

    Raises:
        UserError: it can't be found, or is not whole.
    """
    found = source.resolve_apart(settings.model, config.cache_folder(), settings.quantize)
    spec = load_spec(read_config(found.folder), str(found.folder / "config.json"))
    entries = read_folder(found.folder)
    weights.check(spec, entries)
    return found, spec, entries


def prepare(settings: Settings, files: Mapping[str, Path | None], backend: ModuleType) -> Prepared:
    """Find the model, tokenise the rows in files, make the adapter: what a run needs before its first step.

    Raises:
        UserError: something the user can change.
    """
    found, spec, entries = open_model(settings)
    lora = settings.lora_parameters
    modules = adapters.choose_modules(spec, settings.num_layers, lora.keys)
    rows = read_rows(settings, files, found.folder, spec, config.cache_folder() / "tokens")
    adapter = _first_adapter(settings, spec, modules, backend)
    dtype, group_tokens = backends.activation_dtype(backend, backends.stored_dtype(entries)), batches.largest_group(rows.widths, settings.rows_per_update)
    model = build(spec, backend, lora.effective_scale, group_tokens, dtype, settings.method, settings.tiled_head)
    return Prepared(settings, backend, found, spec, entries, rows, modules, adapter, model)


def run(settings: Settings) -> None:
    """Train an adapter as the settings say.

    Raises:
        UserError: something the user can change.
        RunStopped: the run can't go on.
        KeyboardInterrupt: it was interrupted; what had been trained is saved.
    """
    started = time.perf_counter()
    folder = _new_folder(settings)
    files = data_files(settings)
    if settings.resume_adapter_file:
        adapters.read_entries(Path(settings.resume_adapter_file))
    backend = backends.choose(settings.backend)
    arrays = backend.arrays.name
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        report = stack.enter_context(Report(settings.json_log))
        stack.enter_context(np.errstate(over="ignore", invalid="ignore"))  # what is not finite is found and said by the steps below
        stack.enter_context(measure.small_cache(arrays))
        for line in config.remarks(settings):
            report.note(line)
        saved = "nothing was written"
        try:
            prepared = prepare(settings, files, backend)
            model, rows, adapter = prepared.model, prepared.rows, prepared.adapter
            updates = _count_updates(settings, len(rows.train), report)
            store = stack.enter_context(prepared.store())

            def save(name: str) -> Path:
                with interrupts.held():
                    file = adapters.save(folder, adapter, backend, name)
                    write_config(folder, settings, prepared.spec, prepared.source)  # last: where nothing could be saved, no config claims a run
                    return file

            def reply() -> list[int]:
                return greedy_reply(model, store, adapter, rows.prompt, rows.stops, settings.reply_tokens)

            report.start(
                model=prepared.source.name,
                family=prepared.spec.model_type,
                backend=arrays,
                method=settings.method,
                modules=len(prepared.modules),
                parameters=sum(array.size for array in adapter.values()),
                adapter_bytes=sum(array.nbytes for array in adapter.values()),
                rank=settings.lora_parameters.rank,
                effective_scale=settings.lora_parameters.effective_scale,
                rows=len(rows.train),
                validation_rows=len(rows.valid),
                held_out=rows.valid_set is rows.train_set and len(rows.valid) > 0,
                tokens=rows.tokens(),
                supervised_share=rows.supervised_share(),
                max_seq_length=rows.limit,
                rows_cut=rows.cut,
                rows_skipped=rows.skipped,
                rows_per_update=settings.rows_per_update,
                updates=updates,
                iterations=updates * settings.grad_accumulation_steps,
            )
            reply_before = reply()
            optimizer = optim.make(settings.optimizer, settings.optimizer_arguments, backend)
            try:
                before, after = train(Run(settings, rows, updates, model, store, adapter, optimizer, report, save, interrupts.held))
            except KeyboardInterrupt:
                saved = f"the adapter as it stands is in {save(adapters.ADAPTER_FILE)}"
                raise
            saved = f"the adapter is in {folder / adapters.ADAPTER_FILE}"
            replies = tokens.decode(prepared.source.folder, [reply_before, reply()]) if settings.reply_tokens else [None, None]
        except KeyboardInterrupt:
            report.note(f"interrupted: {saved}")
            raise
        report.end(
            val_loss_before=before,
            val_loss_after=after,
            reply_before=replies[0],
            reply_after=replies[1],
            allocator_peak_bytes=measure.allocator_peak_bytes(arrays),
            process_peak_bytes=measure.process_peak_bytes(),
            seconds=time.perf_counter() - started,
            prompt=rows.question,
            model_folder=str(prepared.source.folder),
            adapter_path=str(folder),
        )


def data_files(settings: Settings) -> dict[str, Path | None]:
    """The data's files by split."""
    return find_files(config.demo_folder() if settings.data == "demo" else Path(settings.data))


def _new_folder(settings: Settings) -> Path:
    """The adapter's folder: one that holds no run, and that can be written."""
    folder = Path(settings.adapter_path)
    held = [name for name in (adapters.ADAPTER_FILE, adapters.CONFIG_FILE) if (folder / name).exists()]
    if held and not settings.overwrite:
        raise UserError(f"--adapter-path {folder} already holds a run ({held[0]}). Choose another folder, or give --overwrite to replace it.")
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--adapter-path {folder}: {above} is not a folder that can be written to. Choose another.")
    return folder


def _count_updates(settings: Settings, count: int, report: Report) -> int:
    accumulation = settings.grad_accumulation_steps
    if settings.iters and settings.iters % accumulation:
        report.note(f"--iters {settings.iters} is rounded up to whole updates of {accumulation} iterations")
    epochs = settings.epochs or (None if settings.iters else config.default_epochs(count))
    return batches.count_updates(count, settings.batch_size, accumulation, iters=settings.iters, epochs=epochs)


def _first_adapter(settings: Settings, spec: ModelSpec, modules: list[str], backend: ModuleType) -> dict:
    rank = settings.lora_parameters.rank
    needed = 4 * sum(rows * columns for rows, columns in adapters.shapes(spec, modules, rank).values())
    require_space(Path(settings.adapter_path), 2 * needed, f"--adapter-path {settings.adapter_path}: saving an adapter of --rank {rank} safely")
    if settings.resume_adapter_file:
        return adapters.load(Path(settings.resume_adapter_file), spec, modules, rank, backend)
    return adapters.initialise(spec, modules, rank, settings.seed, backend)


def write_config(folder: Path, settings: Settings, spec: ModelSpec, model: ModelFolder) -> None:
    """Write the adapter's adapter_config.json: what mlx-lm needs, and the settings."""
    lora = settings.lora_parameters
    adapters.write_config(
        folder,
        model=str(model.folder),
        num_layers=spec.num_layers if settings.num_layers == -1 else settings.num_layers,
        rank=lora.rank,
        scale=lora.effective_scale,
        dropout=lora.dropout,
        keys=lora.keys or PROJECTIONS,
        extra=settings.model_dump(mode="json", exclude={"model", "num_layers", "lora_parameters"}),
    )
