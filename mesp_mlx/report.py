"""What a run prints and writes: panels and a live line on a terminal, plain lines elsewhere, and one JSON object per event.

Nothing here computes; the run hands over what it measured. Sizes come in bytes and are printed in MB = 10^6 bytes.
"""

import contextlib
import json
import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mesp_mlx.errors import UserError
from mesp_mlx.units import megabytes

WAITED_SHARE, MEASURED_BYTES = 0.01, 10_000_000  # waited for in the first update, and read in it: less is not worth a line


def console(stream: TextIO | None = None) -> Console:
    """Where to print: rich on a terminal, plain lines elsewhere."""
    out: TextIO = stream or sys.stdout
    return Console(file=out, force_terminal=out.isatty() and os.environ.get("TERM") != "dumb", markup=False, highlight=False, emoji=False)


class Report:
    """One run's voice. A context manager, so that an error finds the terminal as it was.

    json_log: file for the events, or None. Raises UserError if it can't be written; an older log is replaced by the first event.
    """

    def __init__(self, json_log: str | Path | None = None, stream: TextIO | None = None):
        self._console = console(stream)
        self._is_terminal = self._console.is_terminal
        self._live: Live | None = None
        self._iterations = 0
        self._memory = ""  # as last measured
        self._log = None
        if json_log is not None:
            self._is_new_log = not os.path.exists(json_log)
            try:
                self._log = open(json_log, "a", encoding="utf-8", newline="\n")  # noqa: SIM115  (closed by __exit__)
            except OSError as error:
                raise UserError(f"opening the log {json_log}: {error.strerror}; choose another file with --json-log") from None
            self._log_is_empty = True

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_live()
        if self._log is not None:
            with contextlib.suppress(OSError):  # closing tries again what could not be written
                self._log.close()
            if self._log_is_empty and self._is_new_log:  # nothing happened: leave nothing behind
                os.unlink(self._log.name)

    def note(self, text: str) -> None:
        """A line of its own, above the live one."""
        self._console.print(Text(_printable(text)), soft_wrap=True)

    def panel(self, event: str, title: str, lines: dict[str, str], fields: dict[str, Any]) -> None:
        """An event: its fields for the log, and lines by name for people."""
        self._write(event, fields)
        self._panel(title, lines)

    def start(
        self,
        *,
        model: str,
        family: str,
        backend: str,
        method: str = "mesp",
        modules: int,
        parameters: int,
        adapter_bytes: int,
        rank: int,
        effective_scale: float,
        rows: int,
        validation_rows: int,
        held_out: bool,
        tokens: int,
        supervised_share: float,
        max_seq_length: int,
        rows_cut: int,
        rows_skipped: int,
        rows_per_update: int,
        updates: int,
        iterations: int,
        predicted_peak_bytes: int | None = None,
    ) -> None:
        """What is about to happen.

        tokens and supervised_share (0 to 1) are of one pass over the training rows, after cutting; held_out says that the
        validation rows were taken from the training file.
        """
        event = {key: value for key, value in locals().items() if key != "self"}
        self._iterations = iterations
        self._write("start", event)
        valid = f"{_count(validation_rows, 'validation row')}{' held out' if held_out else ''}"
        pace = f"{_count(iterations, 'iteration')}, {_count(updates, 'update')} of {_count(rows_per_update, 'row')}"
        panel = {
            "model": f"{model} ({family}) on {backend}" + ("" if method == "mesp" else f", method {method}"),
            "adapter": f"{_count(modules, 'module')}, {_count(parameters, 'parameter')}, {megabytes(adapter_bytes)}; rank {rank}, scale {effective_scale:g}",
            "data": f"{_count(rows, 'row')}, {_count(tokens, 'token')}, {supervised_share:.0%} supervised; {valid}",
            "training": f"{pace}; rows of up to {max_seq_length:,} tokens",
        }
        if rows_cut:
            panel["cut"] = f"{_count(rows_cut, 'row')} longer than {max_seq_length:,} tokens: see --max-seq-length"
        if rows_skipped:
            panel["skipped"] = f"{_count(rows_skipped, 'row')} with nothing supervised"
        if predicted_peak_bytes is not None:
            panel["memory"] = f"{megabytes(predicted_peak_bytes)} predicted peak"
        self._panel("mesp-mlx finetune", panel)

    def disk(self, *, read_bytes: int, read_seconds: float, waited_seconds: float, seconds: float) -> None:
        """How fast weights were read in the first update, which took `seconds`. Said where that was waited for, and enough was read to tell."""
        if read_bytes >= MEASURED_BYTES and (share := waited_seconds / seconds) >= WAITED_SHARE:
            self.note(f"weights are read at {read_bytes / read_seconds / 1e9:.2g} GB/s; {share:.0%} of the first update was spent waiting for them")

    def step(
        self, *, iteration: int, train_loss: float, learning_rate: float, tokens_per_second: float, iterations_per_second: float, seconds_left: float
    ) -> None:
        """Refresh the live line between two reports. Prints and writes nothing elsewhere."""
        if self._is_terminal:
            self._progress(iteration, train_loss, learning_rate, tokens_per_second, seconds_left)

    def train(
        self,
        *,
        iteration: int,
        train_loss: float,
        learning_rate: float,
        iterations_per_second: float,
        tokens_per_second: float,
        trained_tokens: int,
        peak_memory_bytes: int | None,
        seconds_left: float,
        memory_bytes: int | None = None,
    ) -> None:
        """A report every few iterations: the mean loss since the last one, and the rate of the last update.

        What is left, and memory_bytes, now, are only printed.
        """
        event = {key: value for key, value in locals().items() if key not in ("self", "seconds_left", "memory_bytes")}
        self._write("train", event)
        sizes = {"memory": memory_bytes, "peak": peak_memory_bytes}
        self._memory = ", ".join(f"{name} {megabytes(size)}" for name, size in sizes.items() if size is not None)
        self._progress(iteration, train_loss, learning_rate, tokens_per_second, seconds_left)

    def validation(self, iteration: int, val_loss: float) -> None:
        self._write("validation", {"iteration": iteration, "val_loss": val_loss})
        self.note(f"iteration {iteration}: validation loss {val_loss:.4f}")

    def save(self, iteration: int, path: str | Path) -> None:
        self._write("save", {"iteration": iteration, "path": str(path)})
        self.note(f"iteration {iteration}: saved {path}")

    def end(
        self,
        *,
        val_loss_before: float | None,
        val_loss_after: float | None,
        reply_before: str | None,
        reply_after: str | None,
        allocator_peak_bytes: int | None,
        process_peak_bytes: int | None,
        predicted_arrays_bytes: int | None = None,
        predicted_peak_bytes: int | None = None,
        seconds: float,
        prompt: str | None = None,
        model_folder: str | Path | None = None,
        adapter_path: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """What came of it. None is said as not measured; model_folder is the one mlx-lm needs (the converted one, if it was converted)."""
        event = {key: value for key, value in locals().items() if key not in ("self", "prompt", "model_folder", "adapter_path", "trust_remote_code")}
        self._write("end", event)
        self._close_live()
        rows = {"validation loss": _change(val_loss_before, val_loss_after)}
        if reply_after is not None:
            rows |= {"prompt": prompt or "", "reply before": reply_before or "(nothing)", "reply after": reply_after or "(nothing)"}
        allocator = "not counted on NumPy" if allocator_peak_bytes is None else megabytes(allocator_peak_bytes)
        process = "not measured" if process_peak_bytes is None else megabytes(process_peak_bytes)
        if allocator_peak_bytes is not None and predicted_arrays_bytes is not None:
            allocator += f" (predicted: {megabytes(predicted_arrays_bytes)})"
        if predicted_peak_bytes is not None:
            process += f" (predicted: {megabytes(predicted_peak_bytes)})"
        rows["peak memory"] = f"{process} by the operating system, {allocator} by the allocator"
        rows["time"] = duration(seconds)
        self._panel("done", rows)
        if model_folder is not None and adapter_path is not None:
            self.note("use it with mlx-lm:")
            asked = (f" --prompt {shlex.quote(prompt)}" if prompt else ' --prompt "…"') + " --trust-remote-code" * trust_remote_code
            self.note(f"  mlx_lm.generate --model {shlex.quote(str(model_folder))} --adapter-path {shlex.quote(str(adapter_path))}{asked}")

    def _progress(self, iteration: int, loss: float, rate: float, tokens_per_second: float, seconds_left: float) -> None:
        parts = [f"iteration {iteration}/{self._iterations}", f"loss {loss:.4f}", f"rate {rate:.2e}", f"{tokens_per_second:,.0f} tokens/s"]
        parts += [f"{duration(seconds_left)} left", self._memory]
        line = Text(", ".join(part for part in parts if part), no_wrap=True, overflow="ellipsis")
        if not self._is_terminal:
            self._console.print(line, soft_wrap=True)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def _panel(self, title: str, rows: dict[str, str]) -> None:
        if self._is_terminal:
            table = Table.grid(padding=(0, 2))
            for name, value in rows.items():
                table.add_row(Text(name, style="bold"), Text(_printable(value)))
            self._console.print(Panel(table, title=title, title_align="left", expand=False))
            return
        width = max(len(name) for name in rows)
        self.note(title)
        for name, value in rows.items():
            self.note(f"  {name:<{width}}  " + value.replace("\n", "\n" + " " * (width + 4)))

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if self._log is None:
            return
        line = json.dumps({"event": event} | {key: _plain(value) for key, value in fields.items()}, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            if self._log_is_empty and os.path.isfile(self._log.name):  # a device or a pipe has nothing to cut
                self._log.truncate(0)
            self._log_is_empty = False
            self._log.write(line)
            self._log.flush()
        except OSError as error:
            raise UserError(f"writing the log {self._log.name}: {error.strerror}; choose another file with --json-log") from None

    def _close_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _plain(value: Any) -> Any:
    """A JSON value: arrays of one number become the number, and what is not a number becomes null."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _printable(text: str) -> str:
    """Text without the control characters that a model's reply could move a terminal's cursor with."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _count(n: int, thing: str) -> str:
    return f"{n:,} {thing}" + ("" if n == 1 else "s")


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "not measured"
    return f"{before:.4f} -> {after:.4f}" + (f" ({(after - before) / before:+.1%})" if before else "")


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
