"""Ctrl-C, SIGTERM and SIGHUP during a command that leaves nothing behind: it cleans up, says a sentence and ends.

Scope: one exception for all three signals, one exit code each. Not here: `train`, which ends its step first
    (`apps/stopping.py`).
Owner: the main thread, for the duration of a `with` block; in other threads nothing is installed.

[Note: a thread that computes on] When the interpreter ends, a thread that comes back to it is cut off, even in the
middle of torch's C++, which then aborts the process. So if a thread was abandoned, the process ends without ending the
interpreter first.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import typer

from tierstore.apps.stopping import Terminal, handling_stops, say_at_once
from tierstore.cli.common import say
from tierstore.errors import Abandoned


class _Stopped(KeyboardInterrupt):
    """Raised for any of the three signals.

    A subclass, because Python ends by SIGINT, whatever the exit code, if a KeyboardInterrupt itself has come out of an
    `exec`, as while a dataclass is made.
    """


@contextlib.contextmanager
def interruptible(last_words: str, leave: Callable[[int], object] = os._exit) -> Iterator[None]:
    """In the block the signals raise KeyboardInterrupt, which ends as `last_words` and exit code 130, 143 or 129.

    Signals after the first one do not disturb the cleaning up: a second Ctrl-C says that it is under way, and only a
    third one ends the process as it is. Another SIGTERM or SIGHUP changes nothing.
    """
    seen: list[int] = []
    repeated = 0
    terminal = Terminal()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal repeated
        del frame
        if number == signal.SIGHUP:
            terminal.let_go()
        if not seen:
            seen.append(number)
            raise _Stopped
        if number != signal.SIGINT:
            return
        repeated += 1
        if repeated == 1:
            say_at_once("cleaning up; Ctrl-C again ends at once")
        else:
            say_at_once("interrupted at once; unfinished files may be left")
            leave(128 + number)

    with handling_stops(handle):
        try:
            yield
        except BaseException as error:
            # The code that was interrupted may raise another error instead: a runtime that closes, a failed import.
            if not seen and not isinstance(error, KeyboardInterrupt):
                raise
            say(last_words)
            code = 128 + (seen[0] if seen else signal.SIGINT)
            if isinstance(error, Abandoned):
                leave(code)  # see [Note: a thread that computes on]
            raise typer.Exit(code) from None
