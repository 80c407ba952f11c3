"""Codecs are exact, bounded by the buffers that they are given, and refuse what they did not write."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc

import lz4.block
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.config import Codec
from tierstore.errors import ConfigError, FormatError
from tierstore.pack.codecs import ChunkCodec, checksum, checksum_bytes, codec_for

CODECS = [codec_for(codec, item_bytes=2) for codec in Codec]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=[codec.codec.value for codec in CODECS])


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)


@each_codec
@settings(deadline=None, max_examples=80)
@given(data=st.binary(max_size=300) | st.builds(lambda a, n: a * n, st.binary(max_size=4), st.integers(0, 500)))
def test_round_trip(codec: ChunkCodec, data: bytes) -> None:
    stored = np.full(len(data) + 7, 0xEE, np.uint8)
    used = codec.encode(array(data), stored)
    assert used <= len(data)
    assert (stored[used:] == 0xEE).all()
    out = np.zeros(len(data), np.uint8)
    codec.decode(stored[:used], out)
    assert out.tobytes() == data


def test_codec_for_gives_the_codec_that_was_named() -> None:
    assert [codec_for(codec).codec for codec in Codec] == list(Codec)


def test_lz4_shrinks_what_repeats_and_keeps_noise_raw() -> None:
    codec, zeros = codec_for(Codec.LZ4), np.zeros(10_000, np.uint8)
    assert codec.encode(zeros, np.empty(10_000, np.uint8)) < 100
    source, stored = noise(10_000), np.empty(10_000, np.uint8)
    assert codec.encode(source, stored) == 10_000
    assert (stored == source).all()


@each_codec
def test_a_destination_that_is_too_small_is_refused(codec: ChunkCodec) -> None:
    with pytest.raises(ConfigError, match="1000 B do not fit a destination of 999 B"):
        codec.encode(noise(1000), np.empty(999, np.uint8))


@each_codec
def test_a_wrong_length_is_refused(codec: ChunkCodec) -> None:
    source = np.zeros(1000, np.uint8)
    stored = np.empty(1000, np.uint8)
    used = codec.encode(source, stored)
    for size in (0, 999, 1001, 5000):
        out = np.full(size, 7, np.uint8)
        with pytest.raises(FormatError):
            codec.decode(stored[:used], out)
        assert (out == 7).all()


def test_a_bomb_is_refused_without_its_allocation() -> None:
    """66 kB that give 16 MiB, for a chunk of 128 KiB."""
    bomb = array(lz4.block.compress(bytes(2**24), store_size=False))
    out = np.zeros(2**17, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"{bomb.size} B does not give 131072 B"):
            codec_for(Codec.LZ4).decode(bomb, out)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


def test_corrupt_lz4_gives_format_error_or_bytes_of_the_right_length() -> None:
    source = array(b"the quick brown fox " * 40)
    stored = np.empty(source.size, np.uint8)
    block = stored[: codec_for(Codec.LZ4).encode(source, stored)]
    generator = np.random.default_rng(3)
    refused = 0
    for _ in range(2000):
        bad = block.copy()[: int(generator.integers(0, block.size + 1))]
        if bad.size:
            bad[generator.integers(0, bad.size, 2)] = generator.integers(0, 256, 2)
        try:
            codec_for(Codec.LZ4).decode(bad, np.empty(source.size, np.uint8))
        except FormatError:
            refused += 1
    assert refused > 1500  # the rest is what the checksum is for


@each_codec
def test_buffers_of_another_kind_are_refused(codec: ChunkCodec) -> None:
    good = np.zeros(8, np.uint8)
    for bad in (np.zeros(8, np.int8), np.zeros((2, 4), np.uint8), np.zeros(16, np.uint8)[::2]):
        with pytest.raises(ConfigError, match="1-D contiguous uint8"):
            codec.encode(bad, good)
        with pytest.raises(ConfigError, match="1-D contiguous uint8"):
            codec.decode(good, bad)


@pytest.mark.parametrize("size", [0, 1, 16, 17, 128, 240, 241, 1000, 65_536, 65_537, 300_000])
def test_checksum_is_xxh3_64(size: int) -> None:
    data = noise(size)
    assert checksum(data) == checksum_bytes(data.tobytes()) == xxhash.xxh3_64_intdigest(data.tobytes())


def test_checksum_of_the_format_never_changes() -> None:
    """Stores keep these numbers: xxh3 with the default secret and no seed."""
    assert checksum_bytes(b"") == 0x2D06800538D394C2
    assert checksum(array(b"abc")) == 0x78AF5F94892F3950


@pytest.mark.parametrize("what", ["checksum", "encode", "decode"])
def test_the_gil_is_released(what: str) -> None:
    """With a switch interval of minutes, this thread runs inside the other's call only if the call lets it."""
    source = np.random.default_rng(0).integers(0, 4, 2**26 if what == "checksum" else 2**23, dtype=np.uint8)
    stored, out = np.empty_like(source), np.empty_like(source)
    codec = codec_for(Codec.LZ4)
    block = stored[: codec.encode(source, stored)].copy()
    calls = {
        "checksum": lambda: checksum(source),
        "encode": lambda: codec.encode(source, stored),
        "decode": lambda: codec.decode(block, out),
    }
    marks: list[float] = []

    def work() -> None:
        marks.append(time.perf_counter())
        for _ in range(3):
            calls[what]()
        marks.append(time.perf_counter())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        ticks = []
        while thread.is_alive():
            ticks.append(time.perf_counter())
            time.sleep(0)  # not a wait: offers the GIL
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert any(marks[0] < tick < marks[1] for tick in ticks)
