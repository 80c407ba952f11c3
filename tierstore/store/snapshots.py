"""Named snapshots: a generation kept as a store of its own, in a directory below each directory of the store.

Scope: the files of a snapshot, which share blocks with those of the store if the file system can do that (reflink), and
    are copied otherwise; its manifest; removing a snapshot that failed.
Not here: how long the generation must not be overwritten, and when all ranks are done (`commits.py`).
Owner: the leader of a team, which holds the lock of the directories it makes; threads make the system calls.

[Note: where training waits] The step after a generation does not overwrite it while it is copied, because it writes the
other slots. The step after that one would, so it does not begin before the copy is whole. A kill leaves no manifest:
what is there then is marked as unfinished, and is removed when the next snapshot begins.
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
from tierstore.store.directories import begin_store, claim_directory, end_store_making
from tierstore.store.lock import StoreLock
from tierstore.store.manifest_files import Manifests
from tierstore.store.names import SNAPSHOTS, UNFINISHED
from tierstore.store.removal import remove
from tierstore.store.slots import KeptFile, SlotPack

_SYNCED_AT_ONCE = 2**28
"""Bytes: a sync of more might take so long that the copy seems to stand still."""
_COPIED_AT_ONCE = 2**25
"""Bytes of the captured state, for the same reason."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def snapshot_directories(directories: Sequence[Path], name: str) -> tuple[Path, ...]:
    """Where a snapshot of that name lies, in the order of the directories of its store.

    Raises:
        ConfigError: it is not a valid name.
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
        number: of the generation, which is published; it must not be overwritten before `copied` has returned.
        packs: the packs of the store that hold generations.

    Attributes:
        is_reflink: its files share blocks with those of the store, and nothing is copied.
        waited_s: how long training has waited for it.
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
        self.waited_s = 0.0
        self._source = directories[0]
        self._packs: Sequence[SlotPack] = packs
        self._backend = backend
        self._clock = clock
        self._start_s = clock()
        self._seconds: float | None = None
        self._failure: str | None = None
        self._lock = StoreLock()
        self._files: list[KeptFile] = []
        self._to_copy: list[KeptFile] = []
        self._copied_bytes = 0
        self._copying: asyncio.Future[None] | None = None
        self._has_moved = asyncio.Event()
        self._is_ours = self._is_given_up = False

    def report(self) -> dict[str, Any]:
        """What the snapshot took; `seconds` is None until it has ended, `failure` is None unless it has failed."""
        return {
            "generation": self.number,
            "is_reflink": self.is_reflink,
            "copied_bytes": self._copied_bytes,
            "seconds": self._seconds,
            "waited_s": self.waited_s,
            "failure": self._failure,
        }

    def end(self, failure: Exception | None = None) -> None:
        """The snapshot is published, or has failed."""
        self._seconds = self._clock() - self._start_s
        self._failure = None if failure is None else str(failure)
        self._packs, self._files, self._to_copy = (), [], []

    def begin(self) -> bool:
        """Make its directories, and its files, whole or with disk space for the copy. If this fails, call `abandon`.

        Returns:
            Whether all files are whole.

        Raises:
            ConfigError: there is a snapshot of this name.
            StorageError: the system refused.
        """
        if Manifests(self.directories[0], self._backend).numbers(missing_ok=True):
            raise ConfigError(
                f"there is a snapshot {self.name!r} already, in {self.directories[0]}; choose another name, or remove "
                "it by tierstore delete, which is given all of its directories"
            )
        self._remove_unfinished()
        of = Manifests(self._source, self._backend)
        said = of.manifest_here(self.number)  # of all ranks: this one knows its own records only
        records, captured_bytes = said["records"], said["captured_bytes"]
        self._files = [file for pack in self._packs for file in pack.kept_files(records.get(pack.kind, ()))]
        pieces = [(at, min(_COPIED_AT_ONCE, captured_bytes - at)) for at in range(0, captured_bytes, _COPIED_AT_ONCE)]
        self._files.append(KeptFile(of.captured_path(self.number), captured_bytes, tuple(pieces)))
        for directory in self.directories:
            self._backend.make_directories(directory.parent, 0o700)
            claim_directory(directory, self._backend)
        self._lock.add(self.directories)
        begin_store(self.directories, self._backend)
        self._is_ours = True
        for file in self._files:
            if not self._backend.clone(file.path, self._copy_of(file)):
                self._to_copy.append(file)
                self._backend.create(self._copy_of(file), file.file_bytes, file.holes).close()
        # The snapshot must not take the space that the next commit of the run needs: a full disk fails here.
        spare = self.directories[0] / f"{of.manifest_path(self.number).name}.tmp"
        self._backend.create(spare, captured_bytes + 2 * of.manifest_path(self.number).stat().st_size).close()
        self._backend.remove(spare)
        return not self._to_copy

    def _remove_unfinished(self) -> None:
        """Remove what killed snapshots left: it takes space, and nobody may ever ask for one of the same name again."""
        stores = [directory.parent for directory in self.directories]
        names = {name for store in stores if store.is_dir() for name in self._backend.names(store)}
        for name in sorted(names):
            with contextlib.suppress(TierstoreError, OSError):  # it is in use, or cannot be removed
                left = [store / name for store in stores if (store / name).is_dir()]
                if any((one / UNFINISHED).is_file() for one in left):  # a quick look first: `remove` takes longer
                    remove(left, self._backend, only_unfinished=True)

    def start_copying(self) -> None:
        """Start copying in a thread; `copied` waits for that. Call this on the loop."""
        self._copying = asyncio.ensure_future(self._copied_in_a_thread())

    async def _copied_in_a_thread(self) -> None:
        try:
            await asyncio.to_thread(self._copy, asyncio.get_running_loop())
        except asyncio.CancelledError:
            self._is_given_up = True  # the thread looks at this
            raise

    def _copy(self, loop: asyncio.AbstractEventLoop) -> None:
        unsynced = 0
        for file in self._files:
            copy = self._copy_of(file)
            for offset, nbytes in file.ranges if file in self._to_copy else ():
                if self._is_given_up:
                    raise ClosedError(f"the snapshot {self.name!r} was ended before it was whole")
                self._backend.copy_range(file.path, copy, offset, nbytes)
                self._copied_bytes += nbytes
                unsynced += nbytes
                if unsynced >= _SYNCED_AT_ONCE:
                    self._sync(copy)
                    unsynced = 0
                loop.call_soon_threadsafe(self._has_moved.set)
            self._sync(copy)
        for directory in self.directories:
            self._backend.sync_directory(directory)

    def _sync(self, path: Path) -> None:
        with contextlib.closing(self._backend.open(path, writable=True, is_counted=False)) as file:
            file.datasync()

    async def moves(self) -> bool:
        """Wait until another part is copied, or the copy ends. Returns whether there is more to copy."""
        if self._copying is None:
            return False
        self._has_moved.clear()
        moved: asyncio.Future[Any] = asyncio.ensure_future(self._has_moved.wait())
        try:
            await asyncio.wait([self._copying, moved], return_when=asyncio.FIRST_COMPLETED)
        finally:
            moved.cancel()
        return not self._copying.done()

    async def copied(self) -> None:
        """Wait until all its files are whole and durable.

        Raises:
            StorageError: the system refused.
        """
        if self._copying is not None:
            await asyncio.shield(self._copying)

    def publish(self) -> None:
        """Write the manifest of its generation, which makes this a store that others may open. Twice is fine."""
        if not self._is_ours:
            return
        path = Manifests(self._source, self._backend).manifest_path(self.number)
        replace_file(self.directories[0] / path.name, read_bytes(path, backend=self._backend), backend=self._backend)
        end_store_making(self.directories, self._backend)
        self._is_ours = False
        self._lock.release()

    def abandon(self) -> None:
        """Remove what there is of it, as far as possible: the caller reports another error already. Twice is fine."""
        if self._lock.is_inherited:  # in a forked child: it is the parent's
            return
        self._is_given_up = True
        self._lock.release()
        with contextlib.suppress(TierstoreError, OSError):  # there may be another snapshot of this name
            remove(self.directories, self._backend, only_unfinished=not self._is_ours)
        self._is_ours = False
        for directory in self.directories:
            with contextlib.suppress(OSError):  # it holds files of others
                directory.rmdir()
            with contextlib.suppress(OSError):
                directory.parent.rmdir()

    def _copy_of(self, file: KeptFile) -> Path:
        return file.path.parent / SNAPSHOTS / self.name / file.path.name
