"""What every compute device does: run on the CPU twin, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tierstore.device.streams import ComputeDevice


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class DeviceContract:
    """What holds for every device. Subclasses open one."""

    @pytest.fixture
    def device(self) -> ComputeDevice:
        raise NotImplementedError

    def empty_storage(self, device: ComputeDevice) -> torch.UntypedStorage:
        return torch.UntypedStorage(0, device=device.torch_device)

    def test_ranges_in_and_out(self, device: ComputeDevice) -> None:
        storage = self.empty_storage(device)
        device.allocate(storage, 1000)
        assert storage.nbytes() == 1000
        source, target = random_bytes(1000), np.zeros(700, np.uint8)
        device.copy_in(storage, 0, source[:400])
        device.copy_in(storage, 400, source[400:])
        device.copy_out_range(storage, 200, target, device.record())
        assert np.array_equal(target, source[200:900])
        device.release(storage, device.record())
        assert storage.nbytes() == 0

    def test_what_is_in_place_is_the_storage_itself(self, device: ComputeDevice) -> None:
        storage, source, target = self.empty_storage(device), random_bytes(100), np.zeros(100, np.uint8)
        device.allocate(storage, 100)
        device.copy_in(storage, 0, source)
        there = device.in_place(storage, 40, 20)
        assert (there is None) == (device.kind == "cuda")
        if there is None:
            return
        assert np.array_equal(there, source[40:60])
        there[:] = 7
        device.copy_out_range(storage, 0, target, device.record())
        assert np.array_equal(target, [*source[:40], *([7] * 20), *source[60:]])
        with pytest.raises(ValueError, match="20 B at offset 81 are not in a storage of 100 B"):
            device.in_place(storage, 81, 20)

    def test_an_address_is_that_of_contiguous_elements_in_reach(self, device: ComputeDevice) -> None:
        tensor = torch.arange(12, dtype=torch.int16, device=device.torch_device).reshape(3, 4)[1:]
        address = device.address_of(tensor)
        assert (address is None) == (device.kind == "cuda")
        if address is not None:
            assert [*(ctypes.c_int16 * 8).from_address(address)] == [*range(4, 12)]
        assert device.address_of(tensor.t()) is None

    def test_a_parameter_sees_the_bytes_and_not_the_write(self, device: ComputeDevice) -> None:
        """The saved-tensor check of autograd must not notice that a group was refilled."""
        values = torch.arange(8, dtype=torch.float32)
        parameter = torch.nn.Parameter(values.clone().to(device.torch_device))
        loss = (parameter * parameter).sum()  # saves the parameter
        storage, version = parameter.untyped_storage(), parameter._version
        device.release(storage, device.record())
        device.allocate(storage, 32)
        device.copy_in(storage, 0, values.numpy().view(np.uint8).copy())
        assert parameter._version == version
        loss.backward()
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.cpu(), 2 * values)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_tensors_out(self, device: ComputeDevice, dtype: torch.dtype) -> None:
        whole = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(dtype)
        sources = [whole, whole.T, whole[:, ::2], whole[1, 2], whole[:0].requires_grad_()]
        expected = [source.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for source in sources]
        targets = [np.full(len(item), 255, np.uint8) for item in expected]
        device.copy_out([_as_strided_on(source, device) for source in sources], targets, device.record())
        for target, item in zip(targets, expected, strict=True):
            assert np.array_equal(target, item)

    def test_sizes_are_checked_before_anything_moves(self, device: ComputeDevice) -> None:
        storage = self.empty_storage(device)
        device.allocate(storage, 100)
        with pytest.raises(ValueError, match="100 B already"):
            device.allocate(storage, 200)
        for offset, nbytes in ((1, 100), (-1, 10), (101, 0)):
            with pytest.raises(ValueError, match="storage of 100 B"):
                device.copy_in(storage, offset, random_bytes(nbytes))
        assert storage.nbytes() == 100
        target = np.zeros(8, np.uint8)
        tensor = torch.ones(2, device=device.torch_device)
        for sources, targets in (([tensor], [target[:7]]), ([tensor], []), ([tensor, tensor], [target, target[1:]])):
            with pytest.raises(ValueError, match="do not fill"):
                device.copy_out(sources, targets, device.record())
        assert not target.any()

    def test_several_workers_fill_one_storage(self, device: ComputeDevice) -> None:
        storage, source = self.empty_storage(device), random_bytes(2**20)
        device.allocate(storage, len(source))
        step = len(source) // 8
        threads = [
            threading.Thread(target=device.copy_in, args=(storage, start, source[start : start + step]))
            for start in range(0, len(source), step)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        target = np.zeros_like(source)
        device.copy_out_range(storage, 0, target, device.record())
        assert np.array_equal(target, source)

    def test_counts_its_link(self, device: ComputeDevice) -> None:
        before = device.counters.totals()
        storage = self.empty_storage(device)
        device.allocate(storage, 64)
        device.copy_in(storage, 0, random_bytes(64))
        device.copy_out_range(storage, 0, np.zeros(16, np.uint8), device.record())
        after = device.counters.totals()
        assert after.h2d_bytes - before.h2d_bytes == 64
        assert after.d2h_bytes - before.d2h_bytes == 16

    def test_the_rest_of_the_face(self, device: ComputeDevice) -> None:
        assert device.kind == device.torch_device.type
        with device.range("forward h.0"):
            mark = device.record()
        mark.synchronize()
        assert mark.is_done()


def _as_strided_on(tensor: torch.Tensor, device: ComputeDevice) -> torch.Tensor:
    """The tensor on the device, with its own strides."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device.torch_device)
    return moved.copy_(tensor).detach().requires_grad_(tensor.requires_grad)
