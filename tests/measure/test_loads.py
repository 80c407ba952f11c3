"""Loads on a clock of their own: rates, rounds in turn, side by side, failures."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from tierstore.io.runtime import Runtime
from tierstore.measure.loads import Load, Pace, SideBySide, at_once, in_turn

pytestmark = pytest.mark.usefixtures("no_leaks")


class Ticks:
    """A clock that goes on by one second per job."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def job(self) -> None:
        self.now_s += 1.0


class Fixed:
    """A load with a known rate; it notes its name in `seen` at each run."""

    def __init__(self, name: str, rate: float, seen: list[str]) -> None:
        self.name, self.rate, self.seen = name, rate, seen

    async def run(self, seconds: float) -> float:
        self.seen.append(self.name)
        return self.rate


def test_a_rate_is_amount_over_time(runtime: Runtime) -> None:
    clock = Ticks()
    # One thread: a job and a second at a time; the jobs that wait in the queue when time is over are done and counted.
    assert runtime.call(Load(clock.job, 10.0, 1, clock).run, 5.0) == pytest.approx(10.0)


def test_as_many_jobs_at_once_as_threads(runtime: Runtime) -> None:
    meeting = threading.Barrier(3, timeout=10.0)
    most, now, lock, begun = [0], [0], threading.Lock(), itertools.count()

    def job() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        if next(begun) < 3:
            meeting.wait()  # the first three: none ends before all have begun
        with lock:
            now[0] -= 1

    assert runtime.call(Load(job, 1.0, 3).run, 0.0) > 0
    assert most[0] == 3


def test_a_job_that_fails_ends_the_load_and_its_threads(runtime: Runtime) -> None:
    def job() -> None:
        raise ValueError("no disk")

    with pytest.raises(ValueError, match="no disk"):
        runtime.call(Load(job, 1.0, 4).run, 10.0)


def test_rounds_go_round(runtime: Runtime) -> None:
    seen: list[str] = []
    told: list[str] = []
    loads = {name: [Fixed(name, rate, seen)] for name, rate in (("a", 1.0), ("b", 2.0))}
    rates = runtime.call(in_turn, loads, Pace(0.0, 3, float("inf"), told.append))
    assert rates == {"a": [(1.0,)] * 3, "b": [(2.0,)] * 3}
    assert seen == told == ["a", "b", "b", "a", "a", "b"]  # in turn: a slow moment falls on both


def test_time_that_is_over_ends_the_rounds_but_not_the_first(runtime: Runtime) -> None:
    seen: list[str] = []
    loads = {name: [Fixed(name, 1.0, seen)] for name in "ab"}
    assert runtime.call(in_turn, loads, Pace(0.0, 9, 0.0)) == {"a": [(1.0,)], "b": [(1.0,)]}
    clock: Callable[[], float] = iter([0.0, 0.0, 0.0, 2.0]).__next__
    some = Pace(0.0, 9, 1.0, clock=clock)
    assert {name: len(runs) for name, runs in runtime.call(in_turn, loads, some).items()} == {"a": 3, "b": 2}


def test_side_by_side(runtime: Runtime) -> None:
    seen: list[str] = []
    loads = tuple(Fixed(str(rate), rate, seen) for rate in (3.0, 4.0))
    assert runtime.call(at_once, loads, 0.0) == (3.0, 4.0)
    assert runtime.call(SideBySide(loads).run, 0.0) == 7.0
