"""The reducer gives the results of DDP bit for bit; it reduces in place, early, and hidden under backward."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import call, run_in_turn, run_ranks
from reducing import early, flat_shards, hidden, in_flight, looked_at_between, same_as_ddp, stale_pair, suited
from torch import distributed

from tierstore.train.data_parallel import reducer
from tierstore.train.data_parallel.buckets import assign_buckets

CASES: dict[str, tuple[str, int, str | None, bool]] = {
    "plain": ("all", 1, None, False),
    "by loss.backward()": ("all", 1, None, True),
    "accumulated": ("all", 3, None, False),
    "unused": ("unused", 1, None, False),
    "unused, by loss.backward()": ("unused", 1, None, True),
    "unused, accumulated": ("unused", 2, None, False),
    "buffers": ("norm", 2, None, True),
    "fp16": ("all", 1, "fp16", False),
    "fp16, unused": ("unused", 1, "fp16", False),
    "bf16, accumulated": ("all", 2, "bf16", False),
    "PowerSGD": ("all", 1, "powersgd", False),
}
LAYERS = 10
LAYER_S = 0.015


@pytest.fixture(scope="module")
def compared() -> dict[str, list[Any]]:
    """By case and rank: whether all is bit-identical, and both layouts. With three ranks averages are rounded."""
    calls = [call(*case) for case in CASES.values()]
    return dict(zip(CASES, run_in_turn(3, same_as_ddp, calls), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_same_as_ddp(compared: dict[str, list[Any]], case: str) -> None:
    """Six steps: gradients, weights and buffers, with the same bucket boundaries."""
    for is_same, ours, theirs in compared[case]:
        assert ours == theirs
        assert len(ours) > 1
        assert is_same


def test_buffers_are_broadcast_while_graphs_have_saved_them() -> None:
    assert run_ranks(2, looked_at_between) == [True, True]


def test_delayed_is_a_one_step_stale_loop() -> None:
    cases = [call(accumulate, case) for accumulate, case in ((1, "all"), (2, "all"), (1, "unused"))]
    for is_same, extra_bytes, model_bytes in itertools.chain(*run_in_turn(2, stale_pair, cases)):
        assert is_same
        assert extra_bytes == model_bytes  # a second set of buckets


def test_launched_early_and_in_place() -> None:
    for found in run_ranks(2, early):
        record = found["record"]
        first, *_, last = record.buckets
        assert first.launched_s < record.last_gradient_s
        assert first.ready_s <= first.launched_s < first.done_s
        assert last.ready_s > record.last_gradient_s
        assert [name for bucket in record.buckets for name in bucket.parameters] == list(record.order)
        assert found["inside"]


@pytest.fixture(scope="module")
def at_once() -> list[dict[str, Any]]:
    """What each rank measured in a backward that communicates as long as it computes, in ten buckets."""
    return run_ranks(2, hidden, LAYERS, LAYER_S)


def test_hidden_under_backward(at_once: list[dict[str, Any]]) -> None:
    """All buckets except the last can be hidden."""
    for found in at_once:
        communication_s = LAYERS * LAYER_S
        share = 1 - (found["both_s"] - found["alone_s"]) / communication_s
        print(f"hidden share {share:.2f}: backward {found['alone_s']:.3f} s, with reduction {found['both_s']:.3f} s")
        assert found["alone_s"] >= communication_s
        assert share >= 0.6
        for bucket in found["record"].buckets:
            assert bucket.done_s - bucket.launched_s >= 0.9 * LAYER_S


def test_delayed_hides_what_is_left(at_once: list[dict[str, Any]]) -> None:
    """Backward does not wait for the last bucket, so that one is hidden, too; this costs a second set of buckets."""
    before, delayed = at_once[0], run_ranks(2, hidden, LAYERS, LAYER_S, True)[0]
    left_s = [found["record"].buckets[-1].done_s - found["record"].ended_s for found in (before, delayed)]
    extra = delayed["extra_bytes"]
    print(f"delayed: {extra} B more, {left_s[1]:.3f} s of the last bucket are left when backward ends")
    assert extra > before["extra_bytes"] == 0
    assert left_s[0] <= 0 < left_s[1]


def test_reduce_scatter_is_all_reduce_in_parts() -> None:
    for found in run_ranks(3, flat_shards):
        assert found["right"]
        assert found["left"] == [None] * len(found["left"])


def test_in_flight() -> None:
    assert run_in_turn(2, in_flight, [call(most) for most in (1, 2)]) == [[1, 1], [2, 2]]


def test_bucket_size_follows_the_cost_model() -> None:
    """More collectives in flight do not hide the fixed cost of each: those of one group run one after another."""
    for free, dear, between in run_ranks(2, suited):
        assert max(len(names) for names in free) == 1
        assert len(dear) == 1
        assert max(len(names) for names in between) > 1


@given(st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["float32", "float64"])), min_size=1, max_size=30))
def test_boundaries_are_those_of_ddp(parts: list[tuple[int, str]]) -> None:
    tensors = [torch.zeros(size, dtype=getattr(torch, kind)) for size, kind in parts]
    caps = [64, 256]
    expected, _ = distributed._compute_bucket_assignment_by_size(tensors, caps, [False] * len(tensors))
    kinds: list[Hashable] = [kind for _, kind in parts]
    found = assign_buckets(range(len(parts)), [t.nbytes for t in tensors], kinds, *caps)
    assert sorted(found) == sorted(expected)


def test_ranks_do_not_go_on_for_a_reducer_that_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Alone:
        count = 1

        def __init__(self, group: object, device: torch.device) -> None:
            self.group = group

        def close(self) -> None:
            closed.append(True)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(reducer, "Ranks", Alone)
    monkeypatch.setattr(reducer, "Places", fail)
    with pytest.raises(MemoryError):
        reducer.GradientReducer(torch.nn.Linear(2, 2))
    assert closed == [True]
