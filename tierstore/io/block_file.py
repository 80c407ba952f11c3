"""An open file: whole transfers at given offsets, durability, closing that waits for transfers in flight.

Scope: short and interrupted transfers, O_DIRECT's rules, syncs that fail for good; what an `OSError` meant.
Not here: opening, directories, the system calls themselves (see `backend.py`, whose files these are).
Owner: whoever opened a `BlockFile` closes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from tierstore.alignment import ALIGNMENT
from tierstore.errors import ClosedError, ShortTransfer, StorageError, StorageFull
from tierstore.io.fork import ForkAware

if TYPE_CHECKING:
    from tierstore.io.backend import Backend
    from tierstore.io.memory import Bytes

FRUITLESS_LIMIT = 64  # calls in a row that moved nothing before a transfer is given up

_RETRIED = frozenset({errno.EINTR, errno.EAGAIN})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def storage_error(error: OSError, action: str, path: Path) -> StorageError:
    """The `StorageError` that says what an `OSError` meant; raise it `from` the error.

    Args:
        action: what was tried, with numbers: `write of 4096 B at offset 0`.
    """
    kind = StorageFull if error.errno in _FULL else StorageError
    name = errno.errorcode.get(error.errno or 0, "no errno")
    advice = "; free space there" if kind is StorageFull else ""
    return kind(f"{action} of {path} failed: {error.strerror or error} ({name}){advice}")


@contextlib.contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` of this block into the `StorageError` that says what it meant."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, action, path) from error


class BlockFile(ForkAware):
    """An open file that is read and written in whole transfers at given offsets.

    Threads: any number at once; `close` lets the transfers in flight end first.

    Attributes:
        direct: O_DIRECT, so address, offset and length of each transfer must be multiples of 4096.
        is_counted: whether its transfers are part of the backend's traffic.
    """

    def __init__(self, backend: Backend, path: Path, descriptor: int, *, direct: bool, is_counted: bool) -> None:
        super().__init__()
        self.path = path
        self.direct = direct
        self.is_counted = is_counted
        self._backend = backend
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._users = 0
        self._is_closed = False
        self._is_dirty = True  # whoever opened it may have made or grown it
        self._syncs = threading.Lock()  # a caller that finds nothing to sync waits for a sync in progress
        self._sync_failure: StorageError | None = None

    @property
    def descriptor_path(self) -> Path:
        """A path by which another process of the same user finds the open file, even after its name was removed."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def read_into(self, buffer: Bytes, offset: int, required_bytes: int | None = None) -> int:
        """Fills `buffer` from `offset` on.

        Args:
            required_bytes: how many must be there; the rest of the buffer may lie past the end of the file
                (the aligned range around an unaligned end). None: all of it.

        Returns:
            Bytes read, at least `required_bytes`.

        Raises:
            ShortTransfer: the file ends too early.
            StorageError: the system refused; the buffer's contents are undefined.
        """
        required = buffer.nbytes if required_bytes is None else required_bytes
        return self._transfer("read", buffer, offset, required)

    def write_from(self, buffer: Bytes, offset: int) -> None:
        """Writes all of `buffer` at `offset`.

        Raises:
            StorageFull: no space is left; part of the buffer may have been written.
            StorageError: the system refused; part of the buffer may have been written.
        """
        try:
            self._transfer("write", buffer, offset, buffer.nbytes)
        finally:
            self._is_dirty = True  # not before the write: a sync in between would take the rest for synced

    def datasync(self) -> None:
        """Makes what was written durable; makes no system call if nothing was written since the last one.

        Raises:
            StorageError: what was written may be lost. The kernel may report such a loss only once and mark the pages
                clean, so a failed sync is never retried: from then on each call raises this error.
        """
        with self._in_use() as descriptor, self._syncs:
            if self._sync_failure is not None:
                raise StorageError(f"{self._sync_failure}; what was written since the last good sync may be lost")
            if not self._is_dirty:
                return
            self._is_dirty = False  # not after the sync, which may miss what is written meanwhile
            try:
                with self._backend._noted("fdatasync", self.path):
                    self._backend._call_fdatasync(descriptor, self.path)
            except OSError as error:
                self._sync_failure = storage_error(error, "fdatasync", self.path)
                raise self._sync_failure from error
            except BaseException:
                self._is_dirty = True
                raise

    def close(self) -> None:
        """Refuses new transfers; the last one in flight closes the descriptor. Twice is fine."""
        if self.is_inherited:
            return
        with self._lock:
            is_last = not self._is_closed and self._users == 0
            self._is_closed = True
        if is_last:
            self._backend._close(self._descriptor, self.path)

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[int]:
        # If a descriptor were closed during a call, another file could get its number, and the call write to that file.
        self.check_process()
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"{self.path} is closed")
            self._users += 1
        try:
            yield self._descriptor
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._is_closed and self._users == 0
        if is_last:
            self._backend._close(self._descriptor, self.path)

    def _check(self, verb: str, buffer: Bytes, offset: int) -> memoryview:
        if buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
            raise ValueError(f"{verb} of {self.path}: the buffer must be contiguous uint8, not {buffer.dtype}")
        address = buffer.ctypes.data
        if self.direct and (address % ALIGNMENT or offset % ALIGNMENT or buffer.nbytes % ALIGNMENT):
            raise ValueError(
                f"{verb} of {self.path}: O_DIRECT needs multiples of {ALIGNMENT}; "
                f"got address {address:#x}, offset {offset}, {buffer.nbytes} B"
            )
        return buffer.data

    def _transfer(self, verb: str, buffer: Bytes, offset: int, required: int) -> int:
        view, call = self._check(verb, buffer, offset), self._backend._transfer_call(verb, self.is_counted)
        done = fruitless = 0
        with self._in_use() as descriptor:
            while done < required:
                action = f"{verb} of {len(view) - done} B at offset {offset + done}"
                try:
                    with self._backend._noted(action, self.path):
                        moved = call(descriptor, view[done:], offset + done, self.path)
                except OSError as error:
                    if error.errno not in _RETRIED or fruitless >= FRUITLESS_LIMIT:
                        raise storage_error(error, action, self.path) from error
                    fruitless += 1
                    continue
                if done + moved >= required:
                    return done + moved
                # O_DIRECT continues from the last aligned boundary: bytes moved beyond it are issued again.
                gain = moved - (done + moved) % ALIGNMENT if self.direct else moved
                fruitless = 0 if gain > 0 else fruitless + 1
                if moved == 0 or fruitless > FRUITLESS_LIMIT:
                    self._raise_short(verb, done + moved, required, offset)
                done += gain
        return done

    def _raise_short(self, verb: str, done: int, required: int, offset: int) -> NoReturn:
        hint = "is the file truncated?" if verb == "read" else "the system accepted no more, without an error"
        raise ShortTransfer(f"short {verb}: {done} of {required} B at offset {offset} of {self.path}; {hint}")
