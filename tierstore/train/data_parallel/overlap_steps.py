"""Steps that were profiled, and medians over them.

Scope: plain data. Not here: recording steps (`overlap.py`), reading them from a trace (`overlap_trace.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tierstore.plan.buckets import BucketEvent, Timeline
from tierstore.plan.diagnosis import MeasuredStep


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """One step; times in `measured` are seconds from its start.

    Attributes:
        start_s: on the clock of the recording.
        names: of the parameters in each bucket, as far as they are known.
        gathers: collectives that fetch parameters (FSDP); they are shown, and not judged.
    """

    start_s: float
    measured: MeasuredStep
    names: tuple[tuple[str, ...], ...] = ()
    gathers: tuple[BucketEvent, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the whole step."""
        return self.measured.seconds

    @property
    def timeline(self) -> Timeline:
        """The end of backward, and the buckets."""
        return self.measured.timeline


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket, medians over steps; times in seconds from the start of a step."""

    index: int
    nbytes: int
    ready_s: float
    start_s: float
    end_s: float
    communication_s: float
    exposed_s: float

    @property
    def hidden_share(self) -> float:
        """Share of its communication that costs nothing."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over steps. `rest_s` is what follows the last bucket: the optimizer."""

    steps: int
    seconds: float
    compute_s: float
    communication_s: float
    exposed_s: float
    hidden_share: float
    rest_s: float
    buckets: tuple[BucketRow, ...]

    @classmethod
    def of(cls, steps: Sequence[ProfiledStep]) -> Summary:
        """The summary of steps with the same buckets, at least one."""
        runs = [step.timeline for step in steps]
        return cls(
            steps=len(steps),
            seconds=median(step.seconds for step in steps),
            compute_s=median(run.compute_s for run in runs),
            communication_s=median(run.communication_s for run in runs),
            exposed_s=median(run.exposed_s for run in runs),
            hidden_share=median(run.hidden_share for run in runs),
            rest_s=median(step.seconds - step.timeline.seconds for step in steps),
            buckets=tuple(_row(index, runs) for index in range(len(runs[0].events))),
        )


def _row(index: int, runs: Sequence[Timeline]) -> BucketRow:
    events = [run.events[index] for run in runs]
    return BucketRow(
        index=index,
        nbytes=events[0].nbytes,
        ready_s=median(event.ready_s for event in events),
        start_s=median(event.start_s for event in events),
        end_s=median(event.end_s for event in events),
        communication_s=median(_own_s(run, index) for run in runs),
        exposed_s=median(_own_s(run, index, run.compute_s) for run in runs),
    )


def _own_s(run: Timeline, index: int, from_s: float = 0.0) -> float:
    """Time of one collective after `from_s`, without the time in which it waited for those before it."""
    event = run.events[index]
    free_s = max([from_s, *(earlier.end_s for earlier in run.events[:index])])
    return max(0.0, event.end_s - max(event.start_s, free_s))
