"""Forwards that go through a model side by side: all of them pass one group before any goes on to the next.

Scope: taking turns. Not here: what a group is (`groups.py`), who calls this (`engine.py`).
Owner: the thread that trains; of its helpers one at a time runs, and that one is the training side.

[Note: taking turns] A model cannot be cut from outside, but a thread can wait in the middle of it. So each forward has
a thread, which passes the turn on when it comes to another group, and goes on when all the others have come as far.
Autograd counts the nodes that a thread makes, and visits first what was made last: one backward over the sum of the
losses walks forwards of fresh threads side by side, too, without threads, on any device.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class _GivenUp(BaseException):
    """Ends a forward whose result nobody wants any more."""


class SideBySide(Generic[T]):
    """Runs jobs in threads that take turns.

    Args:
        jobs: each calls `meet` where it may have to wait.
    """

    def __init__(self, jobs: Sequence[Callable[[], T]]) -> None:
        self._jobs = jobs
        self._results: dict[int, T] = {}
        self._turns = [threading.Semaphore(0) for _ in jobs]
        self._waiting = deque(range(len(jobs)))  # those whose turn comes, the next one first
        self._failure: BaseException | None = None
        self._is_given_up = False
        self._own = threading.local()

    def run(self) -> list[T]:
        """The results, in the order of the jobs.

        Raises:
            BaseException: the first that a job raised, when all of them have ended.
        """
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=True, name=f"tierstore-{name}")
            for name, body in ((f"forward-{index}", self._body(index)) for index in range(len(self._jobs)))
        ]
        for thread in threads:
            thread.start()
        try:
            self._pass_on()
            _join(threads)
        except BaseException:  # an interrupt
            self._is_given_up = True
            _join(threads)
            raise
        if self._failure is not None:
            raise self._failure
        return [self._results[index] for index in range(len(self._jobs))]

    def meet(self, place: object) -> None:
        """Go on when all the others have come to a place after the one where this job was, or have ended."""
        if self._own.place == place:
            return
        self._own.place = place
        self._waiting.append(self._own.index)
        self._pass_on()
        self._wait(self._own.index)

    def _body(self, index: int) -> Callable[[], None]:
        job, entered = self._jobs[index], _thread_state()

        def body() -> None:
            self._own.index, self._own.place = index, None
            try:
                self._wait(index)
                with entered():
                    self._results[index] = job()
            except _GivenUp:
                pass
            except BaseException as error:
                self._failure, self._is_given_up = self._failure or error, True
            finally:
                self._pass_on()

        return body

    def _wait(self, index: int) -> None:
        self._turns[index].acquire()
        if self._is_given_up:
            raise _GivenUp

    def _pass_on(self) -> None:
        if self._waiting:
            self._turns[self._waiting.popleft()].release()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


def _thread_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What torch keeps per thread, as it is here: entered in another thread, it is the same there."""
    is_grad = torch.is_grad_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(is_grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return entered
