"""Each kind of fault at calls of a training step: what becomes of it is what the README's table says.

EINTR is tried at every transfer, a wrong bit at every read, other faults at each kind of call and at random calls.
(`test_faults.py` has EIO at every call, and for other ways to train, too.)
"""

from __future__ import annotations

import errno
import functools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensor_stores
from faults import EAGAIN, EINTR, ENOSPC, FLIP, NOTHING, PAGE, PART, UNALIGNED, Fault, FaultyBackend
from resuming import DISK, MEMORY, State, Way, check_resumes, open_run, opened

from tierstore.config import Tier
from tierstore.errors import ChecksumMismatch, ShortTransfer, StorageError, StorageFull

WAY = Way("forward", cpu_memory=DISK)
BEGUN = 1
TRANSFERS = ("pread", "pwrite")
ENOUGH, STEPS = 4, 9

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


@pytest.fixture(scope="module")
def calls(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The kinds of the calls that `go_on` makes."""
    clean, folder = FaultyBackend(), tmp_path_factory.mktemp("clean") / "store"
    shutil.copytree(begun, folder)
    go_on(folder, clean)
    return clean.calls


def go_on(folder: Path, backend: FaultyBackend) -> State:
    """Open the store, train one step more, look at the weights, close."""
    with opened(WAY, folder, backend) as run:
        run.until(BEGUN + 1)
        return State.of(run)


def each(
    fault: Fault, calls: list[str], kinds: Sequence[str], begun: Path, tmp_path: Path, most: int = ENOUGH
) -> Iterator[tuple[FaultyBackend, Path]]:
    """A backend that fails at the n-th call of these kinds, for some n, and a copy of the store."""
    counted, draw = [kind for kind in calls if kind in kinds], random.Random(str(fault))
    draw.shuffle(order := list(range(len(counted))))
    chosen = set({counted[at]: at for at in order}.values()) | set(order[:most])  # one of each kind at least
    for at in sorted(chosen):
        folder = tmp_path / str(at)
        shutil.copytree(begun, folder)
        yield FaultyBackend(fault, at=at, kinds=tuple(kinds)), folder


@pytest.mark.parametrize("fault", [EINTR, EAGAIN, UNALIGNED, PART], ids=str)
def test_an_interrupted_or_short_transfer_goes_on(
    fault: Fault, calls: list[str], begun: Path, expected: list[State], tmp_path: Path
) -> None:
    for backend, folder in each(fault, calls, TRANSFERS, begun, tmp_path, len(calls) if fault is EINTR else ENOUGH):
        expected[BEGUN + 1].check_equal(go_on(folder, backend))


@pytest.mark.parametrize("fault", [ENOSPC, EINTR, NOTHING], ids=str)
def test_any_other_is_raised_at_once_with_its_place_and_nothing_is_lost(
    fault: Fault, calls: list[str], begun: Path, expected: list[State], tmp_path: Path
) -> None:
    wanted = {ENOSPC: StorageFull, NOTHING: ShortTransfer}.get(fault, StorageError)
    kinds = {NOTHING: TRANSFERS, ENOSPC: calls}.get(fault, sorted(set(calls) - set(TRANSFERS)))
    for backend, folder in each(fault, calls, kinds, begun, tmp_path):
        caught = None
        try:
            state = go_on(folder, backend)
        except wanted as error:
            caught = error
        assert backend.hit is not None
        kind, path = backend.hit
        if caught is None:  # instead, a file that an old generation left was written over
            assert (fault, path.suffix) == (ENOSPC, ".tmp")
            expected[BEGUN + 1].check_equal(state)
            continue
        place = r"(read|write).* \d+ B at offset \d+ of " if kind in TRANSFERS else ".*"
        assert re.search(place + re.escape(str(path)), str(caught)), caught
        check_resumes(WAY, folder, expected)


def refuses(owner: Any, name: str, pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a system call fails for the files of a pack."""
    really = getattr(owner, name)

    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if re.fullmatch(rf"{pack}\.[ab]\.safetensors", Path(path).name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path, *arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "call", "pack", "told"),
    [(Path, "stat", "weights", "inspection"), (os, "unlink", "gradients", "removal")],
)
def test_looking_at_packs_and_removing_them_is_told_as_well(
    owner: Any, call: str, pack: str, told: str, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(begun, tmp_path / "store")
    (tmp_path / "store" / "store0" / f"{pack}.a.safetensors").touch()  # of a run that was killed
    refuses(owner, call, pack, monkeypatch)
    with pytest.raises(StorageError, match=rf"{told} of .*/{pack}\.a\.safetensors failed: .*\(EACCES\)"):
        open_run(Way("delayed"), tmp_path / "store")


def test_so_is_removing_them_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(WAY, tmp_path, durability="none")
    refuses(os, "unlink", "weights", monkeypatch)
    with pytest.raises(StorageError, match=r"removal of .*store0/\w+\.a\.safetensors failed: Permission denied"):
        run.engine.close()


def test_what_could_not_be_made_is_told_and_not_what_could_not_be_removed_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(os, "unlink", "weights", monkeypatch)
    with pytest.raises(StorageFull, match="allocation of"):
        open_run(WAY, tmp_path, FaultyBackend(ENOSPC, at=1, kinds=("allocate",)))


def told(work: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The message about damage; empty if none was found."""
    try:
        work(*arguments, **options)
    except ChecksumMismatch as error:
        return str(error)
    return ""


def test_a_bit_that_is_read_wrong_is_never_trained_on(
    calls: list[str], begun: Path, expected: list[State], tmp_path: Path
) -> None:
    found = set()
    for backend, folder in each(FLIP, calls, ("pread",), begun, tmp_path, len(calls)):
        message = told(lambda: expected[BEGUN + 1].check_equal(go_on(folder, backend)))  # noqa: B023
        found.add(re.sub(r".*(chunk) .* at offset \d+ of .*", r"\1", message))
        check_resumes(WAY, folder, expected)  # the bit on the disk is right
    assert found == {"chunk", ""}, "the header of a pack is known, and written anew"


def test_a_bit_that_is_written_wrong_is_found_and_the_generation_before_is_whole(
    calls: list[str], begun: Path, expected: list[State], tmp_path: Path
) -> None:
    for backend, folder in each(FLIP, calls, ("pwrite",), begun, tmp_path):
        told(go_on, folder, backend)
        message = told(check_resumes, WAY, folder, expected)
        assert "resume='previous'" in message
        assert str(folder) in message
        assert check_resumes(WAY, folder, expected, resume="previous") == BEGUN


class FillingDisk(FaultyBackend):
    """While full, it has no room for new bytes of small files or, if it copies on write, for any bytes.

    The space of packs is allocated before.
    """

    def __init__(self, *, copies_on_write: bool = False, is_full: bool = False) -> None:
        super().__init__()
        self.is_full = is_full
        self._copies_on_write = copies_on_write

    def _check(self, path: Path, end: int) -> None:
        if self.is_full and (self._copies_on_write or end > -(-path.stat().st_size // PAGE) * PAGE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        if self.is_full and flags & os.O_CREAT and not path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._call_open(path, flags, mode)

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        self._check(path, offset + len(view))
        return super()._call_pwrite(descriptor, view, offset, path)


@pytest.fixture(scope="module")
def whole() -> Callable[[Way], tuple[State, list[float]]]:
    """The state after a run of `STEPS` steps, and the losses of all its steps."""

    @functools.cache
    def trained(way: Way) -> tuple[State, list[float]]:
        with tempfile.TemporaryDirectory() as folder, opened(way, Path(folder)) as run:
            run.until(STEPS)
            return State.of(run), run.losses

    return trained


@pytest.mark.parametrize("way", [WAY, Way("backward", 3, cpu_memory=MEMORY)], ids=["each step", "every third"])
def test_a_disk_that_is_full_ends_no_run(
    way: Way, whole: Callable[[Way], tuple[State, list[float]]], tmp_path: Path
) -> None:
    disk = FillingDisk()
    with opened(way, tmp_path, disk) as run:
        run.until(4)
        run.engine.flush()
        disk.is_full = True
        run.until(STEPS)
        whole(way)[0].check_equal(State.of(run))
    assert len(list(tmp_path.glob("store0/captured-*"))) == 2
    with opened(way, tmp_path) as run:
        assert run.engine.step_count == STEPS
        whole(way)[0].check_equal(State.of(run))
    with opened(way, tmp_path, resume="previous") as run:
        assert run.engine.step_count == STEPS - way.commit_every


@pytest.mark.parametrize("way", [WAY, Way("backward", 3, cpu_memory=MEMORY)], ids=["each step", "every third"])
def test_one_that_is_full_and_copies_on_write_can_be_freed_and_the_run_resumed(
    way: Way, whole: Callable[[Way], tuple[State, list[float]]], tmp_path: Path
) -> None:
    def train(disk: FillingDisk) -> None:
        with opened(way, tmp_path, disk) as run:
            run.until(4)
            run.engine.flush()
            disk.is_full = True
            run.until(STEPS)

    for is_full in (False, True):  # somebody tries again while it is full
        with pytest.raises(StorageFull, match=r"No space left on device \(ENOSPC\)"):
            train(FillingDisk(copies_on_write=True, is_full=is_full))
    with opened(way, tmp_path) as run:  # freed
        begun = run.engine.step_count
        assert begun == 4
        run.until(STEPS)
        state, losses = whole(way)
        assert run.losses == losses[begun:]
        state.check_equal(State.of(run))


# --- stores of tensors -------------------------------------------------------------------------------------------

AFTER = {Tier.GPU: 2.0, Tier.CPU: 2.0, Tier.NVME: 3.0}


async def use(folder: Path, backend: FaultyBackend) -> dict[Tier, float]:
    """Put, change, move and commit; the values that are there then."""
    async with tensor_stores.opened(folder, backend=backend) as store:
        for tier in Tier:
            await store.put(tier.value, tensor_stores.block(2), tier=tier)
        async with store.acquire("nvme", modify=True) as tensors:
            tensors["w"].fill_(3)
        await store.move("cpu", Tier.NVME)
        await store.commit()
        return {tier: await tensor_stores.value_of(store, tier.value) for tier in Tier}


async def look(folder: Path) -> dict[Tier, float]:
    async with tensor_stores.opened(folder) as store:
        return {Tier(name): await tensor_stores.value_of(store, name) for name in store.names()}


def is_refused(work: Coroutine[Any, Any, dict[Tier, float]]) -> bool:
    """Whether an error was raised; if none was, what was read is right."""
    try:
        assert tensor_stores.run(work).items() <= AFTER.items()
    except (ShortTransfer, ChecksumMismatch):
        return True
    return False


@pytest.mark.parametrize("fault", [EINTR, PART, NOTHING, FLIP], ids=str)
def test_a_transfer_of_a_tensor_store(fault: Fault, tmp_path: Path) -> None:
    """It goes on, or an error is raised; no wrong value is ever read."""
    clean = FaultyBackend()
    assert tensor_stores.run(use(tmp_path / "clean", clean)) == AFTER
    count = sum(kind in TRANSFERS for kind in clean.calls)
    told, told_later = [], []
    for at in range(count):
        folder = tmp_path / str(at)
        told.append(is_refused(use(folder, FaultyBackend(fault, at, kinds=TRANSFERS))))
        told_later.append(is_refused(look(folder)))
    if fault is NOTHING:
        assert (all(told), any(told_later)) == (True, False)
    elif fault is FLIP:
        assert any(told)
        assert sum(told_later) > 3  # what was written wrong, except headers and what was replaced
    else:
        assert not any(told + told_later)
