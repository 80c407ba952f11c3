"""Memory for a measurement is released, however the measurement ends."""

from __future__ import annotations

import contextlib

import pytest

from tierstore.device.streams import open_device
from tierstore.io import memory as io_memory
from tierstore.measure.memory import arena_memory

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_it_goes_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    free = io_memory.Lease.free

    def noted(lease: io_memory.Lease) -> None:
        freed.append(lease.array.nbytes)
        free(lease)

    monkeypatch.setattr(io_memory.Lease, "free", noted)
    for device in (None, open_device("cpu")):
        with contextlib.suppress(ZeroDivisionError), arena_memory(2**20, "test", device) as (runtime, memory):
            assert (memory.nbytes, runtime.name) == (2**20, "test")
            raise ZeroDivisionError
    assert freed == [2**20] * 2
