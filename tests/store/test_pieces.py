"""Which gradients are read where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tierstore.device.streams import Reached
from tierstore.device.transfers import CpuDevice
from tierstore.io.memory import Bytes
from tierstore.kernels.adam import BLOCK
from tierstore.store.pieces import Piece, _add, _all_in_place


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
    """As a GPU: what is there must be copied to be read."""

    def in_place(self, storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> Bytes | None:
        return None


def test_what_is_added_from_where_it_lies_is_what_a_copy_adds() -> None:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(2 * BLOCK + 5, generator=generator).to(torch.bfloat16) for _ in range(2))
    found = []
    for device in (CpuDevice(), _Apart()):
        total = first.clone()
        as_bits: Any = total.view(torch.uint16).numpy()
        _add(device, "bf16", as_bits, Piece(3, second[2:-3], False), Reached())
        found.append(total)
        assert device.counters.totals().d2h_bytes == 2 * (len(second) - 5)
    expected = first.clone()
    expected[3:-2] += second[2:-3]
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
