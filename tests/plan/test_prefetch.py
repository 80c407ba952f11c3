"""Depths: the textbook figure, and the recommended one."""

from __future__ import annotations

import pytest

from tierstore.errors import BudgetError, ConfigError
from tierstore.plan import prefetch
from tierstore.plan.prefetch import recommend_depth, required_depth
from tierstore.plan.simulate import Simulation, Visit, simulate


def there_and_back(groups: int, nbytes: int, compute_s: float) -> tuple[Visit, ...]:
    return tuple(Visit(group, nbytes, compute_s) for group in (*range(groups), *range(groups - 2, -1, -1)))


@pytest.mark.parametrize(
    ("group_bytes", "compute_s", "depth"), [(0, 1.0, 1), (100, 1.0, 1), (101, 1.0, 2), (80, 0.05, 16), (250, 1.0, 3)]
)
def test_textbook_depth(group_bytes: int, compute_s: float, depth: int) -> None:
    assert required_depth(group_bytes, 100.0, compute_s) == depth


def test_textbook_depth_refuses_no_rate() -> None:
    with pytest.raises(ConfigError, match="positive"):
        required_depth(1, 0.0, 1.0)


def test_a_fast_link_needs_depth_one() -> None:
    assert recommend_depth(there_and_back(20, 80, 0.05), 10_000.0, 800) == 1


def test_nothing_to_fetch_when_all_fits() -> None:
    assert recommend_depth(there_and_back(5, 80, 0.05), 10.0, 400) == 1


def test_no_depth_hides_a_slow_link() -> None:
    order = tuple(Visit(group, 80, 0.05) for group in range(20))
    assert recommend_depth(order, 1000.0, 160) == 1
    assert simulate(order, 160, 1, 1000.0).stall_s == pytest.approx(20 * 0.03)


def test_the_best_depth_may_be_the_deepest() -> None:
    order = there_and_back(20, 80, 0.05)
    stalls = [simulate(order, 800, depth, 700.0).stall_s for depth in range(1, 9)]
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[6] < 1.2 * stalls[7]
    assert recommend_depth(order, 700.0, 800) == 8


def test_deeper_buffers_absorb_unequal_groups() -> None:
    # one large group in six: the link keeps up on average, but not with depth 1
    order = tuple(Visit(group, 300 if group % 6 == 0 else 10, 0.1) for group in range(24))
    stalls = {depth: simulate(order, 700, depth, 1000.0).stall_s for depth in range(1, 9)}
    depth = recommend_depth(order, 1000.0, 700)
    assert depth > 1
    assert stalls[1] > 1.5 * stalls[depth]
    assert stalls[depth] <= 1.01 * min(stalls.values()) + 1e-9
    assert all(stall > 1.01 * stalls[depth] for other, stall in stalls.items() if other < depth)


@pytest.mark.parametrize("bytes_per_s", [500.0, 700.0, 1300.0, 1350.0, 1e6])
@pytest.mark.parametrize("capacity_bytes", [350, 500])
def test_no_depth_is_better_than_the_first_without_a_stall(bytes_per_s: float, capacity_bytes: int) -> None:
    order = tuple(Visit(group, 150 if group % 6 == 0 else 10, 0.1) for group in range(24))
    stalls = [simulate(order, capacity_bytes, depth, bytes_per_s).stall_s for depth in range(1, 9)]
    best = 1 + next(i for i, stall in enumerate(stalls) if stall <= 1.01 * min(stalls) + 1e-9)
    assert recommend_depth(order, bytes_per_s, capacity_bytes) == best


def test_a_group_larger_than_the_tier_is_refused() -> None:
    with pytest.raises(BudgetError, match="80 B"):
        recommend_depth(there_and_back(3, 80, 0.1), 1000.0, 79)


def test_thousands_of_groups_take_no_square_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order = there_and_back(2000, 80, 0.01)
    asked: list[int] = []

    def counted(order: tuple[Visit, ...], capacity: int, depth: int, rate: float, *, warm_up_steps: int) -> Simulation:
        asked.append(depth)
        return simulate(order, capacity, depth, rate, warm_up_steps=warm_up_steps)

    monkeypatch.setattr(prefetch, "simulate", counted)
    assert recommend_depth(order, 5000.0, 800) == 1
    assert asked == [1]  # the link is always busy
