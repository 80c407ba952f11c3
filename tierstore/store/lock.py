"""Who may use a store: its lock, held by one process, and by the ranks that share its directories.

Scope: taking the lock of each directory, and giving it back; whether the locked directories are still in place.
Not here: the call that locks a file (`io/files.py`), what the directories hold (`directories.py`).
Owner: a `StoreLock` has the open files; the system ends the locks with the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import StorageError, StoreLocked
from tierstore.io.backend import storage_errors
from tierstore.io.files import is_at, locked_file
from tierstore.io.fork import ForkAware
from tierstore.store.names import LOCK

_MOST_OWNER_BYTES = 400


class StoreLock(ForkAware):
    """Exclusive use of the directories of a store, by flock: the lock ends with the process, however that ends.

    Args:
        member: the rank, if another one leads: it has a lock file of its own, which outlives the leader.
    """

    def __init__(self, directories: Sequence[Path] = (), *, member: int | None = None) -> None:
        super().__init__()
        self._member = member
        self._descriptors: dict[Path, int] = {}
        self.add(directories)

    def add(self, directories: Sequence[Path]) -> None:
        """Lock more directories; those that are locked already stay so.

        Raises:
            StoreLocked: another process, or another engine of this one, has one of them; nothing is locked any more.
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
        """Refuse a directory while ranks of another run hold it: they may go on writing after their leader's death."""
        for path in directory.glob(f"{LOCK}.*"):
            os.close(self._lock(path))
            path.unlink(missing_ok=True)

    @staticmethod
    def _lock(path: Path) -> int:
        descriptor = locked_file(path, 0o600, is_needed=True)
        if descriptor is None:
            raise _in_use(path)
        with contextlib.suppress(OSError):  # only for others' error message: a full disk is no reason to fail here
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n{socket.gethostname()}\n".encode(), 0)
        return descriptor

    def check_in_place(self) -> None:
        """Check that the names of the directories still lead to the locked ones; open packs stay the same files anyway.

        Raises:
            StorageError: one was moved, or its lock file removed; another process may use what is there now.
        """
        for path, descriptor in list(self._descriptors.items()):
            with storage_errors("inspection", path):
                is_there = is_at(path, descriptor)
            if not is_there:
                raise StorageError(
                    f"{path.parent} (or its file {path.name!r}) was moved, replaced or removed while the store was in "
                    "use, so nothing more is committed there; if it was moved, its last "
                    "generation is whole where it is now: move it back, and go on with resume='auto'"
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
        """Close the files in a forked child: it shares them, and so the lock, which would outlive the parent."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def release(self) -> None:
        """Give the directories back; twice is fine."""
        while self._descriptors:
            # Taken out first: after an interrupt in here, the next call does not remove another process's lock.
            path, descriptor = self._descriptors.popitem()
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
        what = (
            ", which is this one: close the engine or store that uses it (`Engine.close_all()` also closes engines "
            "that no variable holds any more), or end the process"
        )
    else:
        what = "; stop it"
    process = process or "unknown"
    return StoreLocked(f"the store {path.parent} is in use by process {process}{what}, or choose another directory")
