"""Codecs are exact, bounded by the buffers that they are given, and refuse what they did not write."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import lz4.block
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.config import Codec
from tierstore.errors import ConfigError, FormatError
from tierstore.pack.codecs import ChunkCodec, checksum, checksum_bytes, codec_for

BITSHUFFLES = [Codec.LZ4_BITSHUFFLE, Codec.ZSTD_BITSHUFFLE]
CODECS = [codec_for(codec) for codec in (Codec.NONE, Codec.LZ4)]
CODECS += [codec_for(codec, item_bytes) for codec in BITSHUFFLES for item_bytes in (2, 4)]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=["none", "lz4", "lz4-2", "lz4-4", "zstd-2", "zstd-4"])
each_bitshuffle = pytest.mark.parametrize("codec", BITSHUFFLES)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)


@each_codec
@settings(max_examples=80)
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
    named = [codec for codec in Codec if codec is not Codec.AUTO]
    assert [codec_for(codec).codec for codec in named] == named
    with pytest.raises(ConfigError, match="'auto' is decided by measuring"):
        codec_for(Codec.AUTO)


@functools.cache
def bf16_weights(elements: int) -> np.ndarray:
    normal = np.random.default_rng(2).standard_normal(elements).astype(np.float32) * 0.02
    weights = (normal.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    weights.flags.writeable = False
    return weights


@pytest.mark.parametrize(
    ("codec", "least"), [(Codec.LZ4, 1.0), (Codec.LZ4_BITSHUFFLE, 1.3), (Codec.ZSTD_BITSHUFFLE, 1.35)]
)
def test_what_a_codec_gains_on_weights(codec: Codec, least: float) -> None:
    weights = bf16_weights(2**20)
    ratio = weights.size / codec_for(codec, 2).encode(weights, np.empty_like(weights))
    assert least <= ratio < least + 0.05


@each_bitshuffle
@pytest.mark.parametrize("item_bytes", [2, 3, 4, 8])
def test_every_length_comes_back(codec: Codec, item_bytes: int) -> None:
    """blosc2 itself returns other bytes if the length is no multiple of the element size."""
    source = np.repeat(np.arange(300, dtype=np.uint16), 2).view(np.uint8)
    shrunk = 0
    for size in range(900, 1200):
        stored, out = np.empty(size, np.uint8), np.zeros(size, np.uint8)
        used = codec_for(codec, item_bytes).encode(source[:size], stored)
        codec_for(codec, 1).decode(stored[:used], out)  # the frame says its element size
        assert (out == source[:size]).all()
        shrunk += used < size
    assert shrunk == 300


@each_bitshuffle
@pytest.mark.parametrize("item_bytes", [0, 256])
def test_an_element_size_that_is_none_is_refused(codec: Codec, item_bytes: int) -> None:
    with pytest.raises(ConfigError, match="an element has 1 to 255 B"):
        codec_for(codec, item_bytes)


def frame_of(codec: Codec, source: np.ndarray) -> np.ndarray:
    stored = np.empty(source.size, np.uint8)
    return stored[: codec_for(codec, 2).encode(source, stored)].copy()


@each_bitshuffle
def test_a_header_that_encode_does_not_write_is_refused(codec: Codec) -> None:
    """blosc2 writes as many bytes as a frame claims, even beyond the destination; so no frame gets there unchecked."""
    source = bf16_weights(4096)
    frame = frame_of(codec, source)
    harmless = {1, 3, 8, 9, 10}  # the codec's own version; other elements and blocks
    for at in range(32):
        for bit in range(8):
            bad, out = frame.copy(), np.full(source.size, 7, np.uint8)
            bad[at] ^= 1 << bit
            if at in harmless or (at == 2 and bit == 4):  # bit 4: whether streams are split
                continue
            with pytest.raises(FormatError, match=f"{codec.value} frame of"):
                codec_for(codec, 2).decode(bad, out)
            assert (out == 7).all()
    other = frame_of(BITSHUFFLES[1 - BITSHUFFLES.index(codec)], source)
    with pytest.raises(FormatError, match=f"not a {codec.value} frame"):
        codec_for(codec, 2).decode(other, np.empty(source.size, np.uint8))


@each_bitshuffle
@settings(max_examples=150)
@given(data=st.data())
def test_a_hostile_frame_changes_nothing_beyond_the_destination(codec: Codec, data: st.DataObject) -> None:
    """Valid headers, followed by anything: flipped, cut, random."""
    source = bf16_weights(2**15)
    frame = frame_of(codec, source)
    size = data.draw(st.integers(33, frame.size))
    bad = frame[:size].copy()
    bad[12:16] = np.frombuffer(size.to_bytes(4, "little"), np.uint8)
    bad[3] = data.draw(st.sampled_from([1, 2, 4, 8, 255]))
    if data.draw(st.booleans()):
        noise_seed = data.draw(st.integers(0, 2**32))
        bad[32:] = np.random.default_rng(noise_seed).integers(0, 256, size - 32, dtype=np.uint8)
    for at, value in data.draw(st.lists(st.tuples(st.integers(32, size - 1), st.integers(0, 255)), max_size=8)):
        bad[at] = value
    room = np.full(source.size + 2 * 4096, 0xEE, np.uint8)
    with contextlib.suppress(FormatError):
        codec_for(codec, 2).decode(bad, room[4096:-4096])
    assert (room[:4096] == 0xEE).all()
    assert (room[-4096:] == 0xEE).all()


@each_bitshuffle
def test_many_threads_share_nothing(codec: Codec) -> None:
    way = codec_for(codec, 2)
    sources = [np.roll(bf16_weights(2**17), 2 * shift) for shift in range(8)]

    def work(source: np.ndarray) -> bool:
        stored, out = np.empty_like(source), np.empty_like(source)
        for _ in range(10):
            out[:] = 0
            way.decode(stored[: way.encode(source, stored)], out)
            if (out != source).any():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, sources))


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


@pytest.mark.parametrize(
    ("what", "named"),
    [("checksum", Codec.LZ4), *((what, named) for what in ("encode", "decode") for named in (Codec.LZ4, *BITSHUFFLES))],
)
def test_the_gil_is_released(what: str, named: Codec) -> None:
    """With a switch interval of minutes, this thread runs during the other's call only if that releases the GIL."""
    source = np.random.default_rng(0).integers(0, 4, 2**26 if what == "checksum" else 2**23, dtype=np.uint8)
    stored, out = np.empty_like(source), np.empty_like(source)
    codec = codec_for(named, 2)
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
