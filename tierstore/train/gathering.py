"""Completing groups on the device: the parts of all ranks, gathered in one order at every rank.

Scope: the order of all-gathers, one at a time.
Not here: this rank's part (`store/weights.py`), when a group is wanted (`access.py`).
Owner: the loop thread; a thread of its own launches and waits.

[Note: the order of gathers] A collective pairs with the one that other ranks launch at the same place in their order.
So a group gets its turn when the training side asks for it: that order is the same at every rank, while parts arrive in
any order. What the training side decides must not depend on timing either: see `DeviceAccess`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass

import torch

from tierstore.device.spans import TORCH_DTYPES
from tierstore.device.streams import ComputeDevice
from tierstore.errors import GraphError
from tierstore.io.meter import LinkMeter
from tierstore.io.workers import Priority, WorkerPool
from tierstore.trace import Tracer
from tierstore.train.groups import Group
from tierstore.train.partition import Partition
from tierstore.train.ranks import Ranks, all_gather_flat

_LET_GO_S = 1.0


@dataclass(slots=True)
class Turn:
    """A place in the order: this gather may be launched once the one before it has been."""

    before: asyncio.Future[None] | None
    launched: asyncio.Future[None]


class Gathers:
    """Makes groups whole on the device."""

    def __init__(self, partition: Partition, device: ComputeDevice, meter: LinkMeter, tracer: Tracer) -> None:
        self._partition = partition
        self._device = device
        self._tracer = tracer
        self._meter = meter
        self._last: asyncio.Future[None] | None = None
        self._thread = WorkerPool("tierstore-gather", 1)

    def close(self, timeout_s: float) -> None:
        """End the thread."""
        self._thread.close(timeout_s)

    def turn(self) -> Turn:
        """The next place in the order. See [Note: the order of gathers]."""
        turn = Turn(self._last, asyncio.get_running_loop().create_future())
        self._last = turn.launched
        return turn

    async def complete(self, group: Group, turn: Turn, own_part: Awaitable[None]) -> None:
        """Wait for this rank's part, and gather the other parts when it is the group's turn.

        Raises:
            RankLost: another rank did not take part; no later group can be completed any more.
        """
        try:
            await own_part
            if turn.before is not None:
                await asyncio.shield(turn.before)
            job = self._thread.submit(Priority.DEMAND, self._gather, group)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                turn.launched.cancel()
            else:
                turn.launched.set_exception(error)
                turn.launched.exception()  # retrieved: this task raises it, too
            raise
        turn.launched.set_result(None)
        part_bytes = group.spec.device_bytes // self._partition.count
        self._meter.begin()
        try:
            with self._tracer.measure("gather", group.spec.name):
                await job
        finally:
            self._meter.end(group.spec.device_bytes - part_bytes)

    def _gather(self, group: Group) -> None:
        was_viewed = group.is_viewed()
        self._all_gather(group)
        deadline = time.monotonic() + _LET_GO_S
        # The process group's threads let go of their views a little later. Until then the group would seem to be in use
        # at this rank and not at others, and would stay here while they evict it.
        while group.is_viewed() and not was_viewed and time.monotonic() < deadline:
            time.sleep(0)

    def _all_gather(self, group: Group) -> None:
        partition, ranks = self._partition, self._partition.ranks
        if ranks is None:
            return
        part = group.spec.device_elements // partition.count
        self._check_order(group, ranks)
        with ranks.waiting(f"the weights of {group.spec.name}"):
            # An alias, with a version counter of its own: for autograd nothing has changed.
            flat = torch.empty(0, dtype=TORCH_DTYPES[group.spec.dtype], device=group.storage.device)
            flat.set_(group.storage, 0, (group.spec.device_elements,), (1,))
            own = flat[partition.rank * part : (partition.rank + 1) * part]
            self._device.complete("gather", lambda: all_gather_flat(flat, own, partition.gathers), ranks.wait_s)

    def _check_order(self, group: Group, ranks: Ranks) -> None:
        """Refuse ranks that want different groups: weights would be mixed up, or gloo would end the process.

        Raises:
            GraphError: at all ranks.
        """
        partition = self._partition
        found = torch.empty(partition.count, dtype=torch.int64, device="cpu")
        with ranks.waiting(f"the weights of {group.spec.name}"):
            all_gather_flat(found, torch.tensor([group.index], device="cpu"), partition.turns)
        for rank, index in zip(partition.shards, found.tolist()):
            if index != group.index:
                told = (
                    f"rank {ranks.rank} wants the weights of {group.spec.name} (group {group.index}) and rank {rank} "
                    f"those of group {index}: all ranks must ask for the same ones in the same order"
                )
                if partition.stage == 3:
                    told += "; use zero=2, or call a block that has nothing to do with an empty input"
                raise GraphError(told)
