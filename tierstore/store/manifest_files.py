"""Generations: the manifest that makes a step permanent, and which generations stay.

Scope: how a manifest is published, read, adopted and removed.
Not here: its content (`manifest.py`); chunk data (`slots.py`); the directories (`directories.py`) and their lock
    (`lock.py`); what the captured state means (`train/`).

[Note: the barrier] A generation is published in this order. First every chunk is written, then every file of chunks
fdatasynced; side by side with both, the captured state is written and fsynced and the callbacks of `before_commit` run.
Then the manifest is written, fsynced and renamed, and the directory fsynced. Only when that last fsync has returned may
a byte of the generation before be overwritten. A failed fsync is never retried, because the kernel may have dropped the
dirty pages: the generation is abandoned and the error raised. (On a full disk, a small file is written once more, but
whole and over another file.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

from aiofiles.os import wrap

from tierstore.errors import FormatError, StorageError, TierstoreError
from tierstore.io.backend import Backend
from tierstore.io.files import read_bytes, replace_file, temporary
from tierstore.io.tasks import to_the_end
from tierstore.store.lock import StoreLock
from tierstore.store.manifest import (
    Captured,
    Generation,
    captured_text,
    manifest_text,
    read_generation,
    read_manifest,
)
from tierstore.store.names import MANIFEST, SMALL

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_SPARE_BYTES = 2**20  # a file that is too long by up to this is read, and then refused as damaged
PER_RANK = ("registered", "buffers", "random")
"""Parts of the captured state that differ by rank; the rest is the same on all ranks."""
COMMIT = "commit"
"""The part of the captured state that tells a commit from all others; numbers of generations recur in other runs."""


class Manifests:
    """The manifests of a store, in its first directory. The last two are kept.

    Args:
        threads: run the jobs of coroutines; None: the threads of the loop.
        lock: the lock on the directories, which whoever publishes holds.
    """

    def __init__(
        self, directory: Path, backend: Backend, threads: Executor | None = None, lock: StoreLock | None = None
    ) -> None:
        self.directory = directory
        self._backend = backend
        self._threads = threads
        self._lock = lock

    def numbers(self, *, missing_ok: bool = False) -> list[int]:
        """Numbers of the committed generations that are still there, newest first.

        Args:
            missing_ok: a missing directory counts as empty. Not for callers that remove files: they must not mistake a
                directory that is away for an empty one.

        Raises:
            StorageError: the system refused.
        """
        try:
            found = map(MANIFEST.fullmatch, self._backend.names(self.directory))
            return sorted((int(match["number"]) for match in found if match), reverse=True)
        except StorageError as error:
            if missing_ok and _is_gone(error):
                return []
            raise unusable(self.directory, error) from error

    def _remove(self, is_wanted: Callable[[int], bool]) -> None:
        """Remove files of generations that `is_wanted` accepts, manifests first; none if the directory was moved."""
        self._check_in_place()
        with self._tells_moves():
            for name in reversed(self._backend.names(self.directory)):
                match = SMALL.fullmatch(name)
                if match and is_wanted(int(match["number"])):
                    self._backend.remove(self.directory / name)

    def _remove_all_but_two(self, last: int) -> None:
        """Keep this generation and the one before it, if there is one."""
        with self._tells_moves():
            kept = [number for number in self.numbers() if number <= last][:2]
        if last not in kept:
            raise StorageError(f"{self.manifest_path(last)} is gone; nothing was removed")
        self._remove(lambda number: number not in kept)

    async def capture(self, number: int, captured: Any) -> Captured:
        """Write the captured state of a generation, durably; its chunks need not be written yet.

        Nobody reads it before the generation is published; call `abandon` if that will not happen.

        Raises:
            StorageError: the system refused.
        """
        return await self._in_thread(self._capture, number, captured)

    def _capture(self, number: int, captured: Any) -> Captured:
        self._check_in_place()
        noted, data = captured_text(captured)
        self._write(self.captured_path(number), number, data)
        return noted

    async def publish(self, generation: Generation, noted: Captured | None = None) -> None:
        """Make a generation the last one. See [Note: the barrier]: its chunks are durable before this is called.

        Args:
            noted: what `capture` gave; None: the captured state is still to be written.

        Raises:
            StorageError: the generation is abandoned; or it is published, but older ones could not be removed.
        """
        if noted is None:
            noted = await self.capture(generation.number, generation.captured)
        try:
            await self._in_thread(self._publish, generation, noted)
        except Exception:  # not a cancellation when the loop ends: the thread may still publish it whole
            # The manifest may be renamed, but is not known to be durable.
            await self.abandon(generation.number)
            raise
        await self._in_thread(self._remove_all_but_two, generation.number)

    def _publish(self, generation: Generation, noted: Captured) -> None:
        text = manifest_text(generation.number, generation.layout, generation.records, noted)
        self._check_in_place()
        self._write(self.manifest_path(generation.number), generation.number, text)

    def _write(self, path: Path, number: int, data: bytes) -> None:
        with self._tells_moves():
            replace_file(path, data, backend=self._backend, makes_room=partial(self._makes_room, number))

    def _makes_room(self, number: int) -> bool:
        """Let the files of generation `number` be written over those of the oldest generation.

        Returns:
            Whether there is one older than the last. Most of its chunks are overwritten already.
        """
        self._check_in_place()
        numbers = self.numbers()
        if len(numbers) < 2:
            return False
        for path in (self.manifest_path, self.captured_path):  # the manifest first: it makes the files a generation
            self._backend.replace(path(numbers[-1]), temporary(path(number)))
        return True

    @contextlib.contextmanager
    def _tells_moves(self) -> Iterator[None]:
        """If a file is gone because the directory was moved, raise that: it says more."""
        try:
            yield
        except StorageError as error:
            if _is_gone(error):
                self._check_in_place()
            raise

    def _check_in_place(self) -> None:
        if self._lock is not None:
            with self._backend.calling("inspection", self.directory):
                self._lock.check_in_place()

    async def abandon(self, number: int) -> None:
        """Remove the files of an unpublished generation, as far as possible: another error is raised already."""
        with contextlib.suppress(TierstoreError):
            await self._in_thread(self._remove, number.__eq__)

    async def _in_thread(self, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a job in one thread hop; a cancellation waits for its end, so that no thread goes on writing after it."""
        return await to_the_end(cast(Coroutine[Any, Any, T], wrap(job)(*args, executor=self._threads)))

    async def adopt(self, number: int) -> None:
        """Make this generation the last one, durably; until then no byte of the generation before may be overwritten.

        A process that was killed between the rename of a manifest and the fsync of its directory has left a name
        that a power cut may still take back. A process that was killed while it removed an old generation has left
        some of its files.
        """
        await self._in_thread(self._adopt, number)

    def _adopt(self, number: int) -> None:
        self._remove_all_but_two(number)
        self._backend.sync_directory(self.directory)

    async def read(self, number: int) -> Generation:
        """Read one generation, in one hop. Raises: as `read_here`."""
        return await wrap(self.read_here)(number, executor=self._threads)

    def read_here(self, number: int) -> Generation:
        """Read one generation in this thread, which waits for the disk.

        Raises:
            FormatError: as `manifest_here`; or the captured state is missing or damaged.
        """
        body = self.manifest_here(number)
        try:
            most_bytes = body["captured_bytes"] + _SPARE_BYTES
            captured = read_bytes(self.captured_path(number), most_bytes=most_bytes, backend=self._backend)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise FormatError(
                f"the store is damaged: {self.captured_path(number)} is missing; go back one with resume='previous'"
            ) from None
        return read_generation(body, captured, str(self.captured_path(number)))

    def manifest_here(self, number: int) -> dict[str, Any]:
        """What the manifest of a generation says, without the captured arrays; read in this thread.

        Raises:
            FormatError: it is damaged, or not a manifest of this generation that this release can read.
        """
        path = self.manifest_path(number)
        return read_manifest(read_bytes(path, backend=self._backend), number, str(path))

    def manifest_path(self, number: int) -> Path:
        """The file that makes a generation exist."""
        return self.directory / f"manifest-{number:012d}.json"

    def captured_path(self, number: int) -> Path:
        """The file of the captured arrays, which a generation needs beside its packs."""
        return self.directory / f"captured-{number:012d}.safetensors"


def _is_gone(error: StorageError) -> bool:
    cause = error.__cause__
    while isinstance(cause, StorageError):
        cause = cause.__cause__
    return isinstance(cause, FileNotFoundError | NotADirectoryError)


def unusable(path: Path, error: OSError | StorageError) -> StorageError:
    """The error that says that the system refused a directory as a store."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    kind = type(error) if isinstance(error, StorageError) else StorageError
    return kind(f"cannot use {path} as a store: {getattr(cause, 'strerror', None) or error}")
