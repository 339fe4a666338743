"""What a layer takes whose backward is autodiff's of mlx-lm's own code: that code says nothing of the arrays that it makes, so they are measured.

One layer of each kind runs forward and backward on drawn numbers, at a few lengths, before a run is planned. Operations wait for one another meanwhile, so that
the allocator counts what must exist at once, and the same each time. A curve through these sizes says what other lengths take.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

LENGTHS = (64, 128, 256)  # tokens of the rows that are tried; shorter where the model knows no such positions
TRIES, TRIED_SECONDS = 3, 1.0
SIGNIFICANT = 0.02  # of the size at the longest row: a square that adds less is taken for a part of the line


class Curve(NamedTuple):
    """Bytes of some rows of T positions: base + rows * (line * T + square * T²)."""

    base: float
    line: float
    square: float = 0.0

    def bytes(self, rows: int, width: int) -> int:
        return int(self.base + rows * (self.line * width + self.square * width * width))


class Fit(NamedTuple):
    """What a kind of layer takes.

    Attributes:
        state: what lies before it.
        fresh: that part of it which is not passed on as it lay before the layer below.
        forward, backward: what is made, and given, where operations wait for one another.
        ahead: how much more, of what backward makes, it takes where none waits.
    """

    kind: str
    state: Curve
    fresh: Curve
    forward: Curve
    backward: Curve
    ahead: float

    @property
    def grows_with_the_square(self) -> bool:
        return max(curve.square for curve in (self.state, self.forward, self.backward)) > 0


class Tried(NamedTuple):
    """A layer set up with a row of so many positions: the bytes of its state, fresh ones apart too, and calls that give what to evaluate."""

    state_bytes: int
    fresh_bytes: int
    forward: Callable[[], Any]
    backward: Callable[[], Any]


def fit(kind: str, at: Callable[[int], Tried], lengths: Sequence[int] = LENGTHS) -> Fit:
    """Measure a layer at some lengths, each of which `at` sets up, with everything that a step gives a stage evaluated."""
    found: list[tuple[int, int, int, int]] = []
    ahead = 0.0
    for length in lengths:
        tried = at(length)
        found.append((tried.state_bytes, tried.fresh_bytes, _least(tried.forward), _least(tried.backward)))
        if length == max(lengths):
            ahead = max(0.0, peak_bytes(tried.backward, waits=False) / max(1, found[-1][-1]) - 1)
        del tried
    state, fresh, forward, backward = (through(lengths, sizes) for sizes in zip(*found, strict=True))
    return Fit(kind, state, fresh, forward, backward, ahead)


def through(lengths: Sequence[int], sizes: Sequence[float]) -> Curve:
    """The line that is nowhere below the sizes; or, of three lengths or more, the parabola through them where its square is significant."""
    import numpy as np  # here: settings import this file, and need no numbers

    x, y = np.array(lengths, float), np.array(sizes, float)
    if len(x) > 2:
        square, line, base = np.polyfit(x, y, 2)
        if square * x.max() ** 2 > SIGNIFICANT * y.max():
            if line < 0:
                square, line, base = _without_line(x, y)
            return Curve(_covering(base, y - line * x - square * x * x), float(line), float(square))
    line = max(0.0, np.polyfit(x, y, 1)[0]) if len(x) > 1 else y[0] / x[0]
    base = y - line * x
    return Curve(_covering(base.min(), base), float(line))


def peak_bytes(run: Callable[[], Any], waits: bool = True) -> int:
    """The most that the allocator holds beyond what it holds already, while what a call gives is evaluated; waits: with no operation ahead of another."""
    import mlx.core as mx

    gc.collect()
    mx.synchronize()  # what is let go is still counted until the operation that used it has ended
    before, limit = mx.get_active_memory(), mx.set_memory_limit(0 if waits else 1 << 50)
    mx.reset_peak_memory()
    try:
        result = run()
        mx.eval(result)
        return mx.get_peak_memory() - before
    finally:
        mx.set_memory_limit(limit)


def _least(run: Callable[[], Any]) -> int:
    """The least of some tries: a buffer that is given back late makes a peak larger. Of what takes long the first try must do."""
    started, sizes = time.perf_counter(), []
    while len(sizes) < TRIES and time.perf_counter() - started < TRIED_SECONDS:
        sizes.append(peak_bytes(run))
    return min(sizes)


def each(kinds: Mapping[Any, str], layers: Sequence[Any], at: Callable[[int, int], Tried], lengths: Sequence[int] = LENGTHS) -> tuple[Fit, ...]:
    """The fit of each layer, measured once for each kind.

    Args:
        kinds: a name for each kind.
        layers: the kind of each layer.
        at: sets up a layer, by its number, at a length.
    """
    fits = {kind: fit(name, partial(at, layers.index(kind)), lengths) for kind, name in kinds.items()}
    return tuple(fits[kind] for kind in layers)


def _without_line(x: "np.ndarray", y: "np.ndarray") -> tuple[float, float, float]:
    import numpy as np

    square, base = np.polyfit(x * x, y, 1)
    return float(square), 0.0, float(base)


def _covering(base: float, rest: "np.ndarray") -> float:
    """A base with which the curve is nowhere below."""
    return max(0.0, float(base), float(rest.max()))
