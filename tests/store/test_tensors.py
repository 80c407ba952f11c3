"""The public store of named tensors: what its users rely on, call by call."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import threading
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice, queueing
from tensor_stores import (
    CHUNK,
    PAGE,
    TIERS,
    QuickBackend,
    assert_at_rest,
    block,
    config,
    flip,
    named_files,
    opened,
    pack_files,
    run,
    settled,
    value_of,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from tierstore import TensorStore, Tier
from tierstore.config import Codec, TierConfig
from tierstore.device.streams import Mark
from tierstore.device.transfers import CpuDevice
from tierstore.errors import (
    BudgetError,
    ChecksumMismatch,
    ClosedError,
    ConfigError,
    FormatError,
    StorageError,
    StoreLocked,
    Timeout,
)
from tierstore.io.backend import Backend
from tierstore.io.file_threads import FileThreads
from tierstore.store import shelf
from tierstore.store.buffers import plan_buffers
from tierstore.store.entries import recorded_entries
from tierstore.store.extents import ExtentLayout
from tierstore.store.lock import StoreLock
from tierstore.store.manifest import Generation
from tierstore.store.manifest_files import Manifests
from tierstore.store.shelf import Directories
from tierstore.store.slots import ChunkRecord

pytestmark = pytest.mark.usefixtures("no_leaks")


# --- what is stored comes back -----------------------------------------------------------------------------------


ALL_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex128, torch.complex64, torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


def sample(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count, np.uint8)
    return torch.frombuffer(bytearray(raw.tobytes() or b"\0"), dtype=torch.uint8)[:count].view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert other.is_contiguous()
        assert raw(other) == raw(tensor), name


CODECS = [codec for codec in Codec if codec is not Codec.AUTO]
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(ALL_DTYPES), SHAPES), max_size=6)


@settings(max_examples=60)
@given(TENSORS, st.integers(1, 8))
def test_layout_is_aligned_gapless_and_survives_description(
    tensors: list[tuple[torch.dtype, tuple[int, ...]]], pages: int
) -> None:
    layout = ExtentLayout.of([(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)], pages * PAGE)
    assert [slot.name for slot in layout.slots] == [f"t{i}" for i in range(len(tensors))]
    assert sum(slot.nbytes for slot in layout.slots) == layout.nbytes
    widths = [slot.dtype.itemsize for slot in sorted(layout.slots, key=lambda slot: slot.offset) if slot.nbytes]
    assert widths == sorted(widths, reverse=True)
    assert all(slot.offset % slot.dtype.itemsize == 0 for slot in layout.slots)
    seen = [part for chunk in layout.chunks() for part in layout.parts(chunk)]
    assert sum(stop - start for _, start, stop in seen) == layout.nbytes
    assert ExtentLayout.from_description(layout.describe(), pages * PAGE) == layout


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("disks", [1, 3])
def test_every_dtype_and_shape_on_every_tier_and_after_reopening(tmp_path: Path, codec: Codec, disks: int) -> None:
    given = {str(d): sample(d, (3, 5), i) for i, d in enumerate(ALL_DTYPES)}
    given |= {
        "scalar": torch.tensor(1.5), "none": torch.empty(0, 3), "large": sample(torch.float32, (3, 20000), 5),
        "turned": sample(torch.bfloat16, (40, 50), 6).t(), "apart": sample(torch.int32, (100,), 7)[::3],
        "mirror": sample(torch.complex64, (9,), 8).conj(), "zeros": torch.zeros(50000),
        "one of a row": sample(torch.float32, (1, 7), 9)[:, 3], "none of a row": torch.empty(0, 7)[:, 0],
    }  # fmt: skip
    expected = {name: tensor.resolve_conj().contiguous() for name, tensor in given.items()}
    options = {"codec": codec, "nvme": [tmp_path / f"d{i}" for i in range(disks)], "cpu_memory": "4MiB",
               "gpu_memory": "1MiB"}  # fmt: skip

    async def main() -> None:
        async with opened(tmp_path, **options) as store:
            for tier in TIERS:
                await store.put(tier.value, given, tier=tier)
                await store.put(f"empty on {tier.value}", {}, tier=tier)
            for name in store.names():
                async with store.acquire(name) as found:
                    assert_same(found, {} if name.startswith("empty") else expected)
            assert_at_rest(store)
        async with opened(tmp_path, resume="must", **options) as store:
            assert store.names() == [n for t in TIERS for n in (t.value, f"empty on {t.value}")]
            for tier in TIERS:
                assert store.home(tier.value) is tier
                async with store.acquire(tier.value) as found:
                    assert_same(found, expected)

    run(main())


def test_a_name_that_can_be_put_can_be_read(tmp_path: Path) -> None:
    """A pack joins the names of an entry and of a tensor, so each alone may be a name that headers reserve."""

    async def scenario() -> None:
        async with opened(tmp_path) as store:
            await store.put("__metadata__", {"__metadata__": torch.ones(3)}, tier=Tier.NVME)
        async with opened(tmp_path, resume="must") as store, store.acquire("__metadata__") as found:
            assert_same(found, {"__metadata__": torch.ones(3)})

    run(scenario())


def test_packs_are_safetensors_files(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", {"b": torch.arange(5), "w": torch.ones(2, 3)}, tier=Tier.NVME)

    run(main())
    (file,) = (tmp_path / "store").glob("put-*")
    loaded = safetensors.torch.load_file(file)
    assert loaded["h.0/0.b"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["h.0/0.w"].tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": torch.eye(2).to_sparse()}, "tensor 'w' of 'h.0' is torch.sparse_coo"),
        ({"w": torch.empty(2, device="meta")}, "tensor 'w' of 'h.0' is on meta"),
        ({"w": [1.0]}, "values are tensors, not list"),
        ({"w": FakeTensorMode().from_tensor(torch.ones(4))}, "tensor 'w' of 'h.0' is a FakeTensor; only dense tensors"),
        ({"a\nb": torch.ones(1)}, "control character"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, tensors: dict[str, Any], text: str) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            with pytest.raises(ConfigError, match=re.escape(text)):
                await store.put("h.0", tensors, tier=Tier.NVME)
            assert "h.0" not in store

    run(main())


@pytest.mark.parametrize(
    ("name", "text"),
    [(5, "text, not int"), (["h"], "text, not list"), ("a\nb", "control character"), ("\udc80", "lone surrogate")],
)
def test_an_entry_without_tensors_has_a_name_that_can_be_read_back(tmp_path: Path, name: Any, text: str) -> None:
    """A manifest with such a name could not be read, and so none of the other entries."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1), tier=Tier.NVME)
            with pytest.raises(ConfigError, match=text):
                await store.put(name, {}, tier=Tier.NVME)
        async with opened(tmp_path, resume="must") as store:
            assert store.names() == ["h.0"]

    run(main())


@pytest.mark.filterwarnings("ignore")  # torch warns that they are a prototype
def test_a_nested_tensor_cannot_be_stored(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            with pytest.raises(ConfigError, match=r"^tensor 'w' of 'h.0' is nested; only dense tensors"):
                await store.put("h.0", {"w": torch.nested.nested_tensor([torch.ones(2)])}, tier=Tier.NVME)

    run(main())


# --- tiers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [(a, b) for a in TIERS for b in TIERS])
def test_move_keeps_the_values_and_gives_the_old_home_back(tmp_path: Path, path: tuple[Tier, Tier]) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1, 50000), tier=path[0])
            async with store.acquire("h.0") as held:
                await store.move("h.0", path[1])
                assert held["w"].unique().tolist() == [1.0]
            assert store.home("h.0") is path[1]
            usage = store.usage()
            assert {tier: usage[tier].count for tier in TIERS} == {t: int(t is path[1]) for t in TIERS}
            assert usage[path[1]].bytes == 200000
            assert usage[path[1]].share == 1.0
            assert await value_of(store, "h.0") == 1
            assert_at_rest(store)

    run(main())


def test_usage_counts_bytes_and_shares(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            assert [use.share for use in store.usage().values()] == [0.0, 0.0, 0.0]
            await store.put("a", block(1), tier=Tier.GPU)
            await store.put("b", block(1), tier=Tier.CPU)
            await store.put("c", block(1, CHUNK // 2), tier=Tier.NVME)
            usage = store.usage()
            assert [(use.count, use.bytes, use.share) for use in usage.values()] == [
                (1, CHUNK, 0.25), (1, CHUNK, 0.25), (1, 2 * CHUNK, 0.5),
            ]  # fmt: skip
            assert usage[Tier.GPU].used_bytes == usage[Tier.CPU].used_bytes == CHUNK
            assert usage[Tier.NVME].capacity_bytes is None

    run(main())


def test_memory_in_pieces_is_used_to_the_last_page(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            capacity = store.usage()[Tier.CPU].capacity_bytes
            assert capacity is not None
            count = capacity // (3 * PAGE)
            for i in range(count):
                await store.put(f"{i}", block(i, 3 * PAGE // 4), tier=Tier.CPU)
            for i in range(0, count, 2):
                await store.delete(f"{i}")
            free = capacity - store.usage()[Tier.CPU].used_bytes
            large = torch.arange(free // 4, dtype=torch.float32)
            await store.put("large", {"w": large}, tier=Tier.CPU)
            assert store.usage()[Tier.CPU].used_bytes == capacity
            for tier in (Tier.NVME, Tier.CPU, Tier.GPU, Tier.CPU, Tier.NVME):
                async with store.acquire("large", modify=True) as tensors:
                    assert torch.equal(tensors["w"], large)
                    tensors["w"] += 1
                    large += 1
                await store.move("large", tier)
                async with store.acquire("large") as tensors:
                    assert torch.equal(tensors["w"], large)
            for i in range(1, count, 2):
                assert await value_of(store, f"{i}") == i

    run(main())


def test_without_a_directory_there_is_no_nvme_tier() -> None:
    async def main() -> None:
        async with opened(None) as store:
            await store.put("a", block(1), tier=Tier.CPU)
            await store.move("a", Tier.GPU)
            assert await value_of(store, "a") == 1
            for call in (store.put("b", block(1), tier=Tier.NVME), store.move("a", Tier.NVME), store.commit()):
                with pytest.raises(ConfigError, match="no NVMe tier"):
                    await call
        with pytest.raises(ConfigError, match="needs a store"):
            async with opened(None, resume="must"):
                pass

    run(main())


# --- acquire -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_nested_and_concurrent_acquires_share_one_load(tmp_path: Path, tier: Tier) -> None:
    async def main() -> None:
        backend = QuickBackend()
        async with opened(tmp_path, backend=backend) as store:
            await store.put("h.0", block(3), tier=tier)
            reads, addresses = backend.counters.totals().read_bytes, set()

            async def use() -> None:
                async with store.acquire("h.0") as outer, store.acquire("h.0") as inner:
                    await asyncio.sleep(0)
                    addresses.update({outer["w"].data_ptr(), inner["w"].data_ptr()})
                    assert outer["w"][-1].item() == 3

            await asyncio.gather(*(use() for _ in range(20)))
            assert len(addresses) == 1
            # the header, which every opening of the file verifies, and one chunk
            assert backend.counters.totals().read_bytes - reads == (PAGE + CHUNK if tier is Tier.NVME else 0)
            assert_at_rest(store)

    run(main())


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_changes_are_kept_only_by_modify(tmp_path: Path, tier: Tier, is_committed: bool) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1), tier=tier)
            if is_committed:
                await store.commit()
            async with store.acquire("h.0", modify=True) as tensors:
                tensors["w"] += 1
            assert await value_of(store, "h.0") == 2
            if tier is not Tier.GPU:
                async with store.acquire("h.0") as tensors:
                    tensors["w"] += 1
                assert await value_of(store, "h.0") == 2
                with torch.inference_mode():
                    async with store.acquire("h.0") as tensors:
                        tensors["w"] += 1
                assert await value_of(store, "h.0") == 2
                with pytest.raises(ZeroDivisionError):  # noqa: PT012
                    async with store.acquire("h.0", modify=True) as tensors:
                        tensors["w"] += 1
                        raise ZeroDivisionError
                assert await value_of(store, "h.0") == 2
            assert_at_rest(store)
        async with opened(tmp_path) as store:
            assert await value_of(store, "h.0") == 2

    run(main())


@pytest.mark.parametrize("modify", [True, False])
def test_what_is_put_into_the_mapping_is_refused_and_not_lost_in_silence(tmp_path: Path, modify: bool) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("a", block(1), tier=Tier.NVME)
            for change in (lambda x: x.update(w=x["w"] + 1), lambda x: x.update(z=x["w"]), lambda x: x.pop("w")):
                with pytest.raises(ConfigError, match="of 'a' was replaced in the mapping"):
                    async with store.acquire("a", modify=modify) as tensors:
                        change(tensors)
                assert await value_of(store, "a") == 1
            for give_other_memory in (
                lambda w: setattr(w, "data", w + 1), lambda w: w.set_(w + 1), lambda w: w.resize_(1),
            ):  # fmt: skip
                with pytest.raises(ConfigError, match="has other memory or another shape now"):
                    async with store.acquire("a", modify=modify) as tensors:
                        give_other_memory(tensors["w"])
                assert await value_of(store, "a") == 1
            async with store.acquire("a", modify=True) as tensors:
                tensors["w"].data += 1
            assert await value_of(store, "a") == 2
            assert await store.prefetch("a") == ["a"]
            with pytest.raises(ConfigError, match="an entry is a mapping of names to tensors, not list"):
                await store.put("b", [], tier=Tier.CPU)  # type: ignore[arg-type]
            assert_at_rest(store)

    run(main())


def test_on_the_device_tier_changes_stay_and_are_committed(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1), tier=Tier.GPU)
            await store.commit()
            async with store.acquire("h.0") as tensors:
                tensors["w"] += 1
            with contextlib.suppress(ZeroDivisionError):
                async with store.acquire("h.0", modify=True) as tensors:
                    tensors["w"] += 1
                    raise ZeroDivisionError
        async with opened(tmp_path) as store:
            assert await value_of(store, "h.0") == 3

    run(main())


@pytest.mark.parametrize("tier", TIERS)
def test_acquired_tensors_outlive_replacement_deletion_and_eviction(tmp_path: Path, tier: Tier) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("h.0", block(1), tier=tier)
            async with store.acquire("h.0") as first:
                await store.put("h.0", block(2), tier=tier)
                async with store.acquire("h.0", modify=True) as second:
                    await store.delete("h.0")
                    assert "h.0" not in store
                    second["w"] += 1  # seen by nobody any more
                    assert (first["w"][0].item(), second["w"][0].item()) == (1, 3)
            assert store.usage()[Tier.GPU].used_bytes == 0
            await store.put("h.0", block(4), tier=Tier.NVME)
            async with store.acquire("h.0") as kept:
                pass
            for i in range(8):
                await store.put(f"other.{i}", block(5), tier=Tier.NVME)
                await value_of(store, f"other.{i}")
            assert kept["w"].unique().tolist() == [4.0]  # past its release: not promised, but never a crash

    run(main())


def test_unknown_names_and_tiers(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            for call in (store.move("x", Tier.CPU), store.delete("x"), store.prefetch(["x"])):
                with pytest.raises(KeyError, match="no entry 'x'"):
                    await call
            with pytest.raises(KeyError, match="no entry 'x'"):
                async with store.acquire("x"):
                    pass
            with pytest.raises(ConfigError, match="tier must be one of gpu, cpu, nvme, not 'disk'"):
                await store.put("x", {}, tier="disk")  # type: ignore[arg-type]

    run(main())
    with pytest.raises(ConfigError, match="resume must be one of"):
        TensorStore.open(config(tmp_path), resume="perhaps")


class PendingDevice(CpuDevice):
    """Its marks are reached only when somebody waits for them, as on a busy device."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[PendingMark] = []

    def record(self) -> Mark:
        self.marks.append(PendingMark())
        return self.marks[-1]


class PendingMark:
    def __init__(self) -> None:
        self.was_waited_for = False

    def synchronize(self) -> None:
        self.was_waited_for = True

    def is_done(self) -> bool:
        return self.was_waited_for


def test_no_device_memory_goes_before_the_work_that_uses_it_is_over(tmp_path: Path) -> None:
    async def main() -> None:
        device = PendingDevice()
        tiers = config(tmp_path, gpu_memory=2 * CHUNK)
        async with TensorStore.open(tiers, backend=QuickBackend(), device=device) as store:
            for i in range(4):
                await store.put(f"{i}", block(i), tier=Tier.NVME)
            for i in range(8):
                device.marks.clear()
                async with store.acquire(f"{i % 4}") as tensors:
                    assert tensors["w"][0].item() == i % 4
                    gone = store._entries[f"{i % 4}"].copy
                release = device.marks[-1]
                await store.prefetch([f"{(i + 2) % 4}"])
                async with store.acquire(f"{(i + 1) % 4}"), store.acquire(f"{(i + 2) % 4}"):
                    assert gone is not None
                    assert gone.storage is None
                    assert release.was_waited_for
            await store.put("home", block(9), tier=Tier.GPU)
            assert await value_of(store, "home") == 9
            await store.delete("home")
            await settled(store)
            assert_at_rest(store)

    run(main())


def test_a_load_waits_for_no_kernel_and_what_is_written_over_does(tmp_path: Path) -> None:
    async def main() -> None:
        device = PendingDevice()
        async with TensorStore.open(config(tmp_path), backend=QuickBackend(), device=device) as store:
            await store.put("a", block(1), tier=Tier.NVME)
            device.marks.clear()
            async with store.acquire("a", modify=True) as mine:
                assert not any(mark.was_waited_for for mark in device.marks)
                mine["w"] += 1
                with pytest.raises(ZeroDivisionError):  # nobody gets this copy any more
                    async with store.acquire("a", modify=True):
                        raise ZeroDivisionError
                await store.move("a", Tier.GPU)
                async with store.acquire("a") as read:
                    assert read["w"][0].item() == 1
                reader = device.marks[-1]
                assert not reader.was_waited_for
            assert reader.was_waited_for
            assert await value_of(store, "a") == 2

    run(main())


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_would_race_on_a_gpu(tmp_path: Path, tier: Tier) -> None:
    async def main() -> None:
        device = LateDevice()
        tiers = config(tmp_path, gpu_memory=(8 if tier is Tier.GPU else 2) * CHUNK)
        async with TensorStore.open(tiers, backend=QuickBackend(), device=device) as store:
            with queueing(device):
                for i in range(4):
                    await store.put(f"{i}", {"w": torch.full((CHUNK // 4,), float(i))}, tier=tier)
                for i in [0, 1, 2, 3] * 2:
                    async with store.acquire(f"{i}") as read:
                        product = read["w"] * 2
                    await store.put("product", {"w": product}, tier=tier)
                    async with store.acquire(f"{i}", modify=True) as changed:
                        changed["w"] += 1
                    await store.prefetch([f"{(i + 1) % 4}"])
                    await store.commit()
                    await store.move(f"{i}", Tier.NVME)
                    await store.move(f"{i}", tier)
                assert [await value_of(store, f"{i}") for i in range(4)] == [2, 3, 4, 5]
                await store.delete("3")
                await settled(store)
        assert device.hazards == []

    run(main())


@pytest.mark.parametrize(("modify", "ends_first"), [(False, False), (True, False), (False, True)])
def test_what_a_graph_keeps_may_be_used_to_its_end(tmp_path: Path, modify: bool, ends_first: bool) -> None:
    """No mark of the store is behind backward's kernel, and the graph lets go of the weights once that is queued."""

    async def main() -> None:
        device, x = LateDevice(), torch.ones(4, 128, requires_grad=True)
        tiers = config(tmp_path, gpu_memory=2 * CHUNK)
        async with TensorStore.open(tiers, backend=QuickBackend(), device=device) as store:
            for i in range(3):
                await store.put(f"{i}", {"w": torch.full((128, 128), float(i))}, tier=Tier.CPU)
            with queueing(device):
                async with store.acquire("2", modify=modify) as tensors:
                    y = x @ tensors["w"]
                del tensors
                if ends_first:  # when the store drops the weights, only a kernel that has not run uses them
                    y.sum().backward()
                for i in range(2):
                    assert (await value_of(store, f"{i}")) == i
                assert store._entries["2"].copy is None
                if not ends_first:
                    y.sum().backward()
                device.record().synchronize()
        assert x.grad is not None
        assert x.grad[0, 0].item() == 2 * 128
        assert device.hazards == []

    run(main())


def test_work_is_marked_on_the_stream_of_who_calls(tmp_path: Path) -> None:
    """`torch.cuda.stream` is per thread: in another turn of the loop, the stream of another task is current."""

    class OfStreams(CpuDevice):
        current, marked = "mine", ""

        def record(self) -> Mark:
            self.marked += f" {self.current}"
            return super().record()

    async def other(device: OfStreams) -> None:
        while True:
            device.current = "another"
            await asyncio.sleep(0)

    async def main() -> None:
        device = OfStreams()
        async with TensorStore.open(config(tmp_path), backend=QuickBackend(), device=device) as store:
            task = asyncio.create_task(other(device))

            async def first_mark(work: Coroutine[Any, Any, Any]) -> str:
                device.current, device.marked = "mine", ""
                await work
                return device.marked.split()[0]

            async def modified() -> None:
                async with store.acquire("a", modify=True):
                    device.current, device.marked = "mine", ""

            assert await first_mark(store.put("a", block(1), tier=Tier.NVME)) == "mine"
            assert await first_mark(modified()) == "mine"
            task.cancel()

    run(main())


# --- budgets -----------------------------------------------------------------------------------------------------


def smallest(error: pytest.ExceptionInfo[BudgetError], option: str) -> int:
    match = re.search(rf"smallest {option} that fits is (\d+) B", str(error.value))
    assert match is not None, str(error.value)
    return int(match[1])


def test_acquired_ones_that_exceed_the_budget_get_the_smallest_that_fits(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, gpu_memory=2 * CHUNK) as store:
            for i in range(3):
                await store.put(f"{i}", block(i), tier=Tier.NVME)
            async with store.acquire("0"), store.acquire("1"):
                with pytest.raises(BudgetError) as error:
                    async with store.acquire("2"):
                        pass
                assert smallest(error, "gpu_memory") == 3 * CHUNK
                assert await value_of(store, "0") == 0
            assert await value_of(store, "2") == 2
            assert_at_rest(store)
        async with (
            opened(tmp_path, gpu_memory=3 * CHUNK) as store,
            store.acquire("0"), store.acquire("1"), store.acquire("2"),
        ):  # fmt: skip
            pass

    run(main())


@pytest.mark.parametrize("cpu_chunks", [4, 7, 16, 40])
@pytest.mark.parametrize("codec", CODECS)
def test_a_full_cpu_tier_says_what_would_fit(tmp_path: Path, cpu_chunks: int, codec: Codec) -> None:
    async def main() -> None:
        async with opened(None, cpu_memory=cpu_chunks * CHUNK, codec=codec) as store:
            count = 0
            with pytest.raises(BudgetError) as error:  # noqa: PT012
                for count in range(1000):
                    await store.put(f"{count}", block(count), tier=Tier.CPU)
            enough = smallest(error, "cpu_memory")
            with pytest.raises(BudgetError):
                await store.put("0", block(0), tier=Tier.CPU)  # the old one stays until the new one is whole
            if count:
                assert await value_of(store, "0") == 0
        for cpu_memory, fits in ((enough, True), (enough - 4096, False)):
            async with opened(None, cpu_memory=cpu_memory, codec=codec) as store:
                with contextlib.nullcontext() if fits else pytest.raises(BudgetError):
                    for i in range(count + 1):
                        await store.put(f"{i}", block(i), tier=Tier.CPU)

    run(main())


def test_a_cpu_memory_without_room_for_buffers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as error:
        plan_buffers(CHUNK, CHUNK, 2, Codec.LZ4)
    assert plan_buffers(smallest(error, "cpu_memory"), CHUNK, 2, Codec.LZ4).resident_bytes == 0


def test_a_cpu_memory_that_no_machine_has_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with TensorStore.open(TierConfig(cpu_memory="1024TiB", nvme=[tmp_path / "store"])):
            pass

    with pytest.raises(BudgetError, match="a store with this cpu_memory takes 1024 TiB of CPU memory"):
        run(main())
    assert not any(tmp_path.iterdir())


def test_a_store_that_outgrew_its_budgets_opens_with_the_smallest_it_names(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            for i in range(6):
                await store.put(f"{i}", block(i), tier=Tier.CPU if i % 2 else Tier.GPU)
        for option in ("gpu_memory", "cpu_memory"):
            with pytest.raises(BudgetError) as error:
                async with opened(tmp_path, **{option: 2 * CHUNK}):
                    pass
            async with opened(tmp_path, **{option: smallest(error, option)}) as store:
                first = int(option == "cpu_memory")
                assert [await value_of(store, f"{i}") for i in range(first, 6, 2)] == list(range(first, 6, 2))
            with pytest.raises(BudgetError):
                async with opened(tmp_path, **{option: smallest(error, option) - 4096}):
                    pass

    run(main())


def test_prefetch_evicts_idle_copies_but_never_acquired_ones(tmp_path: Path) -> None:
    async def main() -> None:
        backend = QuickBackend()
        async with opened(tmp_path, gpu_memory=3 * CHUNK, backend=backend) as store:
            for i in range(6):
                await store.put(f"{i}", block(i), tier=Tier.NVME)
            async with store.acquire("0") as held:
                assert await store.prefetch(["1", "2", "3"]) == ["1", "2"]  # "3" would evict those of this call
                assert await value_of(store, "1") == 1
                assert await value_of(store, "2") == 2
                assert await store.prefetch(["2", "4"]) == ["2", "4"]  # "1" was used least recently
                assert await store.prefetch(["2", "2"]) == ["2"]
                assert held["w"].unique().tolist() == [0.0]
                assert await value_of(store, "4") == 4
                assert [store._entries[f"{i}"].copy is not None for i in range(5)] == [True, False, True, False, True]
            reads = backend.counters.totals().read_bytes
            assert await value_of(store, "4") == 4
            assert await value_of(store, "2") == 2
            assert backend.counters.totals().read_bytes == reads
            assert store.usage()[Tier.GPU].peak_bytes <= 3 * CHUNK
            assert_at_rest(store)

    run(main())


def test_a_prefetch_gives_up_when_acquires_take_its_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, gpu_memory=2 * CHUNK) as store:
            for i in range(3):
                await store.put(f"{i}", block(i), tier=Tier.NVME)
            await value_of(store, "0")
            await value_of(store, "1")
            assert await store.prefetch(["2"]) == ["2"]
            async with asyncio.timeout(10), store.acquire("0"), store.acquire("1"):
                await asyncio.sleep(0)
                await store.move("2", Tier.CPU)  # not behind a load that waits for those two
                assert store.usage()[Tier.GPU].used_bytes == 2 * CHUNK
            assert await value_of(store, "2") == 2
            assert_at_rest(store)

    run(main())


def test_many_tasks_with_a_budget_for_half_of_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, gpu_memory=4 * CHUNK) as store:
            for i in range(8):
                await store.put(f"{i}", block(i), tier=Tier.NVME if i % 2 else Tier.CPU)
            slots = asyncio.Semaphore(4)

            async def use(task: int) -> None:
                for k in range(10):
                    i = (task * 3 + k) % 8
                    async with slots, store.acquire(f"{i}") as tensors:
                        await store.prefetch([f"{(i + 1) % 8}"])
                        assert tensors["w"].unique().tolist() == [float(i)]

            await asyncio.gather(*(use(task) for task in range(8)))
            await settled(store)
            assert store.usage()[Tier.GPU].peak_bytes <= 4 * CHUNK
            assert_at_rest(store)

    run(main())


# --- generations -------------------------------------------------------------------------------------------------


def test_commits_count_only_changes_and_remove_what_nobody_needs(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            assert store.generation == -1
            await store.put("a", block(1), tier=Tier.NVME)
            await store.put("b", block(2), tier=Tier.CPU)
            assert await store.commit() == await store.commit() == store.generation == 0
            committed = pack_files(tmp_path)
            await store.put("a", block(3), tier=Tier.NVME)
            await store.put("a", block(4), tier=Tier.NVME)
            await store.delete("b")
            await store.put("c", block(5), tier=Tier.NVME)
            await store.delete("c")
            assert set(committed) < set(pack_files(tmp_path))
            assert await store.commit() == 1
        assert len(pack_files(tmp_path)) == 3  # of the last two generations
        async with opened(tmp_path) as store:
            assert store.generation == 1
            assert store.names() == ["a"]
            await store.move("a", Tier.CPU)
        assert len(pack_files(tmp_path)) == 1
        async with opened(tmp_path) as store:
            assert store.generation == 2
            assert store.home("a") is Tier.CPU

    run(main())


def test_an_error_that_leaves_the_store_commits_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with opened(tmp_path) as store:
                await store.put("a", block(1), tier=Tier.NVME)
                raise ZeroDivisionError
        assert list((tmp_path / "store").iterdir()) == []
        async with opened(tmp_path) as store:
            assert store.names() == []
            await store.put("a", block(1), tier=Tier.NVME)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with opened(tmp_path) as store:
                await store.put("a", block(2), tier=Tier.NVME)
                raise ZeroDivisionError
        async with opened(tmp_path) as store:
            assert await value_of(store, "a") == 1

    run(main())


def test_resume(tmp_path: Path) -> None:
    async def main() -> None:
        for resume in ("must", "previous"):
            with pytest.raises(ConfigError, match="no generation"):
                async with opened(tmp_path, resume=resume):
                    pass
        async with opened(tmp_path, resume="never") as store:
            await store.put("a", block(1), tier=Tier.NVME)
        with pytest.raises(ConfigError, match="already holds generation 0"):
            async with opened(tmp_path, resume="never"):
                pass
        with pytest.raises(ConfigError, match="holds only generation 0"):
            async with opened(tmp_path, resume="previous"):
                pass
        async with opened(tmp_path) as store:
            await store.put("b", block(2), tier=Tier.NVME)
        async with opened(tmp_path, resume="previous") as store:
            assert store.names() == ["a"]
            assert store.generation == 0
        async with opened(tmp_path) as store:
            assert store.names() == ["a", "b"]  # to look back costs nothing
        async with opened(tmp_path, resume="previous") as store:
            await store.put("b", block(4), tier=Tier.NVME)
            await store.commit()
            assert store.generation == 1
            await store.put("c", block(3), tier=Tier.NVME)
        assert set(named_files(tmp_path)) == set(pack_files(tmp_path))
        flip(tmp_path / "store", "b/0")
        with pytest.raises(ChecksumMismatch, match="chunk b/0"):
            async with opened(tmp_path, resume="previous"):
                pass
        with pytest.raises(ConfigError, match="'auto' is decided for the state of an Engine; name a codec"):
            TensorStore.open(TierConfig(nvme=[tmp_path], codec="auto"))
        for options in ({"chunk_bytes": 2 * CHUNK}, {"codec": "lz4"}):
            with pytest.raises(ConfigError, match="made with codec='none' and chunk_bytes=65536"):
                async with opened(tmp_path, **options):
                    pass
        async with opened(tmp_path, chunk_bytes=None, cpu_memory="64MiB") as store:
            assert store.names() == ["a", "b", "c"]

    run(main())


@pytest.mark.parametrize("is_reopened", [True, False])
@pytest.mark.parametrize("change", ["put", "modify", "delete"])
def test_the_generation_before_is_whole_whatever_changed_since(tmp_path: Path, change: str, is_reopened: bool) -> None:
    async def changed(store: TensorStore, step: int) -> None:
        if change == "put":
            await store.put("a", block(step), tier=Tier.NVME)
        elif change == "modify":
            async with store.acquire("a", modify=True) as tensors:
                tensors["w"].fill_(step)
        else:
            await store.delete(f"{step - 1}")
            await store.put(f"{step}", block(step), tier=Tier.NVME)

    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("a", block(0), tier=Tier.NVME)
            await store.put("0", block(0), tier=Tier.NVME)
            await store.commit()
            for step in (1, 2) if is_reopened else (1, 2, 3):
                await changed(store, step)
                await store.commit()
        if is_reopened:
            async with opened(tmp_path) as store:
                await changed(store, 3)
        kept = len(pack_files(tmp_path))
        assert kept <= 4  # and not one for each change
        async with opened(tmp_path, resume="previous") as store:
            assert store.generation == 2
            if change == "delete":
                assert store.names() == ["a", "2"]
            assert await value_of(store, "2" if change == "delete" else "a") == 2
        assert len(pack_files(tmp_path)) == kept
        async with opened(tmp_path, resume="previous") as store:
            await store.delete("a")
        assert len(pack_files(tmp_path)) == 2  # what no generation names any more is gone

    run(main())


def test_opening_and_closing_without_a_change_keeps_the_generation_before(tmp_path: Path) -> None:
    async def main() -> None:
        for value in (1, 2):
            async with opened(tmp_path) as store:
                await store.put("a", block(value), tier=Tier.NVME)
        for _ in range(2):
            async with opened(tmp_path):
                pass
        async with opened(tmp_path, resume="previous") as store:
            assert await value_of(store, "a") == 1

    run(main())


def test_a_commit_that_was_published_and_raised_has_its_place_in_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("a", block(0), tier=Tier.NVME)
            await store.commit()
            await store.put("a", block(1), tier=Tier.NVME)
            with monkeypatch.context() as patch:
                patch.setattr(Manifests, "_remove_all_but_two", failing)
                with pytest.raises(StorageError, match="after it was published"):
                    await store.commit()
            await store.put("a", block(2), tier=Tier.NVME)
            await store.commit()
        assert set(named_files(tmp_path)) == set(pack_files(tmp_path))
        async with opened(tmp_path, resume="previous") as store:
            assert await value_of(store, "a") == 1

    def failing(self: Manifests, last: int) -> None:
        raise StorageError("after it was published")

    run(main())


def test_a_manifest_before_that_cannot_be_read_for_a_while_keeps_nobody_out_and_its_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        for value in (1, 2):
            async with opened(tmp_path) as store:
                await store.put("a", block(value), tier=Tier.NVME)
        read = Manifests.read

        async def unreadable(self: Manifests, number: int) -> Generation:
            if number == 0:
                raise StorageError("a bad sector")
            return await read(self, number)

        with monkeypatch.context() as patch:
            patch.setattr(Manifests, "read", unreadable)
            async with opened(tmp_path) as store:
                assert await value_of(store, "a") == 2
        async with opened(tmp_path, resume="previous") as store:
            assert await value_of(store, "a") == 1
            await store.put("a", block(3), tier=Tier.NVME)
        with monkeypatch.context() as patch:
            patch.setattr(Manifests, "read", unreadable)
            async with opened(tmp_path) as store:
                await store.put("a", block(4), tier=Tier.NVME)
        assert set(named_files(tmp_path)) == set(pack_files(tmp_path))

    run(main())


def test_packs_of_a_generation_whose_manifest_is_damaged_go(tmp_path: Path) -> None:
    async def main() -> None:
        for value in (1, 2):
            async with opened(tmp_path) as store:
                await store.put("a", block(value), tier=Tier.NVME)
        min((tmp_path / "store").glob("manifest-*")).write_bytes(b"broken")
        async with opened(tmp_path) as store:
            assert len(pack_files(tmp_path)) == 1
            assert await value_of(store, "a") == 2

    run(main())


class CountingBackend(QuickBackend):
    """Counts the files of packs that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open_now: set[int] = set()
        self.most = 0

    def _call_open(self, path: Path, flags: int, mode: int) -> int:
        descriptor = super()._call_open(path, flags, mode)
        if path.name.startswith("put-"):
            self.open_now.add(descriptor)
            self.most = max(self.most, len(self.open_now))
        return descriptor

    def _call_close(self, descriptor: int, path: Path) -> None:
        self.open_now.discard(descriptor)
        super()._call_close(descriptor, path)


@pytest.mark.parametrize("disks", [1, 2])
def test_a_store_may_have_more_packs_than_descriptors(
    tmp_path: Path, disks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "_MOST_OPEN", 4)
    nvme, names = [tmp_path / f"disk {disk}" for disk in range(disks)], [f"h.{i}" for i in range(20)]

    async def main() -> None:
        backend = CountingBackend()
        async with opened(tmp_path, nvme=nvme, backend=backend, cpu_memory=64 * CHUNK) as store:
            for name in names:
                await store.put(name, block(1, 100), tier=Tier.CPU)
            await store.commit()  # writes all
            assert 0 < backend.most <= 2 * 4  # reads, and writes
            for name in names:
                await store.put(name, block(2, 100), tier=Tier.NVME)
        assert 0 < backend.most <= 2 * 4  # the last commit has synced all
        async with opened(tmp_path, nvme=nvme, backend=backend, cpu_memory=64 * CHUNK) as store:
            assert await store.prefetch(names) == names
            assert [await value_of(store, name) for name in names] == [2] * 20
            for name in names:
                await store.move(name, Tier.CPU)
        async with opened(tmp_path, nvme=nvme, backend=backend, cpu_memory=64 * CHUNK) as store:  # reads all
            assert [await value_of(store, name) for name in names] == [2] * 20
        assert 0 < backend.most <= 2 * 4  # reads, and writes
        assert not backend.open_now

    run(main())


def test_one_process_at_a_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("a", block(1), tier=Tier.NVME)
            with pytest.raises(StoreLocked, match="in use by process"):
                async with opened(tmp_path):
                    pass
            assert await value_of(store, "a") == 1
        async with opened(tmp_path) as store:
            assert await value_of(store, "a") == 1

    run(main())


def test_a_file_that_does_not_close_leaves_no_lock_behind(tmp_path: Path) -> None:
    def refuse() -> None:
        raise StorageError("close of a pack failed")

    directories = Directories([tmp_path], Backend(), FileThreads(1, "test"))
    directories.claim()
    directories.before_release.callback(refuse)
    with pytest.raises(StorageError, match="close of a pack"):
        directories.release()
    StoreLock([tmp_path]).release()


async def moved_away(tmp_path: Path) -> tuple[TensorStore, contextlib.AsyncExitStack]:
    """An open store with "a" whose directory was moved away, and the stack that closes it."""
    stack = contextlib.AsyncExitStack()
    store = await stack.enter_async_context(opened(tmp_path))
    await store.put("a", block(1.0), tier=Tier.NVME)
    await store.commit()
    (tmp_path / "store").rename(tmp_path / "moved")
    return store, stack


def test_one_whose_directory_is_moved_away_is_whole_there(tmp_path: Path) -> None:
    async def go() -> None:
        store, stack = await moved_away(tmp_path)
        (tmp_path / "store").mkdir()
        await store.put("b", block(2.0), tier=Tier.NVME)
        with pytest.raises(StorageError, match="moved, replaced or removed"):
            await store.commit()
        with pytest.raises(StorageError, match="moved, replaced or removed"):
            await stack.aclose()
        assert not list((tmp_path / "store").glob("manifest*"))
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "moved").rename(tmp_path / "store")
        async with opened(tmp_path, resume="must") as again, again.acquire("a") as tensors:
            assert_same(tensors, block(1.0))

    run(go())


def test_nor_does_it_remove_what_a_copy_of_it_has_made(tmp_path: Path) -> None:
    async def go() -> None:
        store, stack = await moved_away(tmp_path)
        shutil.copytree(tmp_path / "moved", tmp_path / "store")
        async with opened(tmp_path, resume="must") as other:
            await other.put("b", block(2.0), tier=Tier.NVME)
            await other.commit()
            with pytest.raises(StorageError):
                await store.put("a", block(3.0), tier=Tier.NVME)  # in a file of the same name as the one with "b"
            with pytest.raises(StorageError, match="moved, replaced or removed"):
                await stack.aclose()
        async with opened(tmp_path, resume="must") as again:
            for name, value in (("a", 1.0), ("b", 2.0)):
                async with again.acquire(name) as tensors:
                    assert_same(tensors, block(value))

    run(go())


def test_a_number_of_a_pack_has_one_spelling() -> None:
    """A pack is found by its number: of two spellings only one would be found."""
    entry = {"name": "a", "tier": "nvme", "pack": "put-00", "tensors": [["w", "float32", [1]]]}
    records = {"put-00": [ChunkRecord(0, 4096, 0)]}
    with pytest.raises(FormatError, match=r"has no pack of its size: 'put-00'"):
        recorded_entries(Generation(0, {"chunk_bytes": 4096}, records, {"entries": [entry]}))


def test_directories_of_another_store_are_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        both = [tmp_path / "x", tmp_path / "y"]
        async with opened(tmp_path, nvme=both) as store:
            await store.put("a", block(1, 50000), tier=Tier.NVME)
        for nvme, text in ((both[:1], "striped over 2"), (both[::-1], "holds put-0"), (both[1:], "holds put-0")):
            with pytest.raises(ConfigError, match=text):
                async with opened(tmp_path, nvme=nvme):
                    pass
        other = tmp_path / "other"
        async with opened(tmp_path, nvme=[other]) as store:
            await store.put("b", block(2, 50000), tier=Tier.NVME)
        with pytest.raises(ConfigError, match=f"x and {other} belong to different stores"):
            async with opened(tmp_path, nvme=[both[0], other]):
                pass
        async with opened(tmp_path, nvme=[other]) as store:
            assert await value_of(store, "b") == 2
        async with opened(tmp_path, nvme=both) as store:
            assert await value_of(store, "a") == 1

    run(main())


# --- whose loop --------------------------------------------------------------------------------------------------


def test_other_loops_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        store = TensorStore.open(config(tmp_path), backend=QuickBackend())
        with pytest.raises(ClosedError, match="not open"):
            store.names()
        async with store:
            await store.put("a", block(1), tier=Tier.CPU)
            errors: list[BaseException] = []

            def elsewhere() -> None:
                for call in (lambda: asyncio.run(store.commit()), store.usage, lambda: "a" in store):
                    try:
                        call()
                    except RuntimeError as error:
                        errors.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            while thread.is_alive():
                await asyncio.sleep(0)
            thread.join()
            assert len(errors) == 3
            assert all("event loop that opened it" in str(error) for error in errors)
            with pytest.raises(ClosedError, match="opened once"):
                await store.__aenter__()
            assert await value_of(store, "a") == 1
        with pytest.raises(ClosedError, match="not open"):
            await store.commit()

    run(main())


def test_closing_waits_for_calls_of_other_tasks(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            putting = asyncio.create_task(store.put("a", block(1), tier=Tier.NVME))
            await asyncio.sleep(0)
            await store.put("b", block(2), tier=Tier.NVME)
            await store.put("c", block(2), tier=Tier.NVME)
            await store.prefetch(["b", "c"])
        await putting
        async with opened(tmp_path) as store:
            assert set(store.names()) == {"a", "b", "c"}

    run(main())


def test_a_closed_store_keeps_no_memory(tmp_path: Path) -> None:
    """Although a variable holds it, as in a notebook."""

    async def main() -> None:
        async with opened(tmp_path) as store:
            for name, tier in (("a", Tier.GPU), ("b", Tier.CPU), ("c", Tier.NVME)):
                await store.put(name, block(1), tier=tier)
                await value_of(store, name)
            copies = [store._entries[name].copy for name in store.names()]
            assert store._arena is not None
            assert store._arena._bytes is not None
            left: list[weakref.ref[Any]] = [weakref.ref(store._arena._bytes.base)]
            left += [weakref.ref(copy.storage) for copy in copies if copy is not None]
            del copies
        assert len(left) == 4
        assert [one() for one in left] == [None] * 4

    run(main())


def test_closing_under_an_acquire(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as store:
            await store.put("a", block(1), tier=Tier.NVME)
            await store.put("b", block(2), tier=Tier.GPU)
            readers, writer = [store.acquire("a"), store.acquire("b")], store.acquire("a", modify=True)
            acquired = [await reader.__aenter__() for reader in readers]
            await writer.__aenter__()
            at_home = store._entries["b"]
        assert [tensors["w"].unique().tolist() for tensors in acquired] == [[1.0], [2.0]]
        for reader in readers:
            await reader.__aexit__(None, None, None)
        with pytest.raises(ClosedError):
            await writer.__aexit__(None, None, None)
        assert at_home.pack is not None  # its user has changed nothing

    run(main())


def test_a_close_that_takes_too_long_says_what_is_in_flight(tmp_path: Path) -> None:
    is_stuck, go_on = threading.Event(), threading.Event()

    class StuckBackend(QuickBackend):
        def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
            is_stuck.set()
            assert go_on.wait(30)
            return super()._call_pread(descriptor, view, offset, path)

    async def main() -> None:
        store = TensorStore.open(config(tmp_path, timeout_s=0.1), backend=StuckBackend())
        store._watch.begin = lambda: lambda: is_stuck.is_set() and not go_on.is_set()  # type: ignore[method-assign]
        said = r"did not close: nothing has moved for 0.1 s; in flight:\n(.*\n)*  read of 4096 B at offset 0 of "
        with pytest.raises(Timeout, match=said):  # noqa: PT012
            async with store:
                await store.put("a", block(1), tier=Tier.NVME)
                with pytest.raises(RuntimeError, match="closed by the end of its 'async with'"):
                    await store.close()
                task = asyncio.create_task(value_of(store, "a"))
                await asyncio.sleep(0)
        with pytest.raises(Timeout):
            await store.close()
        with pytest.raises(StoreLocked):
            async with opened(tmp_path):
                pass
        task.cancel()
        await asyncio.wait({task})
        go_on.set()
        await store.close()
        async with opened(tmp_path):
            pass

    run(main())
