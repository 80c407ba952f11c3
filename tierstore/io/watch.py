"""Slow or stuck: when to give up work that may take hours, on a disk that has to answer.

Scope: ending a wait because nothing moves; blocking work that is given up then.
Not here: the work; calls to a loop (`runtime.py`); coroutines of a store (`store/owner.py`).
Owner: an `Attended` owns its thread.

[Note: a standstill] The work as a whole has no deadline: 100 GB take a slow disk hours. Its steps have one: nothing
moves while the oldest system call that has not returned stays the same, or while none is in flight and none begins.
That time is added up look by look, at most one interval for each, so that work is not given up because its process was
stopped (Ctrl-Z) for a while. Blocking work may compute for long between two system calls: while none is in flight, the
work moves as long as its threads take CPU time.

[Note: given up] A thread cannot be stopped in the middle of a system call. Whoever gives up waiting for the thread
leaves it all that it uses: files, memory and locks. When its call returns, the thread ends as after a failure, and then
gives them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from tierstore.errors import Abandoned, Timeout
from tierstore.io import stacks
from tierstore.io.backend import Backend
from tierstore.io.file_threads import FileThreads

P = ParamSpec("P")
T = TypeVar("T")
_LOOKS = 10
_LONGEST_WAIT_S = 0.5
"""The longest single wait, because a signal that comes just as one begins is seen only at its end."""
_IDLE = 0.1
"""Part of a core; work that computes takes more. Drawing a progress bar meanwhile took 2 % on a 2-core machine."""


class Watch:
    """Watches the system calls of a backend. See [Note: a standstill].

    Args:
        timeout_s: the longest time in which nothing may move.
        clock: seconds, monotonic.
        cpu_clock: CPU seconds of work that may compute; None: only system calls show that the work moves.
    """

    def __init__(
        self,
        backend: Backend,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._backend = backend
        self._clock = clock
        self._cpu_clock = cpu_clock or (lambda: 0.0)
        self._stuck: object = None

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        return self.timeout_s / _LOOKS

    def begin(self) -> Callable[[], bool]:
        """Begins a wait. The result is to be called at each look, and tells whether to give up.

        A system call that another wait has found stuck ends this one at once.
        """
        quiet_s, seen, last, last_cpu = 0.0, self._backend.pulse(), self._clock(), self._cpu_clock()

        def is_over() -> bool:
            nonlocal quiet_s, seen, last, last_cpu
            now, cpu, pulse = self._clock(), self._cpu_clock(), self._backend.pulse()
            oldest, is_running = pulse
            stands = pulse == seen and (is_running or cpu - last_cpu <= _IDLE * (now - last))
            quiet_s = quiet_s + min(now - last, self.interval_s) if stands else 0.0
            seen, last, last_cpu = pulse, now, cpu
            if quiet_s >= self.timeout_s and is_running:
                self._stuck = oldest
            return quiet_s >= self.timeout_s or (is_running and oldest is self._stuck)

        return is_over

    def timeout(self, what: str, in_flight: list[str]) -> Timeout:
        """The error of a wait that was given up."""
        return Timeout("\n  ".join([f"{what}: nothing has moved for {self.timeout_s:g} s; in flight:", *in_flight]))


class Attended:
    """Blocking work in a thread of its own. See [Note: given up].

    Attributes:
        backend: its system calls show that the work moves, so the work should use it for all of them.
    """

    def __init__(self, name: str, timeout_s: float, backend: Backend | None = None) -> None:
        self.backend = backend or Backend()
        self._name = name
        self._watch = Watch(self.backend, timeout_s, cpu_clock=_others_cpu_s)
        self._threads = FileThreads(1, name)

    def __enter__(self) -> Attended:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._threads.shutdown(wait=False)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`. Ctrl-C is raised when the work has stopped, at its next system call.

        Raises:
            Timeout: nothing moves any more.
        """
        return self._result(partial(function, *args, **kwargs), is_awaited=True)

    def look(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `call`, for work that changes nothing: Ctrl-C does not wait until the work has stopped.

        Raises:
            Abandoned: Ctrl-C, at once.
        """
        return self._result(partial(function, *args, **kwargs), is_awaited=False)

    def _result(self, function: Callable[[], T], *, is_awaited: bool) -> T:
        try:
            work = self._threads.submit(function)
            self._wait(work)
        except BaseException as error:  # KeyboardInterrupt too
            self.backend.refuse(f"{self._name} was given up")
            if isinstance(error, KeyboardInterrupt) and not is_awaited:
                raise Abandoned from None
            if not isinstance(error, Timeout):
                self._wait(self._threads.submit(int))  # queued behind the work, which may run even if `submit` raised
            raise
        return work.result()

    def _wait(self, work: Future[Any]) -> None:
        is_over = self._watch.begin()
        while not wait([work], min(self._watch.interval_s, _LONGEST_WAIT_S)).done:
            if is_over():
                raise self._watch.timeout(f"{self._name} does not go on", self._in_flight())

    def _in_flight(self) -> list[str]:
        waiting = stacks.of_threads(self.backend.threads_in_flight())
        return list(dict.fromkeys([*self.backend.in_flight(), *self._threads.in_flight(), *waiting]))


def _others_cpu_s() -> float:
    """CPU seconds of all threads except the calling one, which looks."""
    return time.process_time() - time.thread_time()
