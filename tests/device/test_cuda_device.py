"""CUDA: the order of its calls against a recording stand-in; on a GPU, the contract and the races themselves."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_contract import DeviceContract, random_bytes

from tierstore.device import gpu_kernels, transfers
from tierstore.device.arithmetic import Collection, Update
from tierstore.device.spans import Span
from tierstore.device.streams import ComputeDevice, open_device
from tierstore.device.transfers import CudaDevice
from tierstore.errors import BudgetError, ConfigError
from tierstore.io.memory import Arena


class RecordingCuda:
    """Stands in for `torch.cuda` and writes down what it is asked, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = ["compute"]
        self.devices: list[torch.device] = []
        self.code = 0
        self.is_done = True
        self._names = iter(["h2d", "d2h", "update", "gather", "reduce"])

    def Stream(self, device: torch.device, priority: int = 0) -> str:
        return next(self._names)

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        assert self.devices, "a stream was entered with another device current"
        self.current.append(name)
        self.log.append(f"enter {name}")
        yield
        self.current.pop()

    def current_stream(self, device: torch.device) -> str:
        return self.current[-1]

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.devices.append(device)
        yield
        self.devices.pop()

    def Event(self, blocking: bool) -> RecordedEvent:
        assert blocking
        return RecordedEvent(self)

    def cudart(self) -> RecordingCuda:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.log.append(f"register {nbytes} B, flags {flags}")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append("unregister")
        return self.code


class RecordedEvent:
    def __init__(self, cuda: RecordingCuda) -> None:
        self._cuda = cuda
        self._stream = ""

    def record(self, stream: str) -> None:
        self._stream = stream
        self._cuda.log.append(f"record {stream}")

    def synchronize(self) -> None:
        self._cuda.log.append(f"wait for {self._stream}")

    def query(self) -> bool:
        self._cuda.log.append(f"ask for {self._stream}")
        return self._cuda.is_done


@pytest.fixture
def cuda() -> RecordingCuda:
    return RecordingCuda()


@pytest.fixture
def device(cuda: RecordingCuda) -> CudaDevice:
    return CudaDevice(torch.device("cpu"), cuda=cuda)


def test_order_of_a_groups_life(device: CudaDevice, cuda: RecordingCuda) -> None:
    storage, target = torch.UntypedStorage(0), np.zeros(64, np.uint8)
    device.allocate(storage, 64)
    device.copy_in(storage, 0, random_bytes(64))
    device.copy_out_range(storage, 0, target, device.record())
    device.release(storage, device.record())
    assert cuda.log == [
        "enter h2d",  # the block belongs to h2d
        *("enter h2d", "record h2d", "wait for h2d"),
        *("record compute", "wait for compute", "enter d2h", "record d2h", "wait for d2h"),
        *("record compute", "wait for compute", "enter h2d"),
    ]
    assert np.array_equal(target, random_bytes(64))
    assert storage.nbytes() == 0


@pytest.mark.parametrize("fill", [False, True])
def test_memory_that_torch_fills_is_there_when_it_is_filled(
    device: CudaDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch, fill: bool
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    torch.use_deterministic_algorithms(True)
    try:
        device.allocate(torch.UntypedStorage(0), 64)
    finally:
        torch.use_deterministic_algorithms(False)
    assert cuda.log == ["enter h2d", *(["record h2d", "wait for h2d"] if fill else [])]


def test_the_allocator_is_told_of_the_compute_stream(
    device: CudaDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(record_stream=lambda stream: cuda.log.append(f"used by {stream}"))
    monkeypatch.setattr(transfers, "alias", lambda *_: told)
    device.record_stream(torch.UntypedStorage(16))
    assert device.stream() == "compute"
    assert cuda.log == ["used by compute"]


def test_a_gpu_without_room_is_told(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(storage: torch.UntypedStorage, nbytes: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore.")

    monkeypatch.setattr(transfers, "_enlarge", full)
    told = r"no room for 1024 B \(1 KiB\) of gpu_memory .*: lower gpu_memory \(CUDA out of memory.\)"
    with pytest.raises(BudgetError, match=told):
        device.allocate(torch.UntypedStorage(0), 1024)


def test_a_copy_that_fails_half_way_waits_for_its_first_half(
    device: CudaDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first destination is under DMA until then, and the caller is about to free it."""
    good, bad = torch.ones(4), torch.empty(4, device="meta")
    with pytest.raises(Exception, match="meta"):
        device.copy_out([good, bad], [np.zeros(16, np.uint8), np.zeros(16, np.uint8)], device.record())
    assert cuda.log[-2:] == ["record d2h", "wait for d2h"]
    assert device.counters.totals().d2h_bytes == 0


class Turn:
    """A lock that tells when two have asked for it."""

    def __init__(self) -> None:
        self._lock, self._asking = threading.Lock(), threading.Barrier(2)
        self.both_ask = threading.Event()

    def __enter__(self) -> None:
        if self._asking.wait(10) == 0:
            self.both_ask.set()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_the_mark_of_a_copy_comes_right_behind_it(
    device: CudaDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise both threads would wait for both copies, and the stream would be idle until they wake."""
    turn, storage = Turn(), torch.UntypedStorage(16)
    record = RecordedEvent.record

    def after_both_have_asked(self: RecordedEvent, stream: str) -> None:
        assert turn.both_ask.wait(10)
        record(self, stream)

    monkeypatch.setattr(device._h2d, "turn", turn)
    monkeypatch.setattr(RecordedEvent, "record", after_both_have_asked)
    threads = [threading.Thread(target=device.copy_in, args=(storage, start, random_bytes(8))) for start in (0, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry for entry in cuda.log if not entry.startswith("wait")] == ["enter h2d", "record h2d"] * 2


def test_updates_and_what_they_take_have_a_stream_of_their_own(
    device: CudaDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, part = Span(torch.UntypedStorage(64), 0, 64), torch.ones(16)
    one_queue = ["enter update", "record update", "wait for update"]
    monkeypatch.setattr(device, "_passing", SimpleNamespace(bytes=np.zeros(2 * 512, np.uint8)))
    both = [Collection("fp32", [(0, part, is_first)], total, is_first, None) for is_first in (True, False)]
    device.arithmetic.collect(both)
    assert cuda.log == one_queue
    monkeypatch.setattr(gpu_kernels, "square_lanes", lambda dtype, one: torch.full((1, 64), one.view(torch.float32)[3]))
    sums, totals = np.zeros(3), [Span(torch.full((16,), float(k)).untyped_storage(), 0, 64) for k in range(3)]
    device.arithmetic.collect([Collection("fp32", [], totals[k], False, sums[k : k + 1]) for k in range(3)])
    assert sums.tolist() == [0.0, 64.0, 128.0]
    assert cuda.log[3:] == one_queue * 2, "there is room for the sums of two"
    monkeypatch.setattr(gpu_kernels, "adam", lambda *_: cuda.log.append("adam"))
    update = Update("fp32", total, Span(torch.UntypedStorage(128), 0, 128), total, [], 16)
    device.arithmetic.adam([update] * 2)
    assert cuda.log[9:] == ["enter update", "adam", "record update", "wait for update"]
    with pytest.raises(ConfigError, match="16 weights of fp32, but 64 B of a gradient, and 64 B of state"):
        device.arithmetic.adam([update._replace(state=total)])


def test_a_collective_has_a_stream_of_its_own_and_a_deadline(device: CudaDevice, cuda: RecordingCuda) -> None:
    device.complete("gather", lambda: cuda.log.append("launch"), timeout_s=5.0)
    assert cuda.log == ["enter gather", "launch", "record gather", "ask for gather"]
    cuda.is_done = False
    with pytest.raises(TimeoutError, match="reduce did not end"):
        device.complete("reduce", lambda: None, timeout_s=0.0)


@pytest.mark.parametrize("is_launched", [False, True])
def test_memory_of_a_collective_that_does_not_end_is_kept(
    device: CudaDevice, cuda: RecordingCuda, is_launched: bool
) -> None:
    bucket, storage = torch.ones(4), torch.UntypedStorage(0)
    device.allocate(storage, 64)
    gone = weakref.ref(bucket)

    def launch(used: torch.Tensor = bucket) -> None:
        if not is_launched:
            raise RuntimeError("after its first half")

    cuda.is_done = False
    with pytest.raises((RuntimeError, TimeoutError)):
        device.complete("reduce", launch, timeout_s=0.0)
    del bucket, launch
    device.release(storage, device.record())
    assert gone() is not None
    assert storage.nbytes() == 64
    device.allocate(storage, 64)


def test_a_mark_is_asked_with_its_gpu_current(
    device: CudaDevice, cuda: RecordingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for marks selects no GPU itself, so CUDA would take memory of the first one."""
    seen: list[list[torch.device]] = []
    monkeypatch.setattr(RecordedEvent, "synchronize", lambda self: seen.append(cuda.devices.copy()))
    monkeypatch.setattr(RecordedEvent, "query", lambda self: seen.append(cuda.devices.copy()))
    mark = device.record()
    mark.synchronize()
    mark.is_done()
    assert seen == [[device.torch_device]] * 2


def test_pinning(device: CudaDevice, cuda: RecordingCuda) -> None:
    arena = Arena(8192, device.pin, device.unpin)
    arena.close()
    assert cuda.log == ["register 8192 B, flags 1", "unregister"]
    cuda.code = 2
    with pytest.raises(BudgetError, match=r"could not pin 8192 B \(8 KiB\): error 2"):
        Arena(8192, device.pin, device.unpin)
    with pytest.raises(BudgetError, match="could not unpin"):
        device.unpin(0, 8192)


@pytest.mark.gpu
class TestCuda(DeviceContract):
    @pytest.fixture
    def device(self) -> ComputeDevice:
        return open_device("cuda")

    def test_release_waits_for_the_compute_stream(self, device: ComputeDevice) -> None:
        """Without the mark, this group's slow kernel would read the next group's bytes."""
        storage = self.empty_storage(device)
        nbytes = 2**24
        device.allocate(storage, nbytes)
        device.copy_in(storage, 0, np.full(nbytes, 1, np.uint8))
        view = torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(storage)
        torch.cuda._sleep(200_000_000)
        result = view.sum(dtype=torch.int64)
        device.release(storage, device.record())
        following = self.empty_storage(device)
        device.allocate(following, nbytes)
        device.copy_in(following, 0, np.full(nbytes, 2, np.uint8))
        assert int(result) == nbytes

    def test_memory_that_goes_waits_for_the_stream_that_was_recorded(self, device: ComputeDevice) -> None:
        nbytes, results = 2**24, []
        for value in (1, 2):
            storage = self.empty_storage(device)
            device.allocate(storage, nbytes)
            device.copy_in(storage, 0, np.full(nbytes, value, np.uint8))
            device.record_stream(storage)
            view = torch.empty(0, dtype=torch.uint8, device=device.torch_device).set_(storage)
            torch.cuda._sleep(200_000_000)
            results.append(view.sum(dtype=torch.int64))
            del storage, view
        assert [int(result) for result in results] == [nbytes, 2 * nbytes]

    def test_copy_out_waits_for_its_mark(self, device: ComputeDevice) -> None:
        torch.full((2**20,), 3.0, device=device.torch_device) * 2  # warm-up: loading a kernel waits for those before it
        torch.cuda._sleep(200_000_000)
        gradient = torch.full((2**20,), 3.0, device=device.torch_device) * 2
        target = np.zeros(gradient.nbytes, np.uint8)
        mark = device.record()
        assert not mark.is_done()
        device.copy_out([gradient], [target], mark)
        assert np.all(target.view(np.float32) == 6.0)

    def test_through_a_pinned_arena(self, device: ComputeDevice) -> None:
        arena = Arena(2**22, device.pin, device.unpin)
        pool = arena.pool("staging", 2**22)
        lease: Any = pool.try_reserve(2**22)
        assert torch.from_numpy(lease.array).is_pinned()
        lease.array[:] = random_bytes(2**22)
        storage, target = self.empty_storage(device), np.zeros(2**22, np.uint8)
        device.allocate(storage, 2**22)
        for turn in range(8):  # the same buffer again and again, each time with other bytes
            lease.array[:] = random_bytes(2**22, turn)
            device.copy_in(storage, 0, lease.array)
            lease.array[:] = 0
            device.copy_out_range(storage, 0, target, device.record())
            assert np.array_equal(target, random_bytes(2**22, turn))
        lease.free()
        assert arena.close() == []

    def test_memory_is_given_back(self, device: ComputeDevice) -> None:
        gc.collect()  # of other tests
        before = torch.cuda.memory_allocated(device.torch_device)
        storage = self.empty_storage(device)
        device.allocate(storage, 2**24)
        assert torch.cuda.memory_allocated(device.torch_device) >= before + 2**24
        device.release(storage, device.record())
        assert torch.cuda.memory_allocated(device.torch_device) == before
