"""Costs: bytes per parameter of each placement, and the formulas of overlap and codecs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.config import Tier
from tierstore.errors import ConfigError
from tierstore.plan.costs import (
    StepPattern,
    beside_s,
    codec_break_even_bytes_per_s,
    codec_pays,
    efficiency,
    hidden_share_of_transfer,
    overlap_of_shorter,
    overlap_speedup,
    phase_seconds,
    step_traffic,
)
from tierstore.plan.placement import BLOCK, GroupNeed, Kind, Placement, Pools

SIZES = {"bf16": (2, 10), "fp32": (4, 8), "fp16": (2, 12)}


def placement(
    groups: tuple[GroupNeed, ...],
    weights: Tier = Tier.NVME,
    gradients: Tier = Tier.CPU,
    state_resident_chunks: int = 0,
    chunk_elements: int = 2 * BLOCK,
) -> Placement:
    return Placement(
        groups=groups,
        chunk_elements=chunk_elements,
        gpu_weight_bytes=0,
        gpu_gradient_bytes=0,
        pools=Pools(),
        weights_home=(weights,) * len(groups),
        state_resident_chunks=(state_resident_chunks,) * len(groups),
        gradient_home=(gradients,) * len(groups),
    )


def group(dtype: str, elements: int = 6 * BLOCK, trainable: bool = True) -> GroupNeed:
    weight_bytes, state_bytes = SIZES[dtype]
    return GroupNeed("h", elements, weight_bytes, state_bytes if trainable else 0, trainable)


@pytest.mark.parametrize(
    ("dtype", "weights", "gradients", "expected"),
    [
        ("bf16", Tier.NVME, Tier.CPU, 26),
        ("bf16", Tier.CPU, Tier.CPU, 22),
        ("fp32", Tier.NVME, Tier.CPU, 28),
        ("fp16", Tier.NVME, Tier.CPU, 30),
        ("bf16", Tier.NVME, Tier.NVME, 30),
    ],
)
def test_bytes_per_parameter(dtype: str, weights: Tier, gradients: Tier, expected: int) -> None:
    traffic = step_traffic(placement((group(dtype),) * 3, weights, gradients))
    assert traffic.bytes_per_parameter == expected


def test_bf16_on_disk_by_kind() -> None:
    traffic = step_traffic(placement((group("bf16"),), gradients=Tier.NVME))
    n = 6 * BLOCK
    assert traffic.read == {Kind.WEIGHTS: 4 * n, Kind.STATE: 10 * n, Kind.GRADIENTS: 2 * n}
    assert traffic.written == {Kind.WEIGHTS: 2 * n, Kind.STATE: 10 * n, Kind.GRADIENTS: 2 * n}


def test_memory_is_written_for_a_commit_only() -> None:
    in_memory = placement((group("bf16"),), weights=Tier.CPU, state_resident_chunks=3)
    assert step_traffic(in_memory).bytes_per_parameter == 12
    assert step_traffic(in_memory, StepPattern(commits_per_step=0.25)).bytes_per_parameter == 3
    assert step_traffic(in_memory, StepPattern(commits_per_step=0)).bytes_per_parameter == 0
    a_third = placement((group("bf16"),), weights=Tier.CPU, state_resident_chunks=1)
    assert step_traffic(a_third, StepPattern(commits_per_step=0)).bytes_per_parameter == pytest.approx(20 * 2 / 3)


def test_loads_are_counted_as_given() -> None:
    two = placement((group("bf16"), group("bf16", trainable=False)))
    traffic = step_traffic(two, StepPattern(weight_loads=(1, 3)))
    assert traffic.read[Kind.WEIGHTS] == 6 * BLOCK * 2 * 4
    assert traffic.written[Kind.WEIGHTS] == 6 * BLOCK * 2
    with pytest.raises(ConfigError, match="1 groups, but 2"):
        step_traffic(two, StepPattern(weight_loads=(1,)))


def test_further_causes_of_traffic() -> None:
    spilled = placement((group("bf16"),), gradients=Tier.NVME)
    assert step_traffic(spilled, StepPattern(micro_batches=3)).bytes_per_parameter == 30 + 2 * 4
    assert step_traffic(spilled, StepPattern(read_weights_with_state=True)).bytes_per_parameter == 32


def test_nothing_trained_costs_no_division() -> None:
    assert step_traffic(placement((group("bf16", trainable=False),))).bytes_per_parameter == 0


@settings(max_examples=60)
@given(
    elements=st.integers(0, 9 * BLOCK),
    dtype=st.sampled_from(sorted(SIZES)),
    chunk_blocks=st.integers(1, 4),
    resident=st.integers(0, 3),
)
def test_padding_is_counted_chunk_by_chunk(elements: int, dtype: str, chunk_blocks: int, resident: int) -> None:
    resident = min(resident, -(-elements // (chunk_blocks * BLOCK)))
    placed = placement((group(dtype, elements),), Tier.NVME, Tier.NVME, resident, chunk_blocks * BLOCK)
    traffic = step_traffic(placed)
    chunks = range(placed.chunk_count(0))
    weights = sum(placed.weight_bytes(0, chunk) for chunk in chunks)
    state = [placed.state_bytes(0, chunk) for chunk in chunks]
    assert traffic.read == {Kind.WEIGHTS: 2 * weights, Kind.STATE: sum(state[resident:]), Kind.GRADIENTS: weights}
    assert traffic.written == {Kind.WEIGHTS: weights, Kind.STATE: sum(state), Kind.GRADIENTS: weights}


def test_phase_and_efficiency() -> None:
    assert phase_seconds(2.0, [1.0, 3.0], 0.5) == 3.5
    assert phase_seconds(2.0) == 2.0
    assert efficiency(2.0, 2.5) == pytest.approx(0.8)


def test_two_that_begin_together() -> None:
    assert beside_s(2.0, 3.0, (1.0, 1.0)) == 3.0  # neither slows the other
    assert beside_s(2.0, 3.0, (2.0, 2.0)) == pytest.approx(5.0)  # they take turns
    # The shorter one takes 1 s x 1.5 beside the other, which has done 1.5 s / 3 = 0.5 s of its 2 s by then.
    assert beside_s(1.0, 2.0, (1.5, 3.0)) == pytest.approx(3.0)
    assert beside_s(2.0, 1.0, (3.0, 1.5)) == pytest.approx(3.0)
    assert beside_s(0.0, 2.0, (9.0, 9.0)) == beside_s(2.0, 0.0, (9.0, 9.0)) == 2.0


@given(
    one=st.floats(0, 10), other=st.floats(0, 10), slower=st.tuples(st.floats(1, 5), st.floats(1, 5)),
    more=st.floats(0, 10),
)  # fmt: skip
def test_more_work_or_more_slowing_never_ends_sooner(
    one: float, other: float, slower: tuple[float, float], more: float
) -> None:
    seconds = beside_s(one, other, slower) * (1 - 1e-9)
    assert seconds >= max(one, other) * (1 - 1e-6)
    assert beside_s(one + more, other, slower) >= seconds
    assert beside_s(one, other + more, slower) >= seconds
    assert beside_s(one, other, (slower[0] + more, slower[1])) >= seconds
    assert beside_s(one, other, (slower[0], slower[1] + more)) >= seconds


def test_overlap() -> None:
    assert overlap_speedup(1.0, 1.0, 0.0) == 1.0
    assert overlap_speedup(1.0, 1.0, 1.0) == 2.0
    assert overlap_speedup(1.0, 3.0, 1.0) == pytest.approx(4 / 3)
    assert overlap_of_shorter(1.0, 3.0, 3.5) == pytest.approx(0.5)
    assert hidden_share_of_transfer(1.0, 3.0, 3.5) == pytest.approx(1 / 6)
    assert overlap_speedup(1.0, 3.0, overlap_of_shorter(1.0, 3.0, 3.5)) == pytest.approx(4 / 3.5)


def test_codec_break_even() -> None:
    break_even = codec_break_even_bytes_per_s(1e9, 1.32)
    assert break_even == pytest.approx(1e9 / (1 - 1 / 1.32))
    assert codec_pays(1e9, 1.32, 1.01 * break_even, overlapped=False)
    assert not codec_pays(1e9, 1.32, 0.99 * break_even, overlapped=False)
    assert codec_pays(1e9, 1.32, 1.01e9, overlapped=True)
    assert not codec_pays(1e9, 1.32, 0.99e9, overlapped=True)
    assert codec_break_even_bytes_per_s(1e9, 1.0) == math.inf
    assert not codec_pays(1e9, 1.0, 1e15, overlapped=True)
