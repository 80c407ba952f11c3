"""What a link carried: bytes, and busy seconds, in which overlapping transfers count once.

Scope: one meter per link. Not here: what follows from the rates (`plan/bandwidth.py`).
Owner: the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable


class LinkMeter:
    """Bytes moved over a link, and the seconds during which at least one transfer was in flight.

    Args:
        clock: seconds; injected so that tests decide how time passes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight = 0
        self._since = 0.0
        self.moved_bytes = 0
        self.busy_s = 0.0

    def begin(self) -> None:
        """A transfer was handed to a worker."""
        if self._in_flight == 0:
            self._since = self._clock()
        self._in_flight += 1

    def end(self, nbytes: int) -> None:
        """A transfer has ended."""
        self._in_flight -= 1
        self.moved_bytes += nbytes
        if self._in_flight == 0:
            self.busy_s += self._clock() - self._since

    def totals(self) -> tuple[int, float]:
        """Bytes of ended transfers, and busy seconds so far, including those of transfers in flight."""
        running = self._clock() - self._since if self._in_flight else 0.0
        return self.moved_bytes, self.busy_s + running
