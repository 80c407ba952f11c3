"""Small files: read whole and replaced whole, by threads.

Scope: the manifest of a generation and what it captures; a directory to make small files in; locks.
Not here: chunks (see `io/backend.py`); whether a directory takes files (`io/directories.py`).
Owner: no state; the caller sees to it that one writer at a time replaces a path.
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
    """All bytes of a file, which may not be a link.

    Args:
        most_bytes: more, be they of holes, are not read: nobody vouches for the file.

    Threads: any but a loop's: it waits for the disk.

    Raises:
        FormatError: there are more.
        StorageError: the system refused; `__cause__` is the `OSError` (`FileNotFoundError` if there is none).
    """
    with backend.calling("read", path), open(path, "rb", opener=_open_itself) as file:
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise FormatError(f"{path} is damaged: it has {size} B, and at most {most_bytes} B are expected")
        return file.read()


def replace_file(path: Path, data: bytes, *, backend: Backend, makes_room: Callable[[], bool] = bool) -> None:
    """Replaces `path` so that, whatever happens, it holds either what it held or all of `data`; durable on return.

    Written to `temporary(path)`, fsynced, renamed, and the directory fsynced.

    Args:
        makes_room: called on a full disk; whether to write it all once more.

    Threads: any but a loop's: it waits for the disk.

    Raises:
        StorageError: `path` holds the old bytes, unless it was the directory's fsync that failed: then either.
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
    """The file that becomes `path` when it is replaced. One that is there is overwritten, in the room that it has."""
    return path.with_name(path.name + ".tmp")


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # and without waiting for a pipe


def make_anew(directory: Path, backend: Backend) -> None:
    """An empty directory of our own, whatever a killed write, or somebody, has left there: no link is followed.

    Raises:
        StorageError: it cannot be made, or what is there cannot be removed.
    """
    with storage_errors("making", directory):
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        shutil.rmtree(directory, ignore_errors=True)
    if not backend.make_directories(directory):
        raise StorageError(f"{directory}, of a write that was killed, cannot be removed; remove it")


def takes_lock(descriptor: int, *, is_needed: bool = False) -> bool:
    """Whether this process has the lock of an open file or directory now; it ends with the descriptor.

    Args:
        is_needed: an `OSError` tells of a file system that locks nothing. Otherwise whoever asks there has the lock.
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
    """A descriptor that holds the lock of a file, which is made if it is not there; None: another one holds it.

    Args:
        is_needed: as for `takes_lock`.

    Raises:
        StorageError: the system refused, or it is a link.
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
                # else removed by its owner between our open and our lock


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name, or its name has gone or is that of another one, of a link perhaps."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
