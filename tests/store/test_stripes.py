"""Chunks on disks of unequal rate."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resuming import DISK, State, Way, expected_states, opened

from tierstore.config import Codec, TierConfig
from tierstore.errors import MachineWarning
from tierstore.io.backend import Backend
from tierstore.io.workers import WorkerPool
from tierstore.pack.layout import ChunkSpec
from tierstore.plan.bandwidth import BandwidthTable, DirectoryRates, Rate
from tierstore.store import tensors
from tierstore.store.shelf import put_pack
from tierstore.store.slots import ChunkIO, ChunkRecord
from tierstore.store.stripes import MOST_SHARES, dealt, shares_of, why_equal
from tierstore.store.tensors import TensorStore
from tierstore.store.verification import committed_chunks
from tierstore.train.engine import Engine

RATES = BandwidthTable(2e9, 1e9, 1.5e9, 1e10, 1e10, 1e10, 1e9)
SHARES = st.lists(st.integers(1, MOST_SHARES), min_size=1, max_size=6)


@given(st.integers(0, 300), SHARES)
def test_each_disk_has_its_share_of_any_stretch(count: int, shares: list[int]) -> None:
    disks, total = dealt(count, shares), sum(shares)
    assert len(disks) == count
    for start, stop in itertools.combinations(range(0, count + 1, max(1, count // 7)), 2):
        found = Counter(disks[start:stop])
        for disk, share in enumerate(shares):
            assert abs(found[disk] - (stop - start) * share / total) < 2


@given(st.integers(0, 50), st.integers(0, 10**18), SHARES)
def test_it_goes_on_after_others(count: int, after: int, shares: list[int]) -> None:
    before = after % sum(shares)
    assert dealt(count, shares, after) == dealt(before + count, shares)[before:]
    assert dealt(count, shares, after) == dealt(count, shares, after + sum(shares))


@given(st.integers(0, 100), st.integers(1, 6))
def test_like_disks_take_turns(count: int, disks: int) -> None:
    """So does a store of an older release."""
    assert dealt(count, [1] * disks) == [i % disks for i in range(count)]


@given(st.lists(st.floats(0.2, 8.0), min_size=2, max_size=4))
def test_a_round_takes_no_longer_than_when_dealt_evenly(rates: list[float]) -> None:
    """On paper: what many chunks take the slowest of these disks, against turns and against no loss at all."""
    table = replace(RATES, directories=tuple(of(f"/disk{i}", rate) for i, rate in enumerate(rates)))
    shares = shares_of(TierConfig(nvme=[f"/disk{i}/run" for i in range(len(rates))], bandwidth=table))

    def seconds(shares: tuple[int, ...]) -> float:
        found = Counter(dealt(1000, shares))
        return max(found[disk] / rate for disk, rate in enumerate(rates))

    assert seconds(shares) <= 1.1 * seconds((1,) * len(rates))
    if min(rates) >= max(rates) / MOST_SHARES:
        assert seconds(shares) <= 1.6 * 1000 / sum(rates)


def of(path: str, rate: float) -> DirectoryRates:
    some = Rate(rate, rate, rate)
    return DirectoryRates(path, some, some, some, 2**20, 1, 2**20, 1)


@pytest.mark.parametrize(
    ("paths", "rates", "expected"),
    [
        (["/a", "/b"], {"/a": 1.0, "/b": 1.0}, (1, 1)),
        (["/a", "/b"], {"/a": 4.0, "/b": 2.0}, (2, 1)),
        (["/a/run", "/b/run"], {"/a": 1.0, "/b": 7.9}, (1, 8)),
        (["/a/b/run", "/a/run"], {"/a": 1.0, "/a/b": 3.0}, (8, 3)),
        (["/a", "/b"], {"/a": 1.0, "/b": 100.0}, (1, 8)),
        (["/a", "/b"], {"/a": 4.0}, (1, 1)),
        (["/a/1", "/a/2", "/b"], {"/a": 4.0, "/b": 2.0}, (1, 1, 1)),
        (["/a", "/b"], {}, (1, 1)),
        (["/a"], {"/a": 4.0}, (1,)),
        ([], {"/a": 4.0}, ()),
    ],
)
def test_shares_are_those_of_the_measured_rates(
    paths: list[str], rates: dict[str, float], expected: tuple[int, ...]
) -> None:
    table = replace(RATES, directories=tuple(of(path, rate) for path, rate in rates.items()))
    assert shares_of(TierConfig(nvme=paths, bandwidth=table)) == expected
    assert shares_of(TierConfig(nvme=paths)) == (1,) * len(paths)
    missing = next((path for path in paths if not any(path.startswith(known) for known in rates)), None)
    is_told = bool(rates) and missing is not None and len(paths) > 1
    told = why_equal(TierConfig(nvme=paths, bandwidth=table))
    assert told is None if not is_told else f"the given rates have none of {missing} or" in str(told)


def test_a_directory_without_a_rate_is_told_where_shares_are_chosen(tmp_path: Path) -> None:
    rates = replace(RATES, directories=(of(str(tmp_path / "probed"), 1.0),))
    engine, alone = (TierConfig(nvme=[tmp_path / f"{name}{i}" for i in (0, 1)], bandwidth=rates) for name in "ab")

    async def opened() -> None:
        async with TensorStore.open(alone):
            pass

    with pytest.warns(MachineWarning, match=r"rates have none of .*/a0 or of a directory above it, so all"):
        Engine(torch.nn.Linear(2, 2), engine).close()
    with pytest.warns(MachineWarning, match=r"rates have none of .*/b0 or of a directory above it, so all"):
        asyncio.run(opened())


def stored_bytes(folder: Path) -> list[int]:
    _, chunks = committed_chunks([folder / f"store{i}" for i in range(2)])
    found = Counter(chunk.path.parent.name for chunk in chunks)
    return [found[f"store{i}"] for i in range(2)]


@pytest.mark.usefixtures("no_leaks", "one_thread")
def test_a_store_keeps_its_shares(tmp_path: Path) -> None:
    way = Way("forward", cpu_memory=DISK, blocks=4, width=96, directories=2)
    expected = expected_states(way, tmp_path / "alike", 4)
    table = replace(RATES, directories=(of(str(tmp_path / "store0"), 3.0), of(str(tmp_path / "store1"), 1.0)))
    with opened(way, tmp_path, bandwidth=table, prefetch_depth=1) as run:
        run.until(2)
        kept = run.engine.snapshot("second")
    first, second = stored_bytes(tmp_path)
    assert 2 < first / second < 4
    with opened(way, tmp_path, resume="must") as run:  # without rates
        run.until(4)
        expected[4].check_equal(State.of(run))
    assert stored_bytes(tmp_path) == [first, second]
    with opened(way, tmp_path, resume="must", nvme=kept) as run:
        expected[2].check_equal(State.of(run))


@pytest.mark.parametrize(("rates", "expected"), [((1.0, 1.0), [5, 3]), ((3.0, 1.0), [6, 2])])
def test_small_tensors_are_spread(rates: tuple[float, float], expected: list[int], tmp_path: Path) -> None:
    nvme = [tmp_path / f"store{i}" for i in range(2)]
    table = replace(RATES, directories=tuple(of(str(path), rate) for path, rate in zip(nvme, rates)))
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(table.to_json()))
    asyncio.run(check_tensors_stay(tmp_path, TierConfig(nvme=nvme, cpu_memory="16MiB", bandwidth=file), expected))


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_so_are_those_of_a_kind_where_kinds_alternate(every: int, tmp_path: Path) -> None:
    io = ChunkIO(Backend(), WorkerPool("unused", 1), None, time.monotonic)
    layout = {"directories": 2, "shares": [3, 1]}
    specs = [ChunkSpec("t/0", (("x", "F32", 9),))]
    packs = [
        put_pack(f"put-{number}", specs, [tmp_path / "a", tmp_path / "b"], io, Codec.NONE, layout)
        for number in range(0, 100 * every, every)
    ]
    first = sum(pack.location(0, ChunkRecord(0, 36, 0))[0].parent.name == "a" for pack in packs)
    assert 70 <= first <= 80


def test_tensors_of_an_older_release_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "shares_of", lambda tiers: ())
    tiers = TierConfig(nvme=[tmp_path / f"store{i}" for i in range(2)], cpu_memory="16MiB")
    asyncio.run(check_tensors_stay(tmp_path, tiers, [8, 0]))


async def check_tensors_stay(folder: Path, tiers: TierConfig, expected: list[int]) -> None:
    values = {f"t{i}": torch.full((9,), float(i)) for i in range(8)}
    async with TensorStore.open(tiers) as store:
        for name, value in values.items():
            await store.put(name, {"x": value}, tier="nvme")
        await store.commit()
    assert stored_bytes(folder) == expected
    async with TensorStore.open(TierConfig(nvme=tiers.nvme, cpu_memory="16MiB"), resume="must") as store:
        for name, value in values.items():
            async with store.acquire(name) as found:
                assert torch.equal(found["x"], value)
        await store.put("t0", {"x": values["t0"]}, tier="nvme")
        await store.commit()
    assert sum(stored_bytes(folder)) == 8
