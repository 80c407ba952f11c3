"""A disk that does not answer, and threads that are gone, in training: told in time, and no step is lost."""

from __future__ import annotations

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
from faults import HANG, FaultyBackend
from resuming import DISK, Run, State, Way, check_resumes, expected_states, open_run, opened

from tierstore.config import Tier
from tierstore.errors import ClosedError, StoreLocked, TierstoreError, Timeout
from tierstore.io.runtime import Runtime
from tierstore.store.commit import StoreLock
from tierstore.train import assembly

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


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    return expected_states(WAY, tmp_path_factory.mktemp("expected"), STEPS)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that was closed after its first step."""
    folder = tmp_path_factory.mktemp("begun")
    with opened(WAY, folder) as run:
        run.until(BEGUN)
    return folder


def flush_all(run: Run) -> None:
    run.until(STEPS)
    run.engine.flush()


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_never_returns_is_named_with_its_file(
    kind: str, begun: Path, expected: list[State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    disk = FaultyBackend(HANG, at=10**9, kinds=(kind,))

    def ends_within(self: Runtime, limit_s: float, call: Any) -> bool:
        """No deadline passes before the disk hangs, and then every one soon does."""
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
        with contextlib.suppress(TierstoreError):  # of what was given up
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
    """What hangs while it is made may still write."""
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
    """Who gives up waiting does not stop what is waited for."""
    shutil.copytree(begun, tmp_path / "run")
    disk = FaultyBackend(HANG, at=10**9, kinds=("pwrite",))
    with opened(WAY, tmp_path / "run", disk) as run:
        run.step()
        disk.at = disk.counted
        with monkeypatch.context() as patch:
            patch.setattr(Runtime, "_ends_within", lambda self, limit_s, call: not disk.is_hung.wait(20))
            with pytest.raises(Timeout, match="flush did not end"):
                run.engine.flush()
        disk.goes_on.set()
        run.engine.flush()
        run.until(STEPS)
        expected[STEPS].check_equal(State.of(run))


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


def test_a_load_of_a_tensor_store_that_never_ends(tmp_path: Path) -> None:
    disk = FaultyBackend(HANG, at=0, kinds=("pread",))

    async def main() -> None:
        async with tensor_stores.opened(tmp_path, backend=disk) as store:
            await store.put("h.0", tensor_stores.block(1), tier=Tier.NVME)
            store._owner._timeout_s = 0.02
            with pytest.raises(Timeout) as caught:
                await tensor_stores.value_of(store, "h.0")
            store._owner._timeout_s = 30.0
            disk.goes_on.set()
            assert await tensor_stores.value_of(store, "h.0") == 1
            await tensor_stores.settled(store)
            tensor_stores.assert_at_rest(store)
        assert re.search(r"'h\.0' was not loaded within 0\.02 s; in flight: acquire 'h\.0'", str(caught.value))
        assert re.search(r"read of 4096 B at offset 0 of .*put-0\.a\.safetensors, for", str(caught.value))

    tensor_stores.run(main())
