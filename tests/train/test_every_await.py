"""A step that is broken off at each place where the loop waits: by an error, by Ctrl-C, by a runtime that closes.

In each case the caller gets the error, memory and budgets are as before, nothing is left running, and the store resumes
from a generation of the uninterrupted run. (Stores of tensors: `tests/store/test_tensors_faults.py`.)
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from resuming import DISK, Run, State, Way, check_resumes, expected_states, open_run, opened

from tierstore.errors import ClosedError, StorageError
from tierstore.store.training import TrainingStore

WAYS = {"forward": Way("forward", cpu_memory=DISK), "speculative": Way("speculative", cpu_memory=DISK),
        "gpu": Way("forward", state_on_gpu=True)}  # fmt: skip
BEGUN, STEPS = 1, 3
LENT = ("update", "weights", "spill", "device", "codec")
"""Pools whose leases end with the task that took them."""

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


class Watch:
    """Sees where the tasks of a loop wait.

    Args:
        place: at the first wait there `act` is called; it returns the error that the wait ends with, if any.
    """

    def __init__(self, place: str = "", act: Callable[[], BaseException | None] = lambda: None) -> None:
        self.places: dict[str, None] = {}
        self._place = place
        self._act = act

    def factory(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
        task = asyncio.Task(self._run(work), loop=loop, **options)
        task.add_done_callback(lambda task: work.close())  # if it was cancelled before it began
        return task

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await _Steps(work, self)

    def waits(self, work: Any) -> BaseException | None:
        """Called when `work` waits; returns the error to raise in it when the wait ends, if any."""
        step, frames = work, [work.cr_frame]
        while getattr(step.cr_await, "cr_frame", None) is not None:
            step = step.cr_await
            frames.append(step.cr_frame)
        if "tierstore" not in frames[0].f_code.co_filename:
            return None  # a task of asyncio's own
        place = " > ".join(f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in frames[-2:])
        is_first = place not in self.places
        self.places[place] = None
        return self._act() if is_first and place == self._place else None


class _Steps:
    def __init__(self, work: Coroutine[Any, Any, Any], watch: Watch) -> None:
        self._work = work
        self._watch = watch

    def __await__(self) -> Iterator[Any]:
        error: BaseException | None = None
        while True:
            try:
                waited_for = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as end:
                return end.value
            failure = self._watch.waits(self._work)
            try:
                yield waited_for
                error = failure  # only after the wait: the work of a thread goes on to its end
            except BaseException as caught:
                error = caught


def raise_error(run: Run) -> BaseException | None:
    return StorageError("on purpose")


def interrupt(run: Run) -> BaseException | None:
    os.kill(os.getpid(), signal.SIGINT)
    return None


def close(run: Run) -> BaseException | None:
    """Close the runtime before the engine, as may happen at the end of an interpreter."""
    runtime = run.engine._parts.runtime
    runtime._is_open = False
    runtime._begin_closing()
    return None


TOLD = {raise_error: StorageError, interrupt: KeyboardInterrupt, close: ClosedError}


@pytest.fixture(scope="module", params=WAYS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Way, Path, list[State]]:
    """A way to train, a store closed after its first step, and the states of an uninterrupted run."""
    way, folder = WAYS[request.param], tmp_path_factory.mktemp("begun")
    with opened(way, folder) as run:
        run.until(BEGUN)
    return way, folder, expected_states(way, tmp_path_factory.mktemp("expected"), STEPS)


def train(way: Way, folder: Path, place: str = "", act: Any = None) -> tuple[BaseException | None, Watch]:
    """Two steps and a close; the first error, and what was seen."""
    run, told = open_run(way, folder), None
    watch = Watch(place, (lambda: act(run)) if act else lambda: None)
    run.engine._parts.runtime.loop.set_task_factory(watch.factory)
    try:
        run.until(BEGUN + 2)
        run.engine.flush()
    except BaseException as error:
        told = error
    try:
        run.engine.close()
    except BaseException as error:
        told = told or error
    return told, watch


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Bytes that each store has lent by pool when it releases its memory; of "device", those beyond its groups."""
    found: list[dict[str, int]] = []
    release = TrainingStore._release_memory

    def checked(store: TrainingStore) -> None:
        there = sum(store.groups[group].device_bytes for group in store.weights._allocated)
        lent = {name: store._pools[name].used_bytes for name in LENT}
        found.append(lent | {"device": store.gpu_budget.used_bytes - there})
        release(store)

    monkeypatch.setattr(TrainingStore, "_release_memory", checked)
    return found


def test_a_step_broken_off_where_the_loop_waits(
    case: tuple[Way, Path, list[State]], books: list[dict[str, int]], tmp_path: Path
) -> None:
    way, begun, expected = case
    shutil.copytree(begun, tmp_path / "clean")
    told, watch = train(way, tmp_path / "clean")
    assert told is None
    acts = itertools.cycle(TOLD) if way.update == "forward" else itertools.cycle(reversed(TOLD))
    dropped: list[int] = []

    def interrupted(number: int, frame: Any) -> None:
        if frame.f_code.co_name == "_remove":  # of a weak set, as of asyncio's tasks: Python would ignore the error
            dropped.append(number)
        else:
            signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        for number, (place, act) in enumerate(zip(sorted(watch.places), acts)):
            folder = tmp_path / str(number)
            shutil.copytree(begun, folder)
            told, watch = train(way, folder, place, act)
            if place in watch.places:  # which waits there are depends on timing
                assert isinstance(told, TOLD[act]) or dropped, (place, told)
            dropped.clear()
            check_resumes(way, folder, expected)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(books) > 10  # which waits there are depends on timing: 19 to 27 were seen
    assert not {name for lent in books for name, nbytes in lent.items() if nbytes}, books
