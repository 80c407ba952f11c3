"""Small files are replaced whole or not at all, whatever fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults import EAGAIN, EINTR, EIO, ENOSPC, NOTHING, UNALIGNED, Fault, FaultyBackend, each_fault

from tierstore.errors import FormatError, ShortTransfer, StorageError, StorageFull
from tierstore.io.backend import Backend
from tierstore.io.files import read_bytes, replace_file

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_round_trip_and_mode(tmp_path: Path) -> None:
    (tmp_path / "manifest.tmp").write_bytes(b"a longer leftover of a killed writer")
    (tmp_path / "manifest.tmp").chmod(0o644)
    replace_file(tmp_path / "manifest", b"one", backend=Backend())
    assert (tmp_path / "manifest").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "manifest").read_bytes() == b"one"
    replace_file(tmp_path / "manifest", b"two", backend=Backend())
    assert read_bytes(tmp_path / "manifest", backend=Backend()) == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["manifest"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"somebody else's")
    (tmp_path / "manifest.tmp").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match=r"manifest\.tmp failed: .*ELOOP"):
        replace_file(tmp_path / "manifest", b"one", backend=Backend())
    assert (tmp_path / "precious").read_bytes() == b"somebody else's"


def test_a_missing_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"read of .*absent failed: .*ENOENT") as caught:
        read_bytes(tmp_path / "absent", backend=Backend())
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_file_of_holes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "manifest").touch()
    os.truncate(tmp_path / "manifest", 2**38)
    with pytest.raises(FormatError, match="is damaged: it has 274877906944 B, and at most 1073741824 B are expected"):
        read_bytes(tmp_path / "manifest", backend=Backend())


@pytest.mark.parametrize("fault", [EIO, ENOSPC], ids=str)
def test_each_fault_leaves_old_or_new(fault: Fault, tmp_path: Path) -> None:
    path = tmp_path / "manifest"

    def scenario(backend: FaultyBackend) -> None:
        path.write_bytes(b"old")
        replace_file(path, b"new", backend=backend)

    outcomes = []
    for backend in each_fault(fault, scenario):
        with pytest.raises(StorageFull if fault is ENOSPC else StorageError):
            scenario(backend)
        outcomes.append((backend.calls[backend.at], path.read_bytes()))
        assert [item.name for item in tmp_path.iterdir()] == ["manifest"]
    assert outcomes == [
        ("open", b"old"),
        ("pwrite", b"old"),
        ("fsync", b"old"),
        ("close", b"old"),
        ("replace", b"old"),
        ("open", b"new"),
        ("fsync", b"new"),
        ("close", b"new"),
    ]


@pytest.mark.parametrize("fault", [EINTR, EAGAIN, UNALIGNED, NOTHING], ids=str)
def test_a_write_is_whole_or_told(fault: Fault, tmp_path: Path) -> None:
    data = bytes(range(256)) * 20
    backend = FaultyBackend(fault, kinds=("pwrite",))
    if fault is not NOTHING:
        replace_file(tmp_path / "manifest", data, backend=backend)
        assert (tmp_path / "manifest").read_bytes() == data
        return
    with pytest.raises(ShortTransfer, match=r"short write: 0 of 5120 B at offset 0 of .*manifest\.tmp"):
        replace_file(tmp_path / "manifest", data, backend=backend)
    assert not list(tmp_path.iterdir())
