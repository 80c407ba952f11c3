"""The one event loop that owns a store: other loops are refused, and failures that nobody heard of are kept.

Scope: the loop check, calls in progress and how long they may stand still, background tasks, coming to rest.
Not here: what the calls do (`tensors.py`); a loop in a thread of its own (`io/runtime.py`).
Owner: the event loop that called `begin`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar, TypeVarTuple

from tierstore.errors import ClosedError, Timeout
from tierstore.io import stacks
from tierstore.io.fork import ForkAware
from tierstore.io.tasks import raise_first
from tierstore.io.watch import Watch
from tierstore.io.workers import Priority, WorkerPool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LoopOwner(ForkAware):
    """What a store knows of the loop that runs it.

    Args:
        watch: tells when to give up a wait, because nothing moves any more.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.is_open = False
        self._watch = watch
        self._descriptions: list[Callable[[], list[str]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[object, str] = {}
        self._tasks: dict[asyncio.Task[Any], bool] = {}
        self._failures: list[BaseException] = []
        self._ended = asyncio.Event()

    def begin(self) -> None:
        """Make the running loop the owner.

        Raises:
            ClosedError: a loop became the owner before.
        """
        self.check_process()
        if self._loop is not None:
            raise ClosedError("a store is opened once; make another one")
        self._loop = asyncio.get_running_loop()

    def check(self) -> None:
        """Refuse calls from elsewhere, and calls before the opening or after the end.

        Raises:
            RuntimeError: called from another loop, or from none.
            ClosedError: the store is not open, or belongs to the parent of this forked process.
        """
        self.check_process()
        try:
            loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if self._loop is not None and loop is not self._loop:
            raise RuntimeError("a store belongs to the event loop that opened it; call it from a task of that loop")
        if not self.is_open:
            raise ClosedError("the store is not open; use it inside 'async with'")

    @contextlib.contextmanager
    def call(self, what: str) -> Iterator[None]:
        """In here a call is in progress; the message of a timeout names it."""
        self.check()
        key = object()
        self._calls[key] = what
        try:
            yield
        finally:
            del self._calls[key]
            self._ended.set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str, *, is_load: bool = False) -> asyncio.Task[None]:
        """Start a task that the store owns. Its failure is kept; that of a load goes to those who wait for it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._own(task, is_load=is_load)
        return task

    def _own(self, task: asyncio.Task[Any], *, is_load: bool = False) -> None:
        self._tasks[task] = is_load
        task.add_done_callback(self._task_ended)

    def later(self, workers: WorkerPool, job: Callable[[], None], name: str) -> None:
        """Run a job in a worker, without waiting."""

        async def run() -> None:
            await workers.submit(Priority.WRITE, job)

        self.spawn(run(), name)

    def keep_failure(self, error: BaseException) -> None:
        """Keep an error that nobody waits for."""
        self._failures.append(error)

    def raise_kept(self) -> None:
        """Raise the first kept error, if there is one, with the others noted on it; then all are forgotten."""
        failures, self._failures = self._failures, []
        if failures:
            raise_first(failures)

    def describe(self, description: Callable[[], list[str]]) -> None:
        """Have `description` add lines to the message of a deadline that has passed."""
        self._descriptions.append(description)

    async def run(self, what: str, work: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """Run a call for as long as something moves, and return its result.

        Cancellation: cancels the work, and is held back until that has ended.

        Raises:
            Timeout: the work is cancelled, and ends when its disk answers; if it then fails, the failure is kept.
        """
        with self.call(what):
            return await self.in_time(f"{what} did not end", work(*args))

    async def in_time(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        """As `run`, for work that does not count as a call. See [Note: given up] in `io/watch.py`."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                async with self.deadline(what):
                    await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
                task.cancel()
            except Timeout:
                if not task.done():  # it may have ended in the same turn of the loop
                    task.cancel()
                    self._own(task)
                    raise
        try:
            result = task.result()
        finally:
            del task  # else an error and this frame would hold each other, and all arguments
        if cancelled is not None:
            raise cancelled
        return result

    @contextlib.asynccontextmanager
    async def deadline(self, what: str) -> AsyncIterator[None]:
        """What is awaited in here is cancelled when nothing moves any more.

        Raises:
            Timeout: says `what`, and lists what was in flight.
        """
        loop, is_over = asyncio.get_running_loop(), self._watch.begin()
        next_look: asyncio.Handle

        def look() -> None:
            nonlocal next_look
            if is_over():
                limit.reschedule(loop.time())
            else:
                next_look = loop.call_later(self._watch.interval_s, look)

        next_look = loop.call_soon(look)
        try:
            async with asyncio.timeout(None) as limit:
                yield
        except Timeout:  # of a deadline further in: it says more
            raise
        except TimeoutError:
            raise self._watch.timeout(what, self._in_flight()) from None
        finally:
            next_look.cancel()

    def _in_flight(self) -> list[str]:
        tasks = [f"task {task.get_name()}: {stacks.of_task(task)}" for task in self._tasks]
        return [*self._calls.values(), *tasks, *(line for lines in self._descriptions for line in lines())]

    async def rest(self) -> None:
        """Wait for the calls in progress, then end loads that nobody waits for, and wait for all tasks.

        Raises:
            Timeout: nothing moves any more.
        """
        async with self.deadline("the store did not close"):
            while self._calls:
                self._ended.clear()
                await self._ended.wait()
            for task in [task for task, is_load in self._tasks.items() if is_load]:
                task.cancel()
            while self._tasks:
                await asyncio.wait(set(self._tasks))

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        is_load = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None and not is_load:
            self.keep_failure(error)
