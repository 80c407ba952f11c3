"""Steps of the real engine in a store of their own: to record one, and to measure depths against each other.

Scope: the engine that `tierstore train` would make, for some steps. Not here: what is made of them (`apps/tune.py`).
Owner: the thread that runs the steps; the store is removed at the end.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tierstore.apps.crew import Crew
from tierstore.apps.options import TrainOptions
from tierstore.apps.train import Parts, assemble, engine_arguments, return_freed_memory
from tierstore.config import UpdateSchedule
from tierstore.plan.placement import Placement
from tierstore.plan.step_record import StepRecord
from tierstore.plan.tuning import USUAL_DEPTH
from tierstore.trace import Tracer
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

_RECORDED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of steps: the median and the quartiles, and the waiting of the median."""

    seconds: float
    low: float
    high: float
    stall_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], stalls_s: Sequence[float]) -> Measured:
        """Of at least two steps."""
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(middle, low, high, statistics.median(stalls_s))


class Trial:
    """An engine that trains for some steps only."""

    def __init__(self, engine: Engine, parts: Parts, device: str) -> None:
        self._engine, self._parts, self._device = engine, parts, torch.device(device)

    @property
    def placement(self) -> Placement:
        return self._engine.placement

    def step(self) -> tuple[float, StepReport]:
        """One step of one micro-batch, and its seconds by the clock of the loop."""
        began_s = time.perf_counter()
        tokens = self._parts.batches.next().to(self._device, non_blocking=True)
        loss = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        float(loss.detach())  # as a loop does that shows its loss
        report = self._engine.step()
        return time.perf_counter() - began_s, report

    def record(self) -> tuple[StepRecord, float]:
        """A typical step without an update beside it; and seconds of both passes beside one, at `USUAL_DEPTH`.

        The second is without waiting for weights, and of the schedule that the options of the trial ask for (a
        speculation that rests is `forward`). The depth stays at that.
        """
        self.step()  # shows the order
        record = StepRecord.typical([self._recorded() for _ in range(_RECORDED_STEPS)])
        self._engine.fix_prefetch_depth(USUAL_DEPTH)
        self.step()
        reports = [self.step()[1].seconds for _ in range(_RECORDED_STEPS)]
        return record, statistics.median(one["forward"] + one["backward"] - one["wait"] for one in reports)

    def _recorded(self) -> StepRecord:
        """One step that begins when everything of the last is at rest."""
        self._engine.flush()
        seconds, report = self.step()
        seen = self._engine.record()
        rest_s = seconds - report.seconds["wait"] - seen.forward_s - seen.backward_s
        if report.schedule == UpdateSchedule.STEP.value:
            rest_s -= report.seconds["update"]  # the update itself, which the other schedules leave to the next step
        self._engine.flush()
        return replace(seen, between_s=max(rest_s, 0.0))

    def measure(
        self, depths: Sequence[int], rounds: int, steps: int, between: Callable[[], None]
    ) -> tuple[dict[int, Measured], StepRecord]:
        """Steps of every depth in turns, a step recorded after each: a machine is not the same all the time.

        Args:
            between: called before each round, when the disks are idle.
        """
        seconds: dict[int, list[float]] = {depth: [] for depth in depths}
        stalls_s: dict[int, list[float]] = {depth: [] for depth in depths}
        self.step()
        records = []
        for _ in range(rounds):
            self._engine.flush()
            between()
            for depth in depths:
                self._engine.fix_prefetch_depth(depth)
                self.step()  # what the depth before has left on the device is not counted
                for _ in range(steps):
                    taken_s, report = self.step()
                    seconds[depth].append(taken_s)
                    stalls_s[depth].append(report.seconds["wait"])
                records.append(self._recorded())
        measured = {depth: Measured.of(seconds[depth], stalls_s[depth]) for depth in depths}
        return measured, StepRecord.typical(records)


@contextlib.contextmanager
def trial(options: TrainOptions) -> Iterator[Trial]:
    """An engine for these options, with a store that is removed at the end."""
    with contextlib.ExitStack() as stack:
        stores = []
        for directory in options.nvme:
            directory.mkdir(parents=True, exist_ok=True)
            stores.append(directory / f"tune-{secrets.token_hex(8)}")
            # Before it is made: a signal may come between.
            stack.callback(shutil.rmtree, stores[-1], ignore_errors=True)
            stores[-1].mkdir(mode=0o700)
        own = replace(options, nvme=tuple(path / "store" for path in stores))
        return_freed_memory()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        parts = assemble(own)
        stack.callback(parts.batches.close)
        tracer = Tracer(time.perf_counter, enabled=False)
        engine = stack.enter_context(Engine(**engine_arguments(own, parts, tracer, Crew())))
        yield Trial(engine, parts, options.device)
