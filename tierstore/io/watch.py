"""Slow or stuck: work that may take hours, on a disk that has to answer.

Scope: when a wait is over because nothing moves; blocking work that is given up then.
Not here: the work; what a loop of its own waits for (`runtime.py`); coroutines of a store (`store/owner.py`).
Owner: an `Attended` owns its thread.

[Note: a standstill] Work as a whole has no deadline: 100 GB take a slow disk hours. Its steps have one: while the
oldest call of the system that has not returned is the same, or none has been begun, nothing moves. That time is counted
look by look, an interval at most for each, so that a process that was stopped (Ctrl-Z) and goes on has lost none.
Blocking work may compute for long between two calls: where none stands, it moves as long as its threads take CPU time.

[Note: given up] A thread cannot be stopped in the middle of a call of the system. Who gives up waiting for it leaves it
all that it uses, files, memory and locks: it ends as after a failure when its call returns, and gives them back then.
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
"""A signal that comes just as a wait begins is seen when it ends."""
_IDLE = 0.1
"""Of a core: work that computes takes more. A bar on a terminal, drawn meanwhile, took 2 % on a 2-core machine."""


class Watch:
    """Looks after the calls of a backend. See [Note: a standstill].

    Args:
        timeout_s: for so long nothing may move.
        clock: seconds, monotonic.
        cpu_clock: CPU seconds of work that may compute; None: what moves makes calls.
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
        """Between two looks."""
        return self.timeout_s / _LOOKS

    def begin(self) -> Callable[[], bool]:
        """A wait begins: what tells, at each look, whether it is over. A call that was found stuck ends it at once."""
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
        """The error of a wait that is over."""
        return Timeout("\n  ".join([f"{what}: nothing has moved for {self.timeout_s:g} s; in flight:", *in_flight]))


class Attended:
    """Blocking work in a thread of its own. See [Note: given up].

    Attributes:
        backend: whose calls show that it moves; the work should use it for all of them.
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
        """The result of `function`. Ctrl-C: it is raised when the work has stopped, at its next call of the system.

        Raises:
            Timeout: nothing moves any more.
        """
        return self._result(partial(function, *args, **kwargs), is_awaited=True)

    def look(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `call`, of work that changes nothing: nobody waits for what it computes.

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
                self._wait(self._threads.submit(int))  # behind the work, which may be under way though nobody has it
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
    """Of all threads but this one, which looks."""
    return time.process_time() - time.thread_time()
