"""Waiting for the device in a thread of its own, so that no thread that copies, updates, reads or writes waits.

Scope: awaiting marks of the compute stream. Not here: what a mark is (`device/streams.py`).
Owner: the loop thread; the waiting thread sleeps.
"""

from __future__ import annotations

from tierstore.device.streams import Mark
from tierstore.io.workers import Priority, WorkerPool


class Marks(WorkerPool):
    """One thread is enough: a mark waits at most for a newer one of the same stream. On a CPU it never starts."""

    def __init__(self) -> None:
        super().__init__("tierstore-marks", 1)
        self._last: Mark | None = None

    async def reached(self, mark: Mark) -> None:
        """Wait for the device work before a mark.

        Cancellation: held back until that work is over.
        """
        if mark is self._last:  # many wait for one mark, and each `is_done` asks the driver
            return
        if not mark.is_done():
            await self.submit(Priority.DEMAND, mark.synchronize)
        self._last = mark
