"""The delayed update is a plain loop that is one step stale, wherever the state lives, resumed or not."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
import runs
import torch

from tierstore.config import AdamWConfig, TierConfig
from tierstore.device.streams import Reached
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend
from tierstore.store.commit import Generation, Manifests
from tierstore.store.gradients import Arrival
from tierstore.store.manifest import Captured
from tierstore.store.pieces import Piece
from tierstore.train.engine import Engine

STEPS = 8
CLIP = 0.5


def stale_loop() -> list[float]:
    """Plain torch: each step applies the gradients of the step before, clipped by their own norm."""
    model = runs.tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, pending = [], None
    for batch in runs.tokens(STEPS):
        loss = runs.next_token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        arrived = [parameter.grad for parameter in model.parameters()]
        if pending is not None:
            for parameter, gradient in zip(model.parameters(), pending):
                parameter.grad = gradient
            optimizer.step()
        pending = arrived
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def delayed(
    directory: Path | None, cpu_memory: str, cuts: list[int], backend: Backend | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of the engine, closed and resumed at the steps in `cuts`."""
    losses: list[float] = []
    batches = runs.tokens(STEPS)
    state: dict[str, torch.Tensor] = {}
    for stop in [*cuts, STEPS]:
        tiers = TierConfig(gpu_memory="2MiB", cpu_memory=cpu_memory, nvme=[directory] if directory else [])
        config = AdamWConfig(lr=1e-2, weight_decay=0.1)
        with Engine(
            runs.tiny(), tiers, config, update="delayed", max_grad_norm=CLIP, resume="auto", backend=backend
        ) as engine:
            for batch in batches[engine.step_count : stop]:
                loss = runs.next_token_loss(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            state = engine.state_dict()
    return losses, state


def test_delayed_is_one_step_stale(disk_path: Path) -> None:
    expected = stale_loop()
    losses, _ = delayed(disk_path / "store", "64MiB", [])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[0] != expected[2]


@pytest.mark.parametrize("cpu_memory", ["64MiB", "4MiB"])
@pytest.mark.parametrize("cuts", [[], [1, 4]])
def test_delayed_is_the_same_on_disk_and_after_a_resume(disk_path: Path, cpu_memory: str, cuts: list[int]) -> None:
    losses, weights = delayed(None, "64MiB", [])
    again, stored = delayed(disk_path / "store", cpu_memory, cuts)
    assert again == losses
    assert all(torch.equal(weights[name], stored[name]) for name in weights)


class SlowSync(Backend):
    """Data becomes durable late: after the next spilled gradient was written, if that comes too early."""

    def __init__(self) -> None:
        super().__init__()
        self.spilled = threading.Event()

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        if path.name.startswith("gradients"):
            self.spilled.set()
        return super()._call_pwrite(descriptor, view, offset, path)

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        if path.name.startswith("weights.a"):
            self.spilled.clear()
            self.spilled.wait(0.2)
        super()._call_fdatasync(descriptor, path)


def test_a_generation_keeps_its_pending_gradients_until_it_is_published(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spilled gradients of the step after the next go to the same pack; the commit may still be on its way."""
    expected, _ = delayed(disk_path / "whole", "5900KiB", [])
    copies: dict[int, Path] = {}
    publish = Manifests.publish

    async def publish_and_copy(self: Manifests, generation: Generation, noted: Captured | None = None) -> None:
        await publish(self, generation, noted)
        copies[generation.number] = disk_path / f"killed{generation.number}"  # what SIGKILL would leave now
        shutil.copytree(self.directory, copies[generation.number], ignore=shutil.ignore_patterns("lock"))

    with monkeypatch.context() as patch:
        patch.setattr(Manifests, "publish", publish_and_copy)
        delayed(disk_path / "slow", "5900KiB", [], SlowSync())
    assert len(copies) == STEPS + 1
    for number, copy in copies.items():
        assert delayed(copy, "5900KiB", [])[0] == expected[number:]


def test_only_pending_gradients_come_back(disk_path: Path) -> None:
    """A group without a gradient in the step after a resume counts nothing in its norm."""

    def norms(name: str, cuts: list[int]) -> list[float | None]:
        found = []
        for stop in [*cuts, 6]:
            tiers = TierConfig(gpu_memory="2MiB", cpu_memory="64MiB", nvme=[disk_path / name])
            with Engine(SkipsBlock(), tiers, update="delayed", max_grad_norm=CLIP, resume="auto") as engine:
                while engine.step_count < stop:
                    engine.backward(engine(torch.ones(2, 8), skips=engine.step_count in (2, 3)).pow(2).mean())
                    found.append(engine.step().grad_norm)
        return found

    assert norms("resumed", [3]) == norms("whole", [])


class SkipsBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for position, block in enumerate(self.blocks):
            if position != 1 or not skips:
                x = block(x)
        return x


def test_pending_gradients_are_not_lost_to_another_schedule(disk_path: Path) -> None:
    tiers = TierConfig(gpu_memory="2MiB", cpu_memory="64MiB", nvme=[disk_path / "store"])
    batch = runs.tokens(1)[0]

    def step(update: str, resume: str) -> int:
        with Engine(runs.tiny(), tiers, update=update, resume=resume) as engine:
            engine.backward(runs.next_token_loss(engine, batch))
            engine.step()
            return engine.step_count

    assert step("forward", "never") == 1
    assert step("delayed", "must") == 2  # its packs are made
    with pytest.raises(ConfigError, match="resume it with update='delayed'"):
        step("forward", "must")
    assert step("delayed", "must") == 3


def test_pending_gradients_stay_until_the_commit_that_names_them_is_published(disk_path: Path) -> None:
    tiers = TierConfig(gpu_memory="2MiB", cpu_memory="5900KiB", nvme=[disk_path / "store"])
    with Engine(runs.tiny(), tiers, AdamWConfig(), update="delayed") as engine:
        parts = engine._parts
        gradients = parts.store.gradients[0]
        group = next(index for index, _ in enumerate(parts.store.groups) if gradients.is_spilled(index))

        async def spilled_meanwhile() -> int:
            published = asyncio.Event()

            async def commit() -> None:
                await published.wait()

            gradients.kept_by = asyncio.create_task(commit())
            pieces = [Piece(0, torch.ones(parts.store.groups[group].elements), True)]
            accepting = asyncio.ensure_future(gradients.accept([Arrival(group, pieces, Reached(), is_final=True)]))
            for _ in range(5):  # turns of the loop: it begins, waits
                await asyncio.sleep(0)
            taken_bytes = gradients._staging.used_bytes
            published.set()
            await accepting
            gradients.drop_all()
            return taken_bytes

        assert parts.runtime.call(spilled_meanwhile) == 0
