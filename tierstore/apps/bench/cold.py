"""A cold start for reading a file: it is not in the page cache, and the memory to read it into is there.

Scope: standard library only; linked from `tools/peers/`, for drivers in the peers' Python.
"""

from __future__ import annotations

import mmap
import os

_PAGE_BYTES = 4096


def forget(path: str) -> None:
    """Drops the file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def touch_memory(size_bytes: int) -> None:
    """Touches as much memory as will be used, and frees it: the host of a virtual machine may have taken it back."""
    with mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size_bytes, _PAGE_BYTES):
            memory[at] = 1
