"""Rates of disks: over block size and threads, then at the best of them, each way and both at once; all disks together.

Scope: which loads run, in which order, and the rates that follow.
Not here: a load (`disk.py`), rounds (`loads.py`), links and compute (`machine.py`).
Owner: the caller owns the files, which are open while a survey runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.alignment import ALIGNMENT
from tierstore.config import format_size
from tierstore.io.tasks import together
from tierstore.measure.disk import DiskFile, Verb
from tierstore.measure.fio import SHAPES, Fio
from tierstore.measure.loads import Load, Pace, Runnable, SideBySide, in_turn
from tierstore.plan.bandwidth import Activity, DirectoryRates, Rate

_VERBS: tuple[Verb, Verb] = ("read", "write")
_WAYS = (*_VERBS, "both")
_GRID_SHARE, _CONTEST_SHARE, _BEST_SHARE = 0.4, 0.3, 0.3  # of the time
_CANDIDATES = 3  # with fio as many as it has shapes
_CHUNK_BYTES = 2**23  # about what the engine moves at once
_SYNCED_S = 0.2  # of writing before each sync, about
_SYNCING_S = 1.0  # for each round; one round is completed however slow the disk is
_AT_ONCE_S = 1e-6  # for a sync that took no longer than a sync of nothing
_FIO_RUN_S = 1.25  # fio takes its time to begin, and a run is to move gigabytes


@dataclass(frozen=True, slots=True)
class DiskEffort:
    """How much is measured of each directory.

    Attributes:
        seconds: about; a slow disk takes longer, because every load runs at least once.
        blocks: bytes of a transfer. The engine moves a chunk, of at most 32 MiB, in one transfer.
    """

    size_bytes: int
    seconds: float
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    grid_rounds: int
    rounds: int


QUICK = DiskEffort(2**29, 4.0, (2**20, 2**23, 2**25), (1, 4, 8), 2, 5)
THOROUGH = DiskEffort(2**31, 60.0, tuple(2**n for n in (18, 20, 22, 23, 24, 25)), (1, 2, 4, 8, 16), 3, 7)


@dataclass(frozen=True, slots=True)
class Cell:
    """The rates of a block size with a number of threads."""

    block_bytes: int
    threads: int
    read: Rate
    write: Rate

    def rate(self, verb: Verb) -> Rate:
        return self.read if verb == "read" else self.write


@dataclass(frozen=True, slots=True)
class Contest:
    """Ways to read, or to write, measured again in turn: the best of the grid, which luck may have helped, and fio.

    Attributes:
        ours: by bytes of a block and threads.
        fio: by its shape; empty if fio was not asked for.
    """

    ours: Mapping[tuple[int, int], Rate]
    fio: Mapping[str, Rate]

    @property
    def best(self) -> tuple[int, int]:
        """The block and threads of the highest rate."""
        return max(self.ours, key=lambda shape: self.ours[shape].per_s)

    @property
    def against_fio(self) -> float | None:
        """Our best rate as a multiple of fio's best."""
        best = max((rate.per_s for rate in self.fio.values()), default=None)
        return None if best is None else self.ours[self.best].per_s / best


@dataclass(frozen=True, slots=True)
class Directory:
    """The measurements of one directory."""

    cells: tuple[Cell, ...]
    contests: Mapping[Verb, Contest]
    rates: DirectoryRates


@dataclass(frozen=True, slots=True)
class Disks:
    """All directories, one by one and together.

    Attributes:
        loads: reads and writes of chunks, in all directories, while the files are open. Smaller blocks do not stand for
            the engine: at 1.5 GB/s, blocks of 1 MiB made products take 1.3 times as long, blocks of 8 MiB 1.05 times.
        sync: bytes that were written and then synced, per second of the sync.
    """

    directories: tuple[Directory, ...]
    read: Rate
    write: Rate
    both: Rate
    sync: Rate
    loads: Mapping[Activity, Runnable]


async def survey(
    files: Mapping[Path, DiskFile], effort: DiskEffort, tell: Callable[[str, float], None], fio: str | None = None
) -> Disks:
    """Measures directories one after the other, then all of them together.

    Args:
        tell: called before each run, with its name and the share of all runs that are over.
        fio: the program to compare with.

    Raises:
        StorageError: a disk failed.
    """
    directories, best = [], []
    for index, (path, file) in enumerate(files.items()):

        def tell_of(what: str, done: float, path: Path = path, index: int = index) -> None:
            tell(f"{path}: {what}", (index + done) / len(files))

        cells = await _grid(file, effort, lambda name: tell_of(name, 0.0))
        contests = await _contests(file, cells, effort, lambda name: tell_of(name, _GRID_SHARE), fio)
        best.append(_loads_at_best(file, contests))
        rates = await _at_best(path, file, contests, best[-1], effort, lambda name: tell_of(name, 1 - _BEST_SHARE))
        directories.append(Directory(cells, contests, rates))
    if len(directories) == 1:
        one = directories[0].rates
        sums = {"read": one.read, "write": one.write, "both": one.both}
    else:
        all_at_once = {name: [SideBySide(tuple(one[name] for one in best))] for name in _WAYS}
        pace = Pace(effort.seconds / 4 / len(_WAYS) / effort.rounds, effort.rounds, _deadline(effort.seconds / 2),
                    lambda name: tell(f"{len(files)} directories together: {name}", 1.0))  # fmt: skip
        sums = {name: _rate_of(runs) for name, runs in (await in_turn(all_at_once, pace)).items()}
    chunks = [_loads_of_chunks(file, one.rates) for file, one in zip(files.values(), directories)]
    loads = {way: SideBySide(tuple(one[way] for one in chunks)) for way in (Activity.READ, Activity.WRITE)}
    tell("syncs", 1.0)
    writes = [one.rates.write.per_s for one in directories]
    sync = await _sync_rate(tuple(files.values()), writes, effort.rounds)
    return Disks(tuple(directories), sums["read"], sums["write"], sums["both"], sync, loads)


async def _sync_rate(files: Sequence[DiskFile], write_bytes_per_s: Sequence[float], rounds: int) -> Rate:
    """The rate at which freshly written bytes are synced, in all directories at once; the writes are not timed.

    The time of a sync of nothing is subtracted, because it does not grow with the bytes.
    """
    unit = min(_CHUNK_BYTES, *(n for file in files for n in (file.size_bytes, file.memory.nbytes)))
    sizes = [
        max(unit, min(int(_SYNCED_S * rate), file.size_bytes) // unit * unit)
        for file, rate in zip(files, write_bytes_per_s)
    ]
    rates: list[float] = []
    deadline_s = _deadline(_SYNCING_S * rounds)
    await _synced_s(files)  # bytes that were written before
    while not rates or (len(rates) < rounds and time.perf_counter() < deadline_s):
        nothing_s = await _synced_s(files)
        await together(asyncio.to_thread(file.write, size, unit) for file, size in zip(files, sizes))
        rates.append(sum(sizes) / max(await _synced_s(files) - nothing_s, _AT_ONCE_S))
    return Rate.of(rates)


async def _synced_s(files: Sequence[DiskFile]) -> float:
    begun_s = time.perf_counter()
    await together(asyncio.to_thread(file.file.datasync) for file in files)
    return time.perf_counter() - begun_s


async def _contests(
    file: DiskFile, cells: Sequence[Cell], effort: DiskEffort, tell: Callable[[str], None], fio: str | None
) -> dict[Verb, Contest]:
    loads: dict[str, list[Runnable]] = {}
    ours: dict[Verb, dict[tuple[int, int], str]] = {"read": {}, "write": {}}
    theirs: dict[Verb, list[str]] = {"read": [], "write": []}
    for verb in _VERBS:
        for cell in _candidates(cells, verb, _CANDIDATES if fio is None else len(SHAPES)):
            name = ours[verb][cell.block_bytes, cell.threads] = _cell_name(verb, cell.block_bytes, cell.threads)
            loads[name] = [file.load(verb, cell.block_bytes, cell.threads)]
        if fio is not None:
            for shape in SHAPES:
                name = f"fio {verb} {shape}"
                theirs[verb].append(name)
                loads[name] = [Fio(fio, file.reachable_path, file.size_bytes, verb, shape, file.file.direct)]
    rounds = effort.grid_rounds if fio is None else effort.rounds
    run_s = effort.seconds * _CONTEST_SHARE / len(loads) / rounds if fio is None else _FIO_RUN_S
    runs = await in_turn(loads, Pace(run_s, rounds, _deadline(1.5 * run_s * len(loads) * rounds), tell))
    return {
        verb: Contest(
            {shape: _rate_of(runs[name]) for shape, name in ours[verb].items()},
            {name: _rate_of(runs[name]) for name in theirs[verb]},
        )
        for verb in _VERBS
    }


def _candidates(cells: Sequence[Cell], verb: Verb, number: int) -> list[Cell]:
    """The best of each block size first, then the others: a cell that noise has put aside has another chance."""
    ranked = sorted(cells, key=lambda cell: -cell.rate(verb).per_s)
    first = {cell.block_bytes: cell for cell in reversed(ranked)}.values()
    return sorted(ranked, key=lambda cell: cell not in first)[:number]


def _loads_at_best(file: DiskFile, contests: Mapping[Verb, Contest]) -> dict[str, Load]:
    read, write = contests["read"].best, contests["write"].best
    block_bytes = max(read[0], write[0])
    threads = max(1, min(read[1] + write[1], file.memory.nbytes // block_bytes))
    return {
        "read": file.load("read", *read),
        "write": file.load("write", *write),
        "both": file.both(block_bytes, threads),
    }


def _loads_of_chunks(file: DiskFile, rates: DirectoryRates) -> dict[Activity, Load]:
    """Loads of chunks, with the best number of threads each way."""

    def load(verb: Verb, threads: int) -> Load:
        return file.load(verb, min(_CHUNK_BYTES, file.memory.nbytes // threads // ALIGNMENT * ALIGNMENT), threads)

    return {Activity.READ: load("read", rates.read_threads), Activity.WRITE: load("write", rates.write_threads)}


async def _at_best(
    path: Path,
    file: DiskFile,
    contests: Mapping[Verb, Contest],
    best: Mapping[str, Load],
    effort: DiskEffort,
    tell: Callable[[str], None],
) -> DirectoryRates:
    run_s = effort.seconds * _BEST_SHARE / len(best) / effort.rounds
    deadline_s = _deadline(1.5 * effort.seconds * _BEST_SHARE)
    runs = await in_turn({name: [load] for name, load in best.items()}, Pace(run_s, effort.rounds, deadline_s, tell))
    read, write = contests["read"].best, contests["write"].best
    rates = {name: _rate_of(found) for name, found in runs.items()}
    return DirectoryRates(str(path), rates["read"], rates["write"], rates["both"], *read, *write, file.file.direct)


def _rate_of(runs: Sequence[tuple[float, ...]]) -> Rate:
    """The rate of the runs of one load."""
    return Rate.of([rate for (rate,) in runs])


async def _grid(file: DiskFile, effort: DiskEffort, tell: Callable[[str], None]) -> tuple[Cell, ...]:
    """Every block size with every number of threads for which memory and file suffice; the cheap ones first."""
    limit_bytes = min(file.memory.nbytes, file.size_bytes)
    shapes = [(b, t) for b in effort.blocks for t in effort.threads if b * t <= limit_bytes]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    loads: dict[str, Sequence[Runnable]] = {}
    for block_bytes, threads in shapes:
        for verb in _VERBS:
            loads[_cell_name(verb, block_bytes, threads)] = [file.load(verb, block_bytes, threads)]
    limit_s = effort.seconds * _GRID_SHARE
    run_s = limit_s / len(loads) / effort.grid_rounds
    runs = await in_turn(loads, Pace(run_s, effort.grid_rounds, _deadline(1.5 * limit_s), tell))
    return tuple(Cell(b, t, *(_rate_of(runs[_cell_name(verb, b, t)]) for verb in _VERBS)) for b, t in sorted(shapes))


def _cell_name(verb: Verb, block_bytes: int, threads: int) -> str:
    return f"{verb} {format_size(block_bytes)} x {threads}"


def _deadline(seconds: float) -> float:
    return time.perf_counter() + seconds
