"""One line of JSON per step, on the disk before the step is committed.

Scope: the file behind `--json`: its check, its torn end, its lines; the peak of resident memory.
Not here: what a line says (`apps/train.py`).
Owner: the training thread, except for `sync`; one writer per file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tierstore.errors import ConfigError, StorageError, StorageFull

_TAIL_BYTES = 2**16
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StepLog:
    """A file of lines that only grows.

    A process killed while it wrote leaves half a line. Its step was never committed, so the half line is cut off, and
    the repeated step writes its line again. Lines that do not fit on a full disk are written when there is room; their
    steps are committed, so a kill before that loses them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._unwritten = b""

    def open(self, *, resumed: bool) -> None:
        """Opens the file, or creates it; only a resumed run may go on in a file that is not empty.

        Raises:
            ConfigError: the file cannot be written, or holds the lines of another run; nothing was changed.
        """
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write --json {self._path}: {error.strerror}") from None
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise ConfigError(f"cannot write --json {self._path}: it is not a regular file")
        if found.st_size and not resumed:
            self.close()
            raise ConfigError(
                f"--json {self._path} holds the lines of another run, and this run starts anew; remove it, or give "
                "another name (to go on with a run, give its --nvme and --resume auto)"
            )

    def begin(self) -> None:
        """Call this before the first line: cuts off half a line at the end.

        Raises:
            StorageError: the file cannot be cut.
        """
        try:
            os.ftruncate(self._opened(), self._whole_lines_bytes())
        except OSError as error:
            raise StorageError(f"cannot cut half a line off {self._path}: {error.strerror}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line, which survives a kill and, once synced, a power cut.

        Raises:
            StorageError: the line is not, or not wholly, written.
            StorageFull: likewise, for lack of room; the line is kept, and the next call writes it first.
        """
        self._unwritten += (json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        self.write_rest()

    def write_rest(self) -> None:
        """Writes the lines that found no room. Raises: as `append`."""
        with self._telling():
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._opened(), self._unwritten) :]

    def sync(self) -> None:
        """When it returns, all lines that were there when it was called survive a power cut.

        May run in another thread than `append`: while a step's state is written, the disk takes long to sync.

        Raises:
            StorageError: they may not survive.
        """
        with self._telling():
            os.fsync(self._opened())

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = StorageFull if error.errno in _FULL else StorageError
            raise kind(f"cannot write a line of {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Tries once more to write what has found no room. Twice is fine."""
        if self._descriptor is not None:
            with contextlib.suppress(StorageError):  # it was told
                self.write_rest()
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        if self._descriptor is None:
            raise StorageError(f"{self._path} is not open")
        return self._descriptor

    def _whole_lines_bytes(self) -> int:
        end = os.fstat(self._opened()).st_size
        while end > 0:
            start = max(0, end - _TAIL_BYTES)
            newline = os.pread(self._opened(), end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0


def _finite(value: Any) -> Any:
    """`value` with every infinity and NaN, which JSON does not have, as None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far.

    Source: `VmHWM`, where there is one; `ru_maxrss` counts what the parent had when it forked.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
