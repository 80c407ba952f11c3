"""Manifests: two of them are kept, and one that is not known to be durable is taken back."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from faults import EIO, HANG, FaultyBackend, each_fault

from tierstore.errors import StorageError
from tierstore.io.backend import Backend
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import Manifests

pytestmark = pytest.mark.usefixtures("no_leaks")


class Blinking(Backend):
    """Once, the path `away` is away while a directory is listed."""

    away: Path | None = None

    def _call_list(self, path: Path) -> list[str]:
        if self.away is None:
            return super()._call_list(path)
        away, self.away = self.away, None
        elsewhere = away.with_name("elsewhere")
        away.rename(elsewhere)
        try:
            return super()._call_list(path)
        finally:
            elsewhere.rename(away)


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

    @pytest.mark.parametrize("goes", ["directory", "manifest"])
    def test_nothing_is_removed_where_the_last_one_is_not_seen(self, goes: str, tmp_path: Path) -> None:
        """A directory that is away for a moment, as a mount may be, seems to hold no manifests."""
        store = tmp_path / "store"
        store.mkdir()
        backend = Blinking()
        manifests = Manifests(store, backend)
        for number in range(2):
            asyncio.run(manifests.publish(Generation(number, {}, {}, {})))
        backend.away = store if goes == "directory" else store / "manifest-000000000002.json"
        with pytest.raises(StorageError, match="No such file" if goes == "directory" else "2.json is gone; nothing"):
            asyncio.run(manifests.publish(Generation(2, {}, {}, {})))
        assert manifests.numbers() == [2, 1, 0]

    def test_one_that_is_not_known_to_be_durable_is_taken_back(self, tmp_path: Path) -> None:
        """A failed fsync is never retried: the caller was told that the step is lost, so it must not come back."""
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
        """The end of the loop cancels waiting tasks; the thread goes on, and all that it publishes must be there."""
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
