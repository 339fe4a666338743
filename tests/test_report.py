"""The log's exact fields, strict JSON, and what a terminal and a pipe get to see."""

import io
import json
import math
import os
import sys
from typing import Any

import numpy as np
import pytest

from mesp_mlx.errors import UserError
from mesp_mlx.report import Report
from mesp_mlx.units import megabytes

START: dict[str, Any] = {
    "model": "demo",
    "family": "llama",
    "backend": "numpy",
    "method": "mesp",
    "modules": 210,
    "parameters": 2_442_240,
    "adapter_bytes": 9_768_960,
    "rank": 8,
    "effective_scale": 0.5,
    "rows": 135,
    "validation_rows": 15,
    "held_out": True,
    "tokens": 10_000,
    "supervised_share": 0.65,
    "max_seq_length": 256,
    "rows_cut": 0,
    "rows_skipped": 0,
    "rows_per_update": 8,
    "updates": 30,
    "iterations": 60,
}
TRAIN: dict[str, Any] = {
    "iteration": 10,
    "train_loss": 2.25,
    "learning_rate": 2e-5,
    "iterations_per_second": 0.5,
    "tokens_per_second": 312.4,
    "trained_tokens": 3120,
    "peak_memory_bytes": 91_000_000,
}
END: dict[str, Any] = {
    "val_loss_before": 3.0,
    "val_loss_after": 1.5,
    "reply_before": "Hello.",
    "reply_after": "Ahoy!\nMatey.",
    "allocator_peak_bytes": 62_500_000,
    "process_peak_bytes": 140_000_000,
    "predicted_arrays_bytes": 64_000_000,
    "predicted_peak_bytes": 150_000_000,
    "seconds": 185.0,
}


escapes = pytest.mark.skipif(sys.platform == "win32", reason="without a console of its own Windows gets no escape sequences")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(stream: io.StringIO | None = None, log=None) -> str:
    stream = stream or io.StringIO()
    with Report(log, stream) as report:
        report.start(**START)
        report.step(iteration=9, train_loss=1.0, learning_rate=1e-5, tokens_per_second=300, iterations_per_second=0.5, seconds_left=104.0)
        report.train(**TRAIN, seconds_left=100.4, memory_bytes=88_000_000)
        report.validation(10, 2.125)
        report.save(10, "out/adapters.safetensors")
        report.end(**END, prompt='What\'s "up"?', model_folder="/models/my demo", adapter_path="out")
    return stream.getvalue()


def changed(fields: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return fields | changes


def events(path) -> list[dict]:
    def refuse(word):
        raise AssertionError(f"{word} isn't strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_log_has_exactly_the_promised_fields(tmp_path):
    said(log=tmp_path / "log.jsonl")
    start, *rest = events(tmp_path / "log.jsonl")
    assert start == {"event": "start", "predicted_peak_bytes": None} | START
    assert rest == [
        {"event": "train"} | TRAIN,
        {"event": "validation", "iteration": 10, "val_loss": 2.125},
        {"event": "save", "iteration": 10, "path": "out/adapters.safetensors"},
        {"event": "end"} | END,
    ]


def test_every_event_is_in_the_file_at_once(tmp_path):
    log = tmp_path / "log.jsonl"
    with Report(log, io.StringIO()) as report:
        report.validation(0, 3.0)
        assert events(log) == [{"event": "validation", "iteration": 0, "val_loss": 3.0}]


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
def test_what_is_not_a_number_is_null(value, tmp_path):
    with Report(tmp_path / "log.jsonl", io.StringIO()) as report:
        report.validation(1, value)
        report.validation(np.int64(2), np.float32(0.5))  # type: ignore[arg-type]
    assert [(event["iteration"], event["val_loss"]) for event in events(tmp_path / "log.jsonl")] == [(1, None), (2, 0.5)]


def test_a_log_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(UserError, match="--json-log"):
        Report(tmp_path / "absent" / "log.jsonl")
    with pytest.raises(UserError, match="--json-log"):
        Report(tmp_path)


def test_an_older_log_lives_until_the_first_event_and_none_is_left_empty(tmp_path):
    log = tmp_path / "log.jsonl"
    with Report(log, io.StringIO()):
        pass
    assert not log.exists()
    log.write_text("old\n", encoding="utf-8")
    with Report(log, io.StringIO()):
        pass
    assert log.read_text(encoding="utf-8") == "old\n"
    with Report(log, io.StringIO()) as report:
        report.validation(0, 3.0)
    assert [event["event"] for event in events(log)] == ["validation"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux's devices")
def test_devices_take_a_log_or_refuse_it_with_one_message():
    said(log="/dev/null")
    with pytest.raises(UserError, match="writing the log /dev/full: No space left on device; choose another file with --json-log"):
        said(log="/dev/full")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_pipe_or_a_dumb_terminal_gets_plain_lines(stream, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = said(stream())
    assert "\x1b" not in text and "─" not in text
    lines = text.splitlines()
    assert lines == [
        "mesp-mlx finetune",
        "  model     demo (llama) on numpy",
        "  adapter   210 modules, 2,442,240 parameters, 9.8 MB; rank 8, scale 0.5",
        "  data      135 rows, 10,000 tokens, 65% supervised; 15 validation rows held out",
        "  training  60 iterations, 30 updates of 8 rows; rows of up to 256 tokens",
        "iteration 10/60, loss 2.2500, rate 2.00e-05, 312 tokens/s, 1 min 40 s left, memory 88.0 MB, peak 91.0 MB",
        "iteration 10: validation loss 2.1250",
        "iteration 10: saved out/adapters.safetensors",
        "done",
        "  validation loss  3.0000 -> 1.5000 (-50.0%)",
        '  prompt           What\'s "up"?',
        "  reply before     Hello.",
        "  reply after      Ahoy!",
        "                   Matey.",
        "  peak memory      140.0 MB (predicted: 150.0 MB) by the operating system, 62.5 MB (predicted: 64.0 MB) by the allocator",
        "  time             3 min 05 s",
        "use it with mlx-lm:",
        """  mlx_lm.generate --model '/models/my demo' --adapter-path out --prompt 'What'"'"'s "up"?'""",
    ]


@escapes
def test_a_terminal_gets_panels_and_one_live_line_that_is_closed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    text = said(Terminal())
    assert "╭─ mesp-mlx finetune ─" in text and "╭─ done ─" in text
    assert "iteration 9/60, loss 1.0000, rate 1.00e-05, 300 tokens/s, 1 min 44 s left" in text  # between reports: only here
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # cursor hidden once, shown again
    assert text.rindex("\x1b[?25h") < text.index("╭─ done ─")


@escapes
def test_an_error_leaves_the_terminal_as_it_was(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(ZeroDivisionError), Report(None, stream) as report:
        report.train(**TRAIN, seconds_left=100.0)
        raise ZeroDivisionError
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_the_disk_is_spoken_of_where_it_was_waited_for():
    stream = io.StringIO()
    with Report(None, stream) as report:
        report.disk(read_bytes=5_800_000_000, read_seconds=2.0, waited_seconds=0.6, seconds=5.0)
        report.disk(read_bytes=5_800_000_000, read_seconds=2.0, waited_seconds=0.01, seconds=5.0)
        report.disk(read_bytes=0, read_seconds=0.0, waited_seconds=0.0, seconds=5.0)
        report.disk(read_bytes=9_000_000, read_seconds=1.0, waited_seconds=1.0, seconds=5.0)
        report.disk(read_bytes=43_000_000, read_seconds=0.1, waited_seconds=0.05, seconds=5.0)
    assert stream.getvalue().splitlines() == [
        "weights are read at 2.9 GB/s; 12% of the first update was spent waiting for them",
        "weights are read at 0.43 GB/s; 1% of the first update was spent waiting for them",
    ]


def test_a_method_is_named_where_it_is_not_the_usual_one():
    assert "method" not in said()
    stream = io.StringIO()
    with Report(None, stream) as report:
        report.start(**changed(START, method="mebp"))
    assert "  model     demo (llama) on numpy, method mebp\n" in stream.getvalue()


def test_cut_and_skipped_rows_are_one_line_each_and_a_prediction_has_its_place():
    stream = io.StringIO()
    with Report(None, stream) as report:
        report.start(**changed(START, rows_cut=1, rows_skipped=2), predicted_peak_bytes=75_000_000)
    assert "  cut       1 row longer than 256 tokens: see --max-seq-length\n  skipped   2 rows with nothing supervised\n" in stream.getvalue()
    assert "  memory    75.0 MB predicted peak\n" in stream.getvalue()


def test_what_was_not_measured_is_said_to_be(tmp_path):
    stream = io.StringIO()
    with Report(tmp_path / "log.jsonl", stream) as report:
        report.train(**changed(TRAIN, peak_memory_bytes=None), seconds_left=0.0)
        report.end(**changed(dict.fromkeys(END), seconds=3.21))
    assert "tokens/s, 0.0 s left\n" in stream.getvalue()
    assert "validation loss  not measured" in stream.getvalue() and "reply" not in stream.getvalue()
    assert "not measured by the operating system, not counted on NumPy by the allocator" in stream.getvalue()
    assert "3.2 s" in stream.getvalue() and "mlx_lm.generate" not in stream.getvalue()
    assert events(tmp_path / "log.jsonl")[1] == {"event": "end"} | dict.fromkeys(END) | {"seconds": 3.21}


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_reply_cannot_command_the_terminal_or_pass_for_markup(stream, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = stream()
    with Report(None, out) as report:
        report.end(**changed(END, reply_after="\x1b[31mred\x07 [bold]x[/bold] :smile: \u202eoops"))
    assert "\x1b[31m" not in out.getvalue() and "\x07" not in out.getvalue() and "\u202e" not in out.getvalue()
    assert "[bold]x[/bold] :smile:" in out.getvalue()


def test_megabytes_are_ten_to_the_sixth():
    assert [megabytes(n) for n in (0, 62_500_000, 1_818_049_999)] == ["0.0 MB", "62.5 MB", "1,818.0 MB"]
