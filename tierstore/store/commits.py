"""Generations of training: what must be at rest before the manifest of a step is published.

Scope: the commits of steps, in the background, one after the other, at every rank.
Not here: how a manifest reaches the disk (`manifest_files.py`), what the captured state means (`train/`).
Owner: the loop thread.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from tierstore.errors import ConfigError
from tierstore.io.memory import Lease
from tierstore.io.tasks import to_the_end, together
from tierstore.plan.placement import Kind, Placement
from tierstore.store.gradients import Gradients
from tierstore.store.layout import ChunkIndex, GroupSpec
from tierstore.store.manifest import Captured, Generation
from tierstore.store.manifest_files import COMMIT, PER_RANK, Manifests
from tierstore.store.rounds import Round
from tierstore.store.slots import ChunkRecord, SlotPack
from tierstore.store.snapshots import Snapshot
from tierstore.store.store_files import StoreFiles
from tierstore.store.team import Team, all_succeed, leads
from tierstore.store.updates import Spawn, UpdatePipeline
from tierstore.trace import Tracer

T = TypeVar("T")
Records = dict[str, dict[int, ChunkRecord | None]]
"""The records of the chunks that a rank keeps, by pack and chunk."""


@dataclass(slots=True)
class _Commit:
    """A generation on its way to the disk.

    Attributes:
        round_: the updates that it holds; None: none are on their way.
        previous: the commit before it.
        writes: the writes of chunks that live in memory.
        packs: those whose chunks it names.
        everywhere: what each rank captures, by rank.
        noted: what the leader has written of that.
        records: the records of all chunks at this rank, once they are durable.
    """

    number: int
    round_: Round | None
    previous: asyncio.Task[None] | None
    writes: list[asyncio.Task[None]]
    captured: Mapping[str, Any]
    packs: list[SlotPack]
    everywhere: Sequence[Mapping[str, Any]] = ()
    noted: Captured | None = None
    records: dict[str, list[ChunkRecord | None]] = field(default_factory=dict)


class Commits:
    """The generations that one store publishes.

    Args:
        gradients: sets of gradients; `files` has a pack for each set if gradients are written at all.
        resident: leases of the chunks that live in CPU memory, which are written for commits only.

    Attributes:
        generation: number of the last published generation; -1 before the first.
        barrier: the commit that must be published before a round that begins now may write.
        before: callbacks before each generation is published, each in a thread of its own; an error in one of them
            makes that commit fail.
        snapshots: the last snapshot of each name that this run has begun.
        kept: the snapshot in progress: its generation must not be overwritten.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        files: StoreFiles,
        gradients: Sequence[Gradients],
        resident: Mapping[Kind, Mapping[tuple[int, int], Lease]],
        updates: UpdatePipeline,
        team: Team,
        spawn: Spawn,
        tracer: Tracer,
    ) -> None:
        self._groups = groups
        self._files = files
        self._gradients = gradients
        self._resident = resident
        self._updates = updates
        self._team = team
        self._spawn = spawn
        self._tracer = tracer
        self._index = ChunkIndex(groups, placement)
        self._next_number = 0
        self.generation = -1
        self.barrier: asyncio.Task[None] | None = None
        self.before: list[Callable[[], None]] = []
        self.snapshots: dict[str, Snapshot] = {}
        self.kept: Snapshot | None = None

    def go_on_from(self, number: int) -> None:
        """Count on from this generation, which is on the disk."""
        self.generation, self._next_number = number, number + 1

    async def published(self) -> None:
        """Wait for every commit that has begun."""
        if self.barrier is not None:
            await asyncio.shield(self.barrier)

    # --- snapshots ----------------------------------------------------------------------------------------------

    async def snapshot(self, name: str) -> Snapshot:
        """Begin to keep the last generation under a name, while no commit or snapshot is in progress.

        All ranks call this, and then `end_snapshot`.

        Raises:
            ConfigError: the name is not valid, or there is a snapshot of that name.
            StorageError: the system refused; nothing is left of the snapshot.
        """
        files = self._files
        kept = Snapshot(
            name, files.directories, self.generation, files.committed_packs, files.backend, self._tracer.clock
        )
        try:
            told = await all_succeed(self._team, f"a snapshot {name!r}", partial(self._lead, kept.begin))
        except BaseException:
            await self._lead(kept.abandon)
            raise
        kept.is_reflink = False not in told  # None at ranks that do not lead: they make nothing
        self.snapshots[name] = self.kept = kept
        if leads(self._team):
            kept.start_copying()
        if kept.is_reflink:
            await self.end_snapshot()
        return kept

    async def snapshot_moves(self) -> bool:
        """Wait until one more part is copied. Returns whether any rank has more to copy."""
        await self._commit_ended()
        kept = self.kept
        return kept is not None and any(await all_succeed(self._team, f"a part of snapshot {kept.name!r}", kept.moves))

    async def end_snapshot(self) -> None:
        """Wait until the snapshot in progress is copied, and publish it.

        Raises:
            StorageError: the copy or its publication failed at some rank; nothing is left of the snapshot.
        """
        await self._commit_ended()
        kept = self.kept
        if kept is None:
            return
        try:
            await all_succeed(self._team, f"the files of snapshot {kept.name!r}", kept.copied)
            await all_succeed(self._team, f"the manifest of snapshot {kept.name!r}", partial(self._lead, kept.publish))
        except Exception as error:
            self.kept = None
            kept.end(error)
            await self._lead(kept.abandon)
            raise
        self.kept = None
        kept.end()

    async def _commit_ended(self) -> None:
        """Wait for the commit, however it ends: ranks exchange messages in one order, and the commit's go first."""
        if self.barrier is not None:
            self._updates.allow_through()  # the commit waits for these updates
            await asyncio.wait([self.barrier])

    async def _lead(self, job: Callable[[], T]) -> T | None:
        """Run a job in a thread, at the leader only, and to its end, so that what it has made is known."""
        return await to_the_end(asyncio.to_thread(job)) if leads(self._team) else None

    def release(self) -> None:
        """Remove a snapshot that has not ended."""
        if self.kept is not None and leads(self._team):
            self.kept.abandon()

    def begin(self, round_: Round | None, captured: Mapping[str, Any], pending: Gradients | None = None) -> None:
        """Publish the state after `round_` (None: the state as it is), in the background; commits run one by one.

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
        commit = _Commit(number, round_, previous, writes, captured, kept)
        self.barrier = self._spawn(self._publish(commit), "commit")
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
            del self._updates.dirty[group, chunk]
        if pending is not None:
            await pending.keep(group, chunk)

    async def _publish(self, commit: _Commit) -> None:
        team, name = self._team, f"generation {commit.number}"
        with self._tracer.measure("commit", name):
            commit.everywhere = await all_succeed(team, f"what {name} captures", partial(self._capture, commit))
            self._refuse_several_steps(commit.everywhere)
            try:
                durable = await all_succeed(team, f"the chunks of {name}", partial(self._make_durable, commit))
            except Exception:
                if self._manifests is not None:
                    await self._manifests.abandon(commit.number)
                raise
            await all_succeed(team, f"the manifest of {name}", partial(self._publish_manifest, commit, durable))
        for pack in self._files.committed_packs:
            pack.commit(commit.records[pack.kind])
        self.generation = commit.number
        if commit.number == 0 and leads(team):
            await asyncio.to_thread(self._files.end_making)

    @property
    def _manifests(self) -> Manifests | None:
        """The manifests, at the leader only."""
        return self._files.manifests if leads(self._team) else None

    @staticmethod
    async def _capture(commit: _Commit) -> Mapping[str, Any]:
        """What this rank captures, once the commit before is published."""
        if commit.previous is not None:
            await asyncio.shield(commit.previous)
        return {**commit.captured, COMMIT: secrets.token_hex(16)}

    async def _make_durable(self, commit: _Commit) -> Records:
        """Put all but the manifest to rest, and return the records of this rank's chunks."""
        # Side by side: on a busy disk each sync waits for the reads before it.
        others = (to_the_end(asyncio.to_thread(callback)) for callback in self.before)
        await together((self._chunks_at_rest(commit), self._keep_captured(commit), *others))
        for pack in self._files.committed_packs:
            # Gradients that are not pending may be in use by the next step already: no generation names them.
            commit.records[pack.kind] = list(pack.current) if pack in commit.packs else [None] * len(pack)
        mine = [self._index(*key) for key in self._index.all()]
        return {kind: {index: rows[index] for index in mine} for kind, rows in commit.records.items()}

    async def _keep_captured(self, commit: _Commit) -> None:
        if self._manifests is not None:
            commit.noted = await self._manifests.capture(commit.number, self._captured(commit.everywhere))

    async def _publish_manifest(self, commit: _Commit, durable: Sequence[Records]) -> None:
        if self._manifests is not None:
            rows = self._records([durable[member] for member in self._team.members])
            generation = Generation(commit.number, self._files.layout(), rows, commit.captured)
            await self._manifests.publish(generation, commit.noted)

    @staticmethod
    def _refuse_several_steps(everywhere: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a generation of several steps: a rank that left out a commit is ahead of the others from then on."""
        steps = [captured.get("step") for captured in everywhere]
        if len(set(steps)) > 1:
            told = ", ".join(f"step {step} at rank {rank}" for rank, step in enumerate(steps))
            raise ConfigError(
                f"the ranks would commit different steps as one generation: {told}; a callback of on_step failed at "
                "one of them, or they commit at different times; start all ranks again with resume='auto'"
            )

    async def _chunks_at_rest(self, commit: _Commit) -> None:
        """Wait for the writes of a generation, and make them durable."""
        if commit.round_ is not None:
            await self._updates.round_ended(commit.round_)
        for write in commit.writes:
            await asyncio.shield(write)
        # Not in the threads that read and write chunks, where a sync would wait for its turn, too.
        await together(asyncio.to_thread(pack.datasync) for pack in self._files.committed_packs)

    def _captured(self, everywhere: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The captured states of the ranks that share the directories, as one; `COMMIT` is rank 0's on every node."""
        first, *others = (everywhere[member] for member in self._team.members)
        own = [{key: theirs[key] for key in PER_RANK} for theirs in others]
        return {**first, COMMIT: everywhere[0][COMMIT], "ranks": own}

    def _records(self, parts: Sequence[Records]) -> dict[str, list[ChunkRecord | None]]:
        """The records of the ranks that share the directories, as one."""
        records: dict[str, list[ChunkRecord | None]] = {
            pack.kind: [None] * len(pack) for pack in self._files.committed_packs
        }
        for kind, rows in (item for part in parts for item in part.items()):
            for index, record in rows.items():
                records[kind][index] = record
        return records
