"""Every formula of the planner's arithmetic, with numbers worked by hand.

Other files test the same functions in detail; these are the numbers that a person can check with a pencil.
"""

from __future__ import annotations

import math

import pytest

from tierstore.config import Tier
from tierstore.plan.buckets import Layer, backward, form_buckets, timeline
from tierstore.plan.cost_model import CostModel
from tierstore.plan.costs import (
    codec_break_even_bytes_per_s,
    codec_pays,
    efficiency,
    hidden_share_of_transfer,
    overlap_of_shorter,
    overlap_speedup,
    phase_seconds,
    step_traffic,
)
from tierstore.plan.machine import rates_of
from tierstore.plan.memory import PARAMETER_BYTES, Job, Layout, components, gpu_bytes
from tierstore.plan.model_size import from_parameters, streaming_hides_from_tokens
from tierstore.plan.placement import BLOCK, GroupNeed, Request
from tierstore.plan.prefetch import recommend_depth, required_depth
from tierstore.plan.simulate import Visit, simulate
from tierstore.plan.tiers import place_uniformly


def test_a_phase_is_its_slowest_link_and_what_nothing_hides() -> None:
    # 2 s of compute; 1.4 + 0.9 s of transfers that share a link; 1.1 s on another; 0.25 s of synchronising.
    assert phase_seconds(2.0, [1.4 + 0.9, 1.1], 0.25) == pytest.approx(2.55)
    assert efficiency(2.0, 2.5) == 0.8


def test_disks_share_one_budget_both_ways() -> None:
    # 1.10 GB/s reads, 1.38 writes: 11 GB read and 13.8 written take 10 + 10 s where both share one budget.
    rates = rates_of(read=1.10e9, write=1.38e9, link=1e9, memory=1e9)
    assert rates.disk_seconds(11e9, 13.8e9) == pytest.approx(20)
    assert rates.disk_seconds(11e9, 0) == pytest.approx(10)


def test_speed_up_by_overlap() -> None:
    # Tc 3 s, Tm 2 s, half of the shorter hidden: 5 / 4 s. All of it: 5 / 3.
    assert overlap_speedup(3.0, 2.0, 0.5) == pytest.approx(1.25)
    assert overlap_speedup(3.0, 2.0, 1.0) == pytest.approx(5 / 3)
    # Tc 2, Tm 4, done in 5: 1 s is hidden, half of the shorter, a quarter of the transfer.
    assert overlap_of_shorter(2.0, 4.0, 5.0) == 0.5
    assert hidden_share_of_transfer(2.0, 4.0, 5.0) == 0.25


def test_textbook_depth_and_the_one_that_is_worth_it() -> None:
    # 400 MB over 5 GB/s are 80 ms; behind 50 ms of compute ceil(80 / 50) = 2, behind 100 ms 1.
    assert required_depth(400 * 10**6, 5e9, 0.050) == 2
    assert required_depth(400 * 10**6, 5e9, 0.100) == 1
    # Bandwidth-bound: 16 transfers of 80 ms behind 16 x 50 ms of compute; no depth hides the difference.
    order = tuple(Visit(group, 400 * 10**6, 0.050) for group in range(16))
    assert recommend_depth(order, 5e9, 2 * 400 * 10**6) == 1
    stalls = [simulate(order, 2 * 400 * 10**6, depth, 5e9).stall_s for depth in range(1, 9)]
    assert min(stalls) > 14 * (0.080 - 0.050)


def test_a_message_and_the_smallest_good_one() -> None:
    link = CostModel(alpha_s=200e-6, beta_bytes_per_s=12e9)
    assert link.seconds(24 * 10**6) == pytest.approx(2.2e-3)
    # 90 % efficient from 9 x alpha x beta = 21.6 MB on.
    assert link.smallest_bytes(0.9) == pytest.approx(21.6e6)
    assert link.efficiency(21.6e6) == pytest.approx(0.9)


def test_the_timeline_of_buckets() -> None:
    # Two layers of 12 MB and 2 ms; each bucket takes 1 ms: the first is hidden, the second is not.
    gradients = backward([Layer(12 * 10**6, 2e-3)] * 2)
    run = timeline(gradients, form_buckets([12 * 10**6] * 2, 1), CostModel(0.0, 12e9))
    assert [event.start_s for event in run.events] == pytest.approx([2e-3, 4e-3])
    assert run.seconds == pytest.approx(5e-3)
    assert run.hidden_share == pytest.approx(1 - (5 - 4) / 2)


def test_a_codec_pays() -> None:
    # 2 GB/s of disk, ratio 1.25: in series from 10 GB/s on; overlapped, as soon as the codec beats the disk.
    assert codec_break_even_bytes_per_s(2e9, 1.25) == pytest.approx(10e9)
    assert not codec_pays(2e9, 1.25, 9e9, overlapped=False)
    assert codec_pays(2e9, 1.25, 11e9, overlapped=False)
    assert codec_pays(2e9, 1.25, 2.1e9, overlapped=True)
    assert codec_break_even_bytes_per_s(2e9, 1.0) == math.inf


def test_sixteen_bytes_a_parameter_and_its_shares() -> None:
    assert {dtype: each.total for dtype, each in PARAMETER_BYTES.items()} == {"bf16": 16, "fp16": 16, "fp32": 16}
    job = Job(from_parameters(64e9), "fp16")
    assert sum(components(job).values()) == 16 * 64 * 10**9
    # 8 GPUs: tensor 2, so 4 data-parallel ranks; ZeRO 2 shares gradients and state out, weights not.
    held = gpu_bytes(job, Layout(gpus=8, tensor=2, zero=2))
    assert (held.weights, held.gradients, held.state) == pytest.approx((64e9, 16e9, 96e9), rel=1e-6)


def test_a_block_and_the_tokens_that_hide_it() -> None:
    hidden, tokens, flop_per_s, link = 8192, 12500, 400e12, 32e9
    assert streaming_hides_from_tokens(flop_per_s, link) == tokens
    assert 24 * tokens * hidden**2 / flop_per_s == pytest.approx(2 * 12 * hidden**2 / link)


@pytest.mark.parametrize(
    ("dtype", "weights", "gradients", "expected"),
    [("bf16", Tier.NVME, Tier.CPU, 26), ("bf16", Tier.CPU, Tier.CPU, 22), ("fp16", Tier.NVME, Tier.CPU, 30),
     ("fp32", Tier.NVME, Tier.CPU, 28), ("bf16", Tier.NVME, Tier.NVME, 30)],
)  # fmt: skip
def test_bytes_of_the_disks_per_parameter(dtype: str, weights: Tier, gradients: Tier, expected: int) -> None:
    each = PARAMETER_BYTES[dtype]
    groups = (GroupNeed("h", 8 * BLOCK, each.weights, each.state, True),) * 2
    request = Request(groups, 2**40, 2**40, nvme=True, gradients="held")
    placement = place_uniformly(request, weights=weights, gradients=gradients, state=Tier.NVME)
    assert step_traffic(placement).bytes_per_parameter == expected
