"""What a disk gives: over block size and threads, then at its best, each way and both at once; all disks together.

Scope: which loads run, in which order, and the rates that follow.
Not here: a load (`disk.py`), rounds (`loads.py`), links and compute (`machine.py`).
Owner: the caller owns the memory; files are open while a survey runs.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tierstore.config import format_size
from tierstore.io.backend import Backend
from tierstore.io.memory import Bytes
from tierstore.measure.disk import DiskFile, check_room, disk_file
from tierstore.measure.fio import SHAPES, Fio, Shape
from tierstore.measure.loads import Pace, Runnable, in_turn
from tierstore.plan.bandwidth import DirectoryRates, Rate

Verb = Literal["read", "write"]
_VERBS: tuple[Verb, Verb] = ("read", "write")
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


QUICK = DiskEffort(2**29, 5.0, (2**20, 2**23, 2**25), (1, 4, 8), 2, 5)
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
    """All directories, one by one and together."""

    directories: tuple[Directory, ...]
    read: Rate
    write: Rate
    both: Rate


async def survey(
    paths: Sequence[Path],
    effort: DiskEffort,
    memory: Bytes,
    backend: Backend,
    tell: Callable[[str, float], None],
    fio: str | None = None,
) -> Disks:
    """Measures directories one after the other, then all of them together.

    Args:
        memory: for the transfers, divided among the directories; of incompressible bytes.
        tell: called before each run, with what is done and the share of all that is over.
        fio: the program to compare with.

    Raises:
        StorageFull: before anything is written.
        StorageError: a disk failed; nothing is left behind.
    """
    check_room(list(paths), effort.size_bytes, backend)
    share_bytes = memory.nbytes // len(paths) // 2**21 * 2**21
    with contextlib.ExitStack() as files:
        found: list[_Surveyed] = []
        for index, path in enumerate(paths):
            tell(f"{path}: a file of {format_size(effort.size_bytes)}", index / len(paths))
            part = memory[index * share_bytes : (index + 1) * share_bytes]
            file = files.enter_context(disk_file(path, effort.size_bytes, part, backend))

            def tell_of(what: str, done: float, path: Path = path, index: int = index) -> None:
                tell(f"{path}: {what}", (index + done) / len(paths))

            found.append(await _survey_one(path, file, effort, tell_of, fio))
        directories = tuple(one.directory for one in found)
        if len(found) == 1:
            rates = directories[0].rates
            return Disks(directories, rates.read, rates.write, rates.both)
        together = {name: [one.best[name] for one in found] for name in ("read", "write", "both")}
        pace = Pace(effort.seconds / 4 / 3 / effort.rounds, effort.rounds, _deadline(effort.seconds / 2),
                    lambda name: tell(f"{len(paths)} directories together: {name}", 1.0))  # fmt: skip
        sums = {name: Rate.of([sum(run) for run in runs]) for name, runs in (await in_turn(together, pace)).items()}
        return Disks(directories, sums["read"], sums["write"], sums["both"])


@dataclass(frozen=True, slots=True)
class _Surveyed:
    directory: Directory
    best: Mapping[str, Runnable]


async def _survey_one(
    path: Path, file: DiskFile, effort: DiskEffort, tell: Callable[[str, float], None], fio: str | None
) -> _Surveyed:
    cells = await _grid(file, effort, lambda name: tell(name, 0.0))
    best_read = max(cells, key=lambda cell: cell.rate("read"))
    best_write = max(cells, key=lambda cell: cell.rate("write"))
    block_bytes = max(best_read.block_bytes, best_write.block_bytes)
    threads = min(best_read.threads + best_write.threads, file.memory.nbytes // block_bytes)
    best: dict[str, Runnable] = {
        "read": file.read(best_read.block_bytes, best_read.threads),
        "write": file.write(best_write.block_bytes, best_write.threads),
        "both": file.both(block_bytes, threads),
    }
    loads: dict[str, list[Runnable]] = {name: [load] for name, load in best.items()}
    if fio is not None:
        for verb, shape in itertools.product(_VERBS, SHAPES):
            one = Fio(fio, file.reachable_path, file.size_bytes, verb, shape, file.file.direct)
            loads[_shape_name(verb, shape)] = [one]
    run_s = effort.seconds * (1 - _GRID_SHARE) / 3 / effort.rounds if fio is None else _FIO_RUN_S
    limit_s = 1.5 * run_s * len(loads) * effort.rounds
    pace = Pace(run_s, effort.rounds, _deadline(limit_s), lambda name: tell(f"at its best: {name}", _GRID_SHARE))
    rates = {name: Rate.of([run[0] for run in runs]) for name, runs in (await in_turn(loads, pace)).items()}
    return _Surveyed(
        Directory(
            cells,
            DirectoryRates(
                str(path), rates["read"], rates["write"], rates["both"], best_read.block_bytes, best_read.threads,
                best_write.block_bytes, best_write.threads, file.file.direct,
            ),
            {} if fio is None else {
                verb: {_shape_name(verb, shape): rates[_shape_name(verb, shape)] for shape in SHAPES} for verb in _VERBS
            },
        ),
        best,
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
