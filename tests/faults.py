"""A storage backend that fails on demand: the real one, with a fault at the n-th system call.

Scope: `FaultyBackend`, and `each_fault` to try every call index in turn.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tierstore.io.backend import Backend

PAGE = 4096


@dataclass(frozen=True)
class Fault:
    """What goes wrong: an errno, a transfer of at most so many bytes or with a wrong bit, or a call that blocks."""

    errno: int = 0
    short_bytes: int | None = None
    flips: bool = False
    hangs: bool = False

    def __str__(self) -> str:
        if self.errno:
            return errno.errorcode[self.errno]
        return "flip" if self.flips else "hang" if self.hangs else f"short-{self.short_bytes}"


EIO, ENOSPC = Fault(errno.EIO), Fault(errno.ENOSPC)
EINTR, EAGAIN = Fault(errno.EINTR), Fault(errno.EAGAIN)
NOTHING, UNALIGNED, PART = Fault(short_bytes=0), Fault(short_bytes=100), Fault(short_bytes=8192 + 100)
FLIP, HANG = Fault(flips=True), Fault(hangs=True)


class FaultyBackend(Backend):
    """Fails `times` calls from number `at` on (counted from 0 over all kinds in `kinds`).

    Attributes:
        calls: the kind of every system call so far.
        counted: how many of them were of `kinds`.
        renamed: for each rename, the number of calls so far and the new name.
        hit: the kind and path of the last call that failed.
        is_hung, goes_on: a call that hangs sets the first and waits for the second.
    """

    def __init__(
        self, fault: Fault | None = None, at: int = 0, times: int = 1, kinds: tuple[str, ...] = (), direct: bool = True
    ) -> None:
        super().__init__()
        self.fault = fault
        self.at = at
        self.times = times
        self.kinds = kinds
        self.direct = direct
        self.calls: list[str] = []
        self.counted = 0
        self.renamed: list[tuple[int, str]] = []
        self.hit: tuple[str, Path] | None = None
        self.is_hung, self.goes_on = threading.Event(), threading.Event()
        self._fault_lock = threading.Lock()

    def _due(self, kind: str) -> Fault | None:
        with self._fault_lock:
            self.calls.append(kind)
            if self.kinds and kind not in self.kinds:
                return None
            index, self.counted = self.counted, self.counted + 1
            return self.fault if self.at <= index < self.at + self.times else None

    def _step(self, kind: str, path: Path) -> Fault | None:
        fault = self._due(kind)
        if fault is None:
            return None
        self.hit = kind, path
        if fault.errno:
            raise OSError(fault.errno, os.strerror(fault.errno), str(path))
        if fault.hangs:
            self.is_hung.set()
            assert self.goes_on.wait(60)
        return fault

    def _move(self, kind: str, view: memoryview, path: Path, call: Callable[[memoryview], int]) -> int:
        fault = self._step(kind, path)
        if fault is None or fault.hangs:
            return call(view)
        if fault.flips:
            return _flipped(kind, view, call)
        assert fault.short_bytes is not None
        if kind == "pwrite":
            # Up to the next page, as O_DIRECT demands: the system may write a little more than it reports.
            whole_pages = -(-fault.short_bytes // PAGE) * PAGE
            return min(call(view[:whole_pages]), fault.short_bytes) if whole_pages else 0
        moved = min(call(view), fault.short_bytes)
        view[moved:] = b"\xa5" * (len(view) - moved)
        return moved

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        self._step("open", path)
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(errno.EINVAL, "no O_DIRECT here", str(path))
        return super()._call_open(path, flags, mode)

    def _call_close(self, descriptor: int, path: Path) -> None:
        super()._call_close(descriptor, path)  # a failed close has closed all the same
        self._step("close", path)

    def _call_allocate(self, descriptor: int, offset: int, size_bytes: int, path: Path) -> None:
        self._step("allocate", path)
        super()._call_allocate(descriptor, offset, size_bytes, path)

    def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        read = super()._call_pread
        return self._move("pread", view, path, lambda part: read(descriptor, part, offset, path))

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        write = super()._call_pwrite
        return self._move("pwrite", view, path, lambda part: write(descriptor, part, offset, path))

    def _call_clone(self, source: int, target: int, path: Path) -> bool:
        self._step("clone", path)
        return super()._call_clone(source, target, path)

    def _call_copy_range(self, source: int, target: int, nbytes: int, offset: int, path: Path) -> int:
        self._step("copy", path)
        return super()._call_copy_range(source, target, nbytes, offset, path)

    def _call_truncate(self, path: Path, size_bytes: int) -> None:
        self._step("truncate", path)
        super()._call_truncate(path, size_bytes)

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        self._step("fdatasync", path)
        super()._call_fdatasync(descriptor, path)

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        self._step("fsync", path)
        super()._call_fsync(descriptor, path)

    def _call_replace(self, source: Path, destination: Path) -> None:
        self._step("replace", source)
        self.renamed.append((len(self.calls), destination.name))
        super()._call_replace(source, destination)

    def _call_unlink(self, path: Path) -> None:
        self._step("unlink", path)
        super()._call_unlink(path)

    def _call_list(self, path: Path) -> list[str]:
        self._step("list", path)
        return super()._call_list(path)

    def _call_mkdir(self, path: Path, mode: int) -> None:
        self._step("mkdir", path)
        super()._call_mkdir(path, mode)


def _flipped(kind: str, view: memoryview, call: Callable[[memoryview], int]) -> int:
    """The call, but with one wrong bit in the middle of its bytes: in a float's exponent, so no rounding hides it."""
    if kind == "pread":
        moved = call(view)
        view[moved // 2 | 3] ^= 64
        return moved
    copy = mmap.mmap(-1, len(view))  # aligned; others may read the memory that is written
    copy[:] = view
    copy[len(view) // 2 | 3] ^= 64
    return call(memoryview(copy))


def each_fault(
    fault: Fault, scenario: Callable[[FaultyBackend], object], kinds: tuple[str, ...] = ()
) -> Iterator[FaultyBackend]:
    """For each call index, a backend that fails there.

    Args:
        scenario: run once without a fault, to count the calls.
    """
    clean = FaultyBackend(kinds=kinds)
    scenario(clean)
    for index in range(sum(1 for kind in clean.calls if not kinds or kind in kinds)):
        yield FaultyBackend(fault, at=index, kinds=kinds)
