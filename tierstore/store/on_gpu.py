"""State and gradients that live on the GPU tier, of the groups that are updated there.

Scope: where state and gradient of a chunk are, the jobs that work on them, copying state to and from staging memory.
Not here: which groups these are (`plan/tiers.py`), when they are updated (`gpu_updates.py`), gradients on their way
    (`gradients.py`).
Owner: the loop thread; workers compute and copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import torch

from tierstore.device.arithmetic import Collection, Update
from tierstore.device.spans import TORCH_DTYPES, Span
from tierstore.device.streams import ComputeDevice, Reached
from tierstore.io.batches import Batches
from tierstore.io.memory import Bytes, Pool
from tierstore.io.workers import Job, Priority, WorkerPool
from tierstore.plan.placement import Placement
from tierstore.store.layout import GroupSpec
from tierstore.store.slots import SlotPack


class StateOnGpu:
    """The device memory of all groups that are updated on the GPU, for as long as the store lives.

    Args:
        staging: CPU memory that state passes on its way to and from disk.
        workers: run all jobs on the device memory.

    Raises:
        BudgetError: the GPU has no room.
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
        self._collections = Batches(workers, Priority.UPDATE, self._collect)
        self._updates = Batches(workers, Priority.UPDATE, self._update)
        self._fetches = Batches(workers, Priority.WRITE, self._fetch)

    def _allocated(self, nbytes: int) -> torch.UntypedStorage:
        storage = torch.empty(0, dtype=torch.uint8, device=self._device.torch_device).untyped_storage()
        if nbytes:
            self._device.allocate(storage, nbytes)
        return storage

    def release(self) -> None:
        """Give the memory back, once nothing uses it any more. Twice is fine."""
        for storage in self._all():
            if storage.nbytes():
                self._device.release(storage, Reached())

    def __contains__(self, group: object) -> bool:
        return group in self._state

    @property
    def nbytes(self) -> int:
        """Bytes that this takes of the GPU tier."""
        return sum(storage.nbytes() for storage in self._all())

    def _all(self) -> list[torch.UntypedStorage]:
        return [*self._state.values(), *self._gradients.values(), self.apart]

    def state(self, group: int, chunk: int) -> Span:
        """The state of a chunk, without padding."""
        return self._span(self._state[group], group, range(chunk, chunk + 1), self._needs[group].state_bytes)

    def gradient(self, group: int, chunk: int, count: int = 1) -> Span:
        """The gradient of `count` neighbouring chunks, the first of them `chunk`, without padding."""
        return self._span(self._gradients[group], group, range(chunk, chunk + count), self._needs[group].weight_bytes)

    def _span(self, storage: torch.UntypedStorage, group: int, chunks: range, element_bytes: int) -> Span:
        start, stop = self._placement.chunk(group, chunks[0])[0], self._placement.chunk(group, chunks[-1])[1]
        return Span(storage, start * element_bytes, (stop - start) * element_bytes)

    def collect(self, collections: Sequence[Collection]) -> Job[None]:
        """Bring gradients to their place. The thread that has copied them then empties their lists of parts."""
        return self._collections.submit(collections)

    def _collect(self, given: Sequence[Sequence[Collection]]) -> None:
        collections = list(itertools.chain.from_iterable(given))
        self._device.arithmetic.collect(collections)
        for one in collections:
            one.parts.clear()

    def update(self, update: Update) -> Job[None]:
        """Update a chunk."""
        return self._updates.submit(update)

    def _update(self, updates: Sequence[Update]) -> None:
        self._device.arithmetic.adam(joined(updates))

    def fetch(self, storage: torch.UntypedStorage, offset: int, into: Bytes) -> Job[None]:
        """Copy weights from the device into CPU memory."""
        return self._fetches.submit((storage, offset, into))

    def _fetch(self, ranges: Sequence[tuple[torch.UntypedStorage, int, Bytes]]) -> None:
        self._device.copy_out_ranges(ranges, Reached())

    def memory(self, group: int, chunk: int) -> AbstractAsyncContextManager[Bytes]:
        """Staging memory for the state of a chunk, with padding; contents undefined."""
        return self._staging.lent(self._placement.state_bytes(group, chunk))

    async def read(self, group: int, chunk: int, into: Bytes) -> None:
        """Copy the state of a chunk into staging memory, with zeros as padding."""
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
        """Set the state of a chunk to what its pack holds."""
        async with self.memory(group, chunk) as memory:
            await pack.read(index, memory, Priority.DEMAND)
            await self.write(group, chunk, memory)

    async def save(self, group: int, chunk: int, pack: SlotPack, index: int) -> None:
        """Write the state of a chunk to its pack, for a commit."""
        async with self.memory(group, chunk) as memory:
            await self.read(group, chunk, memory)
            await pack.write(index, memory, Priority.COMMIT)


def joined(updates: Sequence[Update]) -> list[Update]:
    """Merge each update of whole chunks with the next one, where that continues its memory."""
    found: list[Update] = []
    for update in updates:
        if found and _follows(found[-1], update):
            found.append(_both(found.pop(), update))
        else:
            found.append(update)
    return found


def _follows(first: Update, second: Update) -> bool:
    is_whole = _elements(first) % first.chunk_elements == 0
    return is_whole and all(
        one.storage is other.storage and one.offset + one.nbytes == other.offset
        for one, other in zip(_spans(first), _spans(second))
    )


def _both(first: Update, second: Update) -> Update:
    before, runs = _elements(first), list(first.runs)
    for start, stop, coefficients in second.runs:
        if runs and runs[-1][1] == before + start and runs[-1][2] is coefficients:
            start = runs.pop()[0] - before
        runs.append((before + start, before + stop, coefficients))
    weights, state, gradient = (
        Span(one.storage, one.offset, one.nbytes + other.nbytes)
        for one, other in zip(_spans(first), _spans(second))
    )
    return first._replace(weights=weights, state=state, gradient=gradient, runs=runs)


def _spans(update: Update) -> tuple[Span, Span, Span]:
    return update.weights, update.state, update.gradient


def _elements(update: Update) -> int:
    return update.weights.nbytes // TORCH_DTYPES[update.dtype].itemsize
