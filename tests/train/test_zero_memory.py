"""What a rank holds at every stage, in bytes, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import call, run_in_turn
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


CASES = [(0, TinyModel), (1, TinyModel), (2, TinyModel), (3, TinyModel), (1, Backwards), (3, Backwards)]


def on_device(stage: int) -> tuple[list[int], list[int]]:
    """Bytes of the weights that the device must hold beside a bucket, and of each bucket."""
    parts = 2 if stage >= 2 else 1
    whole = [size if stage == 0 else 2 * part(size) for size in SIZES]  # with padding
    # A bucket holds the whole gradient and, behind each of its parts, a flag per parameter. Beside the bucket is the
    # result of its reduce-scatter: the rank's part and its flags.
    buckets = [
        padded(4 * (elements + parts * flags + ((elements // 2 + flags) if stage >= 2 else 0)))
        for elements, flags in zip(whole, PARAMETERS)
    ]
    # The least: all weights up to stage 2, one block in stage 3.
    return [4 * elements for elements in (whole if stage < 3 else whole[3:4])], buckets


def least(stage: int) -> int:
    """The smallest GPU memory."""
    weights, buckets = on_device(stage)
    return sum(padded(nbytes) for nbytes in weights) + max(buckets)


@pytest.fixture(scope="module")
def held_by_ranks() -> dict[tuple[int, type[TinyModel]], list[dict[str, Any]]]:
    """By case and rank."""
    return dict(zip(CASES, run_in_turn(2, peaks, [call(stage, least(stage), model) for stage, model in CASES])))


@pytest.mark.parametrize(("stage", "model"), CASES)
def test_peaks_of_a_rank(stage: int, model: type[TinyModel], held_by_ranks: dict[Any, Any]) -> None:
    weights, buckets = on_device(stage)
    for rank, held in enumerate(held_by_ranks[stage, model]):
        assert held["device_weights"] == sum(weights)
        assert held["device_gradients"] == max(buckets)
        # At rest: 4 B of weights, 8 B of moments and 4 B of gradient for every element that the rank keeps.
        kept = [size if stage == 0 else max(min(part(size), size - rank * part(size)), 0) for size in SIZES]
        assert held["resident"] == sum(padded(4 * elements) + padded(8 * elements) for elements in kept)
        assert held["gradients"] == sum(padded(4 * elements) for elements in kept)
