"""Loads of threads and memory: copies, codecs, checksums, Adam.

Scope: one load for each, on the same kind of bytes and in the same way as in the engine.
Not here: the device and its link (`links.py`), files (`disk.py`).
Owner: the caller owns the memory that loads are made over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tierstore.config import Codec
from tierstore.cores import update_threads
from tierstore.io.memory import Bytes
from tierstore.kernels.adam import AdamCoefficients, state_bytes_per_element, update
from tierstore.kernels.digests import digest
from tierstore.kernels.norms import square_sums
from tierstore.measure.loads import Load, by_turns
from tierstore.pack.codec_rates import COMPRESSING
from tierstore.pack.codecs import ChunkCodec, codec_for
from tierstore.plan.placement import BLOCK

_COPY_BYTES = 2**25
_CHECKED_BYTES = 2**23
_ADAM_ELEMENTS = 2**21
_ADAM_CHUNKS = 10  # 0.3 GB, which is not in the caches: a model's weights and state are not, either
_CODEC_BYTES = 2**22
_COEFFICIENTS = AdamCoefficients(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10)


def memory_copies(memory: Bytes) -> Load:
    """Copies within memory, on all cores, each time of other bytes; each byte counts once."""
    threads = update_threads()
    size = min(_COPY_BYTES, memory.nbytes // (2 * threads))
    halves = (memory[start : start + size] for start in range(0, memory.nbytes - size + 1, size))
    pairs = list(zip(halves, halves))

    def copy(pair: tuple[Bytes, Bytes]) -> None:
        ctypes.memmove(pair[0].ctypes.data, pair[1].ctypes.data, size)  # without the GIL

    return Load(by_turns(pairs, copy), size, threads)


def checksums(memory: Bytes) -> Load:
    """Checksums of chunks, on one thread; each time of another chunk, which is not in the caches, as after a read."""
    size = min(_CHECKED_BYTES, memory.nbytes)
    chunks = (memory[start : start + size] for start in range(0, memory.nbytes - size + 1, size))
    return Load(by_turns(chunks, digest), size)


def adam(dtype: str) -> Load:
    """One update per thread at a time; each time of another chunk, which is not in the caches.

    Two threads updated 1.9 to 2.4 G elements/s in a chunk each, and 1.34 in 0.9 GB; from 0.13 GB on, more memory made
    no difference (L3 of 300 MB, shared with other machines, 2026-12-01).
    """
    threads = update_threads()
    item, one = (np.float32, 1.0) if dtype == "fp32" else (np.uint16, 0x3F80)  # bits of 1.0 in bf16
    chunks = [
        (np.full(_ADAM_ELEMENTS, 0, item), np.full(_ADAM_ELEMENTS * state_bytes_per_element(dtype), 0, np.uint8),
         np.full(_ADAM_ELEMENTS, one, item))
        for _ in range(max(threads, _ADAM_CHUNKS))
    ]  # fmt: skip

    job = by_turns(chunks, lambda chunk: update(dtype, *chunk, 0, _ADAM_ELEMENTS, _COEFFICIENTS))
    return Load(job, _ADAM_ELEMENTS, threads)


def norms() -> Load:
    """Sums of squares of bf16 gradients, each thread over a chunk of its own."""
    threads = update_threads()
    chunks = [
        (np.full(_ADAM_ELEMENTS, 0x3F80, np.uint16), np.zeros(-(-_ADAM_ELEMENTS // BLOCK))) for _ in range(threads)
    ]
    return Load(by_turns(chunks, lambda chunk: square_sums("bf16", *chunk)), _ADAM_ELEMENTS, threads)


@dataclass(frozen=True, slots=True)
class CodecLoads:
    """One codec on one kind of data."""

    codec: Codec
    data: str
    ratio: float
    encode: Load
    decode: Load


def codecs() -> Mapping[str, CodecLoads]:
    """Every codec that compresses, by name (`lz4 bf16`), on random weights: normal, as after initialization.

    The rates are about those of trained weights; what a codec saves is measured on the user's own.
    """
    weights = (np.random.default_rng(0).standard_normal(_CODEC_BYTES // 4) * 0.02).astype(np.float32)
    bf16 = (weights.view(np.uint32) >> 16).astype(np.uint16)
    found = {}
    for codec in COMPRESSING:
        for data, source in (("bf16", bf16), ("fp32", weights)):
            coder = codec_for(codec, source.itemsize)
            found[f"{codec.value} {data}"] = _codec_loads(coder, data, source.view(np.uint8))
    return found


def _codec_loads(coder: ChunkCodec, data: str, source: Bytes) -> CodecLoads:
    stored, out = np.empty_like(source), np.empty_like(source)
    used = coder.encode(source, stored)
    other = np.empty_like(source)
    return CodecLoads(
        coder.codec, data, source.nbytes / used,
        Load(lambda: coder.encode(source, other), source.nbytes),
        Load(lambda: coder.decode(stored[:used], out), source.nbytes),
    )  # fmt: skip
