"""Small work for a thread in batches: a job takes all items that came while the job before it was running.

Scope: gathering items, running one job at a time, completing its items.
Not here: what is done with the items; threads (`workers.py`).
Owner: the loop thread.

[Note: batches] A hop to a thread and back takes longer than the GPU's work in most jobs. It also takes turns of the
GIL, and the thread that launches the model's kernels has to wait for those. No item waits for others to come: one that
finds no job running starts at once.
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
    """Items of one kind for a worker pool.

    Args:
        run: processes a batch of items in a thread; if it raises, all items of the batch have failed.
    """

    def __init__(self, workers: WorkerPool, priority: Priority, run: Callable[[Sequence[T]], None]) -> None:
        self._workers = workers
        self._priority = priority
        self._run = run
        self._waiting: list[_Item[T]] = []
        self._is_busy = False

    def submit(self, value: T) -> Job[None]:
        """A future that completes when this item is done; it also reports a closed pool. See [Note: batches].

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
                item.ended.exception()  # so asyncio does not complain if nobody waits for it any more
        self._is_busy = False
        if self._waiting:
            self._start()
