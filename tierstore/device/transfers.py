"""Copies between host buffers and the storages of a device.

Scope: the CPU twin and CUDA.
Not here: the interface and the reasoning about streams (see `device/streams.py`).
Owner: a `CudaDevice` owns its streams; the caller owns storages and buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils import deterministic

from tierstore.config import format_size
from tierstore.device.arithmetic import Arithmetic, GpuArithmetic, HostArithmetic
from tierstore.device.spans import alias, bytes_at, check_range
from tierstore.device.streams import Bytes, LinkCounters, Mark, Reached
from tierstore.errors import BudgetError

_POLL_S = 5e-5
_PASSING_BYTES, _PINNED_PASSING_BYTES = 2**18, 2**22  # of each thread that updates, beside the budgets
_LIBC = ctypes.CDLL(None)
_MAPPED_APART_BYTES = 2**25  # the largest value to which glibc raises M_MMAP_THRESHOLD by itself
_CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts, so for all GPUs


def _check_host(array: Bytes) -> None:
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise ValueError(f"a host buffer is contiguous uint8, not {array.dtype}")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, one after another; a copy if the tensor is not contiguous."""
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def _check_empty(storage: torch.UntypedStorage) -> None:
    if storage.nbytes():
        raise ValueError(f"the storage has {storage.nbytes()} B already")


def _check_sizes(sources: Sequence[torch.Tensor], destinations: Sequence[Bytes]) -> None:
    for destination in destinations:
        _check_host(destination)
    have = [source.numel() * source.element_size() for source in sources]
    want = [destination.nbytes for destination in destinations]
    if have != want:
        raise ValueError(f"tensors of {have} B do not fill buffers of {want} B")


def _copy(target: int, source: int, nbytes: int) -> None:
    # Without the GIL, and in this thread: torch's copy would start a thread team for each worker. Not by
    # `Tensor.numpy()`: that marks the storage as never to be resized again.
    ctypes.memmove(target, source, nbytes)


def _give_back_pages(storage: torch.UntypedStorage) -> None:
    """Gives back the pages of a large storage without the GIL, which `resize_` would hold for milliseconds.

    Only if the allocator has certainly mapped it separately. It may keep smaller memory, with its pages, for the next
    allocation.
    """
    if storage.nbytes() >= _MAPPED_APART_BYTES:
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def _enlarge(storage: torch.UntypedStorage, nbytes: int) -> None:
    """As `storage.resize_`, which would hold the GIL while the allocator asks the driver or waits for the device."""
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,)).resize_(nbytes)


class CpuDevice:
    """The CPU twin: storages in ordinary memory, copies by memcpy in the calling thread.

    A storage that numpy shares (`parameter.detach().numpy()`; on a GPU `.cpu()` makes a copy first) cannot be resized
    any more. It keeps its memory when released, and is filled again in place.
    """

    kind: Literal["cpu", "cuda"] = "cpu"
    # So a group of 393 KB costs training 150 us less than by a worker (`bench step --heat cost`, 2 cores, 2026-11-25).
    at_once_bytes = 2**19
    small_bytes = 2**20

    def __init__(self, counters: LinkCounters | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.counters = LinkCounters() if counters is None else counters
        self.arithmetic: Arithmetic = HostArithmetic()

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage.nbytes() == nbytes and not storage.resizable():
            return
        _check_empty(storage)
        storage.resize_(nbytes)

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int, source: Bytes) -> None:
        _check_host(source)
        check_range(storage, offset_bytes, source.nbytes)
        start = self.counters.clock()
        _copy(storage.data_ptr() + offset_bytes, source.ctypes.data, source.nbytes)
        self.counters.add("h2d", source.nbytes, start)

    def in_place(self, storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> Bytes | None:
        check_range(storage, offset_bytes, nbytes)
        return bytes_at(storage.data_ptr() + offset_bytes, nbytes)

    def address_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.data_ptr() if tensor.is_contiguous() else None

    def record(self) -> Mark:
        return Reached()  # work on a CPU is over when the call that queued it returns

    def stream(self) -> Hashable:
        return None

    def record_stream(self, storage: torch.UntypedStorage) -> None:
        pass

    def copy_out(self, sources: Sequence[torch.Tensor], destinations: Sequence[Bytes], after: Mark) -> None:
        _check_sizes(sources, destinations)
        after.synchronize()
        start = self.counters.clock()
        for source, destination in zip(sources, destinations, strict=True):
            flat = source.contiguous()
            _copy(destination.ctypes.data, flat.data_ptr(), destination.nbytes)
        moved_bytes = sum(destination.nbytes for destination in destinations)
        self.counters.add("d2h", moved_bytes, start)

    def copy_out_range(self, storage: torch.UntypedStorage, offset_bytes: int, destination: Bytes, after: Mark) -> None:
        self.copy_out_ranges([(storage, offset_bytes, destination)], after)

    def copy_out_ranges(self, ranges: Sequence[tuple[torch.UntypedStorage, int, Bytes]], after: Mark) -> None:
        for storage, offset_bytes, destination in ranges:
            _check_host(destination)
            check_range(storage, offset_bytes, destination.nbytes)
        after.synchronize()
        start = self.counters.clock()
        for storage, offset_bytes, destination in ranges:
            # Not through an alias: for as long as it lives, the weights would seem to be in use by the model.
            _copy(destination.ctypes.data, storage.data_ptr() + offset_bytes, destination.nbytes)
        self.counters.add("d2h", sum(destination.nbytes for _, _, destination in ranges), start)

    def complete(self, link: str, launch: Callable[[], object], timeout_s: float) -> None:
        launch()

    def release(self, storage: torch.UntypedStorage, after: Mark) -> None:
        after.synchronize()
        if storage.resizable():
            _give_back_pages(storage)
            storage.resize_(0)

    def passing(self) -> Bytes:
        return np.empty(_PASSING_BYTES, np.uint8)

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int, nbytes: int) -> None:
        pass

    def current(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def range(self, name: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class _EventMark:
    """An event, used with its GPU current: in a thread that has set none, another GPU would get a context for that."""

    def __init__(self, event: Any, current: Callable[[], AbstractContextManager[None]]) -> None:
        self._event = event
        self._current = current

    def synchronize(self) -> None:
        with self._current():
            self._event.synchronize()

    def is_done(self) -> bool:
        with self._current():
            return bool(self._event.query())


class _Queue:
    """A stream, and a lock for turns to queue work there: an event must come right behind its own work."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.turn = threading.Lock()


class CudaDevice:
    """One GPU, with a stream each to copy in, to copy out and to update. See [Note: streams and the allocator].

    Worker threads have device 0 current until they set another one, whichever GPU this is.

    Args:
        cuda: `torch.cuda`, or what a test puts in its place.
    """

    kind: Literal["cpu", "cuda"] = "cuda"
    at_once_bytes = 0  # a copy waits on the host for those before it on its stream
    small_bytes = 2**24

    def __init__(
        self, torch_device: torch.device, counters: LinkCounters | None = None, cuda: Any = torch.cuda
    ) -> None:
        self.torch_device = torch_device
        self.counters = LinkCounters() if counters is None else counters
        self._cuda = cuda
        self._h2d = _Queue(cuda.Stream(device=torch_device))
        self._d2h = _Queue(cuda.Stream(device=torch_device))
        update = partial(self._finished, _Queue(cuda.Stream(device=torch_device)))
        self.arithmetic: Arithmetic = GpuArithmetic(torch_device, update, self.passing)
        self._passing = threading.local()
        self._unended: list[Callable[[], object]] = []
        # With a higher priority than the compute stream, whose next kernels wait for results of these.
        self._links = {link: cuda.Stream(device=torch_device, priority=-1) for link in ("gather", "reduce")}

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if self._unended and storage.nbytes() == nbytes:
            return
        _check_empty(storage)
        # If torch fills new memory, a kernel on h2d writes it. Copies come after that, but gathers do not wait for h2d.
        fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        is_filled = torch.are_deterministic_algorithms_enabled() and fills
        try:
            with self._finished(self._h2d) if is_filled else self._current(self._h2d.stream):
                _enlarge(storage, nbytes)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the GPU has no room for {nbytes} B ({format_size(nbytes)}) of gpu_memory beside memory that it does "
                f"not include, such as activations: lower gpu_memory ({str(error).splitlines()[0]})"
            ) from error

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int, source: Bytes) -> None:
        _check_host(source)
        target = alias(storage, offset_bytes, source.nbytes)
        start = self.counters.clock()
        with self._finished(self._h2d):
            target.copy_(torch.from_numpy(source), non_blocking=True)
        self.counters.add("h2d", source.nbytes, start)

    def in_place(self, storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> Bytes | None:
        return None

    def address_of(self, tensor: torch.Tensor) -> int | None:
        return None

    def record(self) -> Mark:
        event = self._event()
        event.record(self._cuda.current_stream(self.torch_device))
        return _EventMark(event, self.current)

    def stream(self) -> Hashable:
        found: Hashable = self._cuda.current_stream(self.torch_device)
        return found

    def record_stream(self, storage: torch.UntypedStorage) -> None:
        alias(storage, 0, storage.nbytes()).record_stream(self._cuda.current_stream(self.torch_device))

    def copy_out(self, sources: Sequence[torch.Tensor], destinations: Sequence[Bytes], after: Mark) -> None:
        _check_sizes(sources, destinations)
        after.synchronize()
        start = self.counters.clock()
        with self._finished(self._d2h):
            # A tensor that is not contiguous is first made so on d2h: its temporary belongs to that stream.
            there = [flat_bytes(source) for source in sources]
            if there:  # in one call, which takes the GIL back only once: other threads wait for it, too
                here = [torch.from_numpy(destination) for destination in destinations]
                torch._foreach_copy_(here, there, non_blocking=True)
        moved_bytes = sum(destination.nbytes for destination in destinations)
        self.counters.add("d2h", moved_bytes, start)

    def copy_out_range(self, storage: torch.UntypedStorage, offset_bytes: int, destination: Bytes, after: Mark) -> None:
        self.copy_out_ranges([(storage, offset_bytes, destination)], after)

    def copy_out_ranges(self, ranges: Sequence[tuple[torch.UntypedStorage, int, Bytes]], after: Mark) -> None:
        sources = [alias(storage, offset, destination.nbytes) for storage, offset, destination in ranges]
        self.copy_out(sources, [destination for _, _, destination in ranges], after)

    def complete(self, link: str, launch: Callable[[], object], timeout_s: float) -> None:
        event = self._event()
        try:
            with self._current(self._links[link]):
                launch()
                event.record(self._links[link])
            deadline = time.monotonic() + timeout_s
            while not event.query():  # not synchronize(): the rank that the work waits for may be gone
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{link} did not end within {timeout_s} s")
                time.sleep(_POLL_S)
        except BaseException:
            self._unended.append(launch)  # keeps its buffers: they may be written as long as the process lives
            raise

    def release(self, storage: torch.UntypedStorage, after: Mark) -> None:
        after.synchronize()
        if self._unended:
            return
        with self._current(self._h2d.stream):
            storage.resize_(0)

    def passing(self) -> Bytes:
        if not hasattr(self._passing, "bytes"):
            with self.current():
                pinned = torch.empty(_PINNED_PASSING_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
            self._passing.bytes = pinned.numpy()  # which keeps the tensor
        found: Bytes = self._passing.bytes
        return found

    def pin(self, address: int, nbytes: int) -> None:
        with self.current():
            code = int(self._cuda.cudart().cudaHostRegister(address, nbytes, _CUDA_HOST_REGISTER_PORTABLE))
        if code:
            with contextlib.suppress(RuntimeError):  # otherwise the next launch of a kernel would raise this error
                torch.zeros(1, device=self.torch_device)
            raise BudgetError(f"CUDA could not pin {nbytes} B ({format_size(nbytes)}): error {code}; give less memory")

    def unpin(self, address: int, nbytes: int) -> None:
        with self.current():
            code = int(self._cuda.cudart().cudaHostUnregister(address))
        if code:
            raise BudgetError(f"CUDA could not unpin {nbytes} B at {address:#x}: error {code}")

    def current(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._cuda.device(self.torch_device)
        return context

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        # Not nvtx.range: that is a stack per thread, and the tasks of the loop do not end in order.
        handle = self._cuda.nvtx.range_start(name)
        try:
            yield
        finally:
            self._cuda.nvtx.range_end(handle)

    def _event(self) -> Any:
        # blocking: a waiting thread sleeps; the default spins, on a core that the optimizer needs
        return self._cuda.Event(blocking=True)

    @contextlib.contextmanager
    def _current(self, stream: Any) -> Iterator[None]:
        with self.current(), self._cuda.stream(stream):
            yield

    @contextlib.contextmanager
    def _finished(self, queue: _Queue) -> Iterator[None]:
        """Makes a stream current, and waits on the host for what was queued, even if the queueing failed."""
        event = self._event()
        try:
            with queue.turn, self._current(queue.stream):
                try:
                    yield
                finally:
                    event.record(queue.stream)
        finally:
            event.synchronize()
