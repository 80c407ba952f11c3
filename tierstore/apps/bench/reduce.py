"""Gradients of two gloo ranks reduced in buckets of several sizes, delayed, and by torch's DDP.

Scope: contestants and rows. Not here: their steps (`reduce_worker.py`, `tools/peers/reduce_ddp.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.apps.bench.case import (
    Bar,
    BenchOptions,
    Case,
    Heat,
    Result,
    Results,
    Row,
    Spread,
    ours,
    peer,
    ratio,
    row_of,
)
from tierstore.config import format_size
from tierstore.plan.buckets import Gradient, best_bucket_bytes, sweep
from tierstore.plan.cost_model import CostModel

MODEL: Mapping[str, int] = {"layers": 48, "width": 1024, "batch": 64}
"""201 MB of fp32 gradients."""
_DEFAULT = 25 * 2**20
_STEPS = 3
_CAPS = {"per tensor": 1, "1 MiB": 2**20, "5 MiB": 5 * 2**20, "25 MiB": _DEFAULT, "100 MiB": 100 * 2**20,
         "one bucket": 2**40}  # fmt: skip
_DELAYED, _DDP = "tierstore, delayed, 25 MiB", "torch DDP, 25 MiB"


def _called(cap: str) -> str:
    return f"tierstore, {cap}"


def heats(options: BenchOptions, scratch: Path) -> list[Heat]:
    """All in one heat, because idle ranks only wait."""
    shared: dict[str, Any] = {**MODEL, "steps": _STEPS, "scratch": str(scratch)}
    heat = [ours(_called(name), "reduce_worker", bucket=cap, delayed=False, **shared) for name, cap in _CAPS.items()]
    heat.append(ours(_DELAYED, "reduce_worker", bucket=_DEFAULT, delayed=True, **shared))
    if options.wants("torch"):
        heat.append(peer(_DDP, "reduce_ddp", options.peer_python, **shared))
    return [heat]


def rows(options: BenchOptions, results: Results) -> Sequence[Row]:
    """Seconds, hidden share and extra memory of each; then where the optimum lies."""
    ddp = results[_DDP].median("seconds") if _DDP in results else None
    table = []
    for name, result in results.items():
        seconds = result.median("seconds")
        bars = [Bar(1.05, "x torch's DDP", ratio(seconds, ddp), at_most=True)] if name == _called("25 MiB") else []
        table.append(row_of(result, "seconds", "step, 2 gloo ranks", "s", floor=result.median("alone_s"),
                            floor_of="the step of the same ranks without reduction", bars=bars))  # fmt: skip
    table += [row_of(result, "hidden_share", "hidden share", "") for result in results.values()]
    table.append(row_of(results[_DELAYED], "extra_bytes", "memory beyond the gradients", "B"))
    return [*table, *_optimum(results)]


def _optimum(results: Results) -> Iterator[Row]:
    """The best cap that was measured, and the model's, each with its step; and each step as the model predicts it."""
    measured = {cap: seconds for cap in _CAPS if (seconds := results[_called(cap)].median("seconds")) is not None}
    best = min(measured, key=lambda cap: measured[cap], default=None)
    usual = results[_called("25 MiB")]
    if best is None or "model" not in usual.facts:
        return
    at_default = measured.get("25 MiB")
    fastest = Spread.of([measured[best]])
    yield Row("optimum, measured", best, "s", fastest, at_default, "the step with buckets of 25 MiB")
    gradients, model = _as_the_model_sees(usual)
    cap_bytes = best_bucket_bytes(gradients, model)
    (row,) = sweep(gradients, model, [cap_bytes])
    (at_25,) = sweep(gradients, model, [_DEFAULT])
    yield Row("optimum of the model", format_size(cap_bytes), "s", Spread.of([row.seconds]), at_25.seconds,
              "the step with buckets of 25 MiB")  # fmt: skip
    for cap, nbytes in _CAPS.items():
        if cap in measured:
            (row,) = sweep(gradients, model, [nbytes])
            off = abs(row.seconds / measured[cap] - 1)
            yield Row("step as the model predicts it", cap, "s", Spread.of([row.seconds]), measured[cap],
                      "the measured step", (Bar(0.10, "off the measured step", off, at_most=True),))  # fmt: skip


def _as_the_model_sees(result: Result) -> tuple[list[Gradient], CostModel]:
    """Its gradients as they came without reduction, at the pace of the rounds; and its cost model of collectives."""
    came = result.facts["gradients"]
    last_s = max(ready_s for _, ready_s in came)
    pace = (result.median("alone_s") or last_s) / last_s
    return [Gradient(nbytes, pace * ready_s) for nbytes, ready_s in came], CostModel(*result.facts["model"])


CASE = Case("reduce", heats, rows)
