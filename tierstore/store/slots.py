"""Chunks at rest: one kind of bytes in two slots, striped over directories.

Scope: where each chunk lies, reading it verified, writing it to the slot that no committed generation needs.
Not here: when a generation is committed (`commits.py`), what the bytes mean (the packs' users).
Owner: the loop thread changes records; worker threads run `read_here` and `_write_chunk`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tierstore.alignment import ALIGNMENT, padded
from tierstore.config import Codec
from tierstore.errors import ChecksumMismatch, FormatError, StorageError
from tierstore.io.backend import Backend, BlockFile
from tierstore.io.memory import Bytes, Pool, aligned_copy, aligned_room
from tierstore.io.meter import LinkMeter
from tierstore.io.workers import Priority, WorkerPool
from tierstore.kernels.digests import digest
from tierstore.pack.codecs import checksum, codec_for
from tierstore.pack.layout import ChunkSpec, Layout, capacity_pack, listed, slot_pack
from tierstore.store.stripes import dealt
from tierstore.trace import Tracer

SLOT_NAMES = "ab"
_READ, _WRITE = "read", "write"


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """What a slot holds for one chunk, as a manifest records it.

    Attributes:
        checksum: a digest (`kernels/digests.py`); in a store of an older release, xxh3 of all bytes at once.
        is_of_leaves: whether `checksum` is such a digest.
    """

    slot: int
    stored_bytes: int
    checksum: int
    is_of_leaves: bool = True

    def checksum_of(self, data: Bytes) -> int:
        """The checksum of the first `stored_bytes` of `data`, of the same kind as `checksum`."""
        return (digest if self.is_of_leaves else checksum)(data[: self.stored_bytes])


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of a generation, its size, and the ranges in it that hold the generation: (offset, bytes)."""

    path: Path
    file_bytes: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def holes(self) -> list[tuple[int, int]]:
        """The gaps between the ranges, and the rest behind them: (offset, bytes)."""
        stops = [0, *(offset + nbytes for offset, nbytes in self.ranges)]
        starts = [*(offset for offset, _ in self.ranges), self.file_bytes]
        return [(stop, start - stop) for stop, start in zip(stops, starts) if start > stop]


@dataclass(frozen=True, slots=True)
class _Place:
    disk: int
    offset: int
    padded_bytes: int


class ChunkIO:
    """What every pack of a store shares: files, threads, scratch memory and the meter of the link.

    Args:
        scratch: pool for encoded bytes; packs with a codec need it. Each job has its lease before it is submitted, so
            that it never waits for memory while it holds a thread.

    Attributes:
        on_transfer: called on the loop when a transfer begins and when it has ended.
    """

    def __init__(
        self,
        backend: Backend,
        workers: WorkerPool,
        scratch: Pool | None,
        clock: Callable[[], float],
        tracer: Tracer | None = None,
    ) -> None:
        self.backend = backend
        self.workers = workers
        self.scratch = scratch
        self._tracer = tracer or Tracer(clock, enabled=False)
        self.on_transfer: Callable[[], None] = lambda: None
        self.meters = {_READ: LinkMeter(clock), _WRITE: LinkMeter(clock)}

    async def run(
        self,
        link: str,
        name: str,
        nbytes: int,
        priority: Priority,
        job: Callable[[Bytes | None], None],
        *,
        is_coded: bool,
    ) -> None:
        """Run one transfer in a worker, metered; it gets scratch memory if it encodes or decodes.

        Blocks: on scratch memory and on the job.
        Cancellation: held back until the job has ended (see `io/workers.py`), so that code after an await on this may
            free the memory that the job used.
        """
        scratch = await self.scratch.reserve(nbytes) if is_coded and self.scratch is not None else None
        meter = self.meters[link]
        meter.begin()
        self.on_transfer()
        try:
            await self.workers.submit(priority, self._traced, link, name, job, scratch.array if scratch else None)
        finally:
            meter.end(nbytes)
            if scratch is not None:
                scratch.free()
            self.on_transfer()

    def _traced(self, link: str, name: str, job: Callable[[Bytes | None], None], scratch: Bytes | None) -> None:
        with self._tracer.measure(f"nvme {link}", name):
            job(scratch)


class SlotPack:
    """One kind of chunks (weights, state, gradients) in files `KIND.a.safetensors`, `KIND.b.safetensors` per directory.

    Invariant: a write goes to the slot that `committed` does not name, so that the last committed generation stays
    whole until `commit()` says that a newer one is published.

    Args:
        shares: the share of the chunks that each directory gets, as small integers; all alike if empty.
        after: how many chunks count as dealt before these, which decides the directory of the first one.
        rests: which chunks belong to frozen groups: they get disk space in the first slot only, until they are written.

    Attributes:
        is_coded: chunks are stored as a codec encodes them.
        moved_bytes: bytes of all chunks read and written so far, as they are in memory.
    """

    def __init__(
        self,
        kind: str,
        chunks: Sequence[ChunkSpec],
        directories: Sequence[Path],
        io: ChunkIO,
        codec: Codec,
        *,
        slots: int = 2,
        shares: Sequence[int] = (),
        after: int = 0,
        rests: Sequence[bool] = (),
    ) -> None:
        self.kind = kind
        self._io = io
        self._names = [chunk.name for chunk in chunks]
        self._tensors = [chunk.tensors for chunk in chunks]
        self._directories = list(directories)
        self._slots = slots
        self.is_coded = codec is not Codec.NONE
        self.moved_bytes = 0
        self._codecs = [codec_for(codec, chunk.item_bytes) for chunk in chunks]
        build = capacity_pack if self.is_coded else slot_pack
        disks = dealt(len(chunks), shares or [1] * len(self._directories), after)
        self._layouts: list[Layout] = [
            build([chunk for chunk, its in zip(chunks, disks) if its == disk]) for disk in range(len(self._directories))
        ]
        spans = [self._layouts[disk].spans[chunk.name] for chunk, disk in zip(chunks, disks)]
        self._places = [_Place(disk, span.offset, span.padded_bytes) for disk, span in zip(disks, spans)]
        self._resting = [place for place, does_rest in zip(self._places, rests) if does_rest]
        self._files: list[BlockFile] = []  # in the order of `paths`
        self._headers_to_write: list[tuple[BlockFile, Bytes]] = []
        self.current: list[ChunkRecord | None] = [None] * len(chunks)
        self.committed: list[ChunkRecord | None] = [None] * len(chunks)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def file_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(layout.file_bytes for layout in self._layouts_by_path())

    def padded_bytes(self, index: int) -> int:
        """Bytes that chunk `index` takes in memory and, uncompressed, on disk."""
        return self._places[index].padded_bytes

    def paths(self) -> list[Path]:
        """All files, in the order of disks, then slots."""
        return [
            directory / f"{self.kind}.{SLOT_NAMES[slot]}.safetensors"
            for directory in self._directories
            for slot in range(self._slots)
        ]

    def location(self, index: int, record: ChunkRecord) -> tuple[Path, int, int]:
        """The file that holds this version of chunk `index`, the offset in the file, and the bytes of its place."""
        place = self._places[index]
        return self.paths()[self._number(place, record.slot)], place.offset, place.padded_bytes

    def _number(self, place: _Place, slot: int) -> int:
        """The number of a file in the order of `paths`."""
        return place.disk * self._slots + slot

    def create(self) -> None:
        """Make the files at full size, so that a full disk shows before the first step.

        Raises:
            StorageError: files already made by this call are removed.
        """
        made: list[Path] = []
        try:
            for number, (path, layout) in enumerate(zip(self.paths(), self._layouts_by_path())):
                file = self._make(number, path, layout)
                self._files.append(file)
                made.append(path)
                file.write_from(aligned_copy(layout.header), 0)
        except BaseException:
            self.close()
            for path in made:
                with contextlib.suppress(StorageError):  # the first error is the one to tell
                    self._io.backend.remove(path)
            raise

    def _make(self, number: int, path: Path, layout: Layout) -> BlockFile:
        return self._io.backend.create(path, layout.file_bytes, self._holes(number))

    def _fill(self, number: int, path: Path, layout: Layout) -> None:
        """Give an existing file, which a snapshot may have made, the disk space that `_make` would have given it."""
        holes = self._holes(number)
        if self._io.backend.lacks_room(path, layout.file_bytes - sum(nbytes for _, nbytes in holes)):
            self._io.backend.allocate(path, layout.file_bytes, holes)

    def _holes(self, number: int) -> list[tuple[int, int]]:
        """Where a file needs no disk space: at frozen chunks, in the second slot."""
        disk, slot = divmod(number, self._slots)
        return [(place.offset, place.padded_bytes) for place in self._resting if slot and place.disk == disk]

    def check(self, records: Sequence[ChunkRecord | None]) -> None:
        """Check whether `open` can succeed, and change nothing: the directories may be those of another store.

        Raises:
            FormatError: a file that these records need is missing, or a file has another size or is a link; or the
                records are of other chunks.
            StorageError: a file cannot be inspected.
        """
        if len(records) != len(self._places):
            raise FormatError(f"the store is damaged: {len(records)} records for {len(self._places)} chunks")
        for name, place, record in zip(self._names, self._places, records):
            if record is not None and not (record.slot < self._slots and 0 < record.stored_bytes <= place.padded_bytes):
                raise FormatError(
                    f"the store is damaged: the manifest has {record.stored_bytes} B of chunk {name} in slot "
                    f"{record.slot}, where {self._slots} slots of {place.padded_bytes} B are"
                )
        needed = self._needed(records)
        for number, (path, layout) in enumerate(zip(self.paths(), self._layouts_by_path())):
            with self._io.backend.calling("inspection", path):
                is_link, size = path.is_symlink(), path.stat().st_size if path.exists() else None
            if is_link:  # its target would be written to
                leads_to = os.path.realpath(path)
                raise FormatError(f"{path} is a link, which no store makes: it leads to {leads_to}; remove it")
            is_needed = number in needed
            if size is None:
                if is_needed:
                    advice = "restore it from a copy, or go back one with resume='previous'"
                    raise FormatError(f"the store is damaged: {path} is missing; {advice}")
                continue
            if size != layout.file_bytes:
                is_striped = len(self.paths()) > self._slots
                advice = "restore it from a copy"
                if is_striped:
                    advice = f"give the directories in the order in which the store was made, or {advice}"
                if not is_needed:
                    advice = "if the directories are those of this store, remove that file: nothing needs it"
                raise FormatError(
                    f"the store is damaged: {path} has {size} B, expected {layout.file_bytes} B; {advice}"
                )

    def open(self, records: Sequence[ChunkRecord | None]) -> bool:
        """Open the files for a generation with these records; files that it does not need may be missing, and are made.

        A file of a snapshot has disk space for one generation only. It gets the rest here: a full disk shows now.

        Returns:
            Whether a file was made; its name is not durable yet.

        Raises:
            FormatError: as `check`.
        """
        self.check(records)
        is_made = False
        for number, (path, layout) in enumerate(zip(self.paths(), self._layouts_by_path())):
            if path.exists():
                if self._slots > 1:
                    self._fill(number, path, layout)
                file = self._io.backend.open(path, writable=True)
            else:
                file = self._make(number, path, layout)
                is_made = True
            self._files.append(file)
            if not _has_header(file, layout):
                self._headers_to_write.append((file, aligned_copy(layout.header)))
        return is_made

    def damaged_headers(self, records: Sequence[ChunkRecord | None]) -> Iterator[tuple[Path, int, str]]:
        """Files of a generation with these records whose header is not as it was made, or cannot be read.

        Returns:
            For each, its path, the size of the header in bytes, and why it cannot be read; empty if it can.

        Raises:
            StorageError: a file cannot be opened.
        """
        needed = self._needed(records)
        for number, (path, layout) in enumerate(zip(self.paths(), self._layouts_by_path())):
            if number in needed:
                is_whole, reason = False, ""
                with contextlib.closing(self._io.backend.open(path)) as file:
                    try:
                        is_whole = _has_header(file, layout)
                    except StorageError as error:
                        reason = str(error)
                if not is_whole:
                    yield path, len(layout.header), reason

    def kept_files(self, records: Sequence[ChunkRecord | None]) -> Iterator[KeptFile]:
        """The files that hold a generation with these records."""
        held: dict[int, list[tuple[int, int]]] = {}
        for place, record in zip(self._places, records):
            if record is not None:
                kept = place.offset, padded(record.stored_bytes)
                held.setdefault(self._number(place, record.slot), []).append(kept)
        for number, (path, layout) in enumerate(zip(self.paths(), self._layouts_by_path())):
            if number in held:
                yield KeptFile(path, layout.file_bytes, ((0, len(layout.header)), *held[number]))

    def _needed(self, records: Sequence[ChunkRecord | None]) -> set[int]:
        """The numbers of the files that hold a chunk of these records, in the order of `paths`."""
        return {self._number(self._places[i], record.slot) for i, record in enumerate(records) if record is not None}

    def _layouts_by_path(self) -> list[Layout]:
        return [layout for layout in self._layouts for _ in range(self._slots)]

    async def _run(self, link: str, index: int, priority: Priority, job: Callable[[Bytes | None], None]) -> None:
        """Run one transfer of a chunk; the job gets scratch memory if chunks are coded."""
        nbytes = self._places[index].padded_bytes
        await self._io.run(link, self._names[index], nbytes, priority, job, is_coded=self.is_coded)
        self.moved_bytes += nbytes

    async def read(
        self, index: int, array: Bytes, priority: Priority, *, record: ChunkRecord | None = None, checks: bool = True
    ) -> bool:
        """Fill `array` (padded length) with the chunk; with `record`, with that older version of it.

        Args:
            checks: False leaves it to the caller to compute the digest of `array`, and to call `check_digest` with it.

        Returns:
            Whether the bytes are verified: with `checks`, and wherever a digest of `array` cannot verify them, which is
            in a pack with a codec, and for a chunk that an older release has written.

        Raises:
            ChecksumMismatch: names the chunk, its file and its tensors.
        """
        wanted = record or self.current[index]
        if wanted is None:
            raise FormatError(f"chunk {self._names[index]} was never written")
        checks = checks or self.is_coded or not wanted.is_of_leaves
        await self._run(
            _READ, index, priority, lambda scratch: self.read_here(index, array, wanted, scratch, checks=checks)
        )
        return checks

    def read_here(
        self, index: int, array: Bytes, record: ChunkRecord, scratch: Bytes | None, *, checks: bool = True
    ) -> None:
        """The job of `read`, for a worker thread that does more with the bytes in the same hop."""
        place = self._places[index]
        file = self._files[self._number(place, record.slot)]
        raw = record.stored_bytes >= place.padded_bytes
        source = array if raw or scratch is None else scratch
        length = padded(record.stored_bytes)
        file.read_into(source[:length], place.offset)
        if checks:
            self.check_digest(index, record, record.checksum_of(source))
        if not raw:
            self._codecs[index].decode(source[: record.stored_bytes], array[: place.padded_bytes])

    def check_digest(self, index: int, record: ChunkRecord, found: int) -> None:
        """Compare the checksum of what was read with that of what was written.

        Raises:
            ChecksumMismatch: names the chunk, its file and its tensors.
        """
        if found != record.checksum:
            path, offset, _ = self.location(index, record)
            of_times = " (or the directories were copied at different times)" if len(self._directories) > 1 else ""
            raise ChecksumMismatch(
                f"damaged: chunk {self._names[index]} at offset {offset} of {path}: "
                f"{record.stored_bytes} B have checksum {found:016x}, not {record.checksum:016x} as written"
                f"{of_times}; of {listed(self._tensors[index])}; restore the store from a copy, or resume='previous'"
            )

    async def read_with(self, index: int, priority: Priority, job: Callable[[Callable[[Bytes], None]], None]) -> None:
        """Run `job(read)` in one worker hop; the job calls `read(array)` to have the chunk in `array`."""
        record = self.current[index]
        if record is None:
            raise FormatError(f"chunk {self._names[index]} was never written")
        await self._run(
            _READ, index, priority, lambda scratch: job(lambda array: self.read_here(index, array, record, scratch))
        )

    def hurry(self) -> AbstractContextManager[None]:
        """In here somebody waits for a commit, so its writes go before reads ahead."""
        return self._io.workers.hurry()

    async def write(
        self, index: int, array: Bytes, priority: Priority = Priority.WRITE, *, known: int | None = None
    ) -> None:
        """Write `array` (padded length) to the slot that no committed generation needs.

        Args:
            known: the digest of `array`, if it is computed already; not used where the chunk is stored encoded.
        """
        if self.is_coded:
            priority = min(priority, Priority.WRITE)  # while it queues it holds scratch memory, which others wait for
        committed = self.committed[index]
        slot = 0 if committed is None or self._slots == 1 else 1 - committed.slot
        records: list[ChunkRecord] = []
        await self._run(
            _WRITE, index, priority,
            lambda scratch: records.append(self._write_chunk(index, slot, array, scratch, known)),
        )  # fmt: skip
        self.current[index] = records[0]

    def _write_chunk(
        self, index: int, slot: int, array: Bytes, scratch: Bytes | None, known: int | None
    ) -> ChunkRecord:
        place = self._places[index]
        source = array[: place.padded_bytes]
        stored = place.padded_bytes
        if scratch is not None:
            encoded = self._codecs[index].encode(source, scratch[: place.padded_bytes])
            if encoded <= place.padded_bytes - ALIGNMENT:
                source, stored, known = scratch, encoded, None
                scratch[stored : padded(stored)] = 0
        self._files[self._number(place, slot)].write_from(source[: padded(stored)], place.offset)
        return ChunkRecord(slot, stored, digest(source[:stored]) if known is None else known)

    def datasync(self) -> None:
        """Make every write durable. Worker thread; a failure is final, it is never retried."""
        # What a header must hold is known, so a damaged one is written again. A commit does that, and not `open`, which
        # changes no bytes that are there.
        while self._headers_to_write:
            file, header = self._headers_to_write.pop()
            file.write_from(header, 0)
        for file in self._files:
            file.datasync()

    def commit(self, records: Sequence[ChunkRecord | None]) -> None:
        """The manifest that holds `records` is published: from now on the chunks in them must not be overwritten."""
        self.committed = list(records)

    def adopt(self, records: Sequence[ChunkRecord | None]) -> None:
        """Take the records of an opened manifest as the current and the committed ones."""
        self.current = list(records)
        self.committed = list(records)

    def close(self) -> None:
        """Close all files, even if closing one of them fails."""
        files, self._files = self._files, []
        self._headers_to_write.clear()
        with contextlib.ExitStack() as closing:
            for file in files:
                closing.callback(file.close)


def _has_header(file: BlockFile, layout: Layout) -> bool:
    header = aligned_room(len(layout.header))
    file.read_into(header, 0)
    return header.tobytes() == layout.header
