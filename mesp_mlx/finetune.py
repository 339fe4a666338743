"""The main path: settle on model, data and adapter; train; show and save what came of it."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mesp_mlx import adapter as adapters
from mesp_mlx import backend as backends
from mesp_mlx import config, optim, planning
from mesp_mlx.awake import awake
from mesp_mlx.config import Settings
from mesp_mlx.data import batches, tokens
from mesp_mlx.data.formats import find_files
from mesp_mlx.data.rows import Rows, read_rows
from mesp_mlx.engine.generate import greedy_reply
from mesp_mlx.engine.train import Run, train
from mesp_mlx.errors import UserError
from mesp_mlx.interrupt import Interrupts
from mesp_mlx.memory import machine, measure
from mesp_mlx.memory.plan import Plan
from mesp_mlx.memory.watchdog import Watchdog, leaner
from mesp_mlx.model import architecture, source
from mesp_mlx.model.convert import nearest_folder, require_space
from mesp_mlx.model.model import Model
from mesp_mlx.model.source import ModelFolder
from mesp_mlx.model.spec import ModelSpec, Spec
from mesp_mlx.report import Report
from mesp_mlx.stream.run_file import RunFile, in_memory
from mesp_mlx.stream.safetensors import Entry
from mesp_mlx.stream.shelves import Shelves, shelves
from mesp_mlx.stream.store import ALL_STAGES, Store

BYPASS_SHARE = 0.5  # of the machine's memory: files larger than that would push everything else out of the system's page cache


@dataclass(frozen=True)
class Found:
    """The model and the rows of a run: what its plan is made for."""

    settings: Settings
    backend: ModuleType
    source: ModelFolder
    spec: Spec
    entries: Mapping[str, Entry]
    rows: Rows
    modules: list[str]

    @property
    def activation_dtype(self) -> Any:
        return backends.activation_dtype(self.backend, backends.stored_dtype(self.entries))


@dataclass(frozen=True)
class Prepared(Found):
    """The same with its plan, a first adapter and a model to train it, all but the weights, which are read from a `store`."""

    plan: Plan
    shelves: Shelves
    adapter: dict[str, Any]
    model: Model

    def store(self, watch: Callable[[str], None] | None = None) -> Store:
        """The model's weights, as the plan has them read. `watch` is called with the name of each stage that is opened."""
        strategy = self.plan.strategy
        resident = ALL_STAGES if self.settings.method == "backprop" else self.model.resident_stages()
        bypass = sum(entry.size_bytes for entry in self.entries.values()) > BYPASS_SHARE * machine.total_bytes()
        return Store(self.entries, self.spec, self.backend, resident, strategy.prefetch, strategy.hold, watch, bypass)


def open_model(settings: Settings, backend: ModuleType) -> tuple[ModelFolder, Spec, dict[str, Entry]]:
    """The folder of the model, its shape, and where its tensors are, checked against each other.

    Raises:
        UserError: it can't be found, is not whole, or is served only on another backend.
    """
    trust = settings.trust_remote_code
    found = source.resolve_apart(settings.model, config.cache_folder(), settings.quantize, backend=backend.arrays.name, trust_remote_code=trust)
    return found, *architecture.open_folder(found.folder, backend.arrays.name, trust)


def find(settings: Settings, files: Mapping[str, Path | None], backend: ModuleType) -> Found:
    """Find the model, tokenise the rows in files.

    Raises:
        UserError: something the user can change.
    """
    source, spec, entries = open_model(settings, backend)
    if settings.grad_checkpoint and settings.method == "backprop" and not isinstance(spec, ModelSpec):
        raise UserError(f"--grad-checkpoint: {spec.model_type} has no layers of ours to recompute. Leave --method out, which recomputes mlx-lm's one by one.")
    modules = adapters.choose_modules(spec, settings.num_layers, settings.lora_parameters.keys)
    rows = read_rows(settings, files, source.folder, spec, config.cache_folder() / "tokens")
    return Found(settings, backend, source, spec, entries, rows, modules)


@contextmanager
def prepare(found: Found, plan: Plan) -> Iterator[Prepared]:
    """Make the adapter, and the run's file where the plan wants one: what a run needs before its first step.

    Raises:
        UserError: something the user can change.
    """
    settings, spec, backend, lora = found.settings, found.spec, found.backend, found.settings.lora_parameters
    _require_room_for_adapters(settings, spec, found.modules)
    with ExitStack() as stack:
        file = None
        if plan.strategy.needs_file:
            folder = nearest_folder(Path(settings.adapter_path))  # the file has no name: nothing is left there
            if in_memory(folder):
                raise UserError(
                    f"the run's temporary file would lie in {folder}, which is in memory itself (a tmpfs). Give an --adapter-path on a disk, or raise "
                    "--memory, so that nothing goes into the file."
                )
            file = stack.enter_context(closing(RunFile(folder, plan.file_bytes, backend, bypass_cache=plan.file_bytes > BYPASS_SHARE * machine.total_bytes())))
        places = shelves(plan.strategy, file)
        if settings.resume_adapter_file:
            adapter = adapters.load(Path(settings.resume_adapter_file), spec, found.modules, lora.rank, backend, places.adapter)
        else:
            adapter = adapters.initialise(spec, found.modules, lora.rank, settings.seed, backend, places.adapter)
        yield Prepared(**vars(found), plan=plan, shelves=places, adapter=adapter, model=build_model(found, plan))


def build_model(found: Found, plan: Plan) -> Model:
    """The model as a plan takes it."""
    settings, lora = found.settings, found.settings.lora_parameters
    adapted = found.backend, lora.effective_scale, found.modules, lora.rank
    choices = plan.strategy, found.activation_dtype, settings.method, settings.tiled_head, plan.limit_bytes
    return architecture.build(found.spec, found.entries, *adapted, *choices)


def run(settings: Settings) -> None:
    """Train an adapter as the settings say.

    Raises:
        UserError: something the user can change.
        RunStopped: the run can't go on.
        KeyboardInterrupt: it was interrupted; what had been trained is saved.
    """
    started = time.perf_counter()
    folder = Path(settings.adapter_path) if settings.dry_run or settings.try_step else _new_folder(settings)
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
        stack.enter_context(awake())
        for line in config.remarks(settings):
            report.note(line)
        saved, last_save = "nothing was written", (0, Path())
        try:
            found = find(settings, files, backend)
            updates = count_updates(settings, len(found.rows.train))
            if settings.iters and settings.iters % settings.grad_accumulation_steps:
                report.note(f"--iters {settings.iters} is rounded up to whole updates of {settings.grad_accumulation_steps} iterations")
            plan, budget = planning.decide(found, updates, report)
            predicted = max(plan.total_bytes, measure.process_peak_bytes())  # what came before may have been more than what is to come
            if settings.dry_run:
                return
            measure.keep_freed(arrays, plan.keep_bytes)
            prepared = stack.enter_context(prepare(found, plan))
            model, rows, adapter = prepared.model, prepared.rows, prepared.adapter

            def save(name: str) -> Path:
                nonlocal last_save
                with interrupts.held():
                    file = adapters.save(folder, adapter, backend, name)
                    write_config(folder, settings, prepared.spec, prepared.source)  # last: where nothing could be saved, no config claims a run
                    last_save = optimizer.applied, file
                    return file

            def rescue() -> str:
                """Saves what was trained, where it is whole and was not saved yet; says where the last is."""
                applied, _ = last_save
                if optimizer.applied > applied and optimizer.between_updates(len(adapter)):
                    with suppress(Exception):  # the failure itself is what must be told
                        save(adapters.ADAPTER_FILE)
                applied, file = last_save
                return f"the adapter after {applied // len(adapter)} updates is in {file}" if applied else "nothing was saved"

            def relieve() -> None:
                store.drop_resident()
                model.evaluate.limit(leaner(plan).limit_bytes)
                measure.give_back(arrays)

            def after_update() -> Model | None:
                smaller = watchdog.after_update()
                return smaller and build_model(found, smaller)

            watchdog = Watchdog(plan, budget, relieve, lambda: save(adapters.ADAPTER_FILE), report.note)
            store = stack.enter_context(prepared.store(watchdog))
            optimizer = optim.make(settings.optimizer, settings.optimizer_arguments, backend, prepared.shelves.adapter)
            training = Run(settings, rows, updates, model, store, adapter, optimizer, report, save, interrupts.held, prepared.shelves, after_update)
            if settings.try_step:
                planning.try_step(training, plan)
                return

            def reply() -> list[int]:
                return greedy_reply(model, store, adapter, rows.prompt, rows.stops, settings.reply_tokens)

            report.start(
                model=prepared.source.name,
                family=prepared.spec.model_type,
                backend=arrays,
                method=settings.method,
                modules=len(prepared.modules),
                parameters=_parameters(prepared.spec, prepared.modules, settings),
                adapter_bytes=4 * _parameters(prepared.spec, prepared.modules, settings),
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
                predicted_peak_bytes=predicted,
            )
            reply_before = reply()
            try:
                before, after = train(training)
            except KeyboardInterrupt:
                saved = f"the adapter as it stands is in {save(adapters.ADAPTER_FILE)}"
                raise
            except Exception:
                if optimizer.applied:
                    report.note(f"the run failed: {rescue()}")
                raise
            saved = f"the adapter is in {folder / adapters.ADAPTER_FILE}"
            replies = tokens.decode(prepared.source.folder, [reply_before, reply()], settings.trust_remote_code) if settings.reply_tokens else [None, None]
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
            predicted_arrays_bytes=plan.arrays_peak_bytes,
            predicted_peak_bytes=predicted,
            seconds=time.perf_counter() - started,
            prompt=rows.question,
            model_folder=str(prepared.source.folder),
            adapter_path=str(folder),
            trust_remote_code=settings.trust_remote_code,
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


def count_updates(settings: Settings, rows: int) -> int:
    """The updates of a run on so many rows."""
    epochs = settings.epochs or (None if settings.iters else config.default_epochs(rows))
    return batches.count_updates(rows, settings.batch_size, settings.grad_accumulation_steps, iters=settings.iters, epochs=epochs)


def _parameters(spec: Spec, modules: list[str], settings: Settings) -> int:
    """Numbers in the adapter."""
    return sum(math.prod(shape) for shape in adapters.shapes(spec, modules, settings.lora_parameters.rank).values())


def _require_room_for_adapters(settings: Settings, spec: Spec, modules: list[str]) -> None:
    needed = 4 * _parameters(spec, modules, settings)
    what = f"--adapter-path {settings.adapter_path}: saving an adapter of --rank {settings.lora_parameters.rank} safely"
    require_space(Path(settings.adapter_path), 2 * needed, what)


def write_config(folder: Path, settings: Settings, spec: Spec, model: ModelFolder) -> None:
    """Write the adapter's adapter_config.json: what mlx-lm needs, and the settings."""
    lora = settings.lora_parameters
    adapters.write_config(
        folder,
        model=str(model.folder),
        num_layers=spec.num_layers if settings.num_layers == -1 else settings.num_layers,
        rank=lora.rank,
        scale=lora.effective_scale,
        dropout=lora.dropout,
        keys=lora.keys or spec.adaptable_keys(),
        extra=settings.model_dump(mode="json", exclude={"model", "num_layers", "lora_parameters"}),
    )
