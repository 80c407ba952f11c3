"""What a disk gives: over block size and threads, then at its best, each way and both at once; all disks together.

Scope: which loads run, in which order, and the rates that follow.
Not here: a load (`disk.py`), rounds (`loads.py`), links and compute (`machine.py`).
Owner: the caller owns the files, which are open while a survey runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tierstore.config import format_size
from tierstore.measure.disk import DiskFile
from tierstore.measure.fio import SHAPES, Fio, Shape
from tierstore.measure.loads import Load, Pace, Runnable, SideBySide, in_turn
from tierstore.plan.bandwidth import Activity, DirectoryRates, Rate

Verb = Literal["read", "write"]
_VERBS: tuple[Verb, Verb] = ("read", "write")
_WAYS = (*_VERBS, "both")
_GRID_SHARE = 0.5  # of the time; the rest is spent at the best block size and number of threads
_FIO_RUN_S = 1.5  # fio takes its time to begin, and a run is to move gigabytes


@dataclass(frozen=True, slots=True)
class DiskEffort:
    """How much is measured of each directory.

    Attributes:
        seconds: about; a slow disk takes longer, for every load runs once.
        blocks: bytes of a transfer. A chunk of the engine is one, and has at most 32 MiB.
    """

    size_bytes: int
    seconds: float
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    grid_rounds: int
    rounds: int


QUICK = DiskEffort(2**29, 4.0, (2**20, 2**23, 2**25), (1, 4, 8), 2, 5)
THOROUGH = DiskEffort(2**31, 60.0, tuple(2**n for n in (18, 20, 22, 23, 24, 25)), (1, 2, 4, 8, 16), 3, 9)


@dataclass(frozen=True, slots=True)
class Cell:
    """A block size and a number of threads; None where the time did not suffice."""

    block_bytes: int
    threads: int
    read: Rate | None
    write: Rate | None

    def rate(self, verb: Verb) -> float:
        """The median, 0 if there is none."""
        found = self.read if verb == "read" else self.write
        return found.per_s if found is not None else 0.0


@dataclass(frozen=True, slots=True)
class Directory:
    """What was measured of one directory; `fio` has the rate of each of its shapes, by verb."""

    cells: tuple[Cell, ...]
    rates: DirectoryRates
    fio: Mapping[Verb, Mapping[str, Rate]] = field(default_factory=dict)

    def against_fio(self, verb: Verb) -> float | None:
        """Our rate as a multiple of fio's best; None without fio."""
        best = max((rate.per_s for rate in self.fio.get(verb, {}).values()), default=None)
        ours = self.rates.read if verb == "read" else self.rates.write
        return None if best is None else ours.per_s / best


@dataclass(frozen=True, slots=True)
class Disks:
    """All directories, one by one and together; `loads` go on at the best block sizes while the files are open."""

    directories: tuple[Directory, ...]
    read: Rate
    write: Rate
    both: Rate
    loads: Mapping[Activity, Runnable]


async def survey(
    files: Mapping[Path, DiskFile], effort: DiskEffort, tell: Callable[[str, float], None], fio: str | None = None
) -> Disks:
    """Measures directories one after the other, then all of them together.

    Args:
        tell: called before each run, with what is done and the share of all that is over.
        fio: the program to compare with.

    Raises:
        StorageError: a disk failed.
    """
    directories, best = [], []
    for index, (path, file) in enumerate(files.items()):

        def tell_of(what: str, done: float, path: Path = path, index: int = index) -> None:
            tell(f"{path}: {what}", (index + done) / len(files))

        cells = await _grid(file, effort, lambda name: tell_of(name, 0.0))
        best.append(_Best.of(cells, file))
        directories.append(await _at_best(path, file, cells, best[-1], effort, tell_of, fio))
    if len(directories) == 1:
        rates = directories[0].rates
        sums = {"read": rates.read, "write": rates.write, "both": rates.both}
    else:
        together = {name: [SideBySide(tuple(one.loads[name] for one in best))] for name in _WAYS}
        pace = Pace(effort.seconds / 4 / len(_WAYS) / effort.rounds, effort.rounds, _deadline(effort.seconds / 2),
                    lambda name: tell(f"{len(files)} directories together: {name}", 1.0))  # fmt: skip
        sums = {name: Rate.of([run[0] for run in runs]) for name, runs in (await in_turn(together, pace)).items()}
    loads: dict[Activity, Runnable] = {
        activity: SideBySide(tuple(one.loads[activity.value] for one in best))
        for activity in (Activity.READ, Activity.WRITE)
    }
    return Disks(tuple(directories), sums["read"], sums["write"], sums["both"], loads)


@dataclass(frozen=True, slots=True)
class _Best:
    """The cells with the highest rates, and loads by way."""

    read: Cell
    write: Cell
    loads: Mapping[str, Load]

    @classmethod
    def of(cls, cells: Sequence[Cell], file: DiskFile) -> _Best:
        read, write = (max(cells, key=lambda cell: cell.rate(verb)) for verb in _VERBS)
        block_bytes = max(read.block_bytes, write.block_bytes)
        threads = max(1, min(read.threads + write.threads, file.memory.nbytes // block_bytes))
        loads = {
            "read": file.read(read.block_bytes, read.threads),
            "write": file.write(write.block_bytes, write.threads),
            "both": file.both(block_bytes, threads),
        }
        return cls(read, write, loads)


async def _at_best(
    path: Path,
    file: DiskFile,
    cells: tuple[Cell, ...],
    best: _Best,
    effort: DiskEffort,
    tell: Callable[[str, float], None],
    fio: str | None,
) -> Directory:
    """The rates that count: of longer runs than those that found the best cells, which luck may have helped."""
    loads: dict[str, list[Runnable]] = {name: [load] for name, load in best.loads.items()}
    names = {verb: {_shape_name(verb, shape): shape for shape in SHAPES} for verb in _VERBS} if fio else {}
    for verb, shapes in names.items():
        for name, shape in shapes.items():
            loads[name] = [Fio(fio or "", file.reachable_path, file.size_bytes, verb, shape, file.file.direct)]
    run_s = effort.seconds * (1 - _GRID_SHARE) / len(_WAYS) / effort.rounds if fio is None else _FIO_RUN_S
    limit_s = 1.5 * run_s * len(loads) * effort.rounds
    pace = Pace(run_s, effort.rounds, _deadline(limit_s), lambda name: tell(f"at its best: {name}", _GRID_SHARE))
    rates = {name: Rate.of([run[0] for run in runs]) for name, runs in (await in_turn(loads, pace)).items()}
    return Directory(
        cells,
        DirectoryRates(
            str(path), rates["read"], rates["write"], rates["both"], best.read.block_bytes, best.read.threads,
            best.write.block_bytes, best.write.threads, file.file.direct,
        ),
        {verb: {name: rates[name] for name in shapes} for verb, shapes in names.items()},
    )  # fmt: skip


async def _grid(file: DiskFile, effort: DiskEffort, tell: Callable[[str], None]) -> tuple[Cell, ...]:
    """Every block size with every number of threads that the memory suffices for; the cheap ones first."""
    limit_bytes = min(file.memory.nbytes, file.size_bytes)
    shapes = [(b, t) for b in effort.blocks for t in effort.threads if b * t <= limit_bytes]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    loads: dict[str, Sequence[Runnable]] = {}
    for block_bytes, threads in shapes:
        loads[_cell_name("read", block_bytes, threads)] = [file.read(block_bytes, threads)]
        loads[_cell_name("write", block_bytes, threads)] = [file.write(block_bytes, threads)]
    limit_s = effort.seconds * _GRID_SHARE
    run_s = limit_s / len(loads) / effort.grid_rounds
    rates = await in_turn(loads, Pace(run_s, effort.grid_rounds, _deadline(1.5 * limit_s), tell))

    def rate(verb: Verb, block_bytes: int, threads: int) -> Rate | None:
        runs = rates.get(_cell_name(verb, block_bytes, threads))
        return Rate.of([run[0] for run in runs]) if runs else None

    return tuple(Cell(b, t, rate("read", b, t), rate("write", b, t)) for b, t in sorted(shapes))


def _cell_name(verb: Verb, block_bytes: int, threads: int) -> str:
    return f"{verb} {format_size(block_bytes)} x {threads}"


def _shape_name(verb: Verb, shape: Shape) -> str:
    return f"fio {verb} {shape}"


def _deadline(seconds: float) -> float:
    return time.perf_counter() + seconds
