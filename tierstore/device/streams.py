"""What a compute device can do, and the choice of one.

Scope: the face that the layers above use, marks on the compute stream, counters of the link.
Not here: the two implementations (see `device/transfers.py`).
Owner: nothing here has state but the counters, which take their own lock.

[Note: streams and the allocator]
Streams meet at a group's storage: the compute stream, one that copies in (h2d), one that copies out (d2h), one that
updates, and of several ranks one that gathers.
* A storage is allocated while h2d is current, so its block belongs to h2d: freed, it may be handed out again at once to
  the next allocation on h2d, and be written by a copy that is not ordered after the compute stream. Hence `release`
  waits on the host for a mark that the compute thread recorded after its last use. Of a tensor that somebody may keep
  nobody knows the last use: the allocator is told of the stream (`record_stream`), and looks when it goes.
* `copy_in` returns only when the bytes are there: kernels launched later need no event, and the host buffer is free.
* `copy_out` waits on the host for its mark, so that a copy whose mark is far off does not hold up those behind it on
  d2h, and returns only when the bytes have arrived. Its caller holds the sources until then, so that their blocks,
  which belong to the compute stream, are not handed out again under the copy.
* Threads take turns at queueing a copy and the event behind it. An event that others' copies come before is reached
  with the last of them: all would wake together, and the stream have nothing to do until then.
* Updates and norms of what lives here run on a stream of their own, as copies do: they begin when the host has waited
  for what they read, and for what reads what they write; they end when the host has waited for them.
* A failed issue still waits for the copies issued before it: no buffer is given back while a DMA may use it.
No object outlives a call with an event inside, so there is no event to lose.
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
    """A mark with nothing before it that is not over."""

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
    """Counts what has reached the other tier, most of it by copies. Any thread.

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
        """Both figures, of one moment."""
        return self._totals


class ComputeDevice(Protocol):
    """Where groups are computed on. See [Note: streams and the allocator].

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
        """So many bytes may be copied on the loop thread: that takes less time than the way to a worker and back."""

    @property
    def small_bytes(self) -> int:
        """So many bytes take less time to copy than a job of their own."""

    @property
    def counters(self) -> LinkCounters:
        """What moved over the link."""

    @property
    def arithmetic(self) -> Arithmetic:
        """What is computed here beside the model."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Gives an empty storage its memory, contents undefined. Any thread.

        Raises:
            ValueError: the storage is not empty; nothing was changed.
            BudgetError: a GPU has no room.
        """

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int, source: Bytes) -> None:
        """Host bytes to a range of a storage; several workers may fill different ranges at once.

        Threads: a worker; the loop's for at most `at_once_bytes`. Blocks: until the bytes are valid for kernels
        launched from now on, on any stream.
        """

    def in_place(self, storage: torch.UntypedStorage, offset_bytes: int, nbytes: int) -> Bytes | None:
        """A range of a storage itself, where the processor reaches it; None: it has to be copied.

        Whoever uses it sees to it that the storage is not released meanwhile, waits for its own mark, as for copies,
        and counts what reaches the other tier. Threads: any.
        """

    def address_of(self, tensor: torch.Tensor) -> int | None:
        """Where the elements of a contiguous tensor lie, if the processor reaches them; None: they have to be copied.

        Threads: any; who reads there waits for its own mark, as for copies.
        """

    def record(self) -> Mark:
        """A mark after all that the calling thread's current compute stream has queued so far.

        Threads: the one that launches the compute (training or autograd).
        """

    def stream(self) -> Hashable:
        """What tells the calling thread's current compute stream from others."""

    def record_stream(self, storage: torch.UntypedStorage) -> None:
        """A storage that is not released, but goes with its last reference, may be used until then.

        Nobody is given its memory before what the stream that is current now has queued by then is over. Threads: as
        for `record`.
        """

    def copy_out(self, sources: Sequence[torch.Tensor], destinations: Sequence[Bytes], after: Mark) -> None:
        """Elements of tensors, in order, to host bytes; tensors need not be contiguous.

        Threads: a worker; the loop's for at most `at_once_bytes`. Blocks: until all bytes have arrived; the caller
        holds the sources until then.

        Raises:
            ValueError: numbers or sizes differ; nothing was copied.
        """

    def copy_out_range(self, storage: torch.UntypedStorage, offset_bytes: int, destination: Bytes, after: Mark) -> None:
        """A range of a storage to host bytes. Threads and Blocks as for `copy_out`."""

    def copy_out_ranges(self, ranges: Sequence[tuple[torch.UntypedStorage, int, Bytes]], after: Mark) -> None:
        """The same of several, in one go: storage, offset and destination of each."""

    def complete(self, link: str, launch: Callable[[], object], timeout_s: float) -> None:
        """Launches work that other ranks take part in, on the stream of a link, and waits for it.

        Threads: one per link. Blocks: until the results are valid for kernels launched from now on, on any stream.

        Raises:
            TimeoutError: the others did not come in time. (On a CPU the process group itself says so.) After this or
                another error a GPU may still write what was launched for: no memory is released any more.
        """

    def passing(self) -> Bytes:
        """Some host memory of the calling thread's own, for what passes through on its way; contents undefined."""

    def release(self, storage: torch.UntypedStorage, after: Mark) -> None:
        """Takes a storage's memory away, once the mark is reached.

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
        """In here it is the calling thread's current device."""

    def range(self, name: str) -> AbstractContextManager[None]:
        """A named range in a profile (NVTX); ranges may overlap, and end in another thread."""


def open_device(
    name: str, clock: Callable[[], float] = time.perf_counter, tracer: Tracer | None = None
) -> ComputeDevice:
    """The device called "cpu", "cuda" or "cuda:N".

    Args:
        tracer: gets a span for each copy; what it measures is a range in CUDA's profilers too.

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
    """The device of that name, where nothing is begun.

    Raises:
        ConfigError: as `open_device`.
    """
    device = torch.device(name)
    if name == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {name!r}")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} needs CUDA, which torch {torch.__version__} does not find; use 'cpu'")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device
