"""A thread whose end can be waited for again after an interrupted wait.

Scope: one class.
Not here: what threads do (`runtime.py`, `workers.py`).
Owner: whoever starts it.

[Note: not by join alone] Up to Python 3.12 an interrupt in `Thread.join` marks a thread as ended although it goes on:
the next `join` returns at once, and its caller would free what the thread still uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class WaitedThread(threading.Thread):
    """A daemon thread that calls `work`."""

    def __init__(self, work: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._is_done = threading.Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            del self._work  # the object of this method may hold this thread
            self._is_done.set()

    def ends_within(self, limit_s: float) -> bool:
        """Whether the thread ends within `limit_s`; True if it was not started. Any thread but this one."""
        if self.ident is None:
            return True
        if not self._is_done.wait(min(limit_s, threading.TIMEOUT_MAX)):
            return False
        self.join()
        return True
