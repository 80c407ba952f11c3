"""The CPU twin, and the choice of a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_contract import DeviceContract, random_bytes

from tierstore.device.streams import ComputeDevice, LinkCounters, open_device
from tierstore.device.transfers import CpuDevice
from tierstore.errors import ConfigError
from tierstore.trace import Tracer


class TestCpu(DeviceContract):
    @pytest.fixture
    def device(self) -> ComputeDevice:
        return open_device("cpu")


def test_seconds_come_from_the_clock() -> None:
    ticks = iter(range(100))
    tracer = Tracer(lambda: next(ticks))
    device = CpuDevice(LinkCounters(tracer.clock, tracer))
    storage = torch.UntypedStorage(8)
    device.copy_in(storage, 0, random_bytes(8))
    device.copy_out_range(storage, 0, np.zeros(8, np.uint8), device.record())
    assert [(span.track, span.start, span.end) for span in tracer.spans] == [("h2d", 0, 1), ("d2h", 2, 3)]


def test_a_storage_that_numpy_shares_is_filled_again_in_place() -> None:
    device, parameter = CpuDevice(), torch.nn.Parameter(torch.zeros(4))
    shared, storage = parameter.detach().numpy(), parameter.untyped_storage()
    device.release(storage, device.record())
    device.allocate(storage, 16)
    device.copy_in(storage, 0, np.ones(4, np.float32).view(np.uint8))
    assert parameter.tolist() == shared.tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="16 B already"):
        device.allocate(storage, 32)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'cuda:0' needs CUDA.*use 'cpu'"):
        open_device("cuda:0")
    for name in ("meta", "gpu", "cpu:0", "cuda:01", "cuda:-1", "cuda:256"):
        with pytest.raises(ConfigError, match="must be 'cpu'"):
            open_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="there are 1 CUDA devices"):
        open_device("cuda:1")
