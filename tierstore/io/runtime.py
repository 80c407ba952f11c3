"""The one border between blocking and asynchronous code: an event loop in a thread of its own.

Scope: calls from other threads, owned tasks, errors that nobody waited for, giving up waits, closing.
Not here: worker threads (see `io/workers.py`); what the tasks do (see `store/`).
Owner: the runtime owns its thread, its loop, and each task started through it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar, TypeVarTuple, cast

from tierstore.errors import ClosedError, Timeout
from tierstore.io import slices, stacks
from tierstore.io.backend import Backend
from tierstore.io.file_threads import FileThreads
from tierstore.io.fork import ForkAware
from tierstore.io.loop import Loop
from tierstore.io.tasks import raise_first
from tierstore.io.threads import WaitedThread
from tierstore.io.watch import Watch

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EXIT_TIMEOUT_S = 10.0
_TASKS_SHOWN = 20


class _Call(Generic[T]):
    """A call from another thread: what to run, and a lock that is released when it has ended."""

    __slots__ = ("args", "error", "function", "has_ended", "is_abandoned", "result", "task", "waiting")

    def __init__(self, function: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.task: asyncio.Task[T] | None = None
        self.result: T | None = None
        self.error: BaseException | None = None
        self.is_abandoned = False
        self.has_ended = False
        self.waiting = threading.Lock()
        self.waiting.acquire()

    def end(self) -> None:
        """Wakes the waiter; twice is fine."""
        self.has_ended = True
        if self.waiting.locked():
            self.waiting.release()


class Runtime(ForkAware):
    """An event loop in a daemon thread, entered by `call` and `post`.

    Args:
        timeout_s: for each wait that names none, the longest time in which nothing may move.
        backend: its system calls show that something moves; None: a wait may take no longer than that.
    """

    def __init__(self, name: str = "tierstore", timeout_s: float = 300.0, backend: Backend | None = None) -> None:
        super().__init__()
        self.name = name
        self.timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: WaitedThread | None = None
        self._is_open = self._is_over = False
        self._closes = threading.Lock()  # at the end of the interpreter another thread may be closing it, too
        self._lost: ClosedError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._calls: set[_Call[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failures: deque[BaseException] = deque()
        self._backend = backend or Backend()
        self._descriptions: list[Callable[[], list[str]]] = [self._backend.in_flight]
        self._with_next: deque[Callable[[], object]] = deque()
        self._crosses = threading.RLock()  # no thread may overtake what another one takes from `_with_next`

    def start(self) -> Runtime:
        """Starts the loop thread. Returns itself.

        Raises:
            ClosedError: it was started before.
        """
        self.check_process()
        if self._loop is not None:
            raise ClosedError(f"runtime {self.name!r} was started before; make a new one")
        self._loop = Loop()
        self._file_threads = FileThreads(4, f"{self.name}-files")
        self._loop.set_default_executor(self._file_threads)
        self._loop.set_exception_handler(self._on_stray_error)
        self._thread = WaitedThread(self._run, f"{self.name}-loop")
        self._thread.start()
        self._is_open = True
        atexit.register(self._close_at_exit)
        return self

    @property
    def is_open(self) -> bool:
        """Whether it was started, and nobody has begun to close it."""
        return self._is_open

    @property
    def has_ended(self) -> bool:
        """Whether it was not started, or has ended: nothing of it runs."""
        return self._loop is None or self._is_over

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop.

        Raises:
            ClosedError: it was not started, is closed, or belongs to the parent of a forked process.
        """
        self._check_open()
        return cast(asyncio.AbstractEventLoop, self._loop)

    def call(
        self,
        function: Callable[[*Ts], Coroutine[Any, Any, T]],
        *args: *Ts,
        timeout_s: float | None = None,
        raises_kept: bool = True,
    ) -> T:
        """Runs a coroutine function on the loop and waits for its result.

        Args:
            raises_kept: False runs it although a failure is kept, and keeps that: for work that must be done in any
                case.

        Threads: any but the loop's.

        Raises:
            Timeout: nothing moves any more; the coroutine was cancelled, and an error that it raises then is kept.
            ClosedError: the runtime is not running, was closed meanwhile, or lost its loop thread.
            BaseException: a kept failure (then nothing was started), or whatever the coroutine raised.
        """
        self._check_open()
        self._refuse_loop_thread("call")
        if raises_kept:
            self.raise_failure()
        call = _Call(function, args)
        self._calls.add(call)
        watch = Watch(self._backend, self.timeout_s if timeout_s is None else timeout_s)
        try:
            self._to_loop(self._begin, call)
            if not self._ends_within(watch, call):
                raise watch.timeout(f"{stacks.named(function)} did not end", self.in_flight())
        except BaseException:  # KeyboardInterrupt too: nobody waits any more
            with contextlib.suppress(ClosedError):
                self._to_loop(self._abandon, call)
            raise
        finally:
            self._calls.discard(call)
        if call.error is not None:
            self._forget(call.error)
            raise call.error
        return cast(T, call.result)

    def _ends_within(self, watch: Watch, call: _Call[Any]) -> bool:
        """Whether a call ends before its watch gives up."""
        is_over = watch.begin()
        while not call.waiting.acquire(timeout=min(watch.interval_s, threading.TIMEOUT_MAX)):
            if is_over():
                return False
        return True

    def post(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Makes the loop call `function` soon; an error of it is kept, and the next `call` raises it. Any thread."""
        self._check_open()
        self._to_loop(function, *args)

    def post_with_next(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Like `post`, but waits until something else is called or posted, and goes just before that."""
        self._check_open()
        self._with_next.append(partial(function, *args))

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Starts a task that the runtime owns; its failure is kept, and the next `call` raises it, once.

        Threads: the loop thread only.
        """
        try:
            task = self.loop.create_task(work, name=name)
        except ClosedError:
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def keep_failure(self, error: BaseException) -> None:
        """Keeps an error for which nobody waits any more. Any thread."""
        if self._lost is None or error is not self._lost.__cause__:  # that one is reported as `_lost`
            self._failures.append(error)

    def raise_failure(self) -> None:
        """Raises the first kept error, if there is one, with the others as notes on it; none of them stays kept."""
        failures = []
        while self._failures:  # one by one: any thread may add to them
            failures.append(self._failures.popleft())
        if failures:
            raise_first(failures)

    def describe(self, description: Callable[[], list[str]]) -> None:
        """Adds lines to the message of a timeout, as from `WorkerPool.in_flight`. Any thread may call `description`."""
        self._descriptions.append(description)

    def in_flight(self) -> list[str]:
        """Tasks and threads, each with its innermost frames, and the lines that `describe` adds. Any thread."""
        lines = []
        if self._loop is not None and self._thread is not None:
            tasks = sorted(asyncio.all_tasks(self._loop), key=lambda task: task.get_name())
            lines += [f"task {task.get_name()}: {stacks.of_task(task)}" for task in tasks[:_TASKS_SHOWN]]
            if len(tasks) > _TASKS_SHOWN:
                lines.append(f"and {len(tasks) - _TASKS_SHOWN} more tasks")
            lines += [f"loop thread: {stacks.of_thread(self._thread)}", *self._file_threads.in_flight()]
        for description in self._descriptions:
            lines += description()
        return lines

    def close(self, timeout_s: float | None = None) -> None:
        """Ends everything that it owns. Twice is fine, as after an interrupt; in the child of a fork it does nothing.

        Order: refuse new calls; cancel tasks and calls, wait for them; end file threads; stop the loop; join its
        thread; close the loop. (A store finishes its write-backs and joins its workers before this, in a `call`.)

        Threads: any but the loop's.

        Raises:
            Timeout: tasks did not end in time; close again to go on waiting.
            BaseException: a kept failure, after all was closed.
        """
        if self.is_inherited or self._loop is None or self._thread is None or self._loop.is_closed():
            return
        self._refuse_loop_thread("close")
        self._is_open = False
        with contextlib.suppress(ClosedError):  # another thread has closed it meanwhile
            self._to_loop(self._begin_closing)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._thread.ends_within(limit_s):
            told = f"runtime {self.name!r} did not close within {limit_s} s; in flight:"
            raise Timeout("\n  ".join([told, *self.in_flight()]))
        self._is_over = True
        with self._closes:
            self._loop.close()
        atexit.unregister(self._close_at_exit)
        for call in list(self._calls):
            if not call.has_ended:  # queued after the loop had stopped; the waiters of the others will wake soon
                call.error = self._closed()
                call.end()
        self.raise_failure()

    def __enter__(self) -> Runtime:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_at_exit(self) -> None:
        self.close(min(self.timeout_s, EXIT_TIMEOUT_S))

    def _to_loop(self, function: Callable[..., object], *args: Any) -> None:
        loop = cast(asyncio.AbstractEventLoop, self._loop)
        try:
            with self._crosses:
                while self._with_next:
                    loop.call_soon_threadsafe(self._with_next.popleft())
                loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise self._closed() from error

    def _forget(self, error: BaseException) -> None:
        # A call raises it now, so it must not be raised once more.
        with contextlib.suppress(ValueError):
            self._failures.remove(error)

    def _check_open(self) -> None:
        self.check_process()
        if not self._is_open:
            raise self._closed()

    def _closed(self) -> ClosedError:
        return ClosedError(f"runtime {self.name!r} is closed" if self._lost is None else str(self._lost))

    def _refuse_loop_thread(self, verb: str) -> None:
        if threading.current_thread() is self._thread:  # not by identifier: that of an ended thread is used again
            raise RuntimeError(f"{verb} on the loop thread would wait for itself; await instead")

    # On the loop thread.

    def _run(self) -> None:
        """Runs the loop. Tasks keep their errors; one that ends the loop nonetheless (`SystemExit`) fails all calls."""
        slices.ask_for_short_slices()
        loop = cast(asyncio.AbstractEventLoop, self._loop)
        while not loop.is_closed():  # closed by a thread that was interrupted while it started this one
            try:
                loop.run_forever()
            except BaseException as error:
                self._lose(error)
                if self._closing is not None and self._closing.done():  # its `loop.stop()` is lost, too
                    self._closing = None
                loop.call_soon(self._begin_closing)  # so that tasks end in order, and give back what they use
            else:
                return

    def _lose(self, error: BaseException) -> None:
        self._is_open = False
        self._lost = ClosedError(
            f"the loop thread of runtime {self.name!r} was ended by {error!r}; close what uses it, and open it again"
        )
        self._lost.__cause__ = error
        waiting = [call for call in self._calls.copy() if not call.has_ended]
        for call in waiting:
            call.error = self._lost
            call.end()
        if not waiting:
            self.keep_failure(self._lost)

    def _begin(self, call: _Call[Any]) -> None:
        if not self._is_open:
            call.error = self._closed()
            call.end()
            return
        try:
            task = asyncio.get_running_loop().create_task(call.function(*call.args), name=stacks.named(call.function))
        except Exception as error:
            call.error = error
            call.end()
            return
        call.task = task
        task.add_done_callback(partial(self._on_call_done, call))

    def _on_call_done(self, call: _Call[Any], task: asyncio.Task[Any]) -> None:
        call.task = None
        if call.has_ended:  # the loop was lost
            if not task.cancelled() and (error := task.exception()) is not None:
                self.keep_failure(error)
            return
        if task.cancelled():
            call.error = ClosedError(f"{task.get_name()} was cancelled")
        elif (error := task.exception()) is not None:
            call.error = error
            if call.is_abandoned:
                self.keep_failure(error)
        else:
            call.result = task.result()
        call.end()

    def _abandon(self, call: _Call[Any]) -> None:
        call.is_abandoned = True
        if call.task is not None:
            call.task.cancel()
        elif call.error is not None:
            self.keep_failure(call.error)  # it failed after its waiter had given up

    def _begin_closing(self) -> None:
        closing = self._closing  # not None if `close` is called again, as after an interrupt
        if closing is None or (closing.done() and (closing.cancelled() or closing.exception() is not None)):
            self._closing = asyncio.get_running_loop().create_task(self._end_tasks(), name="close")

    async def _end_tasks(self) -> None:
        loop = asyncio.get_running_loop()
        while others := asyncio.all_tasks() - {self._closing}:  # tasks that end may start others
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        await loop.shutdown_asyncgens()
        # Not loop.shutdown_default_executor(): it starts a thread, which the end of the interpreter forbids.
        self._file_threads.shutdown()
        loop.stop()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.keep_failure(error)

    def _on_stray_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.keep_failure(error if error is not None else RuntimeError(str(context.get("message"))))
