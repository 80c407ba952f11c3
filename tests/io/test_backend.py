"""One contract for block files, over every way to open them; then every fault at every call."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import EAGAIN, EINTR, EIO, ENOSPC, NOTHING, PART, UNALIGNED, Fault, FaultyBackend, each_fault

from tierstore.errors import ClosedError, ShortTransfer, StorageError, StorageFull
from tierstore.io.backend import Backend, BlockFile
from tierstore.io.block_file import FRUITLESS_LIMIT
from tierstore.io.memory import Arena, Bytes

pytestmark = pytest.mark.usefixtures("no_leaks")

PAGE = 4096


class Btrfs(Backend):
    """Notes the files that it asks to overwrite in place, which Btrfs does only if they are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.in_place: list[str] = []

    def _call_ioctl(self, descriptor: int, request: int, argument: Any) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if request == 0x80086601:
            argument[0] = 0x10 | (0x00800000 if name in self.in_place else 0)
        elif request == 0x40086602:
            assert argument[0] == 0x00800010
            assert os.fstat(descriptor).st_size == 0
            self.in_place.append(name)


def test_new_files_are_overwritten_in_place_where_others_would_be_copied(tmp_path: Path) -> None:
    backend = Btrfs()
    backend.create(tmp_path / "pack", 4 * PAGE).close()
    backend.write_file(tmp_path / "manifest", b"small")
    backend.clone(tmp_path / "pack", tmp_path / "snapshot")
    (tmp_path / "older").touch()
    backend.clone(tmp_path / "older", tmp_path / "its snapshot")  # shares nothing with a file of the other kind
    assert backend.in_place == ["pack", "manifest", "snapshot"]


@pytest.fixture
def buffers() -> Iterator[tuple[Bytes, Bytes]]:
    """Two aligned buffers of 16 pages: one random, one zero."""
    memory = Arena(32 * PAGE).pool("test", 32 * PAGE)
    source, target = memory.try_reserve(16 * PAGE), memory.try_reserve(16 * PAGE)
    assert source is not None
    assert target is not None
    source.array[:] = np.random.default_rng(0).integers(0, 256, len(source.array), dtype=np.uint8)
    yield source.array, target.array
    source.free()
    target.free()


class BlockFileContract:
    """What holds for every backend. Subclasses make one."""

    direct = True

    def make(self) -> Backend:
        raise NotImplementedError

    @pytest.fixture
    def backend(self, disk_path: Path) -> Backend:
        return self.make()

    @pytest.fixture
    def file(self, backend: Backend, disk_path: Path) -> Iterator[BlockFile]:
        file = backend.create(disk_path / "pack", 64 * PAGE)
        yield file
        file.close()

    def test_reads_what_was_written(self, file: BlockFile, buffers: tuple[Bytes, Bytes]) -> None:
        source, target = buffers
        file.write_from(source, 8 * PAGE)
        assert file.read_into(target, 8 * PAGE) == 16 * PAGE
        assert np.array_equal(source, target)
        assert file.read_into(target[:PAGE], 0) == PAGE
        assert not target[:PAGE].any()

    def test_new_file_is_private_and_has_its_space(self, file: BlockFile) -> None:
        status = os.stat(file.path)
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == 64 * PAGE
        assert status.st_blocks * 512 >= 64 * PAGE
        assert file.direct == self.direct

    def test_create_leaves_an_existing_file_alone(self, backend: Backend, file: BlockFile) -> None:
        with pytest.raises(StorageError, match="EEXIST"):
            backend.create(file.path, PAGE)
        assert file.path.stat().st_size == 64 * PAGE

    def test_read_past_the_end_is_short(self, file: BlockFile, buffers: tuple[Bytes, Bytes]) -> None:
        with pytest.raises(
            ShortTransfer, match=f"{8 * PAGE} of {16 * PAGE} B at offset {56 * PAGE} of .*pack.*truncated"
        ):
            file.read_into(buffers[1], 56 * PAGE)
        with pytest.raises(ShortTransfer, match="0 of 4096 B"):
            file.read_into(buffers[1][:PAGE], 64 * PAGE)

    def test_aligned_range_around_an_unaligned_end(
        self, backend: Backend, disk_path: Path, buffers: tuple[Bytes, Bytes]
    ) -> None:
        path = disk_path / "foreign"
        path.write_bytes(buffers[0][: PAGE + 10].tobytes())
        file = backend.open(path)
        assert file.read_into(buffers[1], 0, required_bytes=PAGE + 10) == PAGE + 10
        assert np.array_equal(buffers[0][: PAGE + 10], buffers[1][: PAGE + 10])
        with pytest.raises(ShortTransfer, match=f"{PAGE + 10} of {PAGE + 11} B"):
            file.read_into(buffers[1], 0, required_bytes=PAGE + 11)
        file.close()

    def test_counts_what_moved(self, disk_path: Path, buffers: tuple[Bytes, Bytes]) -> None:
        backend = self.make()
        file = backend.create(disk_path / "counted", 16 * PAGE)
        file.write_from(buffers[0], 0)
        file.read_into(buffers[1][:PAGE], 0)
        file.read_into(buffers[1][:PAGE], 0)
        file.close()
        totals = backend.counters.totals()
        assert (totals.written_bytes, totals.writes) == (16 * PAGE, 1)
        assert (totals.read_bytes, totals.reads) == (2 * PAGE, 2)

    def test_use_after_close(self, file: BlockFile, buffers: tuple[Bytes, Bytes]) -> None:
        file.close()
        file.close()
        with pytest.raises(ClosedError, match="pack is closed"):
            file.read_into(buffers[1], 0)
        with pytest.raises(ClosedError):
            file.datasync()

    def test_missing_file_names_itself(self, backend: Backend, disk_path: Path) -> None:
        with pytest.raises(StorageError, match=r"open of .*nowhere failed.*ENOENT") as caught:
            backend.open(disk_path / "nowhere")
        assert isinstance(caught.value.__cause__, FileNotFoundError)

    def test_read_only_file_refuses_writes(
        self, backend: Backend, file: BlockFile, buffers: tuple[Bytes, Bytes]
    ) -> None:
        reader = backend.open(file.path)
        with pytest.raises(StorageError, match=r"write of 65536 B at offset 0 of .*EBADF"):
            reader.write_from(buffers[0], 0)
        reader.close()

    def test_buffer_must_be_contiguous_bytes(self, file: BlockFile, buffers: tuple[Bytes, Bytes]) -> None:
        for wrong in (buffers[0].view(np.float32), buffers[0][::2]):
            with pytest.raises(ValueError, match="contiguous uint8"):
                file.write_from(wrong, 0)

    def test_sync_and_directories(self, backend: Backend, file: BlockFile, disk_path: Path) -> None:
        file.datasync()
        backend.make_directory(disk_path / "store")
        backend.make_directory(disk_path / "store")
        backend.replace(file.path, disk_path / "store" / "moved")
        backend.sync_directory(disk_path / "store")
        assert (disk_path / "store").stat().st_mode & 0o777 == 0o700
        backend.remove(disk_path / "store" / "moved")
        with pytest.raises(StorageError, match="ENOENT"):
            backend.remove(disk_path / "store" / "moved")


class TestDirect(BlockFileContract):
    def make(self) -> Backend:
        return Backend()

    def test_alignment_is_checked(self, file: BlockFile, buffers: tuple[Bytes, Bytes]) -> None:
        for array, offset in ((buffers[0][1 : PAGE + 1], 0), (buffers[0], 512), (buffers[0][:100], 0)):
            with pytest.raises(ValueError, match="multiples of 4096"):
                file.write_from(array, offset)


class TestBuffered(BlockFileContract):
    direct = False

    def make(self) -> Backend:
        return FaultyBackend(direct=False)

    def test_says_once_where_files_are_buffered(self, backend: Backend, file: BlockFile) -> None:
        backend.open(file.path).close()
        assert backend.buffered_directories == {file.path.parent}

    def test_needs_no_alignment(self, file: BlockFile, buffers: tuple[Bytes, Bytes]) -> None:
        file.write_from(buffers[0][1:8], 3)
        file.read_into(buffers[1][:7], 3)
        assert np.array_equal(buffers[0][1:8], buffers[1][:7])


class TestWatched(BlockFileContract):
    """The faulty backend without a fault is a backend."""

    def make(self) -> Backend:
        return FaultyBackend()


@pytest.mark.parametrize("fault", [EIO, ENOSPC, EINTR, EAGAIN, NOTHING, UNALIGNED, PART], ids=str)
def test_each_fault_at_each_transfer(fault: Fault, disk_path: Path, buffers: tuple[Bytes, Bytes]) -> None:
    """Either the transfer is whole, or it raises the right error; never a silent short one."""
    source, target = buffers

    def scenario(backend: FaultyBackend) -> None:
        (disk_path / "pack").unlink(missing_ok=True)
        target[:] = 0
        file = backend.create(disk_path / "pack", 16 * PAGE)
        try:
            file.write_from(source[: 8 * PAGE], 0)
            file.write_from(source[8 * PAGE :], 8 * PAGE)
            file.read_into(target, 0)
        finally:
            file.close()

    expected = {EIO: StorageError, ENOSPC: StorageFull, NOTHING: ShortTransfer}.get(fault)
    runs = 0
    for backend in each_fault(fault, scenario, kinds=("pread", "pwrite")):
        runs += 1
        if expected is None:
            scenario(backend)
            assert np.array_equal(source, target)
        else:
            with pytest.raises(expected, match="pack"):
                scenario(backend)
    assert runs == 3


@pytest.mark.parametrize("fault", [EIO, ENOSPC], ids=str)
def test_each_fault_while_creating_leaves_nothing(fault: Fault, disk_path: Path) -> None:
    def scenario(backend: FaultyBackend) -> None:
        (disk_path / "pack").unlink(missing_ok=True)
        backend.create(disk_path / "pack", 16 * PAGE).close()

    names = []
    for backend in each_fault(fault, scenario):
        (disk_path / "pack").unlink(missing_ok=True)
        with pytest.raises(StorageFull if fault is ENOSPC else StorageError):
            scenario(backend)
        names.append(backend.calls[backend.at])
        assert (disk_path / "pack").exists() == (backend.at == 4)  # 4: the caller's own close of a whole file
    assert names == ["open", "allocate", "close", "open", "close"]


@pytest.mark.parametrize("fault", [EINTR, EAGAIN, UNALIGNED], ids=str)
def test_a_fault_that_does_not_end_is_given_up(fault: Fault, disk_path: Path, buffers: tuple[Bytes, Bytes]) -> None:
    backend = FaultyBackend(fault, times=10**9, kinds=("pwrite",))
    file = backend.create(disk_path / "pack", 16 * PAGE)
    with pytest.raises(StorageError):
        file.write_from(buffers[0], 0)
    assert backend.calls.count("pwrite") == FRUITLESS_LIMIT + 1
    file.close()


def test_short_direct_transfers_go_on_from_the_aligned_boundary(disk_path: Path, buffers: tuple[Bytes, Bytes]) -> None:
    backend = FaultyBackend(PART, times=10**9, kinds=("pread", "pwrite"))
    file = backend.create(disk_path / "pack", 16 * PAGE)
    file.write_from(buffers[0], 0)
    file.read_into(buffers[1], 0)
    assert np.array_equal(*buffers)
    assert backend.calls.count("pwrite") == 8  # two pages gained by each call of 8192 + 100 B; the last one is whole
    file.close()


def test_only_what_was_written_since_is_synced(disk_path: Path, buffers: tuple[Bytes, Bytes]) -> None:
    backend = FaultyBackend()
    page, file = buffers[0][:4096], backend.create(disk_path / "pack", 4096)
    for _ in range(2):  # the second has nothing to do
        file.datasync()
    assert backend.calls.count("fdatasync") == 1
    file.write_from(page, 0)
    file.datasync()
    assert backend.calls.count("fdatasync") == 2
    file.write_from(page, 0)
    backend.refuse("nobody waits")
    for _ in range(2):  # a call that was not made has synced nothing
        with pytest.raises(ClosedError, match="nobody waits"):
            file.datasync()
    file.close()


def test_a_failed_datasync_is_never_retried(disk_path: Path) -> None:
    backend = FaultyBackend(EIO, kinds=("fdatasync",))
    file = backend.create(disk_path / "pack", PAGE)
    with pytest.raises(StorageError, match=r"fdatasync of .*pack failed.*EIO"):
        file.datasync()
    with pytest.raises(StorageError, match="may be lost"):
        file.datasync()
    assert backend.calls.count("fdatasync") == 1
    file.close()


def test_close_waits_for_the_transfer_in_flight(disk_path: Path, buffers: tuple[Bytes, Bytes]) -> None:
    """The descriptor must not be reused under a running call."""
    closed: list[bool] = []

    class ClosesMeanwhile(Backend):
        def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
            file.close()
            os.fstat(descriptor)  # still open
            return super()._call_pread(descriptor, view, offset, path)

        def _call_close(self, descriptor: int, path: Path) -> None:
            closed.append(True)
            super()._call_close(descriptor, path)

    backend = ClosesMeanwhile()
    file = backend.create(disk_path / "pack", 16 * PAGE)
    closed.clear()
    assert file.read_into(buffers[1], 0) == 16 * PAGE
    assert closed == [True]


@pytest.mark.parametrize("holes", [[(2 * PAGE, 3 * PAGE)], [(0, PAGE), (12 * PAGE, 4 * PAGE)], [(0, 16 * PAGE)]])
def test_holes_of_a_new_file_take_no_space(holes: list[tuple[int, int]], disk_path: Path) -> None:
    Backend().create(disk_path / "new", 16 * PAGE, holes).close()
    found = (disk_path / "new").stat()
    assert (found.st_size, found.st_blocks * 512) == (16 * PAGE, 16 * PAGE - sum(nbytes for _, nbytes in holes))


@pytest.mark.parametrize("refusal", [None, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_range_is_copied_to_the_same_place(
    refusal: int | None, disk_path: Path, buffers: tuple[Bytes, Bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where `copy_file_range` does not work."""

    def refuse(*_: int) -> int:
        assert refusal is not None
        raise OSError(refusal, os.strerror(refusal))

    if refusal is not None:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    backend, source, target = Backend(), disk_path / "from", disk_path / "to"
    for path in (source, target):
        backend.create(path, 16 * PAGE).close()
    source.write_bytes(buffers[0].tobytes())
    backend.copy_range(source, target, 2 * PAGE, 3 * PAGE)
    assert target.read_bytes() == bytes(2 * PAGE) + buffers[0][2 * PAGE : 5 * PAGE].tobytes() + bytes(11 * PAGE)
    with pytest.raises(StorageError, match=r"copy of 8192 B at offset 61440 of .*/from.*it ends at 65536 B"):
        backend.copy_range(source, target, 15 * PAGE, 2 * PAGE)
    assert backend.counters.totals().read_bytes == 0


@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP, errno.EIO])
def test_a_clone_is_made_where_that_can_be(
    refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clone(target: int, request: int, source: int) -> None:
        if request != 0x40049409:
            raise OSError(errno.ENOTTY, "no flags here")
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        os.write(target, os.read(source, 100))

    monkeypatch.setattr(fcntl, "ioctl", clone)
    source, target = tmp_path / "from", tmp_path / "to"
    source.write_bytes(b"bytes")
    if refusal == errno.EIO:
        with pytest.raises(StorageError, match=r"clone of .*/from"):
            Backend().clone(source, target)
        return
    assert Backend().clone(source, target) is (refusal is None)
    assert (target.read_bytes() if refusal is None else target.exists()) == (b"bytes" if refusal is None else False)
