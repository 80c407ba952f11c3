"""How much of the communication hides behind backward, measured per step and bucket.

Scope: the public face, and recording steps of a `GradientReducer`.
Not here: steps and medians (`overlap_steps.py`), reading a trace (`overlap_trace.py`), drawing (`overlap_views.py`),
the diagnosis (`plan/diagnosis.py`).
Owner: the thread that runs the steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError
from tierstore.plan.buckets import BucketEvent, Gradient, Timeline
from tierstore.plan.cost_model import CostModel, Timing, fit_timings
from tierstore.plan.diagnosis import Diagnosis, MeasuredStep, Pause, PauseKind, diagnose, report_lines
from tierstore.trace import Tracer
from tierstore.train.data_parallel.overlap_steps import ProfiledStep, Summary
from tierstore.train.data_parallel.overlap_trace import read_steps
from tierstore.train.data_parallel.overlap_views import draw_timeline, table_lines, timeline_lines

if TYPE_CHECKING:
    from tierstore.train.data_parallel.buckets import StepRecord
    from tierstore.train.data_parallel.reducer import GradientReducer


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
        if reducer is not None and not hasattr(reducer, "last_step"):
            raise ConfigError(f"OverlapProfiler takes a GradientReducer, not a {type(reducer).__name__}")
        if reducer is not None and reducer.is_delayed:
            raise ConfigError("with delayed=True a step sees no end of its own collectives: profile without delayed")
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
        if self._skip > 0:
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
        return Summary.of([step for step in self.steps if [event.nbytes for event in step.timeline.events] == shape])

    def interconnect(self) -> CostModel:
        """Alpha and beta as the buckets themselves show them: under load, and only for their sizes.

        `fit_cost_model` measures them without load, and over more sizes.
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
        step = self.typical()
        parts = [table_lines(self.summary()), timeline_lines(step), report_lines(step.measured, self.diagnose(model))]
        return "\n\n".join("\n".join(lines) for lines in parts)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """The timeline of the typical step as a `.png` or `.svg` file.

        Raises:
            ConfigError: it has another ending, or matplotlib is not installed.
            StorageError: the file cannot be written.
        """
        draw_timeline(self.typical(), path)

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """All steps as a Chrome trace: a track for the compute, one for collectives, one for pauses."""
        tracer = Tracer(self._clock)
        for number, step in enumerate(self.steps):
            _trace(tracer, number, step)
        tracer.to_chrome(path)


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
