"""Directories of a store: they are there after a power cut, and no other store may have them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from faults import EIO, FaultyBackend, each_fault

from tierstore.errors import ConfigError, StorageError
from tierstore.io.backend import Backend
from tierstore.store.directories import Identity, begin_store, claim_directory, end_store_making, identity_of
from tierstore.store.manifest_files import Manifests

pytestmark = pytest.mark.usefixtures("no_leaks")


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
        claim_directory(store, backend)
        assert backend.synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
        assert store.stat().st_mode & 0o777 == 0o700
        claim_directory(store, backend)
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
        """Each directory says to which store it belongs before any directory holds a pack."""
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
    """The other run began after this one had found no generation there, and before this one had locked the store."""
    for name in ("manifest-000000000000.json", "weights.a.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="holds generation 0 of a run that has just begun there; go on"):
        begin_store([tmp_path], Backend())


def test_a_store_in_fewer_directories_than_one_that_was_broken_off_there(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        claim_directory(path, Backend())
    begin_store([first, second], Backend())
    begin_store([first], Backend())
    assert identity_of(first) is None
    assert identity_of(second) is not None
