"""Links and compute on the CPU twin: every rate is there, and pairs say how much they slow each other."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tierstore.cores import update_threads
from tierstore.device.transfers import CpuDevice
from tierstore.errors import ConfigError
from tierstore.io.table_file import read_table, with_rates
from tierstore.measure import compute, links, machine
from tierstore.measure.loads import Load
from tierstore.measure.machine import measure_machine
from tierstore.pack.codec_rates import COMPRESSING
from tierstore.plan.bandwidth import REPORT, Activity, BandwidthTable

MIB = 2**20
TABLE = BandwidthTable(1.10e9, 1.38e9, 1.22e9, 25e9, 24e9, 10e9, 1.3e9)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of a few milliseconds."""
    monkeypatch.setattr(compute, "_ADAM_ELEMENTS", 2**12)
    monkeypatch.setattr(compute, "_CODEC_BYTES", 2**16)
    monkeypatch.setattr(links, "_SIDE", {"cpu": 64})


@pytest.fixture
def small_beside_disk(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs beside a disk are as short."""
    monkeypatch.setattr(machine, "_BESIDE_DISK_S", 0.0)


@pytest.mark.usefixtures("small_beside_disk", "one_thread", "no_leaks")
def test_every_rate_and_every_pair() -> None:
    disk = {Activity.READ: Load(lambda: None, 1.0), Activity.WRITE: Load(lambda: None, 1.0)}
    told: list[float] = []
    memory = np.zeros(4 * MIB, np.uint8)
    found = asyncio.run(measure_machine(CpuDevice(), memory, 0.001, 1, lambda what, done: told.append(done), disk))
    assert {"h2d", "d2h", "matmul", "adam", "adam fp32", "norm", "memory", "checksum"} <= set(found.rates)
    assert {(one.codec, one.data) for one in found.codecs} == {
        (codec, data) for codec in COMPRESSING for data in ("bf16", "fp32")
    }
    assert all(one.ratio > 0.99 for one in found.codecs)
    pairs = {(one.activity, one.beside) for one in found.slowdowns}
    assert pairs == {(other, one) for one, other in pairs}  # both ways
    assert {(Activity.ADAM, Activity.MATMUL), (Activity.H2D, Activity.D2H), (Activity.READ, Activity.MATMUL)} <= pairs
    assert all(one.factor >= 1 for one in found.slowdowns)
    assert told == sorted(told)
    assert told[-1] < 1


@dataclass
class ChangingDisk:
    """A disk that is half as fast beside something else, and slow from the second round to the first run of the third.

    Attributes:
        numbers: numbers of the runs: four in a round, alone and beside each of three others, in turn.
    """

    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, seconds: float) -> float:
        number = next(self.numbers)
        is_alone = number % 4 == (0 if number // 4 % 2 == 0 else 3)  # every other round goes backwards
        return (1.0 if 4 <= number <= 8 else 4.0) * (1.0 if is_alone else 0.5)


@pytest.mark.usefixtures("small_beside_disk", "one_thread")
def test_a_slowdown_is_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of all runs alone, and of all runs beside something, would compare different moments."""
    disk = ChangingDisk()
    memory = np.zeros(MIB, np.uint8)
    found = asyncio.run(measure_machine(CpuDevice(), memory, 0.001, 3, lambda *_: None, {Activity.WRITE: disk}))
    beside = {one.beside: one.factor for one in found.slowdowns if one.activity is Activity.WRITE}
    assert beside == dict.fromkeys((Activity.MATMUL, Activity.ADAM, Activity.H2D), 2.0)


def test_copies_to_and_from_the_device_carry_the_bytes() -> None:
    memory = np.arange(2 * MIB, dtype=np.uint8)
    load = links.d2h(CpuDevice(), memory)  # copies the content to the device first
    memory[:] = 0
    load.job()
    load.job()
    assert np.array_equal(memory, np.arange(2 * MIB, dtype=np.uint8))
    assert load.amount == MIB


@pytest.mark.usefixtures("small")
def test_adam_really_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(compute, "update", lambda dtype, w, s, g, start, stop, c: seen.append((dtype, stop - start)))
    for dtype in ("bf16", "fp32"):
        load = compute.adam(dtype)
        load.job()
        assert load.amount == 2**12
        assert load.threads == update_threads()
    assert seen == [("bf16", 2**12), ("fp32", 2**12)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adam_takes_turns_over_more_memory_than_caches_hold(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[np.ndarray, ...]] = []
    monkeypatch.setattr(compute, "update", lambda dtype, *chunk: seen.append(chunk[:3]))
    load = compute.adam(dtype)
    for _ in range(compute._ADAM_CHUNKS):
        load.job()
    assert len({part.ctypes.data for chunk in seen for part in chunk}) == 3 * compute._ADAM_CHUNKS
    assert sum(part.nbytes for chunk in seen for part in chunk) > 256 * MIB


def test_copies_take_turns_over_all_of_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_COPY_BYTES", MIB)
    memory = np.repeat(np.arange(8, dtype=np.uint8), MIB)
    load = compute.memory_copies(memory)
    for _ in range(4):
        load.job()
    assert memory[::MIB].tolist() == [1, 1, 3, 3, 5, 5, 7, 7]


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    from tierstore.config import TierConfig

    path = tmp_path / "rates.json"
    path.write_text(json.dumps(TABLE.to_json() | {REPORT: {"cells": [1, 2]}}))
    assert read_table(path) == TABLE
    assert with_rates(TierConfig(bandwidth=path)).bandwidth == TABLE
    assert with_rates(TierConfig(bandwidth=str(path))).bandwidth == TABLE
    assert with_rates(TierConfig(bandwidth=TABLE)).bandwidth is TABLE
    assert with_rates(TierConfig()).bandwidth is None


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    with pytest.raises(ConfigError, match=r"cannot read the bandwidth table .*rates.json: No such file.*probe --nvme"):
        read_table(path)
    for text in (b"", b"{", b"[]", b'{"version": 9}', b"\xff", b'{"read_bytes_per_s": NaN}', b"[" * 100_000):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"rates\.json"):
            read_table(path)
