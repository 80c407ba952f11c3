"""The update of every chunk: state read ahead, one Adam pass, state and weights written behind.

Scope: the trips of all rounds, and how loads wait for them.
Not here: what the coefficients are (`train/optimizer.py`), the memory that trips take (`trip_leases.py`) and where
    each part is (`trip_bytes.py`), when a generation is committed (`commits.py`), the update of what lives on the GPU
    (`gpu_updates.py`).
Owner: the loop thread; workers read, run the kernel and write.

[Note: chain] A chunk is on one trip at a time: a trip reads when that of the step before has ended. Those parts of the
chunk that live in memory, of the CPU or the GPU, may then still be on their way to the disk, for a commit. They change,
and the chunk's gradient is dropped, only when that write has ended. If a trip fails, the next one fails, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from tierstore.device.streams import ComputeDevice, Mark, Reached
from tierstore.io.memory import Bytes, Lease
from tierstore.io.tasks import together
from tierstore.io.workers import Priority, WorkerPool
from tierstore.kernels.adam import Digests
from tierstore.plan.placement import Placement
from tierstore.store.changing import Changing
from tierstore.store.gpu_updates import GpuUpdates
from tierstore.store.layout import ChunkIndex, GroupSpec
from tierstore.store.marks import Marks
from tierstore.store.on_gpu import StateOnGpu
from tierstore.store.rounds import ParameterUpdate, Round, Trip, Updates
from tierstore.store.slots import SlotPack
from tierstore.store.trip_bytes import TripBytes, run_adam
from tierstore.store.trip_leases import TripLeases
from tierstore.store.weights import Weights
from tierstore.trace import Tracer

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
_Before = tuple[asyncio.Task[None] | None, asyncio.Task[None] | None]
"""What a trip follows: the previous trip of its chunk, and the write for a commit that began after that trip."""


class UpdatePipeline:
    """Runs the trips of all rounds.

    Args:
        resident_state: leases of the state chunks that live in CPU memory, by (group, chunk).
        on_gpu: the state that lives on the GPU tier.
        leases: the memory of trips.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        weights: Weights,
        packs: tuple[SlotPack, SlotPack] | None,
        resident_state: Mapping[tuple[int, int], Lease],
        on_gpu: StateOnGpu,
        leases: TripLeases,
        workers: WorkerPool,
        device: ComputeDevice,
        marks: Marks,
        spawn: Spawn,
        tracer: Tracer,
    ) -> None:
        self._groups = groups
        self._placement = placement
        self._weights = weights
        self._packs = packs
        self._on_gpu = on_gpu
        self._leases = leases
        self._workers = workers
        self._device = device
        self._marks = marks
        self._spawn = spawn
        self._index = ChunkIndex(groups, placement)
        self._bytes = TripBytes(placement, weights, packs, resident_state, on_gpu, self._index)
        self._rounds: list[Round] = []
        self._pending: dict[tuple[int, int], Trip] = {}
        self._last_uses: dict[int, tuple[Mark, ...]] = {}
        self.changing = Changing(groups, tracer)
        self._gpu_updates = GpuUpdates(groups, placement, weights, on_gpu, device, marks, self.changing)
        self.chain: dict[tuple[int, int], asyncio.Task[None]] = {}
        """The last trip of each chunk."""
        self.resident_writes: dict[tuple[int, int], asyncio.Task[None]] = {}
        """Of each chunk, the last write for a commit of what lives in memory. It begins after a trip."""
        self.dirty: dict[tuple[int, int], Digests] = {}
        """Chunks with a part that lives in memory and waits to be written, and the digests from their last update."""

    def forget_digests(self, group: int, chunk: int) -> None:
        """The parts of a chunk in CPU memory no longer are, or soon will not be, as its last update left them."""
        if (group, chunk) in self.dirty:
            self.dirty[group, chunk] = (None, None)

    # --- rounds -------------------------------------------------------------------------------------------------

    def begin(self, round_: Round) -> None:
        """Start the trips of a step: they read ahead as far as memory allows, and wait to be decided."""
        round_.gradients.on_change = self._leases.recall
        if round_.borrows:
            round_.lend_places()
        self._rounds = [r for r in self._rounds if any(not t.task.done() for t in r.trips if t.task)] + [round_]
        for group in round_.order:
            for chunk in range(self._placement.chunk_count(group)):
                self._start(round_, Trip(group, chunk))

    def _start(self, round_: Round, trip: Trip) -> None:
        before = (self.chain.get(trip.key), self.resident_writes.get(trip.key))
        name = f"update {self._groups[trip.group].name}/{trip.chunk}"
        trip.task = self._spawn(self._guarded(round_, trip, before), name)
        self.chain[trip.key] = trip.task
        round_.add(trip)

    def decide_group(self, round_: Round, group: int, updates: Sequence[ParameterUpdate], after: Mark) -> None:
        """The gradient of a group is complete and its coefficients are known: update it now.

        Args:
            after: device work before it may still read weights of the group. Waiting for its gradients is not enough:
                a chunk may have got none in the last backward.
        """
        round_.decide_group(group, updates, after)
        self._make_pending(round_, group)
        self._leases.recall()

    def decide(self, round_: Round, updates: Updates) -> None:
        """The coefficients of all groups are known."""
        round_.decide(updates)
        for group in round_.order:
            self._make_pending(round_, group)
        self._leases.rearrange(round_)
        self._leases.recall()

    def allow_through(self, group: int | None = None) -> None:
        """Somebody needs this group (None: all of them): its decided updates may run."""
        for round_ in self._rounds:
            if round_.is_decided:
                round_.allow_through(group)
        self._leases.recall()

    def approve(self, round_: Round) -> None:
        """The speculation was right: drop the gradients that were kept for a redo."""
        round_.keeps_gradients = False
        for key in round_.kept:
            round_.gradients.drop(*key)
        round_.kept.clear()
        self._leases.look_again()

    async def redo(self, round_: Round, updates: Updates) -> Round:
        """The speculation was wrong: do every update of the round again, from the records that its trips began from.

        Args:
            updates: the right ones; empty if the step is skipped.
        Returns:
            The round that replaces this one.
        """
        await self.round_finished(round_)
        again = Round(
            sorted(round_.order), round_.gradients, reads_weights=True, is_lazy=False, keeps_gradients=False,
            barrier=round_.barrier,
        )  # fmt: skip
        again.used = round_.used
        again.decide(updates)
        self._rounds.append(again)
        kept = set(round_.kept)
        for trip in sorted(round_.trips, key=lambda trip: trip.key):
            if trip.key in kept:
                replacement = Trip(trip.group, trip.chunk, before=trip.before, is_redo=True)
                self._start(again, replacement)
                self._pending[trip.key] = replacement
        self._leases.recall()
        return again

    def _make_pending(self, round_: Round, group: int) -> None:
        self._last_uses[group] = round_.last_uses(group)
        for trip in round_.trips_of.get(group, ()):
            self._pending[trip.key] = trip

    # --- what others wait for -----------------------------------------------------------------------------------

    async def settle(self, group: int, chunk: int) -> bool:
        """Wait for the decided update of a chunk. True: its new weights are on the device; False: they are at rest."""
        trip = self._pending.get((group, chunk))
        if trip is None:
            return False
        self.allow_through(group)
        was_applied = trip.applied.done()
        delivered = await asyncio.shield(trip.applied)
        if delivered and not was_applied:
            return True
        is_at_rest_later = self._weights.is_home_nvme(group) or group in self._on_gpu
        if is_at_rest_later and trip.task is not None:
            await asyncio.shield(trip.task)
        if self._pending[group, chunk] is not trip:  # the next step has decided meanwhile
            return await self.settle(group, chunk)
        return False

    async def applied(self, group: int) -> None:
        """Wait until every decided update of a group is in its weights on the device."""
        self.allow_through(group)
        for chunk in range(self._placement.chunk_count(group)):
            trip = self._pending.get((group, chunk))
            if trip is not None:
                await asyncio.shield(trip.applied)

    async def unread(self, group: int) -> None:
        """Wait until nothing on the device reads the weights that a group had before its decided updates.

        The updates themselves wait for that, but all of them may be at other ranks.
        """
        for mark in self._last_uses.get(group, ()):
            await self._marks.reached(mark)

    async def leave_device(self, group: int) -> None:
        """Wait until no trip needs the device copy of a group's weights. If a trip failed, its task raises that."""
        for round_ in self._rounds:
            if not round_.reads_weights and round_.is_open(group):
                self._leases.recall()
                if applied := [trip.applied for trip in round_.trips_of[group]]:  # none if others keep the group
                    await asyncio.wait(applied)
        await self.changing.ended(group)

    async def finished(self) -> None:
        """Wait for every trip of the decided rounds."""
        for round_ in list(self._rounds):
            if round_.is_decided:
                await self.round_finished(round_)

    async def round_finished(self, round_: Round) -> None:
        """Let every trip of a round go, and wait for all."""
        round_.allow_through()
        self._leases.recall()
        await self.round_ended(round_)

    async def round_ended(self, round_: Round) -> None:
        """Wait for every trip of a round; all of them have ended when the first failure is raised."""
        tasks = [trip.task for trip in round_.trips if trip.task]
        if tasks:
            await asyncio.wait(tasks)  # not `gather`, which would cancel them together with the waiter
        for task in tasks:
            task.result()

    # --- one trip -----------------------------------------------------------------------------------------------

    async def _guarded(self, round_: Round, trip: Trip, before: _Before) -> None:
        try:
            await self._travel(round_, trip, before)
        except BaseException as error:
            if not trip.applied.done():
                trip.applied.set_exception(error)
                trip.applied.exception()  # retrieved: the task raises it, too
                if isinstance(error, Exception) and not round_.gradients.is_coming(*trip.key):
                    round_.gradients.drop(*trip.key)  # others may wait for its memory
            raise
        finally:
            self._leases.give_back(trip)

    async def _travel(self, round_: Round, trip: Trip, before: _Before) -> None:
        while not await self._read_ahead(round_, trip, *before):
            round_.gradients.let_go(*trip.key)
            self._leases.give_back(trip)
            await asyncio.sleep(0)  # trips that were granted this memory have their turn first
        updates = round_.updates_of(trip.group, *self._placement.chunk(trip.group, trip.chunk))
        if updates and trip.group in self._on_gpu:  # such a group is never applied before the norm is known
            await self._gpu_updates.apply(round_, trip, updates)
        else:
            if updates or trip.is_redo:
                await self._apply(round_, trip, updates)
            else:
                trip.applied.set_result(False)
            if round_.keeps_gradients and updates:
                round_.kept.append(trip.key)
            elif not round_.is_void:
                round_.gradients.drop(*trip.key)
            round_.gradients.let_go(*trip.key)
        if updates:
            await self._write(round_, trip)
        elif trip.is_redo and self._packs is not None:
            for pack, record in zip(self._packs, trip.before):
                pack.current[self._index(*trip.key)] = record
            self.forget_digests(*trip.key)  # they are those of the wrong update

    async def _read_ahead(
        self, round_: Round, trip: Trip, previous: asyncio.Task[None] | None, write: asyncio.Task[None] | None
    ) -> bool:
        """Reserve, wait for the chunk, read its state, wait for the gate. False: give the memory back, and begin again.

        Args:
            previous, write: see [Note: chain].
        """
        trip.begin()
        group, chunk = trip.key
        nbytes = self._placement.trip_bytes(group, chunk)
        if nbytes and not await self._leases.reserve(round_, trip, nbytes):
            return False
        if previous is not None and not await self._unless_recalled(round_, trip, previous):
            return False
        is_idle = round_.is_decided and not round_.updates_of(group, *self._placement.chunk(group, chunk))
        if not is_idle or trip.is_redo:
            # Reads that an update waits for go before writes, which only give back memory.
            priority = Priority.UPDATE if round_.may_go(trip) else Priority.PREFETCH
            await together(self._bytes.reads(trip, round_.reads_weights, priority))
        if write is not None and not await self._unless_recalled(round_, trip, write):
            return False
        if is_idle and not trip.is_redo:
            return True
        if self._packs is not None and not trip.is_redo:
            index = self._index(*trip.key)
            trip.before = (self._packs[0].current[index], self._packs[1].current[index])
        while (obstacle := round_.obstacle(trip)) is not None:
            if not await self._unless_recalled(round_, trip, obstacle):
                return False
        return trip.lease is None or not self._leases.is_owed(round_)

    async def _unless_recalled(self, round_: Round, trip: Trip, wanted: asyncio.Future[None]) -> bool:
        """Wait for a future that others wait for, too; False if the trip is recalled first.

        A recalled trip that by now needs nothing but time goes on: it gives its memory back sooner that way.

        Raises:
            BaseException: what `wanted` failed with. A chunk goes no further than its first failure, because what came
                after would be the state of no step.
        """
        while not wanted.done():
            if trip.recalled.done():
                if not self._leases.will_go(round_, trip):
                    return False
                trip.begin()
            await asyncio.wait((wanted, trip.recalled), return_when=asyncio.FIRST_COMPLETED)  # cancels neither
        wanted.result()
        return True

    async def _apply(self, round_: Round, trip: Trip, updates: list[ParameterUpdate]) -> None:
        group, chunk = trip.key
        weights, state, spare = self._bytes.parts(trip)
        gradient = await round_.gradients.fetch(group, chunk, spare) if updates else None
        if gradient is not None:
            await round_.gradients.measure(group, chunk, gradient)
        for mark in round_.last_uses(group):
            await self._marks.reached(mark)
        if not any(one.number >= round_.number and not one.reads_weights for one in self._rounds):
            # So that new weights go to a forward that has asked for them. Not if weights come from the device, in this
            # step or the next: the load may then wait for memory of a group whose update waits for this one.
            await self._weights.announced(group)
        await self._weights.arrived(group, chunk)  # a load that began before the decision: its old weights come first
        needs_weights = self._weights.is_home_nvme(group) and not round_.reads_weights
        if needs_weights and not self._weights.is_valid_on_device(group):
            await self._weights.read(group, chunk, weights)
            needs_weights = False
        # No await from here to `changing`: the group must not leave the device in between.
        storage = self._weights.on_device(group)
        raw, offset = self._weights.raw_bytes(group, chunk), self._weights.device_offset(group, chunk)
        spec, device = self._groups[group], self._device
        count, stored = raw // spec.item_bytes, self._bytes.stored(trip)

        def job() -> Digests:
            is_whole = sum(part.stop - part.start for part in updates) == count
            there = device.in_place(storage, offset, raw) if storage is not None and is_whole else None
            here: Bytes = weights[:raw]
            if needs_weights and storage is not None:
                weights[raw:] = 0
                if there is not None:
                    here, there = there, here  # read them on the device, write them in both places
                else:
                    # Backward's own mark was waited for when the gradients were collected.
                    device.copy_out_range(storage, offset, here, Reached())
            left: Digests = (None, None)
            if gradient is not None:
                found, left = run_adam(
                    spec, here, state, gradient, updates, copy=there, stored=stored, asks_before=trip.unchecked
                )
                self._bytes.check(trip, found)
            if there is not None:
                device.counters.add("h2d", raw, device.counters.clock())  # the copy took no time of its own
            elif storage is not None:
                device.copy_in(storage, offset, here)
            return left

        async with self.changing.group(group):
            trip.digests = await self._workers.submit(Priority.UPDATE, job)
        trip.applied.set_result(storage is not None)

    async def _write(self, round_: Round, trip: Trip) -> None:
        """Write what does not live in memory; what does live there is dirty until a commit writes it."""
        index, is_state_resident = self._index(*trip.key), self._bytes.is_state_in_memory(trip)
        is_weights_resident = not self._weights.is_home_nvme(trip.group)
        if is_state_resident or is_weights_resident:
            self.dirty[trip.key] = trip.digests
        if self._packs is None or (is_state_resident and is_weights_resident):
            return
        weights, state, _ = self._bytes.parts(trip)
        if round_.barrier is not None:
            with self._packs[0].hurry():
                await asyncio.shield(round_.barrier)
        writes = []
        if not is_state_resident:
            writes.append(self._packs[1].write(index, state, known=trip.digests[1]))
        if not is_weights_resident:
            writes.append(self._packs[0].write(index, weights, known=trip.digests[0]))
        await together(writes)

    async def write_resident(self, group: int, chunk: int) -> None:
        """Write the parts of a dirty chunk that live in memory, for a commit."""
        known = self.dirty[group, chunk]
        if self._packs is None:
            return
        index, state = self._index(group, chunk), self._bytes.resident_state(group, chunk)
        weights = self._weights.resident(group, chunk)
        writes = [self._on_gpu.save(group, chunk, self._packs[1], index)] if group in self._on_gpu else []
        if state is not None:
            writes.append(self._packs[1].write(index, state, Priority.COMMIT, known=known[1]))
        if weights is not None:
            writes.append(self._packs[0].write(index, weights, Priority.COMMIT, known=known[0]))
        await together(writes)
