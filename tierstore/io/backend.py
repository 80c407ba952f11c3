"""Files of blocks: O_DIRECT where the filesystem takes it, buffered where it does not.

Scope: opening, directories, durability calls, counters.
Not here: transfers, and what an `OSError` meant (see `block_file.py`); what the bytes mean; threads (every call here
    blocks its caller); small files (see `files.py`).
Owner: whoever opened a `BlockFile` closes it; counters take their own lock.

Every system call goes through a method of `Backend` whose name starts with `_call`, so that a test can fail it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tierstore.errors import ClosedError
from tierstore.io.block_file import BlockFile as BlockFile  # exported, as `storage_errors`, for users of a backend
from tierstore.io.block_file import storage_error
from tierstore.io.block_file import storage_errors as storage_errors

_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_FICLONE = 0x40049409  # linux/fs.h
_GETFLAGS, _SETFLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000
_NO_SHARING = frozenset({errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EPERM})
_COPIED_AT_ONCE = 2**23


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals since the backend was made."""

    read_bytes: int = 0
    written_bytes: int = 0
    reads: int = 0
    writes: int = 0


class Counters:
    """Totals of what each call really moved, including bytes that were issued again. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Traffic()

    def add_read(self, nbytes: int) -> None:
        """One call to read has returned."""
        with self._lock:
            t = self._totals
            self._totals = replace(t, read_bytes=t.read_bytes + nbytes, reads=t.reads + 1)

    def add_write(self, nbytes: int) -> None:
        """One call to write has returned."""
        with self._lock:
            t = self._totals
            self._totals = replace(t, written_bytes=t.written_bytes + nbytes, writes=t.writes + 1)

    def totals(self) -> Traffic:
        """All figures, as of one moment."""
        return self._totals


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    action: str
    path: Path
    start: float


class Backend:
    """Opens block files and changes directories durably.

    Threads: any.

    Attributes:
        counters: totals of all its files together.
        buffered_directories: where files could not be opened with O_DIRECT.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self.buffered_directories: set[Path] = set()
        self._running: dict[int, _Call] = {}  # by thread, in the order in which the calls began
        self._latest: _Call | None = None
        self._refusal: str | None = None

    def in_flight(self) -> list[str]:
        """One line per system call that has not returned. Any thread."""
        now = time.perf_counter()
        return [f"{call.action} of {call.path}, for {now - call.start:.1f} s" for call in self._running.copy().values()]

    def threads_in_flight(self) -> list[int]:
        """Identifiers of the threads that wait for system calls. Any thread."""
        return list(self._running.copy())

    def pulse(self) -> tuple[object, bool]:
        """The system call that has run the longest and True or, if none runs, the latest one and False. Any thread.

        While the result stays the same, nothing moves.
        """
        oldest = next(iter(self._running.copy().values()), None)
        return oldest or self._latest, oldest is not None

    def refuse(self, reason: str) -> None:
        """From now on work on this backend fails at its next system call: nobody waits for it any more. Any thread.

        Removing and closing still work.
        """
        self._refusal = reason

    def create(self, path: Path, size_bytes: int, holes: Sequence[tuple[int, int]] = ()) -> BlockFile:
        """A new file with all its space allocated, so that a full disk is found before anything is written.

        Btrfs is asked to overwrite it in place, as by `chattr +C`: what it copies on write it also checksums, and
        therefore buffers in spite of O_DIRECT, and it needs new space each time.

        Args:
            holes: (offset, bytes), in order: no space is allocated there until it is written.

        Raises:
            StorageFull: not enough space; the new file was removed again.
            StorageError: the file exists already (and was left alone), or the system refused (and it was removed).
        """
        descriptor = self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._overwrite_in_place(descriptor)
            self._allocate(descriptor, size_bytes, path, holes)
            return self.open(path, writable=True)
        except BaseException:
            with contextlib.suppress(OSError):
                self._call_unlink(path)
            raise

    def open(self, path: Path, writable: bool = False, *, direct: bool = True, is_counted: bool = True) -> BlockFile:
        """Opens an existing file, with O_DIRECT if the filesystem takes it.

        Args:
            direct: False for transfers at unaligned offsets.
            is_counted: whether its transfers are part of the traffic.
        """
        flags = os.O_RDWR if writable else os.O_RDONLY
        if not direct:
            return BlockFile(self, path, self._open(path, flags, 0), direct=False, is_counted=is_counted)
        try:
            with self._noted("open", path):
                descriptor = self._call_open(path, flags | os.O_DIRECT, 0)
            return BlockFile(self, path, descriptor, direct=True, is_counted=is_counted)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise storage_error(error, "open", path) from error
        descriptor = self._open(path, flags, 0)
        self.buffered_directories.add(path.parent)
        return BlockFile(self, path, descriptor, direct=False, is_counted=is_counted)

    def allocate(self, path: Path, size_bytes: int, holes: Sequence[tuple[int, int]] = ()) -> None:
        """Allocates all the space of an existing file, as `create` does; its bytes stay.

        Raises:
            StorageFull: not enough space; the file may hold part of it.
        """
        self._allocate(self._open(path, os.O_RDWR, 0), size_bytes, path, holes)

    def lacks_room(self, path: Path, nbytes: int) -> bool:
        """Whether a file takes less disk space than `nbytes` because it has holes (not because it is compressed)."""
        descriptor = self._open(path, os.O_RDONLY, 0)
        try:
            with self.calling("inspection", path):
                found = os.fstat(descriptor)
                return found.st_blocks * 512 < nbytes and os.lseek(descriptor, 0, os.SEEK_HOLE) < found.st_size
        finally:
            self._close(descriptor, path)

    def _allocate(
        self, descriptor: int, size_bytes: int, path: Path, holes: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Allocates space, and closes the descriptor."""
        try:
            if holes:
                self.truncate(path, size_bytes)
            begin = 0
            for offset, nbytes in (*holes, (size_bytes, 0)):
                if offset > begin:
                    with self.calling(f"allocation of {offset - begin} B", path):
                        self._call_allocate(descriptor, begin, offset - begin, path)
                begin = offset + nbytes
        finally:
            self._close(descriptor, path)

    def clone(self, source: Path, target: Path) -> bool:
        """Makes a new file that shares the blocks of another one, where the file system can (a reflink).

        Returns:
            False if the file system cannot; then nothing was made.
        """
        flags = os.O_CREAT | os.O_EXCL
        with self._both(source, target, flags) as (reading, writing), self.calling(f"clone of {source}", target):
            if self._flags_of(reading) & _NOCOW:  # between a file with it and one without Btrfs shares nothing
                self._overwrite_in_place(writing)
            is_made = self._call_clone(reading, writing, target)
        if not is_made:
            self.remove(target)
        return is_made

    def copy_range(self, source: Path, target: Path, offset: int, nbytes: int) -> None:
        """Copies bytes of a file to the same place in another one. Not counted: traffic means chunks only.

        Raises:
            StorageError: the system refused, or the source ends too early.
        """
        action, end = f"copy of {nbytes} B at offset {offset} of {source}", offset + nbytes
        with self._both(source, target) as (reading, writing), self.calling(action, target):
            while offset < end:
                moved = self._call_copy_range(reading, writing, end - offset, offset, target)
                if not moved:
                    raise OSError(errno.EIO, f"it ends at {offset} B")
                offset += moved

    @contextlib.contextmanager
    def _both(self, source: Path, target: Path, flags: int = 0) -> Iterator[tuple[int, int]]:
        reading = self._open(source, os.O_RDONLY, 0)
        try:
            writing = self._open(target, os.O_WRONLY | flags, 0o600)
            try:
                yield reading, writing
            finally:
                self._close(writing, target)
        finally:
            self._close(reading, source)

    def truncate(self, path: Path, size_bytes: int) -> None:
        """Cuts a file; durable once it is synced."""
        with self.calling(f"cut to {size_bytes} B", path):
            self._call_truncate(path, size_bytes)

    def replace(self, source: Path, destination: Path) -> None:
        """Renames over `destination`; durable once the directory is synced."""
        with self.calling(f"rename to {destination}", source):
            self._call_replace(source, destination)

    def write_file(self, path: Path, data: bytes, mode: int | None = None) -> None:
        """Writes a small file. Its bytes are durable on return, its name once the directory is synced.

        A leftover of that name is overwritten in the space that it has, because a full disk gives no more; a link is
        not followed. Not counted: traffic means chunks only.

        Args:
            mode: None: the default mode of a new file.

        Raises:
            StorageFull, StorageError: part of it may have been written.
        """
        descriptor = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, mode or 0o666)
        try:
            self._overwrite_in_place(descriptor)
            if mode is not None:
                with self.calling("setting the mode", path):
                    os.fchmod(descriptor, mode)  # otherwise a leftover keeps its own mode
            file = BlockFile(self, path, descriptor, direct=False, is_counted=False)
            file.write_from(np.frombuffer(data, np.uint8), 0)
            with self.calling("inspection", path):
                is_longer = os.fstat(descriptor).st_size > len(data)
            if is_longer:
                self.truncate(path, len(data))
            self.fsync_file(descriptor, path)
        finally:
            self._close(descriptor, path)

    def fsync_file(self, descriptor: int, path: Path) -> None:
        """Makes a file's bytes and size durable. Never retried (see `BlockFile.datasync`)."""
        with self.calling("fsync", path):
            self._call_fsync(descriptor, path)

    def sync_directory(self, path: Path) -> None:
        """Makes the names in a directory durable."""
        descriptor = self._open(path, os.O_RDONLY | os.O_DIRECTORY, 0)
        try:
            self.fsync_file(descriptor, path)
        finally:
            self._close(descriptor, path)

    def make_directory(self, path: Path, mode: int = 0o700) -> None:
        """Makes a directory if it does not exist; its parent must exist."""
        with self.calling("making", path), contextlib.suppress(FileExistsError):
            self._call_mkdir(path, mode)

    def make_directories(self, path: Path, mode: int = 0o777) -> bool:
        """Makes a directory and its missing parents; the name of each new one is durable.

        Args:
            mode: mode of the directory itself.

        Returns:
            False if the directory existed already.
        """
        with self.calling("making", path):
            missing = [directory for directory in (path, *path.parents) if not directory.exists()]
        for directory in reversed(missing):
            self.make_directory(directory, mode if directory == path else 0o777)
            self.sync_directory(directory.parent)
        return bool(missing)

    def make_empty(self, path: Path) -> None:
        """Makes an empty file; an existing one stays as it is."""
        self._close(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), path)

    def remove(self, path: Path) -> None:
        """Removes one file, which must exist."""
        with self.calling("removal", path, is_ending=True):
            self._call_unlink(path)

    def names(self, path: Path) -> list[str]:
        """Names of the entries of a directory, sorted."""
        with self.calling("listing", path):
            return sorted(self._call_list(path))

    def _overwrite_in_place(self, descriptor: int) -> None:
        """See `create`; takes effect on an empty file only."""
        with contextlib.suppress(OSError):  # raised by other file systems
            self._call_ioctl(descriptor, _SETFLAGS, array.array("l", [self._flags_of(descriptor) | _NOCOW]))

    def _flags_of(self, descriptor: int) -> int:
        """The flags that `lsattr` shows; none on a file system without."""
        flags = array.array("l", [0])
        with contextlib.suppress(OSError):
            self._call_ioctl(descriptor, _GETFLAGS, flags)
        return flags[0]

    def _open(self, path: Path, flags: int, mode: int) -> int:
        with self.calling("open", path):
            return self._call_open(path, flags, mode)

    def _close(self, descriptor: int, path: Path) -> None:
        with self.calling("close", path, is_ending=True):
            self._call_close(descriptor, path)

    @contextlib.contextmanager
    def _noted(self, action: str, path: Path, *, is_ending: bool = False) -> Iterator[None]:
        if self._refusal is not None and not is_ending:
            raise ClosedError(f"{action} of {path} was not begun: {self._refusal}")
        me = threading.get_ident()
        self._running[me] = self._latest = _Call(action, path, time.perf_counter())
        try:
            yield
        finally:
            self._running.pop(me, None)

    @contextlib.contextmanager
    def calling(self, action: str, path: Path, *, is_ending: bool = False) -> Iterator[None]:
        """Around a system call, also a caller's own: it is shown as in flight, and its error becomes a `StorageError`.

        Args:
            is_ending: the call removes or closes something.

        Raises:
            StorageError: the system refused.
        """
        with storage_errors(action, path), self._noted(action, path, is_ending=is_ending):
            yield

    def _transfer_call(self, verb: str, is_counted: bool) -> Callable[[int, memoryview, int, Path], int]:
        if verb == "read":
            call, count = self._call_pread, self.counters.add_read
        else:
            call, count = self._call_pwrite, self.counters.add_write
        if not is_counted:
            return call

        def counted(descriptor: int, view: memoryview, offset: int, path: Path) -> int:
            moved = call(descriptor, view, offset, path)
            count(moved)
            return moved

        return counted

    # The system calls. The path is for the faults and fakes of tests, which act on some files only.

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def _call_close(self, descriptor: int, path: Path) -> None:
        os.close(descriptor)

    def _call_allocate(self, descriptor: int, offset: int, size_bytes: int, path: Path) -> None:
        os.posix_fallocate(descriptor, offset, size_bytes)

    def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        return os.preadv(descriptor, [view], offset)

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        return os.pwritev(descriptor, [view], offset)

    def _call_ioctl(self, descriptor: int, request: int, argument: array.array[int] | int) -> None:
        fcntl.ioctl(descriptor, request, argument)

    def _call_clone(self, source: int, target: int, path: Path) -> bool:
        try:
            self._call_ioctl(target, _FICLONE, source)
        except OSError as error:
            if error.errno in _NO_SHARING:
                return False
            raise
        return True

    def _call_copy_range(self, source: int, target: int, nbytes: int, offset: int, path: Path) -> int:
        try:
            return os.copy_file_range(source, target, nbytes, offset, offset)
        except OSError as error:
            if error.errno not in _NO_SHARING:
                raise
        return os.pwrite(target, os.pread(source, min(nbytes, _COPIED_AT_ONCE), offset), offset)

    def _call_truncate(self, path: Path, size_bytes: int) -> None:
        os.truncate(path, size_bytes)

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        os.fdatasync(descriptor)

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        os.fsync(descriptor)

    def _call_replace(self, source: Path, destination: Path) -> None:
        os.replace(source, destination)

    def _call_unlink(self, path: Path) -> None:
        os.unlink(path)

    def _call_list(self, path: Path) -> list[str]:
        return os.listdir(path)

    def _call_mkdir(self, path: Path, mode: int) -> None:
        os.mkdir(path, mode)
