"""The store hands a stage its frozen weights for the time of a `with` block.

One reader thread fills buffers ahead of the computation: when a stage opens, those expected after it start to be read.
Only the main thread touches the backend; the reader fills bytes.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from mesp_mlx.model.spec import Spec
from mesp_mlx.stream.run_file import drop_from_cache, keep_out_of_cache
from mesp_mlx.stream.safetensors import Entry, open_to_read, read_run


class Reads(Protocol):
    """What the store needs to know of a stage: its name, and the modules that it reads whole."""

    @property
    def name(self) -> str: ...
    @property
    def modules(self) -> tuple[str, ...]: ...


class _All:
    """Contains whatever is asked for."""

    def __contains__(self, _: object) -> bool:
        return True


ALL_STAGES: Container[str] = _All()


@dataclass
class _Loading:
    """Buffers being filled; `wait` gives the modules' parameters."""

    buffers: dict[str, dict[str, tuple[Any, Entry]]]
    read: Future[None]


class Weights:
    """The frozen weights of one open stage.

    `w[module]` is the module's parameters as MLX names them: `{"weight": …}`, with `"scales", "biases", "bits", "group_size"` when quantised,
    `"bias"` when it has one, and whatever else stands in it directly. `w.take` and `w.tiles` read rows of a table that is never whole in memory, unless
    the stage is resident: then `w.tiles` reads it once, whole, and both cut rows from that. `w.each` reads stacked linears one by one; a resident stage
    keeps those it has read.
    """

    def __init__(self, store: "Store", modules: dict[str, dict[str, Any]], resident: bool = False):
        self._store, self._modules, self._resident = store, modules, resident
        self._tables: dict[str, dict[str, Any]] = {}
        self._stacked: dict[int, list[dict[str, Any]]] = {}

    def __getitem__(self, module: str) -> dict[str, Any]:
        return self._modules[module]

    def take(self, module: str, rows: np.ndarray) -> dict[str, Any]:
        """The rows of a table (sorted, without repetition) as a linear of that many rows; neighbours are read at once."""
        if table := self._tables.get(module):
            index = self._store.backend.arrays.asarray(rows)
            return _by_rows(table, lambda array: self._store.backend.arrays.take_rows(array, index))
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks)]
        return self._store.wait(self._store.start({module: runs}))[module]

    def tiles(self, module: str, rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """A table in tiles of so many rows, as (first row, linear); the next tile is read while the caller uses this one."""
        count = self._store.rows(module)
        starts = range(0, count, rows)
        if self._resident:
            if module not in self._tables:
                self._tables |= self._store.wait(self._store.load_modules([module]))
            for first in starts:
                yield first, _by_rows(self._tables[module], lambda array, first=first: array[first : first + rows])
            return
        loading = self._store.start({module: [(0, min(rows, count))]})
        for first in starts:
            tile = self._store.wait(loading)[module]
            if (after := first + rows) < count:
                loading = self._store.start({module: [(after, min(after + rows, count))]})
            yield first, tile
            del tile

    def each(self, modules: Sequence[str], places: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Of modules that stack linears (weights [E, out, in]), those at some places, as (place, each module's linear); the next is read meanwhile."""
        missing = deque(place for place in places if place not in self._stacked)

        def start() -> _Loading | None:
            return self._store.start({module: [(missing[0], missing[0] + 1)] for module in modules}) if missing else None

        loading = start()
        for place in places:
            found = self._stacked.get(place)
            if found is None:
                assert loading is not None
                read = self._store.wait(loading)
                found = [_by_rows(read.pop(module), lambda array: array[0]) for module in modules]
                if self._resident:
                    self._stacked[place] = found
                missing.popleft()
                loading = start()
            yield place, found
            del found

    def close(self) -> None:
        self._modules.clear()
        self._tables.clear()
        self._stacked.clear()


class Store:
    """Reads the frozen weights of a model, stage by stage.

    Args:
        entries: the model's tensors, as `safetensors.read_folder` finds them.
        spec: its shape.
        backend: whose arrays to fill.
        resident: the names of stages that are kept once they were opened, until the store is closed; `ALL_STAGES`. What is packed stays packed; the
            16-bit numbers of a file are float32 on NumPy.
        prefetch: how many expected stages are read ahead of the one that is open.
        hold: whether a stage that is opened with `again` keeps its weights until it is opened next.
        watch: called with a stage's name whenever one is opened: for measuring.
        bypass_cache: for a model larger than memory: the system keeps nothing of what was read, where it can be asked.

    Attributes:
        loads: how many times each module was read whole.
        bytes_read: bytes read from disk so far.
        read_seconds: time the reader spent reading them.
        waited_seconds: time that the computation waited for the reader.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        spec: Spec,
        backend: Any,
        resident: Container[str] = (),
        prefetch: int = 1,
        hold: bool = True,
        watch: Callable[[str], None] | None = None,
        bypass_cache: bool = False,
    ):
        self.loads: Counter[str] = Counter()
        self.bytes_read = 0
        self.read_seconds = self.waited_seconds = 0.0
        self.backend = backend
        self._entries, self._spec = entries, spec
        self._parameters: dict[str, dict[str, Entry]] = {}  # of each module, those that stand in it directly
        for name, entry in entries.items():
            module, _, parameter = name.rpartition(".")
            self._parameters.setdefault(module, {})[parameter] = entry
        self._prefetch, self._hold, self._watch, self._bypass = prefetch, hold, watch, bypass_cache
        self._descriptors: dict[Path, int] = {}
        self._resident = resident
        self._stay: dict[str, Weights] = {}  # resident stages
        self._held: dict[str, Weights] = {}  # those to be opened again
        self._expected: deque[Reads] = deque()
        self._ahead: deque[tuple[Reads, _Loading]] = deque()  # in the order they are expected in
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def expect(self, stages: Iterable[Reads]) -> None:
        """The stages that will be opened next, in order, those opened again included: what reading ahead goes by. What was held is dropped."""
        self._expected = deque(stages)
        self._held.clear()

    @contextmanager
    def open(self, stage: Reads, again: bool = False) -> Iterator[Weights]:
        """The weights of a stage, dropped when the block ends. `again`: kept until the stage is opened next, if the store holds.

        Raises:
            UserError: a file is truncated or can't be read.
        """
        if self._watch:
            self._watch(stage.name)
        weights = self._stay.get(stage.name) or self._held.pop(stage.name, None) or Weights(self, self._read(stage), stage.name in self._resident)
        if self._expected and self._expected[0] is stage:
            self._expected.popleft()
        if stage.name in self._resident:
            self._stay[stage.name] = weights
        elif again and self._hold:
            self._held[stage.name] = weights
        try:
            self._read_ahead()
            yield weights
        except BaseException:
            self._held.pop(stage.name, None)  # it is not opened again
            raise
        finally:
            if self._stay.get(stage.name) is not weights and self._held.get(stage.name) is not weights:
                self.free(stage, weights)

    def drop_resident(self) -> None:
        """Keep no stage from now on, and read none ahead; what is open goes when its block ends."""
        self._resident, self._prefetch, self._hold = (), 0, False
        self._stay.clear()
        self._held.clear()

    def load(self, stage: Reads) -> _Loading:
        """Start to read a stage's modules."""
        return self.load_modules(stage.modules)

    def load_modules(self, modules: Iterable[str]) -> _Loading:
        """Start to read modules whole."""
        wanted = dict.fromkeys(modules)
        self.loads.update(wanted.keys())
        return self.start(wanted)

    def free(self, stage: Reads, weights: Weights) -> None:
        """Drop a stage's weights."""
        weights.close()

    def rows(self, module: str) -> int:
        """The number of rows of a module's weight."""
        return self._entries[f"{module}.weight"].shape[0]

    def start(self, wanted: Mapping[str, list[tuple[int, int]] | None]) -> _Loading:
        """Start to read modules: each whole (None), or runs of rows [first, last) one after the other."""
        buffers: dict[str, dict[str, tuple[Any, Entry]]] = {}
        jobs: list[tuple[Entry, memoryview]] = []
        for module, runs in wanted.items():
            buffers[module] = {}
            for parameter, entry in self._parameters.get(module, {}).items():
                parts = [entry] if runs is None or not entry.shape else [entry.rows(first, last) for first, last in runs]
                shape = entry.shape if runs is None or not entry.shape else (sum(part.shape[0] for part in parts), *entry.shape[1:])
                array, target = self.backend.buffers.allocate(shape, entry.dtype)
                buffers[module][parameter] = array, entry
                offset = 0
                for part in parts:
                    if part.size_bytes:
                        jobs.append((part, target[offset : offset + part.size_bytes]))
                    offset += part.size_bytes
        self.bytes_read += sum(part.size_bytes for part, _ in jobs)
        runs = [(self._descriptor(run[0][0].file), run) for run in _runs(jobs)]
        return _Loading(buffers, self._reader.submit(self._read_all, runs))

    def wait(self, loading: _Loading) -> dict[str, dict[str, Any]]:
        """The modules of a load once it is done."""
        started = time.perf_counter()
        loading.read.result()
        self.waited_seconds += time.perf_counter() - started
        modules: dict[str, dict[str, Any]] = {}
        for module, parameters in loading.buffers.items():
            modules[module] = {name: self.backend.buffers.finish(array, entry.dtype) for name, (array, entry) in parameters.items()}
            if "scales" in parameters and (quantized := self._spec.quantized_as(module)):
                modules[module] |= {name: value for name, value in quantized._asdict().items() if value != "affine"}
        loading.buffers.clear()
        return modules

    def close(self) -> None:
        """Stop the reader and close the files."""
        self._reader.shutdown(cancel_futures=True)
        self._ahead.clear()
        self.drop_resident()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, stage: Reads) -> dict[str, dict[str, Any]]:
        """The modules of a stage, which may have been read ahead."""
        if self._ahead and self._ahead[0][0] is stage:
            loading = self._ahead.popleft()[1]
        else:
            self._ahead.clear()  # what was read for other stages must not stay while this one is open
            loading = self.load(stage)
        return self.wait(loading)

    def _read_ahead(self) -> None:
        """Start to read the stages expected next, up to one that is on its way already: whether that one will be held is not known yet."""
        missing = [stage for stage in self._expected if stage.name not in self._stay and stage.name not in self._held]
        for stage in missing[len(self._ahead) : self._prefetch]:
            if any(stage is ahead for ahead, _ in self._ahead):
                break
            self._ahead.append((stage, self.load(stage)))

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = open_to_read(file)
            if self._bypass:
                keep_out_of_cache(self._descriptors[file])
        return self._descriptors[file]

    def _read_all(self, runs: list[tuple[int, list[tuple[Entry, memoryview]]]]) -> None:
        """What the reader does."""
        started = time.perf_counter()
        for descriptor, run in runs:
            read_run(run, descriptor)
            if self._bypass:
                first, last = run[0][0], run[-1][0]
                drop_from_cache(descriptor, first.start, last.start + last.size_bytes - first.start)
        runs.clear()  # a finished future must not keep the buffers alive
        self.read_seconds += time.perf_counter() - started


def _by_rows(linear: dict[str, Any], cut: Callable[[Any], Any]) -> dict[str, Any]:
    """A linear with rows cut from each of its arrays."""
    return {name: value if isinstance(value, int | str) else cut(value) for name, value in linear.items()}


def _runs(jobs: list[tuple[Entry, memoryview]]) -> list[list[tuple[Entry, memoryview]]]:
    """Jobs in the order of their places in each file, those that touch together."""
    runs: list[list[tuple[Entry, memoryview]]] = []
    for job in sorted(jobs, key=lambda job: (job[0].file, job[0].start)):
        before = runs[-1][-1][0] if runs else None
        if before and before.file == job[0].file and before.start + before.size_bytes == job[0].start:
            runs[-1].append(job)
        else:
            runs.append([job])
    return runs
