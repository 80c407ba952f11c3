"""The child of a fork: it may use nothing of the parent's, holds no lock, and does the parent no harm."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstore.errors import ClosedError
from tierstore.io import fork
from tierstore.io.backend import Backend
from tierstore.io.memory import Arena
from tierstore.io.runtime import Runtime
from tierstore.io.workers import Priority, WorkerPool

MAP_FIXED_NOREPLACE = 0x100000  # Linux; the mmap module has no name for it


def in_child(check: Callable[[], None]) -> str:
    """What went wrong in a forked child that runs `check`; empty if nothing did."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads, which is what is tested
        child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return text


async def one() -> int:
    return 1


def test_the_child_can_use_nothing(runtime: Runtime, tmp_path: Path) -> None:
    file = Backend().create(tmp_path / "pack", 4096)
    pool, arena = WorkerPool("test", 1), Arena(8192)
    memory = arena.pool("test", 8192)
    lease = memory.try_reserve(4096)
    assert lease is not None
    array = lease.array

    async def run() -> int:
        return await pool.submit(Priority.DEMAND, int)

    def check() -> None:
        uses: list[Callable[[], object]] = [
            lambda: runtime.call(one),
            lambda: runtime.post(print),
            runtime.start,
            lambda: asyncio.run(run()),
            lambda: memory.try_reserve(1),
            lambda: arena.pool("other", 0),
            lambda: lease.array,
            lambda: file.read_into(array, 0),
            file.datasync,
            lease.free,
        ]
        for use in uses:
            with pytest.raises(ClosedError, match="parent of this forked process"):
                use()
        runtime.close()  # these do nothing, and wait for nobody
        pool.close(0)
        file.close()
        assert arena.close() == []

    assert runtime.call(run) == 0  # the pool's thread runs
    assert in_child(check) == ""
    assert runtime.call(run) == 0  # the parent goes on
    lease.array[:] = 1
    file.read_into(lease.array, 0)
    file.close()
    lease.free()
    pool.close(10)
    assert arena.close() == []


def test_a_lock_held_while_forking_does_not_hang_the_child(runtime: Runtime) -> None:
    pool = WorkerPool("test", 1)

    async def run() -> int:
        return await pool.submit(Priority.DEMAND, int)

    def check() -> None:
        with pytest.raises(ClosedError):
            asyncio.run(run())

    with pool._lock:
        assert in_child(check) == ""
    pool.close(0)


def map_at(address: int) -> None:
    """Maps a page at this address, as an allocator of the child may. Raises OSError if something is mapped there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    if libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ, flags, -1, 0) != address:
        raise OSError(ctypes.get_errno(), f"cannot map at {address:#x}")


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_a_mapping_forgotten_in_the_child_is_not_unmapped_there(is_closed: bool) -> None:
    """Its address may belong to something newer in the child."""
    arenas = [Arena(2**22)]
    address = arenas[0]._bytes.ctypes.data
    views = [arenas[0].pool("test", 4096)._memory]  # garbage that is not collected yet may hold one
    if is_closed:
        arenas[0].close()

    def check() -> None:
        map_at(address)
        arenas.clear()
        views.clear()
        fork._inherited.clear()  # as the end of the interpreter does
        gc.collect()
        with open("/proc/self/maps") as maps:
            starts = [int(line.split("-")[0], 16) for line in maps]
        assert [start for start in starts if address <= start < address + 2**22] == [address]

    assert in_child(check) == ""
    assert arenas[0].close() == []
