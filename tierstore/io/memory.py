"""One arena of host memory, cut into pools that lend buffers.

Scope: the mapping, first-fit allocation, first-come waiting, leases.
Not here: what is worth keeping in memory (see `plan/`); pinning calls (see `device/`, passed in as functions).
Owner: the loop thread owns pools and leases; no lock is taken. The bytes of a lease belong to its holder.
"""

from __future__ import annotations

import asyncio
import bisect
import mmap
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.alignment import padded
from tierstore.config import format_size
from tierstore.errors import BudgetError, ClosedError
from tierstore.io.fork import ForkAware, unshare

HUGE_PAGE_BYTES = 2 * 2**20

Bytes = npt.NDArray[np.uint8]


class Arena(ForkAware):
    """A private anonymous mapping that asks for huge pages and is not inherited over a fork.

    Pages are touched when they are first used, unless `register` pins them at once. Pinned bytes = asked bytes.

    Args:
        capacity_bytes: rounded up to 4096.
        register: called once with (address, bytes), for example to pin the mapping for a GPU.
        unregister: called once with the same, before the mapping goes.
    """

    def __init__(
        self,
        capacity_bytes: int,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__()
        if capacity_bytes < 0:
            raise ValueError(f"an arena cannot hold {capacity_bytes} B")
        self.capacity_bytes = padded(capacity_bytes)
        self._pools: dict[str, Pool] = {}
        self._lent_out_bytes = 0
        self._unregister = unregister
        # One huge page more, so that the first byte lent can stand on a huge-page boundary.
        mapping = mmap.mmap(-1, self.capacity_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        unshare(mapping)
        whole: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        skip = -whole.ctypes.data % HUGE_PAGE_BYTES
        # numpy holds the mapping: it is unmapped when the last view of it is gone, never under one.
        self._bytes: Bytes | None = whole[skip : skip + self.capacity_bytes]
        self._address = whole.ctypes.data + skip
        if register is not None and self.capacity_bytes:
            register(self._address, self.capacity_bytes)

    def pool(self, name: str, capacity_bytes: int) -> Pool:
        """A new pool over its own contiguous range (capacity rounded up to 4096).

        Raises:
            BudgetError: the pools would need more than the arena has; nothing was changed.
        """
        self.check_process()
        if self._bytes is None:
            raise ClosedError("the arena is closed")
        if name in self._pools or capacity_bytes < 0:
            raise ValueError(f"pool {name!r} of {capacity_bytes} B: the name is taken or the size negative")
        size, start = padded(capacity_bytes), self._lent_out_bytes
        if start + size > self.capacity_bytes:
            raise BudgetError(
                f"pool {name!r} of {size} B does not fit: the arena holds {self.capacity_bytes} B, "
                f"of which other pools have {start} B; it would need {start + size} B"
            )
        self._lent_out_bytes += size
        self._pools[name] = Pool(self, name, self._bytes[start : start + size])
        return self._pools[name]

    def close(self) -> list[Lease]:
        """Ends all pools; their waiters get `ClosedError`.

        Returns:
            The leases that are still out. While there is one, the mapping stays, registered as it was; free them and
            close again. None left: the mapping goes with its last numpy view. Closing a closed arena is fine.
        """
        if self.is_inherited:
            return []
        leaked = [lease for pool in self._pools.values() for lease in pool.close()]
        if not leaked and self._bytes is not None:
            self._bytes = None
            if self._unregister is not None and self.capacity_bytes:
                self._unregister(self._address, self.capacity_bytes)
        return leaked


class _Waiter(NamedTuple):
    nbytes: int
    future: asyncio.Future[Lease]
    granted: Callable[[], None]


class Pool:
    """First-fit allocation over one range, in steps of 4096 B, first come first served.

    Threads: the loop thread only.
    """

    def __init__(self, arena: Arena, name: str, memory: Bytes) -> None:
        self.name = name
        self.capacity_bytes = len(memory)
        self.used_bytes = 0
        self.peak_bytes = 0
        self._arena = arena
        self._memory: Bytes | None = memory
        self._free: list[tuple[int, int]] = [(0, len(memory))] if len(memory) else []  # (start, end), sorted, apart
        self._waiters: deque[_Waiter] = deque()
        self._leases: set[Lease] = set()

    @property
    def is_waited_for(self) -> bool:
        """Whether a reservation waits."""
        return bool(self._waiters)

    async def reserve(self, nbytes: int, granted: Callable[[], None] = lambda: None) -> Lease:
        """A lease of `nbytes`, after all who asked earlier got theirs.

        Args:
            granted: called when a lease that was waited for is granted, which is before the waiter has its turn.

        Blocks: until enough contiguous bytes are free.
        Cancellation: safe at any moment; what was granted meanwhile goes to the next waiter.

        Raises:
            BudgetError: it could never fit.
        """
        lease = self.try_reserve(nbytes)
        if lease is not None:
            return lease
        waiter = _Waiter(nbytes, asyncio.get_running_loop().create_future(), granted)
        self._waiters.append(waiter)
        try:
            return await waiter.future
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._grant()  # those behind may fit where this one did not
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().free()  # granted, but cancelled before it was told
            raise

    def try_reserve(self, nbytes: int) -> Lease | None:
        """A lease at once, or None if it does not fit now or others wait already.

        Raises:
            BudgetError: it could never fit.
        """
        self._arena.check_process()
        if self._memory is None:
            raise ClosedError(f"pool {self.name!r} is closed")
        if nbytes <= 0:
            raise ValueError(f"a lease has at least one byte, not {nbytes}")
        if padded(nbytes) > self.capacity_bytes:
            raise BudgetError(
                f"pool {self.name!r} holds {self.capacity_bytes} B ({format_size(self.capacity_bytes)}), "
                f"but one buffer of {padded(nbytes)} B ({format_size(padded(nbytes))}) is needed"
            )
        return None if self._waiters else self._allocate(nbytes)

    def close(self) -> list[Lease]:
        """Refuses new reservations, fails the waiting ones, and returns the leases that are out."""
        self._memory = None
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_exception(ClosedError(f"pool {self.name!r} was closed"))
        return sorted(self._leases, key=lambda lease: lease.start)

    def _allocate(self, nbytes: int) -> Lease | None:
        if self._memory is None:
            return None
        size = padded(nbytes)
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                self.used_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                lease = Lease(self, nbytes, start, self._memory[start : start + size])
                self._leases.add(lease)
                return lease
        return None

    def _give_back(self, lease: Lease, size: int) -> None:
        self._leases.remove(lease)
        self.used_bytes -= size
        start, end = lease.start, lease.start + size
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))
        self._grant()

    def _grant(self) -> None:
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():  # done: cancelled, and its coroutine has not run since
                lease = self._allocate(waiter.nbytes)
                if lease is None:
                    return
                waiter.future.set_result(lease)
                waiter.granted()
            self._waiters.popleft()


class Lease:
    """The right to use one buffer until `free`.

    Attributes:
        nbytes: as asked; `array` is that, rounded up to 4096.
        start: offset in the pool, in bytes.
    """

    __slots__ = ("_array", "_pool", "nbytes", "start")

    def __init__(self, pool: Pool, nbytes: int, start: int, array: Bytes) -> None:
        self.nbytes = nbytes
        self.start = start
        self._pool = pool
        self._array: Bytes | None = array

    @property
    def array(self) -> Bytes:
        """The bytes: writable, 4096-aligned, contents undefined. May be used from any thread.

        Raises:
            ClosedError: the lease was freed, or belongs to the parent of a forked process.
        """
        self._pool._arena.check_process()
        if self._array is None:
            raise ClosedError(f"{self} was freed")
        return self._array

    def free(self) -> None:
        """Gives the buffer back, exactly once. Loop thread only.

        Raises:
            ClosedError: it was freed before; nothing was changed.
        """
        size = len(self.array)
        self._array = None
        self._pool._give_back(self, size)

    def __repr__(self) -> str:
        return f"Lease({self.nbytes} B at {self.start} of pool {self._pool.name!r})"
