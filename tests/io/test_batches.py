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


def test_who_finds_the_thread_idle_goes_at_once_and_those_that_come_meanwhile_go_together(pool: WorkerPool) -> None:
    may_go, jobs = threading.Event(), []

    def run(items: Sequence[int]) -> None:
        assert may_go.wait(20.0)
        jobs.append(list(items))

    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, run)
        waits = [batches.submit(value) for value in range(3)]
        await asyncio.sleep(0)
        waits.append(batches.submit(3))
        assert not any(wait.done() for wait in waits)
        may_go.set()
        await asyncio.gather(*waits)
        assert jobs == [[0], [1, 2, 3]]
        await batches.submit(4)  # idle again
        assert jobs[2:] == [[4]]

    asyncio.run(submit())


def test_a_failure_is_told_to_all_of_its_job_and_to_nobody_else(pool: WorkerPool) -> None:
    def run(items: Sequence[int]) -> None:
        if 2 in items:
            raise StorageError("cannot do 2")

    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, run)
        waits = [batches.submit(value) for value in range(4)]
        told = await asyncio.gather(*waits, return_exceptions=True)
        assert told[0] is None
        assert [str(error) for error in told[1:]] == ["cannot do 2"] * 3
        await batches.submit(4)

    asyncio.run(submit())


def test_who_waits_while_a_job_fails_has_a_job_of_his_own(pool: WorkerPool) -> None:
    may_go = threading.Event()

    def run(items: Sequence[int]) -> None:
        assert may_go.wait(20.0)
        if 0 in items:
            raise StorageError("cannot do 0")

    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, run)
        waits = [batches.submit(value) for value in range(3)]
        await asyncio.sleep(0)
        may_go.set()
        told = await asyncio.wait_for(asyncio.gather(*waits, return_exceptions=True), 20.0)
        assert [str(error) for error in told] == ["cannot do 0", "None", "None"]

    asyncio.run(submit())


def test_a_closed_pool_leaves_nobody_waiting(pool: WorkerPool) -> None:
    async def submit() -> None:
        batches = Batches(pool, Priority.UPDATE, lambda items: None)
        pool.close(10.0)
        waits = [batches.submit(0) for _ in range(3)]
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
                await batches.submit(1)
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
