"""What `update="auto"` does: it guesses where nobody can come between backward and step(), and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import disk, smallest_budgets
from torch import nn

from tierstore.config import AdamWConfig, TierConfig, UpdateSchedule
from tierstore.train.budgets import settled, usual
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

STEPS = 8
LOUD = 4
NEVER, SOMETIMES, ALWAYS = 1e9, 50.0, 1e-6  # clipped; sometimes: the loud one

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


def engine_on(folder: Path, clip: float | None, **options: Any) -> Engine:
    """With the smallest budgets, all state on the disk."""
    gpu, cpu = smallest_budgets(Net(), nvme=["unused"], max_grad_norm=clip)
    return Engine(
        Net(), disk(folder, gpu_memory=gpu, cpu_memory=cpu), AdamWConfig(lr=1e-2), max_grad_norm=clip, **options
    )


class Steps:
    """What the steps of an engine were, and its weights after each."""

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
        (SOMETIMES, [False, True, True, True, True, False, False, False]),  # and a wrong guess is followed by a rest
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
    """Its first backward was not the last one, and nobody knows what else comes."""
    with engine_on(tmp_path, NEVER) as engine:
        steps = Steps(engine)
        for x in batches(3):
            steps.whole(x)
        engine.backward(loss_of(engine(x)))
        steps.whole(x)
        steps.whole(x, x)
    assert steps.guessed == [False, True, True, False, True]
    assert steps.schedules[-2:] == ["forward", "speculative"]


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


@pytest.mark.parametrize(
    ("schedule", "is_in_memory", "device", "expected"),
    [
        ("speculative", False, "cpu", "speculative"),
        ("speculative", False, "cuda", "speculative"),
        ("speculative", True, "cpu", "step"),
        ("speculative", True, "cuda", "forward"),
        ("forward", True, "cpu", "step"),
        ("forward", False, "cpu", "forward"),
        ("backward", True, "cpu", "backward"),
    ],
)
def test_an_update_in_memory_is_not_guessed(schedule: str, is_in_memory: bool, device: str, expected: str) -> None:
    placement: Any = SimpleNamespace(updates_in_memory=is_in_memory)
    assert settled(UpdateSchedule(schedule), placement, device) is UpdateSchedule(expected)


def test_without_a_norm_to_wait_for_there_is_nothing_to_guess() -> None:
    assert usual(needs_norm=False, can_go_back=True) is UpdateSchedule.BACKWARD
    assert usual(needs_norm=True, can_go_back=False) is UpdateSchedule.FORWARD
