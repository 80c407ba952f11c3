"""Gradients of micro-batches are added on the device where there is room, and come out as if the store had added them.

Without room they go to the store with each micro-batch: both ways are compared bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Ways, disk, next_token_loss, smallest_budgets, tiny, tokens, train
from torch import nn

from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import ClosedError, ConfigError
from tierstore.plan.costs import StepPattern
from tierstore.plan.gpu_room import kept_gradients
from tierstore.train.backward import GradientCollector
from tierstore.train.engine import Engine
from tierstore.train.handover import Handover

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")

ROOM = "16MiB"
MICRO_BATCHES, STEPS = 3, 2


def tiers_of(folder: Path, gpu: str | int | None, model: nn.Module, **options: Any) -> TierConfig:
    least, cpu = smallest_budgets(model, nvme=["unused"], **options)
    return disk(folder, gpu_memory=least if gpu is None else gpu, cpu_memory=cpu)


@pytest.mark.parametrize(
    ("update", "dtype"),
    [("step", torch.float32), ("forward", torch.bfloat16), ("backward", torch.float32),
     ("speculative", torch.bfloat16), ("delayed", torch.float32)],
)  # fmt: skip
def test_added_on_the_device_they_are_what_the_store_adds(update: str, dtype: torch.dtype, tmp_path: Path) -> None:
    options: dict[str, Any] = {"update": update} | ({} if update == "backward" else {"max_grad_norm": 1.0})
    gradients = sum(parameter.nbytes for parameter in tiny(dtype).parameters())
    runs = []
    for name, gpu in (("apart", None), ("kept", ROOM)):
        tiers = tiers_of(tmp_path / name, gpu, tiny(dtype), **options)
        batches = tokens(STEPS * MICRO_BATCHES)
        runs.append(train(tiny(dtype, dropout=0.1), batches, tiers, accumulate=MICRO_BATCHES, **options))
    apart, kept = runs
    kept.check_equal(apart)
    saved = STEPS * (MICRO_BATCHES - 1) * gradients  # except a small group's, which the smallest budget can keep, too
    assert 0.9 * saved < apart.moved["d2h"] - kept.moved["d2h"] <= saved


def room_left(engine: Engine) -> int:
    return engine.placement.gpu_gradient_bytes - engine._parts.collector.peak_bytes


class Halves(nn.Module):
    """Blocks of two layers; all first layers run before all second ones, so gradients of all blocks gather at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(64, 64) for _ in range(2)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for half in range(2):
            for block in self.blocks:
                x = x + block[half](x).tanh()
        return x


def normal(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 64, generator=generator) for _ in range(steps)]


MODELS: dict[str, Any] = {
    "one after the other": (tiny, tokens, next_token_loss),
    "side by side": (Halves, normal, lambda model, batch: model(batch).pow(2).mean()),
}


def planned_d2h(engine: Engine) -> int:
    """Bytes of gradients that leave the device in a step, as `plan` counts them."""
    pattern = StepPattern(micro_batches=MICRO_BATCHES, kept_gradients=kept_gradients(engine.placement))
    needs = enumerate(engine.placement.groups)
    return sum(pattern.arrivals(index) * need.elements * need.weight_bytes for index, need in needs if need.trainable)


@pytest.mark.parametrize("model", MODELS)
def test_there_is_room_for_some(model: str, tmp_path: Path) -> None:
    """The rest goes to the store each time; more than the room is never taken."""
    build, batches, loss_of = MODELS[model]
    least, _ = smallest_budgets(build(), nvme=["unused"])
    gradients = sum(parameter.nbytes for parameter in build().parameters())
    runs = []
    for budget in (*range(least, least + 2 * gradients, gradients // 2), ROOM):
        seen: list[tuple[int, int]] = []
        tiers = tiers_of(tmp_path / str(budget), budget, build())
        runs.append(
            train(build(), batches(2 * MICRO_BATCHES), tiers, loss_of, accumulate=MICRO_BATCHES,
                  after=lambda engine, step, seen=seen: seen.append((room_left(engine), planned_d2h(engine))))
        )  # fmt: skip
        runs[0].check_equal(runs[-1])
        rooms, planned = zip(*seen)
        assert min(rooms) >= 0
        if model == "one after the other":  # `plan` knows no other order
            assert runs[-1].moved["d2h"] == sum(planned)
    moved = [run.moved["d2h"] for run in runs]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) > 3


WAYS = {
    "the last one goes past some": [(0, 1, 2), (0, 1, 2), (1,)],
    "others each time": [(0,), (1,), (2,)],
    "some twice": [(0, 1, 1), (1, 0, 1), (2, 2, 0)],
}


def play(engine: Engine, ways: Sequence[Sequence[int]], look: Callable[[Engine], Any]) -> list[Any]:
    """Two steps; `look` comes after each backward that is not the last one of its step."""
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(2):
        for number, way in enumerate(ways):
            is_last = number + 1 == len(ways)
            with contextlib.nullcontext() if is_last else engine.no_sync():
                engine.backward(engine(torch.randn(4, 8, generator=generator), way).pow(2).mean())
            if not is_last:
                seen.append(look(engine))
        seen.append(engine.step().grad_norm)
    return [*seen, *engine.state_dict().values()]


def compare(ways: Sequence[Sequence[int]], look: Callable[[Engine], Any] = lambda engine: 0.0) -> None:
    found = []
    for keeps in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not keeps:
                patch.setattr(GradientCollector, "_may_keep", lambda *_: False)
            tiers = TierConfig(nvme=(), gpu_memory=ROOM, cpu_memory=ROOM)
            with Engine(Ways(), tiers, AdamWConfig(lr=1e-2), max_grad_norm=1.0) as engine:
                found.append(play(engine, ways, look))
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_micro_batches_go_other_ways(ways: list[Sequence[int]]) -> None:
    compare(ways)


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_a_gradient_is_read_between_micro_batches(ways: list[Sequence[int]]) -> None:
    """A read gives the sum so far; later gradients go to the store, and are added in the same order."""
    compare(ways, lambda engine: engine.gradient("layers.1.weight"))


def test_what_the_store_has_a_part_of_is_added_there() -> None:
    """In the order in which gradients come: the last three are not summed first."""
    looks = itertools.cycle([True, False, False])
    compare([(0, 1, 2)] * 4, lambda engine: engine.gradient("layers.1.weight") if next(looks) else 0.0)


@pytest.mark.parametrize("place", ["give", "wait"])
def test_a_read_that_is_interrupted_on_the_way_to_the_store_ends_the_step(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step would go on without the gradient that was taken, or before it has arrived and is measured."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    tiers = TierConfig(nvme=(), gpu_memory=ROOM, cpu_memory=ROOM)
    with Engine(Ways(), tiers, AdamWConfig(lr=1e-2), update="forward", max_grad_norm=1.0) as engine:
        before = engine.state_dict()
        with engine.no_sync():
            engine.backward(engine(torch.ones(4, 8), (0, 1, 2)).sum())
        engine._parts.runtime.keep_failure(OSError("of something else"))
        with pytest.raises(OSError, match="of something else"):
            engine.gradient("layers.1.weight")
        assert engine._parts.collector.keeps  # and a step may follow
        with monkeypatch.context() as patch:
            patch.setattr(Handover, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.gradient("layers.1.weight")
        with pytest.raises(ClosedError, match="a step was broken off by KeyboardInterrupt"):
            engine.step()
        after = engine.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)


class Summed(nn.Module):
    """Two parameters whose gradients are views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.flat = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.rows.view(32) + self.flat.view(32))


def test_gradients_that_share_their_memory_are_not_added_to_each_other() -> None:
    """Plain torch adds them to each other, which is wrong."""
    xs = [torch.randn(32, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    tiers = TierConfig(nvme=(), gpu_memory=ROOM, cpu_memory=ROOM)
    with Engine(Summed(), tiers, AdamWConfig(lr=1e-2)) as engine:
        for x in xs:
            with engine.no_sync():
                engine.backward(engine(x).sum())
        assert torch.equal(engine.gradient("flat"), xs[0] + xs[1] + xs[2])
        assert torch.equal(engine.gradient("rows").view(32), xs[0] + xs[1] + xs[2])
        engine.step()


class Long(nn.Module):
    """A parameter whose gradient is a part of a much longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.row, x]).square()


def test_what_is_kept_holds_its_own_memory_only_and_not_beyond_the_engine() -> None:
    tiers = TierConfig(nvme=(), gpu_memory=ROOM, cpu_memory=ROOM)
    with Engine(Long(), tiers, AdamWConfig(lr=1e-2)) as engine:
        with engine.no_sync():
            engine.backward(engine(torch.ones(1000, 64)).sum())
        (kept,) = engine._parts.collector._kept.values()
        assert [gradient.untyped_storage().nbytes() for gradient in kept.values()] == [64 * 4]
    assert not engine._parts.collector.keeps


def test_a_block_that_the_step_has_not_reached_has_no_gradient() -> None:
    """Even if the step before, whose update may still be to come, has left one."""
    tiers = TierConfig(nvme=(), gpu_memory=ROOM, cpu_memory=ROOM)
    with Engine(Ways(), tiers, AdamWConfig(lr=1e-2), update="forward", max_grad_norm=1.0) as engine:
        for _ in range(4):
            for way in ((0, 1, 2), (0,)):
                engine.backward(engine(torch.ones(4, 8), way).sum())
                assert bool(engine.gradient("layers.2.weight").any()) == (2 in way)
                engine.step()
                with pytest.raises(ConfigError, match=r"layers\.2\.weight has no gradient: there was no backward"):
                    engine.gradient("layers.2.weight")


def test_what_is_kept_is_forgotten_with_the_rest() -> None:
    compare([(0, 1, 2), (0, 1), (1, 2)], lambda engine: engine.zero_grad() or 0.0)


def test_a_step_without_a_last_backward_has_all(tmp_path: Path) -> None:
    found = []
    for gpu in (None, ROOM):
        tiers = tiers_of(tmp_path / str(gpu), gpu, tiny())
        with Engine(tiny(), tiers, AdamWConfig(lr=1e-3), max_grad_norm=1.0) as engine:
            for batch in tokens(2):
                with engine.no_sync():
                    engine.backward(next_token_loss(engine, batch))
            found.append([engine.step().grad_norm, *engine.state_dict().values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
