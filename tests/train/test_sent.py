"""What ranks send each other, and by which backend."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from runs import tiny
from sharing import objects_told

from tierstore.train.ranks import is_nccl


def test_weights_are_sent_as_they_are_and_only_told_of_as_objects() -> None:
    """A view is pickled with the whole tensor behind it, and a gather of objects brings one from every rank."""
    expected = tiny().state_dict()
    for told, weights in run_ranks(2, objects_told):
        assert max(told) < 2**14
        assert all(np.array_equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("backend", "expected"), [("nccl", True), ("gloo", False), (None, False)])
def test_a_group_may_have_a_backend_for_each_device(backend: str | None, expected: bool) -> None:
    def backend_of(device: torch.device) -> SimpleNamespace:
        if backend is None or device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: backend)

    assert is_nccl(SimpleNamespace(_get_backend=backend_of), torch.device("cuda")) is expected
    assert not is_nccl(SimpleNamespace(_get_backend=backend_of), torch.device("cpu"))
