"""Gradients on their way from the device to the update: collected per chunk, in CPU memory or spilled to NVMe.

Scope: where each gradient of one step is, and in which order its parts are added.
Not here: the memory of gradients (`gradient_memory.py`), copying and adding (`pieces.py`), when a gradient is
    complete (`train/backward.py`), the update (`updates.py`).
Owner: the loop thread; workers run its jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.config import Tier
from tierstore.device.arithmetic import MOST_MEASURED, Collection, Piece
from tierstore.device.spans import Span
from tierstore.device.streams import ComputeDevice, Mark, Reached
from tierstore.errors import TierstoreError
from tierstore.io.memory import Bytes, Lease
from tierstore.io.tasks import together
from tierstore.io.workers import Priority, WorkerPool
from tierstore.kernels.elements import ELEMENT, Array, elements_of
from tierstore.kernels.norms import square_sums
from tierstore.plan.placement import BLOCK, Placement
from tierstore.store.gradient_memory import GradientMemory
from tierstore.store.layout import ChunkIndex, GroupSpec
from tierstore.store.marks import Marks
from tierstore.store.on_gpu import StateOnGpu
from tierstore.store.pieces import Filling, cut
from tierstore.store.slots import SlotPack
from tierstore.trace import Tracer

_JOB_BYTES = 16 * 2**20
"""Bytes of small chunks after which a job that copies them is full."""


class Arrival(NamedTuple):
    """Pieces of a group's gradient that have come.

    Attributes:
        pieces: the list is emptied when they are taken, and no reference is kept once all are copied: if the caller
            keeps none, the thread that copies last frees their memory, which may take milliseconds.
        after: the device work that must be over before the pieces are valid.
        is_final: they are of a step's last backward, so partial norms are computed on the way; rarely more follows.
        is_streaming: the group is updated as soon as its gradient is complete, so memory taken now is soon free again.
    """

    group: int
    pieces: list[Piece]
    after: Mark
    is_final: bool
    is_streaming: bool = False


@dataclass(slots=True)
class _Chunk:
    """The gradient of one chunk.

    Attributes:
        staged: memory that still holds a gradient that is on NVMe already, for the update that has waited for it.
        awaited: the end of the last delivery, if an update waits for that and needs nothing else.
        measuring: held while a gradient is measured that was not measured on its way: an update that comes meanwhile
            must not use it up before that has ended.
    """

    lease: Lease | None = None
    staged: Lease | None = None
    awaited: asyncio.Future[None] | None = None
    is_filled: bool = False
    is_measured: bool = False
    last: asyncio.Future[None] | None = None
    measuring: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Delivery:
    """Parts of the gradient of one chunk on their way.

    Attributes:
        before, arrived: the end of the delivery of this chunk before this one, and of this one.
        is_passing: its memory is soon free again.
    """

    key: tuple[int, int]
    state: _Chunk
    parts: list[Piece]
    after: Mark
    before: asyncio.Future[None] | None
    arrived: asyncio.Future[None]
    is_final: bool
    is_passing: bool


class Gradients:
    """The gradients of one step.

    Invariant: a chunk that is filled is in its lease, in the spill pack, or at home on the device, never in none.

    Args:
        memory: of one step's gradients.
        spill: the pack of gradients that live on NVMe, and of those that a generation keeps.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        memory: GradientMemory,
        spill: SlotPack | None,
        on_gpu: StateOnGpu,
        workers: WorkerPool,
        device: ComputeDevice,
        marks: Marks,
        tracer: Tracer,
    ) -> None:
        self.memory = memory
        self._groups = groups
        self._placement = placement
        self._spill = spill
        self._on_gpu = on_gpu
        self._workers = workers
        self._device = device
        self._marks = marks
        self._tracer = tracer
        self._index = ChunkIndex(groups, placement)
        self._chunks = {key: _Chunk() for key in self._index.all()}
        self._partials = [np.zeros(-(-group.elements // BLOCK)) for group in groups]
        self.kept_by: asyncio.Task[None] | None = None
        """The commit of a generation with these gradients: no delivery is written to the pack until it ends."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the gradient of a chunk has arrived, and when one has begun to wait for memory."""
        memory.on_short = lambda: self.on_change()

    def is_spilled(self, group: int) -> bool:
        """Whether this group's gradients live on NVMe."""
        return self._placement.gradient_home[group] is Tier.NVME

    def accept(self, arrivals: Sequence[Arrival]) -> Coroutine[Any, Any, None]:
        """Take gradients from where backward left them; the coroutine ends when that memory was given back.

        From this call on (not from the first await) `fetch` waits for them. Several small chunks for which there is
        memory are copied by one job: the way to a thread and back takes longer than the copy. Large chunks are copied
        side by side, so that each can be updated when it has come; chunks that stay on the GPU count as small.
        """
        deliveries = [one for arrival in arrivals for one in self._deliveries(arrival)]
        # By whether they are collected on the GPU.
        ready: dict[bool, list[tuple[_Delivery, Bytes | Span]]] = {True: [], False: []}
        ready_bytes = 0
        work: list[Callable[[], Coroutine[Any, Any, None]]] = []
        for one in deliveries:
            memory = self._memory_now(one) if len(deliveries) > 1 else None
            if memory is None:
                work.append(partial(self._deliver, one))
                continue
            is_on_gpu = one.key[0] in self._on_gpu
            ready[is_on_gpu].append((one, memory))
            ready_bytes += 0 if is_on_gpu else self._placement.gradient_bytes(*one.key)
            if ready_bytes >= _JOB_BYTES:
                work.append(partial(self._deliver_all, ready[False]))
                ready[False], ready_bytes = [], 0
        work += [partial(self._deliver_all, run) for run in ready.values() if run]
        return together(begin() for begin in work)

    def _deliveries(self, arrival: Arrival) -> Iterator[_Delivery]:
        """The deliveries of an arrival, one for each chunk."""
        group, pieces, after, is_final, is_streaming = arrival
        chunks = self._placement.chunks(group)
        for chunk, (start, stop) in enumerate(chunks):
            parts = pieces.copy() if len(chunks) == 1 else cut(pieces, start, stop)
            if parts:
                state, arrived = self._chunks[group, chunk], asyncio.get_running_loop().create_future()
                before, state.last = self.coming(group, chunk), arrived
                is_passing = is_streaming and self._placement.streams_gradients
                yield _Delivery((group, chunk), state, parts, after, before, arrived, is_final, is_passing)
        pieces.clear()

    def _memory_now(self, one: _Delivery) -> Bytes | Span | None:
        """The memory of a small delivery, if its turn has come and memory is free now; on the GPU all are small."""
        if one.before is not None or self.is_spilled(one.key[0]):
            return None
        if one.key[0] in self._on_gpu:
            return self._on_gpu.gradient(*one.key)
        if self._placement.gradient_bytes(*one.key) > self._device.small_bytes:
            return None
        if one.state.lease is None:
            with contextlib.suppress(TierstoreError):  # the task that tries again tells those who wait
                one.state.lease = self.memory.reserve_now(one.key)
        return None if one.state.lease is None else one.state.lease.array

    async def _deliver_all(self, ready: Sequence[tuple[_Delivery, Bytes | Span]]) -> None:
        with self._arriving([one for one, _ in ready]):
            await self._collect(ready)

    async def _deliver(self, one: _Delivery) -> None:
        with self._arriving([one]):
            if one.before is not None:
                await asyncio.shield(one.before)
            state = one.state
            if one.key[0] in self._on_gpu:
                await self._collect([(one, self._on_gpu.gradient(*one.key))])
                return
            if self.is_spilled(one.key[0]) and state.lease is None and (state.is_filled or not one.is_passing):
                await self._deliver_spilled(one)
                return
            if state.lease is None:
                state.lease = await self.memory.reserve(one.key)
            await self._collect([(one, state.lease.array)])

    @contextlib.contextmanager
    def _arriving(self, run: Sequence[_Delivery]) -> Iterator[None]:
        """Tell those who wait for these deliveries when and how they end."""
        try:
            yield
        except BaseException as error:
            for one in run:
                one.arrived.set_exception(error)
                one.arrived.exception()  # retrieved: this task raises it, too
            raise
        else:
            for one in run:
                one.arrived.set_result(None)
        finally:
            self.on_change()

    async def _deliver_spilled(self, one: _Delivery) -> None:
        spill, index = self._need_spill(), self._index(*one.key)
        if self.kept_by is not None:
            await asyncio.shield(self.kept_by)
        lease = await self.memory.reserve_staging(one.key, spill.padded_bytes(index))
        try:
            if one.state.is_filled:
                await spill.read(index, lease.array, Priority.DEMAND)
            await self._collect([(one, lease.array)])
            await spill.write(index, lease.array)
            if one.is_final and one.arrived is one.state.awaited:
                one.state.staged = lease
        finally:
            if one.state.staged is not lease:
                lease.free()

    async def _collect(self, deliveries: Sequence[tuple[_Delivery, Bytes | Span]]) -> None:
        """Copy deliveries, and measure those that are final, in one job."""
        others = f" and {len(deliveries) - 1} more" if len(deliveries) > 1 else ""
        name = self._groups[deliveries[0][0].key[0]].name + others
        here = [(one, memory) for one, memory in deliveries if not isinstance(memory, Span)]
        jobs = [self._filling(one, memory) for one, memory in here]
        nbytes = sum(self._placement.gradient_bytes(*one.key) for one, _ in here)

        def job() -> None:
            for fill in jobs:
                fill()

        for mark in dict.fromkeys(one.after for one, _ in deliveries):
            await self._marks.reached(mark)
        with self._tracer.measure("reduce", name):
            if jobs:
                await self._workers.perform(nbytes <= self._device.at_once_bytes, Priority.UPDATE, job)
            else:  # on the GPU: no job has both kinds
                runs = self._neighbours(one for one, _ in deliveries)
                await self._on_gpu.collect([self._collection(run) for run in runs])
        for one, _ in deliveries:
            one.state.is_filled = True
            one.state.is_measured = one.is_final

    def _filling(self, one: _Delivery, memory: Bytes) -> Filling:
        group, chunk = one.key
        start, stop = self._placement.chunk(group, chunk)
        return Filling(
            device=self._device, dtype=self._groups[group].dtype, memory=memory, elements=stop - start,
            is_new=not one.state.is_filled, parts=one.parts, after=one.after,
            partials=self._partials_of(group, start, stop) if one.is_final else None,
        )  # fmt: skip

    def _neighbours(self, deliveries: Iterable[_Delivery]) -> list[list[_Delivery]]:
        """Split deliveries into runs of neighbouring chunks on the device that are collected in the same way."""
        runs: list[list[_Delivery]] = []
        for one in deliveries:
            group, chunk = one.key
            last = runs[-1][-1] if runs else None
            if (
                last is not None
                and (last.key, last.is_final) == ((group, chunk - 1), one.is_final)
                and last.state.is_filled == one.state.is_filled
                and (len(runs[-1]) + 1) * self._placement.chunk_elements <= MOST_MEASURED
            ):
                runs[-1].append(one)
            else:
                runs.append([one])
        return runs

    def _collection(self, run: Sequence[_Delivery]) -> Collection:
        """One collection for a run of neighbouring chunks on the device."""
        group, first = run[0].key
        edges = [self._placement.chunk(*one.key) for one in run]
        start, stop = edges[0][0], edges[-1][1]
        parts: list[Piece] = []
        for one, (chunk_start, _) in zip(run, edges):
            parts += [Piece(part.start + chunk_start - start, part.gradient, part.is_first) for part in one.parts]
            one.parts.clear()
        return Collection(
            dtype=self._groups[group].dtype, parts=parts, total=self._on_gpu.gradient(group, first, len(run)),
            is_new=not run[0].state.is_filled,
            out=self._partials_of(group, start, stop) if run[0].is_final else None,
        )  # fmt: skip

    async def take_partials(self) -> list[npt.NDArray[np.float64]]:
        """Per group, the sums of squares of fixed blocks, whatever the order in which gradients arrived.

        They are taken once a step, also when some gradients were applied and dropped already.
        """
        await together(
            self._measure(group, chunk, state)
            for (group, chunk), state in self._chunks.items()
            if state.is_filled and not state.is_measured
        )
        taken = [partials.copy() for partials in self._partials]
        for partials in self._partials:
            partials[:] = 0  # blocks without a gradient in the next step add nothing to its norm
        return taken

    async def measure(self, group: int, chunk: int, gradient: Array) -> None:
        """Measure what `fetch` has returned, for an update that comes before `take_partials` and will use it up.

        Nearly always it was measured on its way. It was not if the last backward brought nothing of this chunk.
        """
        state = self._chunks[group, chunk]
        if not state.is_measured:
            await self._measure(group, chunk, state, gradient)

    async def _measure(self, group: int, chunk: int, state: _Chunk, gradient: Array | None = None) -> None:
        dtype, (start, stop) = self._groups[group].dtype, self._placement.chunk(group, chunk)
        partials = self._partials_of(group, start, stop)

        def measure(array: Bytes) -> None:
            square_sums(dtype, elements_of(array, dtype, stop - start), partials)

        async with state.measuring:
            if state.is_measured:
                return
            if gradient is not None:
                await self._workers.submit(Priority.UPDATE, square_sums, dtype, gradient, partials)
            elif group in self._on_gpu:
                span = self._on_gpu.gradient(group, chunk)
                await self._on_gpu.collect([Collection(dtype, [], span, is_new=False, out=partials)])
            elif state.lease is not None:
                await self._workers.submit(Priority.UPDATE, measure, state.lease.array)
            else:
                spill, index = self._need_spill(), self._index(group, chunk)
                async with self.memory.staging.lent(spill.padded_bytes(index)) as array:
                    await spill.read(index, array, Priority.DEMAND)
                    await self._workers.submit(Priority.UPDATE, measure, array)
            state.is_measured = True

    def is_coming(self, group: int, chunk: int) -> bool:
        """Whether a gradient of this chunk was taken off autograd and is on its way."""
        return self.coming(group, chunk) is not None

    def coming(self, group: int, chunk: int) -> asyncio.Future[None] | None:
        """A future that ends when all that is on its way now for this chunk has arrived; None if nothing is."""
        last = self._chunks[group, chunk].last
        return None if last is None or last.done() else last

    def awaited(self, group: int, chunk: int) -> asyncio.Future[None] | None:
        """As `coming`, for an update that needs nothing else: the gradient then stays in memory until `let_go`."""
        coming = self.coming(group, chunk)
        if coming is not None:
            self.let_go(group, chunk)  # what was staged before is only a part of it
            self._chunks[group, chunk].awaited = coming
        return coming

    def let_go(self, group: int, chunk: int) -> None:
        """No update waits for this chunk, or it has been applied: free the memory of a gradient that is on NVMe."""
        state = self._chunks[group, chunk]
        state.awaited = None
        if state.staged is not None:
            state.staged.free()
            state.staged = None

    async def arrived(self, group: int, chunk: int) -> None:
        """Wait until nothing of this chunk is on its way."""
        if (coming := self.coming(group, chunk)) is not None:
            await asyncio.shield(coming)

    def is_filled(self, group: int, chunk: int) -> bool:
        """Whether any gradient of this chunk arrived in this step."""
        return self._chunks[group, chunk].is_filled

    async def fetch(self, group: int, chunk: int, into: Bytes) -> Array:
        """The gradient of one chunk as kernels see it.

        Args:
            into: memory of padded length; a gradient that is not in CPU memory is read into it.
        """
        await self.arrived(group, chunk)
        state = self._chunks[group, chunk]
        lease = state.lease or state.staged
        start, stop = self._placement.chunk(group, chunk)
        if group in self._on_gpu:
            span = self._on_gpu.gradient(group, chunk)
            there = (span.storage, span.offset, into[: span.nbytes], Reached())
            await self._on_gpu.workers.submit(Priority.UPDATE, self._device.copy_out_range, *there)
        elif lease is None:
            await self._need_spill().read(self._index(group, chunk), into, Priority.UPDATE)
        source = lease.array if lease is not None else into
        return elements_of(source, self._groups[group].dtype, stop - start)

    async def read(self, group: int, start: int, stop: int) -> Array:
        """Elements `[start, stop)` of a group's gradient, zero where none arrived."""
        found = np.zeros(stop - start, ELEMENT[self._groups[group].dtype])
        for chunk, (first, last) in enumerate(self._placement.chunks(group)):
            if first < stop and last > start and self._chunks[group, chunk].is_filled:
                async with self._room(group, chunk) as room:
                    values = await self.fetch(group, chunk, room)
                    a, b = max(start, first), min(stop, last)
                    found[a - start : b - start] = values[a - first : b - first]
        return found

    def _room(self, group: int, chunk: int) -> AbstractAsyncContextManager[Bytes]:
        """Memory that `fetch` may read a chunk into."""
        nbytes = self._placement.gradient_bytes(group, chunk)
        if self.is_spilled(group):
            return self.memory.staging.lent(nbytes)
        return contextlib.nullcontext(np.empty(nbytes if group in self._on_gpu else 0, np.uint8))

    async def keep(self, group: int, chunk: int) -> None:
        """Write a chunk that lives in CPU memory to its pack, for a commit; clear the record of an empty chunk."""
        state, pack, index = self._chunks[group, chunk], self._need_spill(), self._index(group, chunk)
        if not state.is_filled:
            pack.current[index] = None
        elif state.lease is not None:
            await pack.write(index, state.lease.array)

    async def restore(self) -> None:
        """Restore the gradients that the opened generation keeps."""
        await together(self._restore_chunk(*key) for key in self._chunks)

    async def _restore_chunk(self, group: int, chunk: int) -> None:
        state, pack, index = self._chunks[group, chunk], self._need_spill(), self._index(group, chunk)
        if pack.current[index] is None:
            return
        if not self.is_spilled(group):
            state.lease = await self.memory.reserve((group, chunk))
            await pack.read(index, state.lease.array, Priority.DEMAND)
        state.is_filled = state.is_measured = True  # by the step that has left it

    def drop(self, group: int, chunk: int) -> None:
        """The gradient of this chunk is used up."""
        self.let_go(group, chunk)
        state = self._chunks[group, chunk]
        if state.lease is not None:
            state.lease.free()
        self._chunks[group, chunk] = _Chunk()

    def drop_all(self) -> None:
        """Forget all gradients."""
        for key in self._chunks:
            self.drop(*key)

    async def discard(self, groups: Iterable[int]) -> None:
        """Forget what has arrived of these groups in this step, as if there had been no backward."""
        for group in groups:
            self._partials[group][:] = 0
            for chunk in range(self._placement.chunk_count(group)):
                await self.arrived(group, chunk)
                self.drop(group, chunk)

    def _partials_of(self, group: int, start: int, stop: int) -> npt.NDArray[np.float64]:
        return self._partials[group][start // BLOCK : -(-stop // BLOCK)]

    def _need_spill(self) -> SlotPack:
        if self._spill is None:
            raise RuntimeError("a gradient was placed on NVMe, but there is no store")
        return self._spill
