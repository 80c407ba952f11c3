"""A byte budget without addresses: the GPU tier's.

Scope: counting, first-come-first-served waiting, the peak.
Not here: memory with addresses (ranges of the arena are in `io/memory.py`).
Owner: the loop thread.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tierstore.config import format_size
from tierstore.errors import BudgetError


class ByteBudget:
    """Bytes that may be in use at once.

    Invariant: `used_bytes <= capacity_bytes` at every moment.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        """Wait for `nbytes`, in the order of the calls.

        Raises:
            BudgetError: at once, if `nbytes` is more than the whole budget.
        Cancellation: nothing is taken.
        """
        if nbytes > self.capacity_bytes:
            raise BudgetError(
                f"gpu_memory: {format_size(nbytes)} asked of a budget of {format_size(self.capacity_bytes)}; "
                f"the smallest that fits is {nbytes} B"
            )
        if not self._waiters and self.used_bytes + nbytes <= self.capacity_bytes:
            self._grant(nbytes)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((nbytes, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give(nbytes)  # granted and cancelled in the same turn of the loop
            elif (nbytes, waiter) in self._waiters:  # else: `_wake` has removed it already
                self._waiters.remove((nbytes, waiter))
                self._wake()
            raise

    def give(self, nbytes: int) -> None:
        """Return bytes taken before."""
        self.used_bytes -= nbytes
        self._wake()

    def _grant(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _wake(self) -> None:
        while self._waiters and self.used_bytes + self._waiters[0][0] <= self.capacity_bytes:
            nbytes, waiter = self._waiters.popleft()
            if not waiter.done():
                self._grant(nbytes)
                waiter.set_result(None)
