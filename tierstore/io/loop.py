"""The event loop of a runtime, which other threads wake without giving up the interpreter.

Scope: waiting and waking. Not here: what crosses over (`io/runtime.py`).

[Note: waking] asyncio's own loop is woken by a byte in a socket. Who writes that gives up the interpreter's lock for
the time of the call, the loop takes it, and the training thread waits until the loop has nothing more to do: 190 us for
each gradient of many small groups (2 cores, 2026-11-25). A lock is released without that, and the loop goes on while
the training thread computes without the interpreter, as it does all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from typing import Any


class _Bell(selectors.SelectSelector):
    """Waits for `ring`, and for no file: those that are registered are never ready."""

    def __init__(self) -> None:
        super().__init__()
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Ends the present wait, or the next one. Any thread; twice is fine."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._silence.release()

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            self._silence.acquire()
        elif timeout <= 0:
            self._silence.acquire(blocking=False)
        else:
            self._silence.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
        return []


class Loop(asyncio.SelectorEventLoop):
    """A loop for tasks, timers and calls from other threads; it watches neither files nor sockets."""

    def __init__(self) -> None:
        self._bell = _Bell()
        super().__init__(self._bell)

    def _write_to_self(self) -> None:
        self._bell.ring()
