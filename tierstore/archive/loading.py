"""Packs into memory, as tensors of torch.

Scope: `load_pack`. Not here: models (`train/loading.py`), verified reads (`reading.py`).
Owner: each tensor keeps the memory of its group alive; the memory goes with the last of them.

[Note: in place] A group's memory is one mapping that asks for huge pages, and its raw chunks are read straight into
their places there: no second copy, and no buffer. Encoded ones are read into a buffer and decoded to their places.
New memory is zeroed by the kernel when it is first touched, and a direct read is not issued before all its pages are
there. So each chunk's pages are touched before the chunk is handed to a thread, while all threads are busy.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tierstore.alignment import ALIGNMENT, padded
from tierstore.archive import flow
from tierstore.archive.dtypes import torch_dtype
from tierstore.archive.gather import OpenFiles
from tierstore.archive.opening import ArchiveFile, PlacedChunk, open_archive, placed_chunks
from tierstore.archive.reading import read_content
from tierstore.config import Codec
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend
from tierstore.io.memory import HUGE_PAGE_BYTES, Bytes, aligned_room, huge_pages
from tierstore.pack.archive import ArchiveGroup
from tierstore.pack.layout import TensorEntry, quoted

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def load_pack(path: Paths, names: str | Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a pack in CPU memory, every byte verified.

    Reads bypass the page cache, several at once. Names that shared a tensor in the checkpoint share it here.

    Args:
        path: a pack, a directory of packs, or all directories over which one is striped.
        names: load only these tensors, or this one; of others only what shares a chunk with them is read.

    Raises:
        ConfigError: the pack does not have one of the names; there is no path, or one that is no part of the pack.
        ChecksumMismatch: names the damaged chunk and its tensors.
        FormatError, StorageError: it is not a pack, or it cannot be read.
    """
    paths = [Path(path)] if isinstance(path, str | os.PathLike) else [Path(one) for one in path]
    files = open_archive(paths)
    wanted = _wanted(files, names)
    stored = set(wanted.values())
    memory = {
        group.position: _mapping(group)
        for file in files
        for group in file.archive.groups
        if any(entry.name in stored for entry in group.tensors)
    }
    _fill(files, stored, memory)
    entries = {
        entry.name: (entry, memory[group.position])
        for file in files
        for group in file.archive.groups
        if group.position in memory
        for entry in group.tensors
    }
    tensors = {name: _tensor(*entries[name]) for name in dict.fromkeys(wanted.values())}
    return {alias: tensors[name] for alias, name in wanted.items()}


def _wanted(files: Sequence[ArchiveFile], names: str | Iterable[str] | None) -> dict[str, str]:
    """From each requested name to the name under which its tensor is stored."""
    known: dict[str, str] = {}
    for file in files:
        known |= {entry.name: entry.name for entry in file.archive.tensors}
        known |= file.archive.aliases
    if names is None:
        return known
    asked = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(f"{files[0].path} holds no tensor {quoted(unknown[0])}; it holds {len(known)} others")
    return {name: known[name] for name in asked}


def _mapping(group: ArchiveGroup) -> Bytes:
    """Memory for a group, at a huge-page boundary if it is large; pages that are never read take no memory."""
    size = padded(group.content_bytes)
    return aligned_room(size) if size < HUGE_PAGE_BYTES else huge_pages(size)[1]


def _fill(files: Sequence[ArchiveFile], wanted: Collection[str], memory: Mapping[int, Bytes]) -> None:
    chunks = [
        placed
        for placed in placed_chunks(files)
        if placed.group.position in memory and any(name in wanted for name in placed.tensors())
    ]
    largest = max((one.chunk.stored_bytes for one in chunks if one.group.codec is not Codec.NONE), default=1)
    with OpenFiles(Backend()) as opened:

        def read(placed: PlacedChunk, buffer: Bytes) -> None:
            end = placed.begin + placed.chunk.content_bytes
            destination = memory[placed.group.position][placed.begin : end]
            if placed.chunk.stored_bytes == placed.chunk.content_bytes:
                buffer = memory[placed.group.position][placed.begin : padded(end)]
            read_content(opened, placed, buffer, destination)

        flow.run(_touched(chunks, memory), read, flow.Room(flow.THREADS, padded(largest), flow.QUEUED))


def _touched(chunks: Iterable[PlacedChunk], memory: Mapping[int, Bytes]) -> Iterator[PlacedChunk]:
    """The same chunks; the pages of each one's place in memory are touched just before it. See [Note: in place]."""
    for placed in chunks:
        memory[placed.group.position][placed.begin : placed.begin + placed.chunk.content_bytes : ALIGNMENT] = 0
        yield placed


def _tensor(entry: TensorEntry, memory: Bytes) -> torch.Tensor:
    dtype, shape = torch_dtype(entry.name, entry.dtype, entry.shape)
    if entry.begin == entry.end:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # Not a view of one tensor: each has a storage of its own size over the shared memory, which it keeps alive.
    return torch.frombuffer(memory[entry.begin : entry.end], dtype=torch.uint8).view(dtype).view(shape)
