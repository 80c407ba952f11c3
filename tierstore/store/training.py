"""The training state of a model: weights, gradients and optimizer state on their tiers.

Scope: assembling the parts of the store from a placement; what concerns several of them: open, verify, flush, end.
Not here: modules, hooks and coefficients (`train/`); how a chunk moves (`weights.py`, `gradients.py`, `updates.py`);
    files (`store_files.py`) and commits (`commits.py`).
Owner: everything here runs on the loop thread, except `__init__` and `release`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from tierstore.config import Tier, TierConfig
from tierstore.device.streams import ComputeDevice
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend
from tierstore.io.memory import Arena, Lease, Pool
from tierstore.io.runtime import Runtime
from tierstore.io.tasks import together
from tierstore.io.workers import Priority, WorkerPool
from tierstore.plan.placement import Kind, Placement
from tierstore.store.at_rest import ChunksAtRest
from tierstore.store.budget import ByteBudget
from tierstore.store.commits import Commits
from tierstore.store.gradient_memory import GradientMemory
from tierstore.store.gradients import Gradients
from tierstore.store.layout import ChunkIndex, Codecs, GroupSpec
from tierstore.store.lock import StoreLock
from tierstore.store.manifest import Generation
from tierstore.store.marks import Marks
from tierstore.store.on_gpu import StateOnGpu
from tierstore.store.slots import ChunkIO
from tierstore.store.store_files import StoreFiles
from tierstore.store.team import Team
from tierstore.store.trip_leases import TripLeases
from tierstore.store.updates import UpdatePipeline
from tierstore.store.weights import Weights
from tierstore.trace import Tracer

_LAST_JOBS_S = 30.0  # for jobs that still run when the runtime has closed: a chunk takes far less on a disk that works


class TrainingStore:
    """All state of one model on its tiers.

    Args:
        codecs: the codec of each kind of chunks.
        shares, is_durable, lock: see `StoreFiles`.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        tiers: TierConfig,
        device: ComputeDevice,
        runtime: Runtime,
        backend: Backend,
        tracer: Tracer,
        clock: Callable[[], float],
        *,
        is_durable: bool,
        lock: StoreLock,
        team: Team,
        codecs: Codecs,
        shares: Sequence[int],
        codec_scratch_bytes: int,
        update_threads: int,
    ) -> None:
        self.groups = groups
        self.placement = placement
        self.codecs = codecs
        self._runtime = runtime
        self._tracer = tracer
        self._index = ChunkIndex(groups, placement)
        self._io_workers = WorkerPool("tierstore-io", tiers.io_threads * max(1, len(tiers.nvme)))
        self._compute = WorkerPool("tierstore-update", update_threads)
        # One thread, because its jobs share a stream: several would wait for each other, and all for the interpreter.
        self._gpu_worker = WorkerPool("tierstore-gpu", 1)
        self._marks = Marks()
        self._worker_pools = (self._marks, self._gpu_worker, self._compute, self._io_workers)
        for workers in self._worker_pools:
            runtime.describe(workers.in_flight)
        self.arena = Arena(placement.pools.total_bytes + codec_scratch_bytes, device.pin, device.unpin)
        try:
            self._pools = self._make_pools(codec_scratch_bytes)
            self.io = ChunkIO(backend, self._io_workers, self._pools["codec"], clock, tracer)
            self.io.on_transfer = self._trace_memory
            self.files = StoreFiles(
                groups, placement, tiers, codecs, self.io, team, lock, shares=shares, is_durable=is_durable
            )
            self._furnish(device, team)
        except BaseException:
            self._release_memory()  # the arena is pinned
            raise

    def _make_pools(self, codec_scratch_bytes: int) -> dict[str, Pool]:
        pools = self.placement.pools
        sizes = {
            "resident": pools.resident, "gradients": pools.gradients, "spill": pools.spill, "update": pools.update,
            "weights": pools.weights, "device": pools.device, "codec": codec_scratch_bytes,
        }  # fmt: skip
        return {name: self.arena.pool(name, nbytes) for name, nbytes in sizes.items()}

    def _furnish(self, device: ComputeDevice, team: Team) -> None:
        """Make the parts of the store, on the arena."""
        groups, placement, packs, tracer = self.groups, self.placement, self.files.packs, self._tracer
        self._resident = self._reserve_resident()
        self.gpu_budget = ByteBudget(placement.gpu_weight_bytes)
        self.weights = Weights(
            groups, placement, self.gpu_budget, packs[0] if packs else None,
            self._resident[Kind.WEIGHTS], self._pools["weights"], self._io_workers, device, self._marks, tracer,
        )  # fmt: skip
        self.on_gpu = StateOnGpu(groups, placement, self._pools["device"], self._gpu_worker, device)
        self.gradients = [
            Gradients(
                groups, placement, GradientMemory(placement, self._pools["gradients"], self._pools["spill"], copy),
                pack, self.on_gpu, self._compute, device, self._marks, tracer,
            )
            for copy, pack in enumerate(packs[2:] if len(packs) > 2 else [None] * placement.gradient_copies)
        ]
        leases = TripLeases(self._pools["update"], self._pools["gradients"])
        self.updates = UpdatePipeline(
            groups, placement, self.weights, (packs[0], packs[1]) if packs else None,
            self._resident[Kind.STATE], self.on_gpu, leases, self._compute, device, self._marks, self._runtime.spawn,
            tracer,
        )  # fmt: skip
        self.at_rest = ChunksAtRest(
            groups, placement, packs[:2], self._resident, leases, self._pools["weights"], self.on_gpu, self._compute,
            self.updates.forget_digests, self.updates.changing.refuse_spoilt,
        )  # fmt: skip
        self.commits = Commits(
            groups, placement, self.files, self.gradients, self._resident, self.updates, team, self._runtime.spawn,
            tracer,
        )  # fmt: skip
        self.weights.settle = self.updates.settle
        self.weights.leave_device = self.updates.leave_device

    def _reserve_resident(self) -> dict[Kind, dict[tuple[int, int], Lease]]:
        """Memory for the chunks that live in CPU memory, for as long as the store lives."""
        resident: dict[Kind, dict[tuple[int, int], Lease]] = {Kind.WEIGHTS: {}, Kind.STATE: {}}
        for group, chunk in self._index.all():
            wanted = []
            if self.placement.weights_home[group] is Tier.CPU:
                wanted.append((Kind.WEIGHTS, self.placement.weight_bytes(group, chunk)))
            if self.groups[group].trainable and self.placement.is_state_resident(group, chunk):
                wanted.append((Kind.STATE, self.placement.state_bytes(group, chunk)))
            for kind, nbytes in wanted:
                lease = self._pools["resident"].try_reserve(nbytes)
                if lease is None:
                    raise ConfigError(f"the placement promises {nbytes} B more resident memory than its pool has")
                resident[kind][group, chunk] = lease
        return resident

    def use_storages(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Set the device storages. They are made after the files: if the files fail, the model keeps its weights."""
        self.weights.storages = storages

    def _trace_memory(self) -> None:
        if self._tracer.enabled:
            self._tracer.counter("gpu tier", "weight bytes", self.gpu_budget.used_bytes)
            self._tracer.counter("cpu tier", "bytes", sum(pool.used_bytes for pool in self._pools.values()))

    @property
    def cpu_peak_bytes(self) -> int:
        """Upper bound of the largest use of the arena: the sum of the peaks of its pools."""
        return sum(pool.peak_bytes for pool in self._pools.values())

    # --- opening ------------------------------------------------------------------------------------------------

    async def open(self, generation: Generation, *, is_previous: bool = False) -> None:
        """Continue from a generation: its records become current, and what does not live on NVMe is read.

        Args:
            is_previous: the generation is not the last one; newer ones stay until `go_back` is called.
        """
        await self.files.open(generation)
        if not is_previous:
            await self.files.adopt(generation.number)
        for pack in self.files.committed_packs:
            if pack.kind in generation.records:
                pack.adopt(generation.records[pack.kind])
        self.commits.go_on_from(generation.number)
        await together(
            pack.read(self._index(*key), lease.array, Priority.DEMAND)
            for pack, kind in zip(self.files.packs, (Kind.WEIGHTS, Kind.STATE))
            for key, lease in self._resident[kind].items()
        )
        await together(
            self.on_gpu.load(*key, self.files.packs[1], self._index(*key))
            for key in self._index.all()
            if key[0] in self.on_gpu
        )
        for gradients in self.gradients if self.placement.gradient_copies == 2 else ():
            await gradients.restore()

    async def go_back(self) -> None:
        """Make the generation that was opened the last one: newer ones are removed."""
        await self.files.adopt(self.commits.generation)

    async def verify(self, generation: Generation) -> None:
        """Read every chunk of a generation; the store is open.

        Raises:
            ChecksumMismatch: names the first damaged chunk.
        """
        await self.at_rest.verify(generation)
        for pack, gradients in zip(self.files.committed_packs[2:], self.gradients):
            for group, chunk in self._index.all():
                if gradients.is_spilled(group) and gradients.is_filled(group, chunk):  # the others were read by `open`
                    index = self._index(group, chunk)
                    async with self._pools["spill"].lent(pack.padded_bytes(index)) as array:
                        await pack.read(index, array, Priority.DEMAND)

    async def measure_reads(self) -> tuple[int, float]:
        """Read some chunks, and return bytes and seconds: the first prefetch depth is computed from that rate."""
        before = self.io.meters["read"].totals()
        await self.at_rest.read_some()
        after = self.io.meters["read"].totals()
        return after[0] - before[0], after[1] - before[1]

    async def flush(self) -> None:
        """Wait until every decided update is at rest and every commit is published."""
        self.updates.allow_through()
        try:
            await self.updates.finished()
        finally:
            await self.commits.published()

    # --- the end ------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give everything back, after the runtime has closed: threads, memory, files, the lock. Twice is fine.

        Raises:
            Timeout: a worker thread did not end; nothing was given back.
        """
        # Joined first: if a job does not end, it may still write, and keeps the memory, the files and the lock.
        for workers in self._worker_pools:
            workers.close(min(self._runtime.timeout_s, _LAST_JOBS_S))
        with contextlib.ExitStack() as stack:
            stack.callback(self.files.release)
            stack.callback(self.commits.release)
            stack.callback(self._release_memory)
            stack.callback(self.on_gpu.release)

    def _release_memory(self) -> None:
        for lease in self.arena.close():
            with contextlib.suppress(Exception):
                lease.free()
        self.arena.close()
