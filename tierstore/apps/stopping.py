"""Ctrl-C as a request to stop: the step in flight ends and is committed before the program ends.

Scope: the handlers of SIGINT, SIGTERM and SIGHUP while a command runs.
Not here: what stopping means (`apps/train.py`).
Owner: the main thread, for the duration of a `with` block; in other threads nothing is installed.

[Note: leaving at once] An exception raised by a handler surfaces wherever the main thread is: in the middle of an
import, or in a weakref callback, where it is printed and lost. A store survives a kill at any moment, so a handler that
stops at once prints its sentence and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h"  # the live line hides it


@contextlib.contextmanager
def handling_stops(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """In the block this handles the signals, except those that are ignored: under nohup, in a job in the background."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOPS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class StopRequest:
    """Keeps the first signal for a loop to see; a second one, or one outside the loop, acts at once.

    Args:
        leave: called with the exit code, ends the process; tests replace it. See [Note: leaving at once].
        rank, ranks: with several ranks each gets the signal; only rank 0 speaks, once all agree (`announce`).

    Attributes:
        signal_number: the signal that the loop should react to, or None.
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
        self._handlers = contextlib.ExitStack()
        self._terminal = Terminal()

    def __enter__(self) -> StopRequest:
        self._handlers.enter_context(handling_stops(self._handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.close()

    @contextlib.contextmanager
    def wished(self, kept: str) -> Iterator[None]:
        """Inside the block a first signal is a request; `kept` is what remains if the process ends at once or later."""
        self.expect("this step", kept)
        self._can_wait = True
        try:
            yield
        except BaseException:
            # When one rank ends, the launcher stops the others by a signal; they are ending anyway, and must say why.
            self._can_wait = not self._is_alone
            raise
        self._can_wait = False

    def expect(self, until: str, kept: str) -> None:
        """From here on a request takes effect after `until`, and `kept` remains if the process ends at once."""
        self._until, self._last_words = until, f"interrupted at once; {kept}"

    def announce(self) -> None:
        """Say, once, that the request was received."""
        words = _line(f"stopping after {self._until}; Ctrl-C again stops at once")
        with contextlib.suppress(OSError):
            if self._speaks and not self._is_announced:
                self._is_announced = True  # no handler runs between this and the call
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
            self.announce()  # this signal may have interrupted the first one's handler
        if self._speaks:
            with contextlib.suppress(OSError):
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)
            say_at_once(self._last_words)
        self._leave(128 + number)


class Terminal:
    """The output streams of this process that are terminals; once the terminal is gone, writing there is an error."""

    def __init__(self) -> None:
        self._descriptors = [number for number in (1, 2) if os.isatty(number)]

    def let_go(self) -> None:
        """Call this when the terminal is gone: from then on output to it goes nowhere."""
        with contextlib.suppress(OSError):
            let_go(*self._descriptors)


def let_go(*descriptors: int) -> None:
    """From now on output to these descriptors goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in descriptors:
        os.dup2(nowhere, number)
    os.close(nowhere)


def say_at_once(sentence: str) -> None:
    """Print a sentence on the error stream, from a signal handler.

    Not with print or rich: the main thread may be in the middle of either, and neither can be entered twice.
    """
    with contextlib.suppress(OSError):
        os.write(2, _line(sentence))


def _line(sentence: str) -> bytes:
    start = "\n" if os.isatty(2) else ""
    return f"{start}tierstore: {sentence}\n".encode()
