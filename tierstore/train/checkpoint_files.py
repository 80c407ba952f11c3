"""The files of a safetensors checkpoint: which tensors they hold, and reading them piece by piece.

Scope: one file, or shards with an index; bounded memory.
Not here: which tensor goes where (`checkpoints.py`, `conversion.py`); headers (`pack/`).
Owner: whoever makes `CheckpointFiles` closes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.alignment import ALIGNMENT, padded
from tierstore.archive.dtypes import TORCH_DTYPES, torch_dtype
from tierstore.archive.gather import OpenFiles
from tierstore.archive.sources import INDEX, SINGLE, indexed_files
from tierstore.errors import FormatError
from tierstore.io.backend import Backend
from tierstore.io.memory import aligned_room
from tierstore.pack.validate import Header, read_header
from tierstore.train.filling import PIECE_ELEMENTS


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file; `begin` is in bytes from the start of the file, `shape` as torch counts."""

    path: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]


class CheckpointFiles:
    """The files of a checkpoint, opened when first read; O_DIRECT, so that the page cache is left alone."""

    def __init__(self) -> None:
        self._files = OpenFiles(Backend())

    def close(self) -> None:
        """Close all of them, also when the system refuses one."""
        self._files.close()

    def pieces(self, stored: Stored) -> Iterator[tuple[int, torch.Tensor]]:
        dtype = _dtype(stored)
        elements = math.prod(stored.shape)
        for start in range(0, elements, PIECE_ELEMENTS):
            count = min(PIECE_ELEMENTS, elements - start)
            yield start, self._read(stored.path, stored.begin + start * dtype.itemsize, count, dtype)

    def whole(self, stored: Stored) -> torch.Tensor:
        values = torch.empty(stored.shape, dtype=_dtype(stored), device="cpu")
        for start, piece in self.pieces(stored):
            values.view(-1)[start : start + piece.numel()] = piece
        return values

    def _read(self, path: Path, begin: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        first, end = begin - begin % ALIGNMENT, begin + elements * dtype.itemsize
        room = aligned_room(padded(end - first))
        self._files(path).read_into(room, first, required_bytes=end - first)
        content = torch.from_numpy(room)[begin - first : end - first]
        # Old files have headers of any length, and a view as another dtype needs an offset that its size divides.
        aligned = content if begin % dtype.itemsize == 0 else content.clone()
        return aligned.view(dtype)


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint in `directory`, by name; reads the headers only.

    Raises:
        FormatError: no checkpoint, or not safetensors.
        StorageError: a file cannot be read.
    """
    if (directory / SINGLE).is_file():
        header = read_header(directory / SINGLE)
        return _tensors_in(directory / SINGLE, header, header.tensors)
    if not directory.is_dir():
        raise FormatError(f"{directory} is no directory with a checkpoint")
    if not (directory / INDEX).is_file():
        raise FormatError(f"{directory} holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")
    found: dict[str, Stored] = {}
    for path, header, names in indexed_files(directory):
        found |= _tensors_in(path, header, names)
    return found


def _tensors_in(path: Path, header: Header, names: Iterable[str]) -> dict[str, Stored]:
    found = {}
    for name in names:
        entry = header.tensors[name]
        is_known = entry.dtype in TORCH_DTYPES  # another dtype is refused only if the model needs it
        shape = torch_dtype(name, entry.dtype, entry.shape)[1] if is_known else entry.shape
        found[name] = Stored(path, header.data_start + entry.begin, entry.dtype, shape)
    return found


def _dtype(stored: Stored) -> torch.dtype:
    if stored.dtype not in TORCH_DTYPES:
        raise FormatError(f"{stored.path}: tensors of dtype {stored.dtype} cannot be read")
    return TORCH_DTYPES[stored.dtype]
