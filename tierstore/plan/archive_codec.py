"""Which codec pays for the chunks of an archive, from ratios and rates measured on them.

Scope: the decision and its reason. Not here: measuring (`pack/codec_rates.py`); training state (`codec_choice.py`).

[Note: what pays] A pack that is read from a disk of rate B gives content at the rate min(C, R * B), where R is the
ratio and C the decoding rate of all cores: reading the next chunk and decoding this one overlap. The codec with the
highest rate is taken. For an archive, for which no disk rate is given, the codec with the highest ratio is taken. A
codec that gains less than 2 % is not worth its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.config import Codec
from tierstore.plan.bandwidth import CodecRates
from tierstore.plan.costs import codec_rate_bytes_per_s

LEAST_GAIN = 1.02


@dataclass(frozen=True, slots=True)
class ArchiveChoice:
    """The codec for one dtype, and the reason in words."""

    codec: Codec
    reason: str
    measured: tuple[CodecRates, ...]


def choose_for_archive(measured: Sequence[CodecRates], read_bytes_per_s: float | None, cores: int) -> ArchiveChoice:
    """See [Note: what pays].

    Args:
        read_bytes_per_s: rate of the disk from which the pack will be read; None for an archive.
    """
    if not measured:
        return ArchiveChoice(Codec.NONE, "there are no bytes to encode", ())
    if read_bytes_per_s is None:
        best = max(measured, key=lambda one: one.ratio)
        gain = best.ratio
        reason = f"smallest: ratio {best.ratio:.3f}, decodes at {best.decode_bytes_per_s / 1e9:.2f} GB/s a core"
    else:
        disk = read_bytes_per_s

        def rate(one: CodecRates) -> float:
            return codec_rate_bytes_per_s(disk, one.ratio, one.decode_bytes_per_s * cores, overlapped=True)

        best = max(measured, key=rate)
        gain = rate(best) / disk
        reason = (
            f"content at {rate(best) / 1e9:.2f} GB/s against {disk / 1e9:.2f} raw: ratio {best.ratio:.3f}, decodes at "
            f"{best.decode_bytes_per_s * cores / 1e9:.2f} GB/s in {cores} cores"
        )
    if gain < LEAST_GAIN:
        return ArchiveChoice(Codec.NONE, f"none pays; the best is {best.codec.value}, {reason}", tuple(measured))
    return ArchiveChoice(best.codec, reason, tuple(measured))
