"""Work side by side: what fails is told, all of it, and what was not done is not called done."""

from __future__ import annotations

import asyncio

import pytest

from tierstore.errors import StorageError
from tierstore.store.tasks import together


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
