"""Which measured rates the prefetch depth is computed from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tierstore.config import Tier
from tierstore.io.meter import LinkMeter
from tierstore.plan.prefetch import recommend_depth
from tierstore.train import depth
from tierstore.train.depth import DepthChooser

GROUPS = 20
ORDER = (*range(GROUPS), *range(GROUPS - 2, -1, -1))
SIZE = 80_000
FAST, SLOW = 1e9, 0.7e6  # at the slow rate each depth from 1 to 8 takes less time than the one before


def depths_of(homes: list[Tier], steps: list[dict[str, float]], ranks: int = 1) -> list[int]:
    """The depth after each of some steps in which the links had these rates."""
    clock = [0.0]
    meters = {link: LinkMeter(lambda: clock[0]) for link in ("read", "gather")}
    access = SimpleNamespace(
        sizes=[SIZE] * GROUPS, order=ORDER, visit_seconds=[0.05] * len(ORDER), is_recorded=True, depth=0
    )
    placement = SimpleNamespace(weights_home=homes, gpu_weight_bytes=10 * SIZE)
    store: Any = SimpleNamespace(placement=placement, io=SimpleNamespace(meters=meters))
    device: Any = SimpleNamespace(kind="cpu")
    partition: Any = SimpleNamespace(count=ranks, is_shared=ranks > 1)
    chooser = DepthChooser(access, store, None, device, partition, {"gather": meters["gather"]})  # type: ignore[arg-type]
    found = []
    for rates in steps:
        for link, rate in rates.items():
            meters[link].begin()
            clock[0] += 4.0
            meters[link].end(int(4.0 * rate))
        chooser.step_ended(0.0)
        found.append(chooser.wanted)
    return found


def depth_of(homes: list[Tier], ranks: int = 1, **rates: float) -> int:
    """The depth after a step in which the links had these rates."""
    return depths_of(homes, [rates], ranks)[0]


def test_weights_on_disk_come_at_its_rate() -> None:
    assert depth_of([Tier.NVME] * GROUPS, read=FAST) == 1
    assert depth_of([Tier.NVME] * GROUPS, read=SLOW) > 2


@pytest.mark.parametrize("rate", [FAST, SLOW])
def test_weights_in_memory_do_not(rate: float) -> None:
    """Reads are then of state, for which no load waits."""
    assert depth_of([Tier.CPU] * GROUPS, read=rate) == 2


def test_only_what_is_on_disk_does() -> None:
    assert depth_of([Tier.NVME, *[Tier.CPU] * (GROUPS - 1)], read=SLOW) == 1


def test_the_parts_of_other_ranks_come_from_them() -> None:
    assert depth_of([Tier.NVME] * GROUPS, 16, read=SLOW, gather=FAST) == 1
    assert depth_of([Tier.CPU] * GROUPS, 16, read=FAST, gather=SLOW) > 2


def test_rates_that_go_up_and_down_are_not_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[float] = []

    def recommended(order: Any, bytes_per_s: float, capacity_bytes: int) -> int:
        computed.append(bytes_per_s)
        return recommend_depth(order, bytes_per_s, capacity_bytes)

    monkeypatch.setattr(depth, "recommend_depth", recommended)
    noisy = [{"read": FAST * 10 ** (step % 2)} for step in range(20)]
    assert set(depths_of([Tier.NVME] * GROUPS, noisy)) == {1}
    assert 1 < len(computed) <= 6


@pytest.mark.parametrize("before", [10, 0.01])
def test_whatever_was_before_the_depth_is_that_of_now(before: float) -> None:
    """A rate between two that gave the same depth may need another depth."""
    steps = [{"read": 10 * SLOW}] * 5 + [{"read": before * SLOW}] * 5
    found = depths_of([Tier.NVME] * GROUPS, [*steps, *[{"read": SLOW}] * 40])
    assert found[-1] == depth_of([Tier.NVME] * GROUPS, read=SLOW) > found[4]
