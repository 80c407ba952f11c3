"""How the bytes of one chunk are stored, and the checksum that goes with them.

Scope: encode and decode between two buffers of the caller, bounded by their sizes; xxh3.
Not here: where chunks stand (`layout.py`); which codec pays (`plan/`, `measure/`).
Owner: none; codecs keep no state and may run in any number of threads at once.

[Note: GIL] Read and measured, xxhash 3.4.1 and 4.1.0, lz4 4.4.5, CPython 3.11 (another thread made progress inside one
call with a switch interval of 100 s): lz4.block compress and decompress release it; xxhash's `update` releases it above
64 KiB (4.x) or 100 kB (3.x); its one-shot functions only since 4.x. Hence `update` below. blosc2 (4.14.1) holds it
unless `set_releasegil(True)` was called in the process (done below), and then releases it at every size.
`compress2` and `decompress2` make a context of their own for each call and share nothing, so threads may call at once;
`nthreads=1` because the threads are ours.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import lz4.block
import numpy as np
import xxhash

from tierstore.config import Codec
from tierstore.errors import ConfigError, FormatError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_LZ4_LIMIT_BYTES = 0x7E000000
"""LZ4_MAX_INPUT_SIZE of lz4.h."""


def checksum(array: Bytes) -> int:
    """xxh3 (64 bits) of the array's bytes. Threads: the GIL is released for large arrays, see [Note: GIL]."""
    digest = xxhash.xxh3_64()
    digest.update(_flat(array, "array").data)
    return int(digest.intdigest())


def checksum_bytes(data: bytes) -> int:
    """xxh3 (64 bits) of `data`; the same number as `checksum` of an array that holds it."""
    return int(xxhash.xxh3_64_intdigest(data))


class ChunkCodec(Protocol):
    """One way to store a chunk.

    A chunk that does not shrink is stored raw, so what is stored never exceeds the chunk, and a stored length equal to
    the chunk's means raw: `decode` needs no flag.
    """

    codec: Codec

    def encode(self, source: Bytes, destination: Bytes) -> int:
        """Store `source` at the start of `destination` (at least as long); returns the bytes used."""

    def decode(self, source: Bytes, destination: Bytes) -> None:
        """Fill `destination` exactly from `source`, the bytes that `encode` used.

        Raises:
            FormatError: not what `encode` wrote, or not of this length; `destination` is unchanged.
        """


class RawCodec:
    """Bytes as they are."""

    codec = Codec.NONE

    def encode(self, source: Bytes, destination: Bytes) -> int:
        return _store_raw(_flat(source, "source"), _flat(destination, "destination"))

    def decode(self, source: Bytes, destination: Bytes) -> None:
        if source.size != destination.size:
            raise FormatError(f"a raw chunk of {destination.size} B is stored as {source.size} B")
        _flat(destination, "destination")[:] = _flat(source, "source")


class _Shrinking:
    """The common part of codecs that shorten chunks: a chunk that they do not shorten is stored raw."""

    codec: Codec

    def encode(self, source: Bytes, destination: Bytes) -> int:
        _flat(source, "source")
        _flat(destination, "destination")
        if source.size == 0:
            return 0
        frame = np.frombuffer(self._shortened(source), np.uint8)
        return _store_raw(frame if frame.size < source.size else source, destination)

    def decode(self, source: Bytes, destination: Bytes) -> None:
        _flat(source, "source")
        _flat(destination, "destination")
        if source.size == destination.size:
            destination[:] = source
        else:
            self._restore(source, destination)

    def _shortened(self, source: Bytes) -> bytes:
        raise NotImplementedError

    def _restore(self, source: Bytes, destination: Bytes) -> None:
        raise NotImplementedError


class Lz4Codec(_Shrinking):
    """LZ4 blocks without a size prefix: the length is known, and a length that the file gives cannot be trusted.

    python-lz4 cannot write to a given buffer: an encode holds up to twice the chunk for a moment, a decode exactly
    twice, never what the data asks for.
    """

    codec = Codec.LZ4

    def _shortened(self, source: Bytes) -> bytes:
        if source.size > _LZ4_LIMIT_BYTES:
            raise ConfigError(f"a chunk of {source.size} B is over the limit of lz4, {_LZ4_LIMIT_BYTES} B")
        block: bytes = lz4.block.compress(source.data, store_size=False)
        return block

    def _restore(self, source: Bytes, destination: Bytes) -> None:
        if source.size > destination.size or destination.size > _LZ4_LIMIT_BYTES:
            raise FormatError(f"an lz4 chunk of {destination.size} B is stored as {source.size} B")
        try:
            # uncompressed_size is the whole output buffer: a block that says more (a bomb) stops at its end.
            block = lz4.block.decompress(source.data, uncompressed_size=destination.size)
        except lz4.block.LZ4BlockError as error:
            raise FormatError(f"an lz4 block of {source.size} B does not give {destination.size} B: {error}") from None
        if len(block) != destination.size:
            raise FormatError(f"an lz4 block of {source.size} B gives {len(block)} B, not {destination.size} B")
        destination[:] = np.frombuffer(block, np.uint8)


@dataclass(frozen=True, slots=True)
class _Blosc2Way:
    """How one codec calls blosc2, and how its frames are marked.

    Attributes:
        format_flags: format of the blocks, the upper bits of byte 2 of a frame.
        code: the codec's number, byte 22 of a frame.
    """

    compressor: str
    level: int
    block_bytes: int
    format_flags: int
    code: int


# Ratio, GB/s encoded and GB/s decoded on one core (blosc2 4.14.1, 16 MiB of Gaussian weights, 2026-11-21), the bytes of
# an element in streams of their own. LZ4: bf16 1.32, 1.9, 3.3 and fp32 1.14, 1.9, 3.9, the same for blocks of 64 to 256
# KiB. Zstandard 1: bf16 1.36, 1.0, 1.7 with blocks of 1 MiB, 1.33 with 64 KiB; level 3 is no smaller, at half the rate.
_WAYS = {
    Codec.LZ4_BITSHUFFLE: _Blosc2Way("LZ4", 5, 2**17, 0x20, 1),
    Codec.ZSTD_BITSHUFFLE: _Blosc2Way("ZSTD", 1, 2**20, 0x80, 5),
}


@functools.cache
def _library() -> Any:
    """blosc2, imported when it is first used: the import takes half a second, and many runs never need it."""
    import blosc2

    blosc2.set_releasegil(True)  # for the whole process: blosc2 has no other way, see [Note: GIL]
    return blosc2


_HEADER_BYTES = 32
_FRAME_LIMIT_BYTES = 2**31 - 1 - _HEADER_BYTES
_LARGEST_BLOCK_BYTES = 2**24
_FORMAT_VERSION = 5
_IS_EXTENDED_BITSHUFFLE, _IS_NOT_SPLIT, _IS_ZEROS = 0x05, 0x10, 0x10


class BitshuffleCodec(_Shrinking):
    """One blosc2 frame (its chunk format): the bits of elements transposed, then LZ4 or Zstandard in blocks.

    The frame says its element size, so that any `item_bytes` decodes it. An encode holds up to twice the chunk for a
    moment, a decode the chunk and a block, because it decodes into the destination.

    Args:
        item_bytes: the size of the elements whose bits are alike. A chunk whose length is no multiple of it is
            transposed by bytes, because blosc2 (4.14.1) silently returns wrong bytes for an incomplete last element.
    """

    def __init__(self, codec: Codec, item_bytes: int) -> None:
        if not 1 <= item_bytes <= 255:
            raise ConfigError(f"elements of {item_bytes} B cannot be bit-shuffled; an element has 1 to 255 B")
        self.codec = codec
        self._way = _WAYS[codec]
        self._item_bytes = item_bytes

    def _shortened(self, source: Bytes) -> bytes:
        if source.size > _FRAME_LIMIT_BYTES:
            raise ConfigError(f"a chunk of {source.size} B is over the limit of blosc2, {_FRAME_LIMIT_BYTES} B")
        blosc2 = _library()
        frame: bytes = blosc2.compress2(
            source,
            codec=blosc2.Codec[self._way.compressor],
            clevel=self._way.level,
            typesize=self._item_bytes if source.size % self._item_bytes == 0 else 1,
            blocksize=self._way.block_bytes,
            filters=[blosc2.Filter.BITSHUFFLE],
            filters_meta=[0],
            splitmode=blosc2.SplitMode.ALWAYS_SPLIT,
            nthreads=1,
        )
        return frame

    def _restore(self, source: Bytes, destination: Bytes) -> None:
        self._check_header(source, destination.size)
        try:
            _library().decompress2(source, destination, nthreads=1)
        except (ValueError, RuntimeError) as error:
            raise FormatError(
                f"a {self.codec.value} frame of {source.size} B does not give {destination.size} B: {error}"
            ) from None

    def _check_header(self, source: Bytes, size_bytes: int) -> None:
        """Refuse frames that `encode` does not write: blosc2 trusts a frame in what it writes, and where."""
        name = self.codec.value
        if not _HEADER_BYTES <= source.size < size_bytes:
            raise FormatError(f"a {name} chunk of {size_bytes} B is stored as {source.size} B")
        header = source[:_HEADER_BYTES].tobytes()
        unpacked_bytes, block_bytes, frame_bytes = (int.from_bytes(header[at : at + 4], "little") for at in (4, 8, 12))
        if (unpacked_bytes, frame_bytes) != (size_bytes, source.size):
            raise FormatError(
                f"a {name} frame of {source.size} B says that it has {frame_bytes} B and gives {unpacked_bytes} B, "
                f"not {size_bytes} B; file damaged?"
            )
        filters = bytes((2, 0, 0, 0, 0, 0, self._way.code, 0, 0, 0, 0, 0, 0, 0, 0))  # bit transposition alone
        item_bytes, is_zeros = header[3], header[31] == _IS_ZEROS
        if (
            header[0] != _FORMAT_VERSION
            or header[2] & ~_IS_NOT_SPLIT != self._way.format_flags | _IS_EXTENDED_BITSHUFFLE
            or item_bytes == 0
            or size_bytes % item_bytes
            or not 1 <= block_bytes <= min(_LARGEST_BLOCK_BYTES, size_bytes)
            or header[16:31] != filters
            or not (header[31] == 0 or (is_zeros and source.size == _HEADER_BYTES))
        ):
            raise FormatError(f"not a {name} frame of tierstore: its header is {header.hex()}; file damaged?")


def codec_for(codec: Codec, item_bytes: int = 1) -> ChunkCodec:
    """The codec that a configuration names, for elements of `item_bytes`.

    Raises:
        ConfigError: "auto", which is not decided here.
    """
    if codec is Codec.AUTO:
        raise ConfigError("codec 'auto' is decided by measuring, where a store is made; name a codec here")
    if codec in _WAYS:
        return BitshuffleCodec(codec, item_bytes)
    return Lz4Codec() if codec is Codec.LZ4 else RawCodec()


def _store_raw(source: Bytes, destination: Bytes) -> int:
    if destination.size < source.size:
        raise ConfigError(f"{source.size} B do not fit a destination of {destination.size} B")
    destination[: source.size] = source
    return source.size


def _flat(array: Bytes, what: str) -> Bytes:
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ConfigError(f"{what} must be 1-D contiguous uint8, not {array.dtype} {array.shape}")
    return array
