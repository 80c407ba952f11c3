"""Results of the runs: the best cell, rates of one and of several directories, fio, slow-downs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierstore.errors import ConfigError, StorageError
from tierstore.io.backend import Backend
from tierstore.io.memory import Arena, Bytes
from tierstore.io.runtime import Runtime
from tierstore.measure import fio
from tierstore.measure import survey as survey_module
from tierstore.measure.disk import disk_files
from tierstore.measure.fio import SHAPES, Fio, Shape, find_fio
from tierstore.measure.survey import QUICK, Disks, survey
from tierstore.plan.bandwidth import Activity

pytestmark = pytest.mark.usefixtures("no_leaks")

MIB = 2**20
TINY = replace(QUICK, size_bytes=2 * MIB, seconds=0.02, blocks=(2**18, 2**19), threads=(1, 2), grid_rounds=1, rounds=2)


@pytest.fixture
def memory() -> Bytes:
    lease = Arena(4 * MIB).pool("test", 4 * MIB).try_reserve(4 * MIB)
    assert lease is not None
    return lease.array


def surveyed(runtime: Runtime, paths: list[Path], memory: Bytes, told: list[tuple[str, float]]) -> Disks:
    with disk_files(paths, TINY.size_bytes, memory, Backend()) as files:
        return runtime.call(survey, files, TINY, lambda what, done: told.append((what, done)))


def test_one_directory(disk_path: Path, memory: Bytes, runtime: Runtime) -> None:
    told: list[tuple[str, float]] = []
    disks = surveyed(runtime, [disk_path], memory, told)
    (one,) = disks.directories
    assert [(cell.block_bytes, cell.threads) for cell in one.cells] == [
        (block, threads) for block in TINY.blocks for threads in TINY.threads
    ]
    assert (one.rates.read_block_bytes, one.rates.read_threads) == one.contests["read"].best
    assert (one.rates.write_block_bytes, one.rates.write_threads) == one.contests["write"].best
    assert {block for block, _ in one.contests["read"].ours} == set(TINY.blocks)  # the best of each
    assert (one.rates.path, one.rates.is_direct) == (str(disk_path), True)
    assert (disks.read, disks.write, disks.both) == (one.rates.read, one.rates.write, one.rates.both)
    assert set(disks.loads) == {Activity.READ, Activity.WRITE}
    assert one.contests["read"].against_fio is None
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_several_directories_add_up(disk_path: Path, memory: Bytes, runtime: Runtime) -> None:
    paths = [disk_path / "a", disk_path / "b"]
    for path in paths:
        path.mkdir()
    told: list[tuple[str, float]] = []
    disks = surveyed(runtime, paths, memory, told)
    assert [one.rates.path for one in disks.directories] == [str(path) for path in paths]
    assert disks.read.per_s > 0
    assert any(what.startswith("2 directories together") for what, _ in told)


class Caching:
    """A file on a disk whose sync takes 3 ms, and longer by the bytes that wait, at `sync_bytes_per_s`."""

    def __init__(self, sync_bytes_per_s: float) -> None:
        self.memory, self.size_bytes, self.waiting_bytes = np.empty(8 * MIB, np.uint8), 1024 * MIB, 512 * MIB
        self.sync_bytes_per_s = sync_bytes_per_s

    def write(self, nbytes: int, block_bytes: int) -> None:
        assert nbytes <= self.size_bytes
        self.waiting_bytes += nbytes

    def synced_s(self) -> float:
        taken_s = 0.003 + self.waiting_bytes / self.sync_bytes_per_s
        self.waiting_bytes = 0
        return taken_s


@pytest.mark.parametrize(
    ("rates", "expected"),
    [([(4e9, 1e9)], 1e9), ([(4e9, 1e9), (2e9, 0.5e9)], 1.5e9), ([(1.0, 1e9)], 1e9), ([(1e12, 1e9)], 1e9)],
    ids=["one", "another that is half as fast", "less than a block", "more than the file"],
)
def test_the_rate_of_syncs_is_that_of_what_was_just_written(
    rates: list[tuple[float, float]], expected: float, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def synced_s(files: Sequence[Caching]) -> float:
        return max(file.synced_s() for file in files)

    monkeypatch.setattr(survey_module, "_synced_s", synced_s)
    files, writes = [Caching(sync) for _, sync in rates], [write for write, _ in rates]
    rate = runtime.call(survey_module._sync_rate, files, writes, 3)
    assert (rate.low, rate.high) == pytest.approx((expected, expected), rel=0.03)  # whole blocks


def test_a_disk_without_a_cache_has_no_rate_of_syncs_that_counts(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def synced_s(files: Sequence[Caching]) -> float:
        return 0.003

    monkeypatch.setattr(survey_module, "_synced_s", synced_s)
    assert runtime.call(survey_module._sync_rate, [Caching(1.0)], [4e9], 3).per_s > 1e12


def test_a_slow_disk_is_synced_as_long_as_there_is_time_for(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[float] = []

    async def synced_s(files: Sequence[Caching]) -> float:
        synced.append(max(file.synced_s() for file in files))
        return synced[-1]

    monkeypatch.setattr(survey_module, "_synced_s", synced_s)
    monkeypatch.setattr(survey_module, "time", SimpleNamespace(perf_counter=lambda: sum(synced)))
    assert runtime.call(survey_module._sync_rate, [Caching(1e8)], [4e9], 3).per_s == pytest.approx(1e8)
    assert len(synced) == 3  # syncs of what waited before, of nothing, and of one round


def test_without_o_direct_it_is_measured_all_the_same(tmp_path: Path, memory: Bytes, runtime: Runtime) -> None:
    from faults import FaultyBackend

    with disk_files([tmp_path], TINY.size_bytes, memory, FaultyBackend(direct=False)) as files:
        disks = runtime.call(survey, files, TINY, lambda what, done: None)
    assert not disks.directories[0].rates.is_direct


def answered(monkeypatch: pytest.MonkeyPatch, rates: dict[str, float]) -> list[tuple[list[str], dict[str, str]]]:
    """Makes fio answer with the rate of the block size that it is asked for; returns the list of its calls."""
    asked: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> SimpleNamespace:
        asked.append((command, env))
        verb = next(one for one in command if one.startswith("--rw=")).removeprefix("--rw=")
        block = next(one for one in command if one.startswith("--bs=")).removeprefix("--bs=")
        return SimpleNamespace(stdout=json.dumps({"jobs": [{verb: {"bw_bytes": rates[block]}}]}).encode())

    monkeypatch.setattr(fio.subprocess, "run", run)
    return asked


def test_against_the_best_of_fio(
    disk_path: Path, memory: Bytes, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answered(monkeypatch, {"1M": 1e9, "16M": 4e9, "256k": 2e9, "32M": 3e9})
    monkeypatch.setattr(survey_module, "_FIO_RUN_S", 0.001)
    monkeypatch.setattr(survey_module, "_deadline", lambda seconds: float("inf"))  # every round, however slow the disk
    with disk_files([disk_path], TINY.size_bytes, memory, Backend()) as files:
        disks = runtime.call(survey, files, TINY, lambda what, done: None, "fio")
    (one,) = disks.directories
    for contest in one.contests.values():
        assert contest.against_fio == pytest.approx(max(rate.per_s for rate in contest.ours.values()) / 4e9)
    assert len(asked) == 2 * len(SHAPES) * TINY.rounds
    # In turn: fio does not run all its rounds before or after ours.
    commands = [command for command, _ in asked]
    assert commands == commands[::-1]
    threads = next(command for command in commands if "--bs=32M" in command)
    assert {"--numjobs=8", f"--size={TINY.size_bytes // 8}", f"--offset_increment={TINY.size_bytes // 8}"} <= set(
        threads
    )


def test_huge_pages_are_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    asked = answered(monkeypatch, {"1M": 5.0})
    for huge in (False, True):
        one = Fio("fio", Path("file"), MIB, "write", Shape("1M", 8, huge), direct=False)
        assert runtime.call(one.run, 0.5) == 5.0
    assert [("GLIBC_TUNABLES" in env) for _, env in asked] == [False, True]
    assert {"--filename=file", "--direct=0", "--runtime=500ms", "--iodepth=8", "--rw=write"} <= set(asked[0][0])


def test_threads_of_fio_begin_where_direct_io_may(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    asked = answered(monkeypatch, {"4M": 5.0})
    runtime.call(Fio("fio", Path("file"), 10**9, "read", Shape("4M", 1, threads=8)).run, 0.5)
    share_bytes = 10**9 // 8 // 4096 * 4096
    assert {f"--size={share_bytes}", f"--offset_increment={share_bytes}"} <= set(asked[0][0])


@pytest.mark.parametrize("text", [b"", b"{}", b'{"jobs": []}', b'{"jobs": [{"read": {"bw_bytes": "fast"}}]}'])
def test_what_fio_says_may_be_nonsense(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, text: bytes) -> None:
    monkeypatch.setattr(fio.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))
    with pytest.raises(StorageError, match="fio gave no rate for file"):
        runtime.call(Fio("fio", Path("file"), MIB, "read", SHAPES[0]).run, 0.1)


def test_fio_fails(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(1, "fio", b"", b"fio: no such\n engine")

    monkeypatch.setattr(fio.subprocess, "run", run)
    with pytest.raises(StorageError, match="fio could not read file: fio: no such engine"):
        runtime.call(Fio("fio", Path("file"), MIB, "read", SHAPES[0]).run, 0.1)


def test_fio_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"fio is not installed here.*apt install fio"):
        find_fio()
