"""Gradients of small groups are handed over together, and come out as if each had been alone."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import disk, smallest_budgets, train
from torch import nn

from tierstore.config import AdamWConfig, UpdateSchedule
from tierstore.device.arithmetic import Piece
from tierstore.device.streams import Reached
from tierstore.device.transfers import CpuDevice
from tierstore.errors import ClosedError, StorageError
from tierstore.io.runtime import Runtime
from tierstore.io.tasks import together
from tierstore.store.gradients import Arrival, Gradients
from tierstore.train.engine import Engine
from tierstore.train.handover import Handover, _Handed

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")

WIDTH = 16
UPDATES = [one.value for one in UpdateSchedule]


class Chain(nn.Module):
    """Many small blocks around a large one; the room for its gradient also holds those of many small blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.large = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

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


@pytest.mark.parametrize(
    ("update", "is_vertical", "is_tight"),
    [
        ("step", False, False), ("forward", False, True), ("backward", False, True), ("speculative", False, True),
        ("delayed", False, True), ("forward", True, True),
    ],
)  # fmt: skip
def test_in_company_gradients_are_what_they_are_alone(
    update: str, is_vertical: bool, is_tight: bool, arrivals: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu, cpu = smallest_budgets(Chain(), nvme=["unused"], update=update) if is_tight else ("16MiB", "16MiB")
    is_backward = update == UpdateSchedule.BACKWARD.value
    options: dict[str, Any] = {"update": update, "accumulate": 1 if is_backward else 2, "is_vertical": is_vertical}
    options |= {} if is_backward else {"max_grad_norm": 1.0}
    in_company = train(Chain(), batches(4), disk(tmp_path / "a", gpu_memory=gpu, cpu_memory=cpu), loss_of, **options)
    assert max(arrivals) > 2
    accept = Gradients.accept
    monkeypatch.setattr(Gradients, "accept", lambda self, several: together([accept(self, [a]) for a in several]))
    alone = train(Chain(), batches(4), disk(tmp_path / "b", gpu_memory=gpu, cpu_memory=cpu), loss_of, **options)
    in_company.check_equal(alone)


def test_a_large_gradient_is_copied_alone_whoever_comes_with_it(
    arrivals: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else one thread would copy all its chunks, and none could be updated before the last is there."""
    monkeypatch.setattr(CpuDevice, "small_bytes", 4096)
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


def test_a_group_that_comes_twice_at_once_is_added_up(tmp_path: Path) -> None:
    with Engine(Chain(), disk(tmp_path, gpu_memory="16MiB", cpu_memory="16MiB"), update="forward") as engine:
        parts = engine._parts
        store, group, other = parts.store.gradients[0], 1, 2
        first, second, alone = (torch.randn(parts.groups.groups[i].spec.elements) for i in (group, group, other))
        arrivals = [
            Arrival(index, [Piece(0, values.clone(), is_first)], Reached(), is_final=is_final)
            for index, values, is_first, is_final in (
                (group, first, True, False), (other, alone, True, True), (group, second, False, True)
            )
        ]  # fmt: skip

        async def collected() -> list[torch.Tensor]:
            await store.accept(arrivals)
            none = torch.empty(0, dtype=torch.uint8).numpy()
            return [torch.from_numpy(await store.fetch(index, 0, none)).clone() for index in (group, other)]

        found = parts.runtime.call(collected)
        assert [torch.equal(*both) for both in zip(found, (first + second, alone))] == [True, True]
        parts.runtime.call(store.discard, [group, other])


@pytest.mark.parametrize("update", UPDATES)
def test_a_copy_that_fails_in_company_is_told_and_nobody_waits_for_ever(
    update: str, arrivals: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    filling, is_failing = Gradients._filling, False

    def failing(self: Gradients, one: Any, array: Any) -> Any:
        if is_failing and one.key[0] == 3:
            raise StorageError("group 3 cannot be copied")
        return filling(self, one, array)

    def steps() -> None:
        nonlocal is_failing
        with Engine(Chain(), tiers, update=update) as engine:
            for batch in batches(4):
                engine.backward(loss_of(engine, batch))
                engine.step()
                engine.flush()
                is_failing = max(arrivals) > 2

    monkeypatch.setattr(Gradients, "_filling", failing)
    tiers = disk(tmp_path, gpu_memory="16MiB", cpu_memory="16MiB")
    with pytest.raises(StorageError, match="group 3 cannot be copied"):
        steps()
    assert is_failing
    with Engine(Chain(), tiers, update=update, resume="must") as engine:
        assert engine.step_count >= 1


def test_an_interrupt_with_gradients_waiting_for_company_loses_that_step_alone(
    arrivals: list[int], tmp_path: Path
) -> None:
    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    tiers = {"gpu_memory": "16MiB", "cpu_memory": "16MiB"}
    options: dict[str, Any] = {"update": "forward", "max_grad_norm": 1.0}
    usual = train(Chain(), batches(5), disk(tmp_path / "a", **tiers), loss_of, **options)
    assert max(arrivals) > 2
    with Engine(Chain(), disk(tmp_path / "b", **tiers), AdamWConfig(lr=1e-3), **options) as engine:
        for batch in batches(5)[:2]:
            engine.backward(loss_of(engine, batch))
            engine.step()
        last = batches(1)[0].requires_grad_()  # its gradient comes after all others
        last.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss_of(engine, last))
    rest = train(Chain(), batches(5)[2:], disk(tmp_path / "b", **tiers), loss_of, resume="must", **options)
    assert rest.losses == usual.losses[2:]
    assert all(torch.equal(weight, usual.weights[name]) for name, weight in rest.weights.items())


@pytest.mark.parametrize("is_closed", [False, True])
def test_work_that_never_begins_is_closed(is_closed: bool) -> None:
    """A step is broken off, or the loop ends, between a hand-over and the first turn of its work."""
    accepted: list[Any] = []

    class Store:
        def accept(self, arrivals: Any) -> Any:
            accepted.append(together(()))
            return accepted[0]

    with Runtime() as runtime:
        handover = Handover(runtime, [8], 64, {})
        handover.store = Store()  # type: ignore[assignment]
        group: Any = SimpleNamespace(index=0, spec=SimpleNamespace(name="a"))
        handover._handed.append(_Handed(group, Arrival(0, [], Reached(), is_final=True), None))

        async def begin() -> None:
            if is_closed:
                runtime._is_open = False
                with pytest.raises(ClosedError):
                    handover._start_accept()
                runtime._is_open = True
            else:
                handover._start_accept()
                handover._running[0].cancel()

        runtime.call(begin)
    assert inspect.getcoroutinestate(accepted[0]) == inspect.CORO_CLOSED
