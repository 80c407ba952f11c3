"""Copies to and from the compute device, and its matrix products.

Scope: loads over a `ComputeDevice`; without CUDA over its CPU twin, whose link is memory.
Not here: copies within memory (`compute.py`).
Owner: the caller owns device and memory; the storages are given back to torch with the loads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierstore.device.streams import ComputeDevice, Reached
from tierstore.io.memory import Bytes
from tierstore.measure.loads import Load, by_turns

_BLOCK_BYTES = 2**25  # the largest chunk
_THREADS = 2  # so that a copy is always queued behind the one that runs
_SIDE = {"cpu": 768, "cuda": 8192}


def h2d(device: ComputeDevice, memory: Bytes) -> Load:
    """Copies of chunks to the device."""
    return _copies(device, memory, lambda pair: device.copy_in(pair[0], 0, pair[1]))


def d2h(device: ComputeDevice, memory: Bytes) -> Load:
    """Copies of chunks from the device."""
    return _copies(device, memory, lambda pair: device.copy_out_range(pair[0], 0, pair[1], Reached()))


def matmul(device: ComputeDevice) -> Load:
    """Products of square matrices: bf16 on CUDA, fp32 on a CPU; operations are counted, two for a multiply-add."""
    side = _SIDE[device.kind]
    dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=device.torch_device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def job() -> None:
        torch.mm(left, right, out=out)
        device.record().synchronize()

    return Load(job, 2 * side**3)


def _copies(device: ComputeDevice, memory: Bytes, copy: Callable[[tuple[torch.UntypedStorage, Bytes]], object]) -> Load:
    size = min(_BLOCK_BYTES, memory.nbytes // _THREADS)
    pairs = []
    for index in range(_THREADS):
        storage = torch.empty(0, dtype=torch.uint8, device=device.torch_device).untyped_storage()
        device.allocate(storage, size)
        pairs.append((storage, memory[index * size : (index + 1) * size]))
        device.copy_in(storage, 0, pairs[-1][1])  # so that pages are there before the clock runs
    return Load(by_turns(pairs, copy), size, _THREADS)
