"""Small work for a thread, as much of it in one job as has come while the job before was under way.

Scope: gathering items, one job after the other, and their end.
Not here: what is done with the items; threads (`workers.py`).
Owner: the loop thread.

[Note: batches] The way to a thread and back takes longer than what a GPU does in most jobs, and the interpreter's turns
that it takes are turns that the thread which launches the model's kernels waits for. Nobody waits for company: who
finds the thread idle goes at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tierstore.io.workers import Job, Priority, WorkerPool

T = TypeVar("T")


class _Item(NamedTuple, Generic[T]):
    value: T
    ended: Job[None]


class Batches(Generic[T]):
    """Items of one sort on their way through a pool.

    Args:
        run: does some of them, in a thread; if it raises, all of them have failed.
    """

    def __init__(self, workers: WorkerPool, priority: Priority, run: Callable[[Sequence[T]], None]) -> None:
        self._workers = workers
        self._priority = priority
        self._run = run
        self._waiting: list[_Item[T]] = []
        self._is_busy = False

    def submit(self, value: T) -> Job[None]:
        """Ends when this one is done; that the pool is closed is told there, too. See [Note: batches].

        Cancellation: held back until then.
        """
        item = _Item(value, Job(loop=asyncio.get_running_loop()))
        self._waiting.append(item)
        if not self._is_busy:
            self._start()
        return item.ended

    def _start(self) -> None:
        items, self._waiting, self._is_busy = self._waiting, [], True
        try:
            job = self._workers.submit(self._priority, self._run, [item.value for item in items])
        except BaseException as error:
            self._end(items, error)
        else:
            job.add_done_callback(lambda job: self._end(items, job.exception()))

    def _end(self, items: Sequence[_Item[T]], error: BaseException | None) -> None:
        for item in items:
            if error is None:
                item.ended.set_result(None)
            else:
                item.ended.set_exception(error)
                item.ended.exception()  # who waits is told, if somebody still does
        self._is_busy = False
        if self._waiting:
            self._start()
