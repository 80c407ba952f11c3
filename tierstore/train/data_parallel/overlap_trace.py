"""Steps of a torch profiler trace (Chrome JSON) of DDP or FSDP.

Scope: which events are steps, gradients, collectives, launches and pauses, on CPUs (gloo) and on CUDA (NCCL).
Not here: what follows from them (`overlap.py`, `plan/diagnosis.py`).
Owner: nothing is kept between calls.

[Note: what a trace shows]
* A gradient: the operator `torch::autograd::AccumulateGrad`, with its size where shapes were recorded. On CUDA it is
  ready when the kernels that were launched before its end have run.
* A collective: the annotation `gloo:all_reduce` of a worker thread; on CUDA the kernel `nccl...`. Its launch is the
  operator `c10d::allreduce_`, in the same order.
* The end of backward: the last gradient; on CUDA the last kernel launched up to it.
* Hooks of a gradient: what `evaluate_function: torch::autograd::AccumulateGrad` takes after the operator itself.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any

from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.plan.buckets import BucketEvent, Gradient, Timeline
from tierstore.plan.diagnosis import MeasuredStep, Pause, PauseKind
from tierstore.train.data_parallel.overlap_steps import ProfiledStep

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_HOOKED = f"autograd::engine::evaluate_function: {_ACCUMULATE}"
_SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc|xccl):(\w+)")
_NCCL = re.compile(r"nccl\w*?(AllReduce|ReduceScatter|AllGather)", re.IGNORECASE)
_LAUNCH = re.compile(r"c10d::_?(allreduce|reduce_scatter|allgather)")
_REDUCING = ("allreduce", "reducescatter")
_GATHERING = ("allgather",)
_LISTS = ("Input Dims", "Input type")  # of what events hold; all else that is used here is numbers and text
_THREADS = 4  # gloo threads that may overtake each other; its default is 2
_MOST = 2**60  # microseconds, elements
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "c10d::barrier")
_SIZES = {"float": 4, "float32": 4, "double": 8, "float64": 8, "half": 2, "float16": 2, "bfloat16": 2,
          "c10::half": 2, "c10::bfloat16": 2}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Event:
    """A complete event, in seconds of the trace."""

    name: str
    category: str
    start_s: float
    end_s: float
    thread: Any
    args: dict[str, Any]

    @property
    def nbytes(self) -> int | None:
        """Bytes of its first tensor; None if they are not known, or it holds no floating-point numbers."""
        elements, dtype = self.args.get("In msg nelems"), str(self.args.get("dtype", "")).lower()
        if elements is None:
            shape, dtype = _first(self.args.get("Input Dims")), str(_first(self.args.get("Input type"))).lower()
            if not isinstance(shape, list) or any(not isinstance(one, int) for one in shape):
                return None
            elements = math.prod(shape)
        size = _SIZES.get(dtype)
        return None if size is None or not isinstance(elements, int) or not 0 <= elements < _MOST else elements * size

    @property
    def is_reduction_of_floats(self) -> bool:
        """False for the maps of used parameters, which are integers."""
        dtype = str(self.args.get("dtype", _first(self.args.get("Input type")) or "float")).lower()
        return dtype in _SIZES or not dtype


def read_steps(path: str | os.PathLike[str]) -> list[ProfiledStep]:
    """All steps of a trace in which gradients were reduced.

    Raises:
        FormatError: not a trace. StorageError: it cannot be read.
        ConfigError: there is no such step.
    """
    events = _load(path)
    if any(event.category == "kernel" for event in events):
        events = _on_device_time(events)
    collectives = _with_launches(events)
    windows = _windows(events)
    found = [_step(window, events, collectives) for window in windows]
    steps = [step for step in found if step is not None]
    if not steps:
        raise ConfigError(
            f"{os.fspath(path)} shows no reduction of gradients under a backward: "
            f"{len(collectives)} collectives, {sum(event.name == _ACCUMULATE for event in events)} gradients"
        )
    return steps


def _load(path: str | os.PathLike[str]) -> list[_Event]:
    try:
        with open(path, "rb") as file:
            raw = file.read()
        value = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (ValueError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
        raise FormatError(f"{os.fspath(path)} is not a Chrome trace: {error}") from None
    except OSError as error:
        raise StorageError(f"cannot read the trace {os.fspath(path)}: {error.strerror or error}") from error
    entries = value.get("traceEvents") if isinstance(value, dict) else value
    if not isinstance(entries, list):
        raise FormatError(f"{os.fspath(path)} is not a Chrome trace: it has no list of events")
    events = [event for entry in entries if (event := _parsed(entry)) is not None]
    return sorted(events, key=lambda event: event.start_s)


def _parsed(entry: Any) -> _Event | None:
    """A complete event; None for any other, and for one that no profiler writes."""
    if not isinstance(entry, dict) or entry.get("ph") != "X":
        return None
    if entry.get("cat") == "gpu_user_annotation":
        return None  # what an annotation of the host covers on the device: a ProfilerStep would count twice
    start_s, seconds = _seconds(entry.get("ts")), _seconds(entry.get("dur"))
    if math.isnan(start_s) or not seconds >= 0:
        return None
    args = entry["args"] if isinstance(entry.get("args"), dict) else {}
    known = {key: value for key, value in args.items() if key in _LISTS or not isinstance(value, (list, dict))}
    names = str(entry.get("name", "")), str(entry.get("cat", ""))
    return _Event(*names, start_s, start_s + seconds, str(entry.get("tid")), known)


def _seconds(microseconds: Any) -> float:
    """NaN for anything that is not a time."""
    is_time = isinstance(microseconds, (int, float)) and abs(microseconds) < _MOST
    return microseconds / 1e6 if is_time else math.nan


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else None


def _windows(events: Sequence[_Event]) -> list[tuple[float, float]]:
    """The spans of the steps."""
    marked = [(event.start_s, event.end_s) for event in events if event.name.startswith("ProfilerStep#")]
    if marked:
        return sorted(set(marked))
    work = [event for event in events if event.category in ("cpu_op", "user_annotation")]
    ends = sorted(event.end_s for event in work if event.name.startswith("Optimizer.step"))
    if not work:
        return []
    first_s, last_s = work[0].start_s, max(event.end_s for event in work)
    if not ends:
        return [(first_s, last_s)]
    return list(zip([first_s, *ends[:-1]], ends))


@dataclass(frozen=True, slots=True)
class _Collective:
    """A collective and when it was launched."""

    event: _Event
    kind: str
    launched_s: float


def _with_launches(events: Sequence[_Event]) -> list[_Collective]:
    """All collectives, in the order in which they were launched."""
    runs: dict[str, list[_Event]] = {}
    launches: dict[str, list[float]] = {}
    has_kernels = any(event.category == "kernel" and _NCCL.search(event.name) for event in events)
    for event in events:
        launch = _LAUNCH.match(event.name)
        if launch is not None:
            launches.setdefault(launch[1].replace("_", ""), []).append(event.start_s)
            continue
        found = _NCCL.search(event.name) if event.category == "kernel" else None
        if found is not None:
            runs.setdefault(found[1].lower(), []).append(event)
        elif not has_kernels and event.category == "user_annotation" and (named := _COLLECTIVE.match(event.name)):
            kind = named[2].lower().replace("_", "")
            runs.setdefault(next((one for one in (*_REDUCING, *_GATHERING) if one in kind), kind), []).append(event)
    gradients = sorted((event.end_s, event.nbytes or 0) for event in events if event.name == _ACCUMULATE)
    collectives = [
        _Collective(event, kind, launched_s)
        for kind, of_kind in runs.items()
        for event, launched_s in _paired(of_kind, launches.get(kind, []), gradients)
    ]
    return sorted(collectives, key=lambda one: (one.launched_s, one.event.start_s))


def _paired(
    runs: Sequence[_Event], launches: Sequence[float], gradients: Sequence[tuple[float, int]]
) -> Iterator[tuple[_Event, float]]:
    """Runs of one kind, each with its launch; without launches a run counts as launched when it began.

    gloo's threads may begin in another order than that of the launches. So a launch is paired with the one of the next
    few runs that has the bytes of the gradients since the launch before, or with the first run if none has.
    """
    if len(launches) != len(runs):
        yield from ((run, run.start_s) for run in runs)
        return
    waiting, ends = deque(runs), [end_s for end_s, _ in gradients]
    totals = [0, *accumulate(nbytes for _, nbytes in gradients)]
    before = 0
    for launched_s in launches:
        came = bisect_right(ends, launched_s)
        nbytes, before = totals[came] - totals[before], came
        nearest = enumerate(islice(waiting, _THREADS))
        taken = next((at for at, run in nearest if run.nbytes == nbytes and run.start_s >= launched_s), 0)
        run = waiting[taken]
        del waiting[taken]
        yield run, min(launched_s, run.start_s)


def _step(
    window: tuple[float, float], events: Sequence[_Event], collectives: Sequence[_Collective]
) -> ProfiledStep | None:
    begun_s, ended_s = window
    inside = [event for event in events if begun_s <= event.start_s < ended_s]
    accumulated = [event for event in inside if event.name == _ACCUMULATE]
    if not accumulated:
        return None
    compute_s = max(event.end_s for event in accumulated) - begun_s
    first_s = min(event.start_s for event in accumulated)
    until_s = min((event.start_s for event in inside if event.name.startswith("Optimizer.step")), default=ended_s)
    mine = [one for one in collectives if begun_s <= one.launched_s < ended_s]
    reductions = [
        one for one in mine
        if one.kind in _REDUCING and first_s <= one.launched_s <= until_s and one.event.is_reduction_of_floats
    ]  # fmt: skip
    if not reductions:
        return None
    buckets = tuple(_bucket_event(index, one, begun_s) for index, one in enumerate(reductions))
    gathers = tuple(
        _bucket_event(index, one, begun_s) for index, one in enumerate(one for one in mine if one.kind in _GATHERING)
    )
    compute_s = max([compute_s, *(event.ready_s for event in buckets)])
    gradients, members = _assigned(accumulated, buckets, begun_s)
    pauses = tuple(_pauses(inside, begun_s, compute_s, mine))
    measured = MeasuredStep(ended_s - begun_s, Timeline(compute_s, buckets), gradients, members, pauses)
    return ProfiledStep(begun_s, measured, gathers=gathers)


def _bucket_event(index: int, one: _Collective, begun_s: float) -> BucketEvent:
    start_s, end_s = one.event.start_s - begun_s, one.event.end_s - begun_s
    return BucketEvent(index, one.event.nbytes or 0, one.launched_s - begun_s, start_s, end_s)


def _assigned(
    accumulated: Sequence[_Event], buckets: Sequence[BucketEvent], begun_s: float
) -> tuple[tuple[Gradient, ...], tuple[tuple[int, ...], ...]]:
    """Gradients of each bucket: in order of readiness, if their sizes add up to those of the buckets exactly.

    Else each bucket counts as one gradient, so that a prediction can join buckets, and not divide them.
    """
    made = [(event.end_s - begun_s, event.nbytes) for event in accumulated]
    sizes = [nbytes for _, nbytes in made if nbytes]
    members: list[tuple[int, ...]] = []
    if len(sizes) == len(made):
        begin = 0
        totals = [0, *accumulate(sizes)]
        for bucket in buckets:
            end = bisect_right(totals, totals[begin] + bucket.nbytes) - 1
            if totals[end] - totals[begin] != bucket.nbytes or end == begin:
                break
            members.append(tuple(range(begin, end)))
            begin = end
        if len(members) == len(buckets) and begin == len(made):
            return tuple(Gradient(nbytes or 0, ready_s) for ready_s, nbytes in made), tuple(members)
    whole = tuple(Gradient(bucket.nbytes, bucket.ready_s) for bucket in buckets)
    return whole, tuple((index,) for index in range(len(buckets)))


def _pauses(
    inside: Sequence[_Event], begun_s: float, compute_s: float, collectives: Sequence[_Collective]
) -> Iterable[Pause]:
    accumulated = [event for event in inside if event.name == _ACCUMULATE]
    for event in inside:
        start_s, end_s = event.start_s - begun_s, event.end_s - begun_s
        if start_s >= compute_s:
            continue
        if event.name == _SEARCH:
            yield Pause(PauseKind.SEARCH, start_s, end_s)
        elif event.name in _WAITS:
            yield Pause(PauseKind.SYNCHRONIZATION, start_s, end_s)
        elif event.name == _HOOKED:
            done_s = [
                one.end_s for one in accumulated
                if one.thread == event.thread and event.start_s <= one.start_s and one.end_s <= event.end_s
            ]  # fmt: skip
            if done_s and end_s > max(done_s) - begun_s:
                yield Pause(PauseKind.HOOK, max(done_s) - begun_s, end_s)
    computing = {
        event.args["stream"] for event in inside
        if event.category == "kernel" and "stream" in event.args and not _NCCL.search(event.name)
    }  # fmt: skip
    for one in collectives:
        if one.event.category == "kernel" and one.event.args.get("stream") in computing:
            yield Pause(PauseKind.COLLECTIVE, one.event.start_s - begun_s, one.event.end_s - begun_s)


def _on_device_time(events: Sequence[_Event]) -> list[_Event]:
    """All events, the ends of gradients moved to when the device has made them: the host only queues their kernels."""
    launched: dict[Any, float] = {
        event.args["correlation"]: event.start_s for event in events
        if event.category in ("cuda_runtime", "cuda_driver") and "correlation" in event.args
    }  # fmt: skip
    kernels = sorted(
        (launched.get(event.args.get("correlation"), event.start_s), event.end_s) for event in events
        if event.category == "kernel" and not _NCCL.search(event.name)
    )  # fmt: skip
    launches_s = [launch_s for launch_s, _ in kernels]
    done_s = [-math.inf, *accumulate((end_s for _, end_s in kernels), max)]
    return [
        replace(event, end_s=max(event.end_s, done_s[bisect_right(launches_s, event.end_s)]))
        if event.name == _ACCUMULATE else event for event in events
    ]  # fmt: skip
