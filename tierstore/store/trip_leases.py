"""The memory of trips: leases granted in the order of need, and taken back where a step leaves that order.

Scope: who waits for memory, who has it, and who only reads ahead with it.
Not here: what a trip does with its lease (`updates.py`), bytes (`io/memory.py`).
Owner: the loop thread.

[Note: one lease per trip] A trip reserves all the memory it will need before it reads, so it never waits for memory
while it holds memory. Leases are granted in the order in which updates are needed. Where a step leaves that order (a
block skipped, a new graph), a lease that waits for a later gradient is recalled and queues again. A gradient may wait
for memory that an earlier one gives back when it is applied, so a trip without its gradient gives way, too. Who gives
way queues again behind all others, also those of the next step; no trip of that is applied before he has his memory,
for it would keep its own until it is written, which is after the commit of the step before. Then nothing waits in a
circle. When all of a step is decided whose gradients are all here, those that still wait may change turns.

[Note: places of gradients] Where gradients are kept to the end of their step, their memory is free through forward, and
much of it for long in backward. A trip may have the places of gradients that come after its own: in the order of need
it gives them back before they come. Where a step leaves that order, it is recalled like the others. Once the step is
over, what is left of it may have all places: the next forward waits for it, and no gradient comes before that. (With
that, and such reads before writes, a step of GPT-2 124M took 2.95 and 2.80 s in 384 MiB, before it 3.23 and 3.52, in
turns; in 512 MiB 2.43 and 2.65, before it 2.73 and 2.65; in 768 MiB and more as long as before, 2026-11-28.)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from tierstore.io.memory import Lease, Pool
from tierstore.store.rounds import Round, Trip


class TripLeases:
    """Leases of one pool, one for each trip that needs memory.

    A trip that is granted one has it as `trip.lease`; it is recalled to have that back.

    Args:
        gradients: has the places of gradients, see [Note: places of gradients].
    """

    def __init__(self, pool: Pool, gradients: Pool) -> None:
        self._pool = pool
        self._gradients = gradients
        self._queued: dict[Round, dict[int, dict[Trip, None]]] = {}  # wait for memory, by group
        self._holding: dict[Trip, Round] = {}  # have it, or have been granted it
        self._in_places: dict[Trip, None] = {}  # have what they hold from gradients; recalled in the order of need
        self._borrowers = 0

    async def reserve(self, round_: Round, trip: Trip, nbytes: int) -> bool:
        """Wait for a trip's lease. False: others need that memory sooner."""
        self._queued.setdefault(round_, {}).setdefault(trip.group, {})[trip] = None

        def granted() -> None:
            self._leave_queue(round_, trip)
            self._holding[trip] = round_

        try:
            place_for = partial(self._place_for, round_, trip, nbytes)
            trip.lease = await self._pool.reserve(nbytes, granted, place_for, trip)
            self._holding[trip] = round_
        except BaseException:
            self._holding.pop(trip, None)
            self._in_places.pop(trip, None)
            raise
        finally:
            self._leave_queue(round_, trip)
        # It may have come to the head of the queue before one that may go. One whose own gradient is on its way keeps
        # its place: it would queue again behind all later ones, which then read ahead for nothing.
        is_in_the_way = trip in self._in_places and self._gradients.is_waited_for
        return self.will_go(round_, trip) or not (
            self._borrowers or is_in_the_way or self._is_starving() or self.is_owed(round_)
        )

    def _leave_queue(self, round_: Round, trip: Trip) -> None:
        queued = self._queued.get(round_, {})
        if (alike := queued.get(trip.group)) is not None:
            alike.pop(trip, None)
            if not alike:
                del queued[trip.group]
                if not queued:
                    del self._queued[round_]

    def is_owed(self, round_: Round) -> bool:
        """Whether a trip of an earlier round waits for memory: those of this one wait with being applied."""
        return any(queued.number < round_.number for queued in self._queued)

    def will_go(self, round_: Round, trip: Trip) -> bool:
        """Whether a trip that has its memory needs nothing but time to be applied."""
        return round_.will_go(trip) and not self.is_owed(round_)

    def _place_for(self, round_: Round, trip: Trip, nbytes: int) -> Lease | None:
        """Places of gradients, if there are some that this trip may have now."""
        above = round_.free_above(trip)
        lease = None if above is None else self._gradients.try_reserve_last(nbytes, above)
        if lease is not None:
            self._in_places[trip] = None
        return lease

    def rearrange(self, round_: Round) -> None:
        """All of a round is decided: its trips that wait for memory have it in the order of the next forward."""
        ranks = {group: rank for rank, group in enumerate(round_.then)}
        self._pool.rearrange({trip: ranks[trip.group] for trip in round_.trips if trip.group in ranks})

    def give_back(self, trip: Trip) -> None:
        """A trip has no use for its lease, if it has one."""
        self._holding.pop(trip, None)
        self._in_places.pop(trip, None)
        if trip.lease is not None:
            trip.lease.free()
            trip.lease = None
        self.look_again()  # gradients may have gone with it
        self.recall()  # who waited because this one was moving

    def look_again(self) -> None:
        """Places of gradients have come free."""
        self._pool.look_again()

    async def borrow(self, nbytes: int) -> Lease:
        """Memory for something else than a trip: what reads ahead for a step that may be far away makes room."""
        self._borrowers += 1
        try:
            self._recall(trip for trip in self._holding if trip not in self._in_places)
            return await self._pool.reserve(nbytes)
        finally:
            self._borrowers -= 1

    def recall(self) -> None:
        """Take back what reads ahead, if a trip that may go has no memory or a gradient no place, and nothing moves.

        In the order of need this does not happen: what reads ahead queued behind what may go.
        """
        if not self._moves(self._holding) and self._is_starving():
            self._recall(self._holding)
        elif self._gradients.is_waited_for and not self._moves(self._in_places):
            self._recall(self._in_places)

    def _moves(self, trips: Iterable[Trip]) -> bool:
        """Whether one of these will give back what it has."""
        return any(trip.applied.done() or self.will_go(self._holding[trip], trip) for trip in trips)

    def _is_starving(self) -> bool:
        """Whether a trip waits for memory, and needs nothing else."""
        return any(
            round_.may_go(trip)
            for round_, queued in self._queued.items()
            for group in round_.opened & queued.keys()  # asked at each turn: not all that are queued
            for trip in queued[group]
        )

    def _recall(self, trips: Iterable[Trip]) -> None:
        """Those that have their lease already; who was granted one looks himself when he has his turn."""
        for trip in trips:
            round_ = self._holding[trip]
            if trip.lease is not None and (self.is_owed(round_) or not round_.may_go(trip)):
                trip.recall()
