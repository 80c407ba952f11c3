"""Small files: read whole and replaced whole, by threads.

Scope: manifests, reports, indexes; whether a directory takes one; a directory to make some in, and its lock.
Not here: chunks (see `io/backend.py`).
Owner: no state; the caller sees to it that one writer at a time replaces a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from tierstore.errors import FormatError, StorageError
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


def replace_file(path: Path, data: bytes, *, backend: Backend) -> None:
    """Replaces `path` so that, whatever happens, it holds either what it held or all of `data`; durable on return.

    Written to `<path>.tmp` (a leftover of that name is overwritten), fsynced, renamed, and the directory fsynced.

    Threads: any but a loop's: it waits for the disk.

    Raises:
        StorageError: `path` holds the old bytes, unless it was the directory's fsync that failed: then either.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        backend.write_file(temporary, data, 0o600)
        backend.replace(temporary, path)
    except StorageError:
        with contextlib.suppress(StorageError):  # the first error is the one to tell
            backend.remove(temporary)
        raise
    backend.sync_directory(path.parent)


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


def takes_lock(directory: int) -> bool:
    """Whether this process has the lock of a directory now, by its descriptor; so it is where none can be locked."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of a file system that locks no directories
        return True
    return True


def why_not_writable(directory: Path) -> str | None:
    """Why no file can be made in a directory, as far as the system says before it is tried; None if it says nothing."""
    if os.access(directory, os.W_OK | os.X_OK):
        return None
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return f"the file system of {directory} is read-only"
    return f"no permission to write in {directory}"
