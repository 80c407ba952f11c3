"""Ctrl-C as a wish: the step in flight ends and is committed before the program does.

Scope: the handlers of SIGINT, SIGTERM and SIGHUP while a command runs.
Not here: what stopping means (`apps/train.py`).
Owner: the main thread, for the duration of a `with` block; elsewhere nothing is installed.

[Note: leaving at once] An exception raised by a handler comes up wherever the main thread is: in the middle of an
import, or in a weakref callback, where it is printed and lost. A store survives a kill at any moment, so a handler that
stops at once says its sentence and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"  # the live line hides it


class StopRequest:
    """Keeps the first signal for a loop to see; a second one, or one outside the loop, acts at once.

    Args:
        leave: ends the process with this exit code; a seam for tests. See [Note: leaving at once].
        rank, ranks: of several ranks each gets the signal, and the first one speaks, when all agree (`announce`).

    Attributes:
        signal_number: the signal that the loop shall see, or None.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit, *, rank: int = 0, ranks: int = 1) -> None:
        self.signal_number: signal.Signals | None = None
        self._leave = leave
        self._speaks = rank == 0
        self._is_alone = ranks == 1
        self._can_wait = False
        self._is_announced = False
        self._last_words = "interrupted before training began"
        self._until = "this step"
        self._previous: dict[signal.Signals, Any] = {}
        self._terminal = Terminal()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextlib.contextmanager
    def wished(self, kept: str) -> Iterator[None]:
        """In here a first signal is a wish; `kept` says what remains when the process ends at once, here or later."""
        self.expect("this step", kept)
        self._can_wait = True
        try:
            yield
        except BaseException:
            # The launcher stops the ranks that are left when one ends: they are on their way, with something to say.
            self._can_wait = not self._is_alone
            raise
        self._can_wait = False

    def expect(self, until: str, kept: str) -> None:
        """From here on `until` is done before a wish is heard, and `kept` remains when the process ends at once."""
        self._until, self._last_words = until, f"interrupted at once; {kept}"

    def announce(self) -> None:
        """Say, once, that a wish was heard."""
        words = _line(f"stopping after {self._until}; Ctrl-C again stops at once")
        with contextlib.suppress(OSError):
            if self._speaks and not self._is_announced:
                self._is_announced = True  # from here on to the call no handler runs
                os.write(2, words)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        wish = signal.Signals(number)
        if wish is signal.SIGHUP:
            self._terminal.let_go()
        if self._can_wait and self.signal_number is None:
            self.signal_number = wish
            if self._is_alone:
                self.announce()
            return
        if self.signal_number is not None and self._is_alone:
            self.announce()  # this one may have come upon the first before that had spoken
        if self._speaks:
            with contextlib.suppress(OSError):
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)
            say_at_once(self._last_words)
        self._leave(128 + number)


class Terminal:
    """What a process says to its terminal, until that is gone: from then on writing there would be an error."""

    def __init__(self) -> None:
        self._descriptors = [number for number in (1, 2) if os.isatty(number)]

    def let_go(self) -> None:
        """It has gone: nothing more is said there."""
        with contextlib.suppress(OSError):
            let_go(*self._descriptors)


def let_go(*descriptors: int) -> None:
    """What is written there from now on goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in descriptors:
        os.dup2(nowhere, number)
    os.close(nowhere)


def say_at_once(sentence: str) -> None:
    """A sentence on the error stream, from a handler of a signal.

    Not by print or rich: the main thread may be in the middle of either, and neither can be entered twice.
    """
    with contextlib.suppress(OSError):
        os.write(2, _line(sentence))


def _line(sentence: str) -> bytes:
    start = "\n" if os.isatty(2) else ""
    return f"{start}tierstore: {sentence}\n".encode()
