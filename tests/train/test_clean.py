"""An engine that ends leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exits import WAYS as EXIT_WAYS
from faults import EIO, FaultyBackend
from resuming import DISK, MEMORY, Run, State, Way, check_resumes, expected_states, open_run, opened
from runs import next_token_loss
from torch import nn

from tierstore.errors import ClosedError, ConfigError, StorageError, StoreLocked, TierstoreError, Timeout
from tierstore.io.backend import Backend
from tierstore.io.threads import WaitedThread
from tierstore.store.updates import UpdatePipeline
from tierstore.train.engine import Engine, _close_at_exit
from tierstore.train.generations import Generations
from tierstore.train.report import StepReport

WAYS = {
    "forward": Way("forward", cpu_memory=MEMORY),
    "forward-disk": Way("forward", cpu_memory=DISK, blocks=2, width=96),
    "forward-3": Way("forward", cpu_memory=DISK, commit_every=3),
    "backward-3": Way("backward", cpu_memory=DISK, commit_every=3),
    "speculative": Way("speculative", cpu_memory=DISK),
    "gpu": Way("forward", state_on_gpu=True),
    "delayed": Way("delayed", cpu_memory=MEMORY),
}

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def begun(way: Way) -> int:
    """How many steps come before the one that is broken off; if possible, the last of them was not due for a commit."""
    return way.commit_every + 1


@pytest.fixture
def case(request: pytest.FixtureRequest) -> tuple[Way, list[State]]:
    """A way to train, and its states up to the one after the step that is broken off."""
    way = WAYS[request.param]
    return way, states_of(way, begun(way) + 1)


@cache
def states_of(way: Way, steps: int) -> list[State]:
    with tempfile.TemporaryDirectory() as folder:
        return expected_states(way, Path(folder), steps)


def half_with_each(values: Sequence[Any]) -> list[Any]:
    """Each way with every other one of the values."""
    return [
        pytest.param(name, value, id=f"{name}-{getattr(value, '__name__', value)}")
        for row, name in enumerate(WAYS)
        for column, value in enumerate(values)
        if (row + column) % 2
    ]


def arena_of(run: Run) -> weakref.ref[Any]:
    """The mapping of an engine's arena, which goes with its last view."""
    memory = run.engine._parts.store.arena._bytes
    assert memory is not None
    return weakref.ref(memory.base)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


class TestClose:
    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_leaves_the_store_and_nothing_else(self, way: Way, tmp_path: Path) -> None:
        run = open_run(way, tmp_path)
        run.until(begun(way))
        mapping = arena_of(run)
        run.engine.close()
        run.engine.close()
        assert mapping() is None
        packs = {f"{kind}.{slot}.safetensors" for kind in ("weights", "state") for slot in "ab"}
        if way.update == "delayed":
            packs |= {f"gradients{copy}.{slot}.safetensors" for copy in ("", "1") for slot in "ab"}
        found = names(tmp_path)
        assert packs <= found
        small = sorted(found - packs)
        assert [name.partition("-")[0] for name in small] == ["captured", "captured", "manifest", "manifest"]
        for use in (run.step, run.engine.flush, run.engine.state_dict, run.engine.step):
            with pytest.raises(ClosedError):
                use()
        with opened(way, tmp_path) as again:
            assert again.engine.step_count == begun(way)  # also a step that was not due for a commit

    @pytest.mark.parametrize("update", ["forward", "backward", "delayed"])
    def test_commits_the_last_step_although_a_forward_has_begun_the_next(self, update: str, tmp_path: Path) -> None:
        way = Way(update, cpu_memory=DISK, commit_every=50)
        with opened(way, tmp_path) as run:
            run.until(2)
            next_token_loss(run.engine, run.position.next())
        assert check_resumes(way, tmp_path, states_of(way, 3)) == 2

    @pytest.mark.parametrize("name", ["embedding", "head"])
    def test_in_the_middle_of_backward_leaves_a_whole_step(self, name: str, tmp_path: Path) -> None:
        """As a signal handler may: the last step waits for its commit, which it gets unless updates have begun."""

        def end(_: object) -> None:
            run.engine.close()
            raise SystemExit

        way = WAYS["backward-3"]
        run = open_run(way, tmp_path)
        run.until(2)
        parameters = [p for key, p in run.engine.model.named_parameters()]
        parameters[0 if name == "embedding" else -1].register_post_accumulate_grad_hook(end)
        with pytest.raises(SystemExit):
            run.step()
        assert check_resumes(way, tmp_path, states_of(way, 4)) == (0 if name == "embedding" else 2)

    def test_at_exit_of_a_thread_that_trains_publishes_no_step_that_it_moves_past(self, tmp_path: Path) -> None:
        """A daemon thread is in the middle of its step: its backward may begin at any moment."""
        way = WAYS["backward-3"]
        run = open_run(way, tmp_path)
        run.until(2)
        is_inside, may_go = threading.Event(), threading.Event()

        def wait(*_: object) -> None:
            is_inside.set()
            assert may_go.wait(30)

        def train() -> None:
            with contextlib.suppress(TierstoreError, RuntimeError):  # its weights are gone
                run.step()

        run.engine.model.register_forward_pre_hook(wait)
        thread = threading.Thread(target=train)
        thread.start()
        assert is_inside.wait(30)
        _close_at_exit(weakref.ref(run.engine))
        may_go.set()
        thread.join()
        assert check_resumes(way, tmp_path, states_of(way, 4)) == 0

    @pytest.mark.parametrize("nvme", [True, False])
    def test_without_durability_leaves_an_empty_directory(
        self, nvme: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        changes: dict[str, Any] = {} if nvme else {"nvme": []}
        with opened(Way(), tmp_path, durability="none", **changes) as run:
            run.until(2)
            mapping = arena_of(run)
        assert mapping() is None
        assert not names(tmp_path)

    def test_a_stuck_disk_keeps_the_store(self, tmp_path: Path) -> None:
        """Its late writes must not hit the bytes of another run that got the store meanwhile."""
        disk = StuckDisk()
        way = WAYS["forward-disk"]
        run = open_run(way, tmp_path, disk, timeout_s=0.5)
        run.until(1)
        run.engine.flush()
        ended: list[float] = []
        run.engine._parts.reductions = SimpleNamespace(close=ended.append)  # type: ignore[assignment]
        disk.is_stuck = True
        with pytest.raises(Timeout):
            run.step()  # its gradients are spilled
        with pytest.raises(Timeout):
            run.engine.close()
        with pytest.raises(StoreLocked), opened(way, tmp_path):
            pass
        assert not ended
        disk.goes_on.set()
        with contextlib.suppress(Timeout):  # perhaps from work given up while the disk was stuck
            run.engine.close()
        run.engine.close()
        assert ended  # the part that works with other ranks is closed, too
        with opened(way, tmp_path) as again:
            assert again.engine.step_count == 1

    def test_of_all_engines_needs_no_variable(self, tmp_path: Path) -> None:
        """A function of a notebook has made one, and returned."""
        way = WAYS["forward-disk"]
        open_run(way, tmp_path).until(1)
        with pytest.raises(StoreLocked, match=r"which is this one: .*`Engine\.close_all\(\)`"), opened(way, tmp_path):
            pass
        Engine.close_all()
        Engine.close_all()
        with opened(way, tmp_path) as again:
            assert again.engine.step_count == 1

    def test_of_an_engine_that_does_not_come_to_be_hides_no_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(generations: Generations) -> None:
            generations._parts.runtime.keep_failure(StorageError("a second one"))
            raise ConfigError("the first one")

        monkeypatch.setattr(Generations, "begin", fails)
        with pytest.raises(ConfigError, match="the first one"):
            open_run(WAYS["forward-disk"], tmp_path)

    def test_goes_on_where_it_was_broken_off(self, tmp_path: Path) -> None:
        way = WAYS["forward-disk"]
        run = open_run(way, tmp_path)
        run.until(2)
        parts = run.engine._parts
        close = parts.close

        def fails(publish: Callable[[], object]) -> None:
            raise KeyboardInterrupt

        object.__setattr__(parts, "close", fails)
        with pytest.raises(KeyboardInterrupt):
            run.engine.close()
        object.__setattr__(parts, "close", close)
        run.engine.close()
        with opened(way, tmp_path) as again:
            assert again.engine.step_count == 2

    def test_ends_all_tasks(self, tmp_path: Path) -> None:
        run = open_run(WAYS["forward-disk"], tmp_path)
        run.until(2)
        loop = run.engine._parts.runtime.loop
        run.engine.close()
        assert loop.is_closed()
        assert not asyncio.all_tasks(loop)

    def test_lets_go_of_the_model(self, tmp_path: Path) -> None:
        run = open_run(Way(), tmp_path)
        run.until(2)
        run.engine.close()
        engine, model = weakref.ref(run.engine), weakref.ref(run.engine.model)
        del run
        gc.collect()
        assert engine() is None
        assert model() is None

    @pytest.mark.parametrize("kind", ["pread", "pwrite"])
    def test_lets_go_of_the_model_also_after_an_error_of_the_disk(self, kind: str, tmp_path: Path) -> None:
        """Tasks keep the error, whose frames refer to a graph, which refers to the model."""
        disk = FaultyBackend(kinds=(kind,))
        run = open_run(WAYS["forward-disk"], tmp_path, disk)

        def fail_next(module: nn.Module, args: Any) -> None:
            disk.fault, disk.at = EIO, disk.counted

        run.until(2)
        run.engine.flush()
        run.engine.model.get_submodule("blocks.1.up").register_forward_pre_hook(fail_next)
        with pytest.raises(StorageError), run.engine:
            run.until(4)
        engine, model = weakref.ref(run.engine), weakref.ref(run.engine.model)
        del run
        gc.collect()
        assert engine() is None
        assert model() is None

    def test_says_so_to_a_backward_of_before(self, tmp_path: Path) -> None:
        run = open_run(Way(), tmp_path)
        loss = run.engine(run.position.next()).sum()
        run.engine.close()
        with pytest.raises(ClosedError, match="the engine of this model is closed"):
            loss.backward()

    def test_nothing_is_added_to_a_closed_engine(self, tmp_path: Path) -> None:
        run = open_run(Way(), tmp_path)
        engine = run.engine
        engine.close()
        for call in (
            lambda: engine.register("more", run.position),
            lambda: engine.on_step(print),
            lambda: engine.before_commit(print),
            lambda: engine.fix_prefetch_depth(1),
            lambda: engine.no_sync().__enter__(),
            engine.__enter__,
        ):
            with pytest.raises(ClosedError, match="the engine is closed"):
                call()

    @pytest.mark.parametrize("modify", [False, True])
    def test_ends_a_block_that_looks_at_weights(self, modify: bool, tmp_path: Path) -> None:
        """The engine is closed inside the block; or, as at exit, only the block's generator is closed, after it."""
        run = open_run(Way(), tmp_path)
        run.until(1)
        block = run.engine.gathered("norm", modify=modify)
        block.__enter__()
        if modify:
            with torch.no_grad():
                run.engine.model.norm.weight.mul_(2)
        run.engine.close()
        if modify:
            with pytest.raises(ClosedError, match="the engine is closed"):
                block.__exit__(None, None, None)
        else:
            block.__exit__(None, None, None)
        run = open_run(Way(), tmp_path)
        assert run.engine.step_count == 1
        left = run.engine.gathered("norm", modify=modify)
        left.__enter__()
        with torch.no_grad():
            run.engine.model.norm.weight.mul_(2)
        run.engine.close()
        left.gen.close()  # type: ignore[attr-defined]

    def test_a_forward_without_a_backward_leaves_nothing(self, tmp_path: Path) -> None:
        with opened(Way(), tmp_path) as run:
            left: list[weakref.ref[torch.Tensor]] = []
            for module in run.engine.model.modules():
                module.register_forward_hook(lambda module, args, output: left.append(weakref.ref(output)))
            run.engine(run.position.next())
            gc.collect()
            assert left
            assert not any(output() is not None for output in left)


class TestFlush:
    @pytest.mark.parametrize("update", ["step", "forward", "backward", "delayed"])
    def test_commits_the_last_step_in_the_middle_of_the_next_and_changes_nothing(
        self, update: str, tmp_path: Path
    ) -> None:
        way = Way(update, cpu_memory=DISK, commit_every=50)

        def train(folder: Path, flush: Callable[[Run], None]) -> State:
            with opened(way, folder) as run:
                for place in range(3):
                    run.step()
                    for micro_batch in range(2):
                        loss = next_token_loss(run.engine, run.position.next())
                        if place == micro_batch == 0:
                            flush(run)
                        with run.engine.no_sync() if micro_batch == 0 else contextlib.nullcontext():
                            run.engine.backward(loss)
                        if place == micro_batch + 1:
                            flush(run)
                    run.engine.step()
                return State.of(run)

        committed = []

        def flush(run: Run) -> None:
            before = run.engine.statistics()["generation"]
            if len(committed) == 2 and update == "backward":
                with pytest.raises(ConfigError, match=r"^flush\(\) cannot commit step 5 any more: updates of the next"):
                    run.engine.flush()
                return
            run.engine.flush()
            committed.append(run.engine.statistics()["generation"] - before)
            if len(committed) == 1:
                shutil.copytree(tmp_path / "flushed", tmp_path / "copied")

        whole = train(tmp_path / "whole", lambda run: None)
        whole.check_equal(train(tmp_path / "flushed", flush))
        assert committed == [1] * (2 if update == "backward" else 3)
        assert check_resumes(way, tmp_path / "copied", states_of(way, 3)) == 1

    @pytest.mark.parametrize("update", ["forward", "backward", "delayed"])
    @pytest.mark.parametrize("of", ["_take_back", "_begin"])
    @pytest.mark.parametrize("is_posted", [False, True])
    def test_that_is_interrupted_leaves_the_step_in_progress_whole(
        self, update: str, of: str, is_posted: bool, tmp_path: Path
    ) -> None:
        way = Way(update, cpu_memory=DISK, commit_every=50)
        expected = states_of(way, 3)
        with opened(way, tmp_path, timeout_s=20) as run:
            run.step()
            loss = next_token_loss(run.engine, run.position.next())
            parts = run.engine._parts
            post = parts.runtime.post

            def interrupted(function: Callable[..., Any], *args: Any) -> None:
                if function == getattr(parts.driver, of):
                    parts.runtime.post = post  # type: ignore[method-assign]
                    if is_posted:
                        post(function, *args)
                    raise KeyboardInterrupt
                post(function, *args)

            parts.runtime.post = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                run.engine.flush()
            run.engine.backward(loss)
            run.engine.step()
            run.until(3)
            expected[-1].check_equal(State.of(run))


class StuckDisk(Backend):
    """A disk whose writes may take for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = False
        self.goes_on = threading.Event()

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        if self.is_stuck:
            self.goes_on.wait()
        return super()._call_pwrite(descriptor, view, offset, path)


class Broken(Exception):
    """Raised by the test."""


def in_forward(run: Run, error: BaseException) -> None:
    def hook(module: nn.Module, args: Any) -> None:
        raise error

    run.engine.model.get_submodule("blocks.0.up").register_forward_pre_hook(hook)


def in_backward(run: Run, error: BaseException) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        def fail(gradient: torch.Tensor) -> None:
            raise error

        output.register_hook(fail)

    run.engine.model.get_submodule("blocks.0.norm_out").register_forward_hook(hook)


def at_the_end_of_backward(run: Run, error: BaseException) -> None:
    finish = run.engine._parts.collector.finish

    def fails() -> None:
        finish()
        raise error

    run.engine._parts.collector.finish = fails  # type: ignore[method-assign]


def after_backward(run: Run, error: BaseException) -> None:
    def fails() -> None:
        raise error

    run.engine._parts.access.learn_order = fails  # type: ignore[method-assign]


def in_the_scheduler(run: Run, error: BaseException) -> None:
    def fails() -> None:
        raise error

    run.engine._parts.scheduler.step = fails


def in_a_callback(run: Run, error: BaseException) -> None:
    def fail(report: StepReport) -> None:
        raise error

    run.engine.on_step(fail)


def in_the_state_of_something_registered(run: Run, error: BaseException) -> None:
    def fail() -> dict[str, int]:
        raise error

    run.position.state_dict = fail  # type: ignore[method-assign]


PLACES: tuple[Callable[[Run, BaseException], None], ...] = (
    in_forward, in_backward, at_the_end_of_backward, in_a_callback, in_the_state_of_something_registered,
)  # fmt: skip


KINDS: tuple[type[BaseException], ...] = (Broken, KeyboardInterrupt)
BREAKS = [
    pytest.param(name, place, kind, id=f"{name}-{place.__name__}-{kind.__name__}")
    for row, name in enumerate(WAYS)
    for column, place in enumerate(PLACES)
    for number, kind in enumerate(KINDS)
    if (row + column + number) % 2 and (name in ("forward-disk", "backward-3", "speculative") or (row + column) % 2)
]
"""Both kinds at each place; every place in three of the ways, and every other place in the other ways."""


FOUR_BLOCKS = Way("forward", cpu_memory=DISK, blocks=4, width=96)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The state after three steps that nothing interrupts."""
    with opened(FOUR_BLOCKS, tmp_path_factory.mktemp("whole"), gpu_memory="1100KiB") as run:
        run.until(3)
        return State.of(run)


class TestAnExceptionInTheMiddleOfAStep:
    @pytest.mark.parametrize(("case", "place", "kind"), BREAKS, indirect=["case"])
    def test_is_told_as_it_is_and_the_last_generation_stays(
        self,
        case: tuple[Way, list[State]],
        place: Callable[[Run, BaseException], None],
        kind: type[BaseException],
        tmp_path: Path,
    ) -> None:
        way, expected = case

        def train() -> None:
            with opened(way, tmp_path) as run:
                run.until(begun(way))
                place(run, kind("on purpose"))
                run.step()

        with pytest.raises(kind, match="on purpose"):
            train()
        found = check_resumes(way, tmp_path, expected)
        # Close commits a step that was not due, unless the store may have moved on from that state.
        is_lost = way.update == "backward" and place is not in_forward
        is_lost |= place in (in_a_callback, in_the_state_of_something_registered)
        assert found == (3 if way.commit_every == 3 and is_lost else begun(way))

    @pytest.mark.parametrize(
        ("case", "place"),
        half_with_each([in_backward, at_the_end_of_backward, after_backward, in_the_scheduler]),
        indirect=["case"],
    )
    def test_ends_the_loop_for_one_who_goes_on(
        self, case: tuple[Way, list[State]], place: Callable[[Run, BaseException], None], tmp_path: Path
    ) -> None:
        way, expected = case
        with opened(way, tmp_path) as run:
            run.until(begun(way))
            place(run, Broken("on purpose"))
            with pytest.raises(Broken):
                run.step()
            for use in (run.step, run.engine.step):
                with pytest.raises(ClosedError, match="a step was broken off by Broken and cannot be finished"):
                    use()
        check_resumes(way, tmp_path, expected)

    @pytest.mark.parametrize(("case", "has_begun"), half_with_each([False, True]), indirect=["case"])
    def test_is_no_matter_while_the_round_begins(
        self, case: tuple[Way, list[State]], has_begun: bool, tmp_path: Path
    ) -> None:
        """It is unknown whether the round has begun; the forward is repeated."""
        way, expected = case
        with opened(way, tmp_path) as run:
            run.until(begun(way))
            parts = run.engine._parts
            post = parts.runtime.post

            def interrupted(function: Callable[..., Any], *args: Any) -> None:
                if function == parts.driver._begin:
                    parts.runtime.post = post  # type: ignore[method-assign]
                    if has_begun:
                        post(function, *args)
                    raise KeyboardInterrupt
                post(function, *args)

            state, batch = torch.get_rng_state(), run.position.state_dict()
            parts.runtime.post = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                run.step()
            torch.set_rng_state(state)
            run.position.load_state_dict(batch)
            run.until(len(expected) - 1)
            expected[-1].check_equal(State.of(run))

    @pytest.mark.parametrize("case", ["forward-disk", "backward-3", "speculative", "delayed"], indirect=True)
    def test_of_before_is_told_before_anything_begins(self, case: tuple[Way, list[State]], tmp_path: Path) -> None:
        way, expected = case
        with opened(way, tmp_path) as run:
            run.until(begun(way))
            state, batch = torch.get_rng_state(), run.position.state_dict()
            run.engine._parts.runtime.keep_failure(StorageError("of before"))
            with pytest.raises(StorageError, match="of before"):
                run.engine(run.position.next())
            assert not run.engine._parts.driver.has_begun
            torch.set_rng_state(state)
            run.position.load_state_dict(batch)
            run.until(len(expected) - 1)
            expected[-1].check_equal(State.of(run))

    @pytest.mark.parametrize("case", ["forward-disk", "backward-3", "speculative", "delayed"], indirect=True)
    @pytest.mark.parametrize("started", [0, 1])
    def test_a_round_that_cannot_begin_is_told_by_its_forward_which_is_repeated(
        self, case: tuple[Way, list[State]], started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        way, expected = case
        start, numbers = UpdatePipeline._start, itertools.count()

        def failing(*given: Any) -> None:
            if next(numbers) == started:
                raise MemoryError("for no trip more")
            start(*given)

        with opened(way, tmp_path) as run:
            run.until(begun(way))
            state, batch = torch.get_rng_state(), run.position.state_dict()
            call = run.engine._parts.runtime.call
            caught_up = run.engine.model.register_forward_hook(lambda *_: call(asyncio.sleep, 0))
            with monkeypatch.context() as patched:
                patched.setattr(UpdatePipeline, "_start", failing)
                with pytest.raises(MemoryError, match="for no trip more"):
                    run.engine(run.position.next())
            caught_up.remove()
            torch.set_rng_state(state)
            run.position.load_state_dict(batch)
            run.until(len(expected) - 1)
            expected[-1].check_equal(State.of(run))

    @pytest.mark.parametrize(("number", "is_posted"), [(0, False), (1, True), (2, False), (2, True)])
    def test_is_no_matter_between_the_books_and_the_loop(
        self, number: int, is_posted: bool, whole: State, tmp_path: Path
    ) -> None:
        """If the books say that a group's move was started, it was, and only once."""
        with opened(FOUR_BLOCKS, tmp_path, gpu_memory="1100KiB") as run:
            run.until(2)
            parts = run.engine._parts
            post, starts = parts.runtime.post, itertools.count()

            def interrupted(function: Callable[..., Any], *args: Any) -> None:
                is_hit = function == parts.access._moves.start and next(starts) == number
                if is_posted or not is_hit:
                    post(function, *args)
                if is_hit:
                    raise KeyboardInterrupt

            state, batch = torch.get_rng_state(), run.position.state_dict()
            parts.runtime.post = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                run.engine(run.position.next())
            torch.set_rng_state(state)
            run.position.load_state_dict(batch)
            run.until(3)
            whole.check_equal(State.of(run))

    @pytest.mark.parametrize("case", ["forward-disk", "backward-3", "speculative", "delayed"], indirect=True)
    def test_is_no_matter_in_an_evaluation(self, case: tuple[Way, list[State]], tmp_path: Path) -> None:
        way, expected = case
        with opened(way, tmp_path) as run:
            run.until(2)
            state = torch.get_rng_state()
            handle = run.engine.model.get_submodule("blocks.0.up").register_forward_pre_hook(raise_broken)
            with pytest.raises(Broken), torch.no_grad():
                run.engine(torch.zeros(1, 4, dtype=torch.int64))
            handle.remove()
            torch.set_rng_state(state)
            run.until(len(expected) - 1)
            expected[-1].check_equal(State.of(run))


def raise_broken(module: nn.Module, args: Any) -> None:
    raise Broken


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; a shell that starts tests in the background makes them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_by_the_keyboard(tmp_path: Path) -> None:
    """A real signal, wherever the training thread is at that moment."""
    way = WAYS["forward-disk"]
    expected = states_of(way, begun(way) + 1)
    for at in range(0, 10, 2):
        folder = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            train_until_interrupted(way, folder, at)
        check_resumes(way, folder, expected)


@pytest.mark.parametrize("at", range(3))
def test_an_interrupt_while_a_thread_ends_leaves_nothing_in_use(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = WAYS["forward-disk"]
    expected = states_of(way, begun(way) + 1)
    waits, ends_within = itertools.count(), WaitedThread.ends_within

    def interrupted(thread: WaitedThread, limit_s: float) -> bool:
        if next(waits) == at:
            raise KeyboardInterrupt
        return ends_within(thread, limit_s)

    run = open_run(way, tmp_path)
    run.until(1)
    with monkeypatch.context() as patch:
        patch.setattr(WaitedThread, "ends_within", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.engine.close()
    check_resumes(way, tmp_path, expected)


def train_until_interrupted(way: Way, folder: Path, at: int) -> None:
    """Steps in which the `at`-th crossing to the loop thread is hit by SIGINT."""
    with opened(way, folder) as run:
        run.until(1)
        runtime, crossings = run.engine._parts.runtime, itertools.count()
        original = runtime.call

        def call(*args: Any, **options: Any) -> Any:
            if next(crossings) == at:
                os.kill(os.getpid(), signal.SIGINT)
            return original(*args, **options)

        runtime.call = call  # type: ignore[method-assign]
        run.until(begun(way) + 1)
        raise AssertionError(f"there were only {next(crossings)} crossings")


class TestFork:
    @pytest.mark.parametrize("case", ["forward-disk", "backward-3", "speculative", "gpu"], indirect=True)
    def test_the_child_can_use_nothing_and_does_no_harm(self, case: tuple[Way, list[State]], tmp_path: Path) -> None:
        way, expected = case
        with opened(way, tmp_path) as run:
            run.until(2)
            loss = run.engine(run.position.next()).sum()
            run.position.taken -= 1
            assert in_child(lambda: use_all(run, loss)) == ""
        assert check_resumes(way, tmp_path, expected) == 2

    def test_the_child_may_close_what_was_closed_before(self, tmp_path: Path) -> None:
        run = open_run(Way(), tmp_path)
        run.engine.close()
        assert in_child(run.engine.close) == ""

    @pytest.mark.parametrize("what", ["engine", "files"])
    def test_the_child_leaves_a_store_that_holds_no_generation_yet(self, what: str, tmp_path: Path) -> None:
        """The process that made such files removes them when it closes the store; the child must not."""
        disk, way = LateGeneration(), WAYS["forward-disk"]
        with opened(way, tmp_path, disk) as run:
            made = {name for name in names(tmp_path) if not name.endswith(".tmp")}  # which is renamed meanwhile
            said = in_child(run.engine.close if what == "engine" else run.engine._parts.store.release)
            left = names(tmp_path)
            disk.goes_on.set()
            assert left >= made
            assert ("ClosedError" in said) == (what == "engine")
            run.until(2)
        with opened(way, tmp_path) as again:
            assert again.engine.step_count == 2


class LateGeneration(Backend):
    """A disk on which no generation is published before it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def _call_replace(self, source: Path, destination: Path) -> None:
        if destination.name.startswith("manifest"):
            self.goes_on.wait()
        super()._call_replace(source, destination)


def use_all(run: Run, loss: torch.Tensor) -> None:
    engine = run.engine
    for use in (run.step, lambda: engine.backward(loss), engine.step, engine.flush, engine.state_dict):
        try:
            use()
        except ClosedError:
            continue
        raise AssertionError(f"{use} did not raise")
    with contextlib.suppress(TierstoreError):
        engine.close()


def in_child(work: Callable[[], None]) -> str:
    """The error that a forked child reported, if any."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


Exits = tuple[Path, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> Exits:
    """What came of processes that did not close their engine; see `exits.py`."""
    folder = tmp_path_factory.mktemp("exits")
    script = Path(__file__).with_name("exits.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=120, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return folder, {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("name", "how", "status", "step"),
    [
        ("memory", "by_an_exception", 7, 3), ("memory", "by_another_thread", 0, 4),
        ("disk", "in_the_middle_of_a_step", 0, 3),
    ],
)  # fmt: skip
def test_an_exit_without_close_neither_hangs_nor_loses_a_step(
    name: str, how: str, status: int, step: int, exits: Exits
) -> None:
    folder, outcomes = exits
    outcome = outcomes[f"{name}-{how}"]
    assert outcome["status"] == status
    assert outcome["stderr"] == ""
    assert outcome["s"] < 60, "all of them together"
    assert check_resumes(EXIT_WAYS[name], folder / f"{name}-{how}", states_of(EXIT_WAYS[name], 5)) == step
