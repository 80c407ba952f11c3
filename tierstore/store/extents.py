"""Named tensors as one extent of chunks.

Scope: offsets and the chunk grid of a set of tensors; views of them on the device; which tensors can be stored.
Not here: the places where the bytes of an extent can be, and copying between them (`routes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.alignment import padded
from tierstore.errors import ConfigError, FormatError
from tierstore.pack.checked import list_of, number_of, text_of
from tierstore.pack.layout import ChunkSpec, check_plain_name, quoted, tensor_bytes

_PACK_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
"""Dtypes that a safetensors reader shows as they are; tensors of all others are stored as U8."""


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
        """Lay out tensors, each given as (name, dtype, shape)."""
        offsets, position = [0] * len(tensors), 0
        for index in sorted(range(len(tensors)), key=lambda i: -tensors[i][1].itemsize):
            offsets[index] = position
            position = TensorSlot(*tensors[index], position).stop
        return cls(tuple(TensorSlot(*item, offset) for item, offset in zip(tensors, offsets)), chunk_bytes)

    @property
    def nbytes(self) -> int:
        return max((slot.stop for slot in self.slots), default=0)

    def chunks(self) -> list[Chunk]:
        """All chunks; the last one may be shorter, and an extent without bytes has none."""
        starts = range(0, self.nbytes, self.chunk_bytes)
        return [Chunk(i, start, min(start + self.chunk_bytes, self.nbytes)) for i, start in enumerate(starts)]

    def parts(self, chunk: Chunk) -> Iterator[tuple[TensorSlot, int, int]]:
        """The tensors of a chunk in the order of their bytes, each with the range of its own bytes that is in it."""
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            start, stop = max(slot.offset, chunk.start), min(slot.stop, chunk.stop)
            if start < stop:
                yield slot, start - slot.offset, stop - slot.offset

    def chunk_specs(self, name: str) -> list[ChunkSpec]:
        """The chunks as they are laid out in a pack of this extent alone."""
        specs = []
        for chunk in self.chunks():
            parts = list(self.parts(chunk))
            tensors = tuple(slot.name for slot, *_ in parts)
            specs.append(ChunkSpec(f"{name}/{chunk.index}", tuple(_section(*part) for part in parts), tensors))
        return specs

    def views(self, storage: torch.UntypedStorage) -> dict[str, torch.Tensor]:
        """The tensors as views of a storage that holds the extent."""
        with torch.inference_mode(False):  # an inference tensor would have no version counter
            return {slot.name: _view(storage, slot) for slot in self.slots}

    def describe(self) -> list[list[Any]]:
        """The tensors as plain data."""
        return [[slot.name, str(slot.dtype).removeprefix("torch."), list(slot.shape)] for slot in self.slots]

    @classmethod
    def from_description(cls, rows: Any, chunk_bytes: int) -> ExtentLayout:
        """The layout that `describe` has described.

        Raises:
            FormatError: this torch does not have one of the dtypes, or `rows` is not a description.
        """
        tensors = []
        for row in list_of(rows, "tensors"):
            name, dtype, shape = list_of(row, "a tensor of the store", 3)
            what = f"tensor {quoted(text_of(name, 'the name of a tensor'))} of the store"
            found = getattr(torch, text_of(dtype, f"the dtype of {what}"), None)
            if not isinstance(found, torch.dtype):
                raise FormatError(f"{what} has the dtype {dtype[:40]!r}, which torch {torch.__version__} does not have")
            sizes = tuple(number_of(size, 0, 2**63 - 1, f"a size of {what}") for size in list_of(shape, what))
            tensor_bytes(name, "C64", sizes)  # refuses more elements than fit in 63 bits
            tensors.append((name, found, sizes))
        if len({name for name, *_ in tensors}) < len(tensors):
            raise FormatError("the manifest lists a tensor twice in one entry")
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
        ConfigError: names the entry or the tensor; nothing was changed.
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of an entry is text, not {type(name).__name__}")
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"an entry is a mapping of names to tensors, not {type(tensors).__name__}")
    _check_name(f"entry {name!r}", f"{name}/")  # also if it has no tensors
    for key, tensor in tensors.items():
        what = f"tensor {key!r} of {name!r}"
        if not isinstance(key, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{what}: names are text and values are tensors, not {type(tensor).__name__}")
        _check_name(what, f"{name}/{key}")
        is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # may have no bytes at all
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or is_wrapper:
            kind = "nested" if tensor.is_nested else f"{tensor.layout} {tensor.dtype}"
            kind = f"a {type(tensor).__name__}" if is_wrapper and not tensor.is_nested else kind
            raise ConfigError(f"{what} is {kind}; only dense tensors can be stored")
        if tensor.device.type != "cpu" and tensor.device != device:
            raise ConfigError(f"{what} is on {tensor.device}; give it on the CPU or on the store's device, {device}")


def _check_name(what: str, name: str) -> None:
    try:
        check_plain_name(name)
    except FormatError as error:
        raise ConfigError(f"{what}: {error}") from None
