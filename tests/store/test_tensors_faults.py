"""Stores of named tensors when things go wrong: cancelled, refused by the disk, damaged, killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import EIO, ENOSPC, Fault, FaultyBackend
from tensor_stores import (
    CHUNK,
    TIERS,
    QuickBackend,
    assert_at_rest,
    block,
    config,
    flip,
    named_files,
    opened,
    pack_files,
    run,
    settled,
    value_of,
)

from tierstore import TensorStore, Tier
from tierstore.errors import ChecksumMismatch, FormatError, StorageError, StorageFull
from tierstore.io.backend import Backend
from tierstore.store import shelf
from tierstore.store.owner import LoopOwner
from tierstore.store.routes import Route

pytestmark = pytest.mark.usefixtures("no_leaks")
TierPair = tuple[Tier, Tier]


# --- cancellation ------------------------------------------------------------------------------------------------


class Stepped:
    """A coroutine that is cancelled where it waits for the n-th time.

    Args:
        waits: the counter of waits, which other coroutines may share.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], at: int, waits: Iterator[int]) -> None:
        self._work = work
        self._at = at
        self._waits = waits

    def __await__(self) -> Iterator[Any]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        while True:
            try:
                waited_for = step()
            except StopIteration as end:
                return end.value
            if next(self._waits) == self._at:
                task = asyncio.current_task()
                assert task is not None
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waited_for
                step = lambda: self._work.send(None)  # noqa: E731
            except BaseException as error:
                step = lambda error=error: self._work.throw(error)  # noqa: E731


async def at_every_wait(
    store: TensorStore, work: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[bool], Awaitable[None]]
) -> None:
    """Run `work` anew, cancelled at its first wait, at its second, ... until it is over before that.

    Waits of the work that it does in tasks of the store's own count, too.
    """
    owner = store._owner
    for at in range(1, 200):
        waits = itertools.count(1)

        async def step(work: Coroutine[Any, Any, Any], at: int = at, waits: Iterator[int] = waits) -> Any:
            return await Stepped(work, at, waits)

        async def in_time(what: str, work: Coroutine[Any, Any, Any], step: Callable[..., Any] = step) -> Any:
            return await LoopOwner.in_time(owner, what, step(work))

        owner.in_time = in_time  # type: ignore[method-assign]
        task = asyncio.create_task(step(work()))
        await asyncio.wait({task})
        del owner.in_time
        was_cancelled = task.cancelled()
        if not was_cancelled:
            task.result()
        await check(was_cancelled)
        if next(waits) <= at:
            return
    raise AssertionError("it never ends")


@pytest.mark.parametrize("tiers", [(a, b) for a in TIERS for b in TIERS])
def test_a_cancelled_put_leaves_the_old_entry(tmp_path: Path, tiers: TierPair) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1, 40000), tier=tiers[0])

            async def check(was_cancelled: bool) -> None:
                assert store.home("h.0") is (tiers[0] if was_cancelled else tiers[1])
                assert await value_of(store, "h.0") == (1 if was_cancelled else 2)
                assert_at_rest(store)

            await at_every_wait(store, lambda: store.put("h.0", block(2, 40000), tier=tiers[1]), check)
            await store.commit()
            assert len(pack_files(tmp_path)) == 1

    run(main())


@pytest.mark.parametrize("tiers", [(a, b) for a in TIERS for b in TIERS if a is not b])
def test_a_cancelled_move_leaves_it_where_it_was(tmp_path: Path, tiers: TierPair) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1, 40000), tier=tiers[0])

            async def check(was_cancelled: bool) -> None:
                assert store.home("h.0") is (tiers[0] if was_cancelled else tiers[1])
                assert await value_of(store, "h.0") == 1
                await store.put("h.0", block(1, 40000), tier=tiers[0])  # without a copy on the device
                assert_at_rest(store)

            await at_every_wait(store, lambda: store.move("h.0", tiers[1]), check)

    run(main())


@pytest.mark.parametrize("tier", TIERS)
def test_a_cancelled_acquire_gives_everything_back(tmp_path: Path, tier: Tier) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1, 40000), tier=tier)

            async def use() -> None:
                assert await value_of(store, "h.0") == 1

            async def check(was_cancelled: bool) -> None:
                assert await value_of(store, "h.0") == 1
                assert_at_rest(store)
                await store.put("h.0", block(1, 40000), tier=tier)

            await at_every_wait(store, use, check)

    run(main())


@pytest.mark.parametrize("tier", TIERS)
def test_a_cancelled_release_has_written_back(tmp_path: Path, tier: Tier) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(0, 40000), tier=tier)
            changes = 0

            async def change() -> None:
                nonlocal changes
                async with store.acquire("h.0", modify=True) as tensors:
                    tensors["w"] += 1
                    changes += 1

            async def check(was_cancelled: bool) -> None:
                assert await value_of(store, "h.0") == changes
                assert_at_rest(store)
                await store.put("h.0", block(changes, 40000), tier=tier)  # without a copy on the device
                if tier is Tier.CPU:
                    await store.commit()

            await at_every_wait(store, change, check)
            assert changes > 1

    run(main())


def test_a_cancelled_commit_can_be_done_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            number = 1
            for tier in TIERS:
                await store.put(tier.value, block(0), tier=tier)

            async def commit() -> None:
                for tier in TIERS:
                    await store.put(tier.value, block(number), tier=tier)
                await store.commit()

            async def check(was_cancelled: bool) -> None:
                nonlocal number
                for tier in TIERS:
                    assert await value_of(store, tier.value) <= number
                number += 1

            await at_every_wait(store, commit, check)
            assert_at_rest(store)
        assert pack_files(tmp_path) == named_files(tmp_path)
        async with opened(tmp_path, resume="must") as store:
            assert [await value_of(store, tier.value) for tier in TIERS] == [number - 1] * 3

    run(main())


# --- failures ----------------------------------------------------------------------------------------------------


class QuickFaultyBackend(FaultyBackend, QuickBackend):
    """Fails as told, and does not wait for the disk."""

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        self._step("fdatasync", path)

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        self._step("fsync", path)


async def bring_all_to(store: TensorStore, value: int) -> None:
    """Every kind of call that changes something; each entry has its old value or the new one at any moment."""
    for tier in TIERS:
        await store.put(tier.value, block(value), tier=tier)
    async with store.acquire("nvme", modify=True) as tensors:
        tensors["w"].fill_(value)
    await store.move("cpu", Tier.NVME)
    await store.move("cpu", Tier.CPU)
    await store.commit()


@pytest.mark.parametrize("fault", [EIO, ENOSPC], ids=str)
def test_a_fault_at_any_call_leaves_every_entry_whole(tmp_path: Path, fault: Fault) -> None:
    async def main(at: int) -> bool:
        backend, path = QuickFaultyBackend(kinds=("allocate", "pwrite") if fault is ENOSPC else ()), tmp_path / str(at)
        async with TensorStore.open(config(path), backend=backend) as store:
            for tier in TIERS:
                await store.put(tier.value, block(1), tier=tier)
            await store.commit()
            await settled(store)
            backend.calls.clear()
            backend.counted, backend.at, backend.fault = 0, at, fault
            errors: list[StorageError] = []
            for call in (bring_all_to(store, 2), store.commit()):  # the second raises what nobody waited for
                try:
                    await call
                except StorageError as error:
                    errors.append(error)
                await settled(store)
            backend.fault = None
            was_hit = backend.counted > at
            assert bool(errors or store._owner._failures) == was_hit
            assert all(isinstance(error, StorageFull) == (fault is ENOSPC) for error in errors)
            assert all(str(path) in str(error) for error in errors)
            with contextlib.suppress(StorageError):
                store._owner.raise_kept()
            found = [await value_of(store, tier.value) for tier in TIERS]
            assert set(found) <= {1, 2}
            assert_at_rest(store)
            for tier, value in zip(TIERS, found):
                await store.put(tier.value, block(value + 1), tier=tier)
        async with opened(path, resume="must") as store:
            assert [await value_of(store, tier.value) for tier in TIERS] == [value + 1 for value in found]
        assert pack_files(path) == named_files(path)
        shutil.rmtree(path)
        return was_hit

    at = 0
    while run(main(at)):
        at += 1
    assert at > 10


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("kind", ["fdatasync", "fsync"])
def test_a_failed_sync_is_final(tmp_path: Path, kind: str, is_cancelled: bool) -> None:
    async def main() -> None:
        backend = QuickFaultyBackend(kinds=(kind,))
        async with TensorStore.open(config(tmp_path), backend=backend) as store:
            await store.put("old", block(1), tier=Tier.NVME)
            await store.commit()
            await store.put("new", block(1), tier=Tier.NVME)
            backend.fault, backend.at = EIO, backend.counted
            committing = asyncio.create_task(store.commit())
            while is_cancelled and backend.counted == backend.at:
                await asyncio.sleep(0)
            if is_cancelled:
                committing.cancel()
            with pytest.raises((StorageError, asyncio.CancelledError)):
                await committing
            with pytest.raises(StorageError, match=f"{kind} of .* failed: .*EIO.*; put the entry again"):
                await store.commit()
            assert store.generation == 0
            await store.put("new", block(2), tier=Tier.NVME)
            assert await store.commit() > 0

    run(main())


@pytest.mark.parametrize("kind", ["fdatasync", "fsync"])
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.CPU])
@pytest.mark.parametrize("then", ["commit", "move"])
def test_what_is_in_memory_is_written_anew_after_a_failed_sync(
    tmp_path: Path, kind: str, tier: Tier, then: str
) -> None:
    async def main() -> None:
        backend = QuickFaultyBackend(kinds=(kind,))
        async with TensorStore.open(config(tmp_path), backend=backend) as store:
            await store.put("h.0", block(1), tier=tier)
            backend.fault, backend.at = EIO, backend.counted
            with pytest.raises(StorageError, match="EIO"):
                await store.commit()
            (lost,) = pack_files(tmp_path)
            if then == "move":
                await store.move("h.0", Tier.NVME)
            assert await store.commit() == store.generation >= 0
            await settled(store)
            assert lost not in pack_files(tmp_path) == named_files(tmp_path)
            assert_at_rest(store)
        async with opened(tmp_path) as store:
            assert await value_of(store, "h.0") == 1

    run(main())


def test_a_file_that_cannot_be_inspected_now_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1), tier=Tier.NVME)
            (file,) = pack_files(tmp_path)

            def refusing(call: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
                if file in str(path):
                    raise OSError(EIO.errno, "the disk is busy")
                return call(path, *args, **options)

            with monkeypatch.context() as patch:
                patch.setattr(os, "stat", functools.partial(refusing, os.stat))
                patch.setattr(os, "lstat", functools.partial(refusing, os.lstat))
                await store.delete("h.0")
                await settled(store)
            assert pack_files(tmp_path) == [file]
            await store.commit()  # would raise what nobody has heard of
        async with opened(tmp_path):
            assert pack_files(tmp_path) == []

    run(main())


def test_a_failed_prefetch_is_told_once(tmp_path: Path) -> None:
    async def main() -> None:
        backend = FaultyBackend(kinds=("pread",))
        async with TensorStore.open(config(tmp_path), backend=backend) as store:
            await store.put("h.0", block(1), tier=Tier.NVME)
            await store.put("h.1", block(2), tier=Tier.NVME)
            backend.fault, backend.times = EIO, 1000
            assert await store.prefetch(["h.0"]) == ["h.0"]
            while store._entries["h.0"].copy is not None:
                await asyncio.sleep(0)
            backend.fault = None
            with pytest.raises(StorageError, match="put-0"):
                await value_of(store, "h.1")
            assert await value_of(store, "h.1") == 2
            assert await value_of(store, "h.0") == 1
            assert_at_rest(store)

    run(main())


def test_damage_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1), tier=Tier.NVME)
            await store.put("h.1", block(2), tier=Tier.NVME)
        name = flip(tmp_path / "store", "h.0/0")
        async with opened(tmp_path) as store:
            with pytest.raises(ChecksumMismatch, match=f"chunk h.0/0 at offset 4096 of .*{name}"):
                await value_of(store, "h.0")
            assert await value_of(store, "h.1") == 2
            assert_at_rest(store)
            await store.put("h.0", block(3), tier=Tier.CPU)
        name = flip(tmp_path / "store", "h.0/0")
        with pytest.raises(ChecksumMismatch, match=name):
            async with opened(tmp_path):
                pass
        (tmp_path / "store" / name).unlink()
        with pytest.raises(FormatError, match=f"{name} is missing"):
            async with opened(tmp_path):
                pass

    run(main())


# --- while a commit runs -----------------------------------------------------------------------------------------


class GatedBackend(QuickBackend):
    """Stops at the first call of one kind until told to go on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.is_armed = False
        self.go_on = threading.Event()
        self._kind = kind
        self._reached = threading.Event()

    async def reached(self) -> None:
        while not self._reached.is_set():
            await asyncio.sleep(0)

    def _stop(self, kind: str) -> None:
        if self.is_armed and kind == self._kind and not self._reached.is_set():
            self._reached.set()
            assert self.go_on.wait(30)

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        if offset:
            self._stop("chunk")
        return super()._call_pwrite(descriptor, view, offset, path)

    def _call_replace(self, source: Path, destination: Path) -> None:
        if destination.name.startswith("manifest"):
            self._stop("manifest")
        super()._call_replace(source, destination)


def test_what_changes_on_the_device_while_it_is_written_is_written_again(tmp_path: Path) -> None:
    async def main() -> None:
        backend = GatedBackend("chunk")
        async with opened(tmp_path, backend=backend) as store:
            await store.put("h.0", block(1), tier=Tier.GPU)
            backend.is_armed = True
            committing = asyncio.create_task(store.commit())
            await backend.reached()
            async with store.acquire("h.0") as tensors:
                tensors["w"] += 1
            backend.go_on.set()
            await committing
        async with opened(tmp_path) as store:
            assert await value_of(store, "h.0") == 2

    run(main())


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
@pytest.mark.parametrize("fails", [False, True])
def test_what_changes_on_the_device_while_it_moves_is_moved_again(
    tmp_path: Path, tier: Tier, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1), tier=Tier.GPU)
            copy, copied = Route.copy, 0

            async def and_change(route: Route, *args: Any) -> None:
                nonlocal copied
                await copy(route, *args)
                copied += 1
                if copied == 1:
                    with contextlib.suppress(ZeroDivisionError):
                        async with store.acquire("h.0", modify=fails) as tensors:
                            tensors["w"] += 1
                            if fails:
                                raise ZeroDivisionError

            monkeypatch.setattr(Route, "copy", and_change)
            await store.move("h.0", tier)
            assert (copied, store.home("h.0")) == (2, tier)
            assert_at_rest(store)
            idle = store._entries["h.0"].copy
            assert idle is not None
            store._homes.gpu.disown(idle)  # so that it is read from its home
            assert await value_of(store, "h.0") == 2

    run(main())


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_load_does_not_wait_for_the_packs_of_a_commit_or_of_puts(
    is_commit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "_MOST_OPEN", 1)

    async def put(store: TensorStore) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(store.put(f"n.{number}", block(2), tier=Tier.NVME))

    async def main() -> None:
        backend = GatedBackend("chunk")
        async with opened(tmp_path, backend=backend, io_threads=8, cpu_memory=64 * CHUNK) as store:
            await store.put("loaded", block(1), tier=Tier.NVME)
            for number in range(3):
                await store.put(f"h.{number}", block(2), tier=Tier.CPU)
            backend.is_armed = True
            writing: asyncio.Task[object] = asyncio.create_task(store.commit() if is_commit else put(store))
            await backend.reached()
            assert await value_of(store, "loaded") == 1
            assert not writing.done()
            backend.go_on.set()
            await writing

    run(main())


def test_what_is_replaced_while_it_is_committed_stays_in_that_generation(tmp_path: Path) -> None:
    async def main() -> None:
        backend = GatedBackend("manifest")
        async with opened(tmp_path, backend=backend) as store:
            for name in ("replaced", "deleted", "changed"):
                await store.put(name, block(1), tier=Tier.NVME)
            backend.is_armed = True
            committing = asyncio.create_task(store.commit())
            await backend.reached()
            await store.put("replaced", block(2), tier=Tier.NVME)
            await store.delete("deleted")
            async with store.acquire("changed", modify=True) as tensors:
                tensors["w"] += 1
            backend.go_on.set()
            await committing
            await settled(store)
            shutil.copytree(tmp_path / "store", tmp_path / "killed" / "store", ignore=shutil.ignore_patterns("lock"))
        async with opened(tmp_path / "killed") as store:
            assert {name: await value_of(store, name) for name in store.names()} == {
                "replaced": 1, "deleted": 1, "changed": 1,
            }  # fmt: skip
        async with opened(tmp_path) as store:
            assert {name: await value_of(store, name) for name in store.names()} == {"replaced": 2, "changed": 2}
        assert pack_files(tmp_path) == named_files(tmp_path)

    run(main())


# --- killed ------------------------------------------------------------------------------------------------------


class CopyingBackend(Backend):
    """Copies directories before each call that changes them, as a process killed there and as a power cut leave them.

    After a power cut a name is there as the directory's last fsync left it, with the bytes of the file's last sync.

    Attributes:
        moment: stored with the copies made from now on.
        copies: for each copy, its path and its moment.
    """

    def __init__(self, source: Path, target: Path) -> None:
        super().__init__()
        self.copies: list[tuple[Path, Any]] = []
        self.moment: Any = None
        self._source = source
        self._target = target
        self._turn = threading.RLock()
        self._file_at: dict[Path, object] = {}
        self._synced_bytes: dict[object, bytes] = {}
        self._synced_names: dict[Path, dict[str, object]] = {path: {} for path in source.iterdir()}
        self._has_synced = True

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        with self._turn:
            killed, cut = (self._target / f"{kind} {len(self.copies)}" for kind in ("killed", "cut"))
            shutil.copytree(self._source, killed, ignore=shutil.ignore_patterns("lock"))
            self.copies.append((killed, self.moment))
            if self._has_synced:
                for directory, names in self._synced_names.items():
                    (cut / directory.name).mkdir(parents=True)
                    for name, file in names.items():
                        (cut / directory.name / name).write_bytes(self._synced_bytes.get(file, b""))
                self.copies.append((cut, self.moment))
                self._has_synced = False
            yield

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        with self._change() if flags & os.O_CREAT else contextlib.nullcontext():
            if flags & os.O_CREAT:
                self._file_at[path] = object()
            return super()._call_open(path, flags, mode)

    def _call_allocate(self, descriptor: int, offset: int, size_bytes: int, path: Path) -> None:
        with self._change():
            super()._call_allocate(descriptor, offset, size_bytes, path)

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        with self._change():
            return super()._call_pwrite(descriptor, view, offset, path)

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        self._call_fsync(descriptor, path)

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        with self._change():
            self._has_synced = True
            if path in self._synced_names:
                names = [entry.name for entry in path.iterdir() if entry.name != "lock"]
                self._synced_names[path] = {name: self._file_at.get(path / name) for name in names}
            elif path.is_file():
                self._synced_bytes[self._file_at[path]] = path.read_bytes()

    def _call_replace(self, source: Path, destination: Path) -> None:
        with self._change():
            super()._call_replace(source, destination)
            self._file_at[destination] = self._file_at.pop(source)

    def _call_unlink(self, path: Path) -> None:
        with self._change():
            super()._call_unlink(path)


State = dict[str, tuple[float, Tier]]


async def state_of(store: TensorStore) -> State:
    return {name: (await value_of(store, name), store.home(name)) for name in store.names()}


def test_killed_anywhere_the_last_generation_and_the_one_before_are_whole(tmp_path: Path) -> None:
    async def main() -> None:
        source = tmp_path / "live"
        for disk in ("store", "other"):
            (source / disk).mkdir(parents=True)
        backend = CopyingBackend(source, tmp_path)
        backend.moment = ({}, {})
        nvme = [source / "store", source / "other"]
        async with TensorStore.open(config(source, nvme=nvme), backend=backend) as store:
            committed: State = {}
            history = []
            for generation in range(2):
                backend.moment = (committed, committed)
                for tier in TIERS:
                    await store.put(tier.value, block(generation, 24000), tier=tier)
                async with store.acquire("nvme", modify=True) as tensors:
                    tensors["w"] += 0.5
                await store.put(f"only {generation}", block(generation), tier=Tier.NVME)
                if generation:
                    await store.delete(f"only {generation - 1}")
                    await store.move("cpu", Tier.GPU)
                    await store.move("gpu", Tier.NVME)
                after = await state_of(store)
                backend.moment = (committed, after)
                await store.commit()
                committed = after
                history.append(after)
            backend.moment = (committed, committed)
        with backend._change():
            pass  # and at the end
        seen = set()
        for index, (path, allowed) in enumerate(backend.copies):
            nvme, commits = [path / "store", path / "other"], index % 5 == 0  # a commit takes longer: a few are enough
            with contextlib.suppress(ZeroDivisionError):
                async with opened(path, nvme=nvme) as store:
                    found = await state_of(store)
                    assert found in allowed, f"{path.name}: {found}"
                    last = store.generation
                    seen.add((path.name.split()[0], last))
                    assert_at_rest(store)
                    if not commits:
                        raise ZeroDivisionError
                    await store.put("new", block(9), tier=Tier.NVME)
            if last + commits > 0:  # the last one now
                with contextlib.suppress(ZeroDivisionError):
                    async with opened(path, nvme=nvme, resume="previous") as store:
                        assert await state_of(store) == (found if commits else history[last - 1]), path.name
                        raise ZeroDivisionError
            shutil.rmtree(path)
        assert seen == {(kind, generation) for kind in ("killed", "cut") for generation in (-1, 0, 1)}

    run(main())
