"""A step's phases and the memory sampled beside them, held against arrays of a known size."""

import mmap
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from backends import needs_mlx

from mesp_mlx.memory.timeline import MOST_POINTS, Timeline, phases, thinned

ARRAY = 100_000_000  # bytes


def test_phases_follow_one_another():
    timeline = Timeline("numpy", sampled=7)
    for _ in range(3):
        for phase in ("forward", "forward", "head", "backward", "backward", "update"):
            timeline.mark(phase)
        assert timeline.phase == "update"
        timeline.end_step()
        assert timeline.phase is None
    assert [[name for name, _, _ in step] for step in timeline.steps] == [["forward", "head", "backward", "update"]] * 3
    for step, seconds in zip(timeline.steps, timeline.step_seconds(), strict=True):
        assert step[0][1] == 0 and step[-1][2] == seconds
        assert all(end == start for (_, _, end), (_, start, _) in zip(step, step[1:], strict=False))
        assert all(start <= end for _, start, end in step)


def test_a_phase_may_come_again():
    timeline = Timeline("numpy", sampled=7)
    for phase in ("forward", "head", "forward", "head", "update"):
        timeline.mark(phase)
    timeline.end_step()
    assert [name for name, _, _ in timeline.steps[0]] == ["forward", "head", "forward", "head", "update"]


@pytest.mark.parametrize(
    "method, opened, wanted",
    [
        ("mesp", "e a b h b a", "forward head backward"),
        ("mezo", "e a b h e a b h", "forward head forward head"),
        ("backprop", "e a b h", "build forward and backward, one graph"),
    ],
)
def test_phases_by_the_stages_that_open(method, opened, wanted):
    model: Any = SimpleNamespace(embedding=SimpleNamespace(name="e"), head=SimpleNamespace(name="h"))
    found: list[str] = []
    watch = phases(model, method, found.append, lambda: found[-1] if found else None)
    for stage in opened.split():
        watch(stage)
    assert " ".join(found) == wanted


def more_samples(timeline, count=3):
    """Wait until so many more were taken."""
    wanted, given_up = len(timeline._times) + count, time.monotonic() + 30
    while len(timeline._times) < wanted and time.monotonic() < given_up:
        time.sleep(0.001)


def mapped(size_bytes):
    """An array whose memory comes from the system and goes back to it, whatever the C library keeps of what other tests freed."""
    array = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    array[:] = 1
    return array


def test_only_the_step_asked_for_is_sampled():
    timeline = Timeline("numpy", sampled=1)
    counts, kept = [], []
    for step in range(3):
        for phase in ("forward", "head", "update"):
            timeline.mark(phase)
            if phase == "head":
                kept.append(mapped(ARRAY))
            if step == 1:
                more_samples(timeline)
            kept.clear()
        timeline.end_step()
        counts.append(len(timeline._times))
    assert counts[0] == 0 and counts[1] == counts[2] > 9
    found = timeline.sampled_step()
    assert found["step"] == 1 and found["allocator_bytes"] is None
    times, sizes = found["seconds"], found["process_bytes"]
    assert len(times) == len(sizes) == counts[1] and times == sorted(times)
    assert times[0] >= 0 and times[-1] == timeline.step_seconds()[1], "none lies outside the step, and one at its end"
    spans = {phase["name"]: (phase["start_seconds"], phase["end_seconds"]) for phase in found["phases"]}
    assert list(spans) == ["forward", "head", "update"]
    forward, head, update = ([size for moment, size in zip(times, sizes, strict=True) if start <= moment <= end] for start, end in spans.values())
    assert max(head) - min(forward) == pytest.approx(ARRAY, rel=0.05) and max(head) - min(update) == pytest.approx(ARRAY, rel=0.05)


@needs_mlx
def test_mlxs_own_count_is_sampled_too():
    import mlx.core as mx

    timeline = Timeline("mlx", sampled=0)
    before = mx.get_active_memory()
    timeline.mark("forward")
    held = mx.zeros(ARRAY // 4)
    mx.eval(held)
    more_samples(timeline)
    del held
    timeline.mark("update")
    timeline.end_step()
    found = timeline.sampled_step()
    assert len(found["allocator_bytes"]) == len(found["seconds"])
    assert max(found["allocator_bytes"]) - before == pytest.approx(ARRAY, abs=1000)


def test_a_thinned_series_keeps_its_peaks():
    values = [0] * 10_000
    values[7_777] = 5
    thin = thinned(values)
    assert len(thin) <= MOST_POINTS and max(thin) == 5 and sum(thin) == 5
    assert thin.index(5) == 7_777 // 17  # 17 in one make 589
    assert thinned([3, 1, 2]) == [3, 1, 2] and thinned([]) == []
    assert thinned(range(6), min, most=2) == [0, 3]
