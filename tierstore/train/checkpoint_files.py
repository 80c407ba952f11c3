"""The files of a safetensors checkpoint: which tensors they hold, and reading them piece by piece.

Scope: one file, or shards with an index; packs, of which every byte that is read is verified; bounded memory.
Not here: which tensor goes where (`checkpoints.py`, `conversion.py`); headers (`pack/`); chunks (`archive/reading.py`).
Owner: whoever makes `CheckpointFiles` closes them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.alignment import ALIGNMENT, padded
from tierstore.archive.dtypes import TORCH_DTYPES, torch_dtype
from tierstore.archive.gather import OpenFiles
from tierstore.archive.opening import ArchiveFile, PlacedChunk, open_archive
from tierstore.archive.reading import read_content
from tierstore.archive.sources import INDEX, SINGLE, indexed_files, is_pack
from tierstore.errors import FormatError
from tierstore.io.backend import Backend
from tierstore.io.memory import Bytes, aligned_room
from tierstore.pack.layout import TensorEntry
from tierstore.pack.validate import read_header
from tierstore.train.filling import PIECE_ELEMENTS


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file.

    Attributes:
        begin: of its bytes, from the start of the file; of a pack, from the start of its group's content.
        shape: as torch counts.
        chunks: those that hold it; of a pack only.
    """

    path: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[PlacedChunk, ...] = ()

    @property
    def place(self) -> tuple[Path, int, int]:
        """Sorts tensors so that files are read from start to end."""
        return self.path, self.chunks[0].chunk.offset if self.chunks else 0, self.begin


class CheckpointFiles:
    """The files of a checkpoint, opened when first read; O_DIRECT, so that the page cache is left alone."""

    def __init__(self) -> None:
        self._files = OpenFiles(Backend())
        self._last: tuple[PlacedChunk, Bytes] | None = None  # a chunk, and its content

    def close(self) -> None:
        """Close all of them, also when the system refuses one."""
        self._files.close()

    def pieces(self, stored: Stored) -> Iterator[tuple[int, torch.Tensor]]:
        dtype = _dtype(stored)
        elements = math.prod(stored.shape)
        for start in range(0, elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, elements - start)
            begin, nbytes = stored.begin + start * dtype.itemsize, count * dtype.itemsize
            read = self._read_verified if stored.chunks else self._read
            content = read(stored, begin, nbytes)
            # Old files have headers of any length, and a view as another dtype needs an offset that its size divides.
            aligned = content if begin % dtype.itemsize == 0 else content.clone()
            yield start, aligned.view(dtype)

    def whole(self, stored: Stored) -> torch.Tensor:
        values = torch.empty(stored.shape, dtype=_dtype(stored), device="cpu")
        for start, piece in self.pieces(stored):
            values.view(-1)[start : start + piece.numel()] = piece
        return values

    def _read(self, stored: Stored, begin: int, nbytes: int) -> torch.Tensor:
        first, end = begin - begin % ALIGNMENT, begin + nbytes
        room = aligned_room(padded(end - first))
        self._files(stored.path).read_into(room, first, required_bytes=end - first)
        return torch.from_numpy(room)[begin - first : end - first]

    def _read_verified(self, stored: Stored, begin: int, nbytes: int) -> torch.Tensor:
        size, zero, end = stored.chunks[0].file.archive.chunk_bytes, stored.chunks[0].begin, begin + nbytes
        content = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        for placed in stored.chunks[(begin - zero) // size : -(-(end - zero) // size)]:
            low, high = max(begin, placed.begin), min(end, placed.begin + placed.chunk.content_bytes)
            part = self._verified(placed)[low - placed.begin : high - placed.begin]
            content[low - begin : high - begin] = torch.from_numpy(part)
        return content

    def _verified(self, placed: PlacedChunk) -> Bytes:
        """The content of a chunk; that of the last one is kept, because the next piece or tensor begins in it."""
        if self._last is None or self._last[0] is not placed:
            self._last = None  # its memory goes before there is more
            content_bytes = placed.chunk.content_bytes
            room = aligned_room(padded(content_bytes))
            is_raw = placed.chunk.stored_bytes == content_bytes
            read_content(self._files, placed, room if is_raw else aligned_room(len(room)), room[:content_bytes])
            self._last = placed, room[:content_bytes]
        return self._last[1]


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint in `directory`, by name; reads the headers only.

    Raises:
        FormatError: no checkpoint, or not safetensors; a pack that is damaged, or not all there.
        StorageError: a file cannot be read.
    """
    if not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        if not directory.is_dir():
            raise FormatError(f"{directory} is no directory with a checkpoint")
        raise FormatError(f"{directory} holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")
    if is_pack(directory):
        return _tensors_of_pack(open_archive([directory]))
    if (directory / SINGLE).is_file():
        header = read_header(directory / SINGLE)
        files = [(directory / SINGLE, header, list(header.tensors))]
    else:
        files = list(indexed_files(directory))
    return {
        name: _stored(path, header.data_start, header.tensors[name]) for path, header, names in files for name in names
    }


def _tensors_of_pack(files: Sequence[ArchiveFile]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for file in files:
        chunks = defaultdict(list)
        for placed in file.chunks():
            chunks[placed.group.position].append(placed)
        size = file.archive.chunk_bytes
        for group in file.archive.groups:
            for entry in group.tensors:
                held = chunks[group.position][entry.begin // size : -(-entry.end // size)]
                found[entry.name] = _stored(file.path, 0, entry, tuple(held))
        found |= {alias: found[name] for alias, name in file.archive.aliases.items()}
    return found


def _stored(path: Path, zero: int, entry: TensorEntry, chunks: tuple[PlacedChunk, ...] = ()) -> Stored:
    is_known = entry.dtype in TORCH_DTYPES  # another dtype is refused only if the model needs it
    shape = torch_dtype(entry.name, entry.dtype, entry.shape)[1] if is_known else entry.shape
    return Stored(path, zero + entry.begin, entry.dtype, shape, chunks)


def _dtype(stored: Stored) -> torch.dtype:
    if stored.dtype not in TORCH_DTYPES:
        raise FormatError(f"{stored.path}: tensors of dtype {stored.dtype} cannot be read")
    return TORCH_DTYPES[stored.dtype]
