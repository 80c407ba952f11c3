"""The updates of one step as plain data: what each run of elements gets, and which groups may go ahead.

Scope: gates and decisions of a round, and the record of a chunk's trip through the update.
Not here: the trips themselves (`updates.py`).
Owner: the loop thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierstore.device.streams import Mark, Reached
from tierstore.io.memory import Lease
from tierstore.kernels.adam import AdamCoefficients, Digests
from tierstore.store.gradients import Gradients
from tierstore.store.slots import ChunkRecord


class ParameterUpdate(NamedTuple):
    """One Adam step of the elements `[start, stop)` of a group, as the kernels take it."""

    start: int
    stop: int
    coefficients: AdamCoefficients


Updates = Mapping[int, Sequence[ParameterUpdate]]


@dataclass(slots=True, eq=False)
class Trip:
    """One chunk on its way through the update of one round.

    Attributes:
        applied: ends when the new weights exist; True if they were put on the device too.
        task: ends when they are at rest.
        recalled: ends when the trip is asked to give its lease back, because others need the memory sooner.
        before: the records of weights and state that the trip began from; a redo begins from the same ones.
        is_redo: the trip replaces one whose update was wrong.
        unchecked: of weights and of state, whether they were read unverified, so that the update must check them.
        digests: of weights and of state, as the update left them.
    """

    group: int
    chunk: int
    applied: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    recalled: asyncio.Future[None] = field(init=False)
    lease: Lease | None = None
    task: asyncio.Task[None] | None = None
    before: tuple[ChunkRecord | None, ChunkRecord | None] = (None, None)
    is_redo: bool = False
    unchecked: list[bool] = field(default_factory=lambda: [False, False])
    digests: Digests = (None, None)

    def __post_init__(self) -> None:
        self.begin()

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.chunk

    def begin(self) -> None:
        """The trip asks for its memory, perhaps again: earlier recalls do not count any more."""
        self.recalled = self.applied.get_loop().create_future()

    def recall(self) -> None:
        """Ask the trip to give its lease back; twice is fine."""
        if not self.recalled.done():
            self.recalled.set_result(None)


class Round:
    """All trips of one step, in the order in which they are needed.

    Args:
        order: groups, soonest needed first.
        gradients: those that the round applies.
        reads_weights: the trips read weights that live on NVMe along with the state; otherwise they take them from the
            device, where backward has just used them, or where all weights stay.
        is_lazy: a group's trips wait until somebody asks for the group (`allow_through`).
        keeps_gradients: gradients stay after they were applied, until the update is approved or redone.
        barrier: the commit to be published before a trip may write (see `manifest_files.py`, [Note: the barrier]).
        borrows: trips may have the places of gradients that come after their own.
        eager: groups whose trips go even if nobody asks for the group.
        then: the order in which the next forward needs groups. Trips that still wait for memory when all groups are
            decided get it in that order; empty: they keep theirs. By then all gradients are here, so none waits for
            memory that a trip gives back.

    Attributes:
        number: rounds of later steps have higher numbers.
        is_void: the round was taken back; its gradients belong to the round that replaces it.
        used: the mark behind all kernels queued before the decision, which may read weights. Set by the decision.
        opened: groups whose trips may be applied, as soon as their gradients are here.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        order: Sequence[int],
        gradients: Gradients,
        *,
        reads_weights: bool,
        is_lazy: bool,
        keeps_gradients: bool,
        barrier: asyncio.Task[None] | None,
        borrows: bool = False,
        eager: Container[int] = (),
        then: Sequence[int] = (),
    ) -> None:
        self.number = next(self._numbers)
        self.order = tuple(order)
        self.gradients = gradients
        self.reads_weights = reads_weights
        self.keeps_gradients = keeps_gradients
        self.barrier = barrier
        self.borrows = borrows
        self.then = then
        self._places_end: dict[int, int] = {}
        self.trips: list[Trip] = []
        self.trips_of: dict[int, list[Trip]] = {group: [] for group in self.order}
        self.is_decided = self.is_void = False
        self.used: Mark = Reached()
        self.kept: list[tuple[int, int]] = []
        self._updates: dict[int, Sequence[ParameterUpdate]] = {}
        self._decided_at: dict[int, Mark] = {}
        self._rank = {group: rank for rank, group in enumerate(self.order)}
        self._eager = eager
        self._allowed = 0 if is_lazy else len(self.order)
        self.opened: set[int] = set()
        self._gates: dict[int, asyncio.Future[None]] = {}  # of groups that somebody waits for

    def lend_places(self) -> None:
        """Let trips have places of gradients, laid out in the order in which the gradients will come."""
        self.gradients.memory.arrange(self.order)
        ends = itertools.accumulate(map(self.gradients.memory.end_of_places, self.order), max)
        self._places_end = dict(zip(self.order, ends))

    def add(self, trip: Trip) -> None:
        """A trip of this round begins."""
        self.trips.append(trip)
        self.trips_of[trip.group].append(trip)

    def decide_group(self, group: int, updates: Sequence[ParameterUpdate], after: Mark) -> None:
        """The updates of this group are final: its trips may go, once the kernels before `after`, which may read its
        weights, are over."""
        self._updates[group] = updates
        self._decided_at[group] = after
        self._open([group])

    def decide(self, updates: Updates) -> None:
        """The updates of all groups are final: none for groups that are not named here and were not decided before."""
        self._updates = {group: updates.get(group, ()) for group in self.order} | self._updates
        self.is_decided = True
        self._open(self.order)

    def allow_through(self, group: int | None = None) -> None:
        """Somebody needs this group: it and all groups before it in the order may go; None: all groups."""
        before = self._allowed
        self._allowed = max(before, len(self.order) if group is None else self._rank.get(group, -1) + 1)
        self._open(self.order[before : self._allowed])

    def last_uses(self, group: int) -> tuple[Mark, ...]:
        """The marks after which the weights of a group may change."""
        return (self.used, self._decided_at[group]) if group in self._decided_at else (self.used,)

    def _open(self, groups: Iterable[int]) -> None:
        for group in groups:
            is_allowed = self._rank[group] < self._allowed or group in self._eager
            if group in self._updates and is_allowed and group not in self.opened:
                self.opened.add(group)
                if group in self._gates:
                    self._gates.pop(group).set_result(None)

    def is_open(self, group: int) -> bool:
        """Whether trips of this group may be applied, as soon as their gradients are here."""
        return group in self.opened

    def may_go(self, trip: Trip) -> bool:
        """Whether a trip of this round can be applied now."""
        return self.is_open(trip.group) and not self.gradients.is_coming(*trip.key)

    def will_go(self, trip: Trip) -> bool:
        """Whether a trip needs nothing but time: its gradient may still be on its way, but does not wait for memory."""
        return self.is_open(trip.group) and not self.gradients.memory.is_short_of(*trip.key)

    def free_above(self, trip: Trip) -> int | None:
        """The byte from which on a trip may have places of gradients: those that come after its own, and all once the
        update is approved. None: it may have none.
        """
        if self.borrows and self.is_decided and not self.keeps_gradients:
            return 0
        return self._places_end.get(trip.group)

    def obstacle(self, trip: Trip) -> asyncio.Future[None] | None:
        """What a trip has to wait for before it may go, or None. Many wait for one future: nobody may cancel it."""
        if trip.group in self.opened:
            return self.gradients.awaited(*trip.key)
        if trip.group not in self._gates:
            self._gates[trip.group] = asyncio.get_running_loop().create_future()
        return self._gates[trip.group]

    def updates_of(self, group: int, start: int, stop: int) -> list[ParameterUpdate]:
        """The updates of elements `[start, stop)` of a group, cut to them and counted from `start`."""
        return [
            ParameterUpdate(max(u.start, start) - start, min(u.stop, stop) - start, u.coefficients)
            for u in self._updates.get(group, ())
            if u.start < stop and u.stop > start
        ]
