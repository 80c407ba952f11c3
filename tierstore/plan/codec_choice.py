"""Which codec pays for one kind of chunks, and the sentence that says why.

Scope: the decision, from measured rates; formulas in `costs.py`.
Not here: measuring codecs (`pack/codec_rates.py`) and disks; which tensors are measured (`train/codec_trial.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.config import Codec
from tierstore.plan.bandwidth import CodecRates
from tierstore.plan.costs import codec_rate_bytes_per_s
from tierstore.plan.placement import Kind

WORTH = 1.05
"""A codec must be faster than the raw disk by this factor: a smaller gain is lost in the variation of rates."""
_READS_PER_WRITE = {Kind.WEIGHTS: 2.0, Kind.STATE: 1.0, Kind.GRADIENTS: 1.0}
"""In a step: weights are read for forward and for backward."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The disks and cores that a codec works with.

    Attributes:
        read_bytes_per_s, write_bytes_per_s: of all disks together.
        cores: how many of them encode and decode at once.
        is_overlapped: encoding and decoding hide behind the disk; False if the model computes on the same cores.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    cores: int
    is_overlapped: bool


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec for one kind, and the reason in words."""

    codec: Codec
    why: str


def choose_codec(kind: Kind, measured: Sequence[CodecRates], conditions: Conditions) -> CodecChoice:
    """The codec with which a step reads and writes this kind fastest; none if it gains less than `WORTH`."""
    raw_s = 1 / conditions.read_bytes_per_s * _READS_PER_WRITE[kind] + 1 / conditions.write_bytes_per_s
    # However fast a codec is, it gains no more than its ratio.
    smaller = [rates for rates in measured if rates.ratio >= WORTH]
    best = min(smaller, key=lambda rates: seconds_per_byte(kind, rates, conditions), default=None)
    if best is None:
        return CodecChoice(Codec.NONE, f"no codec makes it smaller by {WORTH - 1:.0%}")
    speedup = raw_s / seconds_per_byte(kind, best, conditions)
    facts = (
        f"ratio {best.ratio:.2f}, {best.encode_bytes_per_s / 1e9:.2f} GB/s in and "
        f"{best.decode_bytes_per_s / 1e9:.2f} GB/s out a core on {_cores(conditions)}; the disk reads "
        f"{conditions.read_bytes_per_s / 1e9:.2f} GB/s and writes {conditions.write_bytes_per_s / 1e9:.2f} GB/s"
    )
    if speedup >= WORTH:
        return CodecChoice(best.codec, f"{speedup:.2f} x as fast as the raw disk: {facts}")
    return CodecChoice(Codec.NONE, f"{best.codec.value}, the best, is {speedup:.2f} x as fast as the raw disk: {facts}")


def seconds_per_byte(kind: Kind, rates: CodecRates, conditions: Conditions) -> float:
    """Time that a step takes per raw byte of a kind, read and written as often as a step does."""
    ways = (
        (_READS_PER_WRITE[kind], conditions.read_bytes_per_s, rates.decode_bytes_per_s),
        (1.0, conditions.write_bytes_per_s, rates.encode_bytes_per_s),
    )
    return sum(
        times
        / codec_rate_bytes_per_s(
            disk, rates.ratio, codec * conditions.cores, overlapped=conditions.is_overlapped
        )
        for times, disk, codec in ways
    )


def _cores(conditions: Conditions) -> str:
    count = "1 core" if conditions.cores == 1 else f"{conditions.cores} cores"
    return count if conditions.is_overlapped else f"{count} that the model computes on too"
