"""A power cut at any call leaves a generation that was published, or the one before it, whole."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from power_cuts import StoreBackend
from resuming import DISK, MEMORY, State, Way, check_resumes, expected_states, opened

STEPS = 4
WAYS = {
    "memory": Way("forward", cpu_memory=MEMORY),
    "disk": Way("forward", cpu_memory=DISK),
    "backward": Way("backward", cpu_memory=DISK),
    "speculative": Way("speculative", cpu_memory=DISK),
}
CUTS = 24

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


def train(way: Way, folder: Path, backend: StoreBackend, steps: int = STEPS) -> None:
    with opened(way, folder, backend) as run:
        run.until(steps)


@pytest.fixture(scope="module", params=WAYS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Way, list[State], int]:
    """A way to train, the states that it passes through, and the number of its system calls."""
    way, folder = WAYS[request.param], tmp_path_factory.mktemp("clean")
    clean = StoreBackend(folder)
    train(way, folder, clean)
    return way, expected_states(way, tmp_path_factory.mktemp("expected"), STEPS), len(clean.calls)


def test_what_is_left_opens_and_goes_on_exactly(case: tuple[Way, list[State], int], tmp_path: Path) -> None:
    way, expected, calls = case
    draw = random.Random(way.update)
    backend = StoreBackend(tmp_path / "run", draw.sample(range(calls - 10), CUTS))
    train(way, tmp_path / "run", backend)
    assert len(backend.images) > CUTS // 2  # a run may need fewer calls than the one that was counted
    for image in backend.images:
        image.restore(tmp_path / str(image.at))
        found = check_resumes(way, tmp_path / str(image.at), expected)
        assert found >= image.generation, f"the cut before call {image.at} lost a published generation"


@pytest.mark.parametrize("commit_every", [1, 3])
def test_no_chunk_that_the_last_generation_needs_is_written(
    case: tuple[Way, list[State], int], commit_every: int, tmp_path: Path
) -> None:
    way, *_ = case
    if way.update == "speculative" and commit_every > 1:
        pytest.skip("speculation needs a commit in every step")
    backend = StoreBackend(tmp_path)
    train(replace(way, commit_every=commit_every), tmp_path, backend, 7)
    assert not backend.overwritten
    backend = StoreBackend(tmp_path)
    train(replace(way, commit_every=commit_every), tmp_path, backend, 9)
    assert not backend.overwritten


def test_a_pack_made_anew_is_there_after_a_cut(case: tuple[Way, list[State], int], tmp_path: Path) -> None:
    """A generation needs no more than one slot of each chunk, so a store opens without the files of the other."""
    way, expected, _ = case
    train(way, tmp_path / "run", StoreBackend(tmp_path / "run"), 1)
    for path in (tmp_path / "run").glob("*/*.a.safetensors"):
        path.unlink()
    backend = StoreBackend(tmp_path / "run")
    train(way, tmp_path / "run", backend)
    backend.image().restore(tmp_path / "left")
    assert check_resumes(way, tmp_path / "left", expected) == STEPS
