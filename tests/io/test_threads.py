"""Threads whose end is waited for: an interrupt ends the wait, and the thread still counts as running."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from tierstore.io.runtime import Runtime
from tierstore.io.threads import WaitedThread


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGALRM interrupts the main thread; a test sets the timer."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def wait_interrupted(thread: WaitedThread) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    thread.ends_within(60)


@pytest.mark.usefixtures("interrupts")
def test_a_thread_that_goes_on_after_an_interrupt_has_not_ended() -> None:
    may_end = threading.Event()
    thread = WaitedThread(lambda: may_end.wait(60), "waited")
    assert thread.ends_within(60)  # it was not started
    thread.start()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            wait_interrupted(thread)
        assert not thread.ends_within(0)
    may_end.set()
    assert thread.ends_within(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_started", [True, False])
def test_a_runtime_that_was_interrupted_as_it_started_closes_at_once(
    is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = WaitedThread.start

    def interrupted(thread: WaitedThread) -> None:
        if is_started:
            start(thread)
        raise KeyboardInterrupt

    runtime = Runtime("interrupted", timeout_s=60)
    with monkeypatch.context() as patch:
        patch.setattr(WaitedThread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.start()
    runtime.close(10)
    assert runtime.has_ended
    thread = runtime._thread
    assert thread is not None
    if not is_started:  # the interrupt was faster than the thread
        thread.start()
    assert thread.ends_within(10)


def test_a_runtime_whose_loop_is_closed_by_half_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt has cut the closing of the loop short: its thread has ended, so its users may let go."""
    runtime = Runtime("half").start()
    loop = runtime.loop

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.close()
        assert runtime.has_ended
    runtime.close()
    assert loop.is_closed()
