"""The training state of a model: weights, gradients and optimizer state on their tiers, and the commits of steps.

Scope: assembling the rooms of this floor from a placement; filling, opening, committing and closing a store.
Not here: modules, hooks and coefficients (`train/`); how a chunk moves (`weights.py`, `gradients.py`, `updates.py`).
Owner: everything here runs on the loop thread, but for `__init__` and `release`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierstore.config import Tier, TierConfig
from tierstore.device.streams import ComputeDevice
from tierstore.errors import ConfigError, FormatError
from tierstore.io.backend import Backend
from tierstore.io.memory import Arena, Lease, Pool
from tierstore.io.runtime import Runtime
from tierstore.io.workers import Priority, WorkerPool
from tierstore.plan.tiers import Kind, Placement
from tierstore.store.at_rest import ChunksAtRest
from tierstore.store.budget import ByteBudget
from tierstore.store.commit import (
    PER_RANK,
    Generation,
    Manifests,
    StoreLock,
    begin_store,
    claim_directory,
    end_store_making,
)
from tierstore.store.gradients import Gradients
from tierstore.store.layout import ChunkIndex, Codecs, GroupSpec, chunk_specs, fingerprint
from tierstore.store.rounds import Round
from tierstore.store.slots import ChunkIO, ChunkRecord, SlotPack
from tierstore.store.tasks import together
from tierstore.store.team import Alone, Team, all_succeed, leads
from tierstore.store.updates import UpdatePipeline
from tierstore.store.weights import Weights
from tierstore.trace import Tracer

Floats = npt.NDArray[np.float32]
_LAST_JOBS_S = 30.0  # for jobs in threads when the runtime has closed: chunks, which take far less on a disk that works


class TrainingStore:
    """All state of one model on its tiers.

    Args:
        storages: flat device storages of the groups, in their order, size 0 while a group is not on the device;
            `use_storages` gives them later.
        codecs: of each kind of chunks.
        is_durable: steps can be committed; otherwise the packs have one slot and are removed at the end.
        lock: held on the first directory if its generation was read; the store takes the rest, and gives it back.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        tiers: TierConfig,
        device: ComputeDevice,
        storages: list[torch.UntypedStorage],
        runtime: Runtime,
        backend: Backend,
        tracer: Tracer,
        clock: Callable[[], float],
        *,
        is_durable: bool,
        update_threads: int,
        lock: StoreLock,
        team: Team | None = None,
        codecs: Codecs,
        codec_scratch_bytes: int = 0,
    ) -> None:
        self.groups = groups
        self._team = team or Alone()
        self.placement = placement
        self.directories = [Path(path) for path in tiers.nvme]
        self.is_durable = is_durable and bool(self.directories)
        self._asked = tiers.codec
        self.codecs = codecs
        self._backend = backend
        self._runtime = runtime
        self._device = device
        self._tracer = tracer
        self._index = ChunkIndex(groups, placement)
        self._storages = storages
        self._lock = lock
        self._is_new = False
        self._is_ours = False
        self._commit: asyncio.Task[None] | None = None
        self._next_number = 0
        self.generation = -1
        """Number of the last published generation; -1 before the first."""
        self._io_workers = WorkerPool("tierstore-io", tiers.io_threads * max(1, len(self.directories)))
        self._compute = WorkerPool("tierstore-update", update_threads)
        for workers in (self._io_workers, self._compute):
            runtime.describe(workers.in_flight)
        self._manifests = Manifests(self.directories[0], backend) if self.directories else None
        self.arena = Arena(placement.pools.total_bytes + codec_scratch_bytes, device.pin, device.unpin)
        try:
            self._pools = self._make_pools(codec_scratch_bytes)
            self.io = ChunkIO(backend, self._io_workers, self._pools["codec"], clock, tracer)
            self.io.on_transfer = self._trace_memory
            self._furnish()
        except BaseException:
            self.arena.close()  # it is pinned
            raise

    def _make_pools(self, codec_scratch_bytes: int) -> dict[str, Pool]:
        pools = self.placement.pools
        sizes = {
            "resident": pools.resident, "gradients": pools.gradients, "spill": pools.spill, "update": pools.update,
            "weights": pools.weights, "codec": codec_scratch_bytes,
        }  # fmt: skip
        return {name: self.arena.pool(name, nbytes) for name, nbytes in sizes.items()}

    def _furnish(self) -> None:
        """The rooms of this floor, on the arena."""
        groups, placement, device, tracer = self.groups, self.placement, self._device, self._tracer
        self._packs = self._make_packs() if self.directories else []
        self._leases: list[Lease] = []
        self._resident: dict[Kind, dict[tuple[int, int], Lease]] = {Kind.WEIGHTS: {}, Kind.STATE: {}}
        self._reserve_resident()
        durable_packs = (self._packs[0], self._packs[1]) if self._packs else None
        self.gpu_budget = ByteBudget("gpu_memory", placement.gpu_weight_bytes)
        self.weights = Weights(
            groups, placement, self._storages, self.gpu_budget, self._packs[0] if self._packs else None,
            self._resident[Kind.WEIGHTS], self._pools["weights"], self._io_workers, device, tracer,
        )  # fmt: skip
        self.gradients = [
            Gradients(
                groups, placement, self._pools["gradients"], self._pools["spill"], pack, self._compute, device, tracer
            )
            for pack in (*self._packs[2:], *[None] * (placement.gradient_copies - len(self._packs[2:])))
        ]
        self.updates = UpdatePipeline(
            groups, placement, self.weights, durable_packs,
            {key: lease.array for key, lease in self._resident[Kind.STATE].items()},
            self._pools["update"], self._compute, device, self._runtime.spawn, tracer,
        )  # fmt: skip
        self.at_rest = ChunksAtRest(
            groups, placement, self._packs[:2], self._resident, self.updates, self._pools["weights"], self._compute
        )
        self.weights.settle = self.updates.settle
        self.weights.leave_device = self.updates.leave_device

    def _make_packs(self) -> list[SlotPack]:
        slots, grid = 2 if self.is_durable else 1, self.placement.chunk_elements
        packs = [
            SlotPack(
                kind.value, chunk_specs(kind, self.groups, grid), self.directories, self.io, self.codecs[kind].codec,
                slots=slots,
            )
            for kind in (Kind.WEIGHTS, Kind.STATE)
        ]
        copies = self.placement.gradient_copies
        is_spilled = any(home is Tier.NVME for home in self.placement.gradient_home)
        # A delayed update's pending gradients are part of a generation, wherever they live.
        is_pending_kept = copies == 2 and self.is_durable
        for copy in range(copies if is_spilled or is_pending_kept else 0):
            specs = chunk_specs(Kind.GRADIENTS, self.groups, grid)
            pack_slots = 2 if is_pending_kept else 1
            codec = self.codecs[Kind.GRADIENTS].codec
            packs.append(SlotPack(f"gradients{copy or ''}", specs, self.directories, self.io, codec, slots=pack_slots))
        return packs

    @property
    def _committed_packs(self) -> list[SlotPack]:
        """The packs whose records a manifest keeps."""
        return self._packs if self.placement.gradient_copies == 2 else self._packs[:2]

    def _reserve_resident(self) -> None:
        """Memory of what lives in CPU memory, taken once and for ever."""
        pool = self._pools["resident"]
        for group, chunk in self._index.all():
            wanted = []
            if self.placement.weights_home[group] is Tier.CPU:
                wanted.append((Kind.WEIGHTS, self.placement.weight_bytes(group, chunk)))
            if self.groups[group].trainable and self.placement.is_state_resident(group, chunk):
                wanted.append((Kind.STATE, self.placement.state_bytes(group, chunk)))
            for kind, nbytes in wanted:
                lease = pool.try_reserve(nbytes)
                if lease is None:
                    raise ConfigError(f"the placement promises {nbytes} B more resident memory than its pool has")
                self._resident[kind][group, chunk] = lease
                self._leases.append(lease)

    def use_storages(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """The device storages, made after the files: what cannot be stored must not cost the model its weights."""
        self._storages[:] = storages

    def _trace_memory(self) -> None:
        if self._tracer.enabled:
            self._tracer.counter("gpu tier", "weight bytes", self.gpu_budget.used_bytes)
            self._tracer.counter("cpu tier", "bytes", sum(pool.used_bytes for pool in self._pools.values()))

    @property
    def cpu_peak_bytes(self) -> int:
        """Largest use of the arena, at most: every pool at its own peak."""
        return sum(pool.peak_bytes for pool in self._pools.values())

    # --- making and opening -------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Make the files of an empty store, at full size.

        Raises:
            ConfigError, StorageError, StoreLocked: nothing is left behind but the directories.
        """
        await self._led(self._create, self._join)

    async def _led(self, lead: Callable[[], None], follow: Callable[[], None]) -> None:
        """The leader's part in a thread, and when all of them have succeeded, everybody else's."""
        is_leader = leads(self._team)
        for job in (lead if is_leader else _nothing, _nothing if is_leader else follow):
            await all_succeed(self._team, "the files of the store", partial(asyncio.to_thread, job))

    def _join(self, generation: Generation | None = None) -> None:
        """Open what the leader has made."""
        self._lock.add(self.directories)
        for pack in self._packs:
            kept = generation.records.get(pack.kind) if generation is not None else None
            pack.open(kept or [None] * len(pack))

    def _create(self) -> None:
        if not self.directories:
            return
        made = [directory for directory in self.directories if claim_directory(directory, self._backend)]
        self._lock.add(self.directories)
        begin_store(self.directories, self._backend)
        self._is_ours = self._is_new = True
        for pack in self._packs:
            pack.create()
        for directory in (*self.directories, *(directory.parent for directory in made)):
            self._backend.sync_directory(directory)

    async def open(self, generation: Generation, *, is_previous: bool = False) -> None:
        """Continue from a generation: its records are current, and what lives in CPU memory is read.

        Args:
            is_previous: it is not the last one, which stays until `go_back` is called.
        """
        await self._led(partial(self._open, generation), partial(self._join, generation))
        if not is_previous:
            await self._adopt(generation.number)
        for pack in self._committed_packs:
            if pack.kind in generation.records:
                pack.adopt(generation.records[pack.kind])
        self.generation, self._next_number = generation.number, generation.number + 1
        await together(
            self._packs[position].read(self._index(*key), lease.array, Priority.DEMAND)
            for position, kind in enumerate((Kind.WEIGHTS, Kind.STATE))
            for key, lease in self._resident[kind].items()
        )
        for gradients in self.gradients if self.placement.gradient_copies == 2 else ():
            await gradients.restore()

    async def go_back(self) -> None:
        """The generation that was opened stays the last one: newer ones are removed."""
        await self._adopt(self.generation)

    async def _adopt(self, number: int) -> None:
        async def adopt() -> None:
            if self._manifests is not None and leads(self._team):
                await self._manifests.adopt(number)

        await all_succeed(self._team, f"going on from generation {number}", adopt)

    def _open(self, generation: Generation) -> None:
        for directory in self.directories:
            if not directory.is_dir():
                raise FormatError(f"the store is damaged: {directory} is missing")
        self._lock.add(self.directories)
        kept = [pack for pack in self._committed_packs if pack.kind in generation.records]
        for pack in kept:  # all of them, before anything is changed: they may be those of another store
            pack.check(generation.records[pack.kind])
        self._is_ours = True
        end_store_making(self.directories, self._backend)
        is_made = False
        for pack in self._packs:
            if pack in kept:
                is_made |= pack.open(generation.records[pack.kind])
            else:  # what no generation needs, or an update schedule that is new to this store
                for path in pack.paths():
                    path.unlink(missing_ok=True)
                pack.create()
                is_made = True
        for directory in self.directories if is_made else ():
            self._backend.sync_directory(directory)

    async def verify(self, generation: Generation) -> None:
        """Read every chunk of a generation; the store is open.

        Raises:
            ChecksumMismatch: names the first damaged chunk.
        """
        await self.at_rest.verify(generation)
        for pack, gradients in zip(self._committed_packs[2:], self.gradients):
            for group, chunk in self._index.all():
                if gradients.is_spilled(group) and gradients.is_filled(group, chunk):  # others were read to be opened
                    lease = await self._pools["spill"].reserve(pack.padded_bytes(self._index(group, chunk)))
                    try:
                        await pack.read(self._index(group, chunk), lease.array, Priority.DEMAND)
                    finally:
                        lease.free()

    async def measure_reads(self) -> tuple[int, float]:
        """Bytes and seconds of reading some chunks: the rate that a first depth is computed from."""
        before = self.io.meters["read"].totals()
        await self.at_rest.read_some()
        after = self.io.meters["read"].totals()
        return after[0] - before[0], after[1] - before[1]

    def layout(self) -> dict[str, Any]:
        """What must be equal for a store to open."""
        grid, disks = self.placement.chunk_elements, len(self.directories)
        return fingerprint(self.groups, grid, disks, self._asked.value, self.codecs)

    # --- commits ------------------------------------------------------------------------------------------------

    @property
    def barrier(self) -> asyncio.Task[None] | None:
        """The commit that must be published before the writes of a round that begins now."""
        return self._commit

    def commit(self, round_: Round | None, captured: Mapping[str, Any], pending: Gradients | None = None) -> None:
        """Publish the state after `round_` (None: as it is), in the background; commits follow one another.

        Args:
            pending: gradients that the next update will use, and that are part of this generation.
        """
        previous, writes = self._commit, []
        for group, chunk in self._index.all():
            key = (group, chunk)
            is_resident = key in self._resident[Kind.WEIGHTS] or key in self._resident[Kind.STATE]
            if (is_resident or pending is not None) and self.groups[group].trainable:
                after = self.updates.chain.get(key)
                work = self._commit_resident(group, chunk, after, previous, pending)
                task = self._runtime.spawn(work, "write resident")
                self.updates.chain[key] = task
                writes.append(task)
        number, self._next_number = self._next_number, self._next_number + 1
        kept = [*self._packs[:2], *(self._packs[2 + i] for i, set_ in enumerate(self.gradients) if set_ is pending)]
        self._commit = self._runtime.spawn(self._publish(number, round_, previous, writes, captured, kept), "commit")
        if pending is not None:
            pending.kept_by = self._commit

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
        if (group, chunk) in self.updates.dirty:
            await self.updates.write_resident(group, chunk)
            self.updates.dirty.discard((group, chunk))
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
        packs = self._committed_packs
        records: dict[str, list[ChunkRecord | None]] = {}

        async def make_durable() -> tuple[dict[str, dict[int, ChunkRecord | None]], Mapping[str, Any]]:
            if round_ is not None:
                await self.updates.round_ended(round_)
            for write in writes:
                await asyncio.shield(write)
            if previous is not None:
                await asyncio.shield(previous)
            for pack in packs:
                await self._io_workers.submit(Priority.WRITE, pack.datasync)
            # Gradients that are not pending are on their way already: no generation names them.
            records.update({pack.kind: list(pack.current) if pack in kept else [None] * len(pack) for pack in packs})
            mine = [self._index(*key) for key in self._index.all()]
            return {kind: {index: rows[index] for index in mine} for kind, rows in records.items()}, captured

        async def publish() -> None:
            if self._manifests is not None and leads(self._team):
                await self._manifests.publish(self._generation(number, durable))

        with self._tracer.measure("commit", f"generation {number}"):
            durable = await all_succeed(self._team, f"the chunks of generation {number}", make_durable)
            await all_succeed(self._team, f"the manifest of generation {number}", publish)
        for pack in packs:
            pack.commit(records[pack.kind])
        self.generation = number
        if number == 0 and leads(self._team):
            await asyncio.to_thread(end_store_making, self.directories, self._backend)

    def _generation(
        self, number: int, durable: Sequence[tuple[dict[str, dict[int, ChunkRecord | None]], Mapping[str, Any]]]
    ) -> Generation:
        """What the ranks that share the directories have made durable, as one."""
        records: dict[str, list[ChunkRecord | None]] = {pack.kind: [None] * len(pack) for pack in self._committed_packs}
        for member in self._team.members:
            for kind, rows in durable[member][0].items():
                for index, record in rows.items():
                    records[kind][index] = record
        captured = dict(durable[self._team.members[0]][1])
        others = [durable[member][1] for member in self._team.members[1:]]
        captured["ranks"] = [{key: theirs[key] for key in PER_RANK} for theirs in others]
        return Generation(number, self.layout(), records, captured)

    async def flush(self) -> None:
        """Wait until every decided update is at rest and every commit is published."""
        self.updates.allow_through()
        try:
            await self.updates.finished()
        finally:
            if self._commit is not None:
                await asyncio.shield(self._commit)

    # --- the end ------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give everything back, after the runtime has closed: threads, memory, files, the lock. Twice is fine.

        Raises:
            Timeout: a worker thread did not end; nothing was given back.
        """
        # Joined first: if a job does not end, it may still write, and keeps the memory, the files and the lock.
        for workers in (self._compute, self._io_workers):
            workers.close(min(self._runtime.timeout_s, _LAST_JOBS_S))
        with contextlib.ExitStack() as stack:  # in reverse, and each of them whatever becomes of the others
            stack.callback(self._lock.release)
            if self._is_ours:
                self._is_ours = False
                stack.callback(self._remove_needless)
            for pack in self._packs:
                stack.callback(pack.close)
            stack.callback(self._release_memory)

    def _release_memory(self) -> None:
        for lease in self.arena.close():
            with contextlib.suppress(Exception):
                lease.free()
        self.arena.close()

    def _remove_needless(self) -> None:
        """Remove the files that no generation needs."""
        has_nothing = self._is_new and not (self.is_durable and self._has_generation())
        for pack in self._packs if has_nothing else self._packs[len(self._committed_packs) :]:
            for path in pack.paths():
                path.unlink(missing_ok=True)
        if has_nothing:
            end_store_making(self.directories, self._backend)

    def _has_generation(self) -> bool:
        return self._manifests is not None and bool(self._manifests.numbers())


def _nothing() -> None:
    return None
