"""Rates: JSON form, scaling, shared disks, and the estimator."""

from __future__ import annotations

import json
import math

import pytest

from tierstore.errors import ConfigError, FormatError
from tierstore.plan.bandwidth import BandwidthTable, Estimator

TABLE = BandwidthTable(1.10e9, 1.38e9, 1.22e9, 25e9, 24e9, 10e9, 1.3e9)


def test_json_round_trip() -> None:
    assert BandwidthTable.from_json(json.loads(json.dumps(TABLE.to_json()))) == TABLE


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {**TABLE.to_json(), "more": 1.0},
        {**TABLE.to_json(), "h2d_bytes_per_s": "fast"},
        {**TABLE.to_json(), "h2d_bytes_per_s": True},
        {**TABLE.to_json(), "h2d_bytes_per_s": 0},
        {**TABLE.to_json(), "h2d_bytes_per_s": math.nan},
        {**TABLE.to_json(), "h2d_bytes_per_s": 10**400},
    ],
)
def test_what_is_not_a_table_is_a_format_error(value: object) -> None:
    with pytest.raises(FormatError):
        BandwidthTable.from_json(value)


def test_rates_are_positive() -> None:
    with pytest.raises(ConfigError, match="h2d_bytes_per_s"):
        TABLE.scaled(links=0)


def test_scaling_touches_only_its_part() -> None:
    scaled = TABLE.scaled(disk=2, compute=3)
    assert (scaled.read_bytes_per_s, scaled.shared_bytes_per_s) == (2.2e9, 2.44e9)
    assert (scaled.h2d_bytes_per_s, scaled.d2h_bytes_per_s) == (TABLE.h2d_bytes_per_s, TABLE.d2h_bytes_per_s)
    assert scaled.adam_elements_per_s == pytest.approx(3.9e9)
    assert scaled.memory_bytes_per_s == 30e9


def test_reads_and_writes_share_the_disk() -> None:
    assert TABLE.disk_seconds(1.10e9, 0) == pytest.approx(1)
    assert TABLE.disk_seconds(0, 1.38e9) == pytest.approx(1)
    assert TABLE.disk_seconds(0.61e9, 0.61e9) == pytest.approx(1)
    assert TABLE.disk_seconds(1.22e9, 0.61e9) == pytest.approx(1 + 0.61 / 1.10, rel=0.01)


def test_a_full_duplex_disk_hides_the_shorter_way() -> None:
    duplex = BandwidthTable(1e9, 2e9, 3e9, 1.0, 1.0, 1.0, 1.0)
    assert duplex.disk_seconds(1e9, 1e9) == pytest.approx(1)
    assert duplex.disk_seconds(1e9, 4e9) == pytest.approx(2)


def test_an_estimate_needs_enough_observations() -> None:
    estimator = Estimator(weight=0.5, enough=3)
    for _ in range(2):
        estimator.observe(100, 1)
    assert estimator.bytes_per_s is None
    assert not estimator.drifted(1, 2)
    estimator.observe(100, 1)
    assert estimator.bytes_per_s == 100


def test_small_transfers_count_little() -> None:
    estimator = Estimator(enough=2)
    estimator.observe(1_000_000, 1.0)
    estimator.observe(1, 0.01)
    assert estimator.bytes_per_s == pytest.approx(1_000_001 / 1.01)
    estimator.observe(0, 1.0)
    estimator.observe(5, 0.0)
    assert estimator.observations == 2


def test_drift_is_noticed_both_ways_and_forgotten() -> None:
    estimator = Estimator(weight=0.25, enough=1)
    estimator.observe(100, 1)
    assert not estimator.drifted(100, 1.5)
    for _ in range(20):
        estimator.observe(100, 4)
    assert estimator.drifted(100, 1.5)
    assert estimator.drifted(5, 1.5)
    for _ in range(40):
        estimator.observe(100, 1)
    assert not estimator.drifted(100, 1.5)


@pytest.mark.parametrize(("weight", "enough"), [(0.0, 1), (1.1, 1), (0.5, 0)])
def test_estimator_options_are_checked(weight: float, enough: int) -> None:
    with pytest.raises(ConfigError):
        Estimator(weight, enough)
