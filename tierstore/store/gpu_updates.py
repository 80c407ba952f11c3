"""The update of chunks whose state and gradient are on the GPU.

Scope: the new weights, on the device and in CPU memory.
Not here: when it runs, and what follows it (`updates.py`); the kernel (`device/arithmetic.py`).
Owner: the loop thread; workers compute and copy.

[Note: the weights on the device] They are the source of the update: they are what is in CPU memory, for what changes
that goes to the device at once (`Weights.reload`). A load may be on its way: what it copies is waited for, and what it
has not begun to copy waits for the update, until that is in CPU memory or has put it on the device itself
(`UpdatePipeline.settle`). A group that has left the device meanwhile is updated apart, one chunk after the other, in
room that the placement leaves for that.

[Note: chunks together] What a job does on the GPU takes microseconds, and its way there and back some hundred. So the
chunks of a group that come in the same turn of the loop are one job: the first of them leads, and the others wait for
its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import torch

from tierstore.device.arithmetic import Run
from tierstore.device.spans import Span
from tierstore.device.streams import ComputeDevice, Reached
from tierstore.io.memory import Bytes
from tierstore.io.workers import Priority
from tierstore.plan.placement import Placement
from tierstore.store.changing import Changing
from tierstore.store.layout import GroupSpec
from tierstore.store.marks import Marks
from tierstore.store.on_gpu import StateOnGpu
from tierstore.store.rounds import Round, Trip
from tierstore.store.weights import Weights


class _Company:
    """Chunks of one group that are updated together. See [Note: chunks together].

    Attributes:
        ended: when all of them are in CPU memory, or one has failed.
    """

    def __init__(self, trips: list[Trip]) -> None:
        self.trips = trips
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class GpuUpdates:
    """Updates chunks of the groups that `on_gpu` has.

    Args:
        changing: shared with the other updates.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        weights: Weights,
        on_gpu: StateOnGpu,
        device: ComputeDevice,
        marks: Marks,
        changing: Changing,
    ) -> None:
        self._groups = groups
        self._placement = placement
        self._weights = weights
        self._on_gpu = on_gpu
        self._device = device
        self._marks = marks
        self._changing = changing
        self._apart = asyncio.Lock()
        self._gathering: dict[tuple[int, int], _Company] = {}  # by the number of the round, and group

    async def apply(self, round_: Round, trip: Trip) -> None:
        """Ends when the new weights are in CPU memory; the trip is applied, and its gradient dropped, before that."""
        await round_.gradients.arrived(*trip.key)
        await self._weights.arrived(*trip.key)
        # No await from here to `changing`: the group may not leave the device in between.
        if (there := self._weights.on_device(trip.group)) is not None:
            async with self._changing.group(trip.group):
                await self._with_others(round_, trip, there)
            return
        async with self._apart:
            await self._marks.reached(round_.used)
            async with self._changing.group(trip.group):
                await self._update(round_, [trip], self._on_gpu.apart, is_there=False)
                await self._fetch([trip], self._on_gpu.apart)
            trip.applied.set_result(False)

    async def _with_others(self, round_: Round, trip: Trip, there: torch.UntypedStorage) -> None:
        key = (round_.number, trip.group)
        if (company := self._gathering.get(key)) is not None:
            company.trips.append(trip)
            await asyncio.shield(company.ended)
            return
        company = self._gathering[key] = _Company([trip])
        try:
            try:
                await asyncio.sleep(0)  # the others' turn
                await self._marks.reached(round_.used)
            finally:
                del self._gathering[key]
            is_there = self._weights.is_valid_on_device(trip.group)
            await self._update(round_, company.trips, there, is_there=is_there)
            for one in company.trips:
                if not one.applied.done():  # who waited for it was broken off
                    one.applied.set_result(True)
            await self._fetch(company.trips, there)
        except BaseException as error:
            company.ended.set_exception(error)
            company.ended.exception()  # retrieved: this task raises it, too
            raise
        company.ended.set_result(None)

    async def _update(
        self, round_: Round, trips: Sequence[Trip], storage: torch.UntypedStorage, *, is_there: bool
    ) -> None:
        """On the device.

        Args:
            storage: gets the new weights.
            is_there: it holds those of before already.
        """
        device, group = self._device, self._groups[trips[0].group]
        come = [] if is_there else [(self._offset(storage, trip), self._home(trip)) for trip in trips]
        jobs = [self._job(round_, run, storage) for run in _neighbours(trips)]

        def update() -> None:
            for offset, here in come:
                device.copy_in(storage, offset, here)
            for weights, state, gradient, runs in jobs:
                device.arithmetic.adam(group.dtype, weights, state, gradient, runs, self._placement.chunk_elements)

        await self._on_gpu.workers.submit(Priority.UPDATE, update)
        for trip in trips:  # before anybody who waits for the update goes on to the next gradient
            round_.gradients.drop(*trip.key)

    def _job(
        self, round_: Round, run: Sequence[Trip], storage: torch.UntypedStorage
    ) -> tuple[Span, Span, Span, Sequence[Run]]:
        """Weights, state and gradient of neighbours, and what they get."""
        for trip in run:
            if not round_.gradients.is_filled(*trip.key):
                raise RuntimeError(f"{trip.key} is updated without a gradient")
        group, first = run[0].key
        start, stop = self._placement.chunk(group, first)[0], self._placement.chunk(*run[-1].key)[1]
        weights = Span(storage, self._offset(storage, run[0]), (stop - start) * self._groups[group].item_bytes)
        there = self._on_gpu.state(group, first, len(run)), self._on_gpu.gradient(group, first, len(run))
        return weights, *there, round_.updates_of(group, start, stop)

    async def _fetch(self, trips: Sequence[Trip], storage: torch.UntypedStorage) -> None:
        """To CPU memory."""
        for run in _neighbours(trips):
            there = (storage, self._offset(storage, run[0]), [self._home(trip) for trip in run])
            await self._on_gpu.workers.submit(Priority.WRITE, self._device.copy_out_ranges, *there, Reached())

    def _offset(self, storage: torch.UntypedStorage, trip: Trip) -> int:
        return 0 if storage is self._on_gpu.apart else self._weights.device_offset(*trip.key)

    def _home(self, trip: Trip) -> Bytes:
        here = self._weights.resident(*trip.key)
        if here is None:
            raise RuntimeError(f"{trip.key} is updated on the GPU, and its weights are not in CPU memory")
        return here[: self._weights.raw_bytes(*trip.key)]


def _neighbours(trips: Iterable[Trip]) -> list[list[Trip]]:
    """Trips of one group, in runs of chunks that follow each other."""
    runs: list[list[Trip]] = []
    for trip in sorted(trips, key=lambda trip: trip.chunk):
        if runs and runs[-1][-1].chunk == trip.chunk - 1:
            runs[-1].append(trip)
        else:
            runs.append([trip])
    return runs
