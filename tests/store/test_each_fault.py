"""Each kind of fault at each call of a training step: what becomes of it is what the README's table says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import EAGAIN, EINTR, ENOSPC, FLIP, NOTHING, PART, UNALIGNED, Fault, FaultyBackend
from resuming import DISK, State, Way, check_resumes, expected_states, opened

from tierstore.errors import ChecksumMismatch, ShortTransfer, StorageError, StorageFull

WAY = Way("forward", cpu_memory=DISK)
BEGUN, STEPS = 1, 3
TRANSFERS = ("pread", "pwrite")

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


def each(fault: Fault, calls: list[str], kinds: tuple[str, ...], begun: Path, tmp_path: Path) -> Iterator[tuple[FaultyBackend, Path]]:
    """A backend that fails at the n-th call of these kinds, for each n, and a copy of the store."""
    for at in range(sum(kind in kinds for kind in calls)):
        folder = tmp_path / str(at)
        shutil.copytree(begun, folder)
        yield FaultyBackend(fault, at=at, kinds=kinds), folder
        shutil.rmtree(folder)


@pytest.mark.parametrize("fault", [EINTR, EAGAIN, UNALIGNED, PART], ids=str)
def test_an_interrupted_or_short_transfer_goes_on(
    fault: Fault, calls: list[str], begun: Path, expected: list[State], tmp_path: Path
) -> None:
    for backend, folder in each(fault, calls, TRANSFERS, begun, tmp_path):
        expected[BEGUN + 1].check_equal(go_on(folder, backend))


@pytest.mark.parametrize("fault", [ENOSPC, EINTR, EAGAIN, NOTHING], ids=str)
def test_any_other_is_raised_at_once_with_its_place_and_nothing_is_lost(
    fault: Fault, calls: list[str], begun: Path, expected: list[State], tmp_path: Path
) -> None:
    wanted = {ENOSPC: StorageFull, NOTHING: ShortTransfer}.get(fault, StorageError)
    kinds = set(calls) - set(TRANSFERS) if fault in (EINTR, EAGAIN) else {NOTHING: TRANSFERS}.get(fault, set(calls))
    for backend, folder in each(fault, calls, tuple(kinds), begun, tmp_path):
        with pytest.raises(wanted) as caught:
            go_on(folder, backend)
        assert backend.hit is not None
        kind, path = backend.hit
        place = r"(read|write).* \d+ B at offset \d+ of " if kind in TRANSFERS else ".*"
        assert re.search(place + re.escape(str(path)), str(caught.value)), caught.value
        check_resumes(WAY, folder, expected)


@pytest.mark.parametrize("kind", TRANSFERS)
def test_a_flipped_bit_is_never_trained_on(
    kind: str, calls: list[str], begun: Path, expected: list[State], tmp_path: Path
) -> None:
    """What was read wrong is there; what was written wrong is not, and then the generation before it is."""
    outcomes = set()
    for backend, folder in each(FLIP, calls, (kind,), begun, tmp_path):
        try:
            expected[BEGUN + 1].check_equal(go_on(folder, backend))
            found = "no matter"
        except ChecksumMismatch as error:
            assert f"of {folder}" in str(error), error
            found = "told"
        try:
            check_resumes(WAY, folder, expected)
        except ChecksumMismatch as error:
            assert "resume='previous'" in str(error)
            assert kind == "pwrite"
            assert check_resumes(WAY, folder, expected, resume="previous") == BEGUN
            found = "told, gone back"
        outcomes.add(found)
    assert outcomes == {"pread": {"no matter", "told"}, "pwrite": {"no matter", "told, gone back"}}[kind]
