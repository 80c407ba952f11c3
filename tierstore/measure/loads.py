"""Loads that keep something busy, and their rates: in turn, and side by side.

Scope: `Load`, rounds over several of them, pairs at once.
Not here: what is repeated (`disk.py`, `links.py`, `compute.py`), medians (`plan/bandwidth.py`).
Owner: a load owns its threads while it runs.

[Note: in turn] A rate of a shared machine changes within seconds. Rates that are compared are therefore measured in
turn, A B A B, and never all of A before all of B: a slow moment falls on both. Every other round goes backwards, so
that no load always follows the same one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tierstore.io.tasks import together
from tierstore.io.workers import Priority, WorkerPool

CLOSE_TIMEOUT_S = 300.0
T = TypeVar("T")


class Runnable(Protocol):
    """Something that has a rate."""

    async def run(self, seconds: float) -> float:
        """Runs for about so long; returns the amount that was moved or done per second."""


@dataclass(frozen=True, slots=True)
class Load:
    """A job that worker threads repeat; each job hops from the loop to a thread and back, as in the engine.

    Attributes:
        job: one unit of work; `threads` of them at once.
        amount: what one job moves or does: bytes, elements, operations.
        clock: seconds, monotonic.
    """

    job: Callable[[], object]
    amount: float
    threads: int = 1
    clock: Callable[[], float] = time.perf_counter

    async def run(self, seconds: float) -> float:
        """Runs at least one job per thread; as many wait in the queue, so that no thread waits for the loop."""
        workers = WorkerPool("tierstore-measure", self.threads)
        try:
            await workers.submit(Priority.DEMAND, _nothing)  # the threads are there before the clock runs
            done, begun_s = 0, self.clock()

            def job() -> bool:
                # A job still queued when the time is over is skipped: it would run alone, with less in flight.
                if done >= self.threads and self.clock() - begun_s >= seconds:
                    return False
                self.job()
                return True

            async def lane() -> None:
                nonlocal done
                while await workers.submit(Priority.DEMAND, job):
                    done += 1

            await together(lane() for _ in range(2 * self.threads))
            return done * self.amount / (self.clock() - begun_s)
        finally:
            workers.close(CLOSE_TIMEOUT_S)


def _nothing() -> None:
    pass


def by_turns(items: Iterable[T], work: Callable[[T], object]) -> Callable[[], None]:
    """A job that takes the next item each time; jobs that run at once never have the same item, if there are enough."""
    waiting = deque(items)

    def job() -> None:
        one = waiting.popleft()
        try:
            work(one)
        finally:
            waiting.append(one)

    return job


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Several loads as one; its rate is their sum."""

    loads: tuple[Runnable, ...]

    async def run(self, seconds: float) -> float:
        return sum(await at_once(self.loads, seconds))


@dataclass(frozen=True, slots=True)
class Pace:
    """How long and how often loads run, and who is told.

    Attributes:
        seconds: of each run.
        deadline_s: on the clock; from then on no run begins, except those of the first round.
        tell: called before each run.
    """

    seconds: float
    rounds: int
    deadline_s: float
    tell: Callable[[str], None] = lambda name: None
    clock: Callable[[], float] = time.perf_counter


async def in_turn(loads: Mapping[str, Sequence[Runnable]], pace: Pace) -> dict[str, list[tuple[float, ...]]]:
    """Rates of each round by name; loads of one name run side by side. See [Note: in turn]."""
    rates: dict[str, list[tuple[float, ...]]] = {}
    for number in range(pace.rounds):
        for name, beside in loads.items() if number % 2 == 0 else reversed(list(loads.items())):
            if number and pace.clock() >= pace.deadline_s:
                return rates
            pace.tell(name)
            rates.setdefault(name, []).append(await at_once(beside, pace.seconds))
    return rates


async def at_once(loads: Iterable[Runnable], seconds: float) -> tuple[float, ...]:
    """Rates of loads that run side by side."""
    rates: dict[int, float] = {}

    async def one(index: int, load: Runnable) -> None:
        rates[index] = await load.run(seconds)

    await together(one(index, load) for index, load in enumerate(loads))
    return tuple(rates[index] for index in sorted(rates))
