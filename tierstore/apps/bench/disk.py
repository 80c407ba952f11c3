"""One file on a disk, read and written: as the engine does it, by fio in its usual settings, by DeepSpeed's aio.

Scope: contestants and rows; `contend` is our own side. Not here: the peers' (`tools/peers/disk_*.py`).
Every round passes once over the whole file in each direction, past the page cache.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.apps.bench.case import (
    Bar,
    BenchOptions,
    Case,
    Contestant,
    Results,
    Row,
    best,
    best_median,
    ours,
    peer,
    ratio,
    row_of,
    through_the_cache,
)
from tierstore.apps.bench.serve import Round
from tierstore.config import format_size

if TYPE_CHECKING:  # numpy comes with it
    from tierstore.measure.disk import DiskFile, Verb

FIO_SETTINGS = (("io_uring", 64, "1M"), ("io_uring", 16, "16M"), ("libaio", 32, "1M"), ("libaio", 16, "4M"),
                ("io_uring", 16, "4M"))  # fmt: skip
_OUR_SETTINGS = ((2**25, 4), (2**23, 8))
"""Bytes of a chunk and threads: the largest chunk with the engine's usual threads, and archives' own."""
_DEEPSPEED_DEPTHS = (32, 64)
_MEMORY_BYTES = 2**28
_VERBS: tuple[Verb, ...] = ("read", "write")


def heats(options: BenchOptions, scratch: Path) -> list[list[Contestant]]:
    """All contestants take turns, because a disk shared with others changes its speed within seconds."""
    given = {"path": str(_file(scratch)), "size": options.size}
    contestants = [
        ours(f"tierstore {format_size(block_bytes)} x {threads}", "disk", block_bytes=block_bytes, threads=threads,
             **given)
        for block_bytes, threads in _OUR_SETTINGS
    ]  # fmt: skip
    if options.wants("fio"):
        contestants += [fio_of(engine, depth, block, options, verbs=_VERBS, **given)
                        for engine, depth, block in FIO_SETTINGS]  # fmt: skip
    if options.wants("deepspeed"):
        contestants.append(
            peer("DeepSpeed aio", "disk_deepspeed", options.peer_python, depths=_DEEPSPEED_DEPTHS, **given)
        )
    return [contestants]


def fio_of(engine: str, depth: int, block: str, options: BenchOptions, **given: Any) -> Contestant:
    """fio in one setting."""
    name = f"fio {engine} {depth} x {block}"
    return peer(name, "disk_fio", options.peer_python, engine=engine, depth=depth, block=block, **given)


def rows(options: BenchOptions, results: Results) -> Sequence[Row]:
    """GB/s, each way; the bars stand at our best setting."""
    table: list[Row] = []
    for verb in _VERBS:
        own, fio = best(results, "tierstore", verb), best_median(results, "fio", verb)
        rate = None if own is None else own.median(verb)
        bars = [
            Bar(0.95, "of fio's best", ratio(rate, fio)),
            Bar(1.0, "of DeepSpeed's aio with locked buffers", ratio(rate, best_median(results, "DeepSpeed", verb))),
        ]
        for result in results.values():
            row = row_of(
                result, verb, f"{verb} {format_size(options.size)}", "GB/s",
                floor=fio, floor_of="fio's best setting",
                bars=bars if result is own else (),
            )  # fmt: skip
            table.append(row if result.facts.get("is_direct", True) else through_the_cache(row))
    return table


def prepare(options: BenchOptions, scratch: Path) -> None:
    """The file, with bytes that do not compress; space that is only allocated would be read without the disk."""
    make_file(_file(scratch), options.size)


def make_file(path: Path, size_bytes: int) -> None:
    """A file of so many bytes, all written.

    Raises:
        StorageError: it cannot be made.
    """
    import numpy as np

    from tierstore.io.backend import Backend
    from tierstore.measure.disk import DiskFile, incompressible

    memory = np.frombuffer(mmap.mmap(-1, 2**26), np.uint8)
    incompressible(memory)
    with contextlib.closing(Backend().create(path, size_bytes)) as file:
        DiskFile(file, size_bytes, memory, path).fill(2**23)


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Our own side: blocks in turn through worker threads, into and from an arena of huge pages.

    Options: `path` of a file that is overwritten, its `size`, `block_bytes`, `threads`. Figures: GB/s by verb.
    """
    from tierstore.io.backend import Backend
    from tierstore.measure.disk import DiskFile, incompressible
    from tierstore.measure.memory import arena_memory

    path, size = Path(options["path"]), options["size"]
    with arena_memory(_MEMORY_BYTES, "tierstore-bench") as (runtime, memory):
        incompressible(memory)
        with contextlib.closing(Backend().open(path, writable=True)) as file:
            disk = DiskFile(file, size, memory, path)

            def run_round(number: int) -> tuple[float, dict[str, float]]:
                seconds = {
                    verb: runtime.call(_one_pass, disk, verb, options["block_bytes"], options["threads"])
                    for verb in _VERBS
                }
                return sum(seconds.values()), {verb: size / one / 1e9 for verb, one in seconds.items()}

            yield {"versions": {}, "is_direct": file.direct}, run_round


async def _one_pass(disk: DiskFile, verb: Verb, block_bytes: int, threads: int) -> float:
    """Seconds for every block once, each a job that the loop submits, as in the engine."""
    from tierstore.io.tasks import together
    from tierstore.io.workers import Priority, WorkerPool
    from tierstore.measure.loads import CLOSE_TIMEOUT_S

    load = disk.load(verb, block_bytes, threads)
    workers = WorkerPool("tierstore-bench", threads)
    try:
        await workers.submit(Priority.DEMAND, time.perf_counter)  # the threads are there before the clock runs
        blocks = iter(range(disk.size_bytes // block_bytes))
        start_s = time.perf_counter()

        async def lane(blocks: Iterable[int]) -> None:
            for _ in blocks:
                await workers.submit(Priority.DEMAND, load.job)

        await together(lane(blocks) for _ in range(2 * threads))
        return time.perf_counter() - start_s
    finally:
        workers.close(CLOSE_TIMEOUT_S)


def _file(scratch: Path) -> Path:
    return scratch / "disk.dat"


CASE = Case("disk", heats, rows, disk_bytes=lambda options: options.size, prepare=prepare, reads=("size",))
