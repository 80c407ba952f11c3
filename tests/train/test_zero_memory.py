"""What a rank holds at every stage, in bytes, computed by hand."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from runs import TinyModel
from sharing import Backwards, peaks

from tierstore.alignment import padded

BLOCK = 65536
# The tiny model, untied, in fp32. Elements of its groups: embedding and head 64 x 96 each, the last norm 2 x 96, and
# three blocks of: two norms (4 x 96), attention (3 x 96 x 96), projection (96 x 96 + 96), up and down
# (2 x 4 x 96 x 96 + 4 x 96 + 96).
BLOCK_ELEMENTS = 4 * 96 + 3 * 96 * 96 + (96 * 96 + 96) + (2 * 4 * 96 * 96 + 5 * 96)
SIZES = [64 * 96, 64 * 96, 2 * 96, *[BLOCK_ELEMENTS] * 3]
PARAMETERS = [1, 1, 2, 12, 12, 12]


def part(size: int) -> int:
    """Elements of each of two parts: whole chunks, here of one block of 65536."""
    return -(-size // (2 * BLOCK)) * BLOCK


@pytest.mark.parametrize("model", [TinyModel, Backwards])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_peaks_of_a_rank(stage: int, model: type[TinyModel]) -> None:
    parts = 2 if stage >= 2 else 1
    whole = [size if stage == 0 else 2 * part(size) for size in SIZES]  # on the device, with padding
    # A bucket holds the whole gradient and, behind each of its parts, a flag per parameter. Beside it is what is
    # left of it when it is scattered: the rank's part and its flags.
    buckets = [
        padded(4 * (elements + parts * flags + ((elements // 2 + flags) if stage >= 2 else 0)))
        for elements, flags in zip(whole, PARAMETERS)
    ]
    # The least that the device must hold beside a bucket: all weights up to stage 2, one block in stage 3.
    weights = [4 * elements for elements in (whole if stage < 3 else whole[3:4])]
    gpu_memory = sum(padded(nbytes) for nbytes in weights) + max(buckets)
    for rank, held in enumerate(run_ranks(2, peaks, stage, gpu_memory, model)):
        assert held["device_weights"] == sum(weights)
        assert held["device_gradients"] == max(buckets)
        # At rest: 4 B of weights, 8 B of moments and 4 B of gradient for every element that the rank keeps.
        kept = [size if stage == 0 else max(min(part(size), size - rank * part(size)), 0) for size in SIZES]
        assert held["resident"] == sum(padded(4 * elements) + padded(8 * elements) for elements in kept)
        assert held["gradients"] == sum(padded(4 * elements) for elements in kept)
