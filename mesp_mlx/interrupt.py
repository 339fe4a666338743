"""Ctrl-C and a request to terminate end a run at a point where what is saved is whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupts:
    """While entered, both signals raise KeyboardInterrupt; inside `held` they wait until its end."""

    def __init__(self) -> None:
        self._holding = self._pending = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, *_: object) -> None:
        if self._holding:
            self._pending = True
        else:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put off an interruption until the block is done: an update is applied, or a file is written, whole or not at all."""
        already, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = already
        if self._pending and not already:
            self._pending = False
            raise KeyboardInterrupt
