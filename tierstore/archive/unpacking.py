"""Unpacking: packs back to what Hugging Face and torch read.

Scope: safetensors, in one file or in shards with an index; what is common to all targets.
Not here: which tensor is where (`shards.py`), files of torch (`torch_files.py`), packs themselves (`reading.py`).
Owner: `unpack` opens, locks and closes all that it uses.

Each chunk of the pack is read once, verified, decoded and written to the places of its tensors in the target. Those
places are not aligned, so the target is written through the page cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierstore.archive import flow
from tierstore.archive.gather import OpenFiles, check_open_files
from tierstore.archive.opening import ArchiveFile, PlacedChunk, placed_chunks
from tierstore.archive.publish import Publication
from tierstore.archive.reading import content_room, read_content
from tierstore.archive.shards import index_of, shards_of
from tierstore.archive.sources import INDEX, SINGLE, TORCH_SUFFIXES, own_metadata
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend
from tierstore.io.memory import Bytes
from tierstore.pack.layout import TensorEntry, TensorSpec, tensor_bytes
from tierstore.plan.order import natural_key


@dataclass(frozen=True, slots=True)
class UnpackOptions:
    """What the user may choose.

    Attributes:
        destination: a `.safetensors` or torch file, or a directory.
        shard_bytes: the largest size of a file in a directory, unless one tensor is larger.
        memory_bytes: the most memory that this process may take.
    """

    destination: Path
    shard_bytes: int = 5 * 10**9
    memory_bytes: int = 2**30

    @property
    def names_a_file(self) -> bool:
        return self.destination.suffix in (".safetensors", *TORCH_SUFFIXES)


def unpack(
    files: Sequence[ArchiveFile],
    options: UnpackOptions,
    *,
    backend: Backend | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> list[Path]:
    """Write the tensors of an archive as an ordinary checkpoint, bit for bit as they were packed.

    Names that share a tensor share it in a torch file, too; in safetensors each has a copy.

    Args:
        progress: called with content bytes as they are read, from another thread.

    Returns:
        The files written; an index comes last.

    Raises:
        ConfigError: the destination is there already, or too many files would be open.
        StorageFull: the disk is too small; raised before anything is written.
        ChecksumMismatch, FormatError, StorageError: the pack is damaged, or the system refused; nothing is left.
    """
    room = content_room(placed_chunks(files), options.memory_bytes)
    unpacking = _Unpacking(files, options, room, backend or Backend(), progress)
    is_torch = options.destination.suffix in TORCH_SUFFIXES
    return unpacking.as_torch_file() if is_torch else unpacking.as_safetensors()


@dataclass(frozen=True)
class _Unpacking:
    files: Sequence[ArchiveFile]
    options: UnpackOptions
    room: flow.Room
    backend: Backend
    progress: Callable[[int], None]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """What is stored, by name."""
        entries = [entry for file in self.files for entry in file.archive.tensors]
        return {entry.name: TensorSpec(entry.name, entry.dtype, entry.shape) for entry in entries}

    @property
    def aliases(self) -> dict[str, str]:
        return {alias: name for file in self.files for alias, name in file.archive.aliases.items()}

    def as_torch_file(self) -> list[Path]:
        from tierstore.archive.torch_files import empty_torch_file

        specs = self.specs
        # An upper bound: each tensor is a file of a zip archive, aligned to 64 B, named twice.
        rooms = [tensor_bytes(one.name, one.dtype, one.shape) + 1024 + 4 * len(one.name) for one in specs.values()]
        check_open_files(len(self.files), 1)
        with Publication(self.options.destination, 1, self.backend) as publication:
            publication.begin([sum(rooms) + 2**16])
            places = empty_torch_file(publication.temporaries[0], specs, self.aliases, self.backend)
            self._fill({publication.temporaries[0]: places})
            return publication.commit()

    def as_safetensors(self) -> list[Path]:
        specs, destination = self.specs, self.options.destination
        every = [*specs.values(), *(replace(specs[name], name=alias) for alias, name in self.aliases.items())]
        is_file = destination.suffix == ".safetensors"
        every.sort(key=lambda spec: natural_key(spec.name))
        metadata = own_metadata(self.files[0].header.metadata)
        shards = shards_of(every, metadata, None if is_file else self.options.shard_bytes)
        names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
        whole: Path | list[Path] = destination if is_file else destination / SINGLE
        if len(shards) > 1:
            whole = [destination]
        check_open_files(len(self.files), len(shards))
        with Publication(whole, len(shards), self.backend) as publication:
            publication.begin([shard.file_bytes for shard in shards])  # removes what a killed unpack has left
            if len(shards) > 1 and (there := [name for name in names if (destination / name).exists()]):
                raise ConfigError(f"{destination / there[0]} is there already; give another destination")
            for path, shard in zip(publication.temporaries, shards):
                self._write_head(path, shard.header)
            self._fill({path: shard.places for path, shard in zip(publication.temporaries, shards)})
            written = publication.commit(names, index_of(shards, names))
        return written if len(shards) == 1 else [*written, destination / INDEX]

    def _write_head(self, path: Path, header: bytes) -> None:
        with self.backend.calling(f"write of a header of {len(header)} B", path), open(path, "r+b") as file:
            file.write(header)

    def _fill(self, targets: Mapping[Path, Mapping[str, int]]) -> None:
        """Write all data; the bytes are durable on return.

        Args:
            targets: for each file, the offsets of the tensors that it holds.
        """
        stored_as = {name: name for name in self.specs} | self.aliases
        places: dict[str, list[tuple[Path, int]]] = defaultdict(list)
        for path, offsets in targets.items():
            for name, offset in offsets.items():
                places[stored_as[name]].append((path, offset))
        with (
            OpenFiles(self.backend) as sources,
            OpenFiles(self.backend, writable=True, direct=False) as opened,
        ):

            def write(placed: PlacedChunk, buffer: Bytes) -> None:
                size = placed.chunk.content_bytes
                is_raw = placed.chunk.stored_bytes == size
                content = buffer[0 if is_raw else len(buffer) // 2 :][:size]
                read_content(sources, placed, buffer, content)
                for entry, begin, end in _parts_of_tensors(placed):
                    data = content[begin - placed.begin : end - placed.begin]
                    for path, offset in places[entry.name]:
                        opened(path).write_from(data, offset + begin - entry.begin)

            def done(placed: PlacedChunk, _: None) -> None:
                self.progress(placed.chunk.content_bytes)

            flow.run(placed_chunks(self.files), write, self.room, done=done)
            for path in targets:
                opened(path).datasync()


def _parts_of_tensors(placed: PlacedChunk) -> Iterator[tuple[TensorEntry, int, int]]:
    """Which bytes of which tensors a chunk holds, counted from the start of its group's content."""
    chunk_end = placed.begin + placed.chunk.content_bytes
    for entry in placed.group.tensors:
        begin, end = max(entry.begin, placed.begin), min(entry.end, chunk_end)
        if begin < end:
            yield entry, begin, end
