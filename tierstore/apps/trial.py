"""Steps of the real engine in a store of their own: to record one, and to measure depths against each other.

Scope: the engine that `tierstore train` would make, for some steps. Not here: what follows from them (`apps/tune.py`).
Owner: the thread that runs the steps; the store is removed at the end.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tierstore.apps.assembly import assemble, engine_arguments
from tierstore.apps.heap import prepare_heap, serve_steps
from tierstore.apps.options import TrainOptions
from tierstore.apps.scratch import clear_scratch, made, scratch
from tierstore.apps.turns import take_short_turns
from tierstore.config import UpdateSchedule
from tierstore.plan.bandwidth import middle
from tierstore.plan.schedules import updates_in_backward
from tierstore.plan.step_record import StepRecord
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

_RECORDED_STEPS = 3
_SCRATCH = "tune-"


@dataclass(frozen=True, slots=True)
class WholeSteps:
    """Medians of steps with updates beside them.

    Attributes:
        computing_s: of forward and backward, without waits for weights; at prefetch `depth`.
        step_s: from the start of a step to that of the next.
        schedule: of their updates.
    """

    computing_s: float
    step_s: float
    depth: int
    schedule: UpdateSchedule


@dataclass(frozen=True, slots=True)
class Recorded:
    """A typical step with no update beside it, and whole steps with one: how long the model computes in either."""

    step: StepRecord
    whole: WholeSteps


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of steps: the median and the quartiles; and the median of their waits for weights."""

    seconds: float
    low: float
    high: float
    stall_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], stalls_s: Sequence[float]) -> Measured:
        return cls(*middle(seconds), statistics.median(stalls_s))


class Trial:
    """An engine that trains for some steps only.

    Args:
        next_batch: gives the tokens of one step.
    """

    def __init__(self, engine: Engine, next_batch: Callable[[], torch.Tensor], device: str) -> None:
        self._engine, self._next_batch, self._device = engine, next_batch, torch.device(device)

    def step(self) -> tuple[float, StepReport]:
        """One step of one micro-batch, and its seconds by the clock of the loop."""
        began_s = time.perf_counter()
        tokens = self._next_batch().to(self._device, non_blocking=True)
        loss = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        float(loss.detach())  # as in a loop that shows its loss
        report = self._engine.step()
        return time.perf_counter() - began_s, report

    def whole_step(self) -> tuple[float, StepReport]:
        """The same by `train_step`, in which an engine may speculate even if that was not asked for."""
        began_s = time.perf_counter()
        tokens = self._next_batch().to(self._device, non_blocking=True)
        report = self._engine.train_step([{"input_ids": tokens, "labels": tokens}])
        return time.perf_counter() - began_s, report

    def record(self) -> Recorded:
        """Steps of an engine whose updates run inside backward by speculation only: else no pass is free of updates."""
        self.step()  # shows the engine the order of groups
        typical = StepRecord.typical([self.free_step() for _ in range(_RECORDED_STEPS)])
        return Recorded(typical, self.whole_steps(_RECORDED_STEPS))

    def whole_steps(self, steps: int) -> WholeSteps:
        """Medians of so many steps, after one that warms up."""
        self.whole_step()
        taken = [self.whole_step() for _ in range(steps)]
        computing_s = statistics.median(
            one.seconds["forward"] + one.seconds["backward"] - one.seconds["wait"] for _, one in taken
        )
        step_s = statistics.median(seconds for seconds, _ in taken)
        last = taken[-1][1]
        return WholeSteps(computing_s, step_s, last.prefetch_depth, UpdateSchedule(last.schedule))

    def free_step(self) -> StepRecord:
        """One step that begins when all work of the last one has ended."""
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
    ) -> tuple[dict[int, Measured], StepRecord | None]:
        """Steps of every depth in turns, because a machine's speed varies; and a step recorded after each depth.

        The record is None if updates run inside backward.

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
                self.step()  # what the depth before has left on the device does not count
                for _ in range(steps):
                    taken_s, report = self.step()
                    seconds[depth].append(taken_s)
                    stalls_s[depth].append(report.seconds["wait"])
                if not updates_in_backward(UpdateSchedule(report.schedule)):
                    records.append(self.free_step())
        measured = {depth: Measured.of(seconds[depth], stalls_s[depth]) for depth in depths}
        return measured, StepRecord.typical(records) if records else None


@contextlib.contextmanager
def trial(options: TrainOptions) -> Iterator[Trial]:
    """An engine for these options, whose store is removed at the end; stores of killed trials are removed first."""
    with contextlib.ExitStack() as stack:
        stores = []
        for directory in options.nvme:
            stack.enter_context(made(directory))
            clear_scratch(directory, _SCRATCH)
            stores.append(stack.enter_context(scratch(directory, _SCRATCH)))
        own = replace(options, nvme=tuple(path / "store" for path in stores))
        prepare_heap()
        take_short_turns(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        parts = assemble(own)
        stack.callback(parts.batches.close)
        engine = stack.enter_context(Engine(**engine_arguments(own, parts)))
        in_memory = engine.placement.updates_in_memory
        stack.enter_context(serve_steps(own.freed_memory, updates_in_memory=in_memory))
        yield Trial(engine, parts.batches.next, options.device)
