"""Directories of a store: who may use them, and that they are there after a power cut."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tierstore.errors import StorageError
from tierstore.store.commit import StoreLock

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
