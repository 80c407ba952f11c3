"""Waiting for the device without a thread that copies, updates, reads or writes.

Scope: marks of the compute stream, awaited. Not here: what a mark is (`device/streams.py`).
Owner: the loop thread; one thread of its own sleeps.
"""

from __future__ import annotations

from tierstore.device.streams import Mark
from tierstore.io.workers import Priority, WorkerPool


class Marks(WorkerPool):
    """One thread: an older mark waits at most for a newer one of the same stream. For a CPU it is never started."""

    def __init__(self) -> None:
        super().__init__("tierstore-marks", 1)
        self._last: Mark | None = None

    async def reached(self, mark: Mark) -> None:
        """Wait for the device work before a mark.

        Cancellation: held back until it is over.
        """
        if mark is self._last:  # many wait for one, and each question is one to the driver
            return
        if not mark.is_done():
            await self.submit(Priority.DEMAND, mark.synchronize)
        self._last = mark
