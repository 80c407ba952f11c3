"""The weights of every group: at rest in CPU memory or on NVMe, and on the device while they are used.

Scope: loading a group to the device and dropping it, chunk by chunk, under the GPU tier's budget.
Not here: which group to load or drop (`plan/residency.py` decides, `train/access.py` asks), and new weights
    (`updates.py`).
Owner: the loop thread; workers copy.

Invariant: at every moment the weights of a chunk are at rest in CPU memory or on NVMe, or a trip of the update holds
them and settles every load that waits for the trip. What is on the device is a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

import torch

from tierstore.config import Tier
from tierstore.device.streams import ComputeDevice, Mark
from tierstore.io.memory import Bytes, Lease, Pool
from tierstore.io.tasks import together
from tierstore.io.workers import Priority, WorkerPool
from tierstore.plan.placement import Placement
from tierstore.store.budget import ByteBudget
from tierstore.store.layout import ChunkIndex, GroupSpec
from tierstore.store.marks import Marks
from tierstore.store.slots import SlotPack
from tierstore.trace import Tracer

Settle = Callable[[int, int], Awaitable[bool]]


class Weights:
    """Flat device storages of the groups, and how their bytes get there.

    Args:
        pack: the chunks on NVMe; None without a store.
        resident: leases of the chunks that live in CPU memory, by (group, chunk).
        staging: memory that chunks pass on their way from NVMe.

    Attributes:
        storages: one per group, size 0 while it is not on the device.
        settle: waits for a pending update of a chunk; True if the update itself has put the new weights on the device.
        leave_device: waits until no trip needs the device copy of a group.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        budget: ByteBudget,
        pack: SlotPack | None,
        resident: dict[tuple[int, int], Lease],
        staging: Pool,
        workers: WorkerPool,
        device: ComputeDevice,
        marks: Marks,
        tracer: Tracer,
    ) -> None:
        self._groups = groups
        self._placement = placement
        self.storages: Sequence[torch.UntypedStorage] = ()
        self.budget = budget
        self._pack = pack
        self._resident = resident
        self._staging = staging
        self._workers = workers
        self._device = device
        self._marks = marks
        self._tracer = tracer
        self._index = ChunkIndex(groups, placement)
        self._allocated: set[int] = set()
        self._valid: set[int] = set()
        self._dropping: set[int] = set()
        self._announced: dict[int, asyncio.Future[None]] = {}
        self._arriving: dict[tuple[int, int], asyncio.Future[None]] = {}
        # Set by the update pipeline, which is built after this.
        self.settle: Settle
        self.leave_device: Callable[[int], Awaitable[None]]

    def resident(self, group: int, chunk: int) -> Bytes | None:
        """The chunk's weights in CPU memory, if they live there."""
        lease = self._resident.get((group, chunk))
        return lease.array if lease is not None else None

    def is_valid_on_device(self, group: int) -> bool:
        """Whether the device copy of a group is complete."""
        return group in self._valid and group not in self._dropping

    def on_device(self, group: int) -> torch.UntypedStorage | None:
        """The storage of a group that is on the device or on its way there, for reading and writing its chunks."""
        is_there = group in self._allocated and group not in self._dropping
        return self.storages[group] if is_there else None

    def device_offset(self, group: int, chunk: int) -> int:
        """Byte offset of a chunk in its group's storage."""
        spec = self._groups[group]
        return (spec.first + self._placement.chunk(group, chunk)[0]) * spec.item_bytes

    def raw_bytes(self, group: int, chunk: int) -> int:
        """Bytes of a chunk without padding."""
        start, stop = self._placement.chunk(group, chunk)
        return (stop - start) * self._groups[group].item_bytes

    def announce(self, group: int) -> None:
        """A load of this group will follow: updates may wait until the group has its device memory."""
        self._announced[group] = asyncio.get_running_loop().create_future()

    async def announced(self, group: int) -> None:
        """Wait until a group that was announced has its device memory."""
        coming = self._announced.get(group)
        if coming is not None:
            await asyncio.shield(coming)

    async def load(self, group: int, priority: Priority) -> None:
        """Bring a group to the device; it must not be there.

        Blocks: on the GPU tier's budget, on pending updates of the group, and on the disk.
        """
        nbytes = self._groups[group].device_bytes
        try:
            await self.budget.take(nbytes)
            try:
                self._device.allocate(self.storages[group], nbytes)
            except BaseException:
                self.budget.give(nbytes)
                raise
            self._allocated.add(group)
        finally:
            if (coming := self._announced.pop(group, None)) is not None:
                coming.set_result(None)
        with self._tracer.measure("acquire", self._groups[group].name):
            await together(self._load_chunk(group, c, priority) for c in range(self._placement.chunk_count(group)))
        self._valid.add(group)

    async def reload(self, group: int, after: Mark) -> None:
        """Copy the weights at rest to the device again, if the group is there; no update of the group is pending.

        Args:
            after: the device work that may still read what is there.
        """
        if self.on_device(group) is not None:
            await self._marks.reached(after)
            chunks = range(self._placement.chunk_count(group))
            await together(self._load_chunk(group, chunk, Priority.DEMAND) for chunk in chunks)

    async def drop(self, group: int, after: Mark) -> None:
        """Give back the device memory of a group, once the device work before `after` is over."""
        await self.leave_device(group)
        self._dropping.add(group)
        self._valid.discard(group)
        await self._marks.reached(after)
        is_quick = self._is_quick(self._groups[group].device_bytes)
        await self._workers.perform(is_quick, Priority.DEMAND, self._device.release, self.storages[group], after)
        self._allocated.discard(group)
        self._dropping.discard(group)
        self.budget.give(self._groups[group].device_bytes)

    async def _load_chunk(self, group: int, chunk: int, priority: Priority) -> None:
        if await self.settle(group, chunk):
            return
        with self._copying(group, chunk):
            await self._copy_in(group, chunk, priority)

    async def arrived(self, group: int, chunk: int) -> None:
        """Wait until nothing of a chunk is being copied to the device; loads that wait for its update do not count."""
        while (copying := self._arriving.get((group, chunk))) is not None:
            await asyncio.shield(copying)

    @contextlib.contextmanager
    def _copying(self, group: int, chunk: int) -> Iterator[None]:
        """In here a chunk is copied. One copy at a time: a group is loaded once, and reloaded when it is there."""
        ended = self._arriving[group, chunk] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._arriving[group, chunk]
            ended.set_result(None)

    async def _copy_in(self, group: int, chunk: int, priority: Priority) -> None:
        storage, offset = self.storages[group], self.device_offset(group, chunk)
        nbytes, device = self.raw_bytes(group, chunk), self._device
        here = self.resident(group, chunk)
        if here is not None:
            is_quick = self._is_quick(nbytes)
            await self._workers.perform(is_quick, priority, device.copy_in, storage, offset, here[:nbytes])
            return
        pack, index = self._need_pack(), self._index(group, chunk)
        async with self._staging.lent(pack.padded_bytes(index)) as array:

            def fill(read: Callable[[Bytes], None]) -> None:
                read(array)
                device.copy_in(storage, offset, array[:nbytes])

            await pack.read_with(index, priority, fill)

    async def read(self, group: int, chunk: int, into: Bytes) -> None:
        """Read the weights on NVMe into `into` (padded length), for an update; the updates before it have ended."""
        await self._need_pack().read(self._index(group, chunk), into, Priority.UPDATE)

    def _need_pack(self) -> SlotPack:
        if self._pack is None:
            raise RuntimeError("weights were placed on NVMe, but there is no store")
        return self._pack

    def _is_quick(self, nbytes: int) -> bool:
        return nbytes <= self._device.at_once_bytes

    def is_home_nvme(self, group: int) -> bool:
        """Whether this group's weights live on NVMe."""
        return self._placement.weights_home[group] is Tier.NVME
