"""OverlapProfiler: recorded steps, real traces of DDP and FSDP, a constructed one of CUDA, and what they show."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from profiling import LAYERS, WIDTH, profiled, traced
from ranks import run_ranks
from torch import nn

from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.plan.buckets import BucketEvent
from tierstore.plan.cost_model import CostModel
from tierstore.plan.diagnosis import Pause, PauseKind, Symptom
from tierstore.train.data_parallel.buckets import BucketRecord, StepRecord
from tierstore.train.data_parallel.overlap import OverlapProfiler

LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
US = 1e-6


class Recorded:
    """A reducer of two parameters, with collectives that end at set times; each reading of its clock takes a second."""

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.now_s = 100.0
        self.done_s = (107.0, 109.5)
        self.record: StepRecord | None = None

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def backward(self) -> None:
        began_s = self.clock()
        self.module(torch.ones(1, 3)).sum().backward()
        buckets = (
            BucketRecord(0, 8, ("bias",), self.now_s - 1.5, self.now_s - 1.0, self.done_s[0], 0.0),
            BucketRecord(1, 24, ("weight",), self.now_s - 0.5, self.now_s, self.done_s[1], 3.5),
        )
        self.record = StepRecord(began_s, self.now_s, max(self.done_s), ("bias", "weight"), buckets)

    is_delayed = False

    def last_step(self) -> StepRecord | None:
        return self.record


@pytest.fixture
def recorded() -> Iterator[tuple[Recorded, OverlapProfiler]]:
    reducer = Recorded()
    with OverlapProfiler(reducer, skip=0, clock=reducer.clock) as profiler:  # type: ignore[arg-type]
        yield reducer, profiler


def test_a_recorded_step_by_hand(recorded: tuple[Recorded, OverlapProfiler]) -> None:
    reducer, profiler = recorded
    with profiler.step():  # begins at 101; backward at 102, its gradients at 103 and 104
        reducer.backward()
        reducer.now_s = 110.0
    [step] = profiler.steps
    assert (step.start_s, step.seconds) == (101, 10)
    assert step.timeline.compute_s == 3
    assert step.timeline.events == (BucketEvent(0, 8, 1.5, 2, 6), BucketEvent(1, 24, 2.5, 3, 8.5))
    assert [gradient.nbytes for gradient in step.measured.gradients] == [8, 24]
    assert {gradient.ready_s for gradient in step.measured.gradients} == {2, 3}  # autograd chooses which is first
    assert step.names == (("bias",), ("weight",))
    summary = profiler.summary()
    assert (summary.compute_s, summary.communication_s, summary.exposed_s, summary.rest_s) == (3, 6.5, 5.5, 1.5)
    assert summary.hidden_share == pytest.approx(1 - 5.5 / 6.5)
    first, second = summary.buckets
    assert (first.communication_s, first.exposed_s, first.hidden_share) == (4, 3, 0.25)
    assert (second.communication_s, second.exposed_s) == (2.5, 2.5)  # before that it waited for the first


def test_time_of_a_step_can_be_marked(recorded: tuple[Recorded, OverlapProfiler]) -> None:
    reducer, profiler = recorded
    with profiler.step():
        with profiler.paused(PauseKind.HOOK):
            pass
        reducer.backward()
    assert profiler.steps[0].measured.pauses == (Pause(PauseKind.HOOK, 1, 2),)


def test_steps_that_do_not_count(recorded: tuple[Recorded, OverlapProfiler]) -> None:
    reducer, profiler = recorded
    with pytest.raises(ConfigError, match="no gradient was reduced"), profiler.step():
        pass
    with contextlib.suppress(ZeroDivisionError), profiler.step():
        reducer.backward()
        raise ZeroDivisionError
    with pytest.raises(ConfigError, match="no gradient was reduced"), profiler.step():
        pass  # the record is that of the step before
    reducer.done_s = (float("nan"), 1.0)
    with pytest.raises(ConfigError, match="timed=True"), profiler.step():
        reducer.backward()
    assert profiler.steps == []
    with pytest.raises(ConfigError, match="no step was recorded"):
        profiler.summary()
    skipping = OverlapProfiler(reducer, skip=1, clock=reducer.clock)  # type: ignore[arg-type]
    reducer.done_s = (1.0, 1.0)
    for _ in range(3):
        with skipping.step():
            reducer.backward()
    assert len(skipping.steps) == 2


def test_closed_it_leaves_the_module_alone() -> None:
    reducer = Recorded()
    profiler = OverlapProfiler(reducer, clock=reducer.clock)  # type: ignore[arg-type]
    profiler.close()
    profiler.close()
    before_s = reducer.now_s
    reducer.module(torch.ones(1, 3)).sum().backward()
    assert reducer.now_s == before_s


def test_real_steps_of_a_reducer() -> None:
    (summary, names, report), _ = run_ranks(2, profiled, 5)
    assert summary.steps == 5
    assert [len(bucket) for bucket in names[0]] == [6, 6]  # of 12 parameters; the one that reaches the cap is included
    assert sum(row.nbytes for row in summary.buckets) == LAYERS * LAYER_BYTES
    assert 0 < summary.compute_s < summary.seconds
    assert 0 <= summary.exposed_s <= summary.communication_s
    for row in summary.buckets:
        assert row.ready_s <= row.start_s < row.end_s <= summary.seconds * 3
    assert report.splitlines()[0].startswith("5 steps, median ")


# --- traces ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    found = {}
    for kind, shapes in (("ddp", True), ("ddp", False), ("fsdp", True)):
        found[f"{kind} {shapes}"] = folder / f"{kind}-{shapes}.json"
        run_ranks(2, traced, str(found[f"{kind} {shapes}"]), kind, shapes)
    return found


def test_a_trace_of_ddp(traces: dict[str, Path]) -> None:
    profiler = OverlapProfiler.from_trace(traces["ddp True"])
    assert len(profiler.steps) == 3
    step = profiler.steps[-1]
    sizes = [event.nbytes for event in step.timeline.events]
    assert sum(sizes) == LAYERS * LAYER_BYTES  # without the map of used parameters
    assert len(sizes) >= 3
    assert len(step.measured.gradients) == 2 * LAYERS
    assert [len(one.measured.pauses) > 0 for one in profiler.steps] == [True] * 3
    assert PauseKind.SEARCH in {pause.kind for pause in step.measured.pauses}
    assert step.gathers == ()
    for one in profiler.steps:
        assert 0 < one.timeline.compute_s < one.seconds
        # Not `end_s <= seconds`: gloo wakes the waiter of a collective before it records the collective's end.
        assert all(event.ready_s <= event.start_s < min(event.end_s, one.seconds) for event in one.timeline.events)
        assert 0 <= one.timeline.hidden_share <= 1
        for bucket, event in zip(one.measured.buckets, one.timeline.events):
            assert sum(one.measured.gradients[member].nbytes for member in bucket) == event.nbytes
            assert max(one.measured.gradients[member].ready_s for member in bucket) <= event.ready_s


def test_without_shapes_a_bucket_is_one_gradient(traces: dict[str, Path]) -> None:
    for step in OverlapProfiler.from_trace(traces["ddp False"]).steps:
        assert len(step.measured.gradients) == len(step.timeline.events) >= 3


def test_a_trace_of_fsdp(traces: dict[str, Path]) -> None:
    profiler = OverlapProfiler.from_trace(traces["fsdp True"])
    assert len(profiler.steps) == 3
    for step in profiler.steps:
        assert [event.nbytes for event in step.timeline.events] == [LAYER_BYTES] * LAYERS
        assert len(step.gathers) == 2 * LAYERS - 1 or len(step.gathers) == 2 * LAYERS  # forward, and again in backward
        assert step.measured.buckets == tuple((2 * index, 2 * index + 1) for index in range(LAYERS))


def test_every_view_of_a_trace(traces: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profiler = OverlapProfiler.from_trace(traces["ddp True"])
    report = profiler.report()
    assert "3 steps, median" in report.splitlines()[0]
    assert "collective, hidden" in report
    assert max(map(len, report.split("\n\n")[1].splitlines())) <= 100
    profiler.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    profiler.to_chrome(tmp_path / "steps.json")
    spans = [one for one in json.loads((tmp_path / "steps.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert {one["cat"] for one in spans} == {"step", "compute", "collectives", "pauses"}


FLOAT, INT = {"Input type": ["float"]}, {"Input type": ["int"]}


def event(name: str, start: float, seconds: float, category: str = "cpu_op", thread: int = 1, **args: Any) -> Any:
    """A trace event; `start` and `seconds` are in microseconds."""
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": seconds, "tid": thread, "args": args}


def cuda_trace(path: Path, *, stream: int = 20, waits: bool = False) -> Path:
    """The host queues two gradients in 100 us; their kernels take 1 ms each in stream 7, NCCL runs in `stream`."""
    shape = {"Input Dims": [[250_000]], "Input type": ["float"]}
    events = [
        event("ProfilerStep#7", 0, 5000, "user_annotation"),
        event("ProfilerStep#7", 5, 5000, "gpu_user_annotation"),
    ]
    for index in range(2):
        queued = 10 + 50 * index
        events += [
            event("cudaLaunchKernel", queued, 5, "cuda_runtime", correlation=index),
            event("gemm", 100 + 1000 * index, 1000, "kernel", 7, correlation=index, stream=7),
            event("torch::autograd::AccumulateGrad", queued + 6, 4, **shape),
            event("c10d::allreduce_", queued + 20, 5),
            event("nccl:all_reduce", queued + 21, 3, "user_annotation"),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1100 + 1000 * index, 800, "kernel", stream, stream=stream,
                  **{"In msg nelems": 250_000, "dtype": "Float"}),
        ]  # fmt: skip
    if waits:
        events.append(event("cudaStreamSynchronize", 30, 900, "cuda_runtime"))
    events.append(event("Optimizer.step#SGD.step", 120, 40, "user_annotation"))
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_trace_of_cuda_goes_by_the_time_of_the_device(tmp_path: Path) -> None:
    [step] = OverlapProfiler.from_trace(cuda_trace(tmp_path / "trace.json.gz")).steps
    assert step.seconds == pytest.approx(5000 * US)
    assert step.timeline.compute_s == pytest.approx(2100 * US)  # not the 70 us of the host
    assert [one.ready_s for one in step.measured.gradients] == pytest.approx([1100 * US, 2100 * US])
    first, second = step.timeline.events
    assert (first.nbytes, first.start_s, first.end_s) == (10**6, pytest.approx(1100 * US), pytest.approx(1900 * US))
    assert second.end_s == pytest.approx(2900 * US)
    assert step.timeline.hidden_share == pytest.approx(0.5)
    assert step.measured.pauses == ()


def test_collectives_on_the_stream_of_the_compute_are_seen(tmp_path: Path) -> None:
    profiler = OverlapProfiler.from_trace(cuda_trace(tmp_path / "trace.json.gz", stream=7))
    pauses = profiler.steps[0].measured.pauses
    assert {pause.kind for pause in pauses} == {PauseKind.COLLECTIVE}
    found = profiler.diagnose(CostModel(0, 10**6 / 800e-6))
    assert found[0].symptom is Symptom.SAME_STREAM


def test_threads_of_gloo_overtake_each_other(tmp_path: Path) -> None:
    """The first bucket's collective began last, and that of the map of used parameters before the last bucket's."""
    events = []
    for at, elements in ((10, 192), (20, 36_864), (30, 192), (40, 36_864)):
        events.append(event("torch::autograd::AccumulateGrad", at, 2, **{"Input Dims": [[elements]], **FLOAT}))
    launches = {15: (70, 192, FLOAT), 33: (50, 37_056, FLOAT), 43: (65, 36_864, FLOAT), 45: (60, 4, INT)}
    for launched, (began, elements, kind) in launches.items():
        events.append(event("c10d::allreduce_", launched, 1))
        events.append(event("gloo:all_reduce", began, 10, "user_annotation", 2, **{"Input Dims": [[elements]], **kind}))
    events.append(event("Optimizer.step#SGD.step", 90, 9, "user_annotation"))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    [step] = OverlapProfiler.from_trace(tmp_path / "trace.json").steps
    found = [(one.nbytes, round(one.ready_s / US), round(one.start_s / US)) for one in step.timeline.events]
    assert found == [(4 * 192, 5, 60), (4 * 37_056, 23, 40), (4 * 36_864, 33, 55)]
    assert step.measured.buckets == ((0,), (1, 2), (3,))


def test_a_host_that_waits_is_seen(tmp_path: Path) -> None:
    profiler = OverlapProfiler.from_trace(cuda_trace(tmp_path / "trace.json.gz", waits=True))
    assert [pause.kind for pause in profiler.steps[0].measured.pauses] == [PauseKind.SYNCHRONIZATION]
    assert profiler.diagnose()[0].symptom is Symptom.STRAY_SYNCHRONIZATION


def test_what_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read the trace"):
        OverlapProfiler.from_trace(tmp_path / "missing")
    zipped = bytearray(gzip.compress(json.dumps([event("aten::mm", at, 1) for at in range(99)]).encode()))
    zipped[len(zipped) // 2] ^= 0xFF
    for name, content in (("text", b"hello"), ("zip", b"\x1f\x8bhello"), ("number", b"3"), ("empty", b'{"a": 1}'),
                          ("damaged", bytes(zipped)), ("deep", b"[" * 100_000)):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match="is not a Chrome trace"):
            OverlapProfiler.from_trace(tmp_path / name)
    (tmp_path / "other").write_text(
        json.dumps([event("aten::mm", 0, 1), {"ph": "X"}, 3, {"ph": "X", "name": "x", "ts": "a", "dur": 1}])
    )
    with pytest.raises(ConfigError, match="shows no reduction of gradients"):
        OverlapProfiler.from_trace(tmp_path / "other")


HOSTILE: dict[str, dict[str, Any]] = {
    "no name": {"name": None}, "a list for a name": {"name": [1]}, "a list for arguments": {"args": [1]},
    "text for a size": {"args": {"In msg nelems": "many", "dtype": "float"}},
    "a list for a size": {"args": {"In msg nelems": [1], "dtype": "float"}},
    "less than nothing": {"args": {"In msg nelems": -4, "dtype": "float"}},
    "more than all": {"args": {"In msg nelems": 1e999, "dtype": "float"}},
    "a number for types": {"args": {"Input Dims": 3, "Input type": 3}},
    "a shape of text": {"args": {"Input Dims": [["x"]], "Input type": [3]}},
    "a list for a stream": {"cat": "kernel", "args": {"stream": [1], "correlation": [2]}},
    "a size of many digits": {"args": {"In msg nelems": 10**400, "dtype": "float"}}, "a late time": {"ts": 10**400},
    "back in time": {"dur": -5}, "no time": {"ts": float("nan")}, "for ever": {"dur": float("inf")},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_events_that_no_profiler_writes(tmp_path: Path, case: str) -> None:
    """Such events are left out, or only their bad fields."""
    with gzip.open(cuda_trace(tmp_path / "trace.json.gz")) as file:
        events = json.load(file)["traceEvents"]
    (tmp_path / "trace").write_text(json.dumps([*events, *({**one, **HOSTILE[case]} for one in events)]))
    profiler = OverlapProfiler.from_trace(tmp_path / "trace")
    assert profiler.report()
    profiler.to_chrome(tmp_path / "again.json")


def test_a_profiler_of_a_trace_records_nothing(tmp_path: Path) -> None:
    profiler = OverlapProfiler.from_trace(cuda_trace(tmp_path / "trace.json.gz"))
    with pytest.raises(ConfigError, match="made from a trace"), profiler.step():
        pass
