"""The memory of gradients: places, a pool to pass through, and staging on the way to NVMe.

Scope: which memory a chunk's gradient gets, and which gradients wait for memory.
Not here: gradients on their way, and their use (`gradients.py`); updates in free places (`trip_leases.py`).
Owner: the loop thread.

[Note: places] A gradient that stays in CPU memory until its step is over has a place of its own. The places lie in the
order in which backward completed the groups before the last step that lent places; at first, in the reverse order of
the groups. So updates that read ahead can have the places of gradients that come after their own (`trip_leases.py`),
and within a step it never matters in which order gradients come or go.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tierstore.config import Tier
from tierstore.io.memory import Lease, Pool
from tierstore.plan.placement import Placement

_Key = tuple[int, int]


class GradientMemory:
    """Leases for the chunks of one step's gradients, by (group, chunk).

    Args:
        pool: for chunks that stay in CPU memory, or pass through it.
        staging: for chunks on their way to NVMe, also when gradients are added to them, and for reading them.
        copy: the index of these gradients among the sets of gradients that share the pool.
    """

    def __init__(self, placement: Placement, pool: Pool, staging: Pool, copy: int) -> None:
        self.staging = staging
        self._placement = placement
        self._pool = pool
        self._copy = copy
        self._order = list(reversed(range(len(placement.groups))))
        self._places = self._make_places()
        self._short: set[_Key] = set()
        self.on_short: Callable[[], None] = lambda: None
        """Called when a gradient has begun to wait for memory."""

    def _make_places(self) -> dict[_Key, int]:
        """See [Note: places]; none where gradients pass through the pool."""
        if self._placement.streams_gradients:
            return {}
        groups = [group for group in self._order if self._placement.gradient_home[group] is Tier.CPU]
        keys = [(group, chunk) for group in groups for chunk in reversed(range(self._placement.chunk_count(group)))]
        *starts, total = itertools.accumulate((self._placement.gradient_bytes(*key) for key in keys), initial=0)
        return {key: self._copy * total + start for key, start in zip(keys, starts)}

    def arrange(self, order: Sequence[int]) -> None:
        """Lay the places out in the order in which a step's gradients will come, before the first of them does.

        A gradient of the step before may still be in its old place: its update is decided, and waits for nothing of
        this step.
        """
        order = list(dict.fromkeys([*order, *self._order]))
        if order != self._order:
            self._order = order
            self._places = self._make_places()

    def end_of_places(self, group: int) -> int:
        """Where the places of a group in the pool end, in bytes; 0 if it has none."""
        first = (group, 0)
        return self._places[first] + self._placement.gradient_bytes(*first) if first in self._places else 0

    def reserve_now(self, key: _Key) -> Lease | None:
        """Memory for a gradient that is not written to NVMe: its place, or some to pass through; None: not free now."""
        nbytes, place = self._placement.gradient_bytes(*key), self._places.get(key)
        return self._pool.try_reserve(nbytes) if place is None else self._pool.try_reserve_at(place, nbytes)

    async def reserve(self, key: _Key) -> Lease:
        """As `reserve_now`, but waits until the memory is free."""
        if (lease := self.reserve_now(key)) is not None:
            return lease
        nbytes, place = self._placement.gradient_bytes(*key), self._places.get(key)
        memory = self._pool.reserve(nbytes) if place is None else self._pool.reserve_at(place, nbytes)
        return await self._granted(key, memory)

    async def reserve_staging(self, key: _Key, nbytes: int) -> Lease:
        """Memory for a gradient on its way to NVMe."""
        return await self._granted(key, self.staging.reserve(nbytes))

    async def _granted(self, key: _Key, memory: Coroutine[Any, Any, Lease]) -> Lease:
        """Wait for memory; meanwhile the gradient counts as short of it."""
        self._short.add(key)
        asyncio.get_running_loop().call_soon(self._tell_if_short)
        try:
            return await memory
        finally:
            self._short.discard(key)

    def _tell_if_short(self) -> None:
        # Called soon and not at once: only then has the request been granted or begun to wait.
        if self.is_short:
            self.on_short()

    @property
    def is_short(self) -> bool:
        """Whether gradients wait for memory."""
        return bool(self._short)

    def is_short_of(self, group: int, chunk: int) -> bool:
        """Whether the gradient of this chunk waits for memory."""
        return (group, chunk) in self._short
