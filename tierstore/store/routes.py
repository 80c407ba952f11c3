"""The places where the bytes of an extent can be, and copying from one to another.

Scope: one transfer between two places, chunk by chunk.
Not here: the layout of an extent (`extents.py`); which place is whose home, and when it is given back (`entries.py`);
    budgets (`copies.py`).
Owner: the loop thread owns places and leases; workers run the jobs of a transfer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from tierstore.alignment import ALIGNMENT, padded
from tierstore.config import format_size
from tierstore.device.streams import ComputeDevice, Mark
from tierstore.device.transfers import flat_bytes
from tierstore.errors import BudgetError
from tierstore.io.memory import Bytes, Lease, Pool
from tierstore.io.tasks import together
from tierstore.io.workers import Priority, WorkerPool
from tierstore.store.extents import Chunk, ExtentLayout
from tierstore.store.slots import SlotPack

_Step = Callable[[Bytes], None]


class Place:
    """Where the bytes of one extent are, or are to be."""

    def borrow(self, chunk: Chunk) -> Bytes | None:
        """The place's own memory for a chunk (padded length), if the chunk lies in one piece of it."""
        return None

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        """Copy the chunk, and zeros as padding, into `buffer` (padded length). Threads: a worker."""
        raise NotImplementedError

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        """Copy the chunk from `buffer` into this place. Threads: a worker."""
        raise NotImplementedError


class PackPlace(Place):
    """A pack, which reads and writes in jobs of its own."""

    def __init__(self, pack: SlotPack) -> None:
        self.pack = pack


class Nowhere(Place):
    """Takes every chunk and keeps none: a copy to here only reads and verifies its source."""

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        pass


class HostPlace(Place):
    """Leases of the arena; usually one per chunk, smaller ones where free memory is in pieces."""

    def __init__(self, leases: list[Lease]) -> None:
        self._leases = leases
        self._starts = [0]
        for lease in leases:
            self._starts.append(self._starts[-1] + len(lease.array))

    def borrow(self, chunk: Chunk) -> Bytes | None:
        index = bisect.bisect_left(self._starts, chunk.start)
        is_whole = self._starts[index] == chunk.start and self._starts[index + 1] >= chunk.start + chunk.padded_bytes
        return self._leases[index].array[: chunk.padded_bytes] if is_whole else None

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        for piece, start in self._pieces(chunk):
            buffer[start : start + len(piece)] = piece

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        for piece, start in self._pieces(chunk):
            piece[:] = buffer[start : start + len(piece)]

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[Bytes, int]]:
        """The pieces of memory that hold a chunk, each with its offset in the chunk."""
        end = chunk.start + chunk.padded_bytes
        for index in range(bisect.bisect_right(self._starts, chunk.start) - 1, len(self._leases)):
            first, last = self._starts[index], self._starts[index + 1]
            if first >= end:
                return
            start = max(first, chunk.start)
            yield self._leases[index].array[start - first : min(last, end) - first], start - chunk.start

    def free(self) -> None:
        """Give the memory back."""
        for lease in self._leases:
            lease.free()
        self._leases = []


class DevicePlace(Place):
    """A storage of the compute device.

    Args:
        after: the work that must be over before the storage is read or written.
    """

    def __init__(self, device: ComputeDevice, storage: torch.UntypedStorage, after: Mark) -> None:
        self._device = device
        self._storage = storage
        self._after = after

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        self._device.copy_out_range(self._storage, chunk.start, buffer[: chunk.nbytes], self._after)
        buffer[chunk.nbytes :] = 0

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        self._after.synchronize()
        self._device.copy_in(self._storage, chunk.start, buffer[: chunk.nbytes])


class TensorsPlace(Place):
    """Tensors that a caller gives; use `flattened` to make one."""

    def __init__(self, device: ComputeDevice, layout: ExtentLayout, flat: dict[str, torch.Tensor], after: Mark) -> None:
        self._device = device
        self._layout = layout
        self._flat = flat
        self._after = after

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        parts, targets, position = [], [], 0
        for slot, start, stop in self._layout.parts(chunk):
            parts.append(self._flat[slot.name][start:stop])
            targets.append(buffer[position : position + stop - start])
            position += stop - start
        self._device.copy_out(parts, targets, self._after)
        buffer[position:] = 0


class Given(NamedTuple):
    """Tensors as a caller gives them, valid once `after` is reached; those on a device are contiguous."""

    tensors: dict[str, torch.Tensor]
    after: Mark


def taken(device: ComputeDevice, tensors: Mapping[str, torch.Tensor]) -> Given:
    """Take tensors of a caller, in the caller's own turn of the loop: in the next one another stream may be current."""
    plain = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    # A kernel launch does not block. A copy in CPU memory does, so it is left to a worker.
    there = {name: tensor if tensor.device.type == "cpu" else tensor.contiguous() for name, tensor in plain.items()}
    return Given(there, device.record())


async def flattened(device: ComputeDevice, layout: ExtentLayout, given: Given, workers: WorkerPool) -> TensorsPlace:
    """Given tensors as a place to read from. One that is not contiguous is copied first, outside all budgets."""
    flat = {}
    for name, tensor in given.tensors.items():
        is_quick = tensor.is_contiguous()
        flat[name] = await workers.perform(is_quick, Priority.DEMAND, flat_bytes, tensor)
    return TensorsPlace(device, layout, flat, given.after)


def reserve_pieces(pool: Pool, layout: ExtentLayout, smallest_bytes: int) -> HostPlace:
    """Memory for an extent: whole chunks while contiguous memory is free for them, then smaller pieces.

    Args:
        smallest_bytes: for the message, the cpu_memory that would be enough.

    Raises:
        BudgetError: not enough is free; nothing was reserved.
    """
    rest, free_bytes = padded(layout.nbytes), pool.capacity_bytes - pool.used_bytes
    if rest > free_bytes:
        raise BudgetError(
            f"cpu_memory: {format_size(rest)} needed, but {format_size(free_bytes)} are free beside the buffers of "
            f"transfers; the smallest cpu_memory that fits is {smallest_bytes} B; or move entries to another tier"
        )
    leases: list[Lease] = []
    size = layout.chunk_bytes
    while rest:
        size = min(size, rest)
        lease = pool.try_reserve(size)
        if lease is None:  # enough is free, so a piece of 4096 B always fits
            size = max(padded(size // 2), ALIGNMENT)
            continue
        leases.append(lease)
        rest -= size
    return HostPlace(leases)


@dataclass(frozen=True)
class Route:
    """What transfers share.

    Attributes:
        staging: memory that chunks pass on their way. `True` is that of prefetch: demand never queues behind it.
    """

    workers: WorkerPool
    staging: Mapping[bool, Pool]

    async def copy(self, layout: ExtentLayout, source: Place, target: Place, priority: Priority) -> None:
        """Copy all chunks of an extent, side by side.

        Cancellation: returns when no worker uses either place any more; the target's contents are then undefined.
        """
        await together(self._copy_chunk(chunk, source, target, priority) for chunk in layout.chunks())

    async def _copy_chunk(self, chunk: Chunk, source: Place, target: Place, priority: Priority) -> None:
        if (own := source.borrow(chunk)) is not None:
            await self._drain(chunk, own, target, priority)
        elif (own := target.borrow(chunk)) is not None:
            await self._fill(chunk, own, source, None, priority)
        else:
            async with self.staging[priority is Priority.PREFETCH].lent(chunk.padded_bytes) as buffer:
                await self._fill(chunk, buffer, source, target, priority)

    async def _fill(self, chunk: Chunk, buffer: Bytes, source: Place, target: Place | None, priority: Priority) -> None:
        """Copy source to buffer, and on to the target if there is one: in the same hop, unless that is a pack."""
        then = None if target is None or isinstance(target, PackPlace) else partial(target.drain, chunk)
        if isinstance(source, PackPlace):
            await source.pack.read_with(chunk.index, priority, lambda read: _in_turn(read, then, buffer))
        else:
            await self.workers.submit(priority, _in_turn, partial(source.fill, chunk), then, buffer)
        if isinstance(target, PackPlace):
            await target.pack.write(chunk.index, buffer, Priority.WRITE)

    async def _drain(self, chunk: Chunk, buffer: Bytes, target: Place, priority: Priority) -> None:
        if isinstance(target, PackPlace):
            await target.pack.write(chunk.index, buffer, Priority.WRITE)
        else:
            await self.workers.submit(priority, target.drain, chunk, buffer)


def _in_turn(first: _Step, then: _Step | None, buffer: Bytes) -> None:
    first(buffer)
    if then is not None:
        then(buffer)
