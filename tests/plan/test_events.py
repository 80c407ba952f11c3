"""Processes on a computed clock: order, memory, and shares of a resource that several use."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tierstore.errors import ConfigError
from tierstore.plan.events import Clock, Memory, Process, Shared, Signal


def equal_shares(total: float) -> object:
    def speeds(running: Mapping[str, int]) -> dict[str, float]:
        return dict.fromkeys(("read", "write"), total / sum(running.values()))

    return speeds


class Diary:
    """Notes of what happened, with their times."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lines: list[tuple[float, str]] = []

    def note(self, text: str) -> None:
        self.lines.append((round(self.clock.now_s, 9), text))

    def wait(self, name: str, *what: Signal | float) -> Process:
        yield from what
        self.note(name)

    def run(self, *processes: Process) -> list[tuple[float, str]]:
        ended = [self.clock.spawn(process) for process in processes]

        def everything() -> Process:
            yield from ended

        self.clock.run(self.clock.spawn(everything()))
        return self.lines


def test_processes_go_on_in_the_order_of_their_times() -> None:
    diary = Diary()
    assert diary.run(diary.wait("b", 2.0), diary.wait("a", 1.0), diary.wait("c", 1.0, 1.0)) == [
        (1.0, "a"), (2.0, "b"), (2.0, "c"),
    ]  # fmt: skip


def test_a_signal_wakes_all_who_wait_and_is_no_wait_later() -> None:
    diary, signal = Diary(), Signal()

    def sets() -> Process:
        yield 3.0
        diary.clock.set(signal)

    lines = diary.run(diary.wait("a", signal), diary.wait("b", signal), sets(), diary.wait("late", 5.0, signal))
    assert lines == [(3.0, "a"), (3.0, "b"), (5.0, "late")]


def test_who_waits_for_ever_is_an_error() -> None:
    diary = Diary()
    with pytest.raises(ConfigError, match="waits for itself"):
        diary.run(diary.wait("never", Signal()))


def test_memory_is_given_in_order_and_the_peak_is_kept() -> None:
    diary = Diary()
    memory = Memory(diary.clock, 10)

    def uses(name: str, nbytes: int) -> Process:
        yield memory.reserve(nbytes)
        diary.note(name)
        yield 1.0
        memory.free(nbytes)

    # The small request would fit at once, but must wait: otherwise small requests could starve the large one.
    assert diary.run(uses("a", 6), uses("large", 8), uses("small", 1)) == [(0, "a"), (1, "large"), (1, "small")]
    assert memory.peak_bytes == 9
    assert memory.reserve(0).is_set


def test_who_waits_for_memory_may_change_turns() -> None:
    diary = Diary()
    memory = Memory(diary.clock, 10)

    def uses(name: str) -> Process:
        yield memory.reserve(10, who=name)
        diary.note(name)
        yield 1.0
        memory.free(10)

    def rearranges() -> Process:
        yield 0.5
        memory.rearrange({"d": 0, "b": 2, "a": 1})

    names = ("first", "a", "b", "c", "d")
    told = diary.run(rearranges(), *map(uses, names))
    assert [name for _, name in told] == ["first", "d", "a", "c", "b"]


def test_jobs_share_the_rate_and_queue_by_priority() -> None:
    diary = Diary()
    disk = Shared(diary.clock, {"io": 2}, equal_shares(10.0))  # type: ignore[arg-type]

    def job(name: str, kind: str, amount: float, priority: int) -> Process:
        yield disk.submit("io", kind, amount, priority)
        diary.note(name)

    lines = diary.run(
        job("first", "read", 10, 3),
        job("second", "write", 20, 3),
        job("late", "read", 5, 3),
        job("urgent", "read", 5, 0),
    )
    # Two at once at 5/s each: first ends at 2; urgent goes before late, beside second.
    assert lines == [(2.0, "first"), (3.0, "urgent"), (4.0, "second"), (4.0, "late")]
    assert disk.busy_s("read", "write") == pytest.approx(4.0)
    assert disk.busy_s("adam") == 0
    assert dict(disk.amounts) == {"read": 20, "write": 20}


def test_late_jobs_end_although_the_clock_cannot_tell_so_short_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    disk = Shared(clock, {"io": 2}, equal_shares(2.0))  # type: ignore[arg-type]
    calls, after = itertools.count(), Clock.after

    def counted(self: Clock, *arguments: Any) -> None:
        assert next(calls) < 100, "the clock stands still"
        after(self, *arguments)

    def jobs() -> Process:
        yield 1e9
        yield from [disk.submit("io", "read", 1.0), disk.submit("io", "write", 1.0 + 1e-8)]

    monkeypatch.setattr(Clock, "after", counted)
    clock.run(clock.spawn(jobs()))
    assert clock.now_s == pytest.approx(1e9 + 1, abs=1e-6)


def test_nothing_to_do_takes_no_time() -> None:
    clock = Clock()
    assert Shared(clock, {"io": 1}, equal_shares(1.0)).submit("io", "read", 0).is_set  # type: ignore[arg-type]
