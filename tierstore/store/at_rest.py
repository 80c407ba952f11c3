"""Whole chunks at rest, read and written between steps: to fill, export and verify them, and to measure the disk.

Scope: the weights and the state of one chunk together. The caller has flushed.
Not here: the update's own reads and writes (`updates.py`), when a generation is committed (`commits.py`).
Owner: the loop thread; workers read, write, encode and decode.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.io.memory import Bytes, Lease, Pool
from tierstore.io.tasks import together
from tierstore.io.workers import Priority, WorkerPool
from tierstore.kernels.adam import init_state, narrow, read_master, state_bytes_per_element, write_master
from tierstore.kernels.elements import elements_of, to_float
from tierstore.plan.placement import Kind, Placement
from tierstore.store.layout import ChunkIndex, GroupSpec
from tierstore.store.manifest import Generation
from tierstore.store.on_gpu import StateOnGpu
from tierstore.store.slots import SlotPack
from tierstore.store.trip_leases import TripLeases

Floats = npt.NDArray[np.float32]
_SOME_BYTES = 2**27


class ChunksAtRest:
    """Reads and writes chunks outside of a step.

    Args:
        packs: the pack of weights and the pack of state; empty without a store.
        resident: leases of the chunks that live in CPU memory.
        leases: lend memory.
        staging: memory for frozen groups, which are never updated.
        on_gpu: the state that lives on the GPU tier.
        compute: threads that encode and decode.
        on_change: called before the parts of a chunk that live in CPU memory are set. The last update may have left
            digests of them for a commit: if an error kept that commit from being made, flushing has not used them up.
        refuse_spoilt: raises if a failed update has left the data of the group in memory unusable.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        placement: Placement,
        packs: Sequence[SlotPack],
        resident: Mapping[Kind, Mapping[tuple[int, int], Lease]],
        leases: TripLeases,
        staging: Pool,
        on_gpu: StateOnGpu,
        compute: WorkerPool,
        on_change: Callable[[int, int], None],
        refuse_spoilt: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self._placement = placement
        self._packs = packs
        self._resident = resident
        self._leases = leases
        self._staging = staging
        self._on_gpu = on_gpu
        self._compute = compute
        self._on_change = on_change
        self._refuse_spoilt = refuse_spoilt
        self._index = ChunkIndex(groups, placement)

    async def put(self, group: int, chunk: int, master: Floats, *, keep_moments: bool = False) -> None:
        """Set the weights of a chunk from fp32 values; the moments become zero unless they are kept.

        The caller has flushed. The device copy is not touched.
        """
        async with self._working_memory(group, chunk) as (weights, state):
            if keep_moments:
                await self._read_chunk(group, chunk, weights, state)
            self._on_change(group, chunk)
            await self._compute.submit(Priority.UPDATE, self._encode, group, master, weights, state, keep_moments)
            await self._write_chunk(group, chunk, weights, state)

    async def read(self, group: int, chunk: int) -> Floats:
        """The fp32 master of a chunk at rest; the caller has flushed."""
        async with self._working_memory(group, chunk) as (weights, state):
            await self._read_chunk(group, chunk, weights, state)
            return await self._compute.submit(Priority.UPDATE, self._decode, group, chunk, weights, state)

    async def verify(self, generation: Generation) -> None:
        """Read every chunk of a generation.

        Raises:
            ChecksumMismatch: names the first damaged chunk.
        """
        for group, chunk in self._index.all():
            index = self._index(group, chunk)
            async with self._working_memory(group, chunk) as memory:
                for pack, array in zip(self._packs, memory):
                    if len(array):
                        await pack.read(index, array, Priority.DEMAND, record=generation.records[pack.kind][index])

    async def read_some(self) -> None:
        """Read some chunks side by side, as loads and updates will, so that the rate of the disk can be measured."""
        if self._packs:
            some = [key for key in self._index.all() if self._placement.trip_bytes(*key)]
            count = _SOME_BYTES // max((self._placement.trip_bytes(*key) for key in some), default=1)
            await together(self._read_one(*key) for key in some[:count])

    async def _read_one(self, group: int, chunk: int) -> None:
        async with self._working_memory(group, chunk) as (weights, state):
            await self._read_chunk(group, chunk, weights, state)

    @contextlib.asynccontextmanager
    async def _working_memory(self, group: int, chunk: int) -> AsyncIterator[tuple[Bytes, Bytes]]:
        """The memory of the weights and the state of a chunk: resident, or a lease that is freed at the end."""
        weights = self._resident[Kind.WEIGHTS].get((group, chunk))
        if group in self._on_gpu and weights is not None:
            async with self._on_gpu.memory(group, chunk) as memory:
                yield weights.array, memory
            return
        state = self._resident[Kind.STATE].get((group, chunk))
        is_trainable = self._groups[group].trainable
        weight_bytes = 0 if weights else self._placement.weight_bytes(group, chunk)
        state_bytes = 0 if state or not is_trainable else self._placement.state_bytes(group, chunk)
        lease, nbytes = None, weight_bytes + state_bytes
        if nbytes:
            lease = await (self._leases.borrow(nbytes) if is_trainable else self._staging.reserve(nbytes))
        rest = lease.array if lease else np.empty(0, np.uint8)
        try:
            yield (
                weights.array if weights else rest[:weight_bytes],
                state.array if state else rest[weight_bytes:nbytes],
            )
        finally:
            if lease:
                lease.free()

    async def _read_chunk(self, group: int, chunk: int, weights: Bytes, state: Bytes) -> None:
        self._refuse_spoilt(group)
        index, reads = self._index(group, chunk), list[Coroutine[Any, Any, Any]]()
        for position, (kind, array) in enumerate(((Kind.WEIGHTS, weights), (Kind.STATE, state))):
            if kind is Kind.STATE and group in self._on_gpu:
                reads.append(self._on_gpu.read(group, chunk, array))
            elif (group, chunk) not in self._resident[kind] and len(array):
                reads.append(self._packs[position].read(index, array, Priority.DEMAND))
        await together(reads)

    async def _write_chunk(self, group: int, chunk: int, weights: Bytes, state: Bytes) -> None:
        index = self._index(group, chunk)
        if group in self._on_gpu:
            await self._on_gpu.write(group, chunk, state)
        if self._packs:
            writes = [self._packs[0].write(index, weights)]
            if self._groups[group].trainable:
                writes.append(self._packs[1].write(index, state))
            await together(writes)

    def _encode(self, group: int, master: Floats, weights: Bytes, state: Bytes, keep_moments: bool) -> None:
        spec = self._groups[group]
        flat = elements_of(weights, spec.dtype, len(master))
        if spec.trainable:
            size = len(master) * state_bytes_per_element(spec.dtype)
            (write_master if keep_moments else init_state)(spec.dtype, master, flat, state[:size])
            state[size:] = 0
        else:
            narrow(spec.dtype, master, flat)
        weights[flat.nbytes :] = 0

    def _decode(self, group: int, chunk: int, weights: Bytes, state: Bytes) -> Floats:
        spec = self._groups[group]
        start, stop = self._placement.chunk(group, chunk)
        count = stop - start
        flat = elements_of(weights, spec.dtype, count)
        if not spec.trainable:
            return to_float(spec.dtype, flat)
        out = np.empty(count, np.float32)
        read_master(spec.dtype, flat, state[: count * state_bytes_per_element(spec.dtype)], out)
        return out
