"""Records of what ran when: spans and counters, and their Chrome trace.

Scope: recording from any thread, and a JSON file for https://ui.perfetto.dev or chrome://tracing.
Not here: deciding what is worth a span (callers); totals of bytes and seconds (`io/`, `train/`).
Owner: the code that makes the tracer; recording threads share it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tierstore.errors import StorageError
from tierstore.whole_file import whole_file

_PROCESS = 1


@dataclass(frozen=True, slots=True)
class Span:
    """Work on one link, tier or thread that ran from `start` to `end`, in seconds of the tracer's clock."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of a counter from `time` on, in seconds of the tracer's clock."""

    track: str
    name: str
    time: float
    value: float


class Tracer:
    """Spans and counters of one run.

    Args:
        clock: monotonic seconds: `time.perf_counter`, or a test's own clock.
        enabled: False makes every call return at once.
        max_events: later events are counted in `dropped` and not kept, so that a long run cannot fill the memory.

    Threads: any may call `span`, `counter` and `measure`; `list.append` is atomic, so there is no lock.
    """

    def __init__(self, clock: Callable[[], float], *, enabled: bool = True, max_events: int = 1_000_000) -> None:
        self.clock = clock
        self.enabled = enabled
        self.dropped = 0
        self.annotate: Callable[[str], contextlib.AbstractContextManager[None]] | None = None
        """Shows measured blocks in a profiler too (NVTX), even if tracing is not enabled."""
        self._max_events = max_events
        self._events: list[Span | Sample] = []

    def span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """Record that `name` ran on `track`; `start` and `end` are readings of `clock`."""
        if self.enabled:
            self._keep(Span(track, name, start, end, args))

    def counter(self, track: str, name: str, value: float) -> None:
        """Record that the counter `name` has `value` from now on."""
        if self.enabled:
            self._keep(Sample(track, name, self.clock(), value))

    def measure(self, track: str, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """A span around a `with` block; it is recorded even if the block raises."""
        if self.enabled or self.annotate is not None:
            return self._measured(track, name, args)
        return contextlib.nullcontext()

    @property
    def spans(self) -> list[Span]:
        """The spans so far, in the order in which they were recorded."""
        return [event for event in list(self._events) if isinstance(event, Span)]

    @property
    def samples(self) -> list[Sample]:
        """The counter values so far, in the order in which they were recorded."""
        return [event for event in list(self._events) if isinstance(event, Sample)]

    def chrome_events(self) -> Iterator[dict[str, Any]]:
        """The events of the Chrome trace format, in time order; times are microseconds after the first event.

        Spans of one track that overlap without nesting (two reads in flight on one disk) go into further rows, named
        `nvme read #2` and so on, because the format draws a row as a stack.
        """
        spans, samples = self.spans, self.samples
        spans.sort(key=lambda span: (span.start, -span.end))
        samples.sort(key=lambda sample: sample.time)
        origin = min([item.start for item in spans[:1]] + [item.time for item in samples[:1]], default=0.0)
        rows: dict[str, int] = {}
        lanes: dict[str, list[list[float]]] = {}
        for span in spans:
            lane = _lane(lanes.setdefault(span.track, []), span)
            label = span.track if lane == 0 else f"{span.track} #{lane + 1}"
            if label not in rows:
                rows[label] = len(rows) + 1
                yield {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": rows[label], "args": {"name": label}}
            yield {
                "ph": "X", "name": span.name, "cat": span.track, "pid": _PROCESS, "tid": rows[label],
                "ts": _microseconds(span.start - origin), "dur": _microseconds(span.end - span.start),
                "args": {key: _plain(value) for key, value in span.args.items()},
            }  # fmt: skip
        for sample in samples:
            yield {
                "ph": "C", "name": f"{sample.track}: {sample.name}", "pid": _PROCESS,
                "ts": _microseconds(sample.time - origin), "args": {sample.name: _plain(sample.value)},
            }  # fmt: skip

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, event by event, without a second copy of it in memory.

        On a failure an existing file stays as it was.

        Raises:
            StorageError: the file cannot be written.
        """
        try:
            with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8") as file:
                file.write('{"displayTimeUnit":"ms","traceEvents":[')
                for index, event in enumerate(self.chrome_events()):
                    file.write(",\n" if index else "\n")
                    file.write(json.dumps(event, allow_nan=False, separators=(",", ":")))
                file.write(f'\n],"otherData":{{"dropped_events":{self.dropped}}}}}\n')
        except OSError as error:
            raise StorageError(f"cannot write the trace {os.fspath(path)}: {error.strerror or error}") from error

    def _keep(self, event: Span | Sample) -> None:
        if len(self._events) < self._max_events:
            self._events.append(event)
        else:
            self.dropped += 1

    @contextlib.contextmanager
    def _measured(self, track: str, name: str, args: dict[str, Any]) -> Iterator[None]:
        start = self.clock()
        try:
            with self.annotate(f"tierstore.{track} {name}") if self.annotate else contextlib.nullcontext():
                yield
        finally:
            self.span(track, name, start, self.clock(), **args)


def _lane(lanes: list[list[float]], span: Span) -> int:
    """The first row where `span` begins after, or nests in, the open spans; a row is the stack of their ends."""
    for index, ends in enumerate(lanes):
        while ends and ends[-1] <= span.start:
            ends.pop()
        if not ends or span.end <= ends[-1]:
            ends.append(span.end)
            return index
    lanes.append([span.end])
    return len(lanes) - 1


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
