"""Reads and writes in one directory, in blocks, by several threads.

Scope: a temporary file, loads that read, write or do both, the check that there is room.
Not here: which blocks and threads are tried (`survey.py`), fio (`fio.py`).
Owner: the opener of a `DiskFile` closes it. Its name is removed as soon as it is open, so that nothing is left behind
however the process ends, even by a kill.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np

from tierstore.alignment import ALIGNMENT
from tierstore.config import format_size
from tierstore.errors import ConfigError, StorageFull
from tierstore.io.backend import Backend, BlockFile
from tierstore.io.directories import why_not_writable
from tierstore.io.memory import Bytes
from tierstore.measure.loads import Load, by_turns

Verb = Literal["read", "write"]
_ROTATED_BYTES = 2**26  # as many as fio's usual 64 transfers of 1 MiB
_LEFT_FREE_BYTES = 2**28
"""Space that a probe leaves to others on the measured disk."""


def check_room(directories: Sequence[Path], size_bytes: int) -> None:
    """Refuses directories that cannot be measured, before anything is written.

    Raises:
        ConfigError: a path is not a directory, or nothing may be written there.
        StorageFull: a file of `size_bytes` in each of them would not fit.
    """
    wanted: dict[int, list[Path]] = {}
    for path in directories:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory; make it, or name the one that the store will be made in")
        if reason := why_not_writable(path):
            raise ConfigError(reason)
        wanted.setdefault(path.stat().st_dev, []).append(path)
    for paths in wanted.values():
        free_bytes, need_bytes = shutil.disk_usage(paths[0]).free, len(paths) * size_bytes + _LEFT_FREE_BYTES
        if free_bytes < need_bytes:
            raise StorageFull(
                f"measuring {', '.join(map(str, paths))} needs {format_size(need_bytes)} "
                f"({need_bytes} B, of which {format_size(_LEFT_FREE_BYTES)} stay free), but only "
                f"{format_size(free_bytes)} ({free_bytes} B) are free; ask for less, or make room"
            )


@dataclass(frozen=True, slots=True)
class DiskFile:
    """An allocated file without a name, and the memory that is read into and written from.

    Attributes:
        memory: filled with bytes that do not compress.
        reachable_path: path under which another program finds the file while it is open.
    """

    file: BlockFile
    size_bytes: int
    memory: Bytes
    reachable_path: Path

    def load(self, verb: Verb, block_bytes: int, threads: int) -> Load:
        """Sequential reads or overwrites; the writes are not made durable one by one."""
        return self._load(block_bytes, threads, (self._call(verb),))

    def both(self, block_bytes: int, threads: int) -> Load:
        """Reads and writes in turn, from one queue as in the engine: as many bytes each way."""
        return self._load(block_bytes, threads, (self._call("read"), self._call("write")))

    def fill(self, block_bytes: int) -> None:
        """Writes every byte once, because blocks that are only allocated would be read without the disk."""
        self.write(self.size_bytes, block_bytes)
        self.file.datasync()

    def write(self, nbytes: int, block_bytes: int) -> None:
        """Writes the first bytes of the file; they are not synced."""
        for offset in range(0, nbytes, block_bytes):
            self.file.write_from(self.memory[: min(block_bytes, nbytes - offset)], offset)

    def _call(self, verb: Verb) -> Callable[[Bytes, int], object]:
        return self.file.read_into if verb == "read" else self.file.write_from

    def _load(self, block_bytes: int, threads: int, calls: tuple[Callable[[Bytes, int], object], ...]) -> Load:
        # Many buffers in turn: one that was just used is still in the caches, and the engine's are not.
        used_bytes = min(self.memory.nbytes, max(_ROTATED_BYTES, threads * block_bytes))
        starts = range(0, used_bytes - block_bytes + 1, block_bytes)
        blocks, turns = self.size_bytes // block_bytes, count()

        def move(buffer: Bytes) -> None:
            turn = next(turns)  # in C: no two threads get the same number
            calls[turn % len(calls)](buffer, turn % blocks * block_bytes)

        buffers = (self.memory[start : start + block_bytes] for start in starts)
        return Load(by_turns(buffers, move), block_bytes, threads)


@contextlib.contextmanager
def disk_files(
    directories: Sequence[Path], size_bytes: int, memory: Bytes, backend: Backend
) -> Iterator[dict[Path, DiskFile]]:
    """A filled file in each directory, for as long as it is measured; the memory is divided among them.

    Raises:
        StorageFull: there is not enough room; nothing was made.
        StorageError: a file cannot be made; nothing is left.
    """
    check_room(directories, size_bytes)
    share_bytes = memory.nbytes // len(directories) // ALIGNMENT * ALIGNMENT
    with contextlib.ExitStack() as files:
        yield {
            path: files.enter_context(
                disk_file(path, size_bytes, memory[index * share_bytes : (index + 1) * share_bytes], backend)
            )
            for index, path in enumerate(directories)
        }


@contextlib.contextmanager
def disk_file(directory: Path, size_bytes: int, memory: Bytes, backend: Backend) -> Iterator[DiskFile]:
    """A filled file in a directory, for as long as it is measured.

    Raises:
        StorageError: the file cannot be made; nothing is left.
    """
    path = directory / f".tierstore-probe-{os.getpid()}"
    size_bytes -= size_bytes % ALIGNMENT  # for O_DIRECT: a size may be given in decimal units
    file = backend.create(path, size_bytes)
    try:
        backend.remove(path)
        made = DiskFile(file, size_bytes, memory, file.descriptor_path)
        made.fill(min(2**23, memory.nbytes))
        yield made
    finally:
        file.close()


def incompressible(memory: Bytes) -> None:
    """Fills memory with random bytes."""
    generator, part_bytes = np.random.default_rng(0), 2**22
    base = np.frombuffer(generator.bytes(part_bytes), np.uint64)
    words = memory[: memory.nbytes // 8 * 8].view(np.uint64)
    for start in range(0, len(words), len(base)):
        part = words[start : start + len(base)]
        # Many times as fast as new random bytes, and a disk that looks for equal pages finds none.
        np.bitwise_xor(base[: len(part)], generator.integers(2**64, dtype=np.uint64), out=part)
