"""Kills processes that train again and again, resumes them, and compares every step with an uninterrupted run.

A parent that computes nothing imports everything once and forks a process per run and rank, so a kill costs well under
a second. A run is ended by SIGKILL inside its n-th system call on the store, a write being cut in the middle; or by
SIGKILL at a random moment; or asked to end by SIGTERM or SIGINT. All draws are seeded.

A step writes its line of the log (loss, norm, rate, data position, random states) before its commit. So after kills the
log may hold a step twice, with equal lines, but it never lacks a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # here, not in each process: every optimizer imports it, which takes two seconds
import xxhash
from crash.children import LOST, Blow, Marks, run_children
from crash.claims import Broken, Findings
from faults import FaultyBackend
from runs import VOCABULARY, next_token_loss, tiny
from torch import distributed

from tierstore.apps.data import Batches, Corpus
from tierstore.apps.stopping import StopRequest
from tierstore.config import AdamWConfig, TierConfig
from tierstore.errors import RankLost
from tierstore.kernels import warm_up
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

STEPS = 8
TIMEOUT_S = 10.0  # of ranks that wait for one that was killed
STOPS = (signal.SIGINT, signal.SIGTERM)
PHASES = ("imports", "construction", "forward", "backward", "step", "closing")
CALLS = ("open", "close", "allocate", "pread", "pwrite", "truncate", "fdatasync", "fsync", "replace", "unlink", "list",
         "mkdir")  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    update: str
    commit_every: int = 1
    workers: int = 0
    dtype: torch.dtype = torch.float32
    cpu_memory: str = "3MiB"
    codec: str = "none"
    directories: int = 1
    gpu_memory: str = "1MiB"
    state_on_gpu: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("forward", "forward"),
        Variant("forward-workers", "forward", workers=2, dtype=torch.bfloat16),
        Variant("forward-3", "forward", commit_every=3, directories=2),
        Variant("backward", "backward"),
        Variant("backward-3", "backward", commit_every=3, dtype=torch.bfloat16, cpu_memory="64MiB"),
        Variant("speculative", "speculative"),
        Variant("speculative-lz4", "speculative", cpu_memory="16MiB", codec="lz4", directories=2),
        Variant("forward-gpu", "forward", gpu_memory="16MiB", state_on_gpu=True),
    )
}


# --- what a process does -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a process runs: its rank, its directory, and where it tells its parent what it does."""

    rank: int
    ranks: int
    folder: Path
    marks: Marks

    def phase(self, name: str) -> None:
        self.marks.set(self.rank, 1 + PHASES.index(name))

    def tell(self, name: str, text: str) -> None:
        """A small file of this rank, whole or not at all."""
        path = self.folder / f"{name}.{self.rank}"
        new = path.with_name(path.name + ".new")
        new.write_text(text)
        new.replace(path)


class KillingBackend(FaultyBackend):
    """Ends its process by SIGKILL inside the call number `kill_at`; a write has then reached the disk in part."""

    def __init__(self, kill_at: int | None, place: Place) -> None:
        super().__init__()
        self.kill_at = kill_at
        self._place = place

    def _is_due(self, kind: str) -> bool:
        with self._fault_lock:
            self.calls.append(kind)
            return len(self.calls) - 1 == self.kill_at

    def _end(self, kind: str) -> None:
        self._place.marks.set(self._place.rank, 0, 1 + CALLS.index(kind))
        os.kill(os.getpid(), signal.SIGKILL)

    def _step(self, kind: str, path: Path) -> None:
        if self._is_due(kind):
            self._end(kind)

    def _move(self, kind: str, view: memoryview, path: Path, call: Callable[[memoryview], int]) -> int:
        if self._is_due(kind):
            if kind == "pwrite" and len(view) > 4096:
                call(view[: len(view) // 2 // 4096 * 4096])
            self._end(kind)
        return call(view)


def descriptors() -> int:
    """Open ones of this process."""
    return len(os.listdir("/proc/self/fd"))


def open_files(folder: Path) -> int:
    """Descriptors of this process on files of the stores in a folder."""
    links = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path))
    return sum(link.startswith(f"{folder}/store") for link in links)


def digest_of_random_states() -> str:
    name, keys, *rest = np.random.get_state()
    states = (random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist())
    return xxhash.xxh3_64_hexdigest(repr(states).encode())


def make_engine(variant: Variant, place: Place, batches: Batches, backend: KillingBackend) -> Engine:
    tiers = TierConfig(
        gpu_memory=variant.gpu_memory if place.ranks == 1 else "4MiB", cpu_memory=variant.cpu_memory,
        codec=variant.codec, state_on_gpu=variant.state_on_gpu,
        timeout_s=30.0 if place.ranks == 1 else TIMEOUT_S,
        nvme=[place.folder / f"store{n}" for n in range(variant.directories)],
    )  # fmt: skip
    return Engine(
        tiny(variant.dtype, blocks=2, dropout=0.1), tiers, AdamWConfig(lr=1e-2, weight_decay=0.1),
        update=variant.update, max_grad_norm=None if variant.update == "backward" else 0.5,
        commit_every=variant.commit_every, resume="auto",
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        registered={"data": batches}, backend=backend,
    )  # fmt: skip


def train(variant: Variant, place: Place, kill_at: int | None) -> None:
    """Resume what is there, and train to the last step, or to the end of the step in which a signal comes.

    Each rank leaves `log`, `begun` and `stopped` or, at the last step, `weights` and `calls`.
    """
    stop = StopRequest(rank=place.rank, ranks=place.ranks).__enter__()  # to the end of the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    place.phase("construction")
    random.seed(1)
    np.random.seed(2)
    if place.ranks > 1:
        with others_may_die():
            distributed.init_process_group(
                "gloo", init_method=f"file://{place.folder}/meeting", rank=place.rank, world_size=place.ranks,
                timeout=timedelta(seconds=TIMEOUT_S),
            )  # fmt: skip
    text = np.random.default_rng(3).integers(0, VOCABULARY, 20_000, dtype=np.uint8)
    batches = Batches(
        Corpus(text, text, "noise", "noise"), length=17, batch=2, seed=4, workers=variant.workers, rank=place.rank,
        ranks=place.ranks,
    )  # fmt: skip
    backend, weights = KillingBackend(kill_at, place), {}
    with make_engine(variant, place, batches, backend) as engine, stop.wished("the store holds the last step"):
        engine.flush()
        found = {"generation": engine.statistics()["generation"], "step": engine.step_count}
        place.tell("begun", json.dumps(found | {"open": open_files(place.folder)}))
        loop(engine, batches, place, stop)
        if (step := engine.step_count) == STEPS:
            weights = engine.state_dict()
        place.phase("closing")
    batches.close()
    if step < STEPS:
        place.tell("stopped", str(step))
        raise SystemExit(128 + (stop.signal_number or signal.SIGTERM))
    torch.save(weights, place.folder / f"weights.{place.rank}")
    place.tell("calls", str(len(backend.calls)))


def loop(engine: Engine, batches: Batches, place: Place, stop: StopRequest) -> None:
    """The steps."""
    log = os.open(place.folder / f"log.{place.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    loss = torch.zeros(())

    def write_line(report: StepReport) -> None:
        line = {
            "step": report.step, "loss": loss.item(), "norm": report.grad_norm, "lr": report.lr,
            "position": batches.position, "random": digest_of_random_states(),
        }  # fmt: skip
        os.write(log, (json.dumps(line) + "\n").encode())

    engine.on_step(write_line)
    while engine.step_count < STEPS and not is_asked_to_stop(stop, place.ranks):
        tokens = batches.next()
        # Python's and numpy's generators matter to the losses, too.
        tokens[0, 0] = (random.randrange(VOCABULARY) + np.random.randint(VOCABULARY)) % VOCABULARY
        place.phase("forward")
        loss = next_token_loss(engine, tokens)
        place.phase("backward")
        engine.backward(loss)
        place.phase("step")
        engine.step()
    os.close(log)


def is_asked_to_stop(stop: StopRequest, ranks: int) -> bool:
    """Whether one of the ranks was asked to."""
    asked = [stop.signal_number]
    if ranks > 1:
        asked = [None] * ranks
        with others_may_die():
            distributed.all_gather_object(asked, stop.signal_number)
    return any(number is not None for number in asked)


@contextlib.contextmanager
def others_may_die() -> Iterator[None]:
    """Around collectives that are not the engine's: their errors mean that a rank was lost."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(str(error)) from error


# --- what the parent sees ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What the blows of one variant came to."""

    variant: str
    kills: int = 0
    stops: int = 0
    runs: int = 0
    laps: int = 0
    steps_repeated: int = 0
    most_files: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run: where it is, how long it took, what it did and left."""

    folder: Path
    seconds: float
    calls: int
    open_files: int
    packs: dict[str, int]
    files: int


class Lap:
    """One training from an empty store to its last step, through any number of runs.

    Args:
        draw: where blows fall.
    """

    def __init__(
        self, variant: Variant, folder: Path, ranks: int, draw: random.Random, reference: Reference | None
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._variant = variant
        self._ranks = ranks
        self._draw = draw
        self._reference = reference
        self._marks = Marks(ranks)

    def run(self, blow: Blow | None, outcome: Outcome) -> bool:
        """One run; whether it came to the last step.

        Raises:
            Broken: a promise was not kept.
        """
        committed, stopped = newest_generation(self.folder), self._told("stopped")
        for path in [path for name in ("begun", "stopped", "meeting") for path in self.folder.glob(f"{name}*")]:
            path.unlink()
        self._marks.clear()

        def work(rank: int) -> None:
            at_call = blow.at_call if blow is not None and rank in blow.ranks else None
            train(self._variant, Place(rank, self._ranks, self.folder, self._marks), at_call)

        statuses = run_children(work, self._ranks, self.folder, blow)
        outcome.runs += 1
        self._check_begin(committed, stopped)
        self._check_end(statuses, blow)
        if -signal.SIGKILL in statuses:
            outcome.kills += 1
            phase, call = self._marks.get(statuses.index(-signal.SIGKILL))
            outcome.phases[PHASES[max(0, phase - 1)]] += 1
            if call:
                outcome.calls[CALLS[call - 1]] += 1
        outcome.stops += self._told("stopped") is not None
        outcome.most_files = max(outcome.most_files, len(files_of(self.folder)))
        return not any(statuses)

    def _told(self, name: str) -> int | None:
        path = self.folder / f"{name}.0"
        return json.loads(path.read_text()) if path.exists() else None

    def _check_begin(self, committed: int, stopped: int | None) -> None:
        """The run began with what was committed, and with as many files open as the reference."""
        path = self.folder / "begun.0"
        begun = json.loads(path.read_text()) if path.exists() else None
        if begun is None:
            return
        if begun["generation"] < committed:
            raise Broken(f"a run began at generation {begun['generation']}, and {committed} was there")
        if stopped is not None and begun["step"] != stopped:
            raise Broken(f"stopped by a signal after step {stopped}, but resumed at {begun['step']}")
        if self._reference is not None and begun["open"] != self._reference.open_files:
            raise Broken(f"{begun['open']} files of the store are open, in the first run {self._reference.open_files}")

    def _check_end(self, statuses: list[int], blow: Blow | None) -> None:
        """How processes may end: done, killed, asked to, or because another rank was killed."""
        allowed = {0}
        if blow is not None:
            is_kill = blow.signal == signal.SIGKILL
            allowed |= {-signal.SIGKILL, LOST} if is_kill else {128 + number for number in STOPS} | {LOST}
        for rank, status in enumerate(statuses):
            if status not in allowed or (status == LOST and set(statuses) <= {0, LOST}):
                said = (self.folder / f"stderr.{rank}").read_text()[-4000:]
                raise Broken(f"{self._variant.name}: rank {rank} ended by {status} after {blow}:\n{said}")

    def blow(self, reference: Reference) -> Blow:
        """Where the next blow falls."""
        draw, everybody = self._draw, tuple(range(self._ranks))
        kind = draw.choices(("call", "moment", "stop"), (3, 3, 1))[0]
        one = (draw.randrange(self._ranks),)
        if kind == "call":
            return Blow(one, at_call=draw.randrange(reference.calls // 3))
        after_s = draw.uniform(0.0, reference.seconds * 0.6)
        if kind == "moment":
            return Blow(draw.choice((one, everybody)), after_s=after_s)
        return Blow(everybody, after_s=after_s, signal=draw.choice(STOPS))


def newest_generation(folder: Path) -> int:
    """By the names of the manifests; -1 if there is none."""
    return max((int(path.stem[-12:]) for path in folder.glob("store0/manifest-*.json")), default=-1)


def files_of(folder: Path) -> dict[str, int]:
    """Sizes in bytes of all files in the stores of a folder, except their locks."""
    paths = (path for path in folder.glob("store*/*") if not re.fullmatch(r"lock(\.\d+)?", path.name))
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def packs_of(folder: Path) -> dict[str, int]:
    return {name: size for name, size in files_of(folder).items() if re.search(r"\.[ab]\.safetensors$", name)}


def read_log(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"log.{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def uninterrupted(variant: Variant, folder: Path, ranks: int) -> Reference:
    begin_s = time.monotonic()
    if not Lap(variant, folder, ranks, random.Random(), None).run(None, Outcome(variant.name)):
        raise Broken("a run that nobody disturbed did not come to its end")
    seconds = time.monotonic() - begin_s
    calls = int((folder / "calls.0").read_text())
    begun = json.loads((folder / "begun.0").read_text())
    return Reference(folder, seconds, calls, begun["open"], packs_of(folder), len(files_of(folder)))


def compare(reference: Reference, folder: Path, ranks: int, outcome: Outcome) -> None:
    """The logs, the final weights and the files of a lap with those of the uninterrupted run.

    Raises:
        Broken: they differ.
    """
    where = f"{outcome.variant} after {outcome.kills} kills"
    for rank in range(ranks):
        expected = {line["step"]: line for line in read_log(reference.folder, rank)}
        lines = read_log(folder, rank)
        for line in lines:
            if line != expected[line["step"]]:
                raise Broken(f"{where}: a step of rank {rank} differs:\n  {line}\n  {expected[line['step']]}")
        if missing := expected.keys() - {line["step"] for line in lines}:
            raise Broken(f"{where}: steps {sorted(missing)} of rank {rank} are not in the log")
        ours, theirs = (torch.load(path / f"weights.{rank}") for path in (folder, reference.folder))
        for name, weight in theirs.items():
            if not torch.equal(weight, ours[name]):
                raise Broken(f"{where}: {name} differs")
        if rank == 0:
            outcome.steps_repeated += len(lines) - len(expected)
    if (packs := packs_of(folder)) != reference.packs:
        raise Broken(f"{where}: the packs are {packs}, without kills {reference.packs}")
    if (files := len(files_of(folder))) != reference.files:
        raise Broken(f"{where}: {files} files are left, without kills {reference.files}: {sorted(files_of(folder))}")


def run_variant(
    variant: Variant, blows: int, seed: int, root: Path, ranks: int, advance: Callable[[], object]
) -> Outcome:
    """Deal so many blows and compare; a lap that ends before the last blow is followed by another lap.

    Raises:
        Broken: a promise was not kept.
    """
    draw, outcome = random.Random(f"{variant.name} {ranks} {seed}"), Outcome(variant.name)
    folder = root / f"{variant.name}-{ranks}"
    reference = uninterrupted(variant, folder / "reference", ranks)
    while (dealt := outcome.kills + outcome.stops) < blows:
        lap = Lap(variant, folder / str(outcome.laps), ranks, draw, reference)
        outcome.laps += 1
        is_over = False
        while not is_over:
            is_over = lap.run(lap.blow(reference) if dealt < blows else None, outcome)
            for _ in range(outcome.kills + outcome.stops - dealt):
                advance()
            dealt = outcome.kills + outcome.stops
        compare(reference, lap.folder, ranks, outcome)
        shutil.rmtree(lap.folder)
    shutil.rmtree(folder)
    return outcome


def kill(variants: list[str], blows: int, seed: int, root: Path, ranks: int, advance: Callable[[], object]) -> Findings:
    """Share so many blows out over these variants, and see whether all promises were kept."""
    torch.set_num_threads(1)  # no threads before a fork
    warm_up({"fp32", "bf16"})
    if threading.active_count() > 1 or sys.platform != "linux":
        raise Broken("only a process with one thread, on Linux, can fork the runs")
    found, outcomes = Findings(f"kills, {ranks} rank{'s' * (ranks > 1)}"), []
    broken: Broken | None = None
    before = descriptors()
    for number, name in enumerate(variants):
        share = blows // len(variants) + (number < blows % len(variants))
        try:
            outcomes.append(run_variant(VARIANTS[name], share, seed, root, ranks, advance))
        except Broken as error:
            broken = error
            break
    _fill(found, outcomes, broken, descriptors() - before)
    return found


def _fill(found: Findings, outcomes: list[Outcome], broken: Broken | None, leaked: int) -> None:
    """The table and the claims."""
    for one in outcomes:
        text = f"{one.kills} kills, {one.stops} stops, {one.runs} runs, {one.laps} laps, {one.steps_repeated} repeated"
        found.rows.append((one.variant, text))
    phases, calls = (sum((getattr(one, name) for one in outcomes), Counter()) for name in ("phases", "calls"))
    found.rows.append(("killed in", ", ".join(f"{name} {phases[name]}" for name in PHASES if phases[name])))
    found.rows.append(("inside a call", ", ".join(f"{name} {calls[name]}" for name in CALLS if calls[name])))
    total = {name: sum(getattr(one, name) for one in outcomes) for name in ("kills", "stops", "runs", "laps")}
    seen = str(broken) if broken else f"{total['kills']} kills and {total['stops']} stops in {total['laps']} laps"
    found.claim(
        f"all {STEPS} steps and the final weights equal the uninterrupted run's, bit for bit; SIGTERM and SIGINT end "
        "with a committed step; no generation is lost; files and descriptors do not grow",
        broken is None, seen,
    )  # fmt: skip
    found.claim("no descriptor is left in the parent", leaked <= 0, f"{leaked} more than before")
    found.figures = total | {"phases": dict(phases), "calls": dict(calls)}
