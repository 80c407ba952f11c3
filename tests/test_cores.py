"""Cores are counted in one way: those that this process may run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run_ranks
from torch import nn

import tierstore
from tierstore.cores import available_cores, share_of_cores, update_threads
from tierstore.io.workers import WorkerPool


def test_cores_that_other_processes_have_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert (available_cores(), update_threads()) == (3, 3)
    assert (share_of_cores(2), share_of_cores(3), share_of_cores(4)) == (1, 1, 1)


def test_of_many_cores_two_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (8, 8), (9, 8), (12, 10), (16, 14), (64, 16)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert (update_threads(), update_threads(3)) == (threads, 3)


def threads_on(cores: set[int]) -> int:
    """The threads in which an engine on these cores updates."""
    started: dict[str, int] = {}

    class Told(WorkerPool):
        def __init__(self, name: str, threads: int) -> None:
            started[name] = threads
            super().__init__(name, threads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: cores)
        patch.setattr("tierstore.store.training.WorkerPool", Told)
        with tierstore.Engine(nn.Linear(3, 2), tierstore.TierConfig(cpu_memory="64MiB"), tierstore.AdamWConfig()):
            return started["tierstore-update"]


def test_an_engine_on_one_core_updates_in_one_thread() -> None:
    assert threads_on({1}) == 1


def threads_of_ranks(rank: int, ranks: int) -> list[int]:
    """On the same cores, on cores of its own, and on some that are shared."""
    return [threads_on(set(range(first, first + 12))) for first in (0, 12 * rank, 6 * rank)]


def test_ranks_on_the_same_cores_share_them() -> None:
    assert run_ranks(2, threads_of_ranks) == [[6, 10, 6]] * 2


def test_nothing_else_counts_cores() -> None:
    root = Path(tierstore.__file__).parent
    counting = {str(path.relative_to(root)) for path in root.rglob("*.py") if "getaffinity" in path.read_text()}
    assert counting == {"cores.py"}
    assert not [path for path in root.rglob("*.py") if "cpu_count" in path.read_text()]
