"""One memory for both tiers: which part of it the GPU tier gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import MIB, check, groups_of, need, options_of, request

from tierstore.alignment import ALIGNMENT
from tierstore.errors import BudgetError
from tierstore.plan import gpu_room
from tierstore.plan.one_memory import divided
from tierstore.plan.placement import BLOCK, GroupNeed, Placement, Request
from tierstore.plan.tiers import place, smallest_budgets

GPT2 = (need(589 * BLOCK), need(12 * BLOCK), *(need(108 * BLOCK),) * 12)
"""The embedding is about a third of all elements."""
EQUAL = (need(200 * BLOCK),) * 12


def one_memory(groups: tuple[GroupNeed, ...], memory_bytes: int, **options: object) -> Request:
    return request(groups, memory_bytes, 0, is_one_memory=True, **options)


def weights_of(groups: tuple[GroupNeed, ...]) -> int:
    return sum(one.device_bytes for one in groups)


def holds_all(placement: Placement) -> bool:
    return placement.gpu_weight_bytes >= weights_of(placement.groups)


@settings(max_examples=100)
@given(groups=groups_of, options=options_of, more=st.integers(0, 40 * MIB))
def test_both_tiers_take_what_there_is_and_the_smallest_that_is_told_fits(
    groups: tuple[GroupNeed, ...], options: dict[str, object], more: int
) -> None:
    with pytest.raises(BudgetError, match="cpu_memory of -1 B is too small") as refused:
        divided(one_memory(groups, -1, **options))
    assert "gpu_memory" not in str(refused.value)
    least = int(str(refused.value).split("smallest that fits is ")[1].split(" B")[0])
    for memory_bytes in (least, least + more):
        found = divided(one_memory(groups, memory_bytes, **options))
        assert found.gpu_bytes + found.cpu_bytes == memory_bytes
        check(place(found), found)
    if least:
        with pytest.raises(BudgetError, match=rf"smallest that fits is {least} B"):
            divided(one_memory(groups, least - ALIGNMENT, **options))


def test_two_budgets_stay_as_they_are() -> None:
    asked = request(EQUAL, 300 * MIB, 700 * MIB)
    assert divided(asked) is asked


@pytest.mark.parametrize("groups", [GPT2, EQUAL, (need(BLOCK),) * 200])
def test_all_weights_stay_where_they_fit_and_leave_the_rest_to_state(groups: tuple[GroupNeed, ...]) -> None:
    everything, largest = weights_of(groups), max(one.device_bytes for one in groups)
    found = divided(one_memory(groups, 6 * everything))
    placement = place(found)
    assert holds_all(placement)
    assert placement.gpu_weight_bytes + placement.gpu_gradient_bytes == found.gpu_bytes
    assert found.gpu_bytes == everything + max(largest, min(2 * gpu_room.COMPANY_BYTES, everything // 15))
    resident = sum(map(placement.state_bytes_in_memory, range(len(groups))))
    assert resident > 0
    with_less = place(replace(found, gpu_bytes=found.gpu_bytes // 2, cpu_bytes=6 * everything - found.gpu_bytes // 2))
    assert not holds_all(with_less)
    assert resident > sum(map(with_less.state_bytes_in_memory, range(len(groups))))


def test_small_gradients_have_room_together() -> None:
    small = place(divided(one_memory((need(BLOCK),) * 200, 2**30)))
    assert small.gpu_gradient_bytes > 10 * 2 * BLOCK


def test_with_less_three_neighbours_have_room_and_with_little_what_must() -> None:
    everything, one = weights_of(EQUAL), EQUAL[0].device_bytes
    all_stay, three, least = (everything + one, 3 * one + one, 2 * one)
    for memory_bytes, part in (
        (2 * all_stay, all_stay), (all_stay * 5 // 4, all_stay), (all_stay * 5 // 4 - ALIGNMENT, three),
        (three * 5 // 4, three), (three * 5 // 4 - ALIGNMENT, least),
    ):  # fmt: skip
        assert divided(one_memory(EQUAL, memory_bytes)).gpu_bytes == part
    of_gpt2 = divided(one_memory(GPT2, weights_of(GPT2))).gpu_bytes
    assert of_gpt2 == sum(group.device_bytes for group in GPT2[:3]) + GPT2[0].device_bytes


def test_a_working_set_is_left_also_on_a_coarse_grid() -> None:
    all_stay = weights_of(GPT2) + GPT2[0].device_bytes
    for memory_bytes in (all_stay * 5 // 4, all_stay * 2):
        placement = place(divided(one_memory(GPT2, memory_bytes, chunk_elements=48 * BLOCK)))
        largest = max(placement.trip_bytes(group, 0) for group in range(len(GPT2)))
        assert placement.pools.update >= 4 * largest
        assert holds_all(placement) is (memory_bytes == all_stay * 2)


def test_without_a_store_weights_that_live_in_cpu_memory_go_before() -> None:
    """Without a disk all weights need CPU memory: the GPU tier is not their only place."""
    everything = weights_of(EQUAL)
    least = 7 * everything  # of bf16: 14 bytes
    assert not holds_all(place(divided(one_memory(EQUAL, least + everything // 2, nvme=False))))
    assert holds_all(place(divided(one_memory(EQUAL, least + everything * 5 // 4, nvme=False))))


def test_the_smallest_memory_is_that_of_both() -> None:
    smallest = smallest_budgets(request(GPT2, 0))
    with pytest.raises(BudgetError, match=f"fits is {smallest.gpu_bytes + smallest.cpu_bytes} B"):
        divided(one_memory(GPT2, smallest.cpu_bytes))
