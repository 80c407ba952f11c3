"""pack, unpack and verify on a disk that does not answer: an error in time, and nothing half-written is visible."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import small_checkpoint
from faults import HANG, FaultyBackend
from rich.console import Console

from tierstore.apps.pack import run_pack, run_unpack
from tierstore.apps.verify import run_verify
from tierstore.archive import packing, publish, unpacking
from tierstore.archive.opening import open_archive
from tierstore.archive.packing import PackOptions
from tierstore.archive.sources import INDEX, open_source
from tierstore.archive.unpacking import UnpackOptions
from tierstore.config import Codec
from tierstore.errors import Timeout
from tierstore.io import watch
from tierstore.io.backend import Backend

pytestmark = pytest.mark.usefixtures("no_leaks")
CONSOLE, MEMORY, TIMEOUT_S = Console(quiet=True), 2**40, 0.1
WRITES = ("allocate", "close", "fdatasync", "fsync", "mkdir", "open", "pread", "pwrite", "replace", "truncate")
CASES = [
    *(("pack", kind, place) for kind in WRITES for place in ("first", "last")),
    *(("unpack", kind, place) for kind in WRITES for place in ("first", "last")),
    *(("verify", kind, "last") for kind in ("close", "open", "pread")),
]


def pack(given: Path, folder: Path) -> None:
    options = PackOptions((folder / "out",), shards=2, memory_bytes=MEMORY)
    run_pack(given / "a", options, Codec.NONE, None, CONSOLE, timeout_s=TIMEOUT_S)


def unpack(given: Path, folder: Path) -> None:
    run_unpack([given / "p"], UnpackOptions(folder / "out", 5000, MEMORY), CONSOLE, timeout_s=TIMEOUT_S)


def verify(given: Path, folder: Path) -> None:
    assert not run_verify([given / "p"], MEMORY, CONSOLE, timeout_s=TIMEOUT_S).damages


WORK: dict[str, Callable[[Path, Path], None]] = {"pack": pack, "unpack": unpack, "verify": verify}


def done_with(command: str, given: Path, folder: Path, disk: FaultyBackend) -> set[str]:
    """Runs the command; returns the names that `folder` then holds. Deadlines pass only while the disk hangs."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "Backend", lambda: disk)
        patch.setattr(watch.Watch, "begin", lambda self: lambda: disk.is_hung.is_set() and not disk.goes_on.is_set())
        WORK[command](given, folder)
    return names(folder)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, `a`, and a pack of it, `p`."""
    folder = tmp_path_factory.mktemp("given")
    small_checkpoint(folder / "a", blocks=1)
    run_pack(folder / "a", PackOptions((folder / "p",), shards=2, memory_bytes=MEMORY), Codec.NONE, None, CONSOLE)
    return folder


@pytest.fixture(scope="module")
def undisturbed(given: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[set[str], list[str]]]:
    """By command: the names that it leaves, and its calls to the backend."""
    disks, folder = {command: FaultyBackend() for command in WORK}, tmp_path_factory.mktemp("undisturbed")
    return {command: (done_with(command, given, folder / command, disk), disk.calls) for command, disk in disks.items()}


@pytest.mark.parametrize(("command", "kind", "place"), CASES)
def test_a_call_that_never_returns(
    command: str, kind: str, place: str, given: Path, undisturbed: dict[str, tuple[set[str], list[str]]], tmp_path: Path
) -> None:
    whole, calls = undisturbed[command]
    threads = set(threading.enumerate())
    disk = FaultyBackend(HANG, at=0 if place == "first" else calls.count(kind) - 1, kinds=(kind,))
    with pytest.raises(Timeout) as caught:
        done_with(command, given, tmp_path / "hangs", disk)
    there = names(tmp_path / "hangs")
    disk.goes_on.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)
    assert disk.hit is not None
    said, path = str(caught.value), re.escape(str(disk.hit[1]))
    assert re.search(rf"^{command} does not go on: .*\n(.*\n)*  [a-z].* of {path}.*, for \d", said), said
    assert re.search(r"\n  \S+: wait .* < _step \(faults\.py", said), said
    assert f"out/{INDEX}" not in there or there >= whole, "half of it is visible"
    left = names(tmp_path / "hangs")
    assert not left or (place == "last" and left == whole), "it removes what it made, if it was not all but done"
    if not left:
        assert done_with(command, given, tmp_path / "again", FaultyBackend()) == whole


def test_what_asks_the_system_in_its_own_way_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, asked, untold = Backend(), set[str](), set[str]()

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*arguments: Any, **options: Any) -> Any:
            asked.add(name)
            if threading.get_ident() not in disk.threads_in_flight():
                untold.add(name)
            return call(*arguments, **options)

        return told

    small_checkpoint(tmp_path / "a", blocks=1)
    source = open_source(tmp_path / "a")
    options = PackOptions((tmp_path / "p",), shards=2, memory_bytes=MEMORY, overwrite=True)
    packing.pack(source, options, {}, backend=disk)
    (tmp_path / "p" / "model-00007-of-00007.safetensors.partial").touch()  # of a writer that was killed
    files = open_archive([tmp_path / "p"])
    for owner, name in ((Path, "exists"), (publish, "weight_files"), (publish, "locked_file"), (torch, "save")):
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    unpacking.unpack(files, UnpackOptions(tmp_path / "u.pt", 5000, MEMORY), backend=disk)
    packing.pack(source, options, {}, backend=disk)
    assert (asked, untold) == ({"exists", "weight_files", "locked_file", "save"}, set())
