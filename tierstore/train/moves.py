"""Groups on their way to the device and off it, as the training side has asked.

Scope: one drop, load or refresh of a group after the other, and waiting for them.
Not here: which groups move, and when (`access.py`); the bytes (`store/weights.py`).
Owner: the loop thread. The training side shares `ready` and `without_room`: the loop adds a group when it is whole on
the device, or has found no room; the training side removes one that it drops, asks for, or whose weights change.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.device.streams import Mark
from tierstore.errors import BudgetError
from tierstore.io.runtime import Runtime
from tierstore.io.workers import Priority
from tierstore.store.training import TrainingStore
from tierstore.train.gathering import Gathers
from tierstore.train.groups import Group


@dataclass(slots=True, eq=False)
class Move:
    """Some groups leave the device once the device work before `after` is over; then others come."""

    dropped: Sequence[int]
    after: Mark
    loaded: Sequence[int]
    has_begun: bool = False


class GroupMoves:
    """The moves of all groups.

    Args:
        gathers: completes groups with the parts of other ranks, if there are any.

    Attributes:
        ready: groups that are whole on the device, with the weights that they have now.
        without_room: groups whose last load found no memory on the device, with its error; they are not there.
    """

    def __init__(
        self, groups: Sequence[Group], store: TrainingStore, runtime: Runtime, gathers: Gathers | None
    ) -> None:
        self._groups = groups
        self._store = store
        self._runtime = runtime
        self._gathers = gathers
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._drops: dict[int, asyncio.Task[None]] = {}
        self.ready: set[int] = set()
        self.without_room: dict[int, BudgetError] = {}
        self._changes = [0] * len(groups)
        store.updates.changing.on_spoilt = self.ready.discard

    def change(self, groups: Iterable[int]) -> None:
        """Updates of these groups are pending: loads and refreshes that began before no longer make them ready.

        Threads: the training side's.
        """
        for group in groups:
            self._changes[group] += 1  # before it is taken out: see `complete`
            self.ready.discard(group)

    def start(self, move: Move) -> None:
        """Begin a move, unless it has begun."""
        if move.has_begun:
            return
        move.has_begun = True
        for group in move.dropped:
            work = self._store.weights.drop(group, move.after)
            self._drops[group] = self._runtime.spawn(work, f"drop {self._groups[group].spec.name}")
        for group in move.loaded:
            self._store.weights.announce(group)
            self._make_ready(group, "load", functools.partial(self._load, group))

    def refresh(self, groups: Iterable[int]) -> None:
        """Have groups that are on the device ready again after their updates."""
        for group in groups:
            self._make_ready(group, "refresh", functools.partial(self._refresh, group, self._loads.get(group)))

    def _make_ready(self, group: int, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`work` brings this rank's part to the device; with the parts of the other ranks the group is ready."""
        gathers, index, changes = self._gathers, self._groups[group], self._changes[group]
        turn = gathers.turn() if gathers is not None else None  # now, not when the coroutine begins

        async def complete() -> None:
            if gathers is None or turn is None:
                await work()
            else:
                await gathers.complete(index, turn, work())
            self._store.updates.changing.refuse_spoilt(group)
            if not self._store.weights.is_valid_on_device(group):  # see `without_room`
                return
            self.ready.add(group)
            if self._changes[group] != changes:  # checked last: `change` may be between its two lines
                self.ready.discard(group)

        self._loads[group] = self._runtime.spawn(complete(), f"{what} {index.spec.name}")

    async def _load(self, group: int) -> None:
        if group in self._drops:
            await asyncio.shield(self._drops[group])
        try:
            await self._store.weights.load(group, Priority.DEMAND)
        except BudgetError as error:
            # With other ranks, which may have room, the run is lost; else `access.py` asks again, or raises this.
            if self._gathers is not None or self._store.weights.on_device(group) is not None:
                raise
            self.without_room[group] = error
            return
        await self._store.updates.applied(group)

    async def _refresh(self, group: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.shield(before)
        await self._store.updates.applied(group)
        if self._gathers is not None:
            await self._store.updates.unread(group)

    async def loaded(self, group: int) -> None:
        """Wait until a group that was asked for is ready, or has found no room; raises if its update has failed."""
        await asyncio.shield(self._loads[group])
        self._store.updates.changing.refuse_spoilt(group)

    async def dropped(self) -> None:
        """Wait until every drop that was asked for has ended."""
        drops = [drop for drop in self._drops.values() if not drop.done()]
        if drops:
            await asyncio.wait(drops)
        for drop in drops:
            drop.result()

    async def unviewed(self, groups: Iterable[int]) -> None:
        """Wait until no update needs the device copy of these groups: while updates copy, they hold views."""
        for group in groups:
            await self._store.updates.leave_device(group)
