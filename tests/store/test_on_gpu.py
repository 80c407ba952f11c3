"""Chunks of gradients that stay on the GPU, and updates of neighbouring chunks, which are joined to one."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch
from placements import request

from tierstore.device.arithmetic import Collection, Piece, Update
from tierstore.device.spans import Span
from tierstore.device.streams import Reached
from tierstore.device.transfers import CpuDevice
from tierstore.io.memory import Arena
from tierstore.io.workers import WorkerPool
from tierstore.kernels.adam import AdamCoefficients
from tierstore.plan.placement import BLOCK
from tierstore.plan.tiers import place
from tierstore.store.gradient_memory import GradientMemory
from tierstore.store.gradients import Arrival, Gradients
from tierstore.store.layout import GroupSpec, ParameterSpec
from tierstore.store.marks import Marks
from tierstore.store.on_gpu import StateOnGpu, joined
from tierstore.trace import Tracer

FIRST, OTHER = (AdamCoefficients(lr, 0.9, 0.99, 1e-8, 0.1, 3) for lr in (1e-2, 1e-3))
CHUNK = 64


def updates(*chunks: tuple[int, int], runs: list[tuple[int, int, AdamCoefficients]]) -> list[Update]:
    """Updates of bf16 chunks, which are given by their first element and their end."""
    weights, state, gradient = (torch.UntypedStorage(4096) for _ in range(3))
    return [
        Update(
            "bf16", *(Span(storage, 8 + start * size, (stop - start) * size)
                      for storage, size in ((weights, 2), (state, 10), (gradient, 2))),
            runs=[(a, min(b, stop - start), c) for a, b, c in runs], chunk_elements=CHUNK,
        )
        for start, stop in chunks
    ]  # fmt: skip


def test_whole_chunks_and_what_follows_are_one_with_runs_across() -> None:
    given = updates((0, 64), (64, 128), (128, 140), runs=[(0, 7, OTHER), (7, 64, FIRST)])
    (one,) = joined(given)
    assert one.runs == [(0, 7, OTHER), (7, 64, FIRST), (64, 71, OTHER), (71, 128, FIRST), (128, 135, OTHER),
                        (135, 140, FIRST)]  # fmt: skip
    assert [(span.offset, span.nbytes) for span in (one.weights, one.state, one.gradient)] == [
        (8, 280), (8, 1400), (8, 280),
    ]  # fmt: skip
    (one,) = joined(updates((0, 64), (64, 128), runs=[(0, 64, FIRST)]))
    assert one.runs == [(0, 128, FIRST)]


def test_runs_with_a_gap_between_them_stay_two() -> None:
    first, second = updates((0, 64), (64, 128), runs=[(0, 60, FIRST)])
    (one,) = joined([first, second._replace(runs=[(0, 64, FIRST)])])
    assert one.runs == [(0, 60, FIRST), (64, 128, FIRST)]


@pytest.mark.parametrize("which", ["weights", "state", "gradient"])
def test_what_does_not_follow_in_all_its_memory_stays_apart(which: str) -> None:
    first, second = updates((0, 64), (64, 128), runs=[(0, 64, FIRST)])
    span = getattr(second, which)
    other = second._replace(**{which: Span(span.storage, span.offset + 4, span.nbytes)})
    assert joined([first, other]) == [first, other]


def test_others_stay_apart() -> None:
    gap = updates((0, 64), (128, 192), runs=[(0, 64, FIRST)])
    ragged = updates((0, 60), (60, 64), runs=[(0, 4, FIRST)])
    other_storages = [updates((0, 64), runs=[(0, 64, FIRST)])[0], updates((64, 128), runs=[(0, 64, FIRST)])[0]]
    for given in (gap, ragged, other_storages, list(reversed(updates((0, 64), (64, 128), runs=[(0, 4, FIRST)])))):
        assert joined(given) == given
    assert joined([]) == []


COUNT = 3 * BLOCK
SPECS = [GroupSpec(name, "fp32", True, (ParameterSpec("w", (COUNT,), 0),)) for name in "ab"]


class Counting(CpuDevice):
    """Notes how many collections come in one call, and how many chunks each has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[float]] = []
        collect = self.arithmetic.collect

        def noted(collections: list[Collection]) -> None:
            self.seen.append([one.total.nbytes / 4 / BLOCK for one in collections])
            collect(collections)

        self.arithmetic.collect = noted  # type: ignore[method-assign, assignment]


def play(game: Callable[[Gradients, Counting], Awaitable[None]]) -> None:
    """Play with two groups of three chunks; their memory on the device is full of numbers that are no gradients."""
    needs = tuple(spec.need() for spec in SPECS)
    placement = place(request(needs, 2**26, chunk_elements=BLOCK, updates_on_gpu=True, nvme=False))
    device, workers = Counting(), WorkerPool("gpu", 1)

    async def run() -> None:
        arena = Arena(2**22)
        pool, staging = arena.pool("gradients", 2**20), arena.pool("staging", 2**20)
        on_gpu = StateOnGpu(SPECS, placement, staging, workers, device)
        for storage in on_gpu._gradients.values():
            torch.empty(0).set_(storage, 0, (COUNT,), (1,)).fill_(777.0)
        memory, tracer = GradientMemory(placement, pool, staging, 0), Tracer(time.perf_counter, enabled=False)
        await game(Gradients(SPECS, placement, memory, None, on_gpu, workers, device, Marks(), tracer), device)
        on_gpu.release()
        arena.close()

    try:
        asyncio.run(run())
    finally:
        workers.close(10.0)


async def check(store: Gradients, group: int, wanted: torch.Tensor) -> None:
    found = await store.read(group, 0, COUNT)
    assert np.array_equal(found, wanted.numpy())


def test_chunks_that_have_something_and_those_that_have_nothing_come_together() -> None:
    async def game(store: Gradients, device: Counting) -> None:
        first = [Arrival(0, [Piece(0, torch.ones(BLOCK), True)], Reached(), is_final=False)]
        first.append(Arrival(1, [Piece(BLOCK + 7, torch.full((2 * BLOCK - 7,), 5.0), True)], Reached(), is_final=True))
        await store.accept(first)
        assert device.seen == [[1.0, 2.0]], "of two groups, neighbours as one"
        added = Piece(10, torch.ones(BLOCK - 10), False)
        await store.accept([Arrival(0, [added, Piece(BLOCK, torch.full((BLOCK + 5,), 3.0), True)], Reached(), True)])
        assert device.seen[1:] == [[1.0, 2.0]], "one is added to, the others begin"
        wanted = torch.zeros(2, COUNT)
        wanted[0, :10], wanted[0, 10:BLOCK], wanted[0, BLOCK : 2 * BLOCK + 5] = 1.0, 2.0, 3.0
        wanted[1, BLOCK + 7 :] = 5.0
        for group in range(2):
            await check(store, group, wanted[group])
        partials = np.array(await store.take_partials())
        assert partials.tolist() == wanted.double().square().reshape(2, 3, BLOCK).sum(-1).tolist()

    play(game)


def test_what_is_final_and_what_is_not_is_not_measured_together() -> None:
    async def game(store: Gradients, device: Counting) -> None:
        pieces = [[Piece(chunk * BLOCK, torch.ones(BLOCK), True)] for chunk in range(2)]
        await store.accept([Arrival(0, pieces[0], Reached(), True), Arrival(0, pieces[1], Reached(), False)])
        assert device.seen == [[1.0, 1.0]]
        assert store._partials[0].tolist() == [BLOCK, 0, 0]

    play(game)


def test_no_more_is_measured_at_once_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.store.gradients.MOST_MEASURED", 2 * BLOCK)

    async def game(store: Gradients, device: Counting) -> None:
        await store.accept([Arrival(1, [Piece(0, torch.ones(COUNT), True)], Reached(), is_final=True)])
        assert device.seen == [[2.0, 1.0]]

    play(game)


def test_gradients_go_when_they_are_there() -> None:
    async def game(store: Gradients, device: Counting) -> None:
        gradient = torch.ones(COUNT)
        pieces = [Piece(0, gradient, True)]
        accepted = store.accept([Arrival(0, pieces, Reached(), is_final=True)])
        kept: list[Collection] = []
        collect = device.arithmetic.collect

        def noted(collections: list[Collection]) -> None:
            collect(collections)
            kept.extend(collections)

        device.arithmetic.collect = noted  # type: ignore[method-assign, assignment]
        ref = weakref.ref(gradient)
        del gradient
        await accepted
        assert [one.parts for one in kept] == [[]], "emptied by the thread, whoever still has them"
        assert not pieces
        assert ref() is None

    play(game)
