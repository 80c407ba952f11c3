"""A fault at every system call of short runs: raised, never silent, never a hang, and the store opens again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from faults import EIO, ENOSPC, Fault, FaultyBackend
from resuming import DISK, MEMORY, State, Way, check_resumes, expected_states, opened

from tierstore.errors import ClosedError, StorageError, StorageFull, TierstoreError

STEPS = 2
WAYS = {
    "memory": Way("forward", cpu_memory=MEMORY),
    "disk": Way("forward", cpu_memory=DISK),
    "speculative": Way("speculative", cpu_memory=DISK),
    "gpu": Way("forward", state_on_gpu=True),
}
DURABILITY = ("fdatasync", "fsync", "replace")

Case = tuple[Way, list[State], list[int]]

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def train(way: Way, folder: Path, backend: FaultyBackend) -> None:
    with opened(way, folder, backend) as run:
        run.until(STEPS)


@pytest.fixture(scope="module", params=WAYS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A way to train, the states that it passes through, and the indices of its system calls."""
    way, clean = WAYS[request.param], FaultyBackend()
    train(way, tmp_path_factory.mktemp("clean"), clean)
    # All ways make a store by the same calls, up to its first manifest, close it by the same calls, after its last one,
    # and write what a step captures by the same calls. The first step makes calls of its own only on the disk, and
    # there the second makes none that the first does not make. So it is enough to try making, capturing, closing and,
    # for each way, the rest of one of the steps.
    made, stepped, last = (call for call, name in clean.renamed if name.startswith("manifest"))
    captured, end = max(call for call, name in clean.renamed if name.startswith("captured")), len(clean.calls)
    calls = {"memory": [*range(made), *range(stepped, last)], "disk": [*range(made, stepped), *range(last, end)]}
    states = expected_states(way, tmp_path_factory.mktemp("expected"), STEPS)
    return way, states, calls.get(request.param, [*range(captured, last)])


def test_an_error_at_every_call_is_raised_and_loses_nothing(case: Case, tmp_path: Path) -> None:
    way, expected, calls = case
    for at in calls:
        backend = FaultyBackend(EIO, at=at)
        with pytest.raises(StorageError, match=f"{tmp_path / str(at)}.*: Input/output error"):
            train(way, tmp_path / str(at), backend)
        published = [calls for calls, name in backend.renamed if name.startswith("manifest")]
        if backend.calls[at] in DURABILITY:
            assert max(published, default=0) <= at, f"a generation was published after call {at} had failed"
        check_resumes(way, tmp_path / str(at), expected[: len(published) + 1])  # and the step that had begun


@pytest.mark.parametrize("fault", [EIO, ENOSPC], ids=str)
@pytest.mark.parametrize("kind", [*DURABILITY, "open"])
def test_a_commit_that_fails_is_abandoned_and_the_next_step_raises(kind: str, fault: Fault, tmp_path: Path) -> None:
    way = WAYS["memory"]
    expected = expected_states(way, tmp_path / "expected", STEPS)
    backend = FaultyBackend(fault, at=10**6, times=2 if fault is ENOSPC else 1, kinds=(kind,))  # ENOSPC is tried twice
    with contextlib.suppress(TierstoreError), opened(way, tmp_path, backend) as run:  # closing may raise it once more
        run.until(1)
        run.engine.flush()
        backend.at = backend.counted  # from here on
        with pytest.raises(StorageFull if fault is ENOSPC else StorageError, match=str(tmp_path)):
            run.until(9)
        assert run.engine.step_count <= 4  # a step needs the updates of the one before, and these the commit before
        with pytest.raises((StorageError, ClosedError)):  # and it never goes on as if nothing had happened
            run.until(9)
        assert run.engine.statistics()["generation"] == 1
    left = {path.name for path in (tmp_path / "store0").iterdir()}
    assert not {name for name in left if name.endswith(".tmp") or name == "lock"}
    assert check_resumes(way, tmp_path, expected) == 1
