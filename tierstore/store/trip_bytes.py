"""Where the bytes of a trip are: weights, state and a spilled gradient, in memory or in its lease.

Scope: reading what is not in memory, the Adam pass over a chunk, and checking the digests that the pass computes.
Not here: when a trip reads, waits and writes (`updates.py`), the memory of leases (`trip_leases.py`).
Owner: the loop thread; `run_adam` runs in a worker.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from tierstore.io.memory import Bytes, Lease
from tierstore.io.workers import Priority
from tierstore.kernels.adam import Digests, update_with_digests
from tierstore.kernels.adam import update as adam_update
from tierstore.kernels.elements import Array, elements_of
from tierstore.plan.placement import Placement
from tierstore.store.layout import ChunkIndex, GroupSpec
from tierstore.store.on_gpu import StateOnGpu
from tierstore.store.rounds import ParameterUpdate, Trip
from tierstore.store.slots import SlotPack
from tierstore.store.weights import Weights


class TripBytes:
    """The bytes of trips.

    Args:
        resident_state: leases of the state chunks that live in CPU memory, by (group, chunk).
    """

    def __init__(
        self,
        placement: Placement,
        weights: Weights,
        packs: tuple[SlotPack, SlotPack] | None,
        resident_state: Mapping[tuple[int, int], Lease],
        on_gpu: StateOnGpu,
        index: ChunkIndex,
    ) -> None:
        self._placement = placement
        self._weights = weights
        self._packs = packs
        self._resident_state = resident_state
        self._on_gpu = on_gpu
        self._index = index

    def reads(self, trip: Trip, with_weights: bool, priority: Priority) -> Iterator[Coroutine[Any, Any, None]]:
        """Reads of what is not in memory of a chunk: state and weights."""
        if self._packs is None:
            return
        if trip.is_redo or not self.is_state_in_memory(trip):
            yield self._read(trip, self._packs, 1, priority)
        if trip.is_redo or (with_weights and self._weights.is_home_nvme(trip.group)):
            yield self._read(trip, self._packs, 0, priority)

    async def _read(self, trip: Trip, packs: tuple[SlotPack, SlotPack], part: int, priority: Priority) -> None:
        """Read weights (0) or state (1). The Adam pass verifies them, if it sees them as they are stored."""
        is_checked = await packs[part].read(  # if either pack is coded, the pass makes no digests
            self._index(*trip.key), self.parts(trip)[part], priority,
            record=trip.before[part] if trip.is_redo else None, checks=trip.is_redo or _is_any_coded(packs),
        )  # fmt: skip
        trip.unchecked[part] = not is_checked

    def resident_state(self, group: int, chunk: int) -> Bytes | None:
        """The chunk's state in CPU memory, if it lives there."""
        lease = self._resident_state.get((group, chunk))
        return lease.array if lease is not None else None

    def parts(self, trip: Trip) -> tuple[Bytes, Bytes, Bytes]:
        """Where the weights, the state and a spilled gradient of a trip are: resident, or parts of its lease."""
        group, chunk = trip.key
        rest = trip.lease.array if trip.lease is not None else None
        parts: list[Bytes] = []
        for resident, nbytes in (
            (self._weights.resident(group, chunk), self._placement.weight_bytes(group, chunk)),
            (self.resident_state(group, chunk), self._placement.state_bytes(group, chunk)),
        ):
            if resident is not None:
                parts.append(resident)
            elif rest is not None:
                parts.append(rest[:nbytes])
                rest = rest[nbytes:]
        if len(parts) < 2:
            raise RuntimeError(f"trip {trip.key} has no memory")
        return parts[0], parts[1], rest if rest is not None else parts[0][:0]

    def stored(self, trip: Trip) -> tuple[Bytes, Bytes] | None:
        """The weights and the state of a trip as they are stored; None if they are not stored as they are in memory."""
        if self._packs is None or _is_any_coded(self._packs):
            return None
        (weights, state, _), index = self.parts(trip), self._index(*trip.key)
        return weights[: self._packs[0].padded_bytes(index)], state[: self._packs[1].padded_bytes(index)]

    def check(self, trip: Trip, found: Digests) -> None:
        """Verify what was updated in place. A damaged chunk goes no further (see [Note: chain] in `updates.py`).

        Raises:
            ChecksumMismatch: names the damaged chunk.
        """
        for pack, record, digest in zip(self._packs or (), trip.before, found):
            if record is not None and digest is not None:
                pack.check_digest(self._index(*trip.key), record, digest)

    def is_state_in_memory(self, trip: Trip) -> bool:
        return trip.key in self._resident_state or trip.group in self._on_gpu


def _is_any_coded(packs: tuple[SlotPack, SlotPack]) -> bool:
    return any(pack.is_coded for pack in packs)


def run_adam(
    spec: GroupSpec,
    weights: Bytes,
    state: Bytes,
    gradient: Array,
    updates: list[ParameterUpdate],
    copy: Bytes | None,
    stored: tuple[Bytes, Bytes] | None,
    asks_before: Sequence[bool],
) -> tuple[Digests, Digests]:
    """Update in place. Returns the digests of `stored`, if given: before the update where asked for, and after it.

    Args:
        weights, copy: without padding. `copy` gets the new weights too; None unless all of them are updated.
        asks_before: of weights and of state, whether the digest before the update is wanted.
    """
    count = len(weights) // spec.item_bytes
    flat = elements_of(weights, spec.dtype, count)
    other = elements_of(copy, spec.dtype, count) if copy is not None else None
    exact = state[: count * spec.need().state_bytes]
    if stored is not None:
        return update_with_digests(spec.dtype, flat, exact, gradient, updates, other, stored, asks_before)
    for update in updates:
        adam_update(spec.dtype, flat, exact, gradient, *update, other)
    return (None, None), (None, None)
