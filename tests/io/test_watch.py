"""When a disk is stuck, and what becomes of work that is given up then."""

from __future__ import annotations

import io
import itertools
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from faults import HANG, FaultyBackend
from rich.console import Console

from tierstore.apps.progress import byte_bar
from tierstore.errors import Abandoned, ClosedError, Timeout
from tierstore.io import watch
from tierstore.io.backend import Backend
from tierstore.io.file_threads import FileThreads
from tierstore.io.watch import Attended, Watch

pytestmark = pytest.mark.usefixtures("no_leaks")
TIMEOUT_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def looks_until_over(watch: Watch, clock: Clock, step_s: float = 1.0, most: int = 100) -> int:
    is_over = watch.begin()
    for look in range(1, most):
        clock.now += step_s
        if is_over():
            return look
    return most


def test_a_slow_disk_is_never_stuck() -> None:
    backend, clock = Backend(), Clock()
    is_over = Watch(backend, TIMEOUT_S, clock).begin()
    with backend.calling("first", Path("a")):
        for _ in range(100):
            with backend.calling("read", Path("b")):
                clock.now += 0.9 * TIMEOUT_S
                assert not is_over()


def test_where_nothing_is_begun_the_wait_is_over() -> None:
    clock = Clock()
    watch = Watch(Backend(), TIMEOUT_S, clock)
    assert [looks_until_over(watch, clock) for _ in range(2)] == [10, 10]


def test_computing_between_calls_is_no_standstill_but_a_call_that_stands_is() -> None:
    backend, clock, cpu_share = Backend(), Clock(), 0.5
    watch = Watch(backend, TIMEOUT_S, clock, lambda: cpu_share * clock.now)
    assert looks_until_over(watch, clock) == 100
    with backend.calling("fsync", Path("stuck")):
        assert looks_until_over(watch, clock) == 10
    cpu_share = 0.0
    assert looks_until_over(watch, clock) == 10


def test_work_that_computes_is_attended_for_as_long_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, has_looked = itertools.count(1), threading.Event()

    def busy() -> float:
        if (look := next(looks)) == 50:
            has_looked.set()
        return 1000.0 * look

    monkeypatch.setattr(watch, "_others_cpu_s", busy)
    with Attended("pack", 0.02) as attended:
        assert attended.call(has_looked.wait, 30)


def test_a_bar_that_is_drawn_is_no_work() -> None:
    goes_on, terminal = threading.Event(), Console(force_terminal=True, file=io.StringIO())
    with Attended("pack", 0.5) as attended, byte_bar(terminal, "packing", 100):
        with pytest.raises(Timeout, match=r"^pack does not go on: nothing has moved for 0\.5 s; in flight:"):
            attended.call(goes_on.wait, 10)
        goes_on.set()


def test_the_cpu_time_of_work_is_that_of_other_threads() -> None:
    def taken_by(work: Callable[[], object]) -> float:
        start = watch._others_cpu_s()
        work()
        return watch._others_cpu_s() - start

    def compute() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    def compute_elsewhere() -> None:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()

    assert taken_by(compute_elsewhere) > 0.015
    assert taken_by(compute) < 0.01


def test_one_call_that_does_not_return_is_enough_and_ends_later_waits_at_once() -> None:
    backend, clock = Backend(), Clock()
    watch, looks = Watch(backend, TIMEOUT_S, clock), 0
    begun, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        with backend.calling("fsync", Path("stuck")):
            begun.set()
            assert goes_on.wait(30)

    thread = threading.Thread(target=hang)
    thread.start()
    assert begun.wait(30)
    is_over = watch.begin()
    while not is_over():
        with backend.calling("read", Path("others go on")):
            clock.now += 1
        looks += 1
    assert looks == 10
    assert looks_until_over(watch, clock, 0.0) == 1
    goes_on.set()
    thread.join()
    assert looks_until_over(watch, clock) == 10


def test_a_process_that_was_stopped_has_lost_no_time() -> None:
    clock = Clock()
    watch = Watch(Backend(), TIMEOUT_S, clock)
    assert looks_until_over(watch, clock, 1e6) == 10


def test_work_that_is_given_up_ends_at_its_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, ends = FaultyBackend(HANG, kinds=("mkdir",)), threading.Event()
    monkeypatch.setattr(Watch, "begin", lambda self: disk.is_hung.is_set)

    def work() -> None:
        disk.make_empty(tmp_path / "mine")
        disk.make_directory(tmp_path / "made")
        with pytest.raises(ClosedError, match=r"^making of .*never was not begun: pack was given up$"):
            disk.make_directory(tmp_path / "never")
        disk.remove(tmp_path / "mine")
        ends.set()

    with Attended("pack", 0.1, disk) as attended:
        with pytest.raises(Timeout) as caught:
            attended.call(work)
        disk.goes_on.set()
        assert ends.wait(30)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    said = str(caught.value)
    assert said.startswith("pack does not go on: nothing has moved for 0.1 s; in flight:\n  making of ")
    assert re.search(r"\n  pack_0: wait .* < _step \(faults\.py", said)


def test_an_interrupt_waits_until_the_work_has_stopped() -> None:
    backend, is_told, has_stopped = Backend(), threading.Event(), threading.Event()

    def work() -> None:
        assert is_told.wait(30)
        try:
            backend.names(Path("."))
        except ClosedError:
            has_stopped.set()

    class Interrupted(Attended):
        def _wait(self, work: object) -> None:
            if not is_told.is_set():
                raise KeyboardInterrupt
            super()._wait(work)  # type: ignore[arg-type]

    refuse = backend.refuse

    def refuse_and_tell(reason: str) -> None:
        refuse(reason)
        is_told.set()

    backend.refuse = refuse_and_tell  # type: ignore[method-assign]
    with Interrupted("pack", 30.0, backend) as attended, pytest.raises(KeyboardInterrupt):
        attended.call(work)
    assert has_stopped.is_set()


def test_an_interrupt_while_the_work_is_handed_over_waits_for_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, is_told, has_stopped = Backend(), threading.Event(), threading.Event()
    submit, futures = FileThreads.submit, list[Future[Any]]()

    def work() -> None:
        assert is_told.wait(30)
        with pytest.raises(ClosedError):
            backend.names(Path("."))
        has_stopped.set()

    def submit_and_interrupt(self: FileThreads, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future = submit(self, fn, *args)
        futures.append(future)
        if len(futures) == 1:
            raise KeyboardInterrupt
        is_told.set()
        return future

    monkeypatch.setattr(FileThreads, "submit", submit_and_interrupt)
    with Attended("pack", 30.0, backend) as attended, pytest.raises(KeyboardInterrupt):
        attended.call(work)
    assert has_stopped.is_set()


def test_an_interrupt_does_not_wait_for_work_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def interrupt(self: Attended, work: Future[Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Attended, "_wait", interrupt)
    with Attended("pack", 30.0) as attended, pytest.raises(Abandoned):
        attended.look(goes_on.wait, 30)
    goes_on.set()
