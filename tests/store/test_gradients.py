"""A gradient on its way to NVMe: how long it stays in memory for an update that waits for it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from placements import request

from tierstore.config import Tier
from tierstore.device.arithmetic import Piece
from tierstore.device.streams import Reached, open_device
from tierstore.io.memory import Arena, Bytes, Pool, aligned_room
from tierstore.io.workers import Priority, WorkerPool
from tierstore.kernels.norms import square_sums
from tierstore.plan.tiers import place_uniformly
from tierstore.store.gradient_memory import GradientMemory
from tierstore.store.gradients import Arrival, Gradients
from tierstore.store.layout import GroupSpec, ParameterSpec
from tierstore.store.marks import Marks
from tierstore.trace import Tracer

SPEC = GroupSpec("g", "fp32", True, (ParameterSpec("w", (1000,), 0),))
VALUES = np.arange(1000, dtype=np.float32)
NBYTES = 4096


class Disk:
    """A pack of one chunk."""

    def __init__(self) -> None:
        self.reads = 0
        self._stored: Bytes | None = None

    def padded_bytes(self, index: int) -> int:
        return NBYTES

    async def write(self, index: int, array: Bytes) -> None:
        self._stored = array.copy()

    async def read(self, index: int, array: Bytes, priority: Priority) -> None:
        assert self._stored is not None
        self.reads += 1
        array[:] = self._stored


def with_spilled(play: Callable[[Gradients, Disk, Pool], Awaitable[None]], places: int = 1) -> None:
    """Play with the gradients of one small group, which live on NVMe, and their staging memory."""
    placement = place_uniformly(
        request((SPEC.need(),), 2**20), weights=Tier.NVME, gradients=Tier.NVME, state=Tier.NVME
    )

    async def run() -> None:
        arena, disk, workers, no_gpu = Arena((1 + places) * NBYTES), Disk(), WorkerPool("compute", 1), ()
        pool, staging = arena.pool("gradients", NBYTES), arena.pool("spill", places * NBYTES)
        pack: Any = disk
        on_gpu: Any = no_gpu
        gradients = Gradients(
            [SPEC], placement, GradientMemory(placement, pool, staging, 0), pack, on_gpu, workers, open_device("cpu"),
            Marks(), Tracer(time.perf_counter, enabled=False),
        )  # fmt: skip
        try:
            await asyncio.wait_for(play(gradients, disk, staging), 60.0)
        finally:
            workers.close(5.0)
        assert staging.used_bytes == 0

    asyncio.run(run())


def arrival(start: int = 0, stop: int = 1000, *, is_final: bool = True) -> Arrival:
    return Arrival(0, [Piece(start, torch.from_numpy(VALUES[start:stop].copy()), True)], Reached(), is_final)


async def check_fetched(gradients: Gradients) -> None:
    assert np.array_equal(await gradients.fetch(0, 0, aligned_room(NBYTES)), VALUES)


def test_an_update_that_waits_for_a_gradient_does_not_read_it_again() -> None:
    async def play(gradients: Gradients, disk: Disk, staging: Pool) -> None:
        accepted = gradients.accept([arrival()])
        assert gradients.awaited(0, 0) is not None
        await accepted
        await check_fetched(gradients)
        assert disk.reads == 0
        gradients.let_go(0, 0)
        assert staging.used_bytes == 0
        await check_fetched(gradients)  # for a redo
        assert disk.reads == 1

    with_spilled(play)


@pytest.mark.parametrize("why", ["nobody waits", "he has given way", "more will come"])
def test_without_one_its_memory_is_free_at_once(why: str) -> None:
    async def play(gradients: Gradients, disk: Disk, staging: Pool) -> None:
        accepted = gradients.accept([arrival(is_final=why != "more will come")])
        if why != "nobody waits":
            assert gradients.awaited(0, 0) is not None
        if why == "he has given way":
            gradients.let_go(0, 0)
        await accepted
        assert staging.used_bytes == 0
        assert gradients.awaited(0, 0) is None  # it is there
        await check_fetched(gradients)
        assert disk.reads == 1

    with_spilled(play)


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("waits_before", [True, False])
def test_of_several_arrivals_the_last_stays(places: int, waits_before: bool) -> None:
    """Reentrant checkpoints hand a group over more than once."""

    async def play(gradients: Gradients, disk: Disk, staging: Pool) -> None:
        accepted = [gradients.accept([arrival(0, 400)])]
        if waits_before:
            gradients.awaited(0, 0)
        accepted.append(gradients.accept([arrival(400, 1000)]))
        while (coming := gradients.awaited(0, 0)) is not None:
            tasks = [asyncio.ensure_future(one) for one in accepted]
            accepted.clear()
            await coming
            await asyncio.gather(*tasks)
        assert staging.used_bytes == NBYTES
        before = disk.reads
        await check_fetched(gradients)
        assert disk.reads == before
        gradients.let_go(0, 0)

    with_spilled(play, places)


def test_what_is_staged_makes_way_for_more() -> None:
    async def play(gradients: Gradients, disk: Disk, staging: Pool) -> None:
        first = gradients.accept([arrival(0, 400)])
        gradients.awaited(0, 0)
        await first
        second = gradients.accept([arrival(400, 1000)])
        assert gradients.awaited(0, 0) is not None  # before its update has begun
        await second
        await check_fetched(gradients)
        gradients.let_go(0, 0)

    with_spilled(play)


@pytest.mark.parametrize("first", ["the step", "the update"])
def test_it_is_measured_once_by_the_update_or_the_step(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second waits: the update must not use up what the step measures."""
    measured: list[int] = []

    def sums(dtype: str, gradient: Any, out: Any) -> None:
        measured.append(len(gradient))
        square_sums(dtype, gradient, out)

    monkeypatch.setattr("tierstore.store.gradients.square_sums", sums)

    async def play(gradients: Gradients, disk: Disk, staging: Pool) -> None:
        await gradients.accept([arrival(is_final=False)])
        gradient = await gradients.fetch(0, 0, aligned_room(NBYTES))
        thread_is_free = threading.Event()
        gradients._workers.submit(Priority.DEMAND, thread_is_free.wait)
        ended: list[str] = []

        async def step() -> float:
            (partials,) = await gradients.take_partials()
            ended.append("the step")
            return float(partials.sum())

        async def update() -> None:
            await gradients.measure(0, 0, gradient)
            ended.append("the update")
            gradients.drop(0, 0)

        works = {"the step": step(), "the update": update()}
        tasks = [asyncio.create_task(works.pop(first)), asyncio.create_task(*works.values())]
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            assert ended == []
        finally:
            thread_is_free.set()
        assert float(np.square(VALUES, dtype=np.float64).sum()) in await asyncio.gather(*tasks)
        assert measured == [1000]
        (partials,) = await gradients.take_partials()
        assert not partials.any()

    with_spilled(play)


def test_what_is_dropped_takes_no_memory() -> None:
    async def play(gradients: Gradients, disk: Disk, staging: Pool) -> None:
        accepted = gradients.accept([arrival()])
        gradients.awaited(0, 0)
        await accepted
        gradients.drop(0, 0)
        assert not gradients.is_filled(0, 0)

    with_spilled(play)
