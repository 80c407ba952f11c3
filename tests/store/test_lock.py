"""The lock of a store: who may use the store, whatever has become of earlier owners."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tierstore.errors import StorageError, StoreLocked
from tierstore.store.lock import StoreLock

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
        """Its owner lets go between our open and our lock: the file that we have locked then has no name any more."""
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
        """The rank may still write where the next run would write."""
        leader, member = StoreLock([tmp_path]), StoreLock([tmp_path], member=1)
        leader.release()
        with pytest.raises(StoreLocked, match=f"in use by process {os.getpid()}"):
            StoreLock([tmp_path])
        member.release()
        (tmp_path / "lock.2").touch()  # a rank that was killed has left its lock file
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
