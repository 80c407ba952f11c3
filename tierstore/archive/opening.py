"""Finding the files of an archive, and reading how each describes itself.

Scope: one pack, or the directories of several with their index; checks that all are there and belong together.
Not here: their data (`reading.py`).
Owner: none; plain records. Nothing stays open.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.archive.index import check_index
from tierstore.archive.sources import INDEX, SINGLE, refuse_unfinished, small_file
from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.io.backend import storage_errors
from tierstore.pack.archive import Archive, ArchiveChunk, ArchiveGroup, read_archive
from tierstore.pack.layout import SEAL_KEY, build_header, listed, quoted
from tierstore.pack.validate import Header, read_header


@dataclass(frozen=True)
class ArchiveFile:
    """One pack of an archive."""

    path: Path
    header: Header
    archive: Archive

    def chunks(self) -> list[PlacedChunk]:
        """In file order."""
        return [PlacedChunk(self, *rest) for rest in self.archive.chunks(self.header.data_start)]


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk, its file and its group; `begin` counts from the start of the group's content."""

    file: ArchiveFile
    group: ArchiveGroup
    begin: int
    chunk: ArchiveChunk

    def tensors(self) -> list[str]:
        """Names of the tensors of which it holds bytes."""
        end = self.begin + self.chunk.content_bytes
        return [entry.name for entry in self.group.tensors if entry.begin < end and entry.end > self.begin]

    def __str__(self) -> str:
        return (
            f"the chunk at byte {self.chunk.offset} of {self.file.path} (group {self.group.name}: "
            f"{listed(self.tensors(), 3)})"
        )


def open_archive(paths: Sequence[Path]) -> list[ArchiveFile]:
    """The files of an archive.

    Args:
        paths: a pack; or the directories over which it is striped, the one with the index first.

    Raises:
        ConfigError: no path is given, or one from which nothing would be read.
        FormatError: it is no archive, or is damaged or incomplete.
        StorageError: it cannot be read.
    """
    if not paths:
        raise ConfigError("no pack is named: give its file, or its directories")
    first = paths[0]
    with storage_errors("inspection", first):
        files = [_open(path) for path in _found(first, paths)]
    shards, identity = files[0].archive.shards, files[0].archive.identity
    if not first.is_dir() and shards > 1:
        raise FormatError(f"{first} is one of {shards} files; give the directory that holds the index of them")
    found = [file.path for file in files]
    refuse_idle(paths, [first, *found, *(path.parent for path in found if first.is_dir())])
    for number, file in enumerate(files):
        if (file.archive.identity, file.archive.shards, file.archive.shard) != (identity, shards, number):
            raise FormatError(
                f"{file.path} is file {file.archive.shard + 1} of {file.archive.shards} of archive "
                f"{file.archive.identity}, not file {number + 1} of {shards} of {identity}"
            )
    _check_apart(files)
    if len(files) != shards:
        raise FormatError(f"{first} holds {len(files)} of the {shards} files of a pack")
    return files


def _check_apart(files: Sequence[ArchiveFile]) -> None:
    """Each file was checked by itself; this checks that no name and no place in the order is in two files."""
    names: set[str] = set()
    positions: set[int] = set()
    for file in files:
        for name in (*(entry.name for entry in file.archive.tensors), *file.archive.aliases):
            if name in names:
                raise FormatError(f"tensor {quoted(name)} stands in two files; one of them is {file.path}")
            names.add(name)
        for group in file.archive.groups:
            if group.position in positions:
                raise FormatError(f"two groups are number {group.position} in the order; one of them is in {file.path}")
            positions.add(group.position)


def placed_chunks(files: Sequence[ArchiveFile]) -> list[PlacedChunk]:
    """Chunks of all files in execution order, so that all disks are read at once."""
    every = [chunk for file in files for chunk in file.chunks()]
    return sorted(every, key=lambda chunk: (chunk.group.position, chunk.begin))


def check_header(file: ArchiveFile) -> None:
    """Checks that every byte of the header is as it was written: no checksum covers its spelling.

    Raises:
        FormatError: a byte differs.
    """
    metadata = {key: value for key, value in file.header.metadata.items() if key != SEAL_KEY}
    expected = build_header(file.header.entries.values(), metadata, data_start=file.header.data_start, seal=True)
    with storage_errors("read of the header", file.path), open(file.path, "rb") as opened:
        found = opened.read(len(expected))
    if found != expected:
        raise FormatError(f"the header of {file.path} was changed after it was written, in its spelling only")


def refuse_idle(paths: Sequence[Path], parts: Collection[Path]) -> None:
    """Refuse a path from which nothing is read: it would look as if it had been. `parts` are those that are.

    Raises:
        ConfigError: names the first one.
    """
    known = set(map(os.path.realpath, parts))
    if idle := [path for path in paths if os.path.realpath(path) not in known]:
        raise ConfigError(f"nothing would be read from {idle[0]}: give one pack, or the directories of one")


def _found(first: Path, paths: Sequence[Path]) -> list[Path]:
    """The files of an archive, in order."""
    if not first.exists():
        raise StorageError(f"there is no {first}")
    if first.name == INDEX:
        raise FormatError(f"{first} is the index of a pack, or of a checkpoint; give the directory that holds it")
    refuse_unfinished(first)
    if first.is_dir() and not (first / SINGLE).is_file():
        return _indexed(first, paths)
    return [first / SINGLE if first.is_dir() else first]


def _indexed(first: Path, paths: Sequence[Path]) -> list[Path]:
    index = first / INDEX
    if not index.is_file():
        is_part = any(first.glob("model-*.safetensors"))
        advice = "; of a striped pack the directory that holds the index comes first" if is_part else ""
        raise FormatError(f"{first} holds no pack: neither {SINGLE} nor {INDEX}{advice}")
    names = check_index(small_file(index), str(index))
    if not names:
        raise FormatError(f"{index} names no files")
    files = []
    for name in names:
        there = [path / name for path in paths if (path / name).is_file()]
        if not there:
            raise FormatError(
                f"{name} is in none of {', '.join(map(str, paths))}; give all directories of the archive, or, where "
                "only one can be named, unpack it first"
            )
        files.append(there[0])
    return files


def _open(path: Path) -> ArchiveFile:
    header = read_header(path)
    archive = read_archive(header, str(path))
    if archive is None or SEAL_KEY not in header.metadata:
        raise FormatError(f"{path} is an ordinary safetensors file, not a pack; make one of it by `tierstore pack`")
    return ArchiveFile(path, header, archive)
