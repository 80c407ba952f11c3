"""Tests of what every compute device does, which run on the CPU twin, and on a GPU where there is one."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tierstore.device.arithmetic import Collection, Update
from tierstore.device.spans import TORCH_DTYPES, Span
from tierstore.device.streams import ComputeDevice
from tierstore.kernels import adam, norms
from tierstore.kernels.adam import AdamCoefficients, state_bytes_per_element
from tierstore.kernels.elements import ELEMENT, elements_of
from tierstore.plan.placement import BLOCK


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

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_updates_to_the_bits_of_the_kernels(self, device: ComputeDevice, dtype: str) -> None:
        """For one chunk, and for three that follow each other."""
        count, item, state_bytes = 2 * BLOCK + 1234, ELEMENT[dtype].itemsize, state_bytes_per_element(dtype)
        c = AdamCoefficients(1e-2, 0.9, 0.99, 1e-8, 0.1, 3, gradient_scale=0.7)
        runs = [(0, 1000, c), (5000, count, replace(c, lr=1e-3, decoupled=False))]
        found, updates = [], []
        for size in (count, BLOCK):
            spans = [self.span(device, count * nbytes) for nbytes in (item, state_bytes, item)]
            updates.append(Update(dtype, *spans, runs=runs, chunk_elements=size))
            expected = [read(device, one) for one in spans]
            flat, total = elements_of(expected[0], dtype, count), elements_of(expected[2], dtype, count)
            for first in range(0, count, size):
                chunk = slice(first, min(first + size, count))
                there = expected[1][chunk.start * state_bytes : chunk.stop * state_bytes]
                for start, stop, given in runs:
                    edges = [min(max(edge, chunk.start), chunk.stop) - first for edge in (start, stop)]
                    adam.update(dtype, flat[chunk], there, total[chunk], *edges, given)
            found += zip(spans, expected)
        device.arithmetic.adam(updates)
        for span, wanted in found:
            assert np.array_equal(read(device, span), wanted)

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_collects_and_measures_to_the_bits_of_the_kernels(self, device: ComputeDevice, dtype: str) -> None:
        """Two micro-batches, some gradients strided. What no gradient covers becomes zero; no old bytes are left."""
        count, tail, item = 2 * BLOCK + 1234, 1000, ELEMENT[dtype].itemsize
        first, second = (torch.linspace(-1, 2, count - tail) * k for k in (1, 0.3))
        parts = [part.to(TORCH_DTYPES[dtype]) for part in (first[:77], first[77:], second)]
        there = [part.to(device.torch_device) for part in parts]
        there[1:] = [torch.stack((part, part + 1), 1)[:, 0] for part in there[1:]]
        total, other = self.span(device, count * item), self.span(device, 300 * item)
        sums, again, of_other = np.zeros(-(-count // BLOCK)), np.zeros(-(-count // BLOCK)), np.zeros(1)
        device.record().synchronize()
        device.arithmetic.collect([Collection(dtype, [(0, there[0], True), (77, there[1], True)], total, True, None)])
        device.arithmetic.collect(
            [
                Collection(dtype, [(0, there[2], False)], total, False, sums),
                Collection(dtype, [(100, there[0], True)], other, True, of_other),
                Collection(dtype, [], total, False, again),
            ]
        )
        wanted = torch.zeros(count, dtype=TORCH_DTYPES[dtype])
        wanted[: len(parts[2])] = torch.cat(parts[:2]).add_(parts[2])
        wanted_other = torch.zeros(300, dtype=TORCH_DTYPES[dtype])
        wanted_other[100:177] = parts[0]
        for span, values, outs in ((total, wanted, [sums, again]), (other, wanted_other, [of_other])):
            found = read(device, span)
            assert np.array_equal(found, values.view(torch.uint8).numpy())
            expected = np.zeros(-(-len(values) // BLOCK))
            norms.square_sums(dtype, elements_of(found, dtype, len(values)), expected)
            assert all(np.array_equal(out, expected) for out in outs)

    def span(self, device: ComputeDevice, nbytes: int) -> Span:
        """A span in the middle of a storage, of numbers that are small whichever dtype they are read as."""
        storage, bits = self.empty_storage(device), random_bytes(nbytes + 4096, nbytes)
        bits[3::4] = 60  # bf16 and fp32 of about 0.01, fp16 of about 1
        bits[1::4] = 60
        device.allocate(storage, len(bits))
        device.copy_in(storage, 0, bits)
        return Span(storage, 512, nbytes)

    def test_a_span_is_inside_its_storage(self, device: ComputeDevice) -> None:
        storage = self.empty_storage(device)
        device.allocate(storage, 64)
        for offset, nbytes in ((-1, 4), (61, 4), (0, 65)):
            with pytest.raises(ValueError, match="not in a storage of 64 B"):
                Span(storage, offset, nbytes)
            ranges = [(storage, 0, np.zeros(64, np.uint8)), (storage, offset, np.zeros(nbytes, np.uint8))]
            with pytest.raises(ValueError, match="not in a storage of 64 B"):
                device.copy_out_ranges(ranges, device.record())

    def test_the_rest_of_the_face(self, device: ComputeDevice) -> None:
        assert device.kind == device.torch_device.type
        device.record_stream(self.empty_storage(device))
        assert device.stream() == device.stream()
        with device.range("forward h.0"):
            mark = device.record()
        mark.synchronize()
        assert mark.is_done()


def read(device: ComputeDevice, span: Span) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found = np.zeros(span.nbytes, np.uint8)
    device.copy_out_range(span.storage, span.offset, found, device.record())
    return found


def _as_strided_on(tensor: torch.Tensor, device: ComputeDevice) -> torch.Tensor:
    """The tensor on the device, with its own strides."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device.torch_device)
    return moved.copy_(tensor).detach().requires_grad_(tensor.requires_grad)
