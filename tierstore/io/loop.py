"""The event loop of a runtime, which other threads wake without giving up the GIL.

Scope: waiting and waking. Not here: the calls between threads (`io/runtime.py`).

[Note: waking] A byte in a socket wakes asyncio's own loop. The thread that writes the byte gives up the GIL during the
system call, and the loop takes it. So the training thread would wait until the loop has nothing more to do: 190 us for
each gradient of many small groups (2 cores, 2026-11-25). Releasing a lock does not give up the GIL; the loop then runs
while the training thread computes without the GIL, which it does often.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from typing import Any


class _Bell(selectors.SelectSelector):
    """Waits for `ring` only: registered files are never ready."""

    def __init__(self) -> None:
        super().__init__()
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """Ends the current wait, or the next one. Any thread; twice is fine."""
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
