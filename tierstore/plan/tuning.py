"""Which schedule and prefetch depth a step should have, and what bounds it then.

Scope: forecasts of all candidates, the choice among them, and the reason in words.
Not here: the forecast (`plan/step_model.py`), measuring (`apps/tune.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tierstore.config import UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.plan.placement import Placement
from tierstore.plan.step_machine import Machine
from tierstore.plan.step_model import StepForecast, StepPolicy, forecast
from tierstore.plan.step_record import StepRecord

DEPTHS = range(9)
WORTH_IT = 0.05  # share of a step that another candidate or depth must gain: less may be an error of the model
_HIDDEN = 0.05  # waiting for up to this share of a step counts as hidden
_TOLD = 0.01  # share of a step from which it is said how much computing is slowed
_BUSY = 0.8  # share of a step in which the disks work, if they bound it
_GAIN = 0.8  # and the share of the step that is left, at most, with disks twice as fast
_BATCHES = (1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
USUAL_DEPTH = 2  # depth at which candidates are compared; depths differ far less than candidates
_MOST_CONTENTION = 16.0
_MOST_DRAG = 4.0  # more would be another disk than the measured one
_TURNS = 5
_HALVINGS = 7


class Regime(enum.Enum):
    """What bounds a step."""

    COMPUTE_BOUND = "compute-bound"
    BANDWIDTH_BOUND = "bandwidth-bound"
    IN_TURNS = "in turns"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the step."""

    schedule: UpdateSchedule
    placement: Placement


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, its forecasts by depth, and the depth to take: the smallest that is about as good as the best.

    Depth 0 is taken only if no other is about as good: the model does not count that a load crosses to the loop and
    back while compute waits.
    """

    candidate: Candidate
    forecasts: tuple[StepForecast, ...]
    depth: int

    @property
    def best(self) -> StepForecast:
        return self.forecasts[self.depth]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The choice, the other candidates from the fastest on (all at one depth), and the reason.

    Attributes:
        two_disks: the same step with disks twice as fast.
        batch_factor: how many times the computing would hide the transfers; None if none of those tried would.
    """

    choice: Choice
    others: tuple[tuple[Candidate, StepForecast], ...]
    regime: Regime
    two_disks: StepForecast
    batch_factor: float | None
    reason: str


def calibrated(
    record: StepRecord, placement: Placement, machine: Machine, policy: StepPolicy, computing_s: float, step_s: float
) -> StepRecord:
    """The record with the contention and the drag at which the forecast matches steps that ran beside their update.

    If those steps computed faster than the record, which was taken at another moment, its computing is scaled to
    theirs.

    Slow-downs are measured in pairs, for matrix products beside Adam, copies and the disk; a model's own kernels, with
    the norms and the Python between them, are slowed more or less than that. Contention is the number for this
    difference; drag is the number for what all of that together takes from the I/O threads.

    Args:
        placement, policy: those with which the steps ran.
        computing_s: both passes of such a step, without waiting for weights.
        step_s: from the start of such a step to that of the next.

    Returns:
        The record. It keeps its contention if next to nothing ran beside those steps, and its drag if no disk bounded
        them, or if they wrote no commit where commits are rare.
    """

    def seen_at(one: StepRecord) -> StepForecast:
        return forecast(one, placement, machine, policy)

    def contended(contention: float) -> float:
        return seen_at(replace(record, contention=contention)).computing_s

    def dragged(drag: float) -> float:
        return seen_at(replace(record, drag=drag)).seconds

    if computing_s < (alone_s := contended(0.0)):  # beside an update nothing takes less than alone
        record = record.scaled(computing_s / alone_s)
    is_slowed = contended(_MOST_CONTENTION) >= (1 + WORTH_IT) * contended(0.0)
    is_bounded = dragged(1 / _MOST_DRAG) < step_s < dragged(_MOST_DRAG)
    for turn in range(_TURNS):  # each of the two changes the value found for the other; the whole step counts most
        if turn % 2 == 0 and is_bounded:
            record = replace(record, drag=_where(dragged, step_s, 1 / _MOST_DRAG, _MOST_DRAG))
        if turn % 2 == 1 and is_slowed:
            record = replace(record, contention=_where(contended, computing_s, 0.0, _MOST_CONTENTION))
    return record


def _where(grows: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """The argument from `low` to `high` at which a function was seen closest to `wanted`; looked for near 1 first.

    The function grows, but for jumps either way: a few speculative steps are up to a tenth longer than others.
    """
    seen: dict[float, float] = {}

    def is_below(argument: float) -> bool:
        seen[argument] = grows(argument)
        return seen[argument] < wanted

    middle = 1.0
    while middle < high and is_below(middle):
        low, middle = middle, 2 * middle
    high = min(middle, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return min(seen, key=lambda argument: abs(seen[argument] - wanted))


def tune(
    record: StepRecord,
    candidates: Sequence[Candidate],
    machine: Machine,
    *,
    commit_every: int = 1,
    commits: bool = True,
    taken: tuple[Candidate, int] | None = None,
) -> Tuning:
    """The fastest candidate on paper; the first one, unless another is faster by more than 5 %.

    Args:
        taken: a candidate and its depth that were chosen before; only the forecasts of it and of the others are new.

    Raises:
        ConfigError: no candidate.
    """
    if not candidates:
        raise ConfigError("there is nothing to choose from: no update schedule is possible with these options")

    def run(candidate: Candidate, depth: int, recorded: StepRecord = record, on: Machine = machine) -> StepForecast:
        policy = StepPolicy(depth, candidate.schedule, commit_every, commits)
        return forecast(recorded, candidate.placement, on, policy)

    ranked = sorted(((one, run(one, USUAL_DEPTH)) for one in candidates), key=lambda item: item[1].seconds)
    if taken is None:
        first_s = next(step.seconds for one, step in ranked if one is candidates[0])
        candidate = ranked[0][0] if ranked[0][1].seconds < (1 - WORTH_IT) * first_s else candidates[0]
    else:
        candidate = taken[0]
    others = [item for item in ranked if item[0].schedule is not candidate.schedule]
    forecasts = tuple(run(candidate, depth) for depth in DEPTHS)
    chosen = Choice(candidate, forecasts, _best_depth(forecasts) if taken is None else taken[1])
    depth = chosen.depth
    two_disks = run(candidate, depth, on=replace(machine, table=machine.table.scaled(disk=2)))
    batch_factor = next((f for f in _BATCHES if _hides(run(candidate, depth, record.scaled(f)))), None)
    regime = _regime(chosen.best, two_disks)
    reason = _reason(record, chosen.best, regime, two_disks, batch_factor)
    return Tuning(chosen, tuple(others), regime, two_disks, batch_factor, reason)


def _best_depth(forecasts: Sequence[StepForecast]) -> int:
    limit_s = (1 + WORTH_IT) * min(one.seconds for one in forecasts)
    depth: int = next(depth for depth in (*DEPTHS[1:], 0) if forecasts[depth].seconds <= limit_s)
    return depth


def _hides(step: StepForecast) -> bool:
    return step.waiting_s <= _HIDDEN * step.seconds


def _regime(step: StepForecast, two_disks: StepForecast) -> Regime:
    if _hides(step):
        return Regime.COMPUTE_BOUND
    is_busy, is_bound = step.disk_s >= _BUSY * step.seconds, two_disks.seconds <= _GAIN * step.seconds
    return Regime.BANDWIDTH_BOUND if is_busy and is_bound else Regime.IN_TURNS


def _reason(
    record: StepRecord, step: StepForecast, regime: Regime, two_disks: StepForecast, batch_factor: float | None
) -> str:
    is_slowed = step.slowed_s > _TOLD * step.seconds
    slowed = f" ({step.slowed_s:.2f} s of that for what goes on beside it)" if is_slowed else ""
    computing_s = record.compute_s + step.slowed_s
    times = (
        f"of {step.seconds:.2f} s a step, {computing_s:.2f} s are computing{slowed}, the disks work {step.disk_s:.2f} s"
    )
    gain = f"a second SSD would make it {two_disks.seconds:.2f} s"
    if regime is Regime.COMPUTE_BOUND:
        is_help = two_disks.seconds < (1 - _HIDDEN) * step.seconds  # faster disks slow the computing for less time
        end = f"deeper prefetch gains nothing; {gain}" if is_help else "faster disks or deeper prefetch gain nothing"
        return f"compute-bound: {times}, and what they do is hidden; {end}"
    if regime is Regime.BANDWIDTH_BOUND:
        text = f"bandwidth-bound: {times}: no depth hides it"
    else:
        text = (
            f"in turns: {times}, and computing waits {step.waiting_s:.2f} s for what is not hidden: what an update "
            "reads, writes and computes after the gradients that it needs comes before the next layers"
        )
    if batch_factor is None:
        return f"{text}; {gain}; no batch up to {_BATCHES[-1]} times as large hides it"
    return f"{text}; {gain}; {batch_factor:g} times the batch would hide it"
