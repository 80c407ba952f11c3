"""Jobs through a few threads: jobs in flight end before the threads do."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tierstore.archive.flow import Room, _Flow
from tierstore.io.memory import Bytes
from tierstore.io.runtime import Runtime

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("count", [2, 9], ids=["all begun", "some wait for memory"])
def test_however_often_it_is_cancelled_the_jobs_under_way_end_first(count: int, runtime: Runtime) -> None:
    """Ctrl-C cancels twice: the caller stops waiting, and then the runtime closes."""
    begun, goes_on, ended = threading.Semaphore(0), threading.Event(), list[int]()

    def work(item: int, buffer: Bytes) -> None:
        begun.release()
        assert goes_on.wait(30)
        buffer[:] = item  # the arena must still be there
        ended.append(item)

    async def cancelled_twice() -> None:
        task = asyncio.create_task(_Flow(work, lambda item, result: None, Room(2, 4096)).run(range(count)))
        for _ in range(2):
            await asyncio.to_thread(begun.acquire)
        for _ in range(2):
            task.cancel()
            await asyncio.wait({task}, timeout=0)
            await asyncio.sleep(0)
        is_done = task.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_done

    runtime.call(cancelled_twice)
    assert sorted(ended) == [0, 1]
