"""Packing: a checkpoint's tensors, in execution order, into one or several packs.

Scope: groups and their files, chunks from the source through a codec to the disk, headers, publication.
Not here: the order (`plan/order.py`), which codec pays (`choosing.py`), what a pack says (`pack/archive.py`).
Owner: `pack` opens, locks and closes all that it uses.

[Note: turns] With a codec, the length of a chunk, and so the place of the next one, is known only after encoding. A job
therefore waits, between encoding and writing, until the chunks before it have their places. Their jobs were started
before it, so they run or have ended: there is no deadlock. The file is the same for every number of threads.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from tierstore.alignment import ALIGNMENT, padded
from tierstore.archive import flow
from tierstore.archive.gather import Content, OpenFiles, check_open_files
from tierstore.archive.index import archive_index
from tierstore.archive.publish import Publication
from tierstore.archive.sources import TORCH_SUFFIXES, Source
from tierstore.config import Codec
from tierstore.errors import ClosedError, ConfigError
from tierstore.io.backend import Backend
from tierstore.io.memory import Bytes, aligned_copy
from tierstore.pack.archive import LARGEST_CHUNK_BYTES, Archive, ArchiveGroup, archive_header
from tierstore.pack.codecs import checksum, checksum_bytes, codec_for
from tierstore.pack.layout import DTYPE_BITS, back_to_back, item_bytes
from tierstore.plan.order import execution_order, share_out

_THREADS = 2 * flow.THREADS
"""While half of them read, the other half write."""
_ESTIMATE_MARGIN = 1.05
"""Factor on the size of encoded chunks that the ratios of the samples predict."""
CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What the user may choose.

    Attributes:
        shards: number of files; None: one for each destination.
        memory_bytes: the most memory that this process may take.
    """

    destinations: tuple[Path, ...]
    shards: int | None = None
    memory_bytes: int = 2**30
    chunk_bytes: int = CHUNK_BYTES
    overwrite: bool = False

    @property
    def files(self) -> int:
        return self.shards or len(self.destinations)

    def __post_init__(self) -> None:
        if not 0 < self.chunk_bytes <= LARGEST_CHUNK_BYTES or self.chunk_bytes % ALIGNMENT:
            raise ConfigError(
                f"a chunk of {self.chunk_bytes} B is not a multiple of {ALIGNMENT} up to {LARGEST_CHUNK_BYTES} B"
            )
        if self.files < len(self.destinations):
            raise ConfigError(f"--shards {self.files} is fewer than the {len(self.destinations)} destinations")
        if len({path.resolve() for path in self.destinations}) < len(self.destinations):
            raise ConfigError("a destination is given twice")
        if wrong := [path for path in self.destinations if path.suffix in TORCH_SUFFIXES and not path.is_dir()]:
            raise ConfigError(f"a pack is a name ending in .safetensors, or directories, not {wrong[0]}")
        if self.names_a_file and self.files > 1:
            raise ConfigError(
                f"{self.files} files do not go into {self.destinations[0]}: give directories, not names that end in "
                ".safetensors"
            )

    @property
    def names_a_file(self) -> bool:
        return any(path.suffix == ".safetensors" for path in self.destinations)


@dataclass(frozen=True, slots=True)
class Packed:
    """What was written."""

    files: tuple[Path, ...]
    archives: tuple[Archive, ...]

    @property
    def groups(self) -> list[ArchiveGroup]:
        """In execution order."""
        return sorted((group for one in self.archives for group in one.groups), key=lambda group: group.position)


Codecs = Mapping[str, Codec]
"""The codec of each dtype."""


def plan_groups(source: Source, codecs: Codecs, chunk_bytes: int) -> tuple[list[ArchiveGroup], str]:
    """The groups of a checkpoint in execution order, with nothing stored yet, and the reason for that order.

    A group with tensors of several dtypes becomes several groups: a codec works on elements of one width.
    """
    order = execution_order(source.tensors, source.config)
    groups: list[ArchiveGroup] = []
    for ordered in order.groups:
        by_dtype: dict[str, list[str]] = defaultdict(list)
        for name in ordered.tensors:
            by_dtype[source.tensors[name].spec.dtype].append(name)
        for dtype, names in sorted(by_dtype.items(), key=lambda item: -DTYPE_BITS.get(item[0], 0)):
            tensors = back_to_back([source.tensors[name].spec for name in names])
            content_bytes = tensors[-1].end
            codec = codecs.get(dtype, Codec.NONE) if content_bytes else Codec.NONE
            plain = ordered.name if ordered.name.isprintable() else repr(ordered.name)[1:-1]
            title = plain if len(by_dtype) == 1 else f"{plain} {dtype}"
            chunks = tuple((min(chunk_bytes, content_bytes - at), 0) for at in range(0, content_bytes, chunk_bytes))
            groups.append(ArchiveGroup(title, len(groups), codec, item_bytes(dtype), tensors, chunks))
    return groups, order.reason


def pack(
    source: Source,
    options: PackOptions,
    codecs: Codecs,
    *,
    ratios: Mapping[str, float] = MappingProxyType({}),
    backend: Backend | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Packed:
    """Write the packs of `source`.

    Args:
        codecs: for each dtype that is not to be stored raw.
        ratios: content bytes per stored byte of a dtype, as measured on samples. The size that this predicts, and a
            little more, is allocated; for a dtype without a ratio, the raw size.
        progress: called with content bytes as they are written, from another thread.

    Raises:
        ConfigError: a destination cannot be used, or too many files would be open; nothing was changed.
        StorageFull: a disk is too small; raised before anything is written, if the ratios hold.
        FormatError, StorageError: the source is damaged, or the system refused; nothing is left behind.
    """
    backend = backend or Backend()
    groups, reason = plan_groups(source, codecs, options.chunk_bytes)
    if options.files > (most := max(len(groups), len(options.destinations))):
        raise ConfigError(
            f"--shards {options.files} is too many: a file holds whole groups, of which there are {len(groups)}; "
            f"at most {most}"
        )
    shares = share_out([group.stored_bytes for group in groups], len(options.destinations), options.files)
    archives = [
        Archive("0" * 16, number, options.files, options.chunk_bytes, reason, tuple(groups[i] for i in share), {})
        for number, share in enumerate(shares)
    ]
    archives = [replace(one, aliases=_aliases_in(one, source)) for one in archives]
    jobs_room = _room(options, groups)
    check_open_files(len({piece.path for one in source.tensors.values() for piece in one.pieces}), options.files)
    destination = options.destinations[0] if options.names_a_file else options.destinations
    with Publication(destination, options.files, backend, overwrite=options.overwrite) as publication:
        writers = [
            _Writer(archive, dict(source.metadata), path) for archive, path in zip(archives, publication.temporaries)
        ]
        publication.begin([writer.expected_bytes(ratios) for writer in writers])
        with OpenFiles(backend) as sources, OpenFiles(backend, writable=True) as targets:
            job = _Job(source, sources, targets)
            flow.run(_in_execution_order(writers), job, jobs_room, done=lambda task, _: progress(task.content_bytes))
            stored = [writer.groups() for writer in writers]
            identity = _identity(stored)
            finished = tuple(
                writer.finish(identity, groups, targets, backend) for writer, groups in zip(writers, stored)
            )
        files = publication.commit(*archive_index(finished, [writer.data_bytes for writer in writers]))
    return Packed(tuple(files), finished)


def _room(options: PackOptions, groups: Sequence[ArchiveGroup]) -> flow.Room:
    largest = max((stored for group in groups for stored, _ in group.chunks), default=0)
    chunk_bytes = padded(max(largest, 1))
    # A codec allocates up to two chunks while it works.
    beside = 2 * chunk_bytes if any(group.codec is not Codec.NONE for group in groups) else 0
    job_bytes = 2 * chunk_bytes + 2 * ALIGNMENT
    jobs = sum(len(group.chunks) for group in groups)
    return flow.room(options.memory_bytes, jobs, job_bytes, beside_bytes=beside, threads=_THREADS)


def _aliases_in(archive: Archive, source: Source) -> dict[str, str]:
    names = {entry.name for entry in archive.tensors}
    return {alias: name for alias, name in sorted(source.aliases.items()) if name in names}


def _identity(groups: list[tuple[ArchiveGroup, ...]]) -> str:
    """An identity that follows from the stored content, file by file: not from aliases, metadata and chunk_bytes."""
    return f"{checksum_bytes(repr(groups).encode()):016x}"


@dataclass(eq=False)
class _Writer:
    """One file while it is written.

    Attributes:
        chunks: stored bytes and checksum of each chunk, by position of its group and number in it.
    """

    archive: Archive
    metadata: dict[str, str]
    path: Path
    chunks: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data_start = len(archive_header(self.archive, self.metadata))
        self._end = self.data_start
        self._next = 0
        self._turn = threading.Condition()
        self._is_broken = False

    @property
    def data_bytes(self) -> int:
        return self._end - self.data_start

    def expected_bytes(self, ratios: Mapping[str, float]) -> int:
        """Expected size of the whole file; exact if nothing is encoded."""
        total = self.data_start
        for group in self.archive.groups:
            ratio = ratios.get(group.tensors[0].dtype, 1.0) if group.codec is not Codec.NONE else 1.0
            share = min(1.0, _ESTIMATE_MARGIN / ratio)
            total += sum(padded(math.ceil(length * share)) for length, _ in group.chunks)
        return total

    def place(self, number: int, stored_bytes: int) -> int:
        """Where chunk `number` of the file is written. Blocks: see [Note: turns]."""
        with self._turn:
            self._turn.wait_for(lambda: self._next == number or self._is_broken)
            if self._is_broken:
                raise ClosedError(f"{self.path} was given up")
            offset, self._end = self._end, self._end + padded(stored_bytes)
            self._next += 1
            self._turn.notify_all()
            return offset

    def give_up(self) -> None:
        with self._turn:
            self._is_broken = True
            self._turn.notify_all()

    def groups(self) -> tuple[ArchiveGroup, ...]:
        """The groups with their stored chunks, now that all of these are written."""
        return tuple(
            replace(group, chunks=tuple(self.chunks[group.position, number] for number in range(len(group.chunks))))
            for group in self.archive.groups
        )

    def finish(
        self, identity: str, groups: tuple[ArchiveGroup, ...], targets: OpenFiles, backend: Backend
    ) -> Archive:
        """Write the header, last: without it the file is no pack."""
        archive = replace(self.archive, identity=identity, groups=groups)
        header = archive_header(archive, self.metadata, self.data_start)
        backend.truncate(self.path, self._end)
        file = targets(self.path)
        file.write_from(aligned_copy(header), 0)
        file.datasync()
        return archive


@dataclass(frozen=True, slots=True)
class _Task:
    """One chunk: `number` counts those of a group, `turn` those of its file."""

    writer: _Writer
    group: ArchiveGroup
    number: int
    turn: int

    @property
    def content_bytes(self) -> int:
        return self.group.chunks[self.number][0]


def _in_execution_order(writers: Sequence[_Writer]) -> Iterator[_Task]:
    """Chunks of all files, in the order in which a step uses them: consecutive groups lie on different disks."""
    turns = dict.fromkeys(map(id, writers), 0)
    groups = [(group, writer) for writer in writers for group in writer.archive.groups]
    for group, writer in sorted(groups, key=lambda item: item[0].position):
        for number in range(len(group.chunks)):
            yield _Task(writer, group, number, turns[id(writer)])
            turns[id(writer)] += 1


class _Job:
    """Gather, encode, checksum and write one chunk, in one hop."""

    def __init__(self, source: Source, sources: OpenFiles, targets: OpenFiles) -> None:
        self._source = source
        self._sources = sources
        self._targets = targets
        self._contents: dict[int, Content] = {}

    def __call__(self, task: _Task, buffer: Bytes) -> None:
        try:
            self._run(task, buffer)
        except BaseException:
            task.writer.give_up()
            raise

    def _run(self, task: _Task, buffer: Bytes) -> None:
        size = task.content_bytes
        chunk, scratch = buffer[: padded(size)], buffer[padded(size) :]
        begin = task.number * task.writer.archive.chunk_bytes
        self._content(task.group).read(self._sources, begin, chunk[:size], scratch)
        stored, stored_bytes = chunk, size
        if task.group.codec is not Codec.NONE:
            encoded = codec_for(task.group.codec, task.group.item_bytes).encode(chunk[:size], scratch[:size])
            if padded(encoded) < padded(size):
                stored, stored_bytes = scratch, encoded
        stored[stored_bytes : padded(stored_bytes)] = 0
        stored = stored[: padded(stored_bytes)]
        row = stored_bytes, checksum(stored)
        offset = task.writer.place(task.turn, stored_bytes)
        self._targets(task.writer.path).write_from(stored, offset)
        task.writer.chunks[task.group.position, task.number] = row

    def _content(self, group: ArchiveGroup) -> Content:
        content = self._contents.get(group.position)
        if content is None:  # two threads may each make one: these are equal
            content = Content([p for entry in group.tensors for p in self._source.tensors[entry.name].pieces])
            self._contents[group.position] = content
        return content
