"""Gradients of small groups are handed over together, and come out as if each had been alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import disk, smallest_budgets, train
from torch import nn

from tierstore.config import UpdateSchedule
from tierstore.store import gradients
from tierstore.store.gradients import Gradients
from tierstore.store.tasks import together

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")

WIDTH = 16
UPDATES = [one.value for one in UpdateSchedule if one is not UpdateSchedule.DELAYED]


class Chain(nn.Module):
    """Many small blocks around a large one, whose gradient has room for those of many small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))
        self.large = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.before, self.large, *self.after):
            x = x + block(x).tanh()
        return x


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).pow(2).mean()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups came with each hand-over."""
    counts: list[int] = []
    accept = Gradients.accept

    def counted(self: Gradients, arrivals: Any) -> Any:
        counts.append(len(arrivals))
        return accept(self, arrivals)

    monkeypatch.setattr(Gradients, "accept", counted)
    return counts


@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("update", UPDATES)
def test_in_company_gradients_are_what_they_are_alone(
    update: str, is_tight: bool, arrivals: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, cpu = smallest_budgets(Chain(), nvme=["unused"], update=update) if is_tight else ("16MiB", "16MiB")
    is_backward = update == UpdateSchedule.BACKWARD.value
    options: dict[str, Any] = {"update": update, "accumulate": 1 if is_backward else 2}
    options |= {} if is_backward else {"max_grad_norm": 1.0}
    in_company = train(Chain(), batches(6), disk(tmp_path / "a", gpu_memory=gpu, cpu_memory=cpu), loss_of, **options)
    assert max(arrivals) > 2
    accept = Gradients.accept
    monkeypatch.setattr(Gradients, "accept", lambda self, several: together([accept(self, [a]) for a in several]))
    alone = train(Chain(), batches(6), disk(tmp_path / "b", gpu_memory=gpu, cpu_memory=cpu), loss_of, **options)
    in_company.check_equal(alone)


def test_a_large_gradient_is_copied_alone_whoever_comes_with_it(
    arrivals: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One thread would copy all its chunks, and none of them be updated before the last has come."""
    monkeypatch.setattr(gradients, "_SMALL_BYTES", 4096)
    together_bytes: list[list[int]] = []
    collect = Gradients._collect

    def noted(self: Gradients, deliveries: Any) -> Any:
        together_bytes.append([len(array) for _, array in deliveries])
        return collect(self, deliveries)

    monkeypatch.setattr(Gradients, "_collect", noted)
    train(Chain(), batches(3), disk(tmp_path, gpu_memory="16MiB", cpu_memory="16MiB"), loss_of, update="forward")
    assert max(arrivals) > 2
    assert max(map(len, together_bytes)) > 2
    assert max(max(sizes) for sizes in together_bytes) > 4096
    assert all(len(sizes) == 1 or max(sizes) <= 4096 for sizes in together_bytes)
