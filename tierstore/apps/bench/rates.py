"""Rates of the machine as `tune` measures them, as a contestant: they take turns with the steps they must explain.

Scope: `contend`, and the machine that its answers describe. Not here: measuring (`apps/tune.py`, `measure/`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierstore.apps.bench.case import Result
from tierstore.apps.bench.serve import Round
from tierstore.apps.options import TrainOptions
from tierstore.plan.bandwidth import RATE_NAMES, Activity, BandwidthTable, Slowdown
from tierstore.plan.step_machine import Machine

_PAIRS = tuple(itertools.permutations(Activity, 2))
_PASSES = ("forward_s", "backward_s")


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Options: `directory`, on the disk; `device`."""
    from tierstore.apps.tune import rates_for

    measure = rates_for(TrainOptions(nvme=(Path(options["directory"]),), device=options["device"]))

    layers = measure().table.to_json().get("layers", [])  # what they do; how long it takes, each round says

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        begun_s = time.perf_counter()
        machine = measure()
        rates = {name: getattr(machine.table, name) for name in RATE_NAMES}
        figures = {name: rate for name, rate in rates.items() if rate is not None}
        figures |= {_beside(*pair): factor for pair, factor in machine.slower.items()}
        for index, layer in enumerate(machine.table.layers):
            figures |= {_layer(index, name): getattr(layer, name) for name in _PASSES}
        figures |= {"io_threads": machine.io_threads, "update_threads": machine.update_threads}
        return time.perf_counter() - begun_s, figures

    yield {"layers": layers}, run_round


def machine_of(result: Result) -> Machine | None:
    """The medians of all rounds; None where none was measured."""
    if not result.answers:
        return None
    rates: dict[str, Any] = {name: rate for name in RATE_NAMES if (rate := result.median(name)) is not None}
    rates["layers"] = [
        layer | {name: result.median(_layer(index, name)) for name in _PASSES}
        for index, layer in enumerate(result.facts.get("layers", []))
    ]
    slower = {pair: result.median(_beside(*pair)) or 1.0 for pair in _PAIRS}
    table = replace(
        BandwidthTable.from_json(rates), slowdowns=tuple(Slowdown(*pair, factor) for pair, factor in slower.items())
    )
    return Machine(
        table,
        io_threads=int(result.median("io_threads") or 1),
        update_threads=int(result.median("update_threads") or 1),
        slower=slower,
    )


def _layer(index: int, name: str) -> str:
    return f"layer {index}, {name}"


def _beside(activity: Activity, beside: Activity) -> str:
    return f"{activity.value} beside {beside.value}"
