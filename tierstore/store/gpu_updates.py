"""The update of chunks whose state and gradient are on the GPU.

Scope: making the new weights, on the device and in CPU memory.
Not here: when an update runs, and what follows it (`updates.py`); the kernel (`device/arithmetic.py`).
Owner: the loop thread; workers compute and copy.

[Note: the weights on the device] The update reads the weights on the device: they equal those in CPU memory, because
whatever else changes the latter copies them to the device at once (`Weights.reload`). A load may be in progress: the
update waits for the load of a chunk that is being copied. A chunk that the load has not begun to copy waits for the
update, until the new weights are in CPU memory or the update has put them on the device itself
(`UpdatePipeline.settle`). A group that has left the device meanwhile is updated apart, one chunk after the other, in
room that the placement reserves for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tierstore.device.arithmetic import Run, Update
from tierstore.device.spans import Span
from tierstore.device.streams import ComputeDevice
from tierstore.io.memory import Bytes
from tierstore.io.workers import Priority
from tierstore.plan.placement import Placement
from tierstore.store.changing import Changing
from tierstore.store.layout import GroupSpec
from tierstore.store.marks import Marks
from tierstore.store.on_gpu import StateOnGpu
from tierstore.store.rounds import Round, Trip
from tierstore.store.weights import Weights


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

    async def apply(self, round_: Round, trip: Trip, runs: Sequence[Run]) -> None:
        """Update the chunk of a trip; ends when the new weights are in CPU memory.

        The gradient is dropped before that. If the group is on the device, the trip is applied before that, too.

        Args:
            runs: ranges of elements of the chunk, each with its coefficients.
        """
        await round_.gradients.arrived(*trip.key)
        await self._marks.reached(round_.used)
        await self._weights.arrived(*trip.key)
        if self._weights.on_device(trip.group) is None:
            async with self._apart:
                await self._update(round_, trip, runs)
        else:
            await self._update(round_, trip, runs)

    async def _update(self, round_: Round, trip: Trip, runs: Sequence[Run]) -> None:
        if not round_.gradients.is_filled(*trip.key):
            raise RuntimeError(f"{trip.key} is updated without a gradient")
        # No await from here to `changing`: the group may not leave the device in between.
        key, weights = trip.key, self._weights
        there, nbytes, here = weights.on_device(trip.group), weights.raw_bytes(*key), self._home(trip)
        storage, offset = self._on_gpu.apart, 0
        if there is not None:
            storage, offset = there, weights.device_offset(*key)
        is_there = weights.is_valid_on_device(trip.group)
        update = Update(
            dtype=self._groups[trip.group].dtype, weights=Span(storage, offset, nbytes), runs=runs,
            state=self._on_gpu.state(*key), gradient=self._on_gpu.gradient(*key),
            chunk_elements=self._placement.chunk_elements,
        )  # fmt: skip
        async with self._changing.group(trip.group):
            if not is_there:
                await self._on_gpu.workers.submit(Priority.UPDATE, self._device.copy_in, storage, offset, here)
            await self._on_gpu.update(update)
            round_.gradients.drop(*key)  # before anybody who waits for the update goes on to the next gradient
            if there is not None:
                trip.applied.set_result(True)
            await self._on_gpu.fetch(storage, offset, here)
        if there is None:
            trip.applied.set_result(False)

    def _home(self, trip: Trip) -> Bytes:
        here = self._weights.resident(*trip.key)
        if here is None:
            raise RuntimeError(f"{trip.key} is updated on the GPU, and its weights are not in CPU memory")
        return here[: self._weights.raw_bytes(*trip.key)]
