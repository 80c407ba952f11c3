"""Seconds of layers from timed layers: exact without noise, and never less for more work."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.plan.layers import LayerKind, LayerWork, TimedLayer, computing_s

SHAPES = [(hidden, tokens) for hidden in (256, 768) for tokens in (32, 256, 1024)]
COSTS = (1e-3, 2e-10, 3e-8, 4e-12)
COUNTS = ("layers", "parameters", "elements", "flop")


def block(hidden: int, tokens: int, layers: int = 1) -> LayerWork:
    flop = 24.0 * tokens * hidden**2 + 4.0 * tokens**2 * hidden
    return LayerWork(layers, 12.0 * hidden**2 * layers, float(tokens * hidden * layers), flop * layers)


def seconds(work: LayerWork) -> float:
    return sum(cost * amount for cost, amount in zip(COSTS, astuple(work)))


def timed(noise: list[float] | None = None) -> list[TimedLayer]:
    works = [block(*shape) for shape in SHAPES]
    factors = noise or [1.0] * len(works)
    return [
        TimedLayer(LayerKind.BLOCK, "bf16", work, seconds(work) * factor, 2 * seconds(work) * factor)
        for work, factor in zip(works, factors)
    ]


def test_other_layers_follow_from_the_timed_ones() -> None:
    model = block(1024, 512, layers=24)
    found = computing_s(timed(), "bf16", {LayerKind.BLOCK: model})
    assert found == pytest.approx((seconds(model), 2 * seconds(model)))


@pytest.mark.parametrize("shape", SHAPES)
def test_where_one_layer_was_timed_others_take_as_long_for_a_flop(shape: tuple[int, int]) -> None:
    small, large = block(*shape), block(1024, 2048, layers=24)
    one = TimedLayer(LayerKind.BLOCK, "bf16", small, 0.02, 0.03)
    times = large.flop / small.flop
    found = computing_s([one], "bf16", {LayerKind.BLOCK: large})
    assert found == pytest.approx((0.02 * times, 0.03 * times))


def test_what_was_not_timed_is_not_known() -> None:
    assert computing_s(timed(), "fp32", {LayerKind.BLOCK: block(256, 32)}) is None
    both = dict.fromkeys(LayerKind, block(256, 32))
    assert computing_s(timed(), "bf16", both) is None
    assert computing_s([], "bf16", both) is None


@settings(max_examples=40)
@given(noise=st.lists(st.floats(0.5, 2), min_size=len(SHAPES), max_size=len(SHAPES)), count=st.sampled_from(COUNTS))
def test_more_work_is_never_quicker_whatever_the_noise(noise: list[float], count: str) -> None:
    work = block(768, 64)
    more = LayerWork(**{name: getattr(work, name) * (2 if name == count else 1) for name in COUNTS})
    less_s, more_s = (computing_s(timed(noise), "bf16", {LayerKind.BLOCK: one}) for one in (work, more))
    assert less_s is not None
    assert more_s is not None
    assert all(0 < one <= other for one, other in zip(less_s, more_s))


@pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be(figure: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        TimedLayer(LayerKind.HEAD, "bf16", block(256, 32), figure, 1.0)
