"""Many jobs through a few threads, each with a buffer of its own, within a bounded memory.

Scope: the arena, the threads, the order of starting, failure and Ctrl-C.
Not here: what a job does (`packing.py`, `reading.py`, `unpacking.py`).
Owner: one call of `run` owns its threads, its arena and its loop, and ends them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psutil

from tierstore.config import format_size
from tierstore.errors import BudgetError
from tierstore.io.memory import Arena, Bytes, Pool
from tierstore.io.runtime import Runtime
from tierstore.io.workers import Priority, WorkerPool

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""Chunks in flight: while some threads compute checksums, others keep the disk busy."""
QUEUED = 4
"""Chunks that wait for a thread, so that a thread that has ended its chunk goes on without waiting for the loop."""
TIMEOUT_S = 1800.0
"""Deadline of one system call: the sync of a file that a large page cache holds takes a slow disk many minutes."""
_CLOSE_S = 60.0
_SLACK_BYTES = 48 * 2**20
"""Interpreter and libraries grow by about this while they work."""


@dataclass(frozen=True, slots=True)
class Room:
    """What jobs may use: `threads` jobs at once and `queued` that wait, each with `job_bytes` of buffer."""

    threads: int
    job_bytes: int
    queued: int = 0

    @property
    def buffer_bytes(self) -> int:
        return (self.threads + self.queued) * self.job_bytes


def room(memory_bytes: int, jobs: int, job_bytes: int, *, beside_bytes: int = 0, threads: int = THREADS) -> Room:
    """As many threads as jobs, or as the memory of the whole process allows; memory that is left lets jobs queue.

    Args:
        jobs: number of jobs.
        job_bytes: buffer of one job.
        beside_bytes: what one job allocates besides.

    Raises:
        BudgetError: not even one job fits.
    """
    used = psutil.Process().memory_info().rss + _SLACK_BYTES
    count = (memory_bytes - used) // (job_bytes + beside_bytes)
    if count < 1:
        smallest = used + job_bytes + beside_bytes
        raise BudgetError(
            f"--memory {format_size(memory_bytes)} is too small: this process takes {format_size(used)} and one chunk "
            f"{format_size(job_bytes + beside_bytes)}; give at least {math.ceil(smallest / 2**20)} MiB"
        )
    threads = min(threads, count, max(jobs, 1))
    return Room(threads, job_bytes, min(QUEUED, count - threads, max(jobs - threads, 0)))


def run(
    items: Iterable[T],
    work: Callable[[T, Bytes], R],
    room: Room,
    *,
    done: Callable[[T, R], None] = lambda item, result: None,
) -> None:
    """`work(item, buffer)` in worker threads, started in the order of `items`.

    Args:
        done: called with each result; from one thread, not in order.

    Raises:
        BaseException: the first failure; jobs that waited for a thread then are done, too, and none runs any more.
    """
    with Runtime("archive", timeout_s=math.inf) as runtime:
        runtime.call(_Flow(work, done, room).run, items)


class _Flow:
    def __init__(self, work: Callable[[Any, Bytes], Any], done: Callable[[Any, Any], None], room: Room) -> None:
        self._work = work
        self._done = done
        self._room = room
        self._jobs: set[asyncio.Future[Any]] = set()
        self._failure: BaseException | None = None

    async def run(self, items: Iterable[Any]) -> None:
        """Blocks: until all is done. Cancellation: held back until the jobs in flight have ended, also on a disk that
        hangs: their threads write into the arena.
        """
        arena = Arena(self._room.buffer_bytes)
        pool = arena.pool("chunks", self._room.buffer_bytes)
        workers = WorkerPool("archive", self._room.threads)
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._submit_all(items, pool, workers)
        finally:
            while self._jobs:
                try:
                    await asyncio.wait(self._jobs)
                except asyncio.CancelledError as error:  # the end of the loop may cancel more than once
                    cancelled = error
            workers.close(_CLOSE_S)
            arena.close()
        if cancelled is not None:
            raise cancelled
        if self._failure is not None:
            raise self._failure

    async def _submit_all(self, items: Iterable[Any], pool: Pool, workers: WorkerPool) -> None:
        for item in items:
            lease = await pool.reserve(self._room.job_bytes)
            if self._failure is not None:
                lease.free()
                return
            job = workers.submit(Priority.DEMAND, self._work, item, lease.array)
            self._jobs.add(job)
            job.add_done_callback(partial(self._on_done, item, lease))

    def _on_done(self, item: Any, lease: Any, job: asyncio.Future[Any]) -> None:
        self._jobs.discard(job)
        lease.free()
        try:
            self._done(item, job.result())
        except BaseException as error:
            self._failure = self._failure or error
