"""A signal to end, and what comes after it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from shardrec.launch import stop
from shardrec.launch.stop import RunStopped, StopRequest


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """As in a shell's foreground: what a shell starts in the background ignores Ctrl-C, and so do its children."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_is_a_request_and_a_later_one_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: clock[0])
    with StopRequest() as request:
        assert not request.made
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.made
        clock[0] += 0.5
        os.kill(os.getpid(), signal.SIGINT)  # the same request: a terminal and a launcher both send one
        clock[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_and_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    handled = signal.getsignal(signal.SIGTERM)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGINT)
            assert not request.made
            assert signal.getsignal(signal.SIGTERM) is not handled
        assert signal.getsignal(signal.SIGTERM) is handled
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_of_the_main_thread_nothing_is_handled() -> None:
    found = []

    def enter() -> None:
        with StopRequest():
            found.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_saved_run_is_an_interrupted_one() -> None:
    assert issubclass(RunStopped, KeyboardInterrupt)
    stopped = RunStopped(3, "here")
    assert (stopped.step, stopped.folder) == (3, "here")
