"""A child process answers, fails and is interrupted as if its work were done here."""

import os
import signal
import sys
import threading
import time

import pytest

from mesp_mlx import child
from mesp_mlx.errors import UserError

SERVER = """
import sys, time
from pathlib import Path
from mesp_mlx import child
from mesp_mlx.errors import UserError

def serve(request):
    print("chatter")
    if "refuse" in request:
        raise UserError(request["refuse"])
    if "crash" in request:
        sys.exit("noise\\nout of luck")
    if "started" in request:
        Path(request["started"]).touch()
        try:
            time.sleep(60)
        finally:
            Path(request["cleaned"]).touch()
    return {"twice": 2 * request["number"]}

if __name__ == "__main__":
    child.answer(serve)
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "server_of_this_test.py").write_text(SERVER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "server_of_this_test"


def test_an_answer_comes_back_alone(server):
    assert child.ask(server, {"number": 21}, "doubling") == {"twice": 42}


def test_a_refusal_is_the_users_error_here(server):
    with pytest.raises(UserError, match="^write it otherwise$"):
        child.ask(server, {"refuse": "write it otherwise"}, "doubling")


def test_a_crash_says_what_was_being_done(server):
    with pytest.raises(UserError, match="^doubling failed: out of luck"):
        child.ask(server, {"crash": True}, "doubling")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to send")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_of_the_parent_alone_lets_the_child_clean_up(server, tmp_path, number):
    started, cleaned = tmp_path / "started", tmp_path / "cleaned"

    def interrupt():
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.default_int_handler)  # SIGINT is ignored where the tests run in the background
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            child.ask(server, {"started": str(started), "cleaned": str(cleaned)}, "doubling")
    finally:
        signal.signal(number, before)
    assert cleaned.exists()
