"""Steps of GPT-2, 1 x 64 tokens, clipped: state on disk, in CPU memory, on the GPU tier; torch and DeepSpeed.

Scope: contestants, which of them are compared with each other, rows. Not here: their steps (`step_worker.py`,
    `tools/peers/step_*.py`), rates (`rates.py`), forecasts (`forecasts.py`), the engine's own cost (`step_cost.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierstore.apps.bench import forecasts, rates
from tierstore.apps.bench.case import (
    Bar,
    BenchOptions,
    Case,
    Contestant,
    Heat,
    Result,
    Results,
    Row,
    Spread,
    ours,
    peer,
    ratio,
    row_of,
    through_the_cache,
)
from tierstore.apps.heap import KEPT_AS_OURS
from tierstore.apps.options import Preset, TrainOptions, options_of_object
from tierstore.apps.preset_sizes import PRESET_FIELDS
from tierstore.apps.spinning import short_spins
from tierstore.config import MicroBatchSchedule, format_size, parse_size
from tierstore.plan.step_record import StepRecord

_GPU_MEMORY = "256MiB"  # here and below for bf16; fp32, with twice the bytes, gets twice as much
CURVE = ("256MiB", "384MiB", "512MiB", "768MiB", "1GiB", "1536MiB", "2GiB", "4GiB")
_SEQUENCE = 64
_ROOMY_GPU_MEMORY = "1GiB"  # weights and gradients stay on the device
_ROOMY = {"cpu_memory": "4GiB"}
_RARE = 50
_MICRO_BATCHES = 8
_STATE_BYTES, _ITEM_BYTES = {"bf16": 22.0, "fp32": 20.0}, {"bf16": 2.0, "fp32": 4.0}
"""Disk bytes of a parameter. First: its state, read and written, and its weight, written. Second: its weight, read in
both passes of each micro-batch if weights do not fit in CPU memory; likewise its gradient, written and read."""
_STORE_BYTES = 2**32  # two slots of 14 B for 124M parameters, and some room
_LARGE_STORE_BYTES = 48 * 10**9  # of 1.56e9
_MOST_STORES = 5  # in one heat: four of ours and DeepSpeed's


@dataclass(frozen=True, slots=True)
class Own:
    """One of our contestants: how it trains, and the bars of its row.

    Attributes:
        options: of `TrainOptions`, apart from those that all have.
        heat: the heat in which it takes turns.
        gpu_memory: for bf16, where the GPU tier is not a part of `cpu_memory`.
        vs_torch: upper bound of its step, in steps of torch in memory.
        vs_all: lower bound of its speed, in speeds of DeepSpeed with all state on disk.
        vs_all_rss: upper bound of its peak memory, as a part of that DeepSpeed's.
        vs_floor: upper bound of its step, in multiples of its own floor.
        vs_horizontal: lower bound of its speed, in speeds of the same micro-batches one after the other.
        most_rss: upper bound of its peak memory, in bytes.
    """

    name: str
    heat: str
    options: dict[str, Any]
    stored: bool = True
    gpu_memory: str = _GPU_MEMORY
    vs_torch: float | None = None
    vs_all: float | None = None
    vs_all_rss: float | None = None
    vs_floor: float | None = None
    vs_horizontal: float | None = None
    most_rss: int | None = None


_KEPT = {"freed_memory": "keep"}
_FAST = {"update": "speculative"} | _KEPT
_HORIZONTAL = "tierstore, 384MiB, 8 micro-batches"
_FETCHING = {"gpu_memory": _GPU_MEMORY}  # so that weights come and go, in all passes
_ACCUMULATING = _FETCHING | {"cpu_memory": "384MiB", "accumulate": _MICRO_BATCHES}
_OWN = (
    Own("tierstore, 768MiB, speculative", "disk", {"cpu_memory": "768MiB", "update": "speculative"}, vs_all=2.5,
        vs_all_rss=0.25, vs_floor=1.15),
    Own("tierstore, 1280MiB, speculative, memory kept", "disk", {"cpu_memory": "1280MiB"} | _FAST, vs_all=2.5,
        vs_floor=1.15),
    Own("tierstore, 512MiB, speculative, memory kept", "disk", {"cpu_memory": "512MiB"} | _FAST, vs_all=2.0,
        vs_floor=1.15),
    Own("tierstore, 1280MiB, forward, memory kept", "disk", {"cpu_memory": "1280MiB", "update": "forward"} | _KEPT),
    Own("tierstore, CPU memory, a commit every 50 (1/50 of a flush added)", "memory",
        _ROOMY | {"commit_every": _RARE}, gpu_memory=_ROOMY_GPU_MEMORY, vs_torch=1.10),
    Own("tierstore, CPU memory, a commit each step", "memory", _ROOMY, gpu_memory=_ROOMY_GPU_MEMORY, vs_torch=1.25),
    Own("tierstore, no store", "memory", _ROOMY, gpu_memory=_ROOMY_GPU_MEMORY, stored=False, vs_torch=1.03),
    Own("tierstore, 128MiB", "accumulate", _FETCHING | {"cpu_memory": "128MiB"}),
    Own(_HORIZONTAL, "accumulate", _ACCUMULATING),
    Own("tierstore, 384MiB, 8 micro-batches, vertical", "accumulate", _ACCUMULATING | {"micro_batches": "vertical"},
        vs_horizontal=1.5),
)  # fmt: skip
_1_5B = {"cpu_memory": "4GiB", "preset": "1.5b"}
_LARGE = tuple(
    Own(f"tierstore, {name}", name, _1_5B | options, gpu_memory="320MiB", vs_floor=1.25, most_rss=int(5.5 * 2**30))
    for name, options in (
        ("1.5b, 4GiB, speculative, clipped at 1000", {"update": "speculative", "clip": 1000.0}),  # norms are lower
        ("1.5b, 4GiB, forward", {"update": "forward"}),
    )
)
"""One after the other, because each takes 48 GB."""
_COST = "tierstore, tiny groups"
_FLOOR = (
    "the longer of the step in memory (torch's; else our own computing) and the bytes that the disk moved, reads and "
    "writes together, and synced; each as in the fastest round"
)
_FASTER = "faster than its floor, which was measured too slow in this run: no bar against it counts"


def _own(options: BenchOptions) -> list[Own]:
    if options.large:
        return list(_LARGE)
    if options.curve:
        budgets = CURVE if options.dtype != "fp32" else CURVE[1:]  # the first is too small for fp32
        return [Own(f"tierstore, {budget}, memory kept", "curve", {"cpu_memory": budget} | _KEPT) for budget in budgets]
    return [own for own in _OWN if options.heat in (None, own.heat)]


def _torch(heat: str) -> str:
    return f"torch in memory, beside {heat}"


_EXACT_TORCH = "torch in memory, state in fp32"
_ASKED_TORCH = "torch in memory, heap and spins as ours"  # as `apps/heap.py` and `apps/spinning.py` ask for ours


def _rates(heat: str) -> str:
    return f"rates, beside {heat}"


_ALL = "DeepSpeed, all state on disk"
_MODES = {"disk": {"all": _ALL}, "memory": {"cpu": "DeepSpeed, CPU memory"},
          "accumulate": {"optimizer": "DeepSpeed, optimizer state on disk"}}  # fmt: skip


def heats(options: BenchOptions, scratch: Path) -> list[Heat]:
    """Contestants that are compared are alive together; not all are, because DeepSpeed alone takes 7 GB."""
    found: dict[str, list[Contestant]] = {}
    for index, own in enumerate(_own(options)):
        train = train_options(own, options, scratch / f"store-{index}")
        heat = found.setdefault(own.heat, [])
        heat.append(_as_commands(ours(own.name, "step_worker", train=train, steps=options.steps)))
    shared: dict[str, Any] = {"device": options.device, "steps": options.steps, "batch": 1, "sequence": _SEQUENCE,
                              "dtype": options.dtype}  # fmt: skip
    shared["fields"] = {name: value for name, value in PRESET_FIELDS[Preset.P124M].items() if name != "model_type"}
    for name, heat in found.items():
        rates = ours(_rates(name), "rates", directory=str(scratch / f"rates-{name}"), device=options.device)
        heat.append(_as_commands(rates))
        if options.wants("torch") and not options.large:
            heat.append(peer(_torch(name), "step_torch", options.peer_python, **shared))
            if name == "memory":
                if options.dtype != "fp32":
                    heat.append(peer(_EXACT_TORCH, "step_torch", options.peer_python, fp32_state=True, **shared))
                asked = peer(_ASKED_TORCH, "step_torch", options.peer_python, **shared)
                heat.append(_as_commands(replace(asked, environment=KEPT_AS_OURS)))
        for mode, called in _MODES.get(name, {}).items() if options.wants("deepspeed") else ():
            store = str(scratch / f"deepspeed-{mode}")
            theirs = peer(called, "step_deepspeed", options.peer_python, mode=mode, store=store, **shared)
            heat.append(_as_commands(theirs))
    if not options.large and not options.curve and options.heat in (None, "cost"):
        found["cost"] = [_as_commands(ours(_COST, "step_cost", directory=str(scratch), dtype=options.dtype))]
    return list(found.values())


def _as_commands(contestant: Contestant) -> Contestant:
    """With the short spins of threads that `train` and `tune` ask for."""
    return replace(contestant, environment={**contestant.environment, **short_spins(os.environ)})


def train_options(own: Own, options: BenchOptions, store: Path) -> dict[str, Any]:
    """The options of `train`, as in its file of options."""
    common: dict[str, Any] = {
        "preset": "124m", "dtype": options.dtype, "batch": 1, "sequence": _SEQUENCE, "lr": 1e-4, "weight_decay": 0.01,
        "device": options.device, "evaluate": 0,
    }  # fmt: skip
    if options.device != "cpu":
        common["gpu_memory"] = own.gpu_memory
    given = common | own.options | ({"nvme": [str(store)]} if own.stored else {})
    if "gpu_memory" in given:
        given["gpu_memory"] = int(parse_size(given["gpu_memory"]) * _ITEM_BYTES[options.dtype] / 2)
    return given


def rows(options: BenchOptions, results: Results) -> Sequence[Row]:
    """Seconds of a step; what they are made of; whether they were predicted."""
    return [*_step_rows(options, results), *_bytes_rows(options, results), *_cost_rows(results),
            *_prediction_rows(options, results)]  # fmt: skip


def _step_rows(options: BenchOptions, results: Results) -> Iterator[Row]:
    work = f"step, GPT-2 {'1.5B' if options.large else '124M'}, {options.dtype}"
    for own in _own(options):
        result = results[own.name]
        seconds, floor = result.median("seconds"), _floor_s(own, options, results)
        is_faster = floor is not None and seconds is not None and seconds < floor
        row = row_of(result, "seconds", work, "s", floor=floor, floor_of=_FLOOR if floor is not None else "",
                     bars=list(_bars(own, result, results, None if is_faster else floor)))  # fmt: skip
        is_cached = own.stored and not results[_rates(own.heat)].facts.get("is_direct", True)
        row = through_the_cache(row) if is_cached else row
        yield replace(row, trouble=row.trouble or _FASTER) if is_faster else row
        if own.options.get("update") == "speculative":
            yield row_of(result, "speculated", f"timed steps of {options.steps} whose guess was right", "steps",
                         bars=[Bar(options.steps, "steps", result.median("speculated"))])  # fmt: skip
    for result in results.values():
        if result.contestant.is_peer:
            yield row_of(result, "seconds", work, "s")


def _bars(own: Own, result: Result, results: Results, floor: float | None) -> Iterator[Bar]:
    seconds = result.median("seconds")
    if own.vs_all is not None:
        yield Bar(own.vs_all, f"x {_ALL}", ratio(_median(results, _ALL), seconds))
    if own.vs_all_rss is not None:
        theirs = results[_ALL].peak_rss_bytes if _ALL in results else None
        yield Bar(own.vs_all_rss, "of its peak memory", ratio(result.peak_rss_bytes, theirs), at_most=True)
    if own.vs_torch is not None:
        yield Bar(own.vs_torch, "x torch in memory", ratio(seconds, _median(results, _torch(own.heat))), at_most=True)
        for other in (one for one in (_EXACT_TORCH, _ASKED_TORCH) if one in results):
            yield Bar(own.vs_torch, f"x {other}", ratio(seconds, _median(results, other)), at_most=True)
    if own.vs_floor is not None:
        yield Bar(own.vs_floor, "x the floor", ratio(seconds, floor), at_most=True)
    if own.vs_horizontal is not None:
        yield Bar(own.vs_horizontal, f"x {_HORIZONTAL}", ratio(_median(results, _HORIZONTAL), seconds))
    if own.most_rss is not None:
        yield Bar(1.0, f"of {format_size(own.most_rss)} peak memory", ratio(result.peak_rss_bytes, own.most_rss),
                  at_most=True)  # fmt: skip


def _floor_s(own: Own, options: BenchOptions, results: Results) -> float | None:
    """See `_FLOOR`."""
    result, computing_s = results[own.name], _computing_s(own, options, results)
    read, written = result.median("read_bytes"), result.median("written_bytes")
    if computing_s is None or read is None or written is None:
        return None
    disk_s = rates.least_disk_seconds(results[_rates(own.heat)], read, written)
    return None if disk_s is None else max(computing_s, disk_s)


def _computing_s(own: Own, options: BenchOptions, results: Results) -> float | None:
    """Of all micro-batches of a step, in the fastest round. What is recorded is a step of one."""
    micro_batches, memory = own.options.get("accumulate", 1), results.get(_torch(own.heat))
    if micro_batches == 1 and memory is not None and memory.answers:
        return memory.least("seconds")
    if (found := results[own.name].least("computing_s")) is not None:
        return found
    recorded_s = _recorder(own, options, results)[1].least("computing_s")
    return None if recorded_s is None else micro_batches * recorded_s


def _bytes_rows(options: BenchOptions, results: Results) -> Iterator[Row]:
    state, both_ways = _STATE_BYTES[options.dtype], 2 * _ITEM_BYTES[options.dtype]
    for own in _own(options):
        result = results[own.name]
        if not own.stored or own.options.get("commit_every", 1) > 1:
            continue
        spilled = result.median("spilled_per_parameter") or 0.0
        is_vertical = own.options.get("micro_batches") == MicroBatchSchedule.VERTICAL.value
        passes = 1 if is_vertical else own.options.get("accumulate", 1)
        most = state + passes * both_ways * float(result.facts.get("weights_on_disk", 0))
        found = result.median("bytes_per_parameter")
        kept = None if found is None else found - spilled
        bar = Bar(most, f"B, and {spilled:.1f} B of spilled gradients", kept, at_most=True)
        yield row_of(result, "bytes_per_parameter", "disk bytes per parameter and step", "B", bars=[bar])


def _cost_rows(results: Results) -> Iterator[Row]:
    if (cost := results.get(_COST)) is not None:
        figure, hooks_us = "us_per_group_and_pass", cost.median("hooks_us") or 0.0
        yield row_of(cost, figure, "Python of the engine per group and pass", "us",
                     floor=hooks_us if hooks_us > 0 else None,  # less than noise
                     floor_of="what torch takes for as many hooks that do nothing",
                     bars=[Bar(150, "us", cost.median(figure), at_most=True)])  # fmt: skip
    if (lag := results.get(_OWN[0].name)) is not None:
        figure = "lag_p99_ms"
        yield row_of(lag, figure, "loop lag, 99th percentile", "ms",
                     bars=[Bar(5, "ms", lag.median(figure), at_most=True)])  # fmt: skip


def _prediction_rows(options: BenchOptions, results: Results) -> Iterator[Row]:
    records: dict[tuple[str, str], StepRecord] = {}
    for own in _own(options):
        for command, seconds in _predicted_s(own, options, results, records).items():
            result = results[own.name]
            measured = result.median("seconds")
            off = None if seconds is None or measured is None else abs(seconds / measured - 1)
            value = None if seconds is None else Spread.of([seconds])
            yield Row(f"step as {command} predicts it", own.name, "s", value, measured, "measured step",
                      (Bar(0.10, "off the measured step", off, at_most=True),), trouble=result.trouble)  # fmt: skip


def _predicted_s(
    own: Own, options: BenchOptions, results: Results, records: dict[tuple[str, str], StepRecord]
) -> dict[str, float | None]:
    """By command; `tune` predicts no steps of several micro-batches, and `plan` none with micro-batches side by side.

    Args:
        records: calibrated records by recorder and trial, kept because to calibrate one takes seconds.
    """
    machine, train = rates.machine_of(results[_rates(own.heat)]), _as_train_options(own, options)
    if train.micro_batches is MicroBatchSchedule.VERTICAL:
        return {}
    found: dict[str, float | None] = {"plan": None if machine is None else forecasts.by_plan(train, machine)}
    if train.accumulate == 1:
        (recorder, recorded), depth = _recorder(own, options, results), results[own.name].median("depth")
        tried = _tried(own, recorder, options, results)
        found["tune"] = None
        if machine is not None and depth is not None and "recorded" in recorded.facts and results[tried.name].answers:
            key = (recorder.name, tried.name)
            if key not in records:
                given = _as_train_options(tried, options)
                records[key] = forecasts.computing(recorded, results[tried.name], given, machine)
            found["tune"] = forecasts.by_tune(records[key], train, machine, int(depth))
    return found


def _recorder(own: Own, options: BenchOptions, results: Results) -> tuple[Own, Result]:
    """The contestant that shows how long this one computes: itself if it recorded that, else another one."""
    others = sorted(_own(options), key=lambda one: one.heat != own.heat)
    found = next((one for one in (own, *others) if "recorded" in results[one.name].facts), own)
    return found, results[found.name]


def _tried(own: Own, recorder: Own, options: BenchOptions, results: Results) -> Own:
    """The one whose trial shows this schedule: itself or, if it recorded nothing, the first in its heat that has it."""
    if recorder is own:
        return own
    wanted = (own.heat, own.options.get("update"))
    alike = (one for one in _own(options) if (one.heat, one.options.get("update")) == wanted)
    return next((one for one in alike if results[one.name].answers), own)


def _as_train_options(own: Own, options: BenchOptions) -> TrainOptions:
    return TrainOptions(**options_of_object(train_options(own, options, Path("store")), "bench step"))


def _median(results: Results, name: str) -> float | None:
    return results[name].median("seconds") if name in results else None


def _disk_bytes(options: BenchOptions) -> int:
    if options.large:
        return _LARGE_STORE_BYTES
    return (len(CURVE) if options.curve else _MOST_STORES) * _STORE_BYTES


CASE = Case("step", heats, rows, _disk_bytes, reads=("steps", "curve", "large", "heat", "dtype", "device"))
