"""Packing that is killed, or that fails, at any system call leaves nothing that looks like a pack but is none."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_tensor, read_safetensors, small_checkpoint, write_safetensors
from faults import EIO, ENOSPC, Fault, FaultyBackend

from tierstore.archive.opening import open_archive
from tierstore.archive.packing import PackOptions, pack
from tierstore.archive.publish import Publication
from tierstore.archive.reading import verify
from tierstore.archive.sources import INDEX, SINGLE, open_source
from tierstore.archive.unpacking import UnpackOptions, unpack
from tierstore.errors import ClosedError, ConfigError, StorageError, TierstoreError
from tierstore.io.backend import Backend

pytestmark = pytest.mark.usefixtures("no_leaks")
MEMORY = 2**40


class Killed(BaseException):
    """The process was killed."""


class KillingBackend(FaultyBackend):
    """Kills the process at call `at`: neither that call nor a later one is done, except that descriptors close."""

    def _due(self, kind: str) -> Fault | None:
        with self._fault_lock:
            self.calls.append(kind)
            if kind != "close" and len(self.calls) > self.at:
                raise Killed
        return None


def run(source: Path, destinations: tuple[Path, ...], backend: FaultyBackend, **options: Any) -> None:
    pack(open_source(source), PackOptions(destinations, memory_bytes=MEMORY, **options), {}, backend=backend)


def calls_of(source: Path, destinations: tuple[Path, ...], **options: Any) -> int:
    backend = FaultyBackend()
    run(source, destinations, backend, **options)
    return len(backend.calls)


@pytest.mark.parametrize("shape", ["file", "shards", "stripes"])
def test_killed_at_any_call(tmp_path: Path, shape: str) -> None:
    source = tmp_path / "a"
    small_checkpoint(source, blocks=1)
    options: dict[str, Any] = {} if shape == "file" else {"shards": 2}

    def places(folder: Path) -> tuple[Path, ...]:
        names = {"file": ["p.safetensors"], "shards": ["p"], "stripes": ["p", "q"]}[shape]
        return tuple(folder / name for name in names)

    (tmp_path / "count").mkdir()
    count = calls_of(source, places(tmp_path / "count"), **options)
    whole = sorted(path.name for path in (tmp_path / "count").rglob("*"))
    finished = 0
    for at in range(count):
        folder = tmp_path / str(at)
        folder.mkdir()
        with contextlib.suppress(Killed):  # nothing raises where only closing is left
            run(source, places(folder), KillingBackend(at=at), **options)
        try:
            files = open_archive(places(folder))
        except TierstoreError:
            run(source, places(folder), FaultyBackend(), **options)
        else:  # it was published: only its directory was not known to be durable, or the clean-up was missing
            assert not verify(files, MEMORY)
            finished += 1
            with pytest.raises(ConfigError, match="is there already"):
                run(source, places(folder), FaultyBackend(), **options)
        assert sorted(path.name for path in folder.rglob("*")) == whole, f"killed at call {at}"
    assert 0 < finished < count / 2


@pytest.mark.parametrize("fault", [EIO, ENOSPC], ids=str)
def test_a_failure_at_any_call_is_told_and_leaves_nothing(tmp_path: Path, fault: Fault) -> None:
    source = tmp_path / "a"
    small_checkpoint(source, blocks=1)
    count = calls_of(source, (tmp_path / "count",), shards=2)
    for at in range(count):
        backend = FaultyBackend(fault, at=at)
        destination = tmp_path / str(at)
        try:
            run(source, (destination,), backend, shards=2)
        except StorageError:
            left = [path.name for path in destination.iterdir()] if destination.exists() else []
            is_published = any(name.endswith("index.json") for name in left)
            assert not left or is_published, f"{backend.calls[at]} number {at} left {left}"
        else:
            assert not verify(open_archive([destination]), MEMORY)


def test_the_next_pack_of_another_shape_clears_what_a_killed_one_left(tmp_path: Path) -> None:
    source = tmp_path / "a"
    small_checkpoint(source, blocks=1)
    (tmp_path / "count").mkdir()
    count = calls_of(source, (tmp_path / "count",), shards=3)
    (tmp_path / "whole").mkdir()
    run(source, (tmp_path / "whole",), FaultyBackend(), shards=2)
    whole = sorted(path.name for path in (tmp_path / "whole").iterdir())
    kills = 0
    for at in range(count - 12, count):
        destination = tmp_path / str(at)
        with pytest.raises(Killed):
            run(source, (destination,), KillingBackend(at=at), shards=3)
        if (destination / INDEX).exists():
            break
        kills += 1
        assert any(destination.iterdir())
        run(source, (destination,), FaultyBackend(), shards=2)
        assert sorted(path.name for path in destination.iterdir()) == whole, f"killed at call {at}"
    assert kills > 2


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    old = small_checkpoint(tmp_path / "a", blocks=1)
    new = small_checkpoint(tmp_path / "b", blocks=2)
    run(tmp_path / "a", (tmp_path / "p",), FaultyBackend(), shards=2)
    shutil.copytree(tmp_path / "p", tmp_path / "count")
    count = calls_of(tmp_path / "b", (tmp_path / "count",), shards=2, overwrite=True)
    whole = sorted(path.name for path in (tmp_path / "count").iterdir())
    seen = set()
    for at in range(count):
        destination = shutil.copytree(tmp_path / "p", tmp_path / str(at))
        with contextlib.suppress(Killed):
            run(tmp_path / "b", (destination,), KillingBackend(at=at), shards=2, overwrite=True)
        files = open_archive([destination])
        assert not verify(files, MEMORY)
        found = read_safetensors(*(file.path for file in files))
        assert found in (old, new)
        seen.add(found == new)
        run(tmp_path / "b", (destination,), FaultyBackend(), shards=2, overwrite=True)
        assert sorted(path.name for path in destination.iterdir()) == whole, f"killed at call {at}"
    assert seen == {False, True}


def test_a_single_file_over_shards_is_all_or_nothing_and_leaves_none_of_them(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a", blocks=1)
    new = small_checkpoint(tmp_path / "b", blocks=2)
    run(tmp_path / "a", (tmp_path / "p",), FaultyBackend(), shards=2)
    count = 0
    for at in range(10**6):
        folder = shutil.copytree(tmp_path / "p", tmp_path / str(at))
        backend = KillingBackend(at=at)
        with contextlib.suppress(Killed):
            run(tmp_path / "b", (folder / SINGLE,), backend, overwrite=True)
            count = len(backend.calls)
        assert not verify(open_archive([folder]), MEMORY)
        run(tmp_path / "b", (folder / SINGLE,), FaultyBackend(), overwrite=True)
        assert [path.name for path in folder.iterdir()] == [SINGLE], f"killed at call {at}"
        assert read_safetensors(folder / SINGLE) == new
        if count:
            break
    assert count > 10


def test_a_single_file_that_an_index_names_is_what_was_written(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a", blocks=1)
    new = small_checkpoint(tmp_path / "b", blocks=2)
    run(tmp_path / "a", (tmp_path / "p" / SINGLE,), FaultyBackend())
    (tmp_path / "p" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(new, SINGLE)}))
    run(tmp_path / "b", (tmp_path / "p" / SINGLE,), FaultyBackend(), overwrite=True)
    assert [path.name for path in (tmp_path / "p").iterdir()] == [SINGLE]
    assert read_safetensors(tmp_path / "p" / SINGLE) == new


@pytest.mark.parametrize("index", [None, "not json"])
def test_an_old_index_without_one_that_is_read_removes_nothing(index: str | None, tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a", blocks=1)
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "mine.safetensors").write_bytes(b"mine")
    if index is not None:
        (tmp_path / "p" / INDEX).write_text(index)
    (tmp_path / "p" / f"old-{INDEX}.partial").write_text(json.dumps({"weight_map": {"a": "mine.safetensors"}}))
    run(tmp_path / "a", (tmp_path / "p",), FaultyBackend(), shards=2, overwrite=index is not None)
    names = [path.name for path in (tmp_path / "p").iterdir()]
    assert len(names) == 4
    assert "mine.safetensors" in names


def test_an_unpacking_that_fails_leaves_nothing(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "a", blocks=1)
    run(tmp_path / "a", (tmp_path / "p.safetensors",), FaultyBackend())
    files = open_archive([tmp_path / "p.safetensors"])
    backend = FaultyBackend(EIO, at=2, kinds=("pwrite",))
    with pytest.raises(StorageError):
        unpack(files, UnpackOptions(tmp_path / "out", 5000, MEMORY), backend=backend)
    assert not (tmp_path / "out").exists()


def test_what_another_has_made_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    """The name was free when the first pack began; the other one has another number of shards."""
    old = small_checkpoint(tmp_path / "a", blocks=1)
    small_checkpoint(tmp_path / "b", blocks=2)

    class Late(FaultyBackend):
        def _call_fdatasync(self, descriptor: int, path: Path) -> None:
            if not (tmp_path / "p" / INDEX).exists():
                run(tmp_path / "a", (tmp_path / "p",), FaultyBackend(), shards=3)
            super()._call_fdatasync(descriptor, path)

    with pytest.raises(ConfigError, match="is there already"):
        run(tmp_path / "b", (tmp_path / "p",), Late(), shards=2)
    files = open_archive([tmp_path / "p"])
    assert not verify(files, MEMORY)
    assert read_safetensors(*(file.path for file in files)) == old
    assert len(list((tmp_path / "p").iterdir())) == 4


def test_a_file_that_a_pack_elsewhere_names_is_not_taken_from_it(tmp_path: Path) -> None:
    """Two packs of the same content have files of the same names, and here one directory in common."""
    old = small_checkpoint(tmp_path / "a", blocks=1)
    first, second = ((tmp_path / name, tmp_path / "y") for name in "xz")
    run(tmp_path / "a", first, FaultyBackend())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="is there already, and no index here names it; give another"):
        run(tmp_path / "a", second, FaultyBackend())
    assert sorted(tmp_path.rglob("*")) == before
    assert not verify(files := open_archive(first), MEMORY)
    assert read_safetensors(*(file.path for file in files)) == old


def test_a_file_without_tensors_belongs_to_its_pack(tmp_path: Path) -> None:
    """One tensor over two directories: the second file holds none, and the map of the index does not name it."""
    for seed, name in enumerate("ab"):
        write_safetensors(tmp_path / name, {"w": random_tensor("F32", (1000,), seed)})
    places = tmp_path / "x", tmp_path / "y"
    run(tmp_path / "a", places, FaultyBackend())
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(StorageError):  # the last rename: that of the index
        run(tmp_path / "a", places, FaultyBackend(EIO, at=2, kinds=("replace",)), overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert len(open_archive(places)) == 2
    run(tmp_path / "b", places, FaultyBackend(), overwrite=True)
    assert len(open_archive(places)) == 2
    assert len(list(tmp_path.rglob("*"))) == len(before), "the files of the old one are gone"


def test_who_waits_for_another_writer_can_be_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoint(tmp_path / "a", blocks=1)
    (tmp_path / "p").mkdir()
    descriptor = os.open(tmp_path / "p", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    backend, naps = FaultyBackend(), []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            backend.refuse("the person left")

    monkeypatch.setattr("tierstore.archive.publish.time.sleep", nap)
    with pytest.raises(ClosedError, match="the person left"):
        run(tmp_path / "a", (tmp_path / "p",), backend)
    monkeypatch.setattr("tierstore.archive.publish._TURN_S", -1.0)
    with pytest.raises(ConfigError, match="another process writes to"):
        run(tmp_path / "a", (tmp_path / "p",), FaultyBackend())
    os.close(descriptor)
    run(tmp_path / "a", (tmp_path / "p",), FaultyBackend())


def test_another_pack_that_runs_is_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "a"
    small_checkpoint(source, blocks=1)
    begun, goes_on = threading.Event(), threading.Event()

    class Waiting(FaultyBackend):
        def _call_fdatasync(self, descriptor: int, path: Path) -> None:
            begun.set()
            goes_on.wait(30)
            super()._call_fdatasync(descriptor, path)

    options = {"shards": 2, "overwrite": True}
    one = threading.Thread(target=run, args=(source, (tmp_path / "p",), Waiting()), kwargs=options)
    one.start()
    begun.wait(30)
    with pytest.raises(ConfigError, match="another process writes"):
        run(source, (tmp_path / "p",), FaultyBackend(), shards=2)
    run(source, (tmp_path / "p",), FaultyBackend(), shards=3)  # other names: side by side, the later index counts
    goes_on.set()
    one.join()
    assert len(open_archive([tmp_path / "p"])) == 2


@pytest.mark.parametrize("fault", [None, EIO], ids=["published", "failed after its rename"])
def test_a_writer_that_ends_leaves_alone_what_the_next_one_has_begun(fault: Fault | None, tmp_path: Path) -> None:
    """By then its own file is renamed or removed, and the next writer's file has the name that it had."""
    partial = tmp_path / f"{SINGLE}.partial"
    with Publication(tmp_path / SINGLE, 1, Backend(), overwrite=True) as second:
        with Publication(tmp_path / SINGLE, 1, FaultyBackend(fault, kinds=("fsync",)), overwrite=True) as first:
            first.begin([10])
            with contextlib.suppress(StorageError):
                first.commit()
            second.begin([20])
        assert partial.stat().st_size == 20
        second.commit()
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [(SINGLE, 20)]
