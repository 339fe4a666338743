"""The pictures: that they come out whole, and that no process which trains carries what draws them. Whether they are clear, only eyes can tell."""

import struct

import pytest
from test_imports import LOADED, run

from mesp_mlx import plots
from mesp_mlx.config import VARIANTS

MB = 1_000_000


def png_size(file):
    """Width and height in pixels, from the header."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def step(*phases, allocator=True):
    spans = [{"name": name, "start_seconds": i / 10, "end_seconds": (i + 1) / 10} for i, name in enumerate(phases)]
    process = [100 * MB, 180 * MB, 120 * MB]
    return {"phases": spans, "seconds": [0.0, 0.05, 0.1], "process_bytes": process, "allocator_bytes": [40 * MB, 90 * MB, 50 * MB] if allocator else None}


@pytest.fixture
def figures(monkeypatch):
    """The pictures saved meanwhile."""
    from matplotlib.figure import Figure

    found, inner = [], Figure.savefig

    def savefig(figure, *given, **named):
        inner(figure, *given, **named)
        found.append(figure)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return found


@pytest.fixture
def texts(figures):
    """Gives every text of those pictures."""
    from matplotlib.text import Text

    return lambda: [text.get_text() for figure in figures for text in figure.findobj(Text)]


def test_each_method_and_phase_has_a_colour_of_its_own():
    assert set(VARIANTS) == set(plots.COLOURS) and len(set(plots.COLOURS.values())) == len(VARIANTS)
    assert len(set(plots.PHASES.values())) == len(plots.PHASES)


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("allocator", [True, False])
def test_timelines(tmp_path, texts, count, allocator):
    names = list(VARIANTS)[:count]
    steps = {name: step("forward", "head", "backward", "update", allocator=allocator) for name in names}
    plots.timelines(steps, dict.fromkeys(names, 60 * MB), "a title", tmp_path / "a.png")
    assert min(png_size(tmp_path / "a.png")) > 300
    assert {"a title", *names, "forward", "head", "backward", "update", "180 MB", "memory, MB", "time within the step, s"} <= set(texts())
    assert ("arrays, by the allocator" in texts()) == allocator


def test_a_phase_too_short_to_see_is_not_in_the_legend(tmp_path, texts):
    drawn = step("build", "forward and backward, one graph", "update")
    drawn["phases"][0]["end_seconds"] = drawn["phases"][1]["start_seconds"] = 1e-5
    plots.timelines({"backprop": drawn}, {"backprop": MB}, "a title", tmp_path / "a.png")
    assert "build" not in texts() and texts().count("forward and backward, one graph") == 2 and "update" in texts()


@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_nothing_is_cut_or_written_over(tmp_path, figures, count):
    """The highest point lies under a name written across its phase, and at the step's end."""
    names = list(VARIANTS)[:count]
    drawn = step("build", "forward and backward, one graph", "head", "backward", "forward", "update")
    for phase, end in zip(drawn["phases"], (0.5, 3.1, 3.25, 3.5, 4.5, 5.0), strict=True):
        phase["end_seconds"] = end
    for before, after in zip(drawn["phases"], drawn["phases"][1:], strict=False):
        after["start_seconds"] = before["end_seconds"]
    drawn["seconds"] = [0.0, 3.4, 5.0]
    last = drawn | {"process_bytes": [100 * MB, 120 * MB, 180 * MB]}
    title = "Memory within update 11 of 20: an-organisation/a-model-with-a-long-name-0.5B-Instruct-4bit, 4 rows per update"
    plots.timelines(dict.fromkeys(names, drawn) | {names[-1]: last}, dict.fromkeys(names, 60 * MB), title, tmp_path / "a.png")
    (figure,) = figures
    (legend,) = figure.legends
    for whole in (legend, figure._suptitle):
        box = whole.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height
    for axes in figure.axes[:count]:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) >= 5 and {text.get_rotation() for text in axes.texts} == {0, 90}
        assert not any(one.overlaps(other) for place, one in enumerate(boxes) for other in boxes[:place])
        assert all(box.x0 >= axes.bbox.x0 - 1 and box.x1 <= axes.bbox.x1 + 1 and box.y1 <= axes.bbox.y1 for box in boxes)


@pytest.mark.parametrize("allocator", [70 * MB, None])
def test_peaks(tmp_path, texts, allocator):
    sizes = {name: {"base_bytes": 60 * MB, "process_peak_bytes": 1_234_500_000, "allocator_peak_bytes": allocator} for name in ("mesp", "mezo")}
    plots.peaks(sizes, "a title", tmp_path / "a.png")
    assert min(png_size(tmp_path / "a.png")) > 300
    assert {"a title", "mesp", "mezo", "peak memory, MB", "1,234.5 MB, 1,174.5 above its base"} <= set(texts())
    assert ("70.0 MB of arrays" in texts()) == (allocator is not None)


def test_curves_of_any_names_and_length(tmp_path, texts):
    x = list(range(1, 500))
    plots.curves({"mesp": (x, x), "another": (x, x), "short": ([1], [2.5])}, "a title", "iteration", "loss", tmp_path / "a.png")
    assert min(png_size(tmp_path / "a.png")) > 300
    assert {"a title", "iteration", "loss", "mesp", "another", "short"} <= set(texts())


def test_a_process_that_trains_does_not_load_what_draws():
    loaded = set(run(f"import sys, mesp_mlx.finetune, mesp_mlx.compare_child, mesp_mlx.cli{LOADED}"))
    assert "mesp_mlx" in loaded and "matplotlib" not in loaded
