"""Which codec pays for a checkpoint's own tensors: ratios and rates measured on chunks of them.

Scope: samples of each dtype, and every codec on them.
Not here: timing codecs (`pack/codec_rates.py`), the decision (`plan/archive_codec.py`).
Owner: none; nothing is kept between calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tierstore.alignment import ALIGNMENT
from tierstore.archive.gather import Content, OpenFiles
from tierstore.archive.sources import Source, SourceTensor
from tierstore.config import Codec
from tierstore.cores import available_cores
from tierstore.io.backend import Backend
from tierstore.io.memory import Bytes, aligned_room
from tierstore.pack.codec_rates import COMPRESSING, measure_codec
from tierstore.pack.layout import item_bytes
from tierstore.plan.archive_codec import ArchiveChoice, choose_for_archive
from tierstore.plan.bandwidth import CodecRates

_SAMPLES = 3


def measure(
    source: Source, chunk_bytes: int, codecs: Sequence[Codec] = COMPRESSING, *, backend: Backend | None = None
) -> dict[str, list[CodecRates]]:
    """Ratios and rates of codecs for each dtype of a checkpoint. Reads a few chunks of each dtype."""
    by_dtype: dict[str, list[SourceTensor]] = defaultdict(list)
    for tensor in source.tensors.values():
        by_dtype[tensor.spec.dtype].append(tensor)
    measured = {}
    with OpenFiles(backend or Backend()) as files:
        for dtype, tensors in by_dtype.items():
            samples = _samples(tensors, files, chunk_bytes) if codecs else []
            tried = codecs if samples else ()
            measured[dtype] = [measure_codec(codec, item_bytes(dtype), samples, dtype) for codec in tried]
    return measured


def choose(measured: Mapping[str, Sequence[CodecRates]], read_bytes_per_s: float | None) -> dict[str, ArchiveChoice]:
    """For each dtype, the codec that pays."""
    cores = available_cores()
    return {dtype: choose_for_archive(rates, read_bytes_per_s, cores) for dtype, rates in measured.items()}


def _samples(tensors: Sequence[SourceTensor], files: OpenFiles, chunk_bytes: int) -> list[Bytes]:
    """A chunk from the middle of some of the largest tensors of a dtype."""
    large = sorted((one for one in tensors if _nbytes(one)), key=_nbytes, reverse=True)[: 2 * _SAMPLES]
    samples = []
    for tensor in large[:: max(1, len(large) // _SAMPLES)][:_SAMPLES]:
        nbytes = min(chunk_bytes, _nbytes(tensor))
        sample: Bytes = np.empty(nbytes, np.uint8)
        begin = (_nbytes(tensor) - nbytes) // 2 // ALIGNMENT * ALIGNMENT
        Content(tensor.pieces).read(files, begin, sample, aligned_room(nbytes + 2 * ALIGNMENT))
        samples.append(sample)
    return samples


def _nbytes(tensor: SourceTensor) -> int:
    return sum(piece.nbytes for piece in tensor.pieces)
