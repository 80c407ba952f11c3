"""Rates: JSON form, scaling, shared disks, and the estimator."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.config import Codec
from tierstore.errors import ConfigError, FormatError
from tierstore.plan.bandwidth import (
    Activity,
    BandwidthTable,
    CodecRates,
    DirectoryRates,
    Estimator,
    NamedRate,
    Rate,
    Sizes,
    Slowdown,
)
from tierstore.plan.cost_model import CostModel
from tierstore.plan.layers import LayerKind, LayerWork, TimedLayer

TABLE = BandwidthTable(1.10e9, 1.38e9, 1.22e9, 25e9, 24e9, 10e9, 1.3e9)


RATE = Rate(1e9, 0.9e9, 1.2e9)
FULL = replace(
    TABLE,
    adam_fp32_elements_per_s=1.1e9,
    matmul_flop_per_s=5e13,
    directories=(DirectoryRates("/mnt/a", RATE, RATE, RATE, 2**20, 4, 2**23, 2, is_direct=False),),
    codecs=(CodecRates(Codec.LZ4, "bf16", 1.0, 2e9, 8e9),),
    slowdowns=(Slowdown(Activity.READ, Activity.WRITE, 1.8), Slowdown(Activity.ADAM, Activity.MATMUL, 2.0)),
    collective=CostModel(2e-4, 12e9, 1e-5),
    spreads=(NamedRate("read_bytes_per_s", RATE),),
    layers=(TimedLayer(LayerKind.BLOCK, "bf16", LayerWork(1.0, 7e6, 5e4, 9e8), 3e-3, 1e-2),),
    sizes=Sizes(64e9, 0, 80 * 2**30),
)


@pytest.mark.parametrize("table", [TABLE, FULL], ids=["seven rates", "everything"])
def test_json_round_trip(table: BandwidthTable) -> None:
    assert BandwidthTable.from_json(json.loads(json.dumps(table.to_json(), allow_nan=False))) == table


def test_the_seven_rates_alone_are_a_table() -> None:
    """As in files from before tables had a version."""
    rates = {name: rate for name, rate in TABLE.to_json().items() if name != "version"}
    assert len(rates) == 7
    assert BandwidthTable.from_json(rates) == TABLE


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_table_of_an_earlier_version_is_read(version: int) -> None:
    assert TABLE.to_json()["version"] == 4  # a release that does not know sizes refuses this version
    assert BandwidthTable.from_json(TABLE.to_json() | {"version": version}) == TABLE


def test_a_report_is_not_read() -> None:
    assert BandwidthTable.from_json({**FULL.to_json(), "report": {"cells": [None, {}]}}) == FULL


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_in_the_file_it_is_a_table_or_a_format_error(data: st.DataObject) -> None:
    value = json.loads(json.dumps(FULL.to_json()))
    place: Any = value
    while True:  # puts another value somewhere in it
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        place[key] = data.draw(JSON)
        break
    try:
        found = BandwidthTable.from_json(value)
    except FormatError:
        return
    assert BandwidthTable.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"h2d_bytes_per_s": "fast"}, "h2d_bytes_per_s: Input should be a valid number"),
        ({"more": 1.0}, "more: Unexpected name"),
        ({"h2d_bytes_per_s": -1.0}, "figures are positive and finite: {'h2d_bytes_per_s': -1.0}"),
        ({"codecs": [{"codec": "rar"}]}, "codecs.0.codec: Input should be 'none'"),
        ({"slowdowns": [{"activity": "read", "beside": "write", "factor": 0.0}]}, "{'factor': 0.0}"),
        ({"directories": [{**FULL.to_json()["directories"][0], "read_threads": 0}]}, "{'read_threads': 0}"),
        (
            {"directories": [{**FULL.to_json()["directories"][0], "read_block_bytes": 10**400}]},
            "figures are positive and finite: {'read_block_bytes': 1000",
        ),
        (
            {"directories": [{**FULL.to_json()["directories"][0], "read_threads": True}]},
            "read_threads: Input should be",
        ),
        ({"collective": {"alpha_s": -1, "beta_bytes_per_s": 1.0}}, "interconnect"),
        ({"sizes": {"cpu_bytes": 0, "nvme_bytes": 1}}, "figures are positive and finite: {'cpu_bytes': 0"),
        ({"sizes": {"cpu_bytes": 1, "nvme_bytes": -1}}, "nvme_bytes is 0 or more, and finite, not -1"),
        ({"version": 5}, "a bandwidth table of version 5; this tierstore reads versions 1, 2, 3, 4"),
        ({"version": True}, "version True"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(FormatError, match=re.escape(said)):
        BandwidthTable.from_json(FULL.to_json() | changed)


def test_slowdowns_are_found_by_pair() -> None:
    assert FULL.slowdown(Activity.ADAM, beside=Activity.MATMUL) == 2.0
    assert FULL.slowdown(Activity.MATMUL, beside=Activity.ADAM) == 1.0  # not measured


def test_nothing_is_faster_beside_something_else() -> None:
    table = replace(TABLE, slowdowns=(Slowdown(Activity.READ, Activity.MATMUL, 0.5),))
    assert table.slowdown(Activity.READ, beside=Activity.MATMUL) == 1.0
    assert BandwidthTable.from_json(table.to_json()) == table


def test_a_rate_is_the_median_between_the_quartiles() -> None:
    assert Rate.of([5.0]) == Rate(5.0, 5.0, 5.0)
    assert Rate.of([3.0, 1.0, 2.0]) == Rate(2.0, 1.0, 3.0)
    assert Rate.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Rate(3.0, 2.0, 4.0)
    assert Rate.of([1.0, 2.0, 3.0, 4.0, 100.0]).spread == pytest.approx(2 / 3)


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
        replace(TABLE, h2d_bytes_per_s=0)


def test_scaling_touches_only_its_part() -> None:
    scaled = TABLE.scaled(disk=2)
    assert (scaled.read_bytes_per_s, scaled.shared_bytes_per_s) == (2.2e9, 2.44e9)
    assert scaled.scaled(disk=0.5) == TABLE
    of_all = FULL.scaled(disk=2)
    assert of_all.read_bytes_per_s == 2.2e9
    assert of_all.matmul_flop_per_s == FULL.matmul_flop_per_s
    assert (of_all.directories, of_all.codecs, of_all.spreads) == ((), (), ())
    assert (of_all.slowdowns, of_all.collective) == (FULL.slowdowns, FULL.collective)


def test_reads_and_writes_share_the_disk() -> None:
    assert TABLE.disk_seconds(1.10e9, 0) == pytest.approx(1)
    assert TABLE.disk_seconds(0, 1.38e9) == pytest.approx(1)
    assert TABLE.disk_seconds(0.61e9, 0.61e9) == pytest.approx(1)
    assert TABLE.disk_seconds(1.22e9, 0.61e9) == pytest.approx(1 + 0.61 / 1.10, rel=0.01)


def test_a_full_duplex_disk_hides_the_shorter_way() -> None:
    duplex = BandwidthTable(1e9, 2e9, 3e9, 1.0, 1.0, 1.0, 1.0)
    assert duplex.disk_seconds(1e9, 1e9) == pytest.approx(1)
    assert duplex.disk_seconds(1e9, 4e9) == pytest.approx(2)


def test_what_is_written_is_synced_after_it() -> None:
    assert TABLE.durable_seconds(0.61e9, 0.61e9) == TABLE.disk_seconds(0.61e9, 0.61e9)  # nothing is known of syncs
    caching = replace(TABLE, sync_bytes_per_s=0.61e9)
    assert caching.durable_seconds(0.61e9, 0.61e9) == pytest.approx(2)
    assert caching.durable_seconds(1.10e9, 0) == pytest.approx(1)
    at_once = replace(TABLE, sync_bytes_per_s=20e9)
    assert at_once.durable_seconds(0.61e9, 0.61e9) == TABLE.disk_seconds(0.61e9, 0.61e9)
    assert caching.scaled(disk=2).durable_seconds(0.61e9, 0.61e9) == pytest.approx(1)


def test_a_sync_that_takes_next_to_nothing_finds_no_cache() -> None:
    rates = {None: False, 13.9e9: False, 13.7e9: True, 1e8: True}
    assert {rate: replace(TABLE, sync_bytes_per_s=rate).caches_writes for rate in rates} == rates


def test_an_estimate_needs_an_observation() -> None:
    estimator = Estimator(weight=0.5)
    assert estimator.bytes_per_s is None
    estimator.observe(100, 1)
    assert estimator.bytes_per_s == 100


def test_small_transfers_count_little() -> None:
    estimator = Estimator(weight=0.1)
    estimator.observe(1_000_000, 1.0)
    estimator.observe(1, 0.01)
    assert estimator.bytes_per_s == pytest.approx(1_000_001 / 1.01)
    estimator.observe(0, 1.0)
    estimator.observe(5, 0.0)
    assert estimator.observations == 2


def test_what_was_long_ago_is_forgotten() -> None:
    estimator = Estimator(weight=0.25)
    for seconds in (1, 4, 1):
        for _ in range(40):
            estimator.observe(100, seconds)
        assert estimator.bytes_per_s == pytest.approx(100 / seconds, rel=1e-3)


@pytest.mark.parametrize("weight", [0.0, 1.1])
def test_the_weight_of_an_estimator_is_checked(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight"):
        Estimator(weight)
