"""Small files from coroutines: read whole, replaced whole.

Scope: manifests, reports, indexes.
Not here: chunks (see `io/backend.py`).
Owner: no state; the caller sees to it that one writer at a time replaces a path.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Executor
from pathlib import Path

import aiofiles
from aiofiles.os import wrap

from tierstore.errors import FormatError, StorageError
from tierstore.io.backend import Backend, storage_error
from tierstore.io.tasks import to_the_end


async def read_bytes(path: Path, *, most_bytes: int = 2**30, threads: Executor | None = None) -> bytes:
    """All bytes of a file, which may not be a link.

    Args:
        most_bytes: more, be they of holes, are not read: nobody vouches for the file.
        threads: which read it; None: those of the loop.

    Raises:
        FormatError: there are more.
        StorageError: the system refused; `__cause__` is the `OSError` (`FileNotFoundError` if there is none).
    """
    try:
        async with aiofiles.open(path, "rb", opener=_open_itself, executor=threads) as file:
            if (size := os.fstat(file.fileno()).st_size) > most_bytes:
                raise FormatError(f"{path} is damaged: it has {size} B, and at most {most_bytes} B are expected")
            return await file.read()
    except OSError as error:
        raise storage_error(error, "read", path) from error


async def write_atomic(
    path: Path, data: bytes, mode: int = 0o600, *, backend: Backend | None = None, threads: Executor | None = None
) -> None:
    """Replaces `path` so that, whatever happens, it holds either what it held or all of `data`; durable on return.

    Written to `<path>.tmp` (a leftover of that name is overwritten), fsynced, renamed, and the directory fsynced.

    Args:
        threads: as for `read_bytes`.

    Cancellation: held back until the write has ended, so that no thread is left writing behind the caller's back. A
    runtime that closes stops it between these steps: `path` is whole, `<path>.tmp` may be left.

    Raises:
        StorageError: `path` holds the old bytes, unless it was the directory's fsync that failed: then either.
    """
    await to_the_end(_write_atomic(path, data, mode, Backend() if backend is None else backend, threads))


async def _write_atomic(path: Path, data: bytes, mode: int, backend: Backend, threads: Executor | None) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        await wrap(backend.write_file)(temporary, data, mode, executor=threads)
        await wrap(backend.replace)(temporary, path, executor=threads)
    except StorageError:
        with contextlib.suppress(StorageError):  # the first error is the one to tell
            await wrap(backend.remove)(temporary, executor=threads)
        raise
    await wrap(backend.sync_directory)(path.parent, executor=threads)


def _open_itself(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # and without waiting for a pipe
