"""What memory does within a step: the phases of every step, and samples of one, taken by a thread beside the computation.

Both NumPy and MLX let other threads run while they compute, so the samples come through.
"""

import time
from array import array
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

from mesp_mlx.memory import measure
from mesp_mlx.model.model import Model

INTERVAL_SECONDS = 0.005
MOST_POINTS = 600  # of a series that is handed on


class Timeline:
    """Told what a run is doing, it keeps when each phase began; while step number `sampled` (from 0) runs, it samples memory too.

    Attributes:
        phase: the phase that goes on now; None between two steps.
        steps: for each step its phases, as (name, start, end) in seconds since the step began.
    """

    def __init__(self, backend_name: str, sampled: int, interval: float = INTERVAL_SECONDS):
        self.phase: str | None = None
        self.steps: list[list[tuple[str, float, float]]] = []
        self._marks: list[tuple[str, float]] = []
        self._sampled, self._interval = sampled, interval
        self._active = _allocated if backend_name == "mlx" else None
        self._times, self._allocator, self._process = array("d"), array("q"), array("q")
        self._over = Event()
        self._thread: Thread | None = None

    def mark(self, phase: str) -> None:
        """A phase begins, and with it a step if none is going on; nothing changes if it goes on already."""
        if phase == self.phase:
            return
        begins, self.phase = self.phase is None, phase
        self._marks.append((phase, time.perf_counter()))
        if begins and len(self.steps) == self._sampled:
            self._thread = Thread(target=self._watch, name="memory", daemon=True)
            self._thread.start()

    def end_step(self) -> None:
        """The step is over."""
        now = time.perf_counter()
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
        starts = [start for _, start in self._marks]
        spans = zip(self._marks, [*starts[1:], now], strict=True)
        self.steps.append([(name, start - starts[0], end - starts[0]) for (name, start), end in spans])
        self.phase, self._marks = None, []
        if len(self.steps) == self._sampled + 1:
            self._times = array("d", (min(moment, now) - starts[0] for moment in self._times))  # the last is taken just after the end

    def step_seconds(self) -> list[float]:
        """How long each step took."""
        return [phases[-1][2] for phases in self.steps]

    def sampled_step(self) -> dict[str, Any]:
        """The sampled step as JSON values: its number, phases and two series in bytes, the allocator's None on NumPy, which does not count."""
        spans = [{"name": name, "start_seconds": start, "end_seconds": end} for name, start, end in self.steps[self._sampled]]
        series = {"allocator_bytes": thinned(self._allocator) if self._active else None, "process_bytes": thinned(self._process)}
        return {"step": self._sampled, "interval_seconds": self._interval, "phases": spans, "seconds": thinned(self._times, min), **series}

    def _watch(self) -> None:
        self._sample()
        while not self._over.wait(self._interval):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        self._times.append(time.perf_counter())
        self._process.append(measure.process_now_bytes())
        if self._active:
            self._allocator.append(self._active())


def phases(model: Model, method: str, mark: Callable[[str], None], now: Callable[[], str | None]) -> Callable[[str], None]:
    """What a store is to call when it opens a stage: it tells `mark` the phase that begins with it, where one does. `now` gives the phase that goes on.

    Whole-graph autodiff opens all stages first and computes after the last, the head: nothing tells its forward from its backward.
    """
    forward, head = ("build", "forward and backward, one graph") if method == "backprop" else ("forward", "head")

    def watch(stage: str) -> None:
        if stage == model.embedding.name:
            mark(forward)
        elif stage == model.head.name:
            mark(head)
        elif now() == "head":
            mark("backward")

    return watch


def thinned(values: Sequence[Any], of_each: Any = max, most: int = MOST_POINTS) -> list[Any]:
    """At most so many values: neighbours become one, their largest (or what `of_each` makes of them), so that no peak is lost."""
    width = -(-len(values) // most) or 1
    return [of_each(values[start : start + width]) for start in range(0, len(values), width)]


def _allocated() -> int:
    import mlx.core as mx

    return mx.get_active_memory()
