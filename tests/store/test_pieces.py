"""Pieces of gradients: cut at chunks, read where they lie, and brought to one sum however they lie."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tierstore.device.arithmetic import Collection
from tierstore.device.spans import Span
from tierstore.device.streams import Reached
from tierstore.device.transfers import CpuDevice
from tierstore.io.memory import Bytes
from tierstore.plan.placement import BLOCK
from tierstore.store.pieces import Filling, Piece, _add, _all_in_place, cut


def test_parts_come_in_their_order_from_the_memory_of_the_gradients() -> None:
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    parts = [Piece(7, gradient[2:], True), Piece(0, gradient[:2], True)]
    places = _all_in_place(CpuDevice(), np.zeros(10, np.float32), parts)
    assert places == [(0, gradient.data_ptr(), 2), (7, gradient.data_ptr() + 8, 3)]


@pytest.mark.parametrize(
    "piece",
    [
        Piece(0, torch.ones(4), True),  # fp32: half of its bytes would be taken for all
        Piece(0, torch.ones(1, dtype=torch.bfloat16).expand(4), True),
        Piece(0, torch.ones(4, dtype=torch.bfloat16), False),
    ],
    ids=["another dtype", "not contiguous", "to be added"],
)
def test_what_does_not_lie_there_as_it_is_wanted_is_copied(piece: Piece) -> None:
    whole = Piece(4, torch.ones(4, dtype=torch.bfloat16), True)
    total = np.zeros(8, np.uint16)
    assert _all_in_place(CpuDevice(), total, [whole]) is not None
    assert _all_in_place(CpuDevice(), total, [piece, whole]) is None


class _Apart(CpuDevice):
    """Like a GPU: its memory must be copied to be read."""

    def passing(self) -> Bytes:
        return np.empty(2000, np.uint8)

    def address_of(self, tensor: torch.Tensor) -> int | None:
        return None


@pytest.mark.parametrize("cuts", [[], [1, 4, BLOCK, BLOCK + 1]], ids=["one", "several"])
def test_what_is_added_from_where_it_lies_is_what_a_copy_adds(cuts: list[int]) -> None:
    """The scratch memory holds at once a part of a piece, or several pieces."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(2 * BLOCK + 5, generator=generator).to(torch.bfloat16) for _ in range(2))
    ends = itertools.pairwise([0, *cuts, len(second) - 5])
    pieces = [Piece(3 + start, second[2 + start : 2 + stop], False) for start, stop in ends]
    found = []
    for device in (CpuDevice(), _Apart()):
        total = first.clone()
        as_bits: Any = total.view(torch.uint16).numpy()
        _add(device, "bf16", as_bits, pieces, Reached())
        found.append(total)
        assert device.counters.totals().d2h_bytes == 2 * (len(second) - 5)
    expected = first.clone()
    expected[3:-2] += second[2:-3]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)


def test_pieces_are_cut_at_the_ends_of_a_chunk() -> None:
    flat = torch.arange(10.0)
    pieces = [Piece(0, flat[:4], True), Piece(4, flat[4:7], False), Piece(7, flat[7:], True)]
    parts = cut(pieces, 2, 8)
    assert [(part.start, part.gradient.tolist(), part.is_first) for part in parts] == [
        (0, [2.0, 3.0], True), (2, [4.0, 5.0, 6.0], False), (5, [7.0], True),
    ]  # fmt: skip
    assert parts[1].gradient is pieces[1].gradient  # whole: no view of it is made
    assert cut(pieces, 10, 12) == []


@pytest.mark.parametrize("device", [CpuDevice(), _Apart()], ids=["in place", "copied"])
def test_elements_that_came_twice_cover_no_others(device: CpuDevice) -> None:
    memory, there = np.full(4 * 8, 0xFF, np.uint8), torch.full((8,), 7.0)
    parts = [Piece(0, torch.ones(4), True), Piece(0, torch.ones(4), False)]
    Filling(device, "fp32", memory, 8, True, parts.copy(), Reached(), None)()
    assert memory.view(np.float32).tolist() == [2, 2, 2, 2, 0, 0, 0, 0]
    device.arithmetic.collect([Collection("fp32", parts, Span(there.untyped_storage(), 0, 32), True, None)])
    assert there.tolist() == [2, 2, 2, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("device", [CpuDevice(), _Apart()], ids=["in place", "copied"])
def test_a_chunk_holds_what_came_zeros_elsewhere_and_its_sums_of_squares(device: CpuDevice) -> None:
    memory, partials = np.full(4 * 8 + 16, 0xFF, np.uint8), np.zeros(1)
    for part in (Piece(2, torch.tensor([1.0, 2.0]), True), Piece(3, torch.ones(2), False)):
        parts = [part]
        Filling(device, "fp32", memory, 8, part.is_first, parts, Reached(), None if part.is_first else partials)()
        assert parts == []
    assert memory[:32].view(np.float32).tolist() == [0, 0, 1, 3, 1, 0, 0, 0]
    assert not memory[32:].any()
    assert partials.tolist() == [11.0]
