"""What ranks send each other: the first weights in small pieces, and by which backend a group sends."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from tierstore.train.filling import PIECE_ELEMENTS, Piece
from tierstore.train.partition import _small
from tierstore.train.ranks import is_nccl


def test_a_piece_is_sent_without_the_tensor_that_it_is_a_part_of() -> None:
    whole = torch.arange(2 * PIECE_ELEMENTS + 5, dtype=torch.int16)
    sent = [pickle.dumps(piece) for piece in _small([Piece("w", 7, whole)])]
    assert max(map(len, sent)) < whole.element_size() * PIECE_ELEMENTS + 4096
    pieces = [pickle.loads(one) for one in sent]
    assert [offset - 7 for _, offset, _ in pieces] == [0, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS]
    assert torch.equal(torch.cat([values for *_, values in pieces]), whole)


@pytest.mark.parametrize(("backend", "expected"), [("nccl", True), ("gloo", False), (None, False)])
def test_a_group_may_have_a_backend_for_each_device(backend: str | None, expected: bool) -> None:
    def backend_of(device: torch.device) -> SimpleNamespace:
        if backend is None or device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: backend)

    assert is_nccl(SimpleNamespace(_get_backend=backend_of), torch.device("cuda")) is expected
    assert not is_nccl(SimpleNamespace(_get_backend=backend_of), torch.device("cpu"))
