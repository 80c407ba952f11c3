"""One event loop owns a store: refusing all others, knowing what runs, and keeping failures that nobody heard of.

Scope: the loop check, calls in progress, background tasks, coming to rest.
Not here: what the calls do (`tensors.py`); a loop in a thread of its own (`io/runtime.py`).
Owner: the event loop that called `begin`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from tierstore.errors import ClosedError, Timeout
from tierstore.io.fork import ForkAware
from tierstore.io.tasks import raise_first
from tierstore.io.workers import Priority, WorkerPool


class LoopOwner(ForkAware):
    """What a store knows of the loop that runs it.

    Args:
        timeout_s: the deadline of its waits.
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self.is_open = False
        self._timeout_s = timeout_s
        self._descriptions: list[Callable[[], list[str]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[object, str] = {}
        self._tasks: dict[asyncio.Task[Any], bool] = {}
        self._failures: list[BaseException] = []
        self._ended = asyncio.Event()

    def begin(self) -> None:
        """The running loop becomes the owner.

        Raises:
            ClosedError: one was the owner before.
        """
        self.check_process()
        if self._loop is not None:
            raise ClosedError("a store is opened once; make another one")
        self._loop = asyncio.get_running_loop()

    def check(self) -> None:
        """Refuse calls from elsewhere, before the opening and after the end.

        Raises:
            RuntimeError: called from another loop, or from none.
            ClosedError: not open, or the store of a forked process's parent.
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
        """A call in progress, named for the message of a timeout."""
        self.check()
        key = object()
        self._calls[key] = what
        try:
            yield
        finally:
            del self._calls[key]
            self._ended.set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str, *, is_load: bool = False) -> asyncio.Task[None]:
        """Start a task of the store's own; its failure is kept, but a load tells those who wait for it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = is_load
        task.add_done_callback(self._task_ended)
        return task

    def later(self, workers: WorkerPool, job: Callable[[], None], name: str) -> None:
        """Run a job in a worker, without waiting."""

        async def run() -> None:
            await workers.submit(Priority.WRITE, job)

        self.spawn(run(), name)

    def keep_failure(self, error: BaseException) -> None:
        """Keep an error that nobody waits for."""
        self._failures.append(error)

    def raise_kept(self) -> None:
        """Raise the first kept error, if there is one, with the others noted on it; all are forgotten."""
        failures, self._failures = self._failures, []
        if failures:
            raise_first(failures)

    def describe(self, description: Callable[[], list[str]]) -> None:
        """Adds lines to the message of a deadline that has passed."""
        self._descriptions.append(description)

    @contextlib.asynccontextmanager
    async def deadline(self, what: str) -> AsyncIterator[None]:
        """What is awaited in here ends in time, or is cancelled.

        Raises:
            Timeout: `what`, and what was in flight.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            running = [*self._calls.values(), *(line for lines in self._descriptions for line in lines())]
            raise Timeout(f"{what} within {self._timeout_s} s; in flight: {'; '.join(running)}") from None

    async def rest(self) -> None:
        """Wait for the calls in progress, then end loads that nobody waits for, and wait for all tasks.

        Raises:
            Timeout: they did not end in time.
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
