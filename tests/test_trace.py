"""Traces are what was recorded, whatever thread recorded it, and valid Chrome JSON."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tierstore.errors import StorageError
from tierstore.trace import Sample, Span, Tracer


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def written(tracer: Tracer, tmp_path: Path) -> list[dict[str, Any]]:
    tracer.to_chrome(tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert list(tracer.chrome_events()) == document["traceEvents"]
    return list(document["traceEvents"])


def test_a_span_and_a_counter_in_the_file(clock: Clock, tmp_path: Path) -> None:
    tracer = Tracer(clock)
    tracer.span("nvme read", "h.0", 100.5, 100.75, bytes=4096)
    clock.now = 101.0
    tracer.counter("cpu", "used_bytes", 7)
    assert written(tracer, tmp_path) == [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "nvme read"}},
        {"ph": "X", "name": "h.0", "cat": "nvme read", "pid": 1, "tid": 1, "ts": 0.0, "dur": 250_000.0,
         "args": {"bytes": 4096}},
        {"ph": "C", "name": "cpu: used_bytes", "pid": 1, "ts": 500_000.0, "args": {"used_bytes": 7}},
    ]  # fmt: skip


def test_one_named_row_per_track(clock: Clock, tmp_path: Path) -> None:
    tracer = Tracer(clock)
    for index, track in enumerate(["h2d", "nvme read", "h2d", "nvme write"]):
        tracer.span(track, "x", index, index + 1)
    events = written(tracer, tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["h2d", "nvme read", "nvme write"]
    assert [names[event["tid"]] for event in events if event["ph"] == "X"] == ["h2d", "nvme read", "h2d", "nvme write"]


def test_overlapping_spans_get_rows_of_their_own_and_nested_ones_do_not(clock: Clock, tmp_path: Path) -> None:
    tracer = Tracer(clock)
    tracer.span("disk", "late", 2, 5)
    tracer.span("disk", "whole", 0, 4)
    tracer.span("disk", "nested", 1, 2)
    tracer.span("disk", "next", 4, 6)
    events = written(tracer, tmp_path)
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    rows = {event["name"]: names[event["tid"]] for event in events if event["ph"] == "X"}
    assert rows == {"whole": "disk", "nested": "disk", "late": "disk #2", "next": "disk"}


def test_measure_records_also_a_failure(clock: Clock) -> None:
    tracer = Tracer(clock)

    def fail() -> None:
        clock.now = 103.0
        raise KeyError

    with pytest.raises(KeyError), tracer.measure("compute", "forward", step=1):
        fail()
    assert tracer.spans == [Span("compute", "forward", 100.0, 103.0, {"step": 1})]


def test_disabled_records_nothing_and_does_not_read_the_clock(tmp_path: Path) -> None:
    def no_clock() -> float:
        raise AssertionError("read")

    tracer = Tracer(no_clock, enabled=False)
    tracer.span("a", "b", 0, 1)
    tracer.counter("a", "b", 1)
    with tracer.measure("a", "b"):
        pass
    assert (tracer.spans, tracer.samples, written(tracer, tmp_path)) == ([], [], [])


def test_threads_lose_nothing(clock: Clock) -> None:
    tracer = Tracer(clock)

    def record(track: int) -> None:
        for index in range(500):
            tracer.span(str(track), str(index), index, index + 1)
            tracer.counter(str(track), "n", index)

    threads = [threading.Thread(target=record, args=(track,)) for track in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tracer.spans) == len(tracer.samples) == 2000
    for track in "0123":
        assert [span.name for span in tracer.spans if span.track == track] == [str(i) for i in range(500)]


def test_memory_is_bounded_and_the_file_says_so(clock: Clock, tmp_path: Path) -> None:
    tracer = Tracer(clock, max_events=2)
    for index in range(5):
        tracer.counter("t", "n", index)
    assert tracer.samples == [Sample("t", "n", 100.0, 0), Sample("t", "n", 100.0, 1)]
    tracer.to_chrome(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["otherData"] == {"dropped_events": 3}


def test_any_argument_is_valid_json(clock: Clock, tmp_path: Path) -> None:
    tracer = Tracer(clock)
    tracer.span("t", 'quo"te', 0, 1, path=tmp_path, rate=math.inf, ok=True, none=None)
    tracer.counter("t", "n", math.nan)
    events = written(tracer, tmp_path)
    assert events[1]["args"] == {"path": str(tmp_path), "rate": "inf", "ok": True, "none": None}
    assert events[2]["args"] == {"n": "nan"}


def test_a_path_that_cannot_be_written_is_a_storage_error(clock: Clock, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write the trace .*absent"):
        Tracer(clock).to_chrome(tmp_path / "absent" / "trace.json")


def test_a_profiler_sees_what_is_measured_also_when_tracing_is_off(clock: Clock) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def annotate(name: str) -> Iterator[None]:
        seen.append(f"begin {name}")
        yield
        seen.append(f"end {name}")

    tracer = Tracer(clock, enabled=False)
    tracer.annotate = annotate
    with tracer.measure("update", "h.0"):
        seen.append("work")
    assert seen == ["begin tierstore.update h.0", "work", "end tierstore.update h.0"]
    assert tracer.spans == []
