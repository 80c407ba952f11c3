"""Training steps of our own engine, as one contestant.

Scope: `contend`: an engine as `tierstore train` makes it, and rounds of steps. Not here: the rows (`step.py`).
Owner: the store is removed when the contestant ends.

[Note: a step's time] Work of a step goes on after `step()` has returned: its update beside the next forward, its commit
until the manifest is durable. A round is a step to get going, K steps that are timed, one more, then `flush()`; so the
timed steps have neighbours on both sides and stand for any steps of a long run. The time of a step is:
* With a commit each step: the time from a durable commit to the K-th one after it, over K. Exactly K whole updates and
  commits lie in between, and the last of these commits is durable.
* With rare commits, none of which falls into the timed steps: the time from the start of the first timed step to the
  start of the step after the last, over K; plus the time of the flush at the end, a whole commit that nothing hides,
  over the steps that would share it.
* Without commits: the same, without the flush.
Speculation begins before the rounds do: steps are run until one guess was right. All steps run at the prefetch depth
that the engine chooses.
Each round ends with the steps of a trial, by which `tune` is calibrated, because a machine's speed varies from minute
to minute.
`drained_s` is the other figure: from an idle engine through `flush()`, over all K + 2 steps. It is longer, because
nothing hides the start of the first step, or the update and commit of the last.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tierstore.apps.assembly import assemble, engine_arguments
from tierstore.apps.bench.serve import Round
from tierstore.apps.heap import prepare_heap, serve_steps
from tierstore.apps.options import TrainOptions, options_of_object
from tierstore.apps.trial import Trial
from tierstore.apps.turns import take_short_turns
from tierstore.config import MicroBatchSchedule, Tier, UpdateSchedule
from tierstore.plan.placement import Kind
from tierstore.trace import Tracer
from tierstore.train.engine import Engine
from tierstore.train.report import StepReport

_TICK_S = 0.005
_PERCENTILE = 99
_NEVER = 10**9  # steps from commit to commit
_MOST_WARMING_STEPS = 100
_TRIAL_STEPS = 2


class Commits(Tracer):
    """Notes when commits have become durable, and nothing else."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter)
        self.ends_s: list[float] = []

    def span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        if track == "commit":
            self.ends_s.append(end)

    def counter(self, track: str, name: str, value: float) -> None:
        pass


class SameTokens:
    """Batches that are the same each time, as the peers' are."""

    def __init__(self, batch: int, sequence: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, vocabulary, (batch, sequence), generator=generator)

    def next(self) -> torch.Tensor:
        return self._tokens


class LoopLag:
    """How late a timer of the engine's loop is, which is how long a completion waits there for its turn.

    It ticks only from `begin()` to `take_ms()`: between its rounds a contestant leaves the cores to the others.
    """

    def __init__(self, engine: Engine) -> None:
        self._late_s: list[float] = []
        self._loop = engine._parts.runtime.loop

    def begin(self) -> None:
        self._late_s = []
        self._loop.call_soon_threadsafe(self._again, self._late_s)

    def take_ms(self) -> float:
        """The 99th percentile since `begin()`."""
        late_s, self._late_s = self._late_s, []
        return 1e3 * statistics.quantiles(late_s, n=100)[_PERCENTILE - 1] if len(late_s) > 1 else math.nan

    def _again(self, late_s: list[float]) -> None:
        if late_s is self._late_s:
            due_s = self._loop.time() + _TICK_S
            self._loop.call_at(due_s, self._tick, late_s, due_s)

    def _tick(self, late_s: list[float], due_s: float) -> None:
        late_s.append(self._loop.time() - due_s)
        self._again(late_s)


@dataclass(frozen=True, slots=True)
class Stepper:
    """Steps of one engine over the same tokens."""

    engine: Engine
    batches: Sequence[Mapping[str, torch.Tensor]]
    schedule: MicroBatchSchedule
    clip: float

    def step(self) -> tuple[StepReport, bool]:
        """One step, and whether a right guess updated it inside backward: speculation neither rested nor redid it."""
        report = self.engine.train_step(self.batches, schedule=self.schedule.value)
        is_plain = report.grad_norm is not None and report.grad_norm < self.clip
        return report, is_plain and self.engine._parts.driver.is_speculating

    @property
    def speculates(self) -> bool:
        """Whether steps may be updated inside backward by speculation, asked for or not."""
        return self.engine._parts.driver.may_guess

    def warm_speculation(self) -> None:
        """Runs steps until a guess was right."""
        if not any(self.step()[1] for _ in range(_MOST_WARMING_STEPS)):
            raise RuntimeError(f"speculation rests: gradients of {_MOST_WARMING_STEPS} steps were clipped")


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Options: `train`, of `TrainOptions`; `steps` of a round that are timed."""
    train = TrainOptions(**options_of_object(options["train"], "bench step"))
    commits = Commits()
    with contextlib.ExitStack() as stack:
        for directory in train.nvme:
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
        prepare_heap()
        take_short_turns(train.device)
        parts = assemble(train)
        parts.batches.close()
        tokens = SameTokens(train.batch, parts.sequence, parts.configuration.vocab_size)
        own = replace(train, commit_every=_NEVER) if train.commit_every > 1 else train
        arguments = engine_arguments(own, parts, commits) | {"registered": {}}
        engine = stack.enter_context(Engine(**arguments))
        in_memory = engine.placement.updates_in_memory
        stack.enter_context(serve_steps(train.freed_memory, updates_in_memory=in_memory))
        facts = _facts(engine)
        trial = Trial(engine, tokens.next, train.device) if train.accumulate == 1 else None
        if trial is not None and is_recorded(train):
            facts["recorded"] = trial.record().step.to_json()
        on_device = tokens.next().to(train.device)
        batches = [{"input_ids": on_device, "labels": on_device}] * train.accumulate
        stepper = Stepper(engine, batches, train.micro_batches, train.clip)
        if stepper.speculates:
            stepper.warm_speculation()
        facts["schedule"] = stepper.step()[0].schedule
        yield facts, _rounds(stepper, train, options["steps"], commits, trial)


def is_recorded(train: TrainOptions) -> bool:
    """Whether its steps show how long the model computes: no update runs inside backward.

    If speculation was not asked for, those of `Trial.step` do: only whole steps (`train_step`) speculate by themselves.
    """
    return train.accumulate == 1 and train.update is not UpdateSchedule.SPECULATIVE


def _facts(engine: Engine) -> dict[str, Any]:
    placement = engine.placement
    usage = {(row.kind, row.tier): row.bytes for row in placement.usage()}
    in_memory, on_disk = (usage.get((Kind.WEIGHTS, tier), 0) for tier in (Tier.CPU, Tier.NVME))
    return {
        "versions": {"torch": torch.__version__},
        "parameters": sum(need.elements for need in placement.groups),
        "groups": len(placement.groups),
        "usage": {f"{kind.value} {tier.value}": nbytes for (kind, tier), nbytes in usage.items()},
        "weights_on_disk": on_disk / max(in_memory + on_disk, 1),
    }


def _rounds(stepper: Stepper, train: TrainOptions, steps: int, commits: Commits, trial: Trial | None) -> Round:
    engine = stepper.engine
    lag = LoopLag(engine)
    parameters = sum(need.elements for need in engine.placement.groups)

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        engine.flush()
        commits.ends_s.clear()
        lag.begin()
        starts_s, taken, before, spilled_before = [], [], engine.statistics(), _spilled_bytes(engine)
        for _ in range(steps + 2):
            starts_s.append(time.perf_counter())
            taken.append(stepper.step())
        starts_s.append(time.perf_counter())
        engine.flush()
        rested_s = time.perf_counter()
        step_s = _step_s(train, steps, starts_s, rested_s, commits.ends_s)
        # Of the whole round, at rest before and after: a report counts what moved during a step, not what it caused.
        after = engine.statistics()
        links = ("nvme_read", "nvme_write")
        moved = [(after["bytes"][link] - before["bytes"][link]) / (steps + 2) for link in links]
        figures = _figures(stepper, taken) | {"read_bytes": moved[0], "written_bytes": moved[1]}
        spilled = (_spilled_bytes(engine) - spilled_before) / (steps + 2)
        figures |= {"bytes_per_parameter": sum(moved) / parameters, "spilled_per_parameter": spilled / parameters}
        figures |= {"drained_s": (rested_s - starts_s[0]) / (steps + 2), "lag_p99_ms": lag.take_ms()}
        if trial is not None:
            if "computing_s" not in figures and is_recorded(train):
                free = trial.free_step()
                figures["computing_s"] = free.forward_s + free.backward_s
            whole = trial.whole_steps(_TRIAL_STEPS)
            figures |= {"trial_computing_s": whole.computing_s, "trial_step_s": whole.step_s}
        return step_s, {name: value for name, value in figures.items() if math.isfinite(value)}

    return run_round


def _spilled_bytes(engine: Engine) -> int:
    """Bytes of gradients, written to the disk and read again since the engine was made."""
    return sum(pack.moved_bytes for pack in engine._parts.store.files.packs[2:])


def _step_s(
    train: TrainOptions, steps: int, starts_s: Sequence[float], rested_s: float, ends_s: Sequence[float]
) -> float:
    """See [Note: a step's time]."""
    loops_s = (starts_s[steps + 1] - starts_s[1]) / steps
    if not train.commits:
        return loops_s
    if train.commit_every > 1:
        return loops_s + (rested_s - starts_s[-1]) / train.commit_every
    if len(ends_s) != steps + 2:
        raise RuntimeError(f"{steps + 2} steps made {len(ends_s)} commits")
    return (ends_s[steps] - ends_s[0]) / steps


def _figures(stepper: Stepper, taken: Sequence[tuple[StepReport, bool]]) -> dict[str, float]:
    """Of the timed steps; `computing_s` of the round's first one, with no update beside it, except in its backward."""
    timed, (first, _) = taken[1:-1], taken[0]
    phases = ("forward", "backward", "wait")
    figures = {f"{name}_s": statistics.fmean(one.seconds[name] for one, _ in timed) for name in phases}
    figures["depth"] = float(timed[-1][0].prefetch_depth)
    if stepper.speculates:
        return figures | {"speculated": float(sum(was_right for _, was_right in timed))}
    return figures | {"computing_s": first.seconds["forward"] + first.seconds["backward"] - first.seconds["wait"]}
