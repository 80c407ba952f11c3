"""Threads for small files and other blocking work, as the executor of an event loop or on their own.

Scope: one executor. Not here: chunks, whose threads have priorities (see `workers.py`).
Owner: whoever made it shuts it down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from tierstore.io import stacks
from tierstore.io.tasks import carried

T = TypeVar("T")


class FileThreads(ThreadPoolExecutor):
    """An executor that works until it is shut down.

    The executor of the standard library refuses work as soon as the interpreter begins to end, before `atexit` handlers
    run. But that is when a store that nobody closed publishes its last step.
    """

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)  # event loops take no other class; it starts no thread here
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._own_threads = [
            threading.Thread(target=self._run, name=f"{name}_{index}", daemon=True) for index in range(threads)
        ]
        self._busy: set[threading.Thread] = set()
        self._is_open = True
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn` in one of the threads.

        Raises:
            RuntimeError: the executor was shut down.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(carried(error))

        with self._lock:
            if not self._is_open:
                raise RuntimeError("the threads for files were shut down")
            for thread in self._own_threads:
                if thread.ident is None:
                    thread.start()
            self._work.put(job)
        return future

    def in_flight(self) -> list[str]:
        """One line per busy thread. Any thread."""
        busy = sorted(self._busy.copy(), key=lambda thread: thread.name)
        return [f"{thread.name}: {stacks.of_thread(thread)}" for thread in busy]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new work, and end the threads after the queued work. Twice is fine."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                for _ in self._own_threads:
                    self._work.put(None)
        for thread in self._own_threads if wait else ():
            if thread.ident is not None:
                thread.join()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _run(self) -> None:
        me = threading.current_thread()
        while (job := self._work.get()) is not None:
            self._busy.add(me)
            job()
            self._busy.discard(me)
            del job  # an idle thread keeps nothing alive
