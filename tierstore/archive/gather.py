"""Reading the content of a chunk from files, at any offsets.

Scope: open files; reading the bytes of pieces into one buffer.
Not here: which pieces (`sources.py`, `packing.py`); checksums of packs (`reading.py`).
Owner: `OpenFiles` closes what it opened.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tierstore.alignment import ALIGNMENT, padded
from tierstore.archive.sources import Piece
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend, BlockFile
from tierstore.io.memory import Bytes

_SPARE_DESCRIPTORS = 16
"""Of the loop, of locks on directories, and of files that are open for a moment."""


def check_open_files(sources: int, targets: int) -> None:
    """Checks that this process may open so many files at once; targets are open twice, as their locks are files, too.

    Raises:
        ConfigError: it may not; the message says what can be done.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = sources + 2 * targets
    left = most - len(os.listdir("/proc/self/fd")) - _SPARE_DESCRIPTORS
    if most != resource.RLIM_INFINITY and count > left:
        advice = ", or write fewer files" if sources + 2 <= left else ""
        raise ConfigError(
            f"this needs {count} files at once, and the process may open {most} in all: allow more by `ulimit -n`"
            f"{advice}"
        )


class OpenFiles(contextlib.ExitStack):
    """Files opened when first used. Any thread."""

    def __init__(self, backend: Backend, *, writable: bool = False, direct: bool = True) -> None:
        super().__init__()
        self._open = partial(backend.open, writable=writable, direct=direct)
        self._files: dict[Path, BlockFile] = {}
        self._lock = threading.Lock()

    def __call__(self, path: Path) -> BlockFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = self._open(path)
                self.callback(self._files[path].close)
            return self._files[path]


class Content:
    """The bytes of a group: pieces back to back, of which any range can be read."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = [piece for piece in pieces if piece.nbytes]
        self._begins = []
        position = 0
        for piece in self._pieces:
            self._begins.append(position)
            position += piece.nbytes

    def read(self, files: OpenFiles, begin: int, destination: Bytes, scratch: Bytes) -> None:
        """Fill `destination` from `begin` on.

        Args:
            scratch: aligned, and two pages longer than `destination`.
        """
        for piece, at in self.pieces(begin, len(destination)):
            first = piece.begin - piece.begin % ALIGNMENT
            skew, end = piece.begin - first, piece.begin + piece.nbytes - first
            room = scratch[: padded(end)]
            files(piece.path).read_into(room, first, required_bytes=end)
            destination[at : at + piece.nbytes] = room[skew:end]

    def pieces(self, begin: int, nbytes: int) -> Iterator[tuple[Piece, int]]:
        """The pieces of a range, cut to it, and joined if contiguous in a file; each with its place in the range."""
        waiting: tuple[Piece, int] | None = None
        for index in range(bisect.bisect_right(self._begins, begin) - 1, len(self._pieces)):
            piece, start = self._pieces[index], self._begins[index]
            if start >= begin + nbytes:
                break
            low, high = max(start, begin), min(start + piece.nbytes, begin + nbytes)
            cut = Piece(piece.path, piece.begin + low - start, high - low)
            if waiting and waiting[0].path == cut.path and waiting[0].begin + waiting[0].nbytes == cut.begin:
                waiting = Piece(cut.path, waiting[0].begin, waiting[0].nbytes + cut.nbytes), waiting[1]
                continue
            if waiting:
                yield waiting
            waiting = cut, low - begin
        if waiting:
            yield waiting
