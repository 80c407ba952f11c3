"""Copies on the compute device: those in use, those of entries at home there, and idle ones that make room.

Scope: the GPU tier's budget; which copies stay, which are dropped, which wait for room.
Not here: how bytes get there (`routes.py`) and why (`entries.py`).
Owner: the loop thread.

[Note: promised room] A copy is pinned while somebody has acquired it or its entry is at home here. The pinned copies,
including those that still wait for room, never add up to more than the budget: `pin` refuses at once a copy that would
exceed it. All other copies are idle or will be when their load has ended, and idle copies are dropped on demand; a load
that nobody waits for gives up when pinned copies have taken its room. So a pinned copy that waits for room gets it
without the release of another pinned copy, and nothing waits in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Protocol

import torch

from tierstore.config import format_size
from tierstore.device.streams import ComputeDevice, Mark, Reached
from tierstore.errors import BudgetError
from tierstore.io.workers import Priority, WorkerPool
from tierstore.store.budget import ByteBudget
from tierstore.store.extents import ExtentLayout
from tierstore.store.routes import DevicePlace


class _Marks:
    """Several marks as one."""

    def __init__(self, marks: list[Mark]) -> None:
        self._marks = marks

    def synchronize(self) -> None:
        for mark in self._marks:
            mark.synchronize()

    def is_done(self) -> bool:
        return all(mark.is_done() for mark in self._marks)


class Owner(Protocol):
    """The holder of a copy, whose `copy` becomes None when the copy is dropped."""

    copy: DeviceCopy | None


class DeviceCopy:
    """One extent on the device.

    Attributes:
        owner: None once the owner no longer holds this copy; users who have acquired it keep it until they release it.
        users: number of users that have acquired it or wait for it.
        modifiers: number of users that said that they change it.
        loading: the task that loads it, for users to wait on; None if it was not loaded, or the load failed.
    """

    def __init__(self, layout: ExtentLayout, owner: Owner) -> None:
        self.layout = layout
        self.nbytes = layout.nbytes
        self.owner: Owner | None = owner
        self.users = 0
        self.modifiers = 0
        self.is_home = False
        self.is_ready = False
        self.loading: asyncio.Task[None] | None = None
        self.storage: torch.UntypedStorage | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._marks: list[Mark] = []
        self._versions: list[int] = []

    @property
    def is_pinned(self) -> bool:
        return self.is_home or self.users > 0

    @property
    def has_changed(self) -> bool:
        """Whether a tensor was changed in place since `remember`, as far as version counters tell."""
        return self._versions != [tensor._version for tensor in self.tensors.values()]

    def remember(self) -> None:
        """Make `has_changed` count changes from here on."""
        self._versions = [tensor._version for tensor in self.tensors.values()]

    def used_until(self, mark: Mark) -> None:
        """Note that a user's device work on the tensors ends at `mark`."""
        self._marks = [*self.pending(), mark]

    def pending(self) -> list[Mark]:
        """Marks that are not reached yet."""
        return [mark for mark in self._marks if not mark.is_done()]


class DeviceTier:
    """The copies on the compute device, under one budget.

    Args:
        spawn: starts a task that the store owns.
    """

    def __init__(
        self,
        device: ComputeDevice,
        capacity_bytes: int,
        workers: WorkerPool,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.device = device
        self.budget = ByteBudget(capacity_bytes)
        self._workers = workers
        self._spawn = spawn
        self._firm: set[DeviceCopy] = set()  # pinned, or being filled: cannot be dropped now
        self._idle: dict[DeviceCopy, None] = {}  # least recently used first
        self._dropping_bytes = 0
        self._changed = asyncio.Event()

    def pin(self, copy: DeviceCopy, name: str) -> None:
        """Add a user. See [Note: promised room].

        Raises:
            BudgetError: with the smallest budget that fits; nothing was changed.
        """
        if not copy.is_pinned:
            pinned_bytes = sum(other.nbytes for other in self._firm if other.is_pinned)
            if pinned_bytes + copy.nbytes > self.budget.capacity_bytes:
                raise BudgetError(
                    f"gpu_memory: {name!r} takes {format_size(copy.nbytes)}, and {format_size(pinned_bytes)} of "
                    f"{format_size(self.budget.capacity_bytes)} are in use: acquired, or placed on the GPU tier; "
                    f"the smallest gpu_memory that fits is {pinned_bytes + copy.nbytes} B"
                )
        copy.users += 1
        self._idle.pop(copy, None)
        self._firm.add(copy)
        self._notify()  # a load that nobody waits for may have to give up

    def used(self, copy: DeviceCopy) -> None:
        """Note that a user works on the tensors in the current stream, and will do so on tensors that it keeps."""
        copy.used_until(self.device.record())
        if copy.storage is not None:
            self.device.record_stream(copy.storage)

    def unpin(self, copy: DeviceCopy) -> None:
        """Remove a user; a copy that nobody uses or owns is dropped."""
        copy.users -= 1
        self.settle(copy)

    def settle(self, copy: DeviceCopy) -> None:
        """Make a copy idle, or drop it, if nothing holds it any more."""
        if copy.is_pinned or copy not in self._firm or (copy.loading is not None and not copy.is_ready):
            return
        self._firm.discard(copy)
        if copy.owner is None or not copy.is_ready:
            self._drop(copy)
        else:
            self._idle[copy] = None
            self._notify()

    def touch(self, copy: DeviceCopy) -> None:
        """Make an idle copy the last one to be dropped, without acquiring it."""
        if copy in self._idle:
            del self._idle[copy]
            self._idle[copy] = None

    def admit(self, copy: DeviceCopy, keep: Collection[DeviceCopy]) -> bool:
        """Accept a copy that nobody has acquired, if dropping idle copies other than `keep` can make room for it."""
        if not self._fits(copy, self._firm.union(keep)):
            return False
        self._firm.add(copy)
        return True

    def _fits(self, copy: DeviceCopy, others: Iterable[DeviceCopy]) -> bool:
        return copy.nbytes + sum(other.nbytes for other in others if other is not copy) <= self.budget.capacity_bytes

    def disown(self, copy: DeviceCopy) -> None:
        """Detach a copy from its owner; it is dropped when its last user releases it."""
        if copy.owner is not None:
            copy.owner.copy = None
            copy.owner = None
        copy.is_home = False
        if copy in self._idle:
            self._drop(copy)
        else:
            self.settle(copy)

    async def make_room(self, copy: DeviceCopy) -> DevicePlace | None:
        """Allocate a firm copy, dropping idle ones as needed; None if there is no room and nobody waits for the copy.

        Blocks: on loads that nobody waits for, and on the device work of the users of copies that are dropped.
        """
        budget = self.budget
        while budget.used_bytes + copy.nbytes > budget.capacity_bytes:
            if not copy.is_pinned and not self._fits(copy, self._firm):
                return None
            is_enough = budget.used_bytes - self._dropping_bytes + copy.nbytes <= budget.capacity_bytes
            if self._idle and not is_enough:
                self._drop(next(iter(self._idle)))
            else:
                await self._changed.wait()
        await budget.take(copy.nbytes)  # there is room: this does not wait
        copy.storage = torch.empty(0, dtype=torch.uint8, device=self.device.torch_device).untyped_storage()
        self.device.allocate(copy.storage, copy.nbytes)
        return DevicePlace(self.device, copy.storage, Reached())  # nobody uses it yet: a load waits for no kernel

    def place(self, copy: DeviceCopy) -> DevicePlace:
        """The copy as a place to read from or to write to, after all work that the current stream has now."""
        if copy.storage is None:
            raise RuntimeError("the copy is not on the device")
        return DevicePlace(self.device, copy.storage, _Marks([*copy.pending(), self.device.record()]))

    def filled(self, copy: DeviceCopy) -> None:
        """The bytes of a copy are on the device: make it ready."""
        if copy.storage is None:
            raise RuntimeError("the copy is not on the device")
        copy.tensors = copy.layout.views(copy.storage)
        copy.is_ready = True
        copy.remember()

    def failed(self, copy: DeviceCopy) -> None:
        """The load of a copy has failed or given up; those who wait learn of it from the load."""
        copy.loading = None
        self.disown(copy)

    def release(self) -> None:
        """Free the memory of all copies, when no job runs any more; a tensor that somebody kept stays readable."""
        for copy in (*self._firm, *self._idle):
            if copy.storage is not None:
                self._forget(copy)

    def _drop(self, copy: DeviceCopy) -> None:
        self._idle.pop(copy, None)
        if copy.owner is not None:
            copy.owner.copy = None
            copy.owner = None
        if copy.storage is None:
            self._notify()
        elif marks := copy.pending():
            self._dropping_bytes += copy.nbytes
            self._spawn(self._drop_after(copy, marks), "drop")
        else:
            self._forget(copy)

    async def _drop_after(self, copy: DeviceCopy, marks: list[Mark]) -> None:
        try:
            for mark in marks:
                await self._workers.submit(Priority.DEMAND, mark.synchronize)
        finally:
            self._dropping_bytes -= copy.nbytes
            self._forget(copy)

    def _forget(self, copy: DeviceCopy) -> None:
        # The storage is freed with its last reference, not resized to nothing: a tensor that somebody kept past the
        # release stays readable. No mark covers work on such a tensor (see `used`).
        copy.storage, copy.tensors = None, {}
        copy.remember()  # a user who leaves after the store has closed has changed nothing
        self.budget.give(copy.nbytes)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()  # wakes all who wait now
        self._changed.clear()
