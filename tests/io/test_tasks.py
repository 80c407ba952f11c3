"""Work side by side: all failures are reported, and cancelled work is not called done. Work that goes to its end."""

from __future__ import annotations

import asyncio

import pytest

from tierstore.errors import StorageError
from tierstore.io.tasks import to_the_end, together


def test_no_number_of_cancellations_stops_it() -> None:
    async def main() -> None:
        go_on, ended = asyncio.Event(), []

        async def work() -> None:
            await go_on.wait()
            ended.append(True)

        task = asyncio.create_task(to_the_end(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(main())


def test_a_failure_is_not_lost_behind_a_cancellation() -> None:
    async def main() -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            raise OSError("the disk")

        task = asyncio.create_task(to_the_end(work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(OSError, match="the disk"):
            await task

    asyncio.run(main())


def test_its_own_timeouts_pass() -> None:
    async def work() -> None:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(to_the_end(work()), 30))


async def fail(error: BaseException) -> None:
    raise error


def test_the_first_failure_is_raised_with_the_others_noted() -> None:
    cause = OSError("the cause")

    async def main() -> None:
        first = StorageError("disk 1 is full")
        first.__cause__ = cause
        nested = together([fail(StorageError("disk 2 is broken")), fail(StorageError("disk 3 is gone"))])
        await together([fail(first), fail(first), nested])

    with pytest.raises(StorageError, match="disk 1") as caught:
        asyncio.run(main())
    assert caught.value.__notes__ == ["then also: StorageError('disk 2 is broken')"]
    assert caught.value.__cause__ is cause


def test_what_somebody_else_cancelled_is_not_done() -> None:
    async def main() -> None:
        others = asyncio.all_tasks()
        task = asyncio.create_task(together([asyncio.sleep(3600), asyncio.sleep(3600)]))
        await asyncio.sleep(0)
        for inner in asyncio.all_tasks() - others - {task}:
            inner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_one_alone_is_cancelled_with_who_waits_for_it() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def main() -> None:
        task = asyncio.create_task(together([work()]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended
