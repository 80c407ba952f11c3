"""The ratio of a codec on given bytes, and its rates on one core.

Scope: timing `codecs.py` on samples.
Not here: which bytes (`train/codec_trial.py`, `apps/codecs.py`), what follows from the rates (`plan/codec_choice.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from tierstore.config import Codec
from tierstore.pack.codecs import Bytes, codec_for
from tierstore.plan.bandwidth import CodecRates

_REPEATS = 3
COMPRESSING = tuple(codec for codec in Codec if codec not in (Codec.NONE, Codec.AUTO))
"""Codecs that may shrink bytes, the fastest first."""


def measure_codec(
    codec: Codec,
    item_bytes: int,
    samples: Sequence[Bytes],
    data: str,
    clock: Callable[[], float] = time.perf_counter,
) -> CodecRates:
    """Encode and decode samples, each as a chunk of its own; rates are medians of three passes over all.

    Args:
        data: what the samples are, in a word.
    Threads: runs in the caller's thread; other work on its core lowers the rates.
    """
    way = codec_for(codec, item_bytes)
    rooms = [np.zeros(sample.size, np.uint8) for sample in samples]
    raw_bytes = sum(sample.size for sample in samples)
    stored: list[Bytes] = []
    encoding_s, decoding_s = [], []
    for _ in range(_REPEATS):
        start = clock()
        used = [way.encode(sample, room) for sample, room in zip(samples, rooms)]
        encoding_s.append(clock() - start)
        stored = [room[:nbytes].copy() for room, nbytes in zip(rooms, used)]
        start = clock()
        for frame, room in zip(stored, rooms):
            way.decode(frame, room)
        decoding_s.append(clock() - start)
    return CodecRates(
        codec, data, raw_bytes / max(1, sum(frame.size for frame in stored)),
        raw_bytes / max(median(encoding_s), 1e-9), raw_bytes / max(median(decoding_s), 1e-9),
    )  # fmt: skip
