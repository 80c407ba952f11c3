"""Named tensors as one extent of chunks, the places where its bytes can be, and copying from one place to another.

Scope: offsets and the chunk grid of a set of tensors; views of them on the device; one transfer between two places.
Not here: which place is whose home and when it is given back (`tensors.py`); budgets (`copies.py`).
Owner: the loop thread owns places and leases; workers run the jobs of a transfer.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tierstore.alignment import ALIGNMENT, padded
from tierstore.config import format_size
from tierstore.device.streams import ComputeDevice, Mark
from tierstore.errors import BudgetError, ConfigError, FormatError
from tierstore.io.memory import Lease, Pool
from tierstore.io.workers import Priority, WorkerPool
from tierstore.pack.checked import list_of, number_of, text_of
from tierstore.pack.layout import ChunkSpec, check_plain_name, quoted, tensor_bytes
from tierstore.store.slots import SlotPack
from tierstore.store.tasks import together

Bytes = npt.NDArray[np.uint8]

_PACK_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
"""Dtypes that a safetensors reader shows as they are; all others are bytes in the file."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor and the bytes `[offset, offset + nbytes)` that it takes in the extent, contiguous."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `[start, stop)` of an extent: what one transfer moves."""

    index: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def padded_bytes(self) -> int:
        return padded(self.nbytes)


@dataclass(frozen=True)
class ExtentLayout:
    """Tensors back to back, wider dtypes first so that each is aligned, cut at multiples of `chunk_bytes`.

    Attributes:
        slots: in the order in which the tensors were given.
        chunk_bytes: a multiple of 4096, so no element is cut.
    """

    slots: tuple[TensorSlot, ...]
    chunk_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], chunk_bytes: int) -> ExtentLayout:
        """Lay out (name, dtype, shape)."""
        offsets, position = [0] * len(tensors), 0
        for index in sorted(range(len(tensors)), key=lambda i: -tensors[i][1].itemsize):
            offsets[index] = position
            position = TensorSlot(*tensors[index], position).stop
        return cls(tuple(TensorSlot(*item, offset) for item, offset in zip(tensors, offsets)), chunk_bytes)

    @property
    def nbytes(self) -> int:
        return max((slot.stop for slot in self.slots), default=0)

    def chunks(self) -> list[Chunk]:
        """The grid; the last chunk is ragged, and an extent without bytes has none."""
        starts = range(0, self.nbytes, self.chunk_bytes)
        return [Chunk(i, start, min(start + self.chunk_bytes, self.nbytes)) for i, start in enumerate(starts)]

    def parts(self, chunk: Chunk) -> Iterator[tuple[TensorSlot, int, int]]:
        """The tensors of a chunk in the order of their bytes, each with the range of its own bytes that is inside."""
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            start, stop = max(slot.offset, chunk.start), min(slot.stop, chunk.stop)
            if start < stop:
                yield slot, start - slot.offset, stop - slot.offset

    def chunk_specs(self, name: str) -> list[ChunkSpec]:
        """The chunks as they stand in a pack of their own."""
        specs = []
        for chunk in self.chunks():
            parts = list(self.parts(chunk))
            tensors = tuple(slot.name for slot, *_ in parts)
            specs.append(ChunkSpec(f"{name}/{chunk.index}", tuple(_section(*part) for part in parts), tensors))
        return specs

    def views(self, storage: torch.UntypedStorage) -> dict[str, torch.Tensor]:
        """The tensors in a storage that holds the extent."""
        with torch.inference_mode(False):  # an inference tensor would have no version counter
            return {slot.name: _view(storage, slot) for slot in self.slots}

    def describe(self) -> list[list[Any]]:
        """The tensors as plain data."""
        return [[slot.name, str(slot.dtype).removeprefix("torch."), list(slot.shape)] for slot in self.slots]

    @classmethod
    def from_description(cls, rows: Any, chunk_bytes: int) -> ExtentLayout:
        """What `describe` gave.

        Raises:
            FormatError: a dtype that this torch does not have, or not a description.
        """
        tensors = []
        for row in list_of(rows, "tensors"):
            name, dtype, shape = list_of(row, "a tensor of the store", 3)
            what = f"tensor {quoted(text_of(name, 'the name of a tensor'))} of the store"
            found = getattr(torch, text_of(dtype, f"the dtype of {what}"), None)
            if not isinstance(found, torch.dtype):
                raise FormatError(f"{what} has the dtype {dtype[:40]!r}, which is none of torch {torch.__version__}")
            sizes = tuple(number_of(size, 0, 2**63 - 1, f"a size of {what}") for size in list_of(shape, what))
            tensor_bytes(name, "C64", sizes)  # more elements than anybody has
            tensors.append((name, found, sizes))
        if len({name for name, *_ in tensors}) < len(tensors):
            raise FormatError("a tensor of the store stands twice in its entry")
        return cls.of(tensors, chunk_bytes)


def _section(slot: TensorSlot, start: int, stop: int) -> tuple[str, str, int]:
    if slot.dtype not in _PACK_DTYPES:
        return slot.name, "U8", stop - start
    return slot.name, _PACK_DTYPES[slot.dtype], (stop - start) // slot.dtype.itemsize


def _view(storage: torch.UntypedStorage, slot: TensorSlot) -> torch.Tensor:
    strides = [1] * len(slot.shape)
    for axis in range(len(slot.shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(slot.shape[axis], 1)
    empty = torch.empty(0, dtype=slot.dtype, device=storage.device)
    # set_ would enlarge a storage to hold an offset past its end, which an empty tensor may have.
    offset = slot.offset // slot.dtype.itemsize if slot.nbytes else 0
    return empty.set_(storage, offset, slot.shape, tuple(strides))


def check_tensors(name: str, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Refuse what cannot be stored as plain bytes.

    Raises:
        ConfigError: names the tensor; nothing was changed.
    """
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"an entry is a mapping of names to tensors, not {type(tensors).__name__}")
    for key, tensor in tensors.items():
        what = f"tensor {key!r} of {name!r}"
        if not isinstance(key, str) or not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{what}: names are text and values are tensors, not {type(tensor).__name__}")
        try:
            check_plain_name(f"{name}/{key}")
        except FormatError as error:
            raise ConfigError(f"{what}: {error}") from None
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "nested" if tensor.is_nested else f"{tensor.layout} {tensor.dtype}"
            raise ConfigError(f"{what} is {kind}; only dense tensors can be stored")
        if tensor.device.type != "cpu" and tensor.device != device:
            raise ConfigError(f"{what} is on {tensor.device}; give it on the CPU or on the store's device, {device}")


class Place:
    """Where the bytes of one extent are, or are to be."""

    def borrow(self, chunk: Chunk) -> Bytes | None:
        """The place's own memory for a chunk (padded length), if the chunk lies in one piece of it."""
        return None

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        """The chunk, and zeros as padding, into `buffer` (padded length). Threads: a worker."""
        raise NotImplementedError

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        """The chunk from `buffer` into this place. Threads: a worker."""
        raise NotImplementedError


class PackPlace(Place):
    """A pack, whose jobs are its own."""

    def __init__(self, pack: SlotPack) -> None:
        self.pack = pack


class Nowhere(Place):
    """Takes every chunk and keeps none: what is copied here was read and verified."""

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        pass


class HostPlace(Place):
    """Leases of the arena; usually one per chunk, smaller ones where free memory is in pieces."""

    def __init__(self, leases: list[Lease]) -> None:
        self._leases = leases
        self._starts = [0]
        for lease in leases:
            self._starts.append(self._starts[-1] + len(lease.array))

    def borrow(self, chunk: Chunk) -> Bytes | None:
        index = bisect.bisect_left(self._starts, chunk.start)
        is_whole = self._starts[index] == chunk.start and self._starts[index + 1] >= chunk.start + chunk.padded_bytes
        return self._leases[index].array[: chunk.padded_bytes] if is_whole else None

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        for piece, start in self._pieces(chunk):
            buffer[start : start + len(piece)] = piece

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        for piece, start in self._pieces(chunk):
            piece[:] = buffer[start : start + len(piece)]

    def _pieces(self, chunk: Chunk) -> Iterator[tuple[Bytes, int]]:
        """Memory of a chunk, with the offset in the chunk of each part."""
        end = chunk.start + chunk.padded_bytes
        for index in range(bisect.bisect_right(self._starts, chunk.start) - 1, len(self._leases)):
            first, last = self._starts[index], self._starts[index + 1]
            if first >= end:
                return
            start = max(first, chunk.start)
            yield self._leases[index].array[start - first : min(last, end) - first], start - chunk.start

    def free(self) -> None:
        """Give the memory back."""
        for lease in self._leases:
            lease.free()
        self._leases = []


class DevicePlace(Place):
    """A storage of the compute device.

    Args:
        after: the work that must be over before the storage is read.
    """

    def __init__(self, device: ComputeDevice, storage: torch.UntypedStorage, after: Mark) -> None:
        self._device = device
        self._storage = storage
        self._after = after

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        self._device.copy_out_range(self._storage, chunk.start, buffer[: chunk.nbytes], self._after)
        buffer[chunk.nbytes :] = 0

    def drain(self, chunk: Chunk, buffer: Bytes) -> None:
        self._device.copy_in(self._storage, chunk.start, buffer[: chunk.nbytes])


class TensorsPlace(Place):
    """Tensors that a caller gives; use `flattened` to make one."""

    def __init__(self, device: ComputeDevice, layout: ExtentLayout, flat: dict[str, torch.Tensor], after: Mark) -> None:
        self._device = device
        self._layout = layout
        self._flat = flat
        self._after = after

    def fill(self, chunk: Chunk, buffer: Bytes) -> None:
        parts, targets, position = [], [], 0
        for slot, start, stop in self._layout.parts(chunk):
            parts.append(self._flat[slot.name][start:stop])
            targets.append(buffer[position : position + stop - start])
            position += stop - start
        self._device.copy_out(parts, targets, self._after)
        buffer[position:] = 0


class Given(NamedTuple):
    """Tensors as a caller gives them, whole once `after` is reached; those of a device are contiguous."""

    tensors: dict[str, torch.Tensor]
    after: Mark


def taken(device: ComputeDevice, tensors: Mapping[str, torch.Tensor]) -> Given:
    """Take tensors. Call it in the caller's own turn of the loop: in the next one another stream may be current."""
    plain = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    # A launch does not block; a copy in CPU memory does, and is left to a worker.
    there = {name: tensor if tensor.device.type == "cpu" else tensor.contiguous() for name, tensor in plain.items()}
    return Given(there, device.record())


async def flattened(device: ComputeDevice, layout: ExtentLayout, given: Given, workers: WorkerPool) -> TensorsPlace:
    """Given tensors as a place to read from. One that is not contiguous is copied first, beside all budgets."""
    flat = {}
    for name, tensor in given.tensors.items():
        is_quick = tensor.is_contiguous()
        flat[name] = await workers.perform(is_quick, Priority.DEMAND, _flat_bytes, tensor)
    return TensorsPlace(device, layout, flat, given.after)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def reserve_pieces(pool: Pool, layout: ExtentLayout, smallest_bytes: int) -> HostPlace:
    """Memory for an extent, in chunks as long as free memory stands together, then in smaller pieces.

    Args:
        smallest_bytes: for the message, the cpu_memory that would be enough.

    Raises:
        BudgetError: less is free; nothing was reserved.
    """
    rest, free_bytes = padded(layout.nbytes), pool.capacity_bytes - pool.used_bytes
    if rest > free_bytes:
        raise BudgetError(
            f"cpu_memory: {format_size(rest)} needed, but {format_size(free_bytes)} are free beside the buffers; "
            f"the smallest cpu_memory that fits is {smallest_bytes} B; or move entries to another tier"
        )
    leases: list[Lease] = []
    size = layout.chunk_bytes
    while rest:
        size = min(size, rest)
        lease = pool.try_reserve(size)
        if lease is None:  # enough is free, so a piece of 4096 B always fits
            size = max(padded(size // 2), ALIGNMENT)
            continue
        leases.append(lease)
        rest -= size
    return HostPlace(leases)


@dataclass(frozen=True)
class Route:
    """What transfers share.

    Attributes:
        staging: memory that chunks pass on their way; prefetch has its own, so that demand never queues behind it.
    """

    workers: WorkerPool
    staging: Mapping[bool, Pool]

    async def copy(self, layout: ExtentLayout, source: Place, target: Place, priority: Priority) -> None:
        """All chunks of an extent, side by side.

        Cancellation: returns when no worker uses either place any more; the target's contents are then undefined.
        """
        await together(self._copy_chunk(chunk, source, target, priority) for chunk in layout.chunks())

    async def _copy_chunk(self, chunk: Chunk, source: Place, target: Place, priority: Priority) -> None:
        if (own := source.borrow(chunk)) is not None:
            await self._drain(chunk, own, target, priority)
        elif (own := target.borrow(chunk)) is not None:
            await self._fill(chunk, own, source, None, priority)
        else:
            lease = await self.staging[priority is Priority.PREFETCH].reserve(chunk.padded_bytes)
            try:
                await self._fill(chunk, lease.array, source, target, priority)
            finally:
                lease.free()

    async def _fill(self, chunk: Chunk, buffer: Bytes, source: Place, target: Place | None, priority: Priority) -> None:
        """Source to buffer, and on to the target in the same hop if a worker can write it."""
        then = partial(_nothing) if target is None or isinstance(target, PackPlace) else partial(target.drain, chunk)
        if isinstance(source, PackPlace):
            await source.pack.read_with(chunk.index, priority, lambda read: _in_turn(read, then, buffer))
        else:
            await self.workers.submit(priority, _in_turn, partial(source.fill, chunk), then, buffer)
        if isinstance(target, PackPlace):
            await target.pack.write(chunk.index, buffer, Priority.WRITE)

    async def _drain(self, chunk: Chunk, buffer: Bytes, target: Place, priority: Priority) -> None:
        if isinstance(target, PackPlace):
            await target.pack.write(chunk.index, buffer, Priority.WRITE)
        else:
            await self.workers.submit(priority, target.drain, chunk, buffer)


def _nothing(buffer: Bytes) -> None:
    pass


def _in_turn(first: Any, second: Any, buffer: Bytes) -> None:
    first(buffer)
    second(buffer)
