"""The store on paper: every chunk's way through reads, gradients, the update and writes.

Scope: what `store/updates.py`, `store/gradients.py` and `store/weights.py` do, as processes on a computed clock.
Not here: the training thread (`plan/step_model.py`), rates (`plan/step_machine.py`).
Owner: one run of the step model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierstore.config import Tier
from tierstore.plan.events import Clock, Memory, Process, Shared, Signal
from tierstore.plan.placement import Placement
from tierstore.plan.step_machine import Machine

DEMAND, UPDATE, WRITE, PREFETCH, COMMIT = range(5)  # as io/workers.Priority; no commit is hurried here
_SAME_THREAD = -1  # the thread goes on with the job that it has begun
Key = tuple[int, int]


@dataclass(slots=True, eq=False)
class Trip:
    """One chunk in one round.

    Attributes:
        delivered: its update put the new weights on the device.
        has_places: its memory is that of gradients that come later.
        awaits: it lacks only its gradient, which then stays in memory for it (`staged`).
    """

    key: Key
    arrived: Signal = field(default_factory=Signal)
    applied: Signal = field(default_factory=Signal)
    ended: Signal = field(default_factory=Signal)
    delivered: bool = False
    has_places: bool = False
    awaits: bool = False
    staged: bool = False


@dataclass(slots=True, eq=False)
class Round:
    """The update of one step (`store/rounds.py`).

    Attributes:
        later_bytes: by group, bytes of the gradients' pool that its trips may use.
        kept_bytes: of gradients that were applied and are kept; None if none are kept.
    """

    order: Sequence[int]
    reads_weights: bool
    is_lazy: bool
    barrier: Signal
    trips: dict[Key, Trip] = field(default_factory=dict)
    gates: dict[int, Signal] = field(default_factory=dict)
    decided: set[int] = field(default_factory=set)
    allowed: int = 0
    later_bytes: dict[int, int] = field(default_factory=dict)
    kept_bytes: int | None = None


class Store:
    """The tiers below the device, and the device copies of the groups.

    Attributes:
        commit: the last commit that was begun; set when it is published.
    """

    def __init__(self, clock: Clock, placement: Placement, machine: Machine) -> None:
        self.clock, self.placement, self.machine = clock, placement, machine
        lanes = {"main": 1, "update": machine.update_threads, "io": machine.io_threads, "sync": 1}
        self.work = Shared(clock, lanes, machine.speeds)
        pools = placement.pools
        self._update, self._weights = Memory(clock, pools.update), Memory(clock, pools.weights)
        self._gradients, self._spill = Memory(clock, pools.gradients), Memory(clock, pools.spill)
        self.device = Memory(clock, placement.gpu_weight_bytes)
        self.commit = Signal()
        clock.set(self.commit)
        self._lent_bytes = 0
        self._synced_bytes = 0.0
        self._rounds: list[Round] = []
        self._chain: dict[Key, Signal] = {}
        self._resident_writes: dict[Key, Signal] = {}
        self._pending: dict[Key, Trip] = {}
        self._allocated: set[int] = set()
        self._announced: dict[int, Signal] = {}

    @property
    def cpu_peak_bytes(self) -> int:
        pools = (self._update, self._weights, self._gradients, self._spill)
        pools_bytes = sum(pool.peak_bytes for pool in pools)
        return self.placement.pools.resident + self.placement.pools.device + pools_bytes

    def keys(self, group: int) -> list[Key]:
        return [(group, chunk) for chunk in range(self.placement.chunk_count(group))]

    def _is_state_in_memory(self, key: Key) -> bool:
        return self.placement.is_state_resident(*key) or self.placement.is_updated_on_gpu(key[0])

    def _is_on_disk(self, group: int) -> bool:
        return self.placement.weights_home[group] is Tier.NVME

    def _io(self, verb: str, nbytes: int, priority: int, *, is_checked: bool = True) -> Signal:
        """Moves one chunk from or to the disks; reads are checked, except those that Adam checks in its own pass."""
        moved = self.work.submit("io", verb, nbytes, priority)
        if verb != "read" or not nbytes or not is_checked or self.machine.table.checksum_bytes_per_s is None:
            return moved
        return self.clock.spawn(self._verified(moved, nbytes))

    def _verified(self, moved: Signal, nbytes: int) -> Process:
        yield moved
        yield self.work.submit("io", "checksum", nbytes, _SAME_THREAD)

    # --- rounds ---------------------------------------------------------------------------------------------------

    def begin(self, order: Sequence[int], *, reads_weights: bool, is_lazy: bool, keeps_gradients: bool) -> Round:
        """Begins the update of a step: its trips begin to read ahead."""
        round_ = Round(order, reads_weights, is_lazy, self.commit, gates={group: Signal() for group in order})
        round_.allowed = 0 if is_lazy else len(order)
        if keeps_gradients:
            round_.kept_bytes, round_.later_bytes = 0, self._later_bytes(order)
        for key in (key for group in order for key in self.keys(group)):
            trip = round_.trips[key] = Trip(key)
            self.clock.spawn(self._travel(round_, trip, self._chain.get(key), self._resident_writes.get(key)))
            self._chain[key] = trip.ended
        self._rounds = [*self._rounds[-1:], round_]
        return round_

    def _later_bytes(self, order: Sequence[int]) -> dict[int, int]:
        later_bytes, total = {}, 0
        for group in reversed(order):
            later_bytes[group] = total
            if not self.is_spilled(group) and not self.placement.is_updated_on_gpu(group):
                total += sum(self.placement.gradient_bytes(*key) for key in self.keys(group))
        return later_bytes

    def approve(self, round_: Round) -> None:
        """The step is over: kept gradients may be freed."""
        if round_.later_bytes:  # all of their memory is free until the next backward
            round_.later_bytes = dict.fromkeys(round_.order, self.placement.pools.gradients)
        self._gradients.free(round_.kept_bytes or 0)
        round_.kept_bytes = None
        self._update.look_again()

    def decide(self, round_: Round, groups: Iterable[int]) -> None:
        """The updates of these groups are decided."""
        for group in groups:
            if group in round_.gates and group not in round_.decided:
                round_.decided.add(group)
                self._pending.update({key: round_.trips[key] for key in self.keys(group)})
        self._open(round_)

    def rearrange(self, round_: Round, order: Sequence[int]) -> None:
        """Trips that wait for memory get it in this order of their groups."""
        ranks = {group: rank for rank, group in enumerate(order)}
        self._update.rearrange({trip: ranks[group] for (group, _), trip in round_.trips.items() if group in ranks})

    def allow_through(self, group: int | None = None) -> None:
        """This group (None: all of them) is needed: decided updates up to it may run."""
        for round_ in self._rounds:
            if len(round_.decided) == len(round_.order):
                rank = len(round_.order) if group is None else 1 + list(round_.order).index(group)
                round_.allowed = max(round_.allowed, rank)
                self._open(round_)

    def _open(self, round_: Round) -> None:
        eager = filter(self.placement.is_updated_on_gpu, round_.order)
        for group in (*round_.order[: round_.allowed], *eager):
            if group in round_.decided:
                self.clock.set(round_.gates[group])

    def _travel(self, round_: Round, trip: Trip, previous: Signal | None, write: Signal | None) -> Process:
        group, chunk = trip.key
        placement, lease_bytes = self.placement, self.placement.trip_bytes(*trip.key)
        yield self._update.reserve(lease_bytes, partial(self._take_places, round_, trip, lease_bytes), trip)
        if previous is not None:
            yield previous
        state_bytes = 0 if self._is_state_in_memory(trip.key) else placement.state_bytes(group, chunk)
        weight_bytes = placement.weight_bytes(group, chunk) if self._is_on_disk(group) else 0
        read_bytes = (state_bytes, weight_bytes if round_.reads_weights else 0)
        priority = UPDATE if round_.gates[group].is_set and trip.arrived.is_set else PREFETCH
        yield from [self._io("read", nbytes, priority, is_checked=False) for nbytes in read_bytes]
        if write is not None:
            yield write
        yield round_.gates[group]
        trip.awaits = not trip.arrived.is_set
        yield trip.arrived
        yield from self._apply(round_, trip)
        if state_bytes or weight_bytes:
            yield round_.barrier
        yield from [self._io("write", nbytes, WRITE) for nbytes in (state_bytes, weight_bytes)]
        if trip.has_places:
            self._lent_bytes -= lease_bytes
            self._gradients.free(lease_bytes)
            self._update.look_again()
        else:
            self._update.free(lease_bytes)
        self.clock.set(trip.ended)

    def _take_places(self, round_: Round, trip: Trip, nbytes: int) -> bool:
        room_bytes = round_.later_bytes.get(trip.key[0], 0) - self._lent_bytes
        trip.has_places = nbytes <= room_bytes and self._gradients.try_reserve(nbytes)
        self._lent_bytes += nbytes * trip.has_places
        return trip.has_places

    def _apply(self, round_: Round, trip: Trip) -> Process:
        group, chunk = trip.key
        gradient_bytes = self.placement.gradient_bytes(group, chunk)
        if self.placement.is_updated_on_gpu(group):  # takes next to no time
            trip.delivered = True
            self.clock.set(trip.applied)
            yield self.work.submit("update", "d2h", gradient_bytes, UPDATE)  # the new weights
            return
        spilled = self.is_spilled(group)
        yield self._io("read", gradient_bytes if spilled and not trip.staged else 0, UPDATE)
        if round_.reads_weights and group in self._announced:
            yield self._announced[group]
        trip.delivered = group in self._allocated
        comes_from_device = not round_.reads_weights and self._is_on_disk(group)
        copied_bytes = gradient_bytes * (trip.delivered + comes_from_device)
        start, stop = self.placement.chunk(group, chunk)
        yield self.work.submit("update", "adam", stop - start, UPDATE)
        yield self.work.submit("update", "d2h", copied_bytes, UPDATE)
        if not spilled and round_.kept_bytes is not None:
            round_.kept_bytes += gradient_bytes
        elif not spilled:
            self._gradients.free(gradient_bytes)
        elif trip.staged:
            self._spill.free(gradient_bytes)
        self.clock.set(trip.applied)

    def applied(self, group: int) -> Process:
        """Wait until the decided update of a group is in its device copy."""
        updates = [self._pending[key].applied for key in self.keys(group) if key in self._pending]
        if not all(update.is_set for update in updates):
            self.allow_through(group)
        yield from updates

    # --- the device -----------------------------------------------------------------------------------------------

    def announce(self, group: int) -> None:
        """A load follows; the group's update waits for its device memory, and puts the new weights there."""
        self._announced[group] = Signal()

    def load(self, group: int, after: Signal | None) -> Process:
        """Bring a group to the device, once the drop before (`after`) is over."""
        if after is not None:
            yield after
        yield self.device.reserve(self.placement.groups[group].device_bytes)
        self._allocated.add(group)
        self.clock.set(self._announced[group])
        yield from [self.clock.spawn(self._load_chunk(key)) for key in self.keys(group)]
        yield from self.applied(group)

    def _load_chunk(self, key: Key) -> Process:
        group, nbytes = key[0], self.placement.weight_bytes(*key)
        trip = self._pending.get(key)
        if trip is not None:
            self.allow_through(group)
            was_applied = trip.applied.is_set
            yield trip.applied
            if trip.delivered and not was_applied:
                return
            if self._is_on_disk(group):
                yield trip.ended
        if self._is_on_disk(group):
            yield self._weights.reserve(nbytes)
            yield self._io("read", nbytes, DEMAND)
        yield self.work.submit("io", "h2d", nbytes, _SAME_THREAD if self._is_on_disk(group) else DEMAND)
        if self._is_on_disk(group):
            self._weights.free(nbytes)

    def drop(self, group: int, after: Signal) -> Process:
        """Free the device copy of a group, unless the update still takes its weights from there."""
        yield after
        for round_ in self._rounds:
            if not round_.reads_weights and group in round_.decided:
                yield from [round_.trips[key].applied for key in self.keys(group)]
        self._allocated.discard(group)
        self.device.free(self.placement.groups[group].device_bytes)

    # --- gradients ------------------------------------------------------------------------------------------------

    def is_spilled(self, group: int) -> bool:
        passes_through = self.placement.streams_gradients and self._rounds and not self._rounds[-1].is_lazy
        return self.placement.gradient_home[group] is Tier.NVME and not passes_through

    def accept(self, round_: Round, group: int, done: Callable[[], None]) -> Process:
        """Take the gradient of a group off the device; `done` is called when it has left."""
        yield from [self.clock.spawn(self._accept_chunk(round_.trips[key])) for key in self.keys(group)]
        done()

    def _accept_chunk(self, trip: Trip) -> Process:
        if self.placement.is_updated_on_gpu(trip.key[0]):
            self.clock.set(trip.arrived)
            return
        nbytes, spilled = self.placement.gradient_bytes(*trip.key), self.is_spilled(trip.key[0])
        yield (self._spill if spilled else self._gradients).reserve(nbytes)
        yield self.work.submit("update", "d2h", nbytes, UPDATE)
        if spilled:
            yield self._io("write", nbytes, WRITE)
            trip.staged = trip.awaits
            if not trip.staged:
                self._spill.free(nbytes)
        self.clock.set(trip.arrived)

    # --- commits --------------------------------------------------------------------------------------------------

    def begin_commit(self, round_: Round) -> None:
        """Publish the state after a round, in the background; chunks that live in CPU memory are written for it."""
        previous, writes = self.commit, []
        for key in round_.trips:
            nbytes = self._resident_bytes(key)
            if nbytes:
                writes.append(self.clock.spawn(self._write_resident(self._chain[key], previous, nbytes)))
                self._resident_writes[key] = writes[-1]
        self.commit = self.clock.spawn(self._publish(round_, previous, writes))

    def _resident_bytes(self, key: Key) -> list[int]:
        state = self.placement.state_bytes(*key) if self._is_state_in_memory(key) else 0
        weights = 0 if self._is_on_disk(key[0]) else self.placement.weight_bytes(*key)
        return [nbytes for nbytes in (state, weights) if nbytes]

    def _write_resident(self, after: Signal, previous: Signal, sizes: Sequence[int]) -> Process:
        yield after
        yield previous
        yield from [self._io("write", nbytes, COMMIT) for nbytes in sizes]

    def _publish(self, round_: Round, previous: Signal, writes: Sequence[Signal]) -> Process:
        yield from [trip.ended for trip in round_.trips.values()]
        yield from writes
        yield previous
        if self.machine.table.caches_writes:
            written_bytes = self.work.amounts["write"]
            # See [Note: syncs] in `plan/bandwidth.py`.
            synced_bytes = min(written_bytes - self._synced_bytes, self.placement.slot_bytes)
            yield self.work.submit("sync", "sync", synced_bytes)
            self._synced_bytes = written_bytes
        yield self.machine.sync_s
