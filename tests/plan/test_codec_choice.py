"""Which codec pays: worked numbers on both sides of the break-even, and the reason in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import Codec
from tierstore.plan.bandwidth import CodecRates
from tierstore.plan.codec_choice import Conditions, choose_codec, seconds_per_byte
from tierstore.plan.costs import codec_break_even_bytes_per_s, pays_below_bytes_per_s
from tierstore.plan.placement import Kind

FAST = CodecRates(Codec.LZ4_BITSHUFFLE, "bf16", 1.25, 2e9, 4e9)
SMALL = CodecRates(Codec.ZSTD_BITSHUFFLE, "bf16", 1.5, 0.5e9, 1e9)
NOTHING = CodecRates(Codec.LZ4, "bf16", 1.0, 4e9, 9e9)


def conditions(disk: float, cores: int = 1, *, is_overlapped: bool = False) -> Conditions:
    return Conditions(disk, disk, cores, is_overlapped)


def test_in_series_the_time_of_a_step_adds_up() -> None:
    """1 B written and 1 B read: 0.8 B of the disk each way, and 1 / 2e9 + 1 / 4e9 s of the core."""
    found = seconds_per_byte(Kind.STATE, FAST, conditions(1e8))
    assert found == pytest.approx(2 * 0.8 / 1e8 + 1 / 2e9 + 1 / 4e9)
    weights = seconds_per_byte(Kind.WEIGHTS, FAST, conditions(1e8))  # read for forward and for backward
    assert weights == pytest.approx(found + 0.8 / 1e8 + 1 / 4e9)
    twice = seconds_per_byte(Kind.STATE, FAST, conditions(1e8, cores=2))
    assert twice == pytest.approx(2 * 0.8 / 1e8 + 1 / 4e9 + 1 / 8e9)


def test_overlapped_the_slower_counts() -> None:
    found = seconds_per_byte(Kind.STATE, SMALL, conditions(1e9, is_overlapped=True))
    assert found == pytest.approx(1 / 0.5e9 + 1 / 1e9)
    found = seconds_per_byte(Kind.STATE, SMALL, conditions(1e9, cores=8, is_overlapped=True))
    assert found == pytest.approx(2 / 1.5e9)


@pytest.mark.parametrize(
    ("disk", "cores", "is_overlapped", "expected"),
    [
        (2e7, 1, False, Codec.ZSTD_BITSHUFFLE),  # a network disk
        (2e8, 1, False, Codec.LZ4_BITSHUFFLE),
        (2e9, 1, False, Codec.NONE),  # an NVMe disk
        (2e9, 16, True, Codec.ZSTD_BITSHUFFLE),  # cores to spare
        (2e10, 16, True, Codec.LZ4_BITSHUFFLE),
        (2e11, 16, True, Codec.NONE),
    ],
)
def test_the_slower_the_disk_the_smaller_the_chunks(
    disk: float, cores: int, is_overlapped: bool, expected: Codec
) -> None:
    choice = choose_codec(Kind.STATE, [NOTHING, FAST, SMALL], conditions(disk, cores, is_overlapped=is_overlapped))
    assert choice.codec is expected


def test_the_sentence_has_the_rates_that_decided() -> None:
    assert choose_codec(Kind.STATE, [FAST], Conditions(2e8, 1e8, 2, False)).why == (
        "1.21 x as fast as the raw disk: ratio 1.25, 2.00 GB/s in and 4.00 GB/s out a core on 2 cores that the model "
        "computes on too; the disk reads 0.20 GB/s and writes 0.10 GB/s"
    )
    assert choose_codec(Kind.STATE, [FAST], Conditions(4e9, 2e9, 1, True)).why == (
        "lz4-bitshuffle, the best, is 1.00 x as fast as the raw disk: ratio 1.25, 2.00 GB/s in and 4.00 GB/s out "
        "a core on 1 core; the disk reads 4.00 GB/s and writes 2.00 GB/s"
    )
    assert choose_codec(Kind.STATE, [NOTHING], conditions(1e7)).why == "no codec makes it smaller by 5%"
    assert choose_codec(Kind.STATE, [], conditions(1e7)).codec is Codec.NONE


def test_a_gain_within_the_noise_is_none() -> None:
    barely = CodecRates(Codec.LZ4_BITSHUFFLE, "fp32", 1.06, 4e9, 4e9)
    assert choose_codec(Kind.STATE, [barely], conditions(1e8)).codec is Codec.NONE


@given(st.floats(1.01, 10), st.floats(1e6, 1e11))
def test_the_break_even_is_that_of_the_other_side(ratio: float, rate: float) -> None:
    disk = pays_below_bytes_per_s(ratio, rate)
    assert codec_break_even_bytes_per_s(disk, ratio) == pytest.approx(rate)


def test_what_shrinks_nothing_pays_on_no_disk() -> None:
    assert pays_below_bytes_per_s(1.0, 1e12) == 0
