"""Updates of neighbouring chunks, as one."""

from __future__ import annotations

import torch

from tierstore.device.arithmetic import Update
from tierstore.device.spans import Span
from tierstore.kernels.adam import AdamCoefficients
from tierstore.store.on_gpu import joined

FIRST, OTHER = (AdamCoefficients(lr, 0.9, 0.99, 1e-8, 0.1, 3) for lr in (1e-2, 1e-3))
CHUNK = 64


def updates(*chunks: tuple[int, int], runs: list[tuple[int, int, AdamCoefficients]]) -> list[Update]:
    """Of bf16, by their first and last element."""
    weights, state, gradient = (torch.UntypedStorage(4096) for _ in range(3))
    return [
        Update(
            "bf16", *(Span(storage, 8 + start * size, (stop - start) * size)
                      for storage, size in ((weights, 2), (state, 10), (gradient, 2))),
            runs=[(a, min(b, stop - start), c) for a, b, c in runs], chunk_elements=CHUNK,
        )
        for start, stop in chunks
    ]  # fmt: skip


def test_whole_chunks_and_what_follows_are_one_with_runs_across() -> None:
    given = updates((0, 64), (64, 128), (128, 140), runs=[(0, 7, OTHER), (7, 64, FIRST)])
    (one,) = joined(given)
    assert one.runs == [(0, 7, OTHER), (7, 64, FIRST), (64, 71, OTHER), (71, 128, FIRST), (128, 135, OTHER),
                        (135, 140, FIRST)]  # fmt: skip
    assert [(span.offset, span.nbytes) for span in (one.weights, one.state, one.gradient)] == [
        (8, 280), (8, 1400), (8, 280),
    ]  # fmt: skip
    (one,) = joined(updates((0, 64), (64, 128), runs=[(0, 64, FIRST)]))
    assert one.runs == [(0, 128, FIRST)]


def test_others_stay_apart() -> None:
    gap = updates((0, 64), (128, 192), runs=[(0, 64, FIRST)])
    ragged = updates((0, 60), (60, 64), runs=[(0, 4, FIRST)])
    other_storages = [updates((0, 64), runs=[(0, 64, FIRST)])[0], updates((64, 128), runs=[(0, 64, FIRST)])[0]]
    for given in (gap, ragged, other_storages, list(reversed(updates((0, 64), (64, 128), runs=[(0, 4, FIRST)])))):
        assert joined(given) == given
    assert joined([]) == []
