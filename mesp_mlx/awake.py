"""A long run must not fall asleep with the laptop it runs on."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

CAFFEINATE = ("caffeinate", "-i", "-w")  # holds off idle sleep, until the process of this number ends


@contextmanager
def awake(platform: str = sys.platform, command: Sequence[str] = CAFFEINATE) -> Iterator[None]:
    """While entered, macOS does not go to sleep for want of a user (a closed lid is stronger). Elsewhere, or where that can't be had, nothing happens."""
    holder = None
    if platform == "darwin":
        with suppress(OSError):
            quiet = subprocess.DEVNULL
            holder = subprocess.Popen([*command, str(os.getpid())], stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        if holder is not None:
            holder.kill()
            holder.wait()
