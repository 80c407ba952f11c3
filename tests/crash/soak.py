"""A long run on a disk that fails now and then: nothing grows, and a step costs at the end what it cost at first.

[Note: blocks] A figure of a block of steps is the median of its steps, so that what other programs do meanwhile, the
first step, and the step after a fault do not count.

[Note: newcomer] The CPU time of the same step differs by a quarter from minute to minute on a shared machine. So the
last block takes its steps in turns with a process that has just begun, whose CPU times stand for those of the first.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from crash.claims import Findings
from crash.kills import descriptors, files_of
from resuming import DISK, Way
from runs import VOCABULARY, next_token_loss

from tierstore.apps.heap import prepare_heap
from tierstore.config import AdamWConfig
from tierstore.errors import StorageError
from tierstore.io.backend import Backend
from tierstore.train.engine import Engine

BLOCK = 100
WAY = Way("forward", cpu_memory=DISK)
RATE = 0.01  # of the transfers
RETRIED, SHORT = (errno.EINTR, errno.EAGAIN), "short"
FATAL = 8  # EIO, in a whole run
SAME, GROWTH = 0.05, 0.01


class FlakyBackend(Backend):
    """Interrupts, refuses or shortens a few transfers; fails the next transfer or sync when it is told to.

    Attributes:
        faults: how many there were, by kind.
    """

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.faults = dict.fromkeys([*(errno.errorcode[number] for number in RETRIED), "short", "EIO"], 0)
        self.fails_next = False
        self._draw = draw
        self._lock = threading.Lock()

    def _fault(self, is_transfer: bool) -> int | str | None:
        with self._lock:
            fault: int | str | None = None
            if self.fails_next:
                self.fails_next, fault = False, errno.EIO
            elif is_transfer and self._draw.random() < RATE:
                fault = self._draw.choice((*RETRIED, SHORT))
            if fault is not None:
                self.faults[fault if isinstance(fault, str) else errno.errorcode[fault]] += 1
            return fault

    def _move(self, call: Callable[[memoryview], int], view: memoryview, path: Path) -> int:
        fault = self._fault(is_transfer=True)
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault), str(path))
        part = len(view) // 2 // 4096 * 4096 if fault == SHORT else len(view)
        return call(view[: part or len(view)])

    def _call_pread(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        read = super()._call_pread
        return self._move(lambda part: read(descriptor, part, offset, path), view, path)

    def _call_pwrite(self, descriptor: int, view: memoryview, offset: int, path: Path) -> int:
        write = super()._call_pwrite
        return self._move(lambda part: write(descriptor, part, offset, path), view, path)

    def _call_fdatasync(self, descriptor: int, path: Path) -> None:
        if self._fault(is_transfer=False):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super()._call_fdatasync(descriptor, path)

    def _call_fsync(self, descriptor: int, path: Path) -> None:
        if self._fault(is_transfer=False):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super()._call_fsync(descriptor, path)


class Noise:
    """Batches, each of which follows from its number; a run registers this as its data."""

    def __init__(self) -> None:
        self.taken = 0

    def next(self) -> torch.Tensor:
        self.taken += 1
        return torch.randint(VOCABULARY, (1, 8), generator=torch.Generator().manual_seed(self.taken))

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.taken = state["taken"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What is there after a step, and what the step took."""

    resident_bytes: int
    descriptors: int
    threads: int
    store_bytes: int
    moved_bytes: int
    operations: int
    cpu_s: float


FLAT = ("resident_bytes", "descriptors", "threads", "store_bytes")
COSTS = ("moved_bytes", "operations", "cpu_s")
# The least number: a commit that is on its way has a file open.
FIGURES = dict.fromkeys(FLAT + COSTS, statistics.median) | {"descriptors": min}


class Soak:
    """The run."""

    def __init__(self, steps: int, seed: int, folder: Path, compare: Callable[[], object] = lambda: None) -> None:
        """`compare` is called after each step of the last block."""
        self._steps = steps
        self._folder = folder
        self._compare = compare
        self._backend = FlakyBackend(random.Random(seed))
        self._process = psutil.Process()
        self.samples: list[Sample] = []
        self.resumed = 0
        self._fails_at = {round(steps * (number + 0.5) / FATAL) for number in range(FATAL)}

    @property
    def faults(self) -> dict[str, int]:
        return self._backend.faults

    def open(self) -> tuple[Engine, Noise]:
        """The engine on the disk that fails, and its batches."""
        torch.manual_seed(7)
        noise = Noise()
        return Engine(
            WAY.model(), WAY.tiers(self._folder), AdamWConfig(lr=1e-3), update=WAY.update, max_grad_norm=0.5,
            resume="auto", registered={"noise": noise}, backend=self._backend,
        ), noise  # fmt: skip

    def run(self, advance: Callable[[], object]) -> dict[str, torch.Tensor]:
        """All steps, resuming after each fault that is fatal; the final weights."""
        while True:
            engine, noise = self.open()
            try:
                with engine:
                    self._steps_of(engine, noise, advance)
                    return engine.state_dict()
            except StorageError:
                self.resumed += 1
                gc.collect()  # an engine is a cycle of objects: without this it is a matter of luck how many are left

    def _steps_of(self, engine: Engine, noise: Noise, advance: Callable[[], object]) -> None:
        before = self._spent()
        while engine.step_count < self._steps:
            step(engine, noise)
            if engine.step_count in self._fails_at:
                self._fails_at.remove(engine.step_count)
                self._backend.fails_next = True
            after = self._spent()
            took = [b - a for a, b in zip(before, after)]
            self.samples.append(Sample(*self._there(), int(took[0]), int(took[1]), took[2]))
            before = self._spent()
            if engine.step_count > self._steps - block_of(self._steps):
                self._compare()
            advance()

    def _spent(self) -> tuple[int, int, float]:
        traffic = self._backend.counters.totals()
        return traffic.read_bytes + traffic.written_bytes, traffic.reads + traffic.writes, time.process_time()

    def _there(self) -> tuple[int, int, int, int]:
        resident = self._process.memory_info().rss
        return resident, descriptors(), self._process.num_threads(), sum(self._sizes())

    def _sizes(self) -> list[int]:
        while True:
            with contextlib.suppress(FileNotFoundError):  # one that has just been replaced
                return list(files_of(self._folder).values())


def undisturbed(steps: int) -> dict[str, torch.Tensor]:
    """The final weights of a run in memory."""
    torch.manual_seed(7)
    noise, tiers = Noise(), WAY.tiers(Path(), nvme=[], gpu_memory="32MiB", cpu_memory="64MiB")
    with Engine(WAY.model(), tiers, AdamWConfig(lr=1e-3), update=WAY.update, max_grad_norm=0.5) as engine:
        for _ in range(steps):
            step(engine, noise)
        return engine.state_dict()


def step(engine: Engine, noise: Noise) -> None:
    engine.backward(next_token_loss(engine, noise.next()))
    engine.step()


def block_of(steps: int) -> int:
    return min(BLOCK, steps // 2)


@contextlib.contextmanager
def newcomer(seed: int, folder: Path) -> Iterator[Callable[[], float]]:
    """A process that has just begun; gives a function that makes it take one step and returns the CPU time, seconds."""
    context = multiprocessing.get_context("fork")  # before anything is trained here; an import takes ten seconds
    here, there = context.Pipe()
    process = context.Process(target=_step_when_asked, args=(seed, folder, there, here), daemon=True)
    process.start()
    there.close()
    here.recv()

    def one() -> float:
        here.send(True)
        return float(here.recv())

    yield one
    here.send(False)
    process.join()


def _step_when_asked(seed: int, folder: Path, asked: Connection, other_end: Connection) -> None:
    other_end.close()  # else this process would not notice the end of the other
    settle_in()
    engine, noise = Soak(0, seed, folder).open()
    with engine:
        asked.send(True)
        before_s = time.process_time()
        while asked.recv():
            step(engine, noise)
            after_s = time.process_time()
            asked.send(after_s - before_s)
            before_s = after_s


def settle_in() -> None:
    torch.set_num_threads(1)
    prepare_heap()  # as `tierstore train`


def soak(steps: int, seed: int, root: Path, advance: Callable[[], object]) -> Findings:
    """Take so many steps with faults; compare what is there and what is spent in the first block and in the last."""
    settle_in()
    fresh_s: list[float] = []
    with newcomer(seed, root / "newcomer") as fresh:
        run = Soak(steps, seed, root / "old", lambda: fresh_s.append(fresh()))
        weights, expected = run.run(advance), undisturbed(steps)
    found, block = Findings("soak"), block_of(steps)
    first, last = (
        {name: middle(getattr(sample, name) for sample in part) for name, middle in FIGURES.items()}
        for part in (run.samples[:block], run.samples[-block:])
    )
    first["cpu_s"] = FIGURES["cpu_s"](fresh_s)  # see [Note: newcomer]
    grown = {name: last[name] / first[name] - 1 for name in first}
    for name in grown:
        found.rows.append((name.replace("_", " "), f"{first[name]:,.6g} -> {last[name]:,.6g} ({grown[name]:+.2%})"))
    found.rows.append(("faults", ", ".join(f"{count} {name}" for name, count in run.faults.items())))
    found.rows.append(("resumed", f"{run.resumed} times"))
    unequal = [name for name, weight in expected.items() if not torch.equal(weight, weights[name])]
    found.claim("the final weights equal those of a run without faults, bit for bit", not unequal,
                f"{len(unequal)} of {len(expected)} differ")  # fmt: skip
    for names, limit, what in ((FLAT, GROWTH, "do not grow"), (COSTS, SAME, "of a step stay the same")):
        worst = max(names, key=lambda name: grown[name] if names is FLAT else abs(grown[name]))
        is_kept = grown[worst] <= limit if names is FLAT else abs(grown[worst]) <= limit
        shown = ", ".join(name.replace("_", " ") for name in names)
        text = f"{shown} {what}: within {limit:.0%}, the last {block} of {len(run.samples)} steps to the first"
        found.claim(text, is_kept, f"{worst.replace('_', ' ')} {grown[worst]:+.2%}")
    found.figures = {"steps": steps, "first": first, "last": last, "faults": run.faults, "resumed": run.resumed}
    found.figures["resident_bytes"] = [sample.resident_bytes for sample in run.samples[:: max(1, steps // 40)]]
    return found
