"""The store hands a stage its frozen weights for the time of a `with` block.

One reader thread fills buffers ahead of the computation: when a stage opens, the one expected after it starts to be read.
Only the main thread touches the backend; the reader fills bytes.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from mesp_mlx.model.spec import ModelSpec
from mesp_mlx.stream.safetensors import Entry, open_to_read, read_into

PARAMETERS = ("weight", "scales", "biases", "bias")


class Reads(Protocol):
    """What the store needs to know of a stage: its name, and the modules that it reads whole."""

    @property
    def name(self) -> str: ...
    @property
    def modules(self) -> tuple[str, ...]: ...


@dataclass
class _Loading:
    """Buffers being filled; `wait` gives the modules' parameters."""

    buffers: dict[str, dict[str, tuple[Any, Entry]]]
    read: Future[None]


class Weights:
    """The frozen weights of one open stage.

    `w[module]` is the module's parameters as MLX names them: `{"weight": …}`, with `"scales", "biases", "bits", "group_size"` when quantised,
    and `"bias"` when it has one. `w.take` and `w.tiles` read rows of a table that is never whole in memory.
    """

    def __init__(self, store: "Store", modules: dict[str, dict[str, Any]]):
        self._store, self._modules = store, modules

    def __getitem__(self, module: str) -> dict[str, Any]:
        return self._modules[module]

    def take(self, module: str, rows: np.ndarray) -> dict[str, Any]:
        """The rows of a table (sorted, without repetition) as a linear of that many rows; neighbours are read at once."""
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks)]
        return self._store.wait(self._store.start({module: runs}))[module]

    def tiles(self, module: str, rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """A table in tiles of so many rows, as (first row, linear); the next tile is read while the caller uses this one."""
        count = self._store.rows(module)
        starts = range(0, count, rows)
        loading = self._store.start({module: [(0, min(rows, count))]})
        for first in starts:
            tile = self._store.wait(loading)[module]
            if (after := first + rows) < count:
                loading = self._store.start({module: [(after, min(after + rows, count))]})
            yield first, tile
            del tile

    def close(self) -> None:
        self._modules.clear()


class Store:
    """Reads the frozen weights of a model, stage by stage.

    Args:
        entries: the model's tensors, as `safetensors.read_folder` finds them.
        spec: its shape.
        backend: whose arrays to fill.
        resident: keep every stage that was opened, in the form it is stored in, until the store is closed.
        watch: called with a stage's name whenever one is opened: for measuring.

    Attributes:
        loads: how many times each module was read whole.
        bytes_read: bytes read from disk so far.
    """

    def __init__(
        self, entries: Mapping[str, Entry], spec: ModelSpec, backend: Any, resident: bool = False, watch: Callable[[str], None] | None = None
    ):
        self.loads: Counter[str] = Counter()
        self.bytes_read = 0
        self._entries, self._spec, self._backend = entries, spec, backend
        self._descriptors: dict[Path, int] = {}
        self._resident: dict[str, Weights] | None = {} if resident else None
        self._watch = watch
        self._expected: deque[Reads] = deque()
        self._ahead: tuple[Reads, _Loading] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def expect(self, stages: Iterable[Reads]) -> None:
        """The stages that will be opened next, in order: what reading ahead goes by."""
        self._expected = deque(stages)

    @contextmanager
    def open(self, stage: Reads) -> Iterator[Weights]:
        """The weights of a stage, dropped when the block ends.

        Raises:
            UserError: a file is truncated or can't be read.
        """
        if self._watch:
            self._watch(stage.name)
        if self._resident is not None:
            if stage.name not in self._resident:
                self._resident[stage.name] = Weights(self, self.wait(self.load(stage)))
            yield self._resident[stage.name]
            return
        ahead, self._ahead = self._ahead, None
        loading = ahead[1] if ahead and ahead[0] is stage else self.load(stage)
        del ahead  # what was read for another stage must not stay while this one is open
        if self._expected and self._expected[0] is stage:
            self._expected.popleft()
        weights = Weights(self, self.wait(loading))
        if self._expected:
            self._ahead = self._expected[0], self.load(self._expected[0])
        try:
            yield weights
        finally:
            self.free(stage, weights)

    def load(self, stage: Reads) -> _Loading:
        """Start to read a stage's modules."""
        self.loads.update(stage.modules)
        return self.start({module: None for module in stage.modules})

    def free(self, stage: Reads, weights: Weights) -> None:
        """Drop a stage's weights."""
        weights.close()

    def rows(self, module: str) -> int:
        """The number of rows of a module's weight."""
        return self._entries[f"{module}.weight"].shape[0]

    def start(self, wanted: Mapping[str, list[tuple[int, int]] | None]) -> _Loading:
        """Start to read modules: each whole (None), or runs of rows [first, last) one after the other."""
        buffers: dict[str, dict[str, tuple[Any, Entry]]] = {}
        jobs: list[tuple[Entry, memoryview, int]] = []
        for module, runs in wanted.items():
            buffers[module] = {}
            for parameter in PARAMETERS:
                entry = self._entries.get(f"{module}.{parameter}")
                if entry is None:
                    continue
                parts = [entry] if runs is None else [entry.rows(first, last) for first, last in runs]
                shape = entry.shape if runs is None else (sum(part.shape[0] for part in parts), *entry.shape[1:])
                array, target = self._backend.buffers.allocate(shape, entry.dtype)
                buffers[module][parameter] = array, entry
                offset = 0
                for part in parts:
                    jobs.append((part, target[offset : offset + part.size_bytes], self._descriptor(part.file)))
                    offset += part.size_bytes
        self.bytes_read += sum(part.size_bytes for part, _, _ in jobs)
        return _Loading(buffers, self._reader.submit(_read_all, jobs))

    def wait(self, loading: _Loading) -> dict[str, dict[str, Any]]:
        """The modules of a load once it is done."""
        loading.read.result()
        modules: dict[str, dict[str, Any]] = {}
        for module, parameters in loading.buffers.items():
            modules[module] = {name: self._backend.buffers.finish(array, entry.dtype) for name, (array, entry) in parameters.items()}
            if "scales" in parameters and (quantized := self._spec.quantized_as(module)):
                modules[module]["bits"], modules[module]["group_size"] = quantized
        loading.buffers.clear()
        return modules

    def close(self) -> None:
        """Stop the reader and close the files."""
        self._reader.shutdown(cancel_futures=True)
        self._ahead = self._resident = None
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = open_to_read(file)
        return self._descriptors[file]


def _read_all(jobs: list[tuple[Entry, memoryview, int]]) -> None:
    for part, target, descriptor in jobs:
        read_into(part, target, descriptor)
    jobs.clear()  # a finished future must not keep the buffers alive
