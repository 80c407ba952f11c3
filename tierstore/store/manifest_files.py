"""Generations: the manifest that makes a step permanent, and which of them stay.

Scope: how a manifest is published, read, adopted and removed.
Not here: what it says (`manifest.py`); chunk data (`slots.py`); the directories (`directories.py`) and their lock
    (`lock.py`); what the captured state means (`train/`).

[Note: the barrier] A generation is published in this order: every chunk written, every file of chunks fdatasynced, and,
side by side with both, the captured state written and fsynced, and the callbacks of `before_commit` run; then the
manifest written, fsynced and renamed, the directory fsynced. Only when the last of them has returned may a byte of the
generation before be overwritten. A failed fsync is never retried: the kernel may have dropped the dirty pages, so that
generation is abandoned and the error raised. (A small file that finds no room is written whole, into another one.)
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

_SPARE_BYTES = 2**20  # a file that is a little too long is read, and is damaged
PER_RANK = ("registered", "buffers", "random")
"""What of the captured state every rank has its own of; the rest is the same at all."""
COMMIT = "commit"
"""What of the captured state tells a commit from all others: numbers are those of another run, too."""


class Manifests:
    """The manifests of a store, in its first directory. The last two are kept.

    Args:
        threads: which do what coroutines ask for; None: those of the loop.
        lock: held on the directories of the store by whoever publishes.
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
            missing_ok: there are none without the directory; what can be made there is seen when it is made. Who
                removes what no generation needs may not take it so.

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
        """Remove the files of these generations, the manifests first; none of another store that is there now."""
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
        """Write what a generation captures, durably: it may be there before the chunks are.

        Nothing of this is read before the generation is published; `abandon` it if it will not be.

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
        """Make it the last one. See [Note: the barrier]: chunks are durable before this is called.

        Args:
            noted: what `capture` gave; None: it is still to be written.

        Raises:
            StorageError: it is abandoned; or it is published, and older ones could not be removed.
        """
        if noted is None:
            noted = await self.capture(generation.number, generation.captured)
        try:
            await self._in_thread(self._publish, generation, noted)
        except Exception:  # not if the loop ends: then the thread may still publish it, and it is whole
            # Perhaps renamed, but not known to be durable.
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
        """Let the files of this generation be written over those of the one before the last.

        Returns:
            Whether there is such a one. Most of its chunks are overwritten already.
        """
        if not (older := self.numbers()[1:]):
            return False
        for path in (self.manifest_path, self.captured_path):  # the first is what makes it a generation
            self._backend.replace(path(older[0]), temporary(path(number)))
        return True

    @contextlib.contextmanager
    def _tells_moves(self) -> Iterator[None]:
        """Where something is gone, that the directory was moved meanwhile says more."""
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
        """Remove what there is of a generation that is not published, if that can be: another error is told already."""
        with contextlib.suppress(TierstoreError):
            await self._in_thread(self._remove, number.__eq__)

    async def _in_thread(self, job: Callable[[*Ts], T], *args: *Ts) -> T:
        """In one hop; a cancellation waits for its end, so that no thread is left writing behind the caller's back."""
        return await to_the_end(cast(Coroutine[Any, Any, T], wrap(job)(*args, executor=self._threads)))

    async def adopt(self, number: int) -> None:
        """Make this generation the last one, durably; before that no byte of the one before it may be overwritten.

        A process that was killed between the rename of a manifest and the fsync of its directory has left a name
        that a power cut may still take back. One that was killed while it removed an old generation has left a part.
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
            FormatError: it is not a manifest of this version, or damaged.
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
        """What its manifest says of one generation, without the captured state; read in this thread.

        Raises:
            FormatError: it is not a manifest of this version, or damaged.
        """
        path = self.manifest_path(number)
        return read_manifest(read_bytes(path, backend=self._backend), number, str(path))

    def manifest_path(self, number: int) -> Path:
        """What makes a generation one."""
        return self.directory / f"manifest-{number:012d}.json"

    def captured_path(self, number: int) -> Path:
        """What a manifest needs beside the packs."""
        return self.directory / f"captured-{number:012d}.safetensors"


def _is_gone(error: StorageError) -> bool:
    cause = error.__cause__
    while isinstance(cause, StorageError):
        cause = cause.__cause__
    return isinstance(cause, FileNotFoundError | NotADirectoryError)


def unusable(path: Path, error: OSError | StorageError) -> StorageError:
    """What the system has refused, told of a store."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    kind = type(error) if isinstance(error, StorageError) else StorageError
    return kind(f"cannot use {path} as a store: {getattr(cause, 'strerror', None) or error}")
