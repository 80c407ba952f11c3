"""Jobs: order, cancellation, failures, closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tierstore.errors import ClosedError, Timeout
from tierstore.io.workers import Priority, WorkerPool

pytestmark = pytest.mark.usefixtures("no_leaks")


class Gate:
    """A job that says when it has begun and ends when told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, error: Exception | None = None) -> str:
        self.begun.set()
        assert self.may_end.wait(30)
        if error is not None:
            raise error
        return "ended"


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool("test", 1)
    yield pool
    pool.close(10)


USUAL = ["DEMAND", "UPDATE", "WRITE", "PREFETCH", "COMMIT"]
HURRIED = ["DEMAND", "UPDATE", "WRITE", "COMMIT", "PREFETCH"]


@pytest.mark.parametrize(("hurries", "names"), [(0, USUAL), (1, HURRIED), (2, HURRIED)])
def test_most_urgent_first_and_fifo_within(hurries: int, names: list[str], pool: WorkerPool) -> None:
    async def play() -> list[str]:
        gate, order = Gate(), list[str]()
        jobs: list[asyncio.Future[Any]] = [pool.submit(Priority.DEMAND, gate)]
        gate.begun.wait(30)
        for priority in (Priority.COMMIT, Priority.PREFETCH, Priority.WRITE, Priority.UPDATE, Priority.DEMAND):
            jobs += [pool.submit(priority, order.append, f"{priority.name} {index}") for index in range(2)]
        with contextlib.ExitStack() as waiting:
            for _ in range(hurries):
                waiting.enter_context(pool.hurry())
            if hurries:
                with pool.hurry():
                    pass  # the end of one wait is not that of the others
            gate.may_end.set()
            await asyncio.gather(*jobs)
        return order

    assert asyncio.run(play()) == [f"{name} {index}" for name in names for index in range(2)]


def test_results_errors_and_threads() -> None:
    pool = WorkerPool("test", 3)

    async def play() -> None:
        assert await pool.submit(Priority.DEMAND, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await pool.submit(Priority.DEMAND, divmod, 7, 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await pool.submit(Priority.DEMAND, next, iter(()))
        cancelled: Future[None] = Future()
        cancelled.cancel()
        with pytest.raises(RuntimeError, match="CancelledError"):
            await pool.submit(Priority.DEMAND, cancelled.result)
        numbers = await asyncio.gather(*[pool.submit(Priority.WRITE, abs, -number) for number in range(500)])
        assert numbers == list(range(500))

    asyncio.run(play())
    pool.close(10)


def test_awaiting_a_job_holds_cancellation_back(pool: WorkerPool) -> None:
    async def play() -> None:
        gate = Gate()

        async def wait() -> None:
            await pool.submit(Priority.DEMAND, gate)

        waiter = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiter.done()  # a lease that is freed behind it is freed only when the job has ended
        gate.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(play())


def test_close_lets_queued_jobs_end_and_refuses_new_ones() -> None:
    async def play() -> None:
        pool = WorkerPool("test", 2)
        jobs = [pool.submit(Priority.WRITE, abs, -number) for number in range(100)]
        pool.close(10)
        pool.close(10)
        with pytest.raises(ClosedError, match="'test' is closed"):
            pool.submit(Priority.DEMAND, int)
        assert await asyncio.gather(*jobs) == list(range(100))

    asyncio.run(play())


@pytest.mark.parametrize("put_before", [0, 1])
def test_close_goes_on_where_it_was_interrupted(put_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        pool = WorkerPool("test", 2)
        assert await pool.submit(Priority.WRITE, abs, -1) == 1
        tokens = pool._tokens

        class Interrupted:
            left = put_before

            def put(self, token: bool) -> None:
                if not self.left:
                    raise KeyboardInterrupt
                self.left -= 1
                tokens.put(token)

            get = tokens.get

        with monkeypatch.context() as patch:
            patch.setattr(pool, "_tokens", Interrupted())
            with pytest.raises(KeyboardInterrupt):
                pool.close(10)
        pool.close(10)

    asyncio.run(play())


def test_close_says_what_hangs(pool: WorkerPool) -> None:
    async def play() -> None:
        gate = Gate()
        jobs = [pool.submit(Priority.WRITE, gate), pool.submit(Priority.DEMAND, gate)]
        gate.begun.wait(30)
        with pytest.raises(Timeout, match=r"within 0 s; in flight: test-0: Gate \(.*\), for .* s: .*; test: 1 jobs"):
            pool.close(0)
        gate.may_end.set()
        await asyncio.gather(*jobs)

    asyncio.run(play())


def test_what_a_thread_has_just_taken_is_given_up_too(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, begun, take = Gate(), list[str](), pool._next

    def take_slowly() -> Any:
        work = take()
        if work is not None and threading.current_thread() in pool._threads:
            gate()
        return work

    monkeypatch.setattr(pool, "_next", take_slowly)

    async def play() -> None:
        job = pool.submit(Priority.DEMAND, begun.append, "begun")
        gate.begun.wait(30)
        pool.give_up()
        gate.may_end.set()
        with pytest.raises(ClosedError, match="given up"):
            await job

    asyncio.run(play())
    assert not begun


def test_a_closed_loop_loses_the_result_quietly(pool: WorkerPool) -> None:
    gate = Gate()

    async def play() -> None:
        pool.submit(Priority.WRITE, gate)
        gate.begun.wait(30)

    asyncio.run(play())
    gate.may_end.set()

    async def again() -> int:
        return await pool.submit(Priority.DEMAND, abs, -1)

    assert asyncio.run(again()) == 1  # the thread lives on


def test_an_idle_thread_holds_nothing(pool: WorkerPool) -> None:
    async def play() -> weakref.ref[np.ndarray[Any, Any]]:
        array = np.zeros(10)
        await pool.submit(Priority.DEMAND, np.sum, array)
        await pool.submit(Priority.DEMAND, lambda item: item, array)
        return weakref.ref(array)

    reference = asyncio.run(play())
    gc.collect()
    deadline_s = time.monotonic() + 30
    while reference() is not None and time.monotonic() < deadline_s:  # the thread may be on its way to be idle
        os.sched_yield()
    assert reference() is None


def test_threads_that_the_system_has_refused_once_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, start, refused = WorkerPool("test", 3), threading.Thread.start, ["test-1"]

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)

    async def play() -> None:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.submit(Priority.DEMAND, int)
        barrier = threading.Barrier(3)
        await asyncio.gather(*[pool.submit(Priority.DEMAND, barrier.wait, 30) for _ in range(3)])

    asyncio.run(play())
    pool.close(10)


def test_a_pool_closes_without_threads_that_the_system_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool("test", 2)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def play() -> None:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.submit(Priority.DEMAND, int)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(play())
    pool.close(10)


def test_an_unused_pool_has_no_thread() -> None:
    with pytest.raises(ValueError, match="at least one"):
        WorkerPool("none", 0)
    pool = WorkerPool("idle", 4)
    pool.close(0)
    with pytest.raises(ClosedError):
        asyncio.run(pool.perform(False, Priority.DEMAND, int))
