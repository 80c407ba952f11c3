"""One arena of host memory, cut into pools that lend buffers.

Scope: the mapping, first-fit allocation, first-come waiting, leases; aligned memory outside arenas.
Not here: what is worth keeping in memory (see `plan/`); pinning calls (see `device/`, passed in as functions).
Owner: the loop thread owns pools and leases; no lock is taken. The bytes of a lease belong to its holder.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import mmap
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.alignment import ALIGNMENT, padded
from tierstore.config import format_size
from tierstore.errors import BudgetError, ClosedError
from tierstore.io.fork import ForkAware, unshare

HUGE_PAGE_BYTES = 2 * 2**20

Bytes = npt.NDArray[np.uint8]


def huge_pages(nbytes: int) -> tuple[mmap.mmap, Bytes]:
    """A private anonymous mapping that asks for huge pages, and its bytes, all zero, from a huge-page boundary on.

    The whole mapping asks, so that the kernel counts neighbouring mappings as one: a process may have only 65,530.
    numpy holds the mapping: it is unmapped when its last view is gone, not earlier.
    """
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole: Bytes = np.frombuffer(mapping, dtype=np.uint8)
    return mapping, whole[-whole.ctypes.data % HUGE_PAGE_BYTES :][:nbytes]


def aligned_room(nbytes: int) -> Bytes:
    """New memory, aligned for O_DIRECT, outside all arenas; contents undefined."""
    room: Bytes = np.empty(nbytes + ALIGNMENT, np.uint8)
    return room[-room.ctypes.data % ALIGNMENT :][:nbytes]


def aligned_copy(data: bytes) -> Bytes:
    """A copy of `data` in memory as of `aligned_room`."""
    room = aligned_room(len(data))
    room[:] = np.frombuffer(data, np.uint8)
    return room


class Arena(ForkAware):
    """A private anonymous mapping that asks for huge pages and is not inherited over a fork.

    Pages are touched when they are first used, unless `register` pins them at once. Pinned bytes = requested bytes.

    Args:
        capacity_bytes: rounded up to 4096.
        register: called once with (address, bytes), for example to pin the mapping for a GPU.
        unregister: called with the same arguments before the mapping goes. If it fails, the mapping stays until another
            `close` calls it again.

    Raises:
        BudgetError: the system does not give so much memory.
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
        try:
            mapping, memory = huge_pages(self.capacity_bytes)
        except OSError as error:
            raise BudgetError(
                f"the system gives no {format_size(self.capacity_bytes)} of CPU memory ({error.strerror}): give a "
                "smaller cpu_memory"
            ) from error
        unshare(mapping)
        self._bytes: Bytes | None = memory
        if register is not None and self.capacity_bytes:
            register(memory.ctypes.data, self.capacity_bytes)

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
            The leases that are not freed yet. While there are any, the mapping stays registered; free them and close
            again. If there are none, the mapping goes with its last numpy view. Closing a closed arena is fine.
        """
        if self.is_inherited:
            return []
        leaked = [lease for pool in self._pools.values() for lease in pool.close()]
        if not leaked and self._bytes is not None:
            if self._unregister is not None and self.capacity_bytes:
                self._unregister(self._bytes.ctypes.data, self.capacity_bytes)
            self._bytes = None  # not earlier: the mapping goes with its last view
        return leaked


class _Waiter(NamedTuple):
    future: asyncio.Future[Lease]
    allocate: Callable[[], Lease | None]
    granted: Callable[[], None]
    who: Hashable


class Pool:
    """First-fit allocation over one range, in steps of 4096 B, first come first served.

    A caller with a fixed place reserves that (`reserve_at`); others may have such places while these are free
    (`try_reserve_last`).
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

    async def reserve(
        self,
        nbytes: int,
        granted: Callable[[], None] = lambda: None,
        elsewhere: Callable[[], Lease | None] = lambda: None,
        who: Hashable = None,
    ) -> Lease:
        """A lease of `nbytes`, after all earlier callers got theirs.

        Args:
            granted: called when the lease is granted after a wait, before the waiting coroutine goes on.
            elsewhere: called first; it may return a lease of another pool. `look_again` calls it again.
            who: the key by which `rearrange` knows the waiter.

        Blocks: until enough contiguous bytes are free.
        Cancellation: safe at any moment; a lease that was granted meanwhile goes to the next waiter.

        Raises:
            BudgetError: so many bytes could never fit.
        """
        self._check(nbytes)
        return await self._wait(lambda: elsewhere() or self._allocate(nbytes), granted, who)

    @contextlib.asynccontextmanager
    async def lent(self, nbytes: int) -> AsyncIterator[Bytes]:
        """The bytes of a lease that ends with the block: nothing may use them after it. Otherwise like `reserve`."""
        lease = await self.reserve(nbytes)
        try:
            yield lease.array
        finally:
            lease.free()

    async def reserve_at(self, start: int, nbytes: int) -> Lease:
        """The lease of `nbytes` from `start` on, after all earlier callers got theirs; otherwise like `reserve`."""
        self._check(start + nbytes)
        return await self._wait(lambda: self._allocate_at(start, nbytes))

    async def _wait(
        self, allocate: Callable[[], Lease | None], granted: Callable[[], None] = lambda: None, who: Hashable = None
    ) -> Lease:
        lease = None if self._waiters else allocate()
        if lease is not None:
            return lease
        waiter = _Waiter(asyncio.get_running_loop().create_future(), allocate, granted, who)
        self._waiters.append(waiter)
        try:
            return await waiter.future
        except BaseException:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self.look_again()  # later waiters may fit where this one did not
            elif not waiter.future.cancelled() and waiter.future.exception() is None:
                waiter.future.result().free()  # granted, but cancelled before the coroutine went on
            raise

    def try_reserve(self, nbytes: int) -> Lease | None:
        """A lease at once, or None if it does not fit now or others wait already.

        Raises:
            BudgetError: so many bytes could never fit.
        """
        self._check(nbytes)
        return None if self._waiters else self._allocate(nbytes)

    def try_reserve_at(self, start: int, nbytes: int) -> Lease | None:
        """Like `try_reserve`, from `start` on."""
        self._check(start + nbytes)
        return None if self._waiters else self._allocate_at(start, nbytes)

    def try_reserve_last(self, nbytes: int, above: int) -> Lease | None:
        """A lease of the last free place above byte `above`; None if there is none now or others wait already."""
        self._arena.check_process()
        size = padded(nbytes)
        for begin, end in () if self._waiters else reversed(self._free):
            if end - max(begin, above) >= size:
                return self._allocate_at(end - size, nbytes)
        return None

    def rearrange(self, ranks: Mapping[Hashable, int]) -> None:
        """Sorts the waiters that have a rank among their turns, the lowest rank first; all others keep their turns."""
        turns = [turn for turn, waiter in enumerate(self._waiters) if waiter.who in ranks]
        ranked = sorted((self._waiters[turn] for turn in turns), key=lambda waiter: ranks[waiter.who])
        for turn, waiter in zip(turns, ranked):
            self._waiters[turn] = waiter
        self.look_again()

    def look_again(self) -> None:
        """Grant what can be granted, because bytes became free here or elsewhere, or the first waiter changed."""
        while self._waiters:
            waiter = self._waiters[0]
            if not waiter.future.done():  # done: cancelled, and its coroutine has not run since
                lease = waiter.allocate()
                if lease is None:
                    return
                waiter.future.set_result(lease)
                waiter.granted()
            self._waiters.popleft()

    def close(self) -> list[Lease]:
        """Refuses new reservations, fails the waiting ones, and returns the leases that are not freed."""
        self._memory = None
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_exception(ClosedError(f"pool {self.name!r} was closed"))
        return sorted(self._leases, key=lambda lease: lease.start)

    def _check(self, nbytes: int) -> None:
        """Raises if the pool is closed, or could never lend so many bytes."""
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

    def _allocate(self, nbytes: int) -> Lease | None:
        size = padded(nbytes)
        place = next((begin for begin, end in self._free if end - begin >= size), None)
        return None if place is None else self._allocate_at(place, nbytes)

    def _allocate_at(self, start: int, nbytes: int) -> Lease | None:
        """A lease from `start` on, if enough is free there."""
        size = padded(nbytes)
        index = bisect.bisect(self._free, (start, self.capacity_bytes)) - 1
        if self._memory is None or index < 0 or self._free[index][1] < start + size:
            return None
        begin, end = self._free[index]
        self._free[index : index + 1] = [(a, b) for a, b in ((begin, start), (start + size, end)) if a < b]
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        lease = Lease(self, nbytes, start, self._memory[start : start + size])
        self._leases.add(lease)
        return lease

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
        self.look_again()


class Lease:
    """The right to use one buffer until `free`.

    Attributes:
        nbytes: as requested; the length of `array` is that, rounded up to 4096.
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
