"""Rates of the machine as `tune` measures them, as a contestant: they take turns with the steps they must explain.

Scope: `contend`, and the machine that its answers describe. Not here: measuring (`apps/tune.py`, `measure/`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierstore.apps.bench.case import Result
from tierstore.apps.bench.serve import Round
from tierstore.apps.options import TrainOptions
from tierstore.plan.bandwidth import PAIRS, RATE_NAMES, Activity, BandwidthTable, Slowdown
from tierstore.plan.step_machine import Machine

_PASSES = ("forward_s", "backward_s")


@contextlib.contextmanager
def contend(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Round]]:
    """Options: `directory`, on the disk; `device`."""
    from tierstore.apps.tune import rates_for

    measure = rates_for(TrainOptions(nvme=(Path(options["directory"]),), device=options["device"]))

    first = measure()
    layers = _layers_of(first)  # what they do; each round measures how long they take
    is_direct = all(one.is_direct for one in first.table.directories)

    def run_round(number: int) -> tuple[float, dict[str, float]]:
        begun_s = time.perf_counter()
        machine = measure()
        rates = {name: getattr(machine.table, name) for name in RATE_NAMES}
        figures = {name: rate for name, rate in rates.items() if rate is not None}
        figures |= {_beside(*pair): factor for pair, factor in machine.slower.items()}
        for layer in _layers_of(machine):
            figures |= {_pass(layer, name): layer[name] for name in _PASSES}
        figures |= {"io_threads": machine.io_threads, "update_threads": machine.update_threads}
        return time.perf_counter() - begun_s, figures

    yield {"layers": layers, "is_direct": is_direct}, run_round


def machine_of(result: Result) -> Machine | None:
    """The medians of all rounds; None where none was measured."""
    if not result.answers:
        return None
    rates: dict[str, Any] = {name: rate for name in RATE_NAMES if (rate := result.median(name)) is not None}
    layers = result.facts.get("layers", [])
    timed = (layer | {name: result.median(_pass(layer, name)) for name in _PASSES} for layer in layers)
    rates["layers"] = [layer for layer in timed if None not in layer.values()]
    slower = {pair: result.median(_beside(*pair)) or 1.0 for pair in PAIRS}
    table = replace(
        BandwidthTable.from_json(rates), slowdowns=tuple(Slowdown(*pair, factor) for pair, factor in slower.items())
    )
    return Machine(
        table,
        io_threads=int(result.median("io_threads") or 1),
        update_threads=int(result.median("update_threads") or 1),
        slower=slower,
    )


def least_disk_seconds(result: Result, read_bytes: float, written_bytes: float) -> float | None:
    """Seconds that this traffic and its sync take at the rates of the round in which they are the fewest.

    Reads and writes that hold each other up while both are measured are counted one after the other: that is possible,
    too. None where no rates were measured.
    """
    found = []
    for answer in result.answers:
        if (machine := machine_of(replace(result, answers=[answer]))) is not None:
            table = machine.table
            apart = 2 / (1 / table.read_bytes_per_s + 1 / table.write_bytes_per_s)
            table = replace(table, shared_bytes_per_s=max(apart, table.shared_bytes_per_s))
            found.append(table.durable_seconds(read_bytes, written_bytes))
    return min(found, default=None)


def _layers_of(machine: Machine) -> list[dict[str, Any]]:
    return list(machine.table.to_json().get("layers", []))


def _pass(layer: Mapping[str, Any], name: str) -> str:
    """The name of a pass's figure, from what the layer is, because rounds may leave out other layers as too slow."""
    return f"{layer['kind']} of {layer['dtype']} {json.dumps(layer['work'])}, {name}"


def _beside(activity: Activity, beside: Activity) -> str:
    return f"{activity.value} beside {beside.value}"
