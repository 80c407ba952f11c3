"""A device that is late: a kernel counts as run once somebody has waited for it. It reports what would race on a GPU.

Scope: `LateDevice`, which replaces the CPU twin, and `queueing`, around what a training thread does.
Not here: what a real GPU does (`tests/device/test_cuda_device.py`), runs (`tests/train/test_stream_order.py`).

[Note: the rules] Every operation of torch in `queueing` counts as a kernel in one compute stream. The host knows that
a kernel has run only once any thread has waited for a mark behind it. Copies are in other streams, which wait for
nothing. So a copy
* out of a storage may read only bytes that have been written, and that nobody writes meanwhile;
* into a storage may write only where no kernel that may not have run writes, or reads bytes that the copy changes; no
  such kernel may be queued meanwhile.
A storage may go only when all copies and kernels that use it are over; kernels may still run if their stream was
recorded for the storage. Bytes that are not there yet, or not any more, are NaN. Kernels of other threads are not seen:
what autograd's own threads queue on a GPU, the calling thread does here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.device.arithmetic import Collection, HostArithmetic, Update
from tierstore.device.spans import Span
from tierstore.device.streams import Bytes, Mark
from tierstore.device.transfers import CpuDevice

_NOT_THERE = 0xFF  # bytes of this make any float a NaN
_NO_KERNELS = {"set_", "resize_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class Range:
    """Bytes of a storage."""

    storage: int
    start: int
    stop: int

    def meets(self, other: Range) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Use:
    """A range that the kernel of this number reads or writes; numbers are in the order of the queue.

    Attributes:
        pin: as long as it is held, no other storage has this one's address.
    """

    number: int
    where: Range
    writes: bool
    by: Any
    pin: StorageWeakRef


class LateDevice(CpuDevice):
    """See [Note: the rules].

    Attributes:
        hazards: what would race; a correct run has none.
        kernels: how many were queued.
        waited: the names of the threads that have waited for a kernel.
    """

    at_once_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.hazards: list[str] = []
        self.kernels = 0
        self.waited: set[str] = set()
        self._done = 0
        self._uses: list[Use] = []
        self._moving: list[tuple[str, Range, bool]] = []
        self._given: dict[int, StorageWeakRef] = {}
        self._recorded: set[int] = set()
        self._turn = threading.RLock()
        self.arithmetic = LateArithmetic(self)

    def in_place(self, storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> None:
        return None

    def address_of(self, tensor: torch.Tensor) -> None:
        return None

    def record(self) -> Mark:
        with self._turn:
            return _LateMark(self, self.kernels)

    def record_stream(self, storage: torch.UntypedStorage) -> None:
        with self._turn:
            self._recorded.add(storage._cdata)

    def wait_for(self, number: int) -> None:
        """The host knows that all kernels up to this one have run."""
        with self._turn:
            self._look_for_gone()
            if number > self._done:
                self.waited.add(threading.current_thread().name)
                self._done = number
                self._uses = [use for use in self._uses if use.number > number]

    def has_run(self, number: int) -> bool:
        return number <= self._done

    def queue(self, operation: Any, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> int:
        """Queue a kernel that reads and writes these; its number."""
        with self._turn:
            self._look_for_gone()
            self.kernels += 1
            self._add(self.kernels, operation, read, writes=False)
            self._add(self.kernels, operation, written, writes=True)
            return self.kernels

    def made(self, number: int, operation: Any, results: Sequence[torch.Tensor]) -> None:
        """Note that a queued kernel also writes these results, which did not exist before."""
        with self._turn:
            self._add(number, operation, results, writes=True)

    def _add(self, number: int, operation: Any, tensors: Sequence[torch.Tensor], *, writes: bool) -> None:
        for one in tensors:
            use = Use(number, range_of(one), writes, operation, StorageWeakRef(one.untyped_storage()))
            for what, where, puts_in in self._moving:
                if (writes or puts_in) and where.meets(use.where):
                    self.hazards.append(f"{use.by} is queued during {what}")
            self._uses.append(use)

    def check(self, what: str, where: Range, *, writes: bool, awaits_kernels: bool = False) -> None:
        """`what` touches this now, in another stream: note kernels that may not have run, and copies, in its way."""
        for use in self._uses:
            if not awaits_kernels and (writes or use.writes) and where.meets(use.where):
                self.hazards.append(f"{what} does not wait for kernel {use.number}, {use.by}; {self._done} have run")
        for other, there, puts_in in self._moving:
            if (writes or puts_in) and where.meets(there):
                self.hazards.append(f"{what} does not wait for {other}")

    def _look_for_gone(self) -> None:
        """Check storages that went with their last user: others may be given their memory at once."""
        for storage in [storage for storage, ref in self._given.items() if ref.expired()]:
            where, is_recorded = Range(storage, 0, sys.maxsize), storage in self._recorded
            self.check("memory that went", where, writes=True, awaits_kernels=is_recorded)
            del self._given[storage]
            self._recorded.discard(storage)

    @contextlib.contextmanager
    def moves(self, what: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Iterator[None]:
        moves = [(what, one, False) for one in reads] + [(what, one, True) for one in writes]
        with self._turn:
            for _, one, puts_in in moves:
                self.check(what, one, writes=puts_in)
            self._moving += moves
        try:
            yield
        finally:
            with self._turn:
                for move in moves:
                    self._moving.remove(move)

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        super().allocate(storage, nbytes)
        _bytes_of(storage)[:] = _NOT_THERE
        with self._turn:
            self._given[storage._cdata] = StorageWeakRef(storage)

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int, source: Bytes) -> None:
        # A kernel that writes during this comparison may not have run, so `moves` below reports it in any case.
        changed = np.flatnonzero(_bytes_of(storage)[offset_bytes : offset_bytes + source.nbytes] != source)
        first, last = (int(changed[0]), int(changed[-1]) + 1) if len(changed) else (0, 0)
        of_all = Range(storage._cdata, offset_bytes, offset_bytes + source.nbytes)
        of_changed = Range(storage._cdata, offset_bytes + first, offset_bytes + last)
        with self.moves("a copy to the device", [of_all], [of_changed]):
            super().copy_in(storage, offset_bytes, source)

    def copy_out(self, sources: Sequence[torch.Tensor], destinations: Sequence[Bytes], after: Mark) -> None:
        after.synchronize()
        with self.moves("a copy from the device", [range_of(one) for one in sources]):
            super().copy_out(sources, destinations, after)

    def copy_out_ranges(self, ranges: Sequence[tuple[torch.UntypedStorage, int, Bytes]], after: Mark) -> None:
        after.synchronize()
        where = [Range(storage._cdata, offset, offset + here.nbytes) for storage, offset, here in ranges]
        with self.moves("a copy from the device", where):
            super().copy_out_ranges(ranges, after)

    def complete(self, link: str, launch: Callable[[], object], timeout_s: float) -> None:
        with _InStream(self, link) as stream:
            launch()
        stream.check_results()

    def release(self, storage: torch.UntypedStorage, after: Mark) -> None:
        after.synchronize()
        with self._turn:
            self.check("memory that goes", Range(storage._cdata, 0, storage.nbytes()), writes=True)
        _bytes_of(storage)[:] = _NOT_THERE
        super().release(storage, after)


class LateArithmetic(HostArithmetic):
    """Its work is in a stream of its own, too."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def collect(self, collections: Sequence[Collection]) -> None:
        read = [range_of(one) for collection in collections for _, one, _ in collection.parts]
        with self._device.moves("a collection", read, [_range(collection.total) for collection in collections]):
            super().collect(collections)

    def adam(self, updates: Sequence[Update]) -> None:
        written = [_range(span) for update in updates for span in (update.weights, update.state)]
        with self._device.moves("an update", [_range(update.gradient) for update in updates], written):
            super().adam(updates)


def _range(span: Span) -> Range:
    return Range(span.storage._cdata, span.offset, span.offset + span.nbytes)


@dataclass(frozen=True)
class _LateMark:
    device: LateDevice
    number: int

    def synchronize(self) -> None:
        self.device.wait_for(self.number)

    def is_done(self) -> bool:
        return self.device.has_run(self.number)


class queueing(TorchDispatchMode):
    """All that the calling thread computes inside counts as kernels of the compute stream."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        uses = _reads_and_writes(operation, args, kwargs or {})
        number = self.note(operation, *uses) if uses is not None else None
        result = operation(*args, **(kwargs or {}))
        if number is not None and not any(one.alias_info for one in operation._schema.returns):
            self.device.made(number, operation, _tensors(result))
        return result

    def note(self, operation: Any, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> int | None:
        return self.device.queue(operation, reads, writes)


class _InStream(queueing):
    """All that the calling thread computes inside is in a link's stream, and the host waits for it at once."""

    def __init__(self, device: LateDevice, link: str) -> None:
        super().__init__(device)
        self._link = link
        self._results: list[tuple[torch.Tensor, Bytes, list[Use]]] = []

    def note(self, operation: Any, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        with self.device._turn:
            for one in reads:
                self.device.check(f"{self._link}: {operation}", range_of(one), writes=False)
            for one in writes:
                if operation.namespace == "c10d":  # a part of the result may equal what is there already
                    self._results.append((one, _elements(one).copy(), list(self.device._uses)))
                else:
                    self.device.check(f"{self._link}: {operation}", range_of(one), writes=True)

    def check_results(self) -> None:
        """Other ranks' bytes may have changed a result only where no kernel that may not have run reads or writes."""
        for result, before, uses in self._results:
            changed = np.flatnonzero(_elements(result) != before)
            if len(changed):
                whole = range_of(result)
                where = Range(whole.storage, whole.start + int(changed[0]), whole.start + int(changed[-1]) + 1)
                for use in uses:
                    if where.meets(use.where):
                        self.device.hazards.append(f"{self._link} does not wait for kernel {use.number}, {use.by}")


def _reads_and_writes(operation: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """The arguments that a kernel reads, and those that it writes; None: there is no kernel, as for a view."""
    found = _given_and_changed(operation)
    if found is None:
        return None
    names, changed = found
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for name, value in (*zip(names, args), *kwargs.items()):
        (writes if name in changed else reads).extend(_tensors(value))
    return reads, writes


@functools.cache
def _given_and_changed(operation: Any) -> tuple[list[str], set[str]] | None:
    """The names of a kernel's arguments, and of those that it writes; None: there is no kernel."""
    schema = operation._schema
    if operation.__name__.split(".")[0] in _NO_KERNELS:
        return None
    changed = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    if operation.namespace == "c10d":  # its schemas do not say what they write
        changed = {name for argument in schema.arguments if (name := argument.name).startswith(("output", "tensors"))}
    if not changed and any(one.alias_info is not None for one in schema.returns):
        return None
    return [argument.name for argument in schema.arguments], changed


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument or a result of a torch operation; they are in lists and tuples only."""
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    return [one for part in value for one in _tensors(part)] if isinstance(value, (list, tuple)) else []


def range_of(tensor: torch.Tensor) -> Range:
    """From the first to the last element of a tensor."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    steps = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride()))
    return Range(tensor.untyped_storage()._cdata, start, start + (steps + 1) * size)


def _elements(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous tensor."""
    where = range_of(tensor)
    return _bytes_of(tensor.untyped_storage())[where.start : where.stop]


def _bytes_of(storage: torch.UntypedStorage) -> Bytes:
    found = CpuDevice().in_place(storage, 0, storage.nbytes())
    assert found is not None
    return found
