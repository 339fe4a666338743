"""A run holds off idle sleep while it lasts, and never fails for it."""

import os
import subprocess
import sys
import time

import pytest

from mesp_mlx.awake import CAFFEINATE, awake

STANDS_FOR = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:])); time.sleep(60)"


def test_apple_s_program_is_asked_until_this_process_ends():
    assert CAFFEINATE == ("caffeinate", "-i", "-w")


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_child_lasts_as_long_as_the_block(tmp_path, error, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **named: started.append(popen(*given, **named)) or started[-1])
    told = tmp_path / "told"
    try:
        with awake("darwin", (sys.executable, "-c", STANDS_FOR, str(told), "-i", "-w")):
            while not told.exists() or not told.read_text():
                time.sleep(0.01)
            (child,) = started
            assert child.poll() is None and told.read_text() == f"-i -w {os.getpid()}"
            if error:
                raise error
    except KeyboardInterrupt:
        assert error
    assert child.returncode is not None


def test_elsewhere_nothing_is_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    for platform in ("linux", "win32"):
        with awake(platform):
            pass


def test_a_program_that_is_missing_or_ends_at_once_stops_nothing(tmp_path):
    ran = []
    for command in ((str(tmp_path / "absent"),), (sys.executable, "-c", "raise SystemExit(1)")):
        with awake("darwin", command):
            ran.append(command)
    assert len(ran) == 2
