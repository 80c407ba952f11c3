"""A rank that dies or stops: the others name it in time, and all ranks go on later from a whole generation."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_ranks import STEPS, TIMEOUT_S, go_on, lose_one, moments, waits_of
from ranks import outcomes_of, run_ranks
from sharing import (
    begin_beside_a_stopped_one,
    begin_late,
    find_no_room,
    leave_by_an_error,
    lose,
    lose_the_store,
    meet_late,
    meet_once,
)
from torch import distributed
from torch.distributed import distributed_c10d

from tierstore.errors import RankLost
from tierstore.train import ranks as train_ranks
from tierstore.train.partition import Partition
from tierstore.train.ranks import Ranks


def test_a_killed_rank(tmp_path: Path) -> None:
    """`kill_ranks.py` kills at more moments."""
    stores = {moment: tmp_path / str(moment) for moment in moments(waits_of(tmp_path / "whole"), 2, seed=3)}
    for victim, (moment, store) in enumerate(stores.items()):
        lose_one(store, moment, victim=victim)
    go_on(list(stores.values()))


def test_a_rank_that_dies_before_all_have_met() -> None:
    first, _ = outcomes_of(2, meet_once, 2.0, timeout_s=2.0)
    said = "rank 0 of 2 waited for all ranks to meet, and rank 1 does not answer: it has died or is stuck"
    assert first.value is not None, first.error
    assert first.value.startswith(said)


def test_one_of_three_is_named(tmp_path: Path) -> None:
    assert "rank 0 of 3 waited for" in lose_one(tmp_path / "store", 112, ranks=3, victim=2)
    go_on([tmp_path / "store"], ranks=3)


def test_a_stopped_rank(tmp_path: Path) -> None:
    first, _ = outcomes_of(2, lose, str(tmp_path / "store"), STEPS, 117, signal.SIGSTOP, TIMEOUT_S, stopped=[1])
    # Either wait may end first: that of the computing thread, or the loop's wait for a commit under way.
    assert first.value["told"].startswith("RankLost: rank 0 of 2 waited for ")
    assert "rank 1 does not answer" in first.value["told"]
    assert first.value["raised_s"] <= TIMEOUT_S + 1  # which counts from the forward before the wait
    assert first.value["closed_s"] <= 2 * TIMEOUT_S


def test_a_rank_that_comes_too_late_or_makes_other_calls() -> None:
    (late, other), (too_late, another) = run_ranks(2, meet_late, 1.0)
    assert late.startswith("rank 0 of 2 waited for the first, and rank 1 computes: all ranks make the same calls, in")
    assert too_late.startswith("rank 1 of 2 waited for the first, and rank 0 has given up waiting for the first: all")
    assert re.search("waited for the first, and rank 1 (waits for|has given up waiting for) the second: all", other)
    assert re.search("waited for the second, and rank 0 (waits for|has given up waiting for) the first: all", another)
    for told in (late, other, too_late, another):
        assert "a larger TierConfig(timeout_s=) than 1, of which three quarters count, and start all ranks" in told


def test_a_rank_that_does_not_begin_is_named() -> None:
    first = run_ranks(2, begin_late, timeout_s=1.0)[0]
    assert first.startswith("rank 0 of 2 waited for all ranks to begin, and rank 1 did not: see whether")
    assert "give init_process_group a longer timeout; start all ranks again" in first


def test_one_that_does_not_begin_and_keeps_the_store() -> None:
    last = outcomes_of(2, begin_beside_a_stopped_one, 2.0, timeout_s=2.0, stopped=[0])[1]
    assert last.value is not None, last.error
    assert last.value.startswith("rank 1 of 2 waited for all ranks to begin: see whether one has died or is stuck")


def test_a_rank_without_room_for_weights_ends_the_others() -> None:
    first, last = run_ranks(2, find_no_room, TIMEOUT_S)
    assert last == "BudgetError: the GPU has no room"
    assert first.startswith("RankLost: rank 0 of 2 waited for the weights of ")
    assert "and rank 1 has left (closed); see why there" in first


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_rank_that_leaves_by_an_error_keeps_nobody_waiting(has_snapshot: bool, tmp_path: Path) -> None:
    """What is left to do needs all ranks, and the others are in their next step."""
    first, last = run_ranks(2, leave_by_an_error, str(tmp_path / "store"), TIMEOUT_S, has_snapshot)
    assert last == "a broken sample"
    assert re.match("rank 0 of 2 waited for .*, and rank 1 has left .closed.; see why there", first), first


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ranks]:
    """A group of one rank."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield Ranks()
    distributed.destroy_process_group()


def test_memory_that_a_rank_does_not_find_is_no_lost_rank(alone: Ranks) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room"), alone.waiting("a gradient"):
        raise torch.OutOfMemoryError("no room")
    assert alone.exchange("a value", 1) == [1]
    assert not alone.is_whole  # others may wait in that collective


@pytest.mark.parametrize("is_lost", [False, True])
def test_collectives_that_wait_for_a_lost_rank_are_aborted(is_lost: bool, alone: Ranks) -> None:
    """NCCL destroys a group once its collectives have ended; it may abort one only once those of all have ended."""
    partition, ended, world = Partition(3, alone), [], len(distributed_c10d._world.pg_names)
    groups = len(partition._groups)
    meeting = threading.Barrier(groups)

    def end(way: Callable[[Any], None], group: Any) -> None:
        if is_lost:
            meeting.wait(20)
        way(group)
        ended.append(way)

    destroy, abort = distributed.destroy_process_group, distributed_c10d._abort_process_group
    if is_lost:
        alone._lost = RankLost("rank 1 does not answer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "destroy_process_group", partial(end, destroy))
        patch.setattr(train_ranks, "_abort_process_group", partial(end, abort))
        partition.close(1.0)
    assert ended == [abort if is_lost else destroy] * groups
    assert len(distributed_c10d._world.pg_names) == world - groups


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_rank_that_keeps_the_store_is_gone(how: int) -> None:
    """Heartbeats then end, because torch prints a stack for each of them."""
    first, _ = outcomes_of(2, lose_the_store, how, 2.0, stopped=[1])
    told, beats = first.value
    assert not beats
    if how == signal.SIGSTOP:
        said = "waited for the keeper, and the store of the process group does not answer: the rank that keeps it has"
        assert said in told
