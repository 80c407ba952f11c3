"""Small files: read whole and replaced whole, by blocking calls.

Scope: the manifest of a generation and its captured state; a new empty directory; locks.
Not here: chunks (see `io/backend.py`); whether files can be made in a directory (`io/directories.py`).
Owner: no state; the caller ensures that one writer at a time replaces a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tierstore.errors import FormatError, StorageError, StorageFull
from tierstore.io.backend import Backend, storage_errors


def read_bytes(path: Path, *, most_bytes: int = 2**30, backend: Backend) -> bytes:
    """All bytes of a file, which must not be a link.

    Args:
        most_bytes: a larger file is not read (holes count, too), because its contents are not trusted.

    Threads: any but a loop's: it waits for the disk.

    Raises:
        FormatError: the file is larger.
        StorageError: the system refused; `__cause__` is the `OSError` (`FileNotFoundError` if there is no such file).
    """
    with backend.calling("read", path), open(path, "rb", opener=_open_itself) as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise FormatError(f"{path} is damaged: it has {size} B, and at most {most_bytes} B are expected")
        return file.read()


def replace_file(path: Path, data: bytes, *, backend: Backend, makes_room: Callable[[], bool] = bool) -> None:
    """Replaces `path` so that, whatever happens, it holds either its old bytes or all of `data`; durable on return.

    `data` is written to `temporary(path)`, fsynced and renamed, and the directory is fsynced.

    Args:
        makes_room: called on a full disk; True has all of it written once more.

    Threads: any but a loop's: it waits for the disk.

    Raises:
        StorageError: `path` holds the old bytes; if the fsync of the directory failed, the old or the new ones.
    """
    written = temporary(path)
    try:
        try:
            backend.write_file(written, data, 0o600)
        except StorageFull:
            if not makes_room():
                raise
            backend.write_file(written, data, 0o600)
        backend.replace(written, path)
    except StorageError:
        with contextlib.suppress(StorageError):  # the first error is the one to tell
            backend.remove(written)
        raise
    backend.sync_directory(path.parent)


def temporary(path: Path) -> Path:
    """The file that `replace_file` renames to `path`. An existing one is overwritten, in the space that it has."""
    return path.with_name(path.name + ".tmp")


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # not through a link, nor waiting for a pipe's writer


def make_anew(directory: Path, backend: Backend) -> None:
    """Makes an empty directory in place of whatever a killed write, or somebody, has left there. Follows no link.

    Raises:
        StorageError: the directory cannot be made, or what is there cannot be removed.
    """
    with storage_errors("making", directory):
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        shutil.rmtree(directory, ignore_errors=True)
    if not backend.make_directories(directory):
        raise StorageError(f"cannot remove {directory}, which a killed write has left; remove it")


def takes_lock(descriptor: int, *, is_needed: bool = False) -> bool:
    """Tries to lock an open file or directory; True if this descriptor has the lock now. Closing it ends the lock.

    Args:
        is_needed: raise an `OSError` on a file system without locks. Otherwise every caller gets the lock there.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if is_needed:
            raise
    return True


def locked_file(path: Path, mode: int, *, is_needed: bool = False) -> int | None:
    """A descriptor that holds the lock of a file, which is made if it does not exist; None if another one holds it.

    Args:
        is_needed: as for `takes_lock`.

    Raises:
        StorageError: the system refused, or the path is a link.
    """
    with storage_errors("lock", path):
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
            with contextlib.ExitStack() as closing:
                closing.callback(os.close, descriptor)
                if not takes_lock(descriptor, is_needed=is_needed):
                    return None
                if is_at(path, descriptor):
                    closing.pop_all()
                    return descriptor
                # otherwise its owner removed the file between our open and our lock


def is_at(path: Path, descriptor: int) -> bool:
    """Whether a path still names an open file: it may be gone, or name another file, perhaps through a link."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
