"""Ctrl-C and SIGTERM end a run between two whole things, never within one."""

import signal
import threading

import pytest

from mesp_mlx.interrupt import Interrupts

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers():
    """The handlers that were there must be there afterwards."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_interrupts(number):
    after = []
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(number)
        after.append("still running")
    assert not after


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_until_what_is_held_is_whole(number):
    events = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.held():
            signal.raise_signal(number)
            events.append("written whole")
        events.append("still running")
    assert events == ["written whole"]


def test_many_signals_are_one_interruption():
    interrupts = Interrupts()
    with interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            for number in SIGNALS * 2:
                signal.raise_signal(number)
        with interrupts.held():
            pass  # as the adapter is saved after an interruption: the signals before it are done with


def test_nothing_is_held_before_or_after():
    with Interrupts() as interrupts:
        with interrupts.held():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with interrupts.held():
            pass


def test_what_is_held_within_another_does_not_let_go():
    events = []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.held():
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
                events.append("inner")
            signal.raise_signal(signal.SIGINT)
            events.append("outer")
        events.append("still running")
    assert events == ["inner", "outer"]


def test_an_error_in_what_is_held_is_the_one_raised():
    with Interrupts() as interrupts:
        with pytest.raises(OSError, match="full"), interrupts.held():
            signal.raise_signal(signal.SIGINT)
            raise OSError("full")
        with pytest.raises(KeyboardInterrupt):  # and no signal is swallowed from then on
            signal.raise_signal(signal.SIGINT)


def test_other_handlers_come_back():
    """Also the system's own, and one that the program before had set."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("theirs"))
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGTERM) != before
        signal.raise_signal(signal.SIGTERM)
        assert seen == ["theirs"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_no_handler_is_set():
    """Python allows none there: the run goes on without."""
    done, before = [], signal.getsignal(signal.SIGINT)

    def work():
        with Interrupts() as interrupts, interrupts.held():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [before]
