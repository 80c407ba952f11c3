"""What `update="auto"` does: it guesses where no call can come between backward and step(), and only there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import disk, smallest_budgets
from torch import nn
from torch.utils.checkpoint import checkpoint

from tierstore.config import AdamWConfig, TierConfig, UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.train.engine import Engine
from tierstore.train.generations import Generations
from tierstore.train.report import StepReport

STEPS = 8
LOUD = 4
NEVER, SOMETIMES, ALWAYS = 1e9, 50.0, 1e-6  # which steps are clipped: none, the loud one, all

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def batches(count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(count)]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def engine_on(folder: Path, clip: float | None, model: nn.Module | None = None, **options: Any) -> Engine:
    """With the smallest budgets, all state on the disk."""
    gpu, cpu = smallest_budgets(Net(), nvme=["unused"], max_grad_norm=clip)
    tiers = disk(folder, gpu_memory=gpu, cpu_memory=cpu)
    return Engine(model or Net(), tiers, AdamWConfig(lr=1e-2), max_grad_norm=clip, **options)


class Steps:
    """Makes steps of an engine; notes their reports, and whether their updates were guessed."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reports: list[StepReport] = []
        self.guessed: list[bool] = []

    def whole(self, *data: torch.Tensor) -> None:
        self.note(self.engine.train_step(data, loss_of))

    def apart(self, x: torch.Tensor) -> None:
        self.engine.backward(loss_of(self.engine(x)))
        self.note(self.engine.step())

    def note(self, report: StepReport) -> None:
        self.reports.append(report)
        self.guessed.append(self.engine._parts.driver.is_speculating and self.engine._parts.driver.is_streaming)

    @property
    def schedules(self) -> list[str]:
        return [report.schedule for report in self.reports]


@pytest.mark.parametrize(
    ("clip", "guessed"),
    [
        (NEVER, [False] + [True] * 7),  # the first step shows the order
        (ALWAYS, [False] * 8),
        (SOMETIMES, [False, True, True, True, True, False, False, False]),  # no guesses for a while after a wrong one
    ],
)
def test_it_is_bit_for_bit_as_in_memory_however_it_guesses(clip: float, guessed: list[bool], tmp_path: Path) -> None:
    data = [x * (100 if step == LOUD else 1) for step, x in enumerate(batches())]
    memory = TierConfig(gpu_memory="8MiB", cpu_memory="64MiB", timeout_s=20.0)
    with Engine(Net(), memory, AdamWConfig(lr=1e-2), update="step", max_grad_norm=clip) as engine:
        for x in data:
            engine.train_step([x], loss_of)
        expected = engine.state_dict()
    with engine_on(tmp_path, clip) as engine:
        steps = Steps(engine)
        for x in data:
            steps.whole(x)
        for name, weight in engine.state_dict().items():
            assert torch.equal(weight, expected[name]), name
    assert steps.schedules == ["speculative"] * STEPS
    assert steps.guessed == guessed


def test_a_loop_of_ones_own_may_do_what_it_may_under_forward(tmp_path: Path) -> None:
    with engine_on(tmp_path, NEVER) as engine:
        steps = Steps(engine)
        for x in batches():
            steps.apart(x)
        for _ in range(2):
            engine.backward(loss_of(engine(x)))
        with engine.gathered(["blocks.0.0.weight"]):
            pass
        engine.zero_grad()
        engine.backward(loss_of(engine(x)))
        steps.note(engine.step())
    assert steps.schedules == ["forward"] * (STEPS + 1)
    assert not any(steps.guessed)


def test_a_step_that_was_begun_before_is_no_whole_one(tmp_path: Path) -> None:
    """Its first backward was not the last one, so the engine cannot know what else comes."""
    with engine_on(tmp_path, NEVER) as engine:
        steps = Steps(engine)
        for x in batches(3):
            steps.whole(x)
        engine.backward(loss_of(engine(x)))
        steps.whole(x)
        steps.whole(x, x)
    assert steps.guessed == [False, True, True, False, True]
    assert steps.schedules[-2:] == ["forward", "speculative"]


def test_an_interrupt_between_backward_and_step_leaves_a_step_that_is_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its updates are under way, so weights may be half changed and cannot be read."""

    def interrupted() -> StepReport:
        raise KeyboardInterrupt

    with engine_on(tmp_path, NEVER) as engine:
        steps = Steps(engine)
        for x in batches(3):
            steps.whole(x)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.train_step([x], loss_of)
        for act in (engine.state_dict, lambda: engine(x), lambda: engine.train_step([x], loss_of)):
            with pytest.raises(ConfigError, match=r"update='speculative' .* is changing meanwhile"):
                act()
        steps.note(engine.step())
        steps.apart(x)
    assert steps.schedules[-1] == "forward"
    assert engine.step_count == 5


class Broken(Exception):
    """What a loss raises."""


def fail(output: torch.Tensor) -> torch.Tensor:
    raise Broken


def two_backwards(steps: Steps, data: list[torch.Tensor]) -> None:
    for x in data:
        steps.engine.backward(loss_of(steps.engine(x)))
    steps.note(steps.engine.step())


def one_forgotten(steps: Steps, data: list[torch.Tensor]) -> None:
    first, second = data
    steps.engine.backward(loss_of(steps.engine(first)))
    steps.engine.state_dict()
    steps.engine.zero_grad()
    steps.apart(second)


def a_whole_one(steps: Steps, data: list[torch.Tensor]) -> None:
    steps.whole(*data)


@pytest.mark.parametrize("go_on", [two_backwards, one_forgotten, a_whole_one])
@pytest.mark.parametrize("is_broken_by", ["loss", "callback"])
def test_what_follows_a_whole_step_that_broke_off_is_anybodys_loop(
    go_on: Callable[[Steps, list[torch.Tensor]], None], is_broken_by: str, tmp_path: Path
) -> None:
    """A round that had begun to guess is left in the middle, or a callback begins a round inside `step()`."""

    def play(engine: Engine) -> dict[str, torch.Tensor]:
        steps, data = Steps(engine), batches()
        if is_broken_by == "callback":
            engine.on_step(lambda report: engine(data[7]) if report.step == 3 else None)
        for x in data[:3]:
            steps.whole(x)
        if is_broken_by == "loss":
            with pytest.raises(Broken):
                engine.train_step([data[3]], fail)
        go_on(steps, data[4:6])
        steps.whole(data[6])
        return engine.state_dict()

    memory = TierConfig(gpu_memory="8MiB", cpu_memory="64MiB", timeout_s=20.0)
    with Engine(Net(), memory, AdamWConfig(lr=1e-2), update="step", max_grad_norm=NEVER) as engine:
        expected = play(engine)
    with engine_on(tmp_path, NEVER) as engine:
        for name, weight in play(engine).items():
            assert torch.equal(weight, expected[name]), name
        assert engine._parts.driver.schedule is UpdateSchedule.SPECULATIVE


def a_callback_fails(engine: Engine) -> None:
    def fails(report: StepReport) -> None:
        if report.step == LOUD:
            raise Broken

    engine.on_step(fails)


def a_callback_makes_the_commit_fail(engine: Engine) -> None:
    def fails(report: StepReport) -> None:
        if report.step == LOUD:
            engine._generations._captured = once  # type: ignore[method-assign]

    def once() -> dict[str, Any]:
        del engine._generations._captured
        raise Broken

    engine.on_step(fails)


def a_callback_begins_a_step(engine: Engine) -> None:
    engine.on_step(lambda report: engine(batches()[0]) if report.step == LOUD else None)


def fails_to_commit(*_: Any) -> None:
    raise Broken


def weights_are_kept_and_not_committed(engine: Engine) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generations, "commit", fails_to_commit)
        with pytest.raises(Broken), engine.gathered("blocks.1", modify=True):
            engine.model.get_parameter("blocks.1.0.weight").data.mul_(2)


def weights_are_loaded_and_not_committed(engine: Engine) -> None:
    state = {name: value * 2 for name, value in engine.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generations, "commit", fails_to_commit)
        with pytest.raises(Broken):
            engine.load_state_dict(state)


@pytest.mark.parametrize(
    ("act", "before"),
    [
        (a_callback_fails, 0),
        (a_callback_makes_the_commit_fail, 0),
        (a_callback_begins_a_step, 0),
        (weights_are_kept_and_not_committed, LOUD),
        (weights_are_loaded_and_not_committed, LOUD),
    ],
)
def test_a_wrong_guess_goes_back_to_what_is_there_and_not_further(
    act: Callable[[Engine], None], before: int, tmp_path: Path
) -> None:
    """What happens before the step that is clipped leaves the state uncommitted."""

    def play(engine: Engine) -> dict[str, torch.Tensor]:
        for step, x in enumerate(batches()):
            if step == before:
                act(engine)
            engine.backward(loss_of(engine(x * (100 if step == LOUD else 1))))
            with contextlib.suppress(Broken):
                engine.step()
        return engine.state_dict()

    memory = TierConfig(gpu_memory="8MiB", cpu_memory="64MiB", timeout_s=20.0)
    with Engine(Net(), memory, AdamWConfig(lr=1e-2), update="step", max_grad_norm=SOMETIMES) as engine:
        expected = play(engine)
    with engine_on(tmp_path, SOMETIMES, update="speculative") as engine:
        for name, weight in play(engine).items():
            assert torch.equal(weight, expected[name]), name
        assert engine.step_count == STEPS
    with engine_on(tmp_path, SOMETIMES, resume="must") as engine:
        assert engine.step_count == STEPS


class Recomputing(Net):
    """Reentrant checkpointing recomputes the blocks, so no graph shows their parameters before backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=True)
        return x


def test_gradients_that_may_come_late_are_not_guessed_unasked(tmp_path: Path) -> None:
    with engine_on(tmp_path, NEVER, model=Recomputing()) as engine:
        steps = Steps(engine)
        for x in batches():
            steps.whole(x)
    assert not any(steps.guessed)
    assert set(steps.schedules[1:]) == {"forward"}


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({"clip": None}, "backward"),
        ({"clip": NEVER, "commit_every": 2}, "forward"),
        ({"clip": NEVER, "durability": "none"}, "forward"),
        ({"clip": NEVER, "overlap": False}, "step"),
    ],
)
def test_it_guesses_only_where_it_can_go_back(changes: dict[str, Any], schedule: str, tmp_path: Path) -> None:
    with engine_on(tmp_path, **changes) as engine:
        steps = Steps(engine)
        for x in batches(3):
            steps.whole(x)
    assert steps.schedules == [schedule] * 3
