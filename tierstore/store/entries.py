"""One named extent: its home, its copy on the device, and the transfers between them.

Scope: making a home, loading, writing back, moving, saving for a commit, giving everything back.
Not here: names and generations (`tensors.py`), bytes on the way (`routes.py`), room (`copies.py`), files (`shelf.py`).
Owner: the loop that runs the store.

[Note: never in no tier] An entry is complete before a name points to it, and given back after the name points
elsewhere; a move fills the new home before it leaves the old one. So at every moment, and after every failure or
cancellation, each name has one complete home.

[Note: one transfer at a time] A transfer that reads or writes the memory or the files of an entry holds its lock. An
entry that was replaced or deleted gives memory and files back when its last transfer has ended, and its copy on the
device when the last user releases that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierstore.alignment import padded
from tierstore.config import Tier
from tierstore.errors import FormatError
from tierstore.io.memory import Pool
from tierstore.io.tasks import to_the_end
from tierstore.io.workers import Priority
from tierstore.pack.checked import list_of, object_of, text_of
from tierstore.pack.layout import check_plain_name, quoted
from tierstore.store.buffers import BufferPlan
from tierstore.store.copies import DeviceCopy, DeviceTier
from tierstore.store.extents import ExtentLayout
from tierstore.store.manifest import Generation
from tierstore.store.routes import HostPlace, Place, Route, reserve_pieces
from tierstore.store.shelf import PACK, ExtentPack, Shelf

_TIERS = tuple(tier.value for tier in Tier)


@dataclass(eq=False)
class Entry:
    """What a name points to.

    Attributes:
        host: its memory, while the CPU tier is its home.
        pack: its present bytes on disk: its home, or written by a commit; None if there is no such pack.
        copy: its copy on the device: its home, acquired, prefetched or idle.
        jobs: transfers that run or wait for the lock.
        changes: how often its bytes were changed in place, without the lock.
    """

    name: str
    layout: ExtentLayout
    home: Tier
    host: HostPlace | None = None
    pack: ExtentPack | None = None
    copy: DeviceCopy | None = None
    is_retired: bool = False
    jobs: int = 0
    changes: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_saved(self) -> bool:
        """Whether a generation may name its pack: the pack is durable."""
        return self.pack is not None and self.pack.is_synced


def recorded_entries(generation: Generation) -> list[tuple[Entry, str]]:
    """The entries of a generation of named tensors, each with the kind of its pack.

    Raises:
        FormatError: the captured state is no list of entries, or does not fit the records.
    """
    (items,) = object_of(generation.captured, ("entries",), "the captured state")
    found = []
    for item in list_of(items, "the entries"):
        name, tier, pack, tensors = object_of(item, ("name", "tier", "pack", "tensors"), "an entry")
        text_of(name, "the name of an entry")
        layout = ExtentLayout.from_description(tensors, generation.layout["chunk_bytes"])
        for slot in layout.slots:  # as `put` checks them: no name that it accepts is refused here
            check_plain_name(f"{name}/{slot.name}")
        records = generation.records.get(text_of(pack, f"the pack of {quoted(name)}"))
        if records is None or not PACK.fullmatch(pack) or len(records) != -(-layout.nbytes // layout.chunk_bytes):
            raise FormatError(f"the entry {quoted(name)} of {layout.nbytes} B has no pack of its size: {pack[:40]!r}")
        if tier not in _TIERS:
            raise FormatError(f"the entry {quoted(name)} is in the tier {tier!r:.40}; known are {', '.join(_TIERS)}")
        found.append((Entry(name, layout, Tier(tier)), pack))
    names, packs = ({row[0].name for row in found}, {row[1] for row in found})
    if not len(names) == len(packs) == len(found):
        raise FormatError("two entries have one name, or one pack")
    return found


class Spawn(Protocol):
    """Starts a task that the store owns (`LoopOwner.spawn`)."""

    def __call__(self, work: Coroutine[Any, Any, None], name: str, *, is_load: bool = False) -> asyncio.Task[None]: ...


class Homes:
    """Moves the bytes of entries between the tiers. See the notes of this module.

    Args:
        resident: memory of the entries that are at home on the CPU tier.
        keep_failure: called with the error of a load that nobody waits for.
    """

    def __init__(
        self,
        gpu: DeviceTier,
        resident: Pool,
        shelf: Shelf,
        route: Route,
        plan: BufferPlan,
        spawn: Spawn,
        keep_failure: Callable[[BaseException], None],
    ) -> None:
        self.gpu = gpu
        self.resident = resident
        self.shelf = shelf
        self._route = route
        self._plan = plan
        self._spawn = spawn
        self._keep_failure = keep_failure

    # --- beginning and end of an entry --------------------------------------------------------------------------

    async def settle_in(self, entry: Entry, source: Place) -> None:
        """Fill the home of a new entry.

        Raises:
            BudgetError, StorageError: the entry holds nothing, as after a cancellation.
        """
        if entry.home is Tier.CPU:
            entry.host = await self._to_host(entry.layout, source)
        elif entry.home is Tier.NVME:
            entry.pack = await self.shelf.write(entry.name, entry.layout, source, Priority.DEMAND)
        else:
            copy = DeviceCopy(entry.layout, entry)
            self.gpu.pin(copy, entry.name)
            try:
                target = await self.gpu.make_room(copy)
                if target is not None:  # always: the copy is pinned
                    await self._route.copy(entry.layout, source, target, Priority.DEMAND)
                self.gpu.filled(copy)
                entry.copy, copy.is_home = copy, True
            finally:
                self.gpu.unpin(copy)

    def retire(self, entry: Entry) -> None:
        """Give back what the entry holds, as soon as nobody uses it."""
        entry.is_retired = True
        self._reap(entry)

    def _reap(self, entry: Entry) -> None:
        if not entry.is_retired or entry.jobs:
            return
        self._leave_host(entry)
        self._drop_pack(entry)
        if entry.copy is not None:
            self.gpu.disown(entry.copy)

    def _leave_host(self, entry: Entry) -> None:
        if entry.host is not None:
            entry.host.free()
            entry.host = None

    def _drop_pack(self, entry: Entry) -> None:
        if entry.pack is not None:
            self.shelf.discard(entry.pack)
            entry.pack = None

    # --- transfers ----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _exclusive(self, entry: Entry) -> AsyncIterator[None]:
        entry.jobs += 1
        try:
            async with entry.lock:
                yield
        finally:
            self._job_ended(entry)

    def _job_ended(self, entry: Entry) -> None:
        entry.jobs -= 1
        self._reap(entry)

    @contextlib.asynccontextmanager
    async def _source(self, entry: Entry, priority: Priority) -> AsyncIterator[Place]:
        """Where the bytes of an entry are; the caller holds its lock."""
        if entry.home is Tier.NVME and entry.pack is not None:
            async with self.shelf.opened(entry.pack, priority) as place:
                yield place
        elif entry.home is Tier.CPU and entry.host is not None:
            yield entry.host
        elif entry.copy is not None:
            yield self.gpu.place(entry.copy)
        else:
            raise RuntimeError(f"{entry.name!r} is in no tier")

    async def _to_host(self, layout: ExtentLayout, source: Place) -> HostPlace:
        needed_bytes = self.resident.used_bytes + padded(layout.nbytes)
        host = reserve_pieces(self.resident, layout, self._plan.smallest_bytes(needed_bytes))
        try:
            await self._route.copy(layout, source, host, Priority.DEMAND)
        except BaseException:
            host.free()
            raise
        return host

    async def move(self, entry: Entry, tier: Tier) -> bool:
        """Change the home.

        Returns:
            False if the entry was replaced, deleted or changed meanwhile: look up the name and try again.

        Raises:
            BudgetError, StorageError: the entry is where it was, as after a cancellation.
        """
        held = await self.acquire(entry) if tier is Tier.GPU else None
        try:
            async with self._exclusive(entry):
                if entry.is_retired or (held is not None and entry.copy is not held):
                    return False
                if entry.home is tier:
                    return True
                if held is not None:
                    held.is_home = True
                    self._leave_home(entry, tier)
                    return True
                filling = self._fill_host(entry) if tier is Tier.CPU else self._fill_pack(entry, Priority.DEMAND)
                if is_whole := await filling:
                    self._leave_home(entry, tier)
                return is_whole
        finally:
            if held is not None:
                self.gpu.unpin(held)

    def _leave_home(self, entry: Entry, tier: Tier) -> None:
        old, entry.home = entry.home, tier
        if old is Tier.CPU:
            self._leave_host(entry)
        elif old is Tier.GPU and entry.copy is not None:
            entry.copy.is_home = False
            self.gpu.settle(entry.copy)
        # The pack of an entry that was at home on NVMe stays: it is what a commit needs.

    async def save(self, entry: Entry) -> None:
        """Write the bytes of an entry to disk, durably. They may change meanwhile: check `is_saved` afterwards."""
        async with self._exclusive(entry):
            if entry.is_retired:
                return
            await self._fill_pack(entry, Priority.WRITE)
            if entry.pack is not None:
                await self.shelf.sync(entry.pack)

    async def _fill_host(self, entry: Entry) -> bool:
        """Give an entry memory with its bytes; False if they changed meanwhile."""
        changes = entry.changes
        is_whole = False
        try:
            async with self._source(entry, Priority.DEMAND) as source:
                entry.host = await self._to_host(entry.layout, source)
            is_whole = entry.changes == changes
        finally:  # closing the source may fail, or be cancelled, too
            if not is_whole:
                self._leave_host(entry)
        return is_whole

    async def _fill_pack(self, entry: Entry, priority: Priority) -> bool:
        """Give an entry a pack of its bytes, unless it has one; False if they changed meanwhile."""
        if entry.pack is not None and entry.pack.sync_failure is not None and entry.home is not Tier.NVME:
            self._drop_pack(entry)  # its bytes may be lost, but memory has them
        if entry.pack is not None:
            return True
        changes = entry.changes
        async with self._source(entry, priority) as source:
            pack = await self.shelf.write(entry.name, entry.layout, source, priority)
        if entry.changes != changes:
            self.shelf.discard(pack)
            return False
        entry.pack = pack
        return True

    # --- copies on the device -----------------------------------------------------------------------------------

    async def acquire(self, entry: Entry) -> DeviceCopy:
        """The entry's copy, pinned; the caller unpins it.

        Raises:
            BudgetError: what is acquired does not leave room; nothing was changed.
        Cancellation: a load that was begun goes on, as a prefetch.
        """
        copy = entry.copy or DeviceCopy(entry.layout, entry)
        self.gpu.pin(copy, entry.name)
        if entry.copy is None:
            self._start_load(entry, copy, Priority.DEMAND)
        try:
            if copy.loading is not None and not copy.is_ready:
                await asyncio.shield(copy.loading)
        except BaseException:
            self.gpu.unpin(copy)
            raise
        return copy

    def prefetch(self, entries: list[Entry]) -> list[Entry]:
        """Begin loads as far as there is room, and return the entries that are on the device or on their way."""
        accepted = [entry for entry in entries if entry.copy is not None]
        keep = {entry.copy for entry in accepted if entry.copy is not None}
        for copy in keep:
            self.gpu.touch(copy)
        for entry in entries:
            copy = DeviceCopy(entry.layout, entry)
            if entry.copy is None and self.gpu.admit(copy, keep):
                self._start_load(entry, copy, Priority.PREFETCH)
                accepted.append(entry)
        return accepted

    def _start_load(self, entry: Entry, copy: DeviceCopy, priority: Priority) -> None:
        entry.copy = copy
        entry.jobs += 1  # before the task runs: the entry may be retired first
        copy.loading = self._spawn(self._load(entry, copy, priority), f"load {entry.name}", is_load=True)

    async def _load(self, entry: Entry, copy: DeviceCopy, priority: Priority) -> None:
        try:
            async with entry.lock:
                target = await self.gpu.make_room(copy)
                if target is None:
                    self.gpu.failed(copy)
                    return
                async with self._source(entry, priority) as source:
                    await self._route.copy(entry.layout, source, target, priority)
            self.gpu.filled(copy)
        except BaseException as error:
            is_awaited = copy.users > 0
            self.gpu.failed(copy)
            if is_awaited or isinstance(error, asyncio.CancelledError):
                raise
            self._keep_failure(error)
        finally:
            self.gpu.settle(copy)
            self._job_ended(entry)

    def leave(self, entry: Entry, copy: DeviceCopy, *, is_modified: bool) -> None:
        """End a use without saving changes; if the user has changed the tensors, nobody else gets this copy.

        An entry at home on the device has no other bytes, so its changes stay.
        """
        self.gpu.used(copy)
        if is_modified or (copy.modifiers == 0 and copy.has_changed):
            if copy.is_home:
                copy.remember()
                entry.changes += 1
                self._drop_pack(entry)
            else:
                self.gpu.disown(copy)
        self.gpu.unpin(copy)

    async def write_back(self, entry: Entry, copy: DeviceCopy) -> None:
        """End the use of a modifier, and make the tensors as they are now the value of the entry.

        Raises:
            StorageError: the entry is as it was before, and the changes are lost.
        Cancellation: held back until the value is written.
        """
        try:
            await to_the_end(self._write_back(entry, copy))
        except Exception:
            if not copy.is_home:
                self.gpu.disown(copy)
            raise
        finally:
            copy.modifiers -= 1
            self.gpu.unpin(copy)

    async def _write_back(self, entry: Entry, copy: DeviceCopy) -> None:
        async with self._exclusive(entry):
            if entry.is_retired:
                return
            source, other = self.gpu.place(copy), entry.copy if entry.copy is not copy else None
            if entry.home is Tier.NVME:
                pack = await self.shelf.write(entry.name, entry.layout, source, Priority.DEMAND)
                self._drop_pack(entry)
                entry.pack = pack
            else:
                self._drop_pack(entry)
                if entry.home is Tier.CPU and entry.host is not None:
                    await self._route.copy(entry.layout, source, entry.host, Priority.DEMAND)
                elif other is not None:
                    await self._route.copy(entry.layout, source, self.gpu.place(other), Priority.DEMAND)
            if other is None:
                copy.remember()
            elif other.is_home:
                other.remember()
            elif other.is_ready:  # loaded before this; one whose load waits for the lock will get the new bytes
                self.gpu.disown(other)
