"""State and gradients that live on the GPU tier, of the groups that are updated there.

Scope: where a chunk's are, and their way to and from memory from which they can be written.
Not here: which groups they are (`plan/tiers.py`), the update (`gpu_updates.py`), gradients on their way
    (`gradients.py`).
Owner: the loop thread; workers copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import torch

from tierstore.device.spans import Span
from tierstore.device.streams import ComputeDevice, Reached
from tierstore.io.memory import Bytes, Pool
from tierstore.io.workers import Priority, WorkerPool
from tierstore.plan.placement import Placement
from tierstore.store.layout import GroupSpec
from tierstore.store.slots import SlotPack


class StateOnGpu:
    """The device memory of all groups that are updated on the GPU, for as long as the store lives.

    Args:
        staging: memory that state passes on its way.
        workers: of all that is done with it.

    Raises:
        BudgetError: a GPU has no room.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        staging: Pool,
        workers: WorkerPool,
        device: ComputeDevice,
    ) -> None:
        self._placement = placement
        self._staging = staging
        self.workers = workers
        self._device = device
        self._needs = [group.need() for group in groups]
        self._state: dict[int, torch.UntypedStorage] = {}
        self._gradients: dict[int, torch.UntypedStorage] = {}
        for group, need in enumerate(self._needs):
            if placement.is_updated_on_gpu(group):
                self._state[group] = self._allocated(need.elements * need.state_bytes)
                self._gradients[group] = self._allocated(need.elements * need.weight_bytes)
        self.apart = self._allocated(placement.gpu_apart_bytes)
        """Room for the weights of one chunk whose group has left the device."""

    def _allocated(self, nbytes: int) -> torch.UntypedStorage:
        storage = torch.empty(0, dtype=torch.uint8, device=self._device.torch_device).untyped_storage()
        if nbytes:
            self._device.allocate(storage, nbytes)
        return storage

    def release(self) -> None:
        """Give the memory back; nothing uses it any more. Twice is fine."""
        for storage in self._all():
            if storage.nbytes():
                self._device.release(storage, Reached())

    def __contains__(self, group: object) -> bool:
        return group in self._state

    @property
    def nbytes(self) -> int:
        """Of the GPU tier."""
        return sum(storage.nbytes() for storage in self._all())

    def _all(self) -> list[torch.UntypedStorage]:
        return [*self._state.values(), *self._gradients.values(), self.apart]

    def state(self, group: int, chunk: int, count: int = 1) -> Span:
        """The state of so many neighbouring chunks, without padding."""
        return self._span(self._state[group], group, range(chunk, chunk + count), self._needs[group].state_bytes)

    def gradient(self, group: int, chunk: int, count: int = 1) -> Span:
        """The gradient of so many neighbouring chunks, without padding."""
        return self._span(self._gradients[group], group, range(chunk, chunk + count), self._needs[group].weight_bytes)

    def _span(self, storage: torch.UntypedStorage, group: int, chunks: range, element_bytes: int) -> Span:
        start, stop = self._placement.chunk(group, chunks[0])[0], self._placement.chunk(group, chunks[-1])[1]
        return Span(storage, start * element_bytes, (stop - start) * element_bytes)

    def memory(self, group: int, chunk: int) -> AbstractAsyncContextManager[Bytes]:
        """Some for the state of a chunk, with padding; contents undefined."""
        return self._staging.lent(self._placement.state_bytes(group, chunk))

    async def read(self, group: int, chunk: int, into: Bytes) -> None:
        """The state of a chunk into such memory."""
        span = self.state(group, chunk)
        into[span.nbytes :] = 0
        memory, there = into[: span.nbytes], (span.storage, span.offset)
        await self.workers.submit(Priority.COMMIT, self._device.copy_out_range, *there, memory, Reached())

    async def write(self, group: int, chunk: int, state: Bytes) -> None:
        """Set the state of a chunk."""
        span = self.state(group, chunk)
        there = (span.storage, span.offset)
        await self.workers.submit(Priority.UPDATE, self._device.copy_in, *there, state[: span.nbytes])

    async def load(self, group: int, chunk: int, pack: SlotPack, index: int) -> None:
        """Set the state of a chunk to what is at rest."""
        async with self.memory(group, chunk) as memory:
            await pack.read(index, memory, Priority.DEMAND)
            await self.write(group, chunk, memory)

    async def save(self, group: int, chunk: int, pack: SlotPack, index: int) -> None:
        """Write the state of a chunk, for a commit."""
        async with self.memory(group, chunk) as memory:
            await self.read(group, chunk, memory)
            await pack.write(index, memory, Priority.COMMIT)
