"""How the bytes of one chunk are stored, and the checksum that goes with them.

Scope: encode and decode between two buffers of the caller, bounded by their sizes; xxh3.
Not here: where chunks stand (`layout.py`); which codec pays (`plan/`, `measure.py`).
Owner: none; codecs keep no state and may run in any number of threads at once.

[Note: GIL] Read and measured, xxhash 3.4.1 and 4.1.0, lz4 4.4.5, CPython 3.11 (another thread made progress inside one
call with a switch interval of 100 s): lz4.block compress and decompress release it; xxhash's `update` releases it above
64 KiB (4.x) or 100 kB (3.x); its one-shot functions only since 4.x. Hence `update` below.
"""

from __future__ import annotations

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


class Lz4Codec:
    """LZ4 blocks without a size prefix: the length is known, and a file's own word for it is not to be trusted.

    python-lz4 has no call into a given buffer: an encode holds up to twice the chunk for a moment, a decode exactly
    twice, never what the data asks for.
    """

    codec = Codec.LZ4

    def encode(self, source: Bytes, destination: Bytes) -> int:
        _flat(source, "source")
        _flat(destination, "destination")
        if source.size > _LZ4_LIMIT_BYTES:
            raise ConfigError(f"a chunk of {source.size} B is over the limit of lz4, {_LZ4_LIMIT_BYTES} B")
        if source.size == 0:
            return 0
        block = lz4.block.compress(source.data, store_size=False)
        if len(block) >= source.size:
            return _store_raw(source, destination)
        return _store_raw(np.frombuffer(block, np.uint8), destination)

    def decode(self, source: Bytes, destination: Bytes) -> None:
        _flat(source, "source")
        _flat(destination, "destination")
        if source.size == destination.size:
            destination[:] = source
            return
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


def codec_for(codec: Codec) -> ChunkCodec:
    """The codec that a configuration names."""
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
