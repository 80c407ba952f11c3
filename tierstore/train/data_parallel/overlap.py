"""How much of the communication hides behind backward, measured per step and bucket.

Scope: recording steps of a `GradientReducer`, steps of a torch profiler trace, medians, what they say.
Not here: reading a trace (`overlap_trace.py`), drawing (`overlap_views.py`), the diagnosis (`plan/diagnosis.py`).
Owner: the thread that runs the steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError
from tierstore.plan.buckets import BucketEvent, Gradient, Timeline
from tierstore.plan.cost_model import CostModel, Timing, fit_timings
from tierstore.plan.diagnosis import Diagnosis, MeasuredStep, Pause, PauseKind, diagnose, report_lines
from tierstore.trace import Tracer

if TYPE_CHECKING:
    from tierstore.train.data_parallel.buckets import StepRecord
    from tierstore.train.data_parallel.reducer import GradientReducer


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
        """All of the step."""
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


class OverlapProfiler:
    """Records steps of a reducer.

    ```
    profiler = OverlapProfiler(reducer)  # a reducer made with timed=True
    for batch in loader:
        with profiler.step():
            reducer.backward(loss_of(reducer(batch)))
            optimizer.step()
    print(profiler.report(fit_cost_model().model))
    ```

    Times are those of the host. On CUDA a gradient counts as ready when the host has queued it, which is earlier than
    on the device: profile such steps with `torch.profiler`, and read its trace by `from_trace`.

    Args:
        reducer: None records nothing (`from_trace` fills the steps).
        skip: steps at the start that do not count: the reducer rebuilds its buckets after the first one.
        clock: that of the reducer, seconds.
    """

    def __init__(
        self,
        reducer: GradientReducer | None = None,
        *,
        skip: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps: list[ProfiledStep] = []
        self._reducer = reducer
        self._skip = skip
        self._clock = clock
        self._ready_s: dict[str, float] = {}
        self._pauses: list[Pause] = []
        self._sizes: dict[str, int] = {}
        self._handles: list[Any] = []
        for name, parameter in () if reducer is None else reducer.module.named_parameters():
            if parameter.requires_grad:
                self._sizes[name] = parameter.nbytes
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    @classmethod
    def from_trace(cls, path: str | os.PathLike[str]) -> OverlapProfiler:
        """The steps of a Chrome trace that `torch.profiler` wrote of DDP or FSDP (`.json` or `.json.gz`).

        With `record_shapes=True` the sizes of gradients are known, else only those of buckets. A step is one
        `ProfilerStep`, or ends with `Optimizer.step`, or is all of the trace.

        Raises:
            FormatError: not such a trace.
            ConfigError: it has no step with a reduction of gradients.
        """
        from tierstore.train.data_parallel.overlap_trace import read_steps

        profiler = cls(skip=0)
        profiler.steps = read_steps(path)
        return profiler

    # --- recording ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step: forward, backward with its reduction, optimizer. One that raises is not recorded.

        Raises:
            ConfigError: nothing was reduced in it, or the ends of its collectives are not known.
        """
        if self._reducer is None:
            raise ConfigError("this profiler was made from a trace: make one with a reducer to record steps")
        before = self._reducer.last_step()
        self._ready_s, self._pauses = {}, []
        begun_s = self._clock()
        yield
        ended_s = self._clock()
        record = self._reducer.last_step()
        if record is None or (before is not None and record.began_s == before.began_s):
            raise ConfigError("no gradient was reduced in this step: call backward inside of profiler.step()")
        if any(bucket.done_s != bucket.done_s for bucket in record.buckets):
            raise ConfigError("the reducer does not know when its collectives end: make it with timed=True")
        if self._skip:
            self._skip -= 1
            return
        self.steps.append(self._profiled(record, begun_s, ended_s))

    @contextlib.contextmanager
    def paused(self, kind: PauseKind) -> Iterator[None]:
        """Marks time of a step in which nothing is computed, for the diagnosis."""
        begun_s = self._clock()
        try:
            yield
        finally:
            self._pauses.append(Pause(kind, begun_s, self._clock()))

    def close(self) -> None:
        """Takes the hooks off the parameters. Twice is fine; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> OverlapProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hook(self, name: str) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            self._ready_s[name] = self._clock()

        return hook

    def _profiled(self, record: StepRecord, begun_s: float, ended_s: float) -> ProfiledStep:
        gradients: list[Gradient] = []
        buckets: list[tuple[int, ...]] = []
        for bucket in record.buckets:
            first = len(gradients)
            for name in bucket.parameters:  # one that was not used has no time of its own
                ready_s = self._ready_s.get(name, bucket.ready_s)
                gradients.append(Gradient(self._sizes[name], max(0.0, ready_s - begun_s)))
            buckets.append(tuple(range(first, len(gradients))))
        events = tuple(
            BucketEvent(one.index, one.nbytes, one.ready_s - begun_s, one.launched_s - begun_s, one.done_s - begun_s)
            for one in record.buckets
        )
        compute_s = max([record.last_gradient_s - begun_s, *(gradient.ready_s for gradient in gradients)])
        pauses = tuple(Pause(one.kind, one.start_s - begun_s, one.end_s - begun_s) for one in self._pauses)
        measured = MeasuredStep(
            ended_s - begun_s, Timeline(compute_s, events), tuple(gradients), tuple(buckets), pauses
        )
        return ProfiledStep(begun_s, measured, tuple(bucket.parameters for bucket in record.buckets))

    # --- what was seen ------------------------------------------------------------------------------------------

    def typical(self) -> ProfiledStep:
        """The step of median length: a real one, whose times belong together.

        Raises:
            ConfigError: there is none.
        """
        if not self.steps:
            raise ConfigError("no step was recorded after those that are skipped")
        return sorted(self.steps, key=lambda step: step.seconds)[(len(self.steps) - 1) // 2]

    def summary(self) -> Summary:
        """Medians over all steps whose buckets are those of the typical one."""
        shape = [event.nbytes for event in self.typical().timeline.events]
        alike = [step for step in self.steps if [event.nbytes for event in step.timeline.events] == shape]
        runs = [step.timeline for step in alike]
        return Summary(
            steps=len(alike),
            seconds=median(step.seconds for step in alike),
            compute_s=median(run.compute_s for run in runs),
            communication_s=median(run.communication_s for run in runs),
            exposed_s=median(run.exposed_s for run in runs),
            hidden_share=median(run.hidden_share for run in runs),
            rest_s=median(step.seconds - step.timeline.seconds for step in alike),
            buckets=tuple(_row(index, runs) for index in range(len(shape))),
        )

    def interconnect(self) -> CostModel:
        """Alpha and beta as the buckets themselves show them: under load, and only of their sizes.

        `fit_cost_model` measures them apart, and over more sizes.
        """
        rows = [row for row in self.summary().buckets if row.nbytes > 0 and row.communication_s > 0]
        if len({row.nbytes for row in rows}) > 1:
            return fit_timings([Timing(row.nbytes, row.communication_s) for row in rows]).model
        seconds = sum(row.communication_s for row in rows)
        return CostModel(0.0, sum(row.nbytes for row in rows) / seconds if seconds > 0 else float("inf"))

    def diagnose(self, model: CostModel | None = None) -> tuple[Diagnosis, ...]:
        """What keeps the typical step from being shorter.

        Args:
            model: that of `fit_cost_model`; None is `interconnect()`.
        """
        return diagnose(self.typical().measured, model or self.interconnect())

    def report(self, model: CostModel | None = None) -> str:
        """Table of buckets, timeline of the typical step, and diagnosis, as text."""
        from tierstore.train.data_parallel.overlap_views import table_lines, timeline_lines

        step = self.typical()
        parts = [table_lines(self.summary()), timeline_lines(step), report_lines(step.measured, self.diagnose(model))]
        return "\n\n".join("\n".join(lines) for lines in parts)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """The timeline of the typical step as a PNG file.

        Raises:
            ConfigError: matplotlib is not installed.
            StorageError: the file cannot be written.
        """
        from tierstore.train.data_parallel.overlap_views import draw_timeline

        draw_timeline(self.typical(), path)

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """All steps as a Chrome trace: a track for the compute, one for collectives, one for pauses."""
        tracer = Tracer(self._clock)
        for number, step in enumerate(self.steps):
            _trace(tracer, number, step)
        tracer.to_chrome(path)


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
    """Time of one collective after `from_s`, without that in which it waited for those before it."""
    event = run.events[index]
    free_s = max([from_s, *(earlier.end_s for earlier in run.events[:index])])
    return max(0.0, event.end_s - max(event.start_s, free_s))


def _trace(tracer: Tracer, number: int, step: ProfiledStep) -> None:
    start_s, run = step.start_s, step.timeline
    tracer.span("step", f"step {number}", start_s, start_s + step.seconds, hidden_share=run.hidden_share)
    tracer.span("compute", "forward and backward", start_s, start_s + run.compute_s)
    for event in run.events:
        tracer.span(
            "collectives", f"bucket {event.index}", start_s + event.start_s, start_s + event.end_s,
            bytes=event.nbytes, waited_s=event.start_s - event.ready_s, exposed_s=event.exposed_s(run.compute_s),
        )  # fmt: skip
    for event in step.gathers:
        tracer.span("gathers", f"gather {event.index}", start_s + event.start_s, start_s + event.end_s,
                    bytes=event.nbytes)  # fmt: skip
    for pause in step.measured.pauses:
        tracer.span("pauses", pause.kind.value, start_s + pause.start_s, start_s + pause.end_s)
