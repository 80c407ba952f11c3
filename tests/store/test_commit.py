"""Directories of a store: who may use them, and that they are there after a power cut."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from faults import EIO, HANG, FaultyBackend, each_fault

from tierstore.errors import ConfigError, StorageError, StoreLocked
from tierstore.io.backend import Backend
from tierstore.store.commit import (
    Generation,
    Identity,
    Manifests,
    StoreLock,
    begin_store,
    claim_directory,
    end_store_making,
    identity_of,
)

pytestmark = pytest.mark.usefixtures("no_leaks")


def refuse(number: int) -> Any:
    def call(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


class TestLock:
    def test_a_refusal_by_the_system_leaves_nothing_locked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
            with pytest.raises(StorageError, match=r"lock of .*lock failed: .*ENOLCK"):
                StoreLock([tmp_path])
        StoreLock([tmp_path]).release()

    @pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
    def test_a_full_disk_is_no_reason_to_refuse(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse(errno.ENOSPC))
            lock = StoreLock([tmp_path])
        lock.release()

    def test_a_forked_child_does_not_keep_that_of_a_killed_parent(self, tmp_path: Path) -> None:
        lock = StoreLock([tmp_path])
        (waits, go_on), (told, tell) = os.pipe(), os.pipe()
        if (child := os.fork()) == 0:
            os.write(tell, b"!")
            os.read(waits, 1)
            os._exit(0)
        os.read(told, 1)
        lock.let_go()  # as a kill does: the name of the lock stays
        try:
            StoreLock([tmp_path]).release()
        finally:
            os.write(go_on, b"!")
            os.waitpid(child, 0)
            for descriptor in (waits, go_on, told, tell):
                os.close(descriptor)

    def test_a_lock_that_is_removed_meanwhile_is_taken_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its owner lets go between our open and our lock: what we have locked then is no name any more."""
        take, removals = fcntl.flock, iter([True])

        def flock(descriptor: int, operation: int) -> None:
            if next(removals, False):
                (tmp_path / "lock").unlink()
            take(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", flock)
        first = StoreLock([tmp_path])
        with pytest.raises(StoreLocked):
            StoreLock([tmp_path])
        first.release()

    def test_a_rank_that_outlives_its_leader_keeps_the_store(self, tmp_path: Path) -> None:
        """It may still write what the next run would write."""
        leader, member = StoreLock([tmp_path]), StoreLock([tmp_path], member=1)
        leader.release()
        with pytest.raises(StoreLocked, match=f"in use by process {os.getpid()}"):
            StoreLock([tmp_path])
        member.release()
        (tmp_path / "lock.2").touch()  # a rank that was killed has left its name
        following = StoreLock([tmp_path])
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        following.release()
        assert not list(tmp_path.iterdir())

    def test_a_machine_that_shares_the_directory_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: "other")
            lock = StoreLock([tmp_path])
        said = f"in use by process {os.getpid()} of other; stop it, give each machine of one run a directory of its own"
        with pytest.raises(StoreLocked, match=said):
            StoreLock([tmp_path])
        lock.release()


class SyncedBackend(Backend):
    """Knows which directories were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[Path] = []

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        self.synced.append(path)


class TestDirectories:
    def test_every_new_name_is_durable(self, tmp_path: Path) -> None:
        backend, store = SyncedBackend(), tmp_path / "a" / "b" / "store"
        assert claim_directory(store, backend)
        assert backend.synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
        assert store.stat().st_mode & 0o777 == 0o700
        assert not claim_directory(store, backend)
        assert len(backend.synced) == 3

    def test_each_fault_is_told_with_its_path(self, tmp_path: Path) -> None:
        runs = itertools.count()

        def scenario(backend: FaultyBackend) -> None:
            store = tmp_path / f"{next(runs)}" / "store"
            claim_directory(store, backend)
            begin_store([store], backend)
            (store / "weights.a.safetensors").touch()
            begin_store([store], backend)
            end_store_making([store], backend)
            Manifests(store, backend).numbers()

        for backend in each_fault(EIO, scenario):
            with pytest.raises(StorageError, match=f"{tmp_path}.*Input/output error"):
                scenario(backend)


    def test_a_striped_store_that_was_broken_off_in_the_making_can_be_made_again(self, tmp_path: Path) -> None:
        """Each directory says of which store it is, before there is a pack in any."""
        runs = itertools.count()

        def scenario(backend: FaultyBackend) -> None:
            directories = [tmp_path / f"{next(runs)}{name}" for name in "ab"]
            for path in directories:
                claim_directory(path, Backend())
            try:
                begin_store(directories, backend)
            except StorageError:
                begin_store(directories, Backend())
                raise
            finally:
                known = [identity_of(path) for path in directories]
                store = known[0].store if known[0] else ""
                assert known == [Identity(store, 0, 2), Identity(store, 1, 2)]
                end_store_making(directories, Backend())
                assert not any(map(os.listdir, directories))

        for backend in each_fault(EIO, scenario):
            with pytest.raises(StorageError):
                scenario(backend)


def test_a_store_that_another_run_has_begun_meanwhile(tmp_path: Path) -> None:
    """Before it was locked, and after there was no generation in it."""
    for name in ("manifest-000000000000.json", "weights.a.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="holds generation 0 of a run that has begun there in this moment; go on"):
        begin_store([tmp_path], Backend())


def test_a_store_in_fewer_directories_than_one_that_was_broken_off_there(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        claim_directory(path, Backend())
    begin_store([first, second], Backend())
    begin_store([first], Backend())
    assert identity_of(first) is None
    assert identity_of(second) is not None


class TestManifests:
    def test_two_are_kept_also_when_one_was_killed_while_it_removed_an_old_one(self, tmp_path: Path) -> None:
        manifests = Manifests(tmp_path, Backend())
        for number in range(4):
            asyncio.run(manifests.publish(Generation(number, {}, {}, {})))
        (tmp_path / "captured-000000000001.safetensors").touch()
        asyncio.run(manifests.adopt(3))
        assert manifests.numbers() == [3, 2]
        assert len(list(tmp_path.iterdir())) == 4
        asyncio.run(manifests.adopt(2))
        assert manifests.numbers() == [2]

    def test_one_that_is_not_known_to_be_durable_is_taken_back(self, tmp_path: Path) -> None:
        """A failed fsync is never retried: the step is told to be lost, so it must not come back."""
        runs = itertools.count()

        def scenario(backend: FaultyBackend) -> None:
            store = tmp_path / f"{next(runs)}"
            store.mkdir()
            try:
                asyncio.run(Manifests(store, backend).publish(Generation(0, {}, {}, {})))
            finally:
                assert Manifests(store, Backend()).numbers() == [0] * (backend.fault is None)

        failed = []
        for backend in each_fault(EIO, scenario, kinds=("open", "pwrite", "fsync", "replace", "close")):
            with pytest.raises(StorageError):
                scenario(backend)
            failed.append(backend.calls[backend.at])
        assert failed == 2 * ["open", "pwrite", "fsync", "close", "replace", "open", "fsync", "close"]

    def test_a_cancellation_waits_for_the_end_of_the_write(self, tmp_path: Path) -> None:
        async def play(backend: FaultyBackend) -> None:
            task = asyncio.create_task(Manifests(tmp_path, backend).capture(0, {}))
            await asyncio.sleep(0)
            task.cancel()
            await task

        backend = FaultyBackend()
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(play(backend))
        assert [path.name for path in tmp_path.iterdir()] == ["captured-000000000000.safetensors"]
        assert backend.calls == ["open", "pwrite", "fsync", "close", "replace", "open", "fsync", "close"]
        with pytest.raises(StorageError, match="EIO"):  # a failure is not lost behind the cancellation
            asyncio.run(play(FaultyBackend(EIO, at=1)))

    def test_a_loop_that_ends_meanwhile_leaves_a_whole_generation(self, tmp_path: Path) -> None:
        """It stops those who wait; the thread goes on, and what it publishes must all be there."""
        backend = FaultyBackend(HANG, at=2, kinds=("open",))  # of the manifest

        async def play() -> None:
            task = asyncio.create_task(Manifests(tmp_path, backend).publish(Generation(0, {}, {}, {})))
            await asyncio.to_thread(backend.is_hung.wait, 60)
            for one in asyncio.all_tasks() - {asyncio.current_task()}:
                one.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            backend.goes_on.set()

        asyncio.run(play())
        manifests = Manifests(tmp_path, Backend())
        assert manifests.numbers() == [0]
        assert (tmp_path / "captured-000000000000.safetensors").exists()
