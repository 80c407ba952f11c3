"""Crossing into the loop thread and back: results, errors that must reach somebody, deadlines, closing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tierstore.errors import ClosedError, Timeout
from tierstore.io.backend import Backend
from tierstore.io.runtime import Runtime
from tierstore.io.watch import Watch


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def fail(text: str) -> None:
    await asyncio.sleep(0)
    raise OSError(text)


async def settle() -> None:
    """Lets the callbacks that are ready run."""
    for _ in range(3):
        await asyncio.sleep(0)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_results_and_errors_cross(runtime: Runtime) -> None:
    assert runtime.call(double, 4) == 8
    with pytest.raises(OSError, match="text"):
        runtime.call(fail, "text")
    with pytest.raises(TypeError):
        runtime.call(double)  # type: ignore[call-arg]
    assert runtime.call(double, 5) == 10


@pytest.mark.parametrize("kind", [StopIteration, asyncio.CancelledError, concurrent.futures.CancelledError])
def test_an_error_that_no_future_carries_leaves_a_file_thread(kind: type[BaseException], runtime: Runtime) -> None:
    def work() -> None:
        raise kind("mine")

    with pytest.raises(RuntimeError, match=rf"work in a thread raised {kind.__name__}\('mine'\)"):
        runtime.call(asyncio.to_thread, work, timeout_s=5)
    runtime.raise_failure()  # none is kept


def test_calls_from_many_threads(runtime: Runtime) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda n=n: results.append(runtime.call(double, n))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(0, 40, 2))


def test_posts_run_in_order_before_a_later_call(runtime: Runtime) -> None:
    seen: list[int] = []
    for number in range(5):
        runtime.post(seen.append, number)
    runtime.call(double, 1)
    assert seen == list(range(5))


def test_what_is_posted_with_the_next_goes_before_it(runtime: Runtime) -> None:
    seen: list[int] = []
    for number in range(3):
        runtime.post_with_next(seen.append, number)
    assert seen == []
    runtime.post(seen.append, 3)
    runtime.post_with_next(seen.append, 4)
    assert runtime.call(double, 1) == 2
    assert seen == list(range(5))


def test_a_spawned_failure_is_raised_once(runtime: Runtime) -> None:
    async def start() -> None:
        runtime.spawn(fail("lost"), "background")
        runtime.spawn(fail("lost too"), "background")
        await settle()

    runtime.call(start)
    with pytest.raises(OSError, match="lost") as caught:
        runtime.call(double, 1)
    assert caught.value.__notes__ == ["then also: OSError('lost too')"]
    assert runtime.call(double, 1) == 2


def test_a_failure_that_reached_its_waiter_is_not_raised_again(runtime: Runtime) -> None:
    async def start_and_wait() -> None:
        await runtime.spawn(fail("seen"), "background")

    with pytest.raises(OSError, match="seen"):
        runtime.call(start_and_wait)
    assert runtime.call(double, 1) == 2


def test_an_error_in_a_post_is_kept(runtime: Runtime) -> None:
    runtime.post(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        runtime.call(double, runtime.call(double, 1))


def test_timeout_says_what_was_in_flight(runtime: Runtime) -> None:
    async def inner() -> None:
        await forever()

    async def outer() -> None:
        runtime.spawn(forever(), "prefetch of h.3")
        await inner()

    runtime.describe(lambda: ["disk-0: read_chunk (demand), for 9.0 s"])
    with pytest.raises(Timeout) as caught:
        runtime.call(outer, timeout_s=0.5)
    text = str(caught.value)
    assert "outer did not end: nothing has moved for 0.5 s; in flight:" in text
    assert "forever (test_runtime.py" in text
    assert "inner (test_runtime.py" in text
    assert "task prefetch of h.3: forever" in text
    assert "loop thread: " in text
    assert "read_chunk (demand)" in text
    runtime.call(_cancel, "prefetch of h.3")


def test_a_call_lasts_as_long_as_its_disk_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, looks, has_looked = Backend(), itertools.count(1), threading.Event()

    def begin(watch: Watch) -> Callable[[], bool]:
        def is_over() -> bool:
            if next(looks) == 30:
                has_looked.set()
            return watch._backend is not disk

        return is_over

    monkeypatch.setattr(Watch, "begin", begin)
    with Runtime("test", 0.01, disk) as runtime:
        assert runtime.call(asyncio.to_thread, has_looked.wait, 30)


async def _cancel(name: str) -> None:
    for task in asyncio.all_tasks():
        if task.get_name() == name:
            task.cancel()
    await settle()


class Impatient(Runtime):
    """Gives a call up at its deadline, but tells the loop so only when `may_tell` allows."""

    may_tell: Callable[[Any], object]

    def _to_loop(self, function: Callable[..., object], *args: Any) -> None:
        if function == self._abandon:
            self.may_tell(args[0])
        super()._to_loop(function, *args)


@pytest.mark.parametrize("ends", ["by its cancellation", "before the loop hears of it"])
def test_what_fails_after_its_timeout_is_kept(ends: str) -> None:
    begun, is_given_up = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            if ends == "by its cancellation":
                await forever()
            while not is_given_up.is_set():
                await asyncio.sleep(0)
        finally:
            raise OSError("while ending")

    def may_tell(call: Any) -> None:
        is_given_up.set()
        if ends == "by its cancellation":
            begun.wait(30)
        else:
            call.waiting.acquire(timeout=30)

    with Impatient("test") as runtime:
        runtime.may_tell = may_tell
        with pytest.raises(Timeout):
            runtime.call(work, timeout_s=0.0)
        asyncio.run_coroutine_threadsafe(settle(), runtime.loop).result(30)  # a call might raise it already
        with pytest.raises(OSError, match="while ending"):
            runtime.raise_failure()


def test_the_loop_thread_may_not_wait_for_itself(runtime: Runtime) -> None:
    async def inside() -> None:
        runtime.call(double, 1)

    with pytest.raises(RuntimeError, match="await instead"):
        runtime.call(inside)

    async def closing() -> None:
        runtime.close()

    with pytest.raises(RuntimeError, match="await instead"):
        runtime.call(closing)


@pytest.mark.usefixtures("no_leaks")
class TestClose:
    def test_refuses_afterwards_and_twice_is_fine(self) -> None:
        runtime = Runtime("test").start()
        runtime.close()
        runtime.close()
        for use in (lambda: runtime.call(double, 1), lambda: runtime.post(print), runtime.start):
            with pytest.raises(ClosedError):
                use()

    def test_before_start(self) -> None:
        runtime = Runtime("test")
        runtime.close()
        with pytest.raises(ClosedError):
            runtime.call(double, 1)

    def test_cancels_tasks_and_those_that_they_start(self) -> None:
        ended: list[str] = []

        async def work(name: str, runtime: Runtime) -> None:
            try:
                await forever()
            finally:
                ended.append(name)
                if name == "first":
                    asyncio.create_task(work("second", runtime))  # noqa: RUF006

        async def start(runtime: Runtime) -> None:
            runtime.spawn(work("first", runtime), "first")
            await settle()

        with Runtime("test") as runtime:
            runtime.call(start, runtime)
        assert ended == ["first", "second"]

    def test_wakes_a_call_in_another_thread(self) -> None:
        runtime, errors, begun = Runtime("test").start(), list[BaseException](), threading.Event()

        async def wait() -> None:
            begun.set()
            await forever()

        def call() -> None:
            try:
                runtime.call(wait)
            except ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        assert begun.wait(30)
        runtime.close()
        thread.join(30)
        assert "was cancelled" in str(errors[0])

    def test_in_two_threads_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime, inside = Runtime("test").start(), list[int]()
        close, other = runtime.loop.close, threading.Thread(target=runtime.close)

        def close_slowly() -> None:
            inside.append(len(inside))
            if not other.ident:
                other.start()
                other.join(0.2)  # it goes through, if nothing holds it
            assert len(inside) == 1
            close()
            inside.clear()

        monkeypatch.setattr(runtime.loop, "close", close_slowly)
        runtime.close()
        other.join(30)

    def test_raises_the_kept_failure_after_closing(self) -> None:
        runtime = Runtime("test").start()
        runtime.keep_failure(OSError("kept"))
        with pytest.raises(OSError, match="kept"):
            runtime.close()
        runtime.close()

    def test_deadline_and_a_second_try(self) -> None:
        runtime, gate = Runtime("test").start(), threading.Event()
        runtime.post(gate.wait, 30)
        with pytest.raises(Timeout, match=r"did not close within 0.01 s(.|\n)*loop thread: wait"):
            runtime.close(timeout_s=0.01)
        gate.set()
        runtime.close()


def test_exit_without_close_does_not_hang() -> None:
    """A task ends in order; a worker job that is stuck does not hold up the exit."""
    script = """
import asyncio, threading
from tierstore.io.runtime import Runtime
from tierstore.io.workers import Priority, WorkerPool
runtime, pool = Runtime().start(), WorkerPool("io", 2)
async def sleep():
    try:
        await asyncio.sleep(1000)
    finally:
        print("ended")
async def start():
    runtime.spawn(sleep(), "sleeper")
    pool.submit(Priority.WRITE, threading.Event().wait)
    await asyncio.to_thread(int)
runtime.call(start)
print("left")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("left\nended\n", "", 0)
