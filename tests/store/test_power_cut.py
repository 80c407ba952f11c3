"""A power cut at any instant leaves a generation that was published, or the one before it, whole."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from power_cuts import Change, Disk, Image, JournalBackend, StoreDisk, images, overwritten
from resuming import DISK, MEMORY, State, Way, check_resumes, expected_states, opened
from safetensors.torch import load_file
from tensor_stores import QuickBackend

from tierstore.archive.sources import SINGLE
from tierstore.io.backend import Backend
from tierstore.store.manifest_files import Manifests
from tierstore.store.verification import committed_chunks

BEGIN = 2
WAYS = {
    "memory": Way("forward", cpu_memory=MEMORY),
    "disk": Way("forward", cpu_memory=DISK, blocks=2),  # two blocks are more than the least budget keeps in memory
    "backward": Way("backward", cpu_memory=DISK),
    "speculative": Way("speculative", cpu_memory=DISK),
    "gpu": Way("forward", state_on_gpu=True),
    "every second": Way("forward", cpu_memory=DISK, commit_every=2),
}
ENDS = dict.fromkeys(WAYS, BEGIN + 1) | {"disk": BEGIN + 2, "every second": BEGIN + 2}
"""After how many steps. "disk" commits a second time, which syncs only what was written since the first."""

pytestmark = pytest.mark.usefixtures("no_leaks", "one_thread")


@dataclass(frozen=True)
class Case:
    """A way to train, the states that it passes through, and a store that was closed after `BEGIN` steps."""

    way: Way
    expected: list[State]
    closed: Path

    @property
    def end(self) -> int:
        return len(self.expected) - 1


def journal_of(way: Way, folder: Path, until: int) -> tuple[StoreDisk, list[Change]]:
    """The disk before training, and the changes that training makes to it from opening to closing."""
    backend = JournalBackend(folder)
    with opened(way, folder, backend) as run:
        run.until(until)
    return StoreDisk(folder, backend.found), backend.journal


@pytest.fixture(scope="module", params=WAYS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    way, folder = WAYS[request.param], tmp_path_factory.mktemp("closed")
    with opened(way, folder) as run:
        run.until(BEGIN)
    return Case(way, expected_states(way, tmp_path_factory.mktemp("expected"), ENDS[request.param]), folder)


def check(way: Way, image: Image, folder: Path, expected: list[State]) -> None:
    found = check_resumes(way, image.restore(folder), expected, backend=QuickBackend())
    assert found >= image.known, f"the cut after {image.at} changes lost a published generation"
    shutil.rmtree(folder)


def test_what_is_left_opens_and_goes_on_exactly(case: Case, tmp_path: Path) -> None:
    """At each instant of opening the store, of one or two steps, and of closing it."""
    known = []
    for image in images(*journal_of(case.way, shutil.copytree(case.closed, tmp_path / "run"), case.end)):
        check(case.way, image, tmp_path / "left", case.expected)
        known.append(image.known)
    assert {known[0], known[-1]} == {BEGIN - case.way.commit_every, case.end}


class FullJournalBackend(JournalBackend):
    """Refuses to make a new small file, as a full disk does."""

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        if path.suffix == ".tmp" and not path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._call_open(path, flags, mode)


def test_so_it_does_where_the_disk_is_full(tmp_path: Path) -> None:
    """Each generation is written over an old one."""
    way, end = WAYS["disk"], BEGIN + 2
    expected = expected_states(way, tmp_path / "expected", end)
    with opened(way, tmp_path / "run") as run:
        run.until(BEGIN)
    backend = FullJournalBackend(tmp_path / "run")
    with opened(way, tmp_path / "run", backend) as run:
        run.until(end)
    for image in images(StoreDisk(tmp_path / "run", backend.found), backend.journal):
        check(way, image, tmp_path / "left", expected)
    assert image.known == end


@pytest.mark.parametrize(("directories", "steps", "draws"), [(1, 1, 0), (1, 0, 2), (2, 0, 1)])
def test_of_a_store_that_is_made(directories: int, steps: int, draws: int, tmp_path: Path) -> None:
    """One directory and two need different syncs: a manifest syncs only the first of two, and only the directories of
    a store with several say which they are. A wrong order of two syncs, or of two directories, shows only if some of
    the bytes that are not synced are durable (`draws`).
    """
    way = Way("delayed", cpu_memory=DISK, directories=directories)  # it has the most packs
    expected = expected_states(way, tmp_path / "expected", steps)
    for image in images(*journal_of(way, tmp_path / "run", steps), draws=draws):
        check(way, image, tmp_path / "left", expected)
    assert image.known == steps


@pytest.mark.parametrize("commit_every", [1, 3])
def test_no_chunk_that_the_last_generation_needs_is_written(case: Case, commit_every: int, tmp_path: Path) -> None:
    way = replace(case.way, commit_every=commit_every)
    if way.update == "speculative" and commit_every > 1:
        pytest.skip("speculation needs a commit in every step")
    for until in (7, 9):
        assert not overwritten(*journal_of(way, tmp_path, until))


def test_a_pack_made_anew_is_there_after_a_cut(tmp_path: Path) -> None:
    """A generation needs no more than one slot of each chunk, so a store opens without the files of the other slot.

    In two directories, because publishing a manifest syncs only the first one.
    """
    way, folder, end = replace(WAYS["disk"], directories=2), tmp_path / "run", 4
    expected = expected_states(way, tmp_path / "expected", end)
    journal_of(way, folder, 1)
    for path in folder.glob("*/*.a.safetensors"):
        path.unlink()
    disk, journal = journal_of(way, folder, end)
    (last,) = images(disk, journal, instants={len(journal)}, draws=0)
    assert check_resumes(way, last.restore(tmp_path / "left"), expected) == end


def test_of_an_export(tmp_path: Path) -> None:
    """A cut leaves the checkpoint before or the new one, whole; a checkpoint whose export has returned is there."""
    backend, told, exported, found = JournalBackend(tmp_path), [], [], []
    with opened(Way(), tmp_path / "run", backend) as run:
        for step in (1, 2):
            run.until(step)
            run.engine.export(tmp_path / "new" / "out")
            told.append(len(backend.journal))
            exported.append(load_file(tmp_path / "new" / "out" / SINGLE))
    for number, image in enumerate(images(Disk(tmp_path, backend.found), backend.journal, told=told)):
        path = image.restore(tmp_path / str(number)) / "new" / "out" / SINGLE
        left = load_file(path) if path.exists() else {}
        which = [all(torch.equal(left[name], state[name]) for name in state) if left else None for state in exported]
        found.append(1 + which.index(True) if left else 0)
        assert found[-1] >= image.known, f"the cut after {image.at} changes took it away"
    assert set(found) == {0, 1, 2}


@pytest.mark.parametrize("directories", [1, 2])
def test_of_a_snapshot(directories: int, tmp_path: Path) -> None:
    """A cut leaves the snapshot whole, or none; a snapshot that was flushed is there."""
    backend = JournalBackend(tmp_path)
    with opened(replace(WAYS["disk"], directories=directories), tmp_path / "run", backend) as run:
        run.until(2)
        run.engine.flush()
        begin = len(backend.journal)
        kept = [path.relative_to(tmp_path) for path in run.engine.snapshot("second")]
        run.engine.flush()
        told, instants = [len(backend.journal)], range(begin, len(backend.journal) + 1)
    found = []
    for image in images(Disk(tmp_path, backend.found), backend.journal, instants=instants, told=told, draws=2):
        left = [image.restore(tmp_path / "left") / path for path in kept]
        found.append(1 if Manifests(left[0], Backend()).numbers(missing_ok=True) else 0)
        assert found[-1] >= image.known, f"the cut after {image.at} changes took it away"
        for chunk in committed_chunks(left)[1] if found[-1] else ():
            stored = np.fromfile(chunk.path, np.uint8, chunk.padded_bytes, offset=chunk.offset)
            assert chunk.record.checksum_of(stored) == chunk.record.checksum, f"after {image.at}: {chunk.name}"
        shutil.rmtree(tmp_path / "left")
    assert set(found) == {0, 1}
