"""Which codec pays for a checkpoint's own tensors: measured on chunks of them, decided by what the pack is for.

Scope: samples, ratios and rates, the choice for each dtype and its reason.
Not here: codecs (`pack/codecs.py`).
Owner: none; nothing is kept between calls.

[Note: what pays] Of a pack from which a disk of rate B is read, content arrives at the rate min(C, R * B), with R the
ratio and C the rate of decoding in all cores: reading the next chunk and decoding this one overlap. The codec that
gives the highest rate is taken. Of an archive, for which no rate is named, the smallest is taken. A codec that gains
less than 2 % is not worth its seconds.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.alignment import ALIGNMENT
from tierstore.archive.gather import Content, OpenFiles
from tierstore.archive.sources import Source, SourceTensor
from tierstore.config import Codec
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend
from tierstore.pack.codecs import codec_for
from tierstore.pack.layout import DTYPE_BITS

Bytes = npt.NDArray[np.uint8]

AUTO = "auto"
_SAMPLES = 3
_LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class Trial:
    """A codec on samples of one dtype; rates are content bytes per second of one core."""

    codec: Codec
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec of one dtype, and why."""

    codec: Codec
    reason: str
    trials: tuple[Trial, ...]

    def as_json(self) -> dict[str, object]:
        trials = [
            {"codec": one.codec.value, "ratio": one.ratio, "encode_bytes_per_s": one.encode_bytes_per_s,
             "decode_bytes_per_s": one.decode_bytes_per_s}
            for one in self.trials
        ]  # fmt: skip
        return {"codec": self.codec.value, "reason": self.reason, "trials": trials}


def codec_named(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: there is none.
    """
    names = [codec.value for codec in Codec]
    if name not in names:
        raise ConfigError(f"there is no codec {name!r}; the codecs are {', '.join([*names, AUTO])}")
    return Codec(name)


def choose(source: Source, chunk_bytes: int, read_bytes_per_s: float | None) -> dict[str, Choice]:
    """For each dtype of a checkpoint, the codec that pays; see [Note: what pays]. Reads a few chunks of each."""
    by_dtype: dict[str, list[SourceTensor]] = defaultdict(list)
    for tensor in source.tensors.values():
        by_dtype[tensor.spec.dtype].append(tensor)
    cores = os.cpu_count() or 1
    with OpenFiles(Backend()) as files:
        return {
            dtype: decide([measure(codec, item_width(dtype), samples) for codec in Codec if codec is not Codec.NONE] if samples else [],
                          read_bytes_per_s, cores)
            for dtype, tensors in by_dtype.items()
            for samples in [_samples(tensors, files, chunk_bytes)]
        }  # fmt: skip


def decide(trials: Sequence[Trial], read_bytes_per_s: float | None, cores: int) -> Choice:
    """See [Note: what pays]."""
    if not trials:
        return Choice(Codec.NONE, "there are no bytes to encode", ())
    if read_bytes_per_s is None:
        best = max(trials, key=lambda trial: trial.ratio)
        gain = best.ratio
        reason = f"smallest: ratio {best.ratio:.3f}, decodes at {best.decode_bytes_per_s / 1e9:.2f} GB/s a core"
    else:
        disk = read_bytes_per_s

        def rate(trial: Trial) -> float:
            return min(trial.decode_bytes_per_s * cores, trial.ratio * disk)

        best = max(trials, key=rate)
        gain = rate(best) / disk
        reason = (
            f"content at {rate(best) / 1e9:.2f} GB/s against {disk / 1e9:.2f} raw: ratio {best.ratio:.3f}, decodes at "
            f"{best.decode_bytes_per_s * cores / 1e9:.2f} GB/s in {cores} cores"
        )
    if gain < _LEAST_GAIN:
        return Choice(Codec.NONE, f"none pays; the best is {best.codec.value}, {reason}", tuple(trials))
    return Choice(best.codec, reason, tuple(trials))


def measure(codec: Codec, item_bytes: int, samples: Sequence[Bytes], clock: Callable[[], float] = time.perf_counter) -> Trial:
    """Ratio and rates of a codec, the faster of two runs each: the first one warms up."""
    coder = codec_for(codec, item_bytes)
    content = sum(len(sample) for sample in samples)
    stored, encode_s, decode_s = 0, 0.0, 0.0
    for sample in samples:
        room, back = np.empty_like(sample), np.empty_like(sample)
        start = clock()
        length = coder.encode(sample, room)
        middle = clock()
        encode_s += middle - start
        stored += length
        coder.decode(room[:length], back)
        start = clock()
        coder.decode(room[:length], back)
        decode_s += clock() - start
    return Trial(codec, content / stored, content / max(encode_s, 1e-9), content / max(decode_s, 1e-9))


def _samples(tensors: Sequence[SourceTensor], files: OpenFiles, chunk_bytes: int) -> list[Bytes]:
    """A chunk from the middle of the largest tensors of a dtype, first, middle and last of them by size."""
    large = sorted((one for one in tensors if _nbytes(one)), key=_nbytes, reverse=True)[: 2 * _SAMPLES]
    picked = large[:: max(1, len(large) // _SAMPLES)][:_SAMPLES]
    samples = []
    for tensor in picked:
        nbytes = min(chunk_bytes, _nbytes(tensor))
        room: Bytes = np.empty(nbytes + 3 * ALIGNMENT, np.uint8)
        sample: Bytes = np.empty(nbytes, np.uint8)
        begin = (_nbytes(tensor) - nbytes) // 2 // ALIGNMENT * ALIGNMENT
        Content(tensor.pieces).read(files, begin, sample, room[-room.ctypes.data % ALIGNMENT :])
        samples.append(sample)
    return samples


def item_width(dtype: str) -> int:
    """Bytes of an element, for codecs that shuffle; a byte holds several of the smallest."""
    return max(1, DTYPE_BITS[dtype] // 8)


def _nbytes(tensor: SourceTensor) -> int:
    return sum(piece.nbytes for piece in tensor.pieces)
