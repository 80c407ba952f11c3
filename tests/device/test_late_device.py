"""What `tests/late_device.py` reports, and what it does not: each rule is broken once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from late_device import LateDevice, Range, queueing

from tierstore.device import transfers

BYTES = 4096


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


def on_device(device: LateDevice) -> tuple[torch.UntypedStorage, torch.Tensor]:
    """A storage full of ones, and a tensor of it."""
    storage = torch.empty(0).untyped_storage()
    device.allocate(storage, BYTES)
    tensor = torch.empty(0).set_(storage, 0, (BYTES // 4,))  # type: ignore[call-overload]
    assert tensor.isnan().all()
    device.copy_in(storage, 0, as_bytes(1.0))
    return storage, tensor


def as_bytes(value: float) -> Any:
    return np.full(BYTES // 4, value, np.float32).view(np.uint8)


def test_what_is_waited_for_is_no_hazard(device: LateDevice) -> None:
    storage, tensor = on_device(device)
    found = as_bytes(0.0)
    with queueing(device):
        product = tensor * 2
        device.copy_out([product], [found], device.record())
        tensor.add_(1)
        device.copy_out_range(storage, 0, as_bytes(0.0), device.record())
        device.copy_in(storage, 0, as_bytes(3.0))
        view = tensor[:4].t().detach()  # no kernels
        assert device.kernels == 2
        assert view.sum().item() == 12
        del view
        device.release(storage, device.record())
    assert found.view(np.float32)[0] == 2
    assert device.hazards == []


def test_a_copy_out_of_what_is_not_computed(device: LateDevice) -> None:
    _, tensor = on_device(device)
    with queueing(device):
        before = device.record()
        product = tensor * 2
        device.copy_out([tensor], [as_bytes(0.0)], before)  # only read since
        assert device.hazards == []
        device.copy_out([product], [as_bytes(0.0)], before)
    assert device.hazards == ["a copy from the device does not wait for kernel 1, aten.mul.Tensor; 0 have run"]


def test_a_copy_in_where_a_kernel_reads(device: LateDevice) -> None:
    storage, tensor = on_device(device)
    with queueing(device):
        tensor[:8].sum()
        device.copy_in(storage, 0, as_bytes(1.0))  # what is there already
        device.copy_in(storage, 32, as_bytes(2.0)[32:])  # beside it
        assert device.hazards == []
        device.copy_in(storage, 0, as_bytes(2.0))
    assert device.hazards == ["a copy to the device does not wait for kernel 1, aten.sum.default; 0 have run"]


def test_a_copy_in_of_what_a_kernel_will_change_again(device: LateDevice) -> None:
    storage, tensor = on_device(device)
    with queueing(device):
        tensor.mul_(2)
        device.copy_in(storage, 0, as_bytes(2.0))  # the same bytes, but 4 once the kernel runs
    assert device.hazards == ["a copy to the device does not wait for kernel 1, aten.mul_.Tensor; 0 have run"]


def test_a_kernel_during_a_copy(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, tensor = on_device(device)
    inside, goes_on = threading.Event(), threading.Event()

    def copy(*_: int) -> None:
        inside.set()
        assert goes_on.wait(10)

    monkeypatch.setattr("tierstore.device.transfers._copy", copy)
    for job, kernel, hazards in (
        (lambda: device.copy_in(storage, 0, as_bytes(5.0)), lambda: tensor + 1, 1),
        (lambda: device.copy_out([tensor], [as_bytes(0.0)], device.record()), lambda: tensor + 1, 0),
        (lambda: device.copy_out([tensor], [as_bytes(0.0)], device.record()), lambda: tensor.add_(1), 1),
    ):
        device.hazards.clear()
        thread = threading.Thread(target=job)
        thread.start()
        assert inside.wait(10)
        with queueing(device):
            kernel()
        goes_on.set()
        thread.join()
        inside.clear()
        goes_on.clear()
        assert len(device.hazards) == hazards, device.hazards


def test_copies_and_memory_that_goes_during_a_copy(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, _ = on_device(device)
    inside, goes_on = threading.Event(), threading.Event()
    copy = transfers._copy

    def slow(*given: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert goes_on.wait(10)
        copy(*given)

    monkeypatch.setattr(transfers, "_copy", slow)
    thread = threading.Thread(target=lambda: device.copy_out_range(storage, 0, as_bytes(0.0), device.record()))
    thread.start()
    assert inside.wait(10)
    device.copy_out_range(storage, 0, as_bytes(0.0), device.record())  # two may read
    assert device.hazards == []
    device.copy_in(storage, 0, as_bytes(5.0))
    device.check("memory that goes", Range(storage._cdata, 0, BYTES), writes=True)
    goes_on.set()
    thread.join()
    during = "does not wait for a copy from the device"
    assert device.hazards == [f"a copy to the device {during}", f"memory that goes {during}"]


def test_memory_that_goes_too_early(device: LateDevice) -> None:
    storage, tensor = on_device(device)
    with queueing(device):
        early = device.record()
        tensor.sum()
        device.release(storage, early)
    assert device.hazards == ["memory that goes does not wait for kernel 1, aten.sum.default; 0 have run"]


def test_memory_that_goes_with_its_last_user(device: LateDevice) -> None:
    for waits in (True, False):
        storage, tensor = on_device(device)
        with queueing(device):
            tensor.sum()
        if waits:
            device.record().synchronize()
        del storage, tensor
        device.record().synchronize()
        assert len(device.hazards) == (not waits)
    assert "memory that went does not wait for kernel 2, aten.sum.default; 1 have run" in device.hazards[0]


def test_memory_of_a_stream_that_is_known_waits_for_its_kernels_and_not_for_copies(device: LateDevice) -> None:
    storage, tensor = on_device(device)
    device.record_stream(storage)
    with queueing(device):
        tensor.sum()
    with device.moves("a copy from the device", [Range(storage._cdata, 0, BYTES)]):
        del storage, tensor
        device.record().synchronize()
    assert device.hazards == ["memory that went does not wait for a copy from the device"]


def test_memory_of_the_kernels_own_may_be_used_again(device: LateDevice) -> None:
    for _ in range(20):
        with queueing(device):
            product = torch.ones(BYTES // 4) * 2
            del product
        on_device(device)
    assert device.hazards == []


def test_a_link_of_ranks_that_does_not_wait(device: LateDevice) -> None:
    _, tensor = on_device(device)
    with queueing(device):
        product = tensor * 2
    device.complete("reduce", lambda: product.sum(), 1.0)
    told = ["reduce: aten.sum.default does not wait for kernel 1, aten.mul.Tensor; 0 have run"]
    assert device.hazards == told
    device.record().synchronize()
    device.complete("reduce", lambda: product.add_(1), 1.0)
    assert device.hazards == told
