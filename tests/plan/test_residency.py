"""The residency policy: literal decisions, invariants, and Belady against every other choice."""

from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import BudgetError, ConfigError
from tierstore.plan.residency import Decision, ResidencyPolicy

THERE_AND_BACK = (0, 1, 2, 3, 2, 1)


def test_demand_evicts_what_is_used_last() -> None:
    policy = ResidencyPolicy(THERE_AND_BACK, (10,) * 4, 30, depth=0)
    # at position 3 group 3 is needed; then come 2, 1, 0
    assert policy.decide(3, {0, 1, 2}, (), ()) == Decision(evict=(0,), load=(3,))
    assert policy.decide(3, {0, 1, 2}, {0}, ()) == Decision(evict=(1,), load=(3,))


def test_prefetch_looks_past_resident_groups_and_never_evicts_a_sooner_one() -> None:
    policy = ResidencyPolicy(THERE_AND_BACK, (10,) * 4, 30, depth=2)
    assert policy.decide(0, (), (), ()) == Decision(load=(0, 1, 2))
    assert policy.decide(1, {0, 1, 2}, (), ()) == Decision(evict=(0,), load=(3,))
    assert ResidencyPolicy((0, 1, 2, 3), (10,) * 4, 20, depth=3).decide(0, {0, 1}, (), ()) == Decision()
    # at position 2 (needed 2, next 3, then 1): 3 may not push out 1 while 0 can go
    assert policy.decide(2, {0, 1, 2}, (), ()) == Decision(evict=(0,), load=(3,))
    # at position 4 (needed 2, next 1, then 0): 3 is used last
    assert policy.decide(4, {2, 3, 1}, (), ()) == Decision(evict=(3,), load=(0,))


def test_the_wrap_around_prefetches_the_next_step() -> None:
    policy = ResidencyPolicy((0, 1, 2), (1, 1, 1), 2, depth=1)
    assert policy.decide(2, {1, 2}, (), ()) == Decision(evict=(1,), load=(0,))
    assert policy.decide(5, {1, 2}, (), ()) == policy.decide(2, {1, 2}, (), ())


def test_a_group_in_flight_is_neither_loaded_again_nor_evicted() -> None:
    policy = ResidencyPolicy((0, 1, 2), (1, 1, 1), 2, depth=1)
    assert policy.decide(1, {0}, (), {1}) == Decision(evict=(0,), load=(2,))
    assert policy.decide(1, {1}, (), {0}) == Decision()


def test_demand_waits_for_loads_that_fill_the_memory() -> None:
    policy = ResidencyPolicy((0, 1, 2), (1, 1, 1), 2, depth=1)
    assert policy.decide(0, {}, (), {1, 2}, demand=0) == Decision(wait=(1, 2))


def test_groups_that_no_step_visits_go_first_and_can_be_demanded() -> None:
    policy = ResidencyPolicy((0, 1), (1, 1, 1, 1), 3, depth=1)
    assert policy.decide(0, {1, 2, 3}, (), ()) == Decision(evict=(2,), load=(0,))
    assert policy.decide(0, {0}, {0}, ()) == Decision(load=(1,))
    assert ResidencyPolicy((0, 1), (1, 1, 1, 1), 4, depth=8).decide(0, (), (), ()) == Decision(load=(0, 1))
    assert policy.decide(0, {0, 1, 2}, {0}, (), demand=3) == Decision(evict=(2,), load=(3,))


def test_a_large_victim_spares_the_small_ones() -> None:
    policy = ResidencyPolicy((0, 1, 2, 3), (8, 1, 8, 2), 11, depth=0)
    # those used last are 3, then 2; with 2 gone, 3 can stay
    assert policy.decide(0, {1, 2, 3}, (), ()) == Decision(evict=(2,), load=(0,))


def test_what_can_never_fit_is_refused_with_the_sum() -> None:
    policy = ResidencyPolicy((0, 1), (60, 50), 100, depth=1)
    with pytest.raises(BudgetError, match=r"110 B together.*100 B.*by 10 B"):
        policy.decide(1, {0}, {0}, ())


@pytest.mark.parametrize(
    ("order", "sizes", "depth"), [((), (1,), 1), ((1,), (1,), 1), ((0,), (1,), -1), ((0,), (-1,), 1)]
)
def test_impossible_policies_are_refused(order: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> None:
    with pytest.raises(ConfigError):
        ResidencyPolicy(order, sizes, 10, depth)


@settings(max_examples=200)
@given(data=st.data())
def test_a_decision_is_always_possible(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7))
    sizes = tuple(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    order = tuple(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=14)))
    capacity = data.draw(st.integers(max(sizes), 9 * count))
    policy = ResidencyPolicy(order, sizes, capacity, data.draw(st.integers(0, 4)))
    present: set[int] = set()
    for group in data.draw(st.permutations(range(count))):
        if sum(sizes[other] for other in present) + sizes[group] <= capacity:
            present.add(group)
    loading = {group for group in present if data.draw(st.booleans())}
    resident = present - loading
    in_use = {group for group in present if data.draw(st.booleans())}
    position = data.draw(st.integers(-3, 30))
    demand = data.draw(st.none() | st.integers(0, count - 1))
    needed = order[position % len(order)] if demand is None else demand
    together = sum(sizes[group] for group in in_use | {needed})
    try:
        decision = policy.decide(position, resident, in_use, loading, demand)
    except BudgetError:
        assert together > capacity
        assert needed not in present
        return
    if policy.is_settled(position, present, demand):
        assert decision == Decision()
    elif sum(sizes) <= capacity:
        assert decision.load
    evict, load = set(decision.evict), set(decision.load)
    assert len(evict) == len(decision.evict)
    assert len(load) == len(decision.load)
    assert evict <= resident - in_use - {needed}
    assert not load & (present | evict)
    assert sum(sizes[group] for group in (present - evict) | load) <= capacity
    if decision.wait:
        assert not evict
        assert not load
        assert set(decision.wait) <= loading - in_use
    elif needed not in present:
        assert decision.load[0] == needed
    upcoming = list(dict.fromkeys(order[(position + step) % len(order)] for step in range(len(order))))
    for group in load - {needed}:
        ahead = [other for other in upcoming if other != needed]
        assert ahead.index(group) < policy.depth
        if needed in present:  # then every eviction made room for prefetches
            assert all(
                other not in upcoming or upcoming.index(other) > min(map(upcoming.index, load)) for other in evict
            )


def fewest_loads(order: tuple[int, ...], capacity: int) -> int:
    """Exhaustive minimum of demand loads for groups of size 1, from an empty device."""

    @functools.cache
    def best(position: int, resident: frozenset[int]) -> int:
        if position == len(order):
            return 0
        group = order[position]
        if group in resident:
            return best(position + 1, resident)
        if len(resident) < capacity:
            return 1 + best(position + 1, resident | {group})
        return 1 + min(best(position + 1, (resident - {victim}) | {group}) for victim in resident)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_no_other_eviction_loads_less(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randint(1, 3)
    # A group that the rest of the order does not use is used last in the cyclic order, too: evicting it stays optimal.
    order = tuple(rng.randrange(5) for _ in range(18))
    policy = ResidencyPolicy(order, (1,) * 5, capacity, depth=0)
    resident: set[int] = set()
    loads = 0
    for position in range(len(order)):
        decision = policy.decide(position, resident, (), ())
        resident = (resident - set(decision.evict)) | set(decision.load)
        loads += len(decision.load)
    assert loads == fewest_loads(order, capacity)
