"""Items that gather while a job is under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from tierstore.errors import ClosedError, StorageError
from tierstore.io.batches import Batches
from tierstore.io.workers import Priority, WorkerPool

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    one = WorkerPool("batches", 1)
    yield one
    one.close(10.0)


def test_who_finds_the_thread_idle_goes_at_once_and_others_go_together(pool: WorkerPool) -> None:
    may_go, jobs = threading.Event(), []

    def run(items: Sequence[int]) -> None:
        assert may_go.wait(20.0)
        jobs.append(list(items))

    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, run)
        waits = [batches.submit(kind, value) for kind, value in (("a", 1), ("a", 2), ("b", 3), ("a", 4))]
        await asyncio.sleep(0)
        waits += [batches.submit("c", 5), batches.submit("b", 6)]
        assert not any(wait.done() for wait in waits)
        may_go.set()
        await asyncio.gather(*waits)
        assert jobs == [[1, 2], [3, 4, 5, 6]]
        await batches.submit("a", 7)  # idle again
        assert jobs[2:] == [[7]]

    asyncio.run(submit())


def test_a_failure_is_told_to_all_of_its_job_and_to_nobody_else(pool: WorkerPool) -> None:
    def run(items: Sequence[int]) -> None:
        if 2 in items:
            raise StorageError("cannot do 2")

    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, run)
        waits = [batches.submit(value > 0, value) for value in range(4)]
        told = await asyncio.gather(*waits, return_exceptions=True)
        assert told[0] is None
        assert [str(error) for error in told[1:]] == ["cannot do 2"] * 3
        await batches.submit("a", 4)

    asyncio.run(submit())


def test_a_closed_pool_leaves_nobody_waiting(pool: WorkerPool) -> None:
    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, lambda items: None)
        pool.close(10.0)
        waits = [batches.submit(kind, 0) for kind in "aab"]
        told = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(error) for error in told] == [ClosedError] * 3

    asyncio.run(submit())


def test_a_wait_is_not_broken_off(pool: WorkerPool) -> None:
    """The job uses what its waiter would free."""
    may_go, has_run = threading.Event(), []

    def run(items: Sequence[int]) -> None:
        assert may_go.wait(20.0)
        has_run.extend(items)

    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, run)

        async def wait() -> None:
            try:
                await batches.submit("a", 1)
            finally:
                assert has_run == [1]

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(submit())
