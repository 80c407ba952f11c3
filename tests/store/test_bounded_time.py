"""A disk that does not answer, and threads that are gone: reported in time, and no step is lost."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensor_stores
import torch
from faults import HANG, FaultyBackend
from resuming import DISK, Run, State, Way, check_resumes, open_run, opened
from runs import next_token_loss, smallest_budgets, tiny, tokens

from tierstore import TensorStore
from tierstore.config import AdamWConfig, Tier, TierConfig
from tierstore.errors import ClosedError, StorageError, StoreLocked, TierstoreError, Timeout
from tierstore.io.runtime import Runtime
from tierstore.io.watch import Watch
from tierstore.io.workers import Priority, WorkerPool
from tierstore.store.lock import StoreLock
from tierstore.store.owner import LoopOwner
from tierstore.store.routes import Route
from tierstore.store.updates import UpdatePipeline
from tierstore.train import assembly
from tierstore.train.engine import Engine

WAY = Way("forward", cpu_memory=DISK)
BEGUN, STEPS = 1, 3
CALLS = {
    "pread": r"read of \d+ B at offset \d+",
    "pwrite": r"write of \d+ B at offset \d+",
    "open": "open",
    "fdatasync": "fdatasync",
    "fsync": "fsync",
    "replace": "rename to .*",
    "unlink": "removal",
    "list": "listing",
}

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def flush_all(run: Run) -> None:
    run.until(STEPS)
    run.engine.flush()


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_never_returns_is_named_with_its_file(
    kind: str, begun: Path, expected: list[State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    disk = FaultyBackend(HANG, at=10**9, kinds=(kind,))

    def ends_within(self: Runtime, watch: Watch, call: Any) -> bool:
        """No deadline passes before the disk hangs; then every deadline soon does."""
        while not call.waiting.acquire(timeout=0.02):
            if disk.is_hung.is_set() and not disk.goes_on.is_set():
                return False
        return True

    monkeypatch.setattr(Runtime, "_ends_within", ends_within)
    run = open_run(WAY, tmp_path / "run", disk, timeout_s=0.05)
    disk.at = disk.counted
    try:
        with pytest.raises(Timeout) as caught:
            flush_all(run)
        with pytest.raises(Timeout):
            run.engine.close()
        with pytest.raises(StoreLocked), opened(WAY, tmp_path / "run"):
            pass
    finally:
        disk.goes_on.set()
        run.engine._parts.runtime.timeout_s = 20.0
        with contextlib.suppress(TierstoreError):  # from work that was given up
            run.engine.close()
        run.engine.close()
    assert disk.hit is not None
    message = str(caught.value)
    assert re.search(rf"\n +{CALLS[kind]} of {re.escape(str(disk.hit[1]))}, for \d", message), message
    assert re.search(r"thread: .*_step \(faults\.py|tierstore-\w+[-_]\d: .*_step \(faults\.py", message), message
    assert check_resumes(WAY, tmp_path / "run", expected) >= BEGUN


def test_an_engine_that_cannot_be_taken_down_keeps_the_lock(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of it that hang may still write."""
    shutil.copytree(begun, tmp_path / "run")
    kept: list[Any] = []

    class Kept(StoreLock):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            kept.append(self.release)

    def close(self: Runtime, timeout_s: float | None = None) -> None:
        kept.append(lambda: end_(self, timeout_s))
        raise Timeout("it hangs")

    end_ = Runtime.close
    with monkeypatch.context() as patch:
        patch.setattr(assembly, "StoreLock", Kept)
        patch.setattr(Runtime, "close", close)
        with pytest.raises(ZeroDivisionError):
            open_run(WAY, tmp_path / "run", lr_scheduler=lambda optimizer: 1 / 0)
    with pytest.raises(StoreLocked), opened(WAY, tmp_path / "run"):
        pass
    for release in kept:
        release()


def test_a_flush_that_came_too_late_can_be_repeated(
    begun: Path, expected: list[State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that gives up waiting does not stop the flush."""
    shutil.copytree(begun, tmp_path / "run")
    disk = FaultyBackend(HANG, at=10**9, kinds=("pwrite",))
    with opened(WAY, tmp_path / "run", disk) as run:
        run.step()
        disk.at = disk.counted
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "_ends_within", lambda self, watch, call: not disk.is_hung.wait(20))
            with pytest.raises(Timeout, match="flush did not end"):
                run.engine.flush()
        disk.goes_on.set()
        run.engine.flush()
        run.until(STEPS)
        expected[STEPS].check_equal(State.of(run))


def test_a_close_that_came_too_late_can_be_repeated(
    begun: Path, expected: list[State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way to the disk still gets there."""
    shutil.copytree(begun, tmp_path / "run")
    disk = FaultyBackend(HANG, at=10**9, kinds=("pwrite",))
    run = open_run(WAY, tmp_path / "run", disk, timeout_s=0.5, commit_every=50)
    run.until(STEPS)
    disk.at = disk.counted
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "_ends_within", lambda self, watch, call: not disk.is_hung.wait(20))
        with pytest.raises(Timeout, match="flush did not end"):
            run.engine.close()
    disk.goes_on.set()
    run.engine.close()
    assert check_resumes(WAY, tmp_path / "run", expected) == STEPS


def end(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


def lose_the_loop(run: Run) -> None:
    def exit_() -> None:
        raise SystemExit

    run.engine._parts.runtime.post(exit_)


def lose_the_disk_threads(run: Run) -> None:
    for thread in run.engine._parts.store._io_workers._threads:
        end(thread)


def lose_an_update_thread(run: Run) -> None:
    end(run.engine._parts.store._compute._threads[0])


@pytest.mark.parametrize(
    "lose", [lose_the_loop, lose_the_disk_threads, lose_an_update_thread], ids=lambda lose: lose.__name__
)
def test_a_lost_thread_is_told_at_once(lose: Callable[[Run], None], expected: list[State], tmp_path: Path) -> None:
    with opened(WAY, tmp_path) as run:
        run.until(2)
        run.engine.flush()
        lose(run)
        with pytest.raises(ClosedError, match=r"thread .*was ended by SystemExit\(\)"):
            flush_all(run)
        with pytest.raises(ClosedError):
            run.step()
        with contextlib.suppress(TierstoreError):
            run.engine.close()
    assert check_resumes(WAY, tmp_path, expected) == 2


@pytest.mark.parametrize("update", ["backward", "speculative"])
def test_an_update_that_fails_within_backward_is_told_at_once(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"update": update, "max_grad_norm": 1e9 if update == "speculative" else None}
    model = tiny(blocks=5)
    gpu, cpu = smallest_budgets(model, nvme=[tmp_path], **options)  # one group after another uses the same memory
    tiers = TierConfig(nvme=[tmp_path], gpu_memory=gpu, cpu_memory=cpu, timeout_s=20)

    async def fails(*_: object) -> None:
        raise StorageError("a broken disk")

    def step(batch: torch.Tensor) -> None:
        engine.backward(next_token_loss(engine, batch))
        engine.step()

    is_told = False
    with contextlib.suppress(StorageError), Engine(model, tiers, AdamWConfig(), **options) as engine:
        known, taken, broken = tokens(3)
        step(known)  # once the order of the groups is known, updates begin in it
        step(taken)
        engine.flush()
        monkeypatch.setattr(UpdatePipeline, "_apply", fails)
        with pytest.raises(StorageError, match="a broken disk"):
            step(broken)
        is_told = True
    assert is_told


def test_a_load_of_a_tensor_store_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Hanging(HANG, at=0, kinds=("pread",))
    slow_to_judge(disk, monkeypatch)

    async def main() -> None:
        async with of_store(tmp_path, disk) as store:
            await store.put("h.0", tensor_stores.block(1), tier=Tier.NVME)
            with pytest.raises(Timeout) as caught:
                await tensor_stores.value_of(store, "h.0")
            disk.goes_on.set()
            assert await tensor_stores.value_of(store, "h.0") == 1
            await tensor_stores.settled(store)
            tensor_stores.assert_at_rest(store)
        said = str(caught.value)
        assert said.startswith("'h.0' was not loaded: nothing has moved for 0.1 s; in flight:\n  acquire 'h.0'\n")
        assert "\n  task load h.0: " in said
        assert re.search(r"read of 4096 B at offset 0 of .*put-0\.a\.safetensors, for", said)

    tensor_stores.run(main())


# --- stores of tensors -------------------------------------------------------------------------------------------

STORE_CALLS = {**CALLS, "close": "close", "allocate": r"allocation of \d+ B", "mkdir": "making"}
TIERS = list(Tier)


class Hanging(FaultyBackend, tensor_stores.QuickBackend):
    """Hangs as told, and does not wait for the disk."""

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        self._step("fdatasync", path)

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        self._step("fsync", path)


def slow_to_judge(disk: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait is over before the disk hangs; then every wait soon is."""

    def begin(self: Watch) -> Callable[[], bool]:
        return lambda: self._backend is disk and disk.is_hung.is_set() and not disk.goes_on.is_set()

    monkeypatch.setattr(Watch, "begin", begin)


async def first(folder: Path) -> None:
    async with tensor_stores.opened(folder) as store:
        for tier in TIERS:
            await store.put(tier.value, tensor_stores.block(1), tier=tier)


async def second(store: TensorStore) -> None:
    for tier in TIERS:
        await store.put(tier.value, tensor_stores.block(2), tier=tier)
    await store.move("cpu", Tier.NVME)
    async with store.acquire("nvme", modify=True) as tensors:
        tensors["w"].fill_(2)
    await store.commit()


async def values(folder: Path) -> set[float]:
    async with tensor_stores.opened(folder, resume="must") as store:
        return {await tensor_stores.value_of(store, name) for name in store.names()}


def of_store(folder: Path, disk: FaultyBackend) -> TensorStore:
    return TensorStore.open(tensor_stores.config(folder, timeout_s=0.1), backend=disk)


async def use(folder: Path, disk: FaultyBackend) -> None:
    async with TensorStore.open(tensor_stores.config(folder), backend=disk) as store:  # it may take its time
        await second(store)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("kind", STORE_CALLS)
def test_any_hang_of_a_tensor_store_is_told_and_nothing_is_lost(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In opening, use, commit or closing: the loop ends though the disk hangs; the store closes once it answers."""
    folder = tmp_path / "run"
    clean = Hanging(kinds=(kind,))
    if kind != "mkdir":  # a store that is there makes no directory
        tensor_stores.run(first(folder))
        shutil.copytree(folder, tmp_path / "clean")
    tensor_stores.run(use(tmp_path / "clean", clean))
    disk = Hanging(HANG, at=0 if place == "first" else clean.counted - 1, kinds=(kind,))
    slow_to_judge(disk, monkeypatch)
    store = of_store(folder, disk)

    async def main() -> None:
        async with store:
            await second(store)

    with pytest.raises(Timeout) as caught:
        tensor_stores.run(main())
    with pytest.raises(Timeout):
        tensor_stores.run(store.close())
    if store._directories.lock._descriptors:  # not before it was claimed
        with pytest.raises(StoreLocked):
            tensor_stores.run(values(folder))
    disk.goes_on.set()
    tensor_stores.run(store.close())
    tensor_stores.run(store.close())
    assert disk.hit is not None
    message = str(caught.value)
    assert re.search(rf"\n +{STORE_CALLS[kind]} of {re.escape(str(disk.hit[1]))}, for \d", message), message
    assert re.search(r"_step \(faults\.py", message), message
    if kind != "mkdir":
        assert tensor_stores.run(values(folder)) <= {1, 2}


@pytest.mark.parametrize(
    ("verb", "tier"),
    [
        *(("put", tier) for tier in TIERS), *(("move", tier) for tier in TIERS),
        ("commit", Tier.CPU), ("commit", Tier.GPU), ("modify", Tier.NVME),
    ],
)  # fmt: skip
def test_a_call_of_a_tensor_store_that_came_too_late_can_be_repeated(
    verb: str, tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Hanging(HANG, at=10**9, kinds=("pread",) if (verb, tier) == ("move", Tier.NVME) else ("pwrite",))
    slow_to_judge(disk, monkeypatch)

    async def modify(store: TensorStore) -> None:
        async with store.acquire("h.0", modify=True) as tensors:
            tensors["w"].fill_(2)

    async def main() -> None:
        async with of_store(tmp_path, disk) as store:
            call: Callable[[], Any] = {
                "put": lambda: store.put("h.0", tensor_stores.block(2), tier=Tier.NVME),
                "move": lambda: store.move("h.0", Tier.CPU if tier is Tier.NVME else Tier.NVME),
                "commit": store.commit,
                "modify": lambda: modify(store),
            }[verb]
            await store.put("h.0", tensor_stores.block(1), tier=tier)
            disk.at = disk.counted
            with pytest.raises(Timeout, match=f"{'write back' if verb == 'modify' else verb}.* did not end: nothing"):
                await call()
            assert store.home("h.0") is tier
            disk.goes_on.set()
            await tensor_stores.settled(store)
            tensor_stores.assert_at_rest(store)
            assert await tensor_stores.value_of(store, "h.0") == (2 if verb == "modify" else 1)
            await call()
            assert await tensor_stores.value_of(store, "h.0") == (2 if verb in ("put", "modify") else 1)
            await tensor_stores.settled(store)
            tensor_stores.assert_at_rest(store)

    tensor_stores.run(main())


def test_files_that_were_to_be_closed_behind_what_hangs_are_closed_with_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Hanging(HANG, at=10**9, kinds=("fsync",))
    slow_to_judge(disk, monkeypatch)
    copy = Route.copy

    async def then_hang(self: Route, *given: Any) -> None:
        await copy(self, *given)
        disk.at = disk.counted
        self.workers.submit(Priority.DEMAND, disk.sync_directory, tmp_path)  # before the pack is closed

    async def main() -> None:
        async with store:
            monkeypatch.setattr(Route, "copy", then_hang)
            await store.put("h.0", tensor_stores.block(1), tier=Tier.NVME)

    store = TensorStore.open(tensor_stores.config(tmp_path, timeout_s=0.1, io_threads=1), backend=disk)
    with pytest.raises(Timeout):
        tensor_stores.run(main())
    disk.goes_on.set()
    tensor_stores.run(store.close())


def test_an_inner_deadline_is_told_as_it_was(tmp_path: Path) -> None:
    """The inner deadline says more than the outer one, whether the outer one has passed or not."""
    owner = LoopOwner(Watch(FaultyBackend(), 10.0))

    async def main() -> None:
        with pytest.raises(Timeout, match=r"^rank 1 is late$"):
            async with owner.deadline("the store did not close"):
                raise Timeout("rank 1 is late")

    tensor_stores.run(main())


@pytest.mark.parametrize("error", [None, StorageError("the disk is full")])
def test_work_that_ends_as_its_deadline_passes_is_told_as_it_ended(
    error: StorageError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one turn of the loop."""

    async def main() -> None:
        ends, owner = asyncio.Event(), LoopOwner(Watch(FaultyBackend(), 10.0))

        def is_over() -> bool:
            ends.set()
            return True

        monkeypatch.setattr(Watch, "begin", lambda self: is_over)

        async def work() -> str:
            await ends.wait()
            if error is not None:
                raise error
            return "done"

        if error is None:
            assert await owner.in_time("it did not end", work()) == "done"
        else:
            with pytest.raises(StorageError, match="the disk is full"):
                await owner.in_time("it did not end", work())
        owner.raise_kept()

    tensor_stores.run(main())


def test_a_store_closes_however_long_its_last_jobs_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = WorkerPool.close

    def close_after_a_day(self: WorkerPool, timeout_s: float) -> None:
        if timeout_s < 86400:
            raise Timeout("jobs have not ended, though they move")
        close(self, timeout_s)

    monkeypatch.setattr(WorkerPool, "close", close_after_a_day)
    tensor_stores.run(first(tmp_path))
