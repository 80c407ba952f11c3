"""Named snapshots: a generation kept as a store of its own, in a directory below each of those of the store.

Scope: its files, which share blocks with the store's where the file system can (reflink), and are copied elsewhere; its
    manifest; taking away what failed.
Not here: how long the generation stays as it is, and when all ranks are through (`publishing.py`).
Owner: the leader of a team, which holds the lock of the directories it makes; threads make the calls of the system.

[Note: where training waits] A generation that is being copied is not overwritten by the step after it, which writes the
other slots; the one after that would, and waits. A kill leaves no manifest: what is there then is marked as unfinished,
and goes when the next snapshot of that name begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tierstore.errors import ClosedError, ConfigError, TierstoreError
from tierstore.io.backend import Backend
from tierstore.io.files import read_bytes, replace_file
from tierstore.store.commit import Manifests
from tierstore.store.directories import begin_store, claim_directory, end_store_making
from tierstore.store.lock import StoreLock
from tierstore.store.names import SNAPSHOTS
from tierstore.store.removal import remove
from tierstore.store.slots import KeptFile, SlotPack

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def snapshot_directories(directories: Sequence[Path], name: str) -> tuple[Path, ...]:
    """Where a snapshot of that name lies, in the order of the directories of its store.

    Raises:
        ConfigError: it is no name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"a snapshot is named by up to 100 letters, digits, '.', '_' and '-', the first a letter or digit, "
            f"not {name!r}"
        )
    return tuple(directory / SNAPSHOTS / name for directory in directories)


class Snapshot:
    """A generation on its way to directories of its own.

    Args:
        number: of the generation, which is published; nobody may overwrite it before `copied` has returned.
        packs: of the store.

    Attributes:
        is_reflink: nothing is copied; known after `begin`.
        start_s: on the clock. `seconds`: from there to its end; None until then.
        waited_s: for how long the commit after it was held up, once that was published.
    """

    def __init__(
        self,
        name: str,
        directories: Sequence[Path],
        number: int,
        packs: Sequence[SlotPack],
        backend: Backend,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.number = number
        self.directories = snapshot_directories(directories, name)
        self.is_reflink = True
        self.start_s = clock()
        self.seconds: float | None = None
        self.waited_s = 0.0
        self._copied_bytes = 0
        self._source = directories[0]
        self._packs = packs
        self._files: list[KeptFile] = []
        self._backend = backend
        self._lock = StoreLock()
        self._to_copy: list[KeptFile] = []
        self._copying: asyncio.Future[None] | None = None
        self._is_ours = self._is_given_up = False

    def report(self) -> dict[str, Any]:
        """What it took."""
        return {
            "generation": self.number,
            "is_reflink": self.is_reflink,
            "copied_bytes": self._copied_bytes,
            "seconds": self.seconds,
            "waited_s": self.waited_s,
        }

    def begin(self) -> None:
        """Make its directories and files, whole or empty and at full size.

        Raises:
            ConfigError: there is one of this name.
            StorageError: nothing is left of it.
        """
        # As the manifest has them: a rank knows the records of its own chunks.
        records = Manifests(self._source, self._backend).read_here(self.number).records
        self._files = [file for pack in self._packs for file in pack.kept_files(records.get(pack.kind, ()))]
        if Manifests(self.directories[0], self._backend).numbers():
            raise ConfigError(
                f"there is a snapshot {self.name!r} already, in {self.directories[0]}; choose another name, or remove "
                "it: tierstore delete takes its directories"
            )
        for directory in self.directories:
            self._backend.make_directories(directory.parent, 0o700)
            claim_directory(directory, self._backend)
        self._lock.add(self.directories)
        try:
            begin_store(self.directories, self._backend)
            self._is_ours = True
            for file in self._files:
                if not self._backend.clone(file.path, self._copy_of(file)):
                    self._to_copy.append(file)
                    self._backend.create(self._copy_of(file), file.file_bytes).close()
        except BaseException:
            self.abandon()
            raise
        self.is_reflink = not self._to_copy

    def start_copying(self) -> None:
        """In a thread; `copied` waits for it. The loop calls this."""
        self._copying = asyncio.ensure_future(asyncio.to_thread(self._copy))

    def _copy(self) -> None:
        for file in self._to_copy:
            for offset, nbytes in file.ranges:
                if self._is_given_up:
                    raise ClosedError(f"the snapshot {self.name!r} was given up")
                self._backend.copy_range(file.path, self._copy_of(file), offset, nbytes)
                self._copied_bytes += nbytes
        for file in self._files:
            with contextlib.closing(self._backend.open(self._copy_of(file), writable=True, is_counted=False)) as copy:
                copy.datasync()
        for directory in self.directories:
            self._backend.sync_directory(directory)

    async def copied(self) -> None:
        """All its files are whole and durable.

        Raises:
            StorageError: the system refused.
        """
        if self._copying is not None:
            try:
                await asyncio.shield(self._copying)
            except asyncio.CancelledError:
                self._is_given_up = True
                raise

    def publish(self) -> None:
        """Make it a store that opens, by the manifest of its generation; then others may use it."""
        of = Manifests(self._source, self._backend)
        for path in (of.captured_path(self.number), of.manifest_path(self.number)):
            data = read_bytes(path, backend=self._backend)
            replace_file(self.directories[0] / path.name, data, backend=self._backend)
        end_store_making(self.directories, self._backend)
        self._lock.release()

    def abandon(self) -> None:
        """Take away what there is of it, as far as that can be: another error is told already."""
        self._lock.release()
        if self._is_ours:  # else there is another one of this name, perhaps
            with contextlib.suppress(TierstoreError):
                remove(self.directories, self._backend)

    def _copy_of(self, file: KeptFile) -> Path:
        return file.path.parent / SNAPSHOTS / self.name / file.path.name
