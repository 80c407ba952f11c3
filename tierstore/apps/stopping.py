"""Ctrl-C as a wish: the step in flight ends and is committed before the program does.

Scope: the handlers of SIGINT and SIGTERM while a training loop runs.
Not here: what stopping means (`apps/train.py`).
Owner: the main thread, for the duration of a `with` block; elsewhere nothing is installed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """Keeps the first SIGINT or SIGTERM for the loop to see; a second one acts at once, as if this were not here.

    Attributes:
        signal_number: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal_number: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
