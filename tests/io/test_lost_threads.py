"""A thread that ends before its work is done: nobody goes on waiting for it, and what is left closes."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import HANG, FaultyBackend

from tierstore.errors import ClosedError, Timeout
from tierstore.io.files import replace_file
from tierstore.io.runtime import Runtime
from tierstore.io.watch import Watch
from tierstore.io.workers import Priority, WorkerPool

pytestmark = pytest.mark.usefixtures("no_leaks")


def end(thread: threading.Thread) -> None:
    """Raise `SystemExit` in a thread, at its next step."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


def raise_exit() -> None:
    raise SystemExit


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("test", 2)
    yield pool
    pool.close(10)


def test_the_jobs_of_a_lost_worker_fail_at_once(pool: WorkerPool) -> None:
    begun, may_end, both = threading.Event(), threading.Event(), threading.Barrier(2)
    runs = list[threading.Thread]()

    def job() -> str:
        runs.append(threading.current_thread())
        begun.set()
        assert may_end.wait(30)
        return "ended"

    async def main() -> None:
        await asyncio.gather(*[pool.submit(Priority.DEMAND, both.wait) for _ in range(2)])  # both threads are up
        busy = pool.submit(Priority.DEMAND, job)
        begun.wait(30)
        (idle,) = [thread for thread in pool._threads if thread not in runs]
        end(idle)
        with pytest.raises(ClosedError, match=r"thread test-\d was ended by SystemExit\(\)"):
            await asyncio.gather(*[pool.submit(Priority.WRITE, int) for _ in range(3)])
        with pytest.raises(ClosedError, match="was ended by SystemExit") as caught:
            await pool.submit(Priority.DEMAND, int)
        assert isinstance(caught.value.__cause__, SystemExit)
        may_end.set()
        assert await busy == "ended"  # the other thread finishes what it has begun

    asyncio.run(main())


def test_a_job_that_exits_fails_and_its_thread_goes_on(pool: WorkerPool) -> None:
    async def main() -> None:
        for _ in range(4):
            with pytest.raises(SystemExit):
                await pool.submit(Priority.DEMAND, raise_exit)
        assert await pool.submit(Priority.DEMAND, abs, -1) == 1

    asyncio.run(main())


def test_who_waits_for_a_lost_loop_is_told_at_once() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await forever()
        finally:
            ended.append("in order")

    async def start() -> None:
        runtime.spawn(work(), "work")
        asyncio.get_running_loop().call_soon(raise_exit)
        await forever()

    runtime = Runtime("test").start()
    with pytest.raises(ClosedError, match=r"loop thread of runtime 'test' was ended by SystemExit\(\)"):
        runtime.call(start)
    with pytest.raises(ClosedError, match="was ended by SystemExit"):
        runtime.call(forever)
    runtime.close()
    assert ended == ["in order"]


def test_a_loop_that_is_lost_in_the_turn_in_which_closing_ends_stops_all_the_same() -> None:
    runtime = Runtime("test", timeout_s=10).start()
    loop = runtime.loop
    ends = loop.shutdown_asyncgens

    async def ends_and_exits_a_turn_later() -> None:
        await ends()
        loop.shutdown_asyncgens = ends  # type: ignore[method-assign]
        done = loop.create_future()
        loop.call_soon(done.set_result, None)
        loop.call_soon(lambda: loop.call_soon(raise_exit))
        await done

    loop.shutdown_asyncgens = ends_and_exits_a_turn_later  # type: ignore[method-assign]
    with pytest.raises(ClosedError, match="was ended by SystemExit"):
        runtime.close()
    assert runtime.has_ended


@pytest.mark.parametrize("is_called", [False, True])
def test_a_task_that_exits_is_told_as_the_end_of_the_loop(is_called: bool) -> None:
    """And not as `SystemExit`, which would end the thread that closes."""

    async def work() -> None:
        raise_exit()

    async def start() -> None:
        if is_called:
            await work()
        runtime.spawn(work(), "work")
        await forever()

    runtime = Runtime("test").start()
    with pytest.raises(ClosedError, match="was ended by SystemExit"):
        runtime.call(start)
    runtime.close()


def test_a_lost_loop_that_nobody_waited_for_is_told_by_close() -> None:
    runtime = Runtime("test").start()
    runtime.post(raise_exit)
    runtime._thread.join(30)  # type: ignore[union-attr]
    with pytest.raises(ClosedError, match="was ended by SystemExit"):
        runtime.close()
    runtime.close()


def test_a_deadline_tells_what_a_partial_calls() -> None:
    with Runtime("test") as runtime, pytest.raises(Timeout, match=r"^forever did not end: .*\n  task forever: "):
        runtime.call(functools.partial(forever), timeout_s=0.01)


def test_a_deadline_tells_the_call_the_file_and_the_stacks(tmp_path: Path) -> None:
    backend, pool = FaultyBackend(HANG, kinds=("fsync",)), WorkerPool("disk", 1)
    is_hanging = threading.Event()

    async def both() -> None:
        await asyncio.gather(
            asyncio.to_thread(replace_file, tmp_path / "manifest", b"new", backend=backend),
            pool.submit(Priority.WRITE, hang, "extent h.3/0", tmp_path / "pack"),
        )

    def hang(name: str, path: Path) -> None:
        is_hanging.set()
        assert backend.goes_on.wait(30)

    with Runtime("test", backend=backend) as runtime:
        runtime.describe(pool.in_flight)

        def ends_within(watch: Watch, call: object) -> bool:
            return not (backend.is_hung.wait(30) and is_hanging.wait(30))

        runtime._ends_within = ends_within  # type: ignore[method-assign]
        with pytest.raises(Timeout) as caught:
            runtime.call(both)
        backend.goes_on.set()
        del runtime._ends_within
        runtime.call(asyncio.sleep, 0)
    pool.close(10)
    text = str(caught.value)
    assert f"fsync of {tmp_path / 'manifest.tmp'}, for " in text
    assert f"hang extent h.3/0 {tmp_path / 'pack'} (write), for " in text
    assert re.search(r"test-files_\d: wait \(threading\.py:", text)
    assert "disk-0: " in text
    assert " < hang (test_lost_threads.py:" in text
    assert "loop thread: select (loop.py:" in text
