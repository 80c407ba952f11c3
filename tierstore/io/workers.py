"""Threads that do the blocking work: one hop per job, most urgent first.

Scope: priority, completion on the event loop, closing.
Not here: what a job does; the loop (see `io/runtime.py`).
Owner: the pool owns its threads; the loop thread submits; the job's future belongs to its submitter.

[Note: a cancelled await does not stop a job]
A thread cannot be stopped in the middle of a system call, so the buffer that it fills stays in use until the job ends.
A `Job` therefore refuses to be cancelled: its done-callbacks run when the thread has really finished, and that is
where leases are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, TypeVarTuple

from tierstore.errors import ClosedError, Timeout
from tierstore.io import stacks
from tierstore.io.fork import ForkAware
from tierstore.io.tasks import carried
from tierstore.io.threads import WaitedThread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Priority(enum.IntEnum):
    """Smaller goes first; equal ones in the order of submission.

    A write frees memory that reads ahead (`PREFETCH`) need. A write for a commit (`COMMIT`), of data that stay in
    memory, frees none, so it goes last, unless somebody waits for that commit (`WorkerPool.hurry`).
    """

    DEMAND = 0
    UPDATE = 1
    WRITE = 2
    PREFETCH = 3
    COMMIT = 4


_USUAL = tuple(Priority)
_HURRIED = (Priority.DEMAND, Priority.UPDATE, Priority.WRITE, Priority.COMMIT, Priority.PREFETCH)


class Job(asyncio.Future[T]):
    """Completion of one job. See [Note: a cancelled await does not stop a job].

    Awaiting it directly holds a cancellation back until the job has ended.
    """

    def cancel(self, msg: Any = None) -> bool:
        """Refused: the thread goes on, so the future stays pending."""
        return False


class _Work(Generic[T]):
    __slots__ = ("args", "function", "job", "loop", "priority")

    def __init__(self, priority: Priority, function: Callable[..., T], args: tuple[Any, ...], job: Job[T]) -> None:
        self.priority = priority
        self.function = function
        self.args = args
        self.job = job
        self.loop = job.get_loop()

    def __str__(self) -> str:
        return f"{stacks.named(self.function, self.args)} ({self.priority.name.lower()})"


class WorkerPool(ForkAware):
    """Daemon threads over one priority queue."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__()
        if threads < 1:
            raise ValueError(f"pool {name!r} needs at least one thread, not {threads}")
        self.name = name
        self._queues: tuple[deque[_Work[Any]], ...] = tuple(deque() for _ in Priority)
        self._order = _USUAL
        self._hurries = 0
        # One True per queued job, then one False per thread: a thread that took a True finds a job in some queue.
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._running: dict[str, tuple[_Work[Any], float]] = {}
        self._lock = threading.Lock()  # no job may be queued behind the tokens that stop the threads
        self._is_closed = False
        self._lost: ClosedError | None = None
        self._threads = [WaitedThread(self._work, f"{name}-{index}") for index in range(threads)]
        self._is_started = False

    def submit(self, priority: Priority, function: Callable[[*Ts], T], *args: *Ts) -> Job[T]:
        """Queues a job; its future completes on the loop, when the thread has finished the job.

        Threads: the loop thread only.

        Raises:
            ClosedError: the pool is closed, was given up, or has lost a thread.
        """
        self.check_process()  # before the lock, which may have been held when this process was forked
        job: Job[T] = Job(loop=asyncio.get_running_loop())
        with self._lock:
            self._check_open()
            if not self._is_started:
                for thread in self._threads:
                    if thread.ident is None:  # otherwise started before the system refused a later one
                        thread.start()
                self._is_started = True
            self._queues[priority].append(_Work(priority, function, args, job))
            self._tokens.put(True)
        return job

    async def perform(self, is_quick: bool, priority: Priority, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """The result of a job. A quick one runs right here, because a hop to a thread and back takes longer."""
        if not is_quick:
            return await self.submit(priority, function, *args)
        self._check_open()
        return function(*args)

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """In this block somebody waits for a commit: its jobs go before reads ahead. The loop thread only."""
        self._hurries += 1
        self._order = _HURRIED
        try:
            yield
        finally:
            self._hurries -= 1
            self._order = _HURRIED if self._hurries else _USUAL

    def in_flight(self) -> list[str]:
        """One line per running job, with the stack of its thread, and one for the queued jobs. Any thread."""
        now, running, lines = time.monotonic(), self._running.copy(), []
        for thread in self._threads:
            if thread.name in running:
                work, start = running[thread.name]
                lines.append(f"{thread.name}: {work}, for {now - start:.1f} s: {stacks.of_thread(thread)}")
        waiting = sum(len(queue) for queue in self._queues)
        return [*lines, f"{self.name}: {waiting} jobs queued"] if waiting else lines

    def give_up(self) -> None:
        """End all waits for jobs with `ClosedError`; running jobs go on, and `close` waits for them. The loop thread.

        A running job still uses the buffers that its waiter frees now, so these must not be lent again.
        """
        lost = ClosedError(f"worker pool {self.name!r} was given up")
        self._refuse(lost)
        for work, _ in self._running.copy().values():
            _finish(work.job, None, lost)

    def close(self, timeout_s: float) -> None:
        """Refuses new jobs, lets the queued ones end, joins the threads. Twice is fine. Any thread but its own.

        Raises:
            Timeout: a job did not end in time; call again to go on waiting.
        """
        if self.is_inherited:
            return
        with self._lock:
            if not self._is_closed:
                for _ in self._threads:
                    self._tokens.put(False)
                self._is_closed = True  # last: after an interrupt here another `close` puts all tokens
        deadline = time.monotonic() + timeout_s
        if not all(thread.ends_within(max(0.0, deadline - time.monotonic())) for thread in self._threads):
            raise Timeout(
                f"worker pool {self.name!r} did not end within {timeout_s} s; in flight: {'; '.join(self.in_flight())}"
            )

    def _check_open(self) -> None:
        self.check_process()
        if self._lost is not None:
            raise ClosedError(str(self._lost)) from self._lost.__cause__
        if self._is_closed:
            raise ClosedError(f"worker pool {self.name!r} is closed")

    def _next(self) -> _Work[Any] | None:
        """The most urgent job; None if there is none left because all were given up."""
        while True:
            for priority in self._order:
                with contextlib.suppress(IndexError):
                    return self._queues[priority].popleft()
            if self._lost is not None:
                return None

    def _work(self) -> None:
        name = threading.current_thread().name
        try:
            while self._tokens.get():
                if (work := self._next()) is not None:
                    self._running[name] = (work, time.monotonic())
                    if self._lost is None:
                        _run(work)
                    else:  # given up between the two lines above, by a thread that did not see this job
                        _end(work, None, self._lost)
                    del self._running[name]
                del work  # an idle thread keeps no buffer or tensor alive
        except BaseException as error:  # not a job's, which `_run` catches: this one ends the thread
            self._lose_thread(name, error)

    def _lose_thread(self, name: str, error: BaseException) -> None:
        """Fails the job of a thread that is gone, and all queued jobs, so that nobody waits for them in vain."""
        lost = ClosedError(f"thread {name} was ended by {error!r}; close what uses it, and open it again")
        lost.__cause__ = error
        self._refuse(lost)
        if name in self._running:
            _end(self._running.pop(name)[0], None, lost)

    def _refuse(self, lost: ClosedError) -> None:
        with self._lock:
            self._lost = lost
        while (work := self._next()) is not None:
            _end(work, None, lost)


def _run(work: _Work[Any]) -> None:
    result: Any = None
    error: BaseException | None = None
    try:
        result = work.function(*work.args)
    except BaseException as caught:  # whatever it is, the waiter must hear of it
        error = caught
    _end(work, result, error)


def _end(work: _Work[Any], result: Any, error: BaseException | None) -> None:
    # The arguments are dropped here, in the thread, so that what a job held is gone before its waiter goes on.
    work.args = ()
    try:
        work.loop.call_soon_threadsafe(_finish, work.job, result, error)
    except RuntimeError:
        return  # the loop is closed: nobody waits any more
    finally:
        del result, error


def _finish(job: Job[Any], result: Any, error: BaseException | None) -> None:
    if job.done():
        return  # failed before: the job was given up, or its thread was lost
    if error is None:
        job.set_result(result)
    else:
        job.set_exception(carried(error))
