"""The main path: settle on model, data and adapter; train; show and save what came of it."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import numpy as np

from mesp_mlx import adapter as adapters
from mesp_mlx import backend as backends
from mesp_mlx import config, optim
from mesp_mlx.config import Settings
from mesp_mlx.data import batches, rows, tokens
from mesp_mlx.data.formats import find_files
from mesp_mlx.engine.generate import greedy_reply
from mesp_mlx.engine.train import Run, train
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.memory import measure
from mesp_mlx.model import source, weights
from mesp_mlx.model.convert import require_space
from mesp_mlx.model.model import build
from mesp_mlx.model.source import ModelFolder
from mesp_mlx.model.spec import PROJECTIONS, ModelSpec, load_spec, read_config
from mesp_mlx.report import Report
from mesp_mlx.stream.safetensors import read_folder
from mesp_mlx.stream.store import Store


def run(settings: Settings) -> None:
    """Train an adapter as the settings say.

    Raises:
        UserError: something the user can change.
        RunStopped: the run can't go on.
        KeyboardInterrupt: it was interrupted; what had been trained is saved.
    """
    started = time.perf_counter()
    folder = _new_folder(settings)
    files = find_files(config.demo_folder() if settings.data == "demo" else Path(settings.data))
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
            model = source.resolve_apart(settings.model, config.cache_folder(), settings.quantize)
            spec = load_spec(read_config(model.folder), str(model.folder / "config.json"))
            entries = read_folder(model.folder)
            weights.check(spec, entries)

            lora = settings.lora_parameters
            modules = adapters.choose_modules(spec, settings.num_layers, lora.keys)
            chosen = rows.read_rows(settings, files, model.folder, spec, config.cache_folder() / "tokens")
            updates = _count_updates(settings, len(chosen.train), report)
            adapter = _first_adapter(settings, spec, modules, backend)
            stored = entries.get("model.embed_tokens.scales") or entries["model.embed_tokens.weight"]
            group_tokens = batches.largest_group(chosen.widths, settings.rows_per_update)
            stages = build(spec, backend, lora.effective_scale, group_tokens, backends.activation_dtype(backend, stored.dtype))
            store = stack.enter_context(Store(entries, spec, backend))

            def save(name: str) -> Path:
                with interrupts.held():
                    file = adapters.save(folder, adapter, backend, name)
                    _write_config(folder, settings, spec, model)  # last: where nothing could be saved, no config claims a run
                    return file

            def reply() -> list[int]:
                return greedy_reply(stages, store, adapter, chosen.prompt, chosen.stops, settings.reply_tokens)

            report.start(
                model=model.name,
                family=spec.model_type,
                backend=arrays,
                modules=len(modules),
                parameters=sum(array.size for array in adapter.values()),
                adapter_bytes=sum(array.nbytes for array in adapter.values()),
                rank=lora.rank,
                effective_scale=lora.effective_scale,
                rows=len(chosen.train),
                validation_rows=len(chosen.valid),
                held_out=chosen.valid_set is chosen.train_set and len(chosen.valid) > 0,
                tokens=chosen.tokens(),
                supervised_share=chosen.supervised_share(),
                max_seq_length=chosen.limit,
                rows_cut=chosen.cut,
                rows_skipped=chosen.skipped,
                rows_per_update=settings.rows_per_update,
                updates=updates,
                iterations=updates * settings.grad_accumulation_steps,
            )
            reply_before = reply()
            optimizer = optim.make(settings.optimizer, settings.optimizer_arguments, backend)
            try:
                before, after = train(Run(settings, chosen, updates, stages, store, adapter, optimizer, report, save, interrupts.held))
            except KeyboardInterrupt:
                saved = f"the adapter as it stands is in {save(adapters.ADAPTER_FILE)}"
                raise
            saved = f"the adapter is in {folder / adapters.ADAPTER_FILE}"
            replies = tokens.decode(model.folder, [reply_before, reply()]) if settings.reply_tokens else [None, None]
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
            prompt=chosen.question,
            model_folder=str(model.folder),
            adapter_path=str(folder),
        )


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


def _write_config(folder: Path, settings: Settings, spec: ModelSpec, model: ModelFolder) -> None:
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
