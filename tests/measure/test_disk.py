"""A measured file: where its bytes go, that it never stays, and disks with too little room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faults import EIO, ENOSPC, FaultyBackend

import tierstore
from tierstore.errors import ConfigError, StorageError, StorageFull
from tierstore.io.backend import Backend
from tierstore.io.memory import Arena, Bytes
from tierstore.io.runtime import Runtime
from tierstore.measure.disk import check_room, disk_file, disk_files, incompressible

pytestmark = pytest.mark.usefixtures("no_leaks")

MIB = 2**20


@pytest.fixture
def memory() -> Bytes:
    lease = Arena(4 * MIB).pool("test", 4 * MIB).try_reserve(4 * MIB)
    assert lease is not None
    incompressible(lease.array)
    return lease.array


def test_random_bytes_do_not_repeat(memory: Bytes) -> None:
    assert len(np.unique(memory.view(np.uint64))) > 0.999 * memory.nbytes / 8
    more = np.zeros(10 * MIB + 24, np.uint8)
    incompressible(more)
    pages = more[: 10 * MIB].reshape(-1, 4096)
    assert len({page.tobytes() for page in pages}) == len(pages)
    assert more[-24:].any()


def test_every_block_once_in_order_then_again(disk_path: Path, memory: Bytes, runtime: Runtime) -> None:
    backend = _Recording()
    with disk_file(disk_path, 2 * MIB, memory, backend) as file:
        assert file.file.direct
        backend.seen.clear()
        for load in (file.load("read", MIB // 2, 2), file.load("write", MIB // 2, 2)):
            for _ in range(6):
                load.job()
    half = MIB // 2
    offsets = [0, half, 2 * half, 3 * half, 0, half]
    assert backend.seen == [("read", half, at) for at in offsets] + [("write", half, at) for at in offsets]


def test_both_ways_move_as_many_bytes(disk_path: Path, memory: Bytes) -> None:
    backend = _Recording()
    with disk_file(disk_path, 2 * MIB, memory, backend) as file:
        backend.seen.clear()
        load = file.both(MIB, 2)
        for _ in range(4):
            load.job()
    assert [verb for verb, _, _ in backend.seen] == ["read", "write"] * 2


def test_transfers_go_over_all_of_the_memory(disk_path: Path, memory: Bytes) -> None:
    with disk_file(disk_path, 4 * MIB, memory, Backend()) as file:
        memory[:] = 0
        load = file.load("read", MIB, 1)
        for _ in range(4):
            load.job()
    assert all(memory[start : start + MIB].any() for start in range(0, 4 * MIB, MIB))


def test_threads_share_the_buffers(disk_path: Path, memory: Bytes, runtime: Runtime) -> None:
    with disk_file(disk_path, 4 * MIB, memory, Backend()) as file:
        for load in (file.both(MIB // 4, 4), file.load("read", MIB, 4)):  # the second has as many threads as buffers
            assert runtime.call(load.run, 0.02) > 0


def test_a_size_in_decimal_units_is_cut_to_what_o_direct_moves(disk_path: Path, memory: Bytes) -> None:
    with disk_file(disk_path, 5_000_000, memory, Backend()) as file:
        assert file.file.direct
        assert file.size_bytes == 5_000_000 // 4096 * 4096


def test_the_file_has_no_name_while_it_is_measured(disk_path: Path, memory: Bytes) -> None:
    with disk_file(disk_path, MIB, memory, Backend()) as file:
        assert os.listdir(disk_path) == []
        assert os.stat(file.reachable_path).st_size == MIB
        assert np.frombuffer(file.reachable_path.read_bytes(), np.uint8).any()


@pytest.mark.parametrize("kind", ["create", "allocate", "pwrite", "fdatasync"])
@pytest.mark.parametrize("fault", [EIO, ENOSPC], ids=str)
def test_a_disk_that_fails_leaves_nothing(disk_path: Path, memory: Bytes, kind: str, fault: Any) -> None:
    backend = FaultyBackend(fault, kinds=("open",) if kind == "create" else (kind,))
    with pytest.raises(StorageError), disk_file(disk_path, MIB, memory, backend):
        raise RuntimeError("it did not fail")
    assert os.listdir(disk_path) == []


def test_a_killed_process_leaves_nothing(disk_path: Path) -> None:
    code = (
        "import os, signal, sys\nimport numpy as np\nfrom pathlib import Path\n"
        "from tierstore.io.backend import Backend\nfrom tierstore.measure.disk import disk_file\n"
        "import mmap\nmemory = np.frombuffer(mmap.mmap(-1, 2**20), np.uint8)\n"
        "with disk_file(Path(sys.argv[1]), 2**20, memory, Backend()): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(tierstore.__file__).parents[1])
    killed = subprocess.run([sys.executable, "-c", code, disk_path], env={"PYTHONPATH": root}, timeout=60)
    assert killed.returncode == -9
    assert os.listdir(disk_path) == []


def test_too_little_room_is_said_before_anything_is_made(
    tmp_path: Path, memory: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    check_room([tmp_path], 2**29)
    two = [tmp_path / "a", tmp_path / "b"]
    for path in two:
        path.mkdir()
    with (
        pytest.raises(
            StorageFull, match=r"a, .*b needs 1.25 GiB \(1342177280 B.* only 1 GiB \(1073741824 B\) are free"
        ),
        disk_files(two, 2**29, memory, Backend()),
    ):
        raise RuntimeError("it was made")  # one filesystem: the files of both must fit
    assert [os.listdir(path) for path in two] == [[], []]


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ConfigError, match="is not a directory; make it"):
            check_room([path], 1)


class _Recording(Backend):
    """Records its transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        self.seen.append(("read", len(view), offset))
        return super()._call_pread(descriptor, view, offset, path)

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        self.seen.append(("write", len(view), offset))
        return super()._call_pwrite(descriptor, view, offset, path)
