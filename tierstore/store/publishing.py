"""Generations of training: what must be at rest before the manifest of a step is published.

Scope: the commits of steps, in the background, one after the other, at every rank.
Not here: how a manifest reaches the disk (`commit.py`), what the captured state means (`train/`).
Owner: the loop thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tierstore.io.memory import Lease
from tierstore.io.workers import Priority, WorkerPool
from tierstore.plan.tiers import Kind, Placement
from tierstore.store.commit import PER_RANK, Generation
from tierstore.store.gradients import Gradients
from tierstore.store.layout import ChunkIndex, GroupSpec
from tierstore.store.rounds import Round
from tierstore.store.slots import ChunkRecord, SlotPack
from tierstore.store.store_files import StoreFiles
from tierstore.store.team import Team, all_succeed, leads
from tierstore.store.updates import Spawn, UpdatePipeline
from tierstore.trace import Tracer

Records = dict[str, dict[int, ChunkRecord | None]]
"""What a rank has written, by pack and chunk."""


class Commits:
    """The generations that one store publishes.

    Args:
        gradients: sets of gradients; a pack of `files` for each, if any are written.
        resident: the chunks that live in CPU memory, and are written for a commit only.
        workers: threads that sync files.

    Attributes:
        generation: number of the last published one; -1 before the first.
        barrier: the commit that must be published before the writes of a round that begins now.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        files: StoreFiles,
        gradients: Sequence[Gradients],
        resident: Mapping[Kind, Mapping[tuple[int, int], Lease]],
        updates: UpdatePipeline,
        workers: WorkerPool,
        team: Team,
        spawn: Spawn,
        tracer: Tracer,
    ) -> None:
        self._groups = groups
        self._files = files
        self._gradients = gradients
        self._resident = resident
        self._updates = updates
        self._workers = workers
        self._team = team
        self._spawn = spawn
        self._tracer = tracer
        self._index = ChunkIndex(groups, placement)
        self._next_number = 0
        self.generation = -1
        self.barrier: asyncio.Task[None] | None = None

    def go_on_from(self, number: int) -> None:
        """This generation is on the disk, and the next one follows it."""
        self.generation, self._next_number = number, number + 1

    async def published(self) -> None:
        """Wait for every commit that has begun."""
        if self.barrier is not None:
            await asyncio.shield(self.barrier)

    def begin(self, round_: Round | None, captured: Mapping[str, Any], pending: Gradients | None = None) -> None:
        """Publish the state after `round_` (None: as it is), in the background; commits follow one another.

        Args:
            pending: gradients that the next update will use, and that are part of this generation.
        """
        previous, writes = self.barrier, []
        for group, chunk in self._index.all():
            key = (group, chunk)
            is_resident = key in self._resident[Kind.WEIGHTS] or key in self._resident[Kind.STATE]
            if (is_resident or pending is not None) and self._groups[group].trainable:
                after = self._updates.chain.get(key)
                work = self._commit_resident(group, chunk, after, previous, pending)
                task = self._spawn(work, "write resident")
                self._updates.resident_writes[key] = task
                writes.append(task)
        number, self._next_number = self._next_number, self._next_number + 1
        packs = self._files.packs
        kept = [*packs[:2], *(packs[2 + i] for i, set_ in enumerate(self._gradients) if set_ is pending)]
        self.barrier = self._spawn(self._publish(number, round_, previous, writes, captured, kept), "commit")
        if pending is not None:
            pending.kept_by = self.barrier

    async def _commit_resident(
        self,
        group: int,
        chunk: int,
        after: asyncio.Task[None] | None,
        previous: asyncio.Task[None] | None,
        pending: Gradients | None,
    ) -> None:
        if after is not None:
            await asyncio.shield(after)
        if previous is not None:
            await asyncio.shield(previous)
        if (group, chunk) in self._updates.dirty:
            await self._updates.write_resident(group, chunk)
            self._updates.dirty.discard((group, chunk))
        if pending is not None:
            await pending.keep(group, chunk)

    async def _publish(
        self,
        number: int,
        round_: Round | None,
        previous: asyncio.Task[None] | None,
        writes: list[asyncio.Task[None]],
        captured: Mapping[str, Any],
        kept: list[SlotPack],
    ) -> None:
        packs = self._files.committed_packs
        records: dict[str, list[ChunkRecord | None]] = {}

        async def make_durable() -> tuple[Records, Mapping[str, Any]]:
            if round_ is not None:
                await self._updates.round_ended(round_)
            for write in writes:
                await asyncio.shield(write)
            if previous is not None:
                await asyncio.shield(previous)
            for pack in packs:
                await self._workers.submit(Priority.WRITE, pack.datasync)
            # Gradients that are not pending are on their way already: no generation names them.
            records.update({pack.kind: list(pack.current) if pack in kept else [None] * len(pack) for pack in packs})
            mine = [self._index(*key) for key in self._index.all()]
            return {kind: {index: rows[index] for index in mine} for kind, rows in records.items()}, captured

        async def publish() -> None:
            if self._files.manifests is not None and leads(self._team):
                await self._files.manifests.publish(self._generation(number, durable))

        with self._tracer.measure("commit", f"generation {number}"):
            durable = await all_succeed(self._team, f"the chunks of generation {number}", make_durable)
            await all_succeed(self._team, f"the manifest of generation {number}", publish)
        for pack in packs:
            pack.commit(records[pack.kind])
        self.generation = number
        if number == 0 and leads(self._team):
            await asyncio.to_thread(self._files.end_making)

    def _generation(self, number: int, durable: Sequence[tuple[Records, Mapping[str, Any]]]) -> Generation:
        """What the ranks that share the directories have made durable, as one."""
        packs = self._files.committed_packs
        records: dict[str, list[ChunkRecord | None]] = {pack.kind: [None] * len(pack) for pack in packs}
        for member in self._team.members:
            for kind, rows in durable[member][0].items():
                for index, record in rows.items():
                    records[kind][index] = record
        captured = dict(durable[self._team.members[0]][1])
        others = [durable[member][1] for member in self._team.members[1:]]
        captured["ranks"] = [{key: theirs[key] for key in PER_RANK} for theirs in others]
        return Generation(number, self._files.layout(), records, captured)
