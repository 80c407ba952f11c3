"""What a compute device can do, and the choice of one.

Scope: the interface that the layers above use, marks on the compute stream, counters of the link.
Not here: the two implementations (see `device/transfers.py`).
Owner: nothing here has state except the counters, which take their own lock.

[Note: streams and the allocator]
Several streams use a group's storage: the compute stream, one that copies in (h2d), one that copies out (d2h), one that
updates and, with several ranks, one that gathers.
* A storage is allocated while h2d is current, so its block belongs to h2d: once freed, it may be given at once to the
  next allocation on h2d, and be written by a copy that is not ordered after the compute stream. Hence `release` waits
  on the host for a mark that the compute thread recorded after its last use. The last use of a tensor that somebody may
  keep is not known: the allocator is told of the stream (`record_stream`), and checks that when the tensor is freed.
* `copy_in` returns only when the bytes are there: kernels launched later need no event, and the host buffer is free.
* `copy_out` waits on the host for its mark, so that a copy whose mark is far off does not hold up those behind it on
  d2h, and returns only when the bytes have arrived. Its caller holds the sources until then, so that their blocks,
  which belong to the compute stream, are not reused during the copy.
* Threads take turns to queue a copy and the event behind it. Otherwise several copies could be queued before all their
  events, which would be reached only after the last copy: all threads would wake together, with the stream idle.
* Updates on the device, and norms of gradients there, run on a stream of their own, as copies do. Before they
  begin, the host has waited for the work that writes what they read, or reads what they write; at their end the host
  waits for them.
* If queueing a copy fails, the call still waits for the copies queued before: no buffer is given back while a DMA may
  use it.
Apart from marks, no object that outlives a call holds an event, so there is no event to lose.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierstore.config import DEVICE
from tierstore.errors import ConfigError
from tierstore.trace import Tracer

if TYPE_CHECKING:
    from tierstore.device.arithmetic import Arithmetic

Bytes = npt.NDArray[np.uint8]


class Mark(Protocol):
    """A point in the compute stream: all work queued before it."""

    def synchronize(self) -> None:
        """Blocks the host until that work is done. Any thread, any number of times."""

    def is_done(self) -> bool:
        """Whether that work is done, without waiting."""


class Reached:
    """A mark that is reached already."""

    def synchronize(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Totals of a device's link since it was opened."""

    h2d_bytes: int = 0
    d2h_bytes: int = 0


class LinkCounters:
    """Counts the bytes that have reached the other tier, mostly by copies. Any thread.

    Args:
        clock: seconds, monotonic; that of the tracer, if there is one.
        tracer: shows each copy on the track of its direction.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, tracer: Tracer | None = None) -> None:
        self.clock = clock
        self._tracer = tracer or Tracer(clock, enabled=False)
        self._lock = threading.Lock()
        self._totals = LinkTraffic()

    def add(self, direction: Literal["h2d", "d2h"], nbytes: int, start: float) -> None:
        """A copy that began at `start` has ended."""
        self._tracer.span(direction, "copy", start, self.clock(), bytes=nbytes)
        with self._lock:
            t = self._totals
            if direction == "h2d":
                self._totals = LinkTraffic(t.h2d_bytes + nbytes, t.d2h_bytes)
            else:
                self._totals = LinkTraffic(t.h2d_bytes, t.d2h_bytes + nbytes)

    def totals(self) -> LinkTraffic:
        """Both figures, as of one moment."""
        return self._totals


class ComputeDevice(Protocol):
    """A device that computes groups. See [Note: streams and the allocator].

    Copies never touch the version counter of a tensor: a storage is written through an alias.
    """

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Which implementation this is."""

    @property
    def torch_device(self) -> torch.device:
        """Where its storages live."""

    @property
    def at_once_bytes(self) -> int:
        """The most bytes to copy on the loop thread: that takes less time than the hop to a worker and back."""

    @property
    def small_bytes(self) -> int:
        """The most bytes whose copy takes less time than a job of its own."""

    @property
    def counters(self) -> LinkCounters:
        """Counters of what moved over the link."""

    @property
    def arithmetic(self) -> Arithmetic:
        """Computation on this device beside that of the model."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Gives an empty storage its memory, contents undefined. Any thread.

        Raises:
            ValueError: the storage is not empty; nothing was changed.
            BudgetError: a GPU has no room.
        """

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int, source: Bytes) -> None:
        """Copies host bytes to a range of a storage; several workers may fill different ranges at once.

        Threads: a worker; the loop's for at most `at_once_bytes`. Blocks: until the bytes are valid for kernels
        launched from now on, on any stream.
        """

    def in_place(self, storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> Bytes | None:
        """A view of a range of a storage, if the CPU can access it; None: the range has to be copied.

        The caller ensures that the storage is not released meanwhile, waits for its own mark, as for copies, and counts
        the bytes that reach the other tier. Threads: any.
        """

    def address_of(self, tensor: torch.Tensor) -> int | None:
        """The address of a contiguous tensor's elements, if the CPU can access them; None: they have to be copied.

        Threads: any; the reader waits for its own mark, as for copies.
        """

    def record(self) -> Mark:
        """A mark after all work that is queued so far on the calling thread's current compute stream.

        Threads: the one that launches the compute (training or autograd).
        """

    def stream(self) -> Hashable:
        """A key that tells the calling thread's current compute stream from others."""

    def record_stream(self, storage: torch.UntypedStorage) -> None:
        """Notes that the current stream uses a storage that is not released, but freed with its last reference.

        Its memory is reused only after all work that this stream has queued by the time it is freed. Threads: as for
        `record`.
        """

    def copy_out(self, sources: Sequence[torch.Tensor], destinations: Sequence[Bytes], after: Mark) -> None:
        """Copies elements of tensors, in order, to host bytes; tensors need not be contiguous.

        Threads: a worker; the loop's for at most `at_once_bytes`. Blocks: until all bytes have arrived; the caller
        holds the sources until then.

        Raises:
            ValueError: numbers or sizes differ; nothing was copied.
        """

    def copy_out_range(self, storage: torch.UntypedStorage, offset_bytes: int, destination: Bytes, after: Mark) -> None:
        """Copies a range of a storage to host bytes. Threads and Blocks as for `copy_out`."""

    def copy_out_ranges(self, ranges: Sequence[tuple[torch.UntypedStorage, int, Bytes]], after: Mark) -> None:
        """`copy_out_range` for several ranges in one go: storage, offset and destination of each."""

    def complete(self, link: str, launch: Callable[[], object], timeout_s: float) -> None:
        """Launches work that other ranks take part in, on the stream of a link, and waits for it.

        Threads: one per link. Blocks: until the results are valid for kernels launched from now on, on any stream.

        Raises:
            TimeoutError: the other ranks did not take part in time. (On a CPU the process group itself raises.) After
                this or another error a GPU may still write results of the work: no memory is released any more.
        """

    def passing(self) -> Bytes:
        """Host memory of the calling thread's own, for data that only pass through; contents undefined."""

    def release(self, storage: torch.UntypedStorage, after: Mark) -> None:
        """Frees a storage's memory, once the mark is reached.

        Threads: a worker; the loop's for at most `at_once_bytes`. Blocks: until then.
        """

    def pin(self, address: int, nbytes: int) -> None:
        """Makes host memory reachable by DMA (see `Arena(register=)`).

        Raises:
            BudgetError: the system refused.
        """

    def unpin(self, address: int, nbytes: int) -> None:
        """Undoes `pin`, for the same range; no copy may be in flight there."""

    def current(self) -> AbstractContextManager[None]:
        """In this block it is the calling thread's current device."""

    def range(self, name: str) -> AbstractContextManager[None]:
        """A named range in a profile (NVTX); ranges may overlap, and end in another thread."""


def open_device(
    name: str, clock: Callable[[], float] = time.perf_counter, tracer: Tracer | None = None
) -> ComputeDevice:
    """The device called "cpu", "cuda" or "cuda:N".

    Args:
        tracer: gets a span for each copy; blocks that it measures are ranges in CUDA's profilers, too.

    Raises:
        ConfigError: there is no such device here.
    """
    from tierstore.device.transfers import CpuDevice, CudaDevice

    counters, device = LinkCounters(clock, tracer), check_device(name)
    if device.type == "cpu":
        return CpuDevice(counters)
    index = torch.cuda.current_device() if device.index is None else device.index
    cuda = CudaDevice(torch.device("cuda", index), counters)
    if tracer is not None:
        tracer.annotate = cuda.range
    return cuda


def check_device(name: str) -> torch.device:
    """The device of that name; it is not initialized.

    Raises:
        ConfigError: as `open_device`.
    """
    if not DEVICE.fullmatch(name):
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {name!r}")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} needs CUDA, which torch {torch.__version__} does not find; use 'cpu'")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device
