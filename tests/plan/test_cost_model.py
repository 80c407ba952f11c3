"""The fit of alpha and beta: exact lines, outliers, noise, and fits that would come out negative."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.plan.cost_model import CostModel, Timing, fit_timings

SIZES = [2**exponent for exponent in range(10, 27, 2)]


def timings(model: CostModel, factor: float = 1.0) -> list[Timing]:
    return [Timing(size, factor * model.seconds(size)) for size in SIZES]


@given(st.floats(1e-7, 1e-1), st.floats(1e6, 1e12))
def test_a_line_is_found_again(alpha_s: float, beta_bytes_per_s: float) -> None:
    fit = fit_timings(timings(CostModel(alpha_s, beta_bytes_per_s)))
    predicted = [fit.model.seconds(size) for size in SIZES]
    assert predicted == pytest.approx([CostModel(alpha_s, beta_bytes_per_s).seconds(size) for size in SIZES], rel=1e-6)
    assert fit.worst_residual < 1e-6


def test_alpha_and_beta_of_the_reference() -> None:
    fit = fit_timings(timings(CostModel(200e-6, 12e9)))
    assert fit.model.alpha_s == pytest.approx(200e-6)
    assert fit.model.beta_bytes_per_s == pytest.approx(12e9)
    assert [point.nbytes for point in fit.timings] == SIZES


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_one_wild_timing_changes_little(index: int) -> None:
    points = timings(CostModel(200e-6, 12e9))
    points[index] = Timing(points[index].nbytes, 20 * points[index].seconds)
    fit = fit_timings(points)
    assert fit.model.alpha_s == pytest.approx(200e-6, rel=0.01)
    assert fit.model.beta_bytes_per_s == pytest.approx(12e9, rel=0.01)
    assert fit.residual < 0.01
    assert fit.worst_residual > 0.9  # but the outlier is reported


def test_noise_is_the_residual() -> None:
    noise = random.Random(1)
    points = [Timing(one.nbytes, one.seconds * noise.uniform(0.9, 1.1)) for one in timings(CostModel(1e-4, 1e9)) * 5]
    fit = fit_timings(points)
    assert fit.model.alpha_s == pytest.approx(1e-4, rel=0.05)
    assert fit.model.beta_bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert 0.02 < fit.residual < 0.1


def test_no_part_is_negative() -> None:
    through_origin = fit_timings([Timing(1000, 1e-6), Timing(2000, 4e-6), Timing(4000, 16e-6)])
    assert through_origin.model.alpha_s == 0
    level = fit_timings([Timing(1000, 3e-6), Timing(2000, 2e-6), Timing(4000, 1e-6)])
    assert level.model.beta_bytes_per_s == math.inf
    assert level.model.seconds(10**9) == level.model.alpha_s


def test_any_message_is_efficient_where_latency_or_efficiency_is_nothing() -> None:
    for model, efficiency in ((CostModel(1e-4, math.inf), 0.0), (CostModel(0.0, math.inf), 0.9)):
        assert model.smallest_bytes(efficiency) == 0
    assert CostModel(1e-4, math.inf).smallest_bytes(0.9) == math.inf


@given(st.lists(st.builds(Timing, st.integers(0, 2**40), st.floats(1e-9, 1e3)), min_size=2, max_size=8))
def test_any_timings_have_a_model(points: list[Timing]) -> None:
    if len({point.nbytes for point in points}) < 2:
        with pytest.raises(ConfigError, match="two sizes"):
            fit_timings(points)
        return
    fit = fit_timings(points)
    assert fit.model.alpha_s >= 0
    assert fit.model.beta_bytes_per_s > 0
    assert 0 <= fit.residual <= fit.worst_residual < math.inf


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_is_positive(seconds: float) -> None:
    with pytest.raises(ConfigError, match="cannot have taken"):
        fit_timings([Timing(1, 1.0), Timing(2, seconds)])
