"""Packs of single extents: made once, never rewritten, removed when no generation needs them; and their generations.

Scope: numbers and files of packs, publishing a generation, removing what a crash left, the lock.
Not here: which extents there are and where they live (`tensors.py`).
Owner: the loop thread; workers make, sync and remove files.

[Note: packs are immutable] A changed extent is written to a new pack, so a write cannot harm what is committed or what
is current: a failed or cancelled write leaves a file that nothing names. A pack stays as long as one of the last two
generations names it; a discarded pack that no generation names is removed at once. A crash leaves at most files that no
manifest names, and the next open removes those. If the generation before the last was opened, or if the manifest of the
generation before exists, but cannot be read at the moment, so that nobody knows which packs it names, then all files
stay until the next generation is published.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierstore.config import Codec, Resume
from tierstore.errors import ClosedError, ConfigError, StorageError, TierstoreError
from tierstore.io.backend import Backend
from tierstore.io.workers import Priority, WorkerPool
from tierstore.pack.layout import ChunkSpec
from tierstore.store.directories import begin_store, claim_directory, end_store_making, refuse_mixed
from tierstore.store.extents import ExtentLayout
from tierstore.store.lock import StoreLock
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import Manifests
from tierstore.store.routes import Nowhere, PackPlace, Place, Route
from tierstore.store.slots import ChunkIO, ChunkRecord, SlotPack
from tierstore.store.stripes import recorded_shares

KIND = "tensors"
PACK = re.compile(r"put-(0|[1-9]\d{0,17})")
"""The kind of a pack; no number has two spellings."""
_GOLDEN = 2654435769
"""The golden section of 2**32."""
_MOST_OPEN = 64
"""Files that are open at once for reads, or for writes, of one priority: many more than threads, far fewer than the
usual limit of 1,024 descriptors."""
_PACK_FILE = re.compile(r"put-(\d+)\.[ab]\.safetensors")


@dataclass(eq=False)
class ExtentPack:
    """One extent in files of its own, open only while used: a store may have more packs than file descriptors.

    Attributes:
        is_synced: its bytes are durable.
        is_named: the names of its files are durable too.
        sync_failure: the error after which its bytes or names may be lost; final.
    """

    layout: ExtentLayout
    slots: SlotPack
    is_synced: bool = False
    is_named: bool = False
    is_open: bool = False
    is_discarded: bool = False
    sync_failure: StorageError | None = None

    @property
    def kind(self) -> str:
        return self.slots.kind


@dataclass
class Directories:
    """The directories of a store, claimed and locked.

    Attributes:
        threads: those that read and write manifests.
        before_release: closes files that a thread may use until `release` is called.
        is_unfinished: the directories are marked as those of a store that holds no generation yet.
    """

    paths: list[Path]
    backend: Backend
    threads: Executor
    lock: StoreLock = field(default_factory=StoreLock)
    numbers: list[int] = field(default_factory=list)
    is_unfinished: bool = False
    before_release: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def claim(self) -> None:
        """Make and lock the directories. Worker thread.

        Raises:
            ConfigError, StorageError, StoreLocked: nothing is left behind except the directories.
        """
        for path in self.paths:
            claim_directory(path, self.backend)
        with self.backend.calling("lock", self.paths[0]):
            self.lock.add(self.paths)
        self.numbers = self.manifests().numbers()
        if self.numbers:
            refuse_mixed(self.paths)

    def manifests(self) -> Manifests:
        """The manifests of the store."""
        return Manifests(self.paths[0], self.backend, self.threads, self.lock)

    def begin(self) -> None:
        """Mark the directories, and remove what a store that never had a generation has left. Worker thread."""
        begin_store(self.paths, self.backend)
        self.is_unfinished = True

    def finish(self) -> None:
        """Remove the mark, because there is a generation, or nothing is left. Worker thread."""
        end_store_making(self.paths, self.backend)
        self.is_unfinished = False

    def sync(self) -> None:
        """Make the names in the directories durable. Worker thread."""
        for path in self.paths:
            self.backend.sync_directory(path)

    async def find(self, resume: Resume) -> Generation | None:
        """The generation to open, as `resume` asks for it; None: a new store.

        Raises:
            ConfigError: the wanted generation is not there, or there is one and `resume` allows none; or the store is
                not one of tensors, or has another number of directories.
        """
        if not self.paths:
            if resume in (Resume.MUST, Resume.PREVIOUS):
                raise ConfigError(f"resume='{resume.value}' needs a store: give nvme a directory")
            return None
        where, numbers = self.paths[0], self.numbers
        if numbers and resume is Resume.NEVER:
            raise ConfigError(
                f"{where} already holds generation {numbers[0]}; open it with resume='auto', "
                "or choose another directory"
            )
        if not numbers and resume in (Resume.MUST, Resume.PREVIOUS):
            raise ConfigError(f"resume='{resume.value}': there is no generation in {where}")
        if len(numbers) == 1 and resume is Resume.PREVIOUS:
            raise ConfigError(f"{where} holds only generation {numbers[0]}; there is none before it")
        if not numbers:
            return None
        number = numbers[1] if resume is Resume.PREVIOUS else numbers[0]
        generation = await self.manifests().read(number)
        if generation.layout.get("kind") != KIND:
            raise ConfigError(f"{where} holds the training state of a model, not named tensors; open it with Engine")
        if generation.layout["directories"] != len(self.paths):
            raise ConfigError(
                f"the store in {where} is striped over {generation.layout['directories']} directories, "
                f"but nvme lists {len(self.paths)}"
            )
        return generation

    def release(self) -> None:
        """Remove what is there of a store that never had a generation, and unlock. Twice is fine."""
        try:
            self.before_release.close()
            if self.is_unfinished and self.lock.is_in_place:
                with contextlib.suppress(TierstoreError):  # what stays is marked, and the next store here removes it
                    if not self.manifests().numbers():
                        begin_store(self.paths, self.backend)
                    self.finish()
        finally:
            self.lock.release()


class Shelf:
    """The packs of a store of tensors and the generations that name them.

    Args:
        shares: the share of the chunks that each directory gets, in a new store.
        later: has a worker run a job, without waiting; the store keeps its failure, and raises it later.
    """

    def __init__(
        self,
        directories: Directories,
        io: ChunkIO,
        codec: Codec,
        route: Route,
        chunk_bytes: int,
        shares: Sequence[int],
        opened: Generation | None,
        later: Callable[[Callable[[], None], str], None],
    ) -> None:
        self.generation = opened.number if opened is not None else -1
        self._directories = directories
        self._manifests = directories.manifests() if directories.paths else None
        self._io = io
        self._route = route
        self._workers: WorkerPool = io.workers
        self._codec = codec
        # `groups` is for an `Engine` that reads this: it finds none of its groups.
        self._layout: dict[str, Any] = {
            "kind": KIND, "codec": codec.value, "chunk_bytes": chunk_bytes, "directories": len(directories.paths),
            "groups": [],
        }  # fmt: skip
        shares = shares if opened is None else opened.layout.get("shares", ())
        if len(shares) > 1:
            self._layout["shares"] = list(shares)
        self._later = later
        self._next_generation = self.generation + 1
        self._next_pack = 0
        self._live: dict[str, ExtentPack] = {}
        self._records: dict[int, frozenset[str]] = {}
        """Kinds of packs by generation: the last two, and one whose publishing failed: its manifest may be there."""
        if opened is not None:
            self._records[opened.number] = frozenset(opened.records)
        most_packs = max(1, _MOST_OPEN // max(1, len(directories.paths)))
        self._reads, self._writes = (
            {priority: asyncio.Semaphore(most_packs) for priority in Priority} for _ in range(2)
        )
        """Turns to have a pack open. A load must not queue behind all packs of a commit, or behind all that are put."""
        self._old: list[Path] = []
        """Files of packs that the generation before the opened one, or a newer one, may need, and the opened one does
        not."""
        self._has_newer = opened is not None and opened.number < directories.numbers[0]
        self._doomed: list[ExtentPack] = []

    @property
    def is_durable(self) -> bool:
        """Whether there is a directory to write to."""
        return self._manifests is not None

    # --- packs --------------------------------------------------------------------------------------------------

    async def write(self, name: str, layout: ExtentLayout, source: Place, priority: Priority) -> ExtentPack:
        """Make a new pack with the bytes of `source`.

        Raises:
            StorageError: what was made is removed, as after a cancellation.
        """
        async with self._writes[priority]:
            pack = self._pack(self._next_pack, name, layout)
            self._next_pack += 1
            try:
                try:
                    await self._workers.submit(Priority.WRITE, pack.slots.create)
                    await self._route.copy(layout, source, PackPlace(pack.slots), priority)
                finally:
                    await self._close(pack)
            except BaseException:
                self.discard(pack)
                raise
            return pack

    async def _close(self, pack: ExtentPack) -> None:
        is_closed = threading.Event()

        def close() -> None:
            pack.slots.close()
            is_closed.set()

        try:
            with contextlib.suppress(ClosedError):
                await self._workers.submit(Priority.WRITE, close)
        finally:  # not `except`: in a cancelled task the error of the job is not raised
            if not is_closed.is_set():  # the threads are gone, or were given up and may still use the pack
                self._directories.before_release.callback(pack.slots.close)

    @contextlib.asynccontextmanager
    async def opened(self, pack: ExtentPack, priority: Priority) -> AsyncIterator[PackPlace]:
        """The pack as a place to read from. One user at a time."""
        pack.is_open = True  # also while it waits for its turn: its files must stay
        try:
            async with self._reads[priority]:
                try:
                    await self._workers.submit(priority, pack.slots.open, pack.slots.current)
                    yield PackPlace(pack.slots)
                finally:
                    await self._close(pack)
        finally:
            pack.is_open = False
            if pack.is_discarded:
                self.discard(pack)

    async def sync(self, pack: ExtentPack) -> None:
        """Make a pack durable; done once, because it is never written again.

        Raises:
            StorageError: what was written may be lost. The sync is never retried: from now on it raises this error.
        """
        if pack.sync_failure is not None:
            raise StorageError(f"{pack.sync_failure}; put the entry again")
        if pack.is_synced:
            return
        async with self.opened(pack, Priority.WRITE):
            await self._sync([pack], pack.slots.datasync)
        pack.is_synced = True

    async def _sync(self, packs: Sequence[ExtentPack], sync: Callable[[], None]) -> None:
        """Run a sync in a worker; its failure is final for these packs, even if a cancelled waiter misses it."""
        job = self._workers.submit(Priority.WRITE, sync)
        try:
            await job
        finally:
            if job.done() and isinstance(error := job.exception(), StorageError):
                for pack in packs:
                    pack.is_synced, pack.sync_failure = False, error

    def discard(self, pack: ExtentPack) -> None:
        """Remove a pack, as soon as it is not open and no generation needs it."""
        pack.is_discarded = True
        if pack.is_open:
            return
        if self._is_needed(pack.kind):
            self._doomed.append(pack)
        else:
            self._live.pop(pack.kind, None)
            self._later(lambda: self.unlink(pack.slots.paths()), f"remove {pack.kind}")

    def _is_needed(self, kind: str) -> bool:
        return any(kind in kinds for kinds in self._records.values())

    def _pack(self, number: int, name: str, layout: ExtentLayout) -> ExtentPack:
        kind = f"put-{number}"
        slots = put_pack(kind, layout.chunk_specs(name), self._directories.paths, self._io, self._codec, self._layout)
        pack = ExtentPack(layout, slots)
        self._live[kind] = pack
        return pack

    def unlink(self, paths: Iterable[Path]) -> None:
        """Remove these files, as far as they exist. Worker thread."""
        self._directories.lock.check_in_place()
        for path in paths:
            if os.path.lexists(path):
                self._io.backend.remove(path)

    # --- generations --------------------------------------------------------------------------------------------

    async def publish(self, packs: Sequence[ExtentPack], entries: Any) -> None:
        """Publish a generation of these packs, each of which is synced. See [Note: the barrier] in `manifest_files.py`.

        Raises:
            StorageError: this generation or the one before is there, and the packs of both are kept, as after a
                cancellation.
        """
        if self._manifests is None:
            raise ConfigError("there is no store to commit to; give nvme a directory")
        number, self._next_generation = self._next_generation, self._next_generation + 1
        records: dict[str, Sequence[ChunkRecord | None]] = {pack.kind: list(pack.slots.current) for pack in packs}
        self._records[number] = frozenset(records)
        unnamed = [pack for pack in packs if not pack.is_named]
        await self._sync(unnamed, self._directories.sync)
        for pack in unnamed:
            pack.is_named = True
        if self._has_newer:
            await self._manifests.adopt(self.generation)
            self._has_newer = False
        await self._manifests.publish(Generation(number, self._layout, records, entries))
        self.generation = number
        there = (await self._workers.submit(Priority.WRITE, self._manifests.numbers))[:2]
        self._records = {one: kinds for one, kinds in self._records.items() if one in there}
        if self._old:
            old, self._old = self._old, []
            self._later(lambda: self.unlink(old), "remove old packs")
        doomed, self._doomed = self._doomed, []
        for pack in doomed:
            self.discard(pack)
        if self._directories.is_unfinished:
            await self._workers.submit(Priority.WRITE, self._directories.finish)

    async def recover(
        self, generation: Generation | None, rows: Mapping[str, tuple[str, ExtentLayout]], *, verify: bool
    ) -> None:
        """Take over the packs of an opened generation, and remove what a crash left; newer ones stay until a commit.

        Args:
            rows: by kind of pack, the name and layout of its extent.
            verify: read every chunk before anything is removed.

        Raises:
            FormatError: names a file that is missing or not what the manifest says, or a damaged chunk.
        """
        if generation is None or self._manifests is None:
            await self._workers.submit(Priority.DEMAND, self._directories.begin)
            return
        packs = [self._pack(_number(kind), name, layout) for kind, (name, layout) in rows.items()]
        for pack in packs:
            pack.is_synced = pack.is_named = True
            pack.slots.adopt(generation.records[pack.kind])
            async with self.opened(pack, Priority.DEMAND) as place:  # checks that the files are there, and their sizes
                if verify:
                    await self._route.copy(pack.layout, place, Nowhere(), Priority.DEMAND)
        if not self._has_newer:
            await self._manifests.adopt(generation.number)
        await self._workers.submit(Priority.DEMAND, self._directories.finish)
        before = await self._kinds_before(generation.number)
        found = await self._workers.submit(Priority.DEMAND, self._files)
        self._next_pack = max([-1, *found.values(), *map(_number, rows)]) + 1
        others = {path: kind for path, number in found.items() if (kind := f"put-{number}") not in rows}
        self._old = [path for path, kind in others.items() if self._has_newer or before is None or kind in before]
        stale = [path for path in others if path not in self._old]
        await self._workers.submit(Priority.DEMAND, self.unlink, stale)

    async def _kinds_before(self, number: int) -> frozenset[str] | None:
        """Kinds of packs of the generation before this one, empty if there is none or it is damaged; None: it cannot be
        read at the moment."""
        manifests = self._directories.manifests()
        numbers = await self._workers.submit(Priority.DEMAND, manifests.numbers)
        before = next((one for one in numbers if one < number), None)
        if before is None:
            return frozenset()
        try:
            self._records[before] = frozenset((await manifests.read(before)).records)
        except StorageError:
            return None
        except TierstoreError:
            return frozenset()
        return self._records[before]

    def pack(self, kind: str) -> ExtentPack:
        """A pack by its kind."""
        return self._live[kind]

    def unnamed(self) -> list[Path]:
        """Files that no generation names, for a closing store to remove. Nothing may use a pack any more."""
        return [path for kind, pack in self._live.items() if not self._is_needed(kind) for path in pack.slots.paths()]

    def _files(self) -> dict[Path, int]:
        found = {}
        for directory in self._directories.paths:
            for name in self._io.backend.names(directory):
                if match := _PACK_FILE.fullmatch(name):
                    found[directory / name] = int(match[1])
        return found


def put_pack(
    kind: str,
    specs: Sequence[ChunkSpec],
    directories: Sequence[Path],
    io: ChunkIO,
    codec: Codec,
    layout: Mapping[str, Any],
) -> SlotPack:
    """The pack of an extent in a store of this layout; the first chunks of packs are spread over the directories.

    (In a store without shares, which an older release made, all packs begin on the first directory.) Multiples of the
    golden ratio also spread every second or every third pack evenly: large and small packs may alternate.
    """
    shares = recorded_shares(layout)
    after = (_number(kind) * _GOLDEN % 2**32) * sum(shares) >> 32 if "shares" in layout else 0
    return SlotPack(kind, specs, directories, io, codec, slots=1, shares=shares, after=after)


def _number(kind: str) -> int:
    return int(kind.removeprefix("put-"))
