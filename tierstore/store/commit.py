"""Generations: the manifest that makes a step permanent, recovery on open, and the lock of a store.

Scope: how a manifest is published and read; who may use a directory.
Not here: what it says (`manifest.py`); chunk data (`slots.py`); what the captured state means (`train/`).

[Note: the barrier] A generation is published in this order: every chunk written, every file of chunks fdatasynced, and,
side by side with both, the captured state written and fsynced; then the manifest written, fsynced and renamed, the
directory fsynced. Only when the last of them has returned may a byte of the generation before be overwritten. A failed
fsync is never retried: the kernel may have dropped the dirty pages, so that generation is abandoned and the error
raised.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

from aiofiles.os import wrap

from tierstore.errors import ConfigError, FormatError, StorageError, StoreLocked, TierstoreError
from tierstore.io.backend import Backend, storage_errors
from tierstore.io.files import is_at, locked_file, read_bytes, replace_file, why_not_writable
from tierstore.io.fork import ForkAware
from tierstore.io.tasks import to_the_end
from tierstore.pack.checked import number_of, object_of, text_of
from tierstore.pack.strict_json import parse_json
from tierstore.store.manifest import Captured, captured_text, manifest_text, read_generation, read_manifest
from tierstore.store.manifest import Generation as Generation  # for those who publish and read them
from tierstore.store.names import IDENTITY, LOCK, MANIFEST, PACK, SMALL, UNFINISHED, holds_data, is_of_a_store

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_MOST_IDENTITY_BYTES = 1000
_MOST_OWNER_BYTES = 400
_SPARE_BYTES = 2**20  # a file that is a little too long is read, and is damaged
PER_RANK = ("registered", "buffers", "random")
"""What of the captured state every rank has its own of; the rest is the same at all."""
COMMIT = "commit"
"""What of the captured state tells a commit from all others: numbers are those of another run, too."""


class StoreLock(ForkAware):
    """Exclusive use of the directories of a store, by flock: it ends with the process, however that ends.

    Args:
        member: a rank that writes the store of a leader has a lock of its own: the leader's death does not end it.
    """

    def __init__(self, directories: Sequence[Path] = (), *, member: int | None = None) -> None:
        super().__init__()
        self._member = member
        self._descriptors: dict[Path, int] = {}
        self.add(directories)

    def add(self, directories: Sequence[Path]) -> None:
        """Lock more directories, those that are locked already left alone.

        Raises:
            StoreLocked: another process, or another engine of this one, has one; nothing is locked any more.
        """
        name = LOCK if self._member is None else f"{LOCK}.{self._member}"
        try:
            for directory in directories:
                path = directory / name
                if path not in self._descriptors:
                    self._descriptors[path] = self._lock(path)
                    if self._member is None:
                        self._refuse_members(directory)
        except BaseException:
            self.release()
            raise

    def _refuse_members(self, directory: Path) -> None:
        """Ranks of another run may go on writing after their leader's death."""
        for path in directory.glob(f"{LOCK}.*"):
            os.close(self._lock(path))
            path.unlink(missing_ok=True)

    @staticmethod
    def _lock(path: Path) -> int:
        descriptor = locked_file(path, 0o600, is_needed=True)
        if descriptor is None:
            raise _in_use(path)
        with contextlib.suppress(OSError):  # only for the message of others: a full disk is no reason to fail here
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
        return descriptor

    def check_in_place(self) -> None:
        """What is opened by name now is in the directories that are locked; packs stay those that were opened.

        Raises:
            StorageError: one was moved, or its lock removed; another process may use what is there.
        """
        for path, descriptor in list(self._descriptors.items()):
            with storage_errors("inspection", path):
                is_there = is_at(path, descriptor)
            if not is_there:
                raise StorageError(
                    f"{path.parent} is not the store that is in use any more: it, or its file {path.name!r}, was "
                    "moved, replaced or removed, and nothing is committed there; if it was moved, its last generation "
                    "is whole where it is now: move it back, and go on with resume='auto'"
                )

    @property
    def is_in_place(self) -> bool:
        """Whether `check_in_place` finds nothing."""
        try:
            self.check_in_place()
        except StorageError:
            return False
        return True

    def let_go(self) -> None:
        """A forked child shares the open file, and with it the lock, which would outlive the parent."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def release(self) -> None:
        """Give the directories back; twice is fine."""
        while self._descriptors:
            path, descriptor = self._descriptors.popitem()  # first: broken off in here, another's is not removed again
            with contextlib.suppress(OSError):
                if is_at(path, descriptor):
                    path.unlink()
            os.close(descriptor)


def _in_use(path: Path) -> StoreLocked:
    owner = b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        owner = file.read(_MOST_OWNER_BYTES)
    process, _, host = owner.decode("ascii", "replace").strip().partition("\n")
    if host not in ("", socket.gethostname()):  # another rank of this run, perhaps
        what = f" of {host}; stop it, give each machine of one run a directory of its own"
    elif process == str(os.getpid()):
        what = ", which is this one: close the engine or store that has it, which ends with the process if nobody can"
    else:
        what = "; stop it"
    process = process or "unknown"
    return StoreLocked(f"the store {path.parent} is in use by process {process}{what}, or choose another directory")


def claim_directory(path: Path, backend: Backend) -> bool:
    """Make a store directory (0700), or accept one that holds nothing but a store.

    Directories above it are made too; the name of each new one is durable on return.

    Returns:
        Whether it was made.
    Raises:
        ConfigError: it holds files that no store made; nothing was changed.
        StorageError: it cannot be made or written.
    """
    try:
        is_made = backend.make_directories(path, 0o700)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is not a directory")
        strangers = [name for name in backend.names(path) if not is_of_a_store(name)]
    except (OSError, StorageError) as error:
        raise _unusable(path, error) from error
    if strangers:
        raise ConfigError(f"{path} is not a store: it holds {strangers[0]!r}; give an empty or a new directory")
    if reason := why_not_writable(path):
        raise StorageError(f"cannot use {path} as a store: {reason}")
    return is_made


def _unusable(path: Path, error: OSError | StorageError) -> StorageError:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    kind = type(error) if isinstance(error, StorageError) else StorageError
    return kind(f"cannot use {path} as a store: {getattr(cause, 'strerror', None) or error}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which directory of which store a directory is; a file in each of a striped store, made before any pack.

    Packs alone do not tell: those of two stores of one model have the same names, sizes and, perhaps, chunks.
    """

    store: str
    directory: int
    directories: int


def identity_of(directory: Path) -> Identity | None:
    """None: a store of one directory, or made by an older release, or the file is damaged."""
    path = directory / IDENTITY
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            values = object_of(parse_json(file.read(_MOST_IDENTITY_BYTES), str(path)), Identity.__slots__, str(path))
        store, number, count = values
        count = number_of(count, 2, 2**16, f"{path}: directories")
        return Identity(text_of(store, f"{path}: store"), number_of(number, 0, count - 1, f"{path}: directory"), count)
    except (OSError, FormatError):
        return None


def _identify(directories: Sequence[Path], backend: Backend) -> None:
    store = secrets.token_hex(16)
    for number, directory in enumerate(directories if len(directories) > 1 else ()):
        identity = Identity(store, number, len(directories))
        backend.write_file(directory / IDENTITY, json.dumps(asdict(identity)).encode(), 0o600)
        backend.sync_directory(directory)


def mark_unfinished(directories: Sequence[Path], backend: Backend) -> None:
    """What packs these directories hold is needed by no generation, unless there is a manifest."""
    for directory in directories:
        backend.make_empty(directory / UNFINISHED)
        backend.sync_directory(directory)


def begin_store(directories: Sequence[Path], backend: Backend) -> None:
    """Mark directories as those of a store that holds no generation yet; what such a store has left is removed.

    The mark tells packs that nobody needs from those of a store whose manifests are elsewhere: its directories were
    given in another order, or not all of them.

    Raises:
        ConfigError: one holds packs or manifests of a store; nothing was changed.
        StorageError: what is left is marked, or nothing.
    """
    if numbers := Manifests(directories[0], backend).numbers():
        raise ConfigError(
            f"{directories[0]} holds generation {numbers[0]} of a run that has begun there in this moment; go on "
            "with it by resume='auto', or choose another directory"
        )
    for directory in directories:
        names = backend.names(directory)
        for name in names:
            if MANIFEST.fullmatch(name) or (UNFINISHED not in names and PACK.fullmatch(name)):
                first = "it" if directory == directories[0] else directories[0]
                raise ConfigError(
                    f"{directory} holds {name} of a store, but {first} is given as its first directory and holds no "
                    "generation; give all directories of that store in their order, or others"
                )
    mark_unfinished(directories, backend)  # before any pack, which nobody could tell from those of another store
    for directory in directories:
        for name in backend.names(directory):
            if holds_data(name) or name == IDENTITY:  # of one that had other directories
                backend.remove(directory / name)
    _identify(directories, backend)


def end_store_making(directories: Sequence[Path], backend: Backend) -> None:
    """Take away the mark of `begin_store`: the store holds a generation, or nothing, and then no identity either.

    Directories that hold a generation belong together, which they say from now on: an older release did not write it.
    """
    names = [UNFINISHED]  # last: what is marked can be removed
    known = [identity_of(directory) for directory in directories]
    if not Manifests(directories[0], backend).numbers():
        names.insert(0, IDENTITY)
    elif None in known or len({one.store for one in known if one}) > 1:
        _identify(directories, backend)
    for directory in directories:
        if gone := [directory / name for name in names if (directory / name).exists()]:
            for path in gone:
                backend.remove(path)
            backend.sync_directory(directory)  # or the mark might return beside packs that a generation needs


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

    def numbers(self) -> list[int]:
        """Numbers of the committed generations that are still there, newest first; none without the directory."""
        try:
            return self._numbers(MANIFEST)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                return []  # what can be made there is seen when it is made
            raise _unusable(self.directory, error) from error

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        found = map(pattern.fullmatch, self._backend.names(self.directory))
        return sorted({int(match["number"]) for match in found if match}, reverse=True)

    def _remove(self, numbers: Collection[int]) -> None:
        """Remove the files of these generations, the manifests first; none of another store that is there now."""
        self._check_in_place()
        for name in reversed(self._backend.names(self.directory)):
            match = SMALL.fullmatch(name)
            if match and int(match["number"]) in numbers:
                self._backend.remove(self.directory / name)

    def _remove_all_but_two(self, last: int) -> None:
        """Keep this generation and the one before it, if there is one."""
        kept = [number for number in self.numbers() if number <= last][:2]
        self._remove(set(self._numbers(SMALL)) - set(kept))

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
        replace_file(self._captured(number), data, backend=self._backend)
        return noted

    async def publish(self, generation: Generation, noted: Captured | None = None) -> None:
        """Make it the last one. See [Note: the barrier]: chunks are durable before this is called.

        Args:
            noted: what `capture` gave; None: it is still to be written.

        Raises:
            StorageError: it is abandoned.
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
        replace_file(self._manifest(generation.number), text, backend=self._backend)

    def _check_in_place(self) -> None:
        if self._lock is not None:
            with self._backend.calling("inspection", self.directory):
                self._lock.check_in_place()

    async def abandon(self, number: int) -> None:
        """Remove what there is of a generation that is not published, if that can be: another error is told already."""
        with contextlib.suppress(TierstoreError):
            await self._in_thread(self._remove, {number})

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
        path = self._manifest(number)
        body = read_manifest(read_bytes(path, backend=self._backend), number, str(path))
        try:
            most_bytes = body["captured_bytes"] + _SPARE_BYTES
            captured = read_bytes(self._captured(number), most_bytes=most_bytes, backend=self._backend)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise FormatError(
                f"the store is damaged: {self._captured(number)} is missing; go back one with resume='previous'"
            ) from None
        return read_generation(body, captured, str(self._captured(number)))

    def _manifest(self, number: int) -> Path:
        return self.directory / f"manifest-{number:012d}.json"

    def _captured(self, number: int) -> Path:
        return self.directory / f"captured-{number:012d}.safetensors"
