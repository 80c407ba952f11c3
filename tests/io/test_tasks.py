"""Work that no cancellation stops."""

from __future__ import annotations

import asyncio

import pytest

from tierstore.io.tasks import to_the_end


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
