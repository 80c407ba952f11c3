"""For an archive the codec with the highest ratio; for a pack that is read, the one read fastest; none if none pays."""

from __future__ import annotations

import pytest

from tierstore.config import Codec
from tierstore.plan.archive_codec import choose_for_archive
from tierstore.plan.bandwidth import CodecRates

LZ4 = CodecRates(Codec.LZ4_BITSHUFFLE, "BF16", 1.25, 1e9, 3e9)
ZSTD = CodecRates(Codec.ZSTD_BITSHUFFLE, "BF16", 1.40, 0.5e9, 1e9)
PLAIN = CodecRates(Codec.LZ4, "BF16", 1.00, 5e9, 9e9)


@pytest.mark.parametrize(
    ("read_bytes_per_s", "cores", "codec", "reason"),
    [
        (None, 2, Codec.ZSTD_BITSHUFFLE, "smallest: ratio 1.400"),
        (1e9, 2, Codec.ZSTD_BITSHUFFLE, "content at 1.40 GB/s against 1.00 raw"),
        (2e9, 2, Codec.LZ4_BITSHUFFLE, "content at 2.50 GB/s against 2.00 raw"),
        (9e9, 2, Codec.NONE, "none pays; the best is lz4, content at 9.00 GB/s against 9.00 raw"),
        (9e9, 16, Codec.ZSTD_BITSHUFFLE, "content at 12.60 GB/s against 9.00 raw"),
    ],
)
def test_what_decides(read_bytes_per_s: float | None, cores: int, codec: Codec, reason: str) -> None:
    choice = choose_for_archive([PLAIN, LZ4, ZSTD], read_bytes_per_s, cores)
    assert choice.codec is codec
    assert choice.reason.startswith(reason)


def test_nothing_to_encode_and_nothing_gained() -> None:
    assert choose_for_archive([], None, 2).codec is Codec.NONE
    assert choose_for_archive([PLAIN], None, 2).reason.startswith("none pays; the best is lz4, smallest: ratio 1.000")
