"""Rates of a machine except its disks: memory, the device's link, codecs, Adam; alone, and in pairs.

Scope: which loads run, and the rates and slow-downs that follow.
Not here: a load (`compute.py`, `links.py`), rounds (`loads.py`), disks (`survey.py`).
Owner: the caller owns device and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.device.streams import ComputeDevice
from tierstore.io.memory import Bytes
from tierstore.kernels import warm_up
from tierstore.measure import compute, links
from tierstore.measure.loads import Load, Pace, Runnable, in_turn
from tierstore.plan.bandwidth import Activity, CodecRates, Rate, Slowdown, middle

Pair = tuple[Activity, Activity]
Runs = Mapping[str, Sequence[tuple[float, ...]]]

_PAIRS = (
    (Activity.H2D, Activity.D2H),
    (Activity.H2D, Activity.MATMUL),
    (Activity.D2H, Activity.MATMUL),
    (Activity.ADAM, Activity.MATMUL),
    (Activity.H2D, Activity.ADAM),
)
_BESIDE_DISK = (Activity.MATMUL, Activity.ADAM, Activity.H2D)
_BESIDE_DISK_S = 0.15  # of a run, at least: by then all threads of a disk have moved a few blocks
_PAGEABLE_BYTES = 2**26
MEMORY_BYTES = 2**28
"""Size of the memory that the loads here use."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates by name: of `Activity`, and `memory`, `adam fp32`, `norm`, `checksum`, `h2d pageable`, `d2h pageable`."""

    rates: Mapping[str, Rate]
    codecs: tuple[CodecRates, ...]
    slowdowns: tuple[Slowdown, ...]


async def measure_machine(
    device: ComputeDevice,
    memory: Bytes,
    pace_s: float,
    rounds: int,
    tell: Callable[[str, float], None],
    disk: Mapping[Activity, Runnable] | None = None,
) -> MachineRates:
    """Measures everything once per round, `pace_s` each.

    Args:
        disk: loads that read and write, to be run beside computing and copying; each of these runs is somewhat longer.
        tell: called before each run, with its name and the share of all runs that are over.
    """
    warm_up(["fp32", "bf16"])
    busy = _busy(device, memory)
    codecs = compute.codecs()
    activities = {one: busy[one.value] for one in Activity if one.value in busy}
    loads = {**_side_by_side(_PAIRS, activities), **{name: [load] for name, load in busy.items()}}
    for name, coder in codecs.items():
        loads[f"{name} encode"], loads[f"{name} decode"] = [coder.encode], [coder.decode]
    reads_and_writes = disk or {}
    disk_pairs = [(one, other) for one in reads_and_writes for other in _BESIDE_DISK]
    beside_disk = _side_by_side(disk_pairs, {**activities, **reads_and_writes})
    begun, total = [0], rounds * (len(loads) + len(beside_disk))

    def tell_of(name: str) -> None:
        tell(name, begun[0] / total)
        begun[0] += 1

    async def measured(loads: Mapping[str, Sequence[Runnable]], run_s: float) -> Runs:
        limit_s = 3 * run_s * rounds * len(loads)
        return await in_turn(loads, Pace(run_s, rounds, time.perf_counter() + limit_s, tell_of))

    await in_turn(loads, Pace(pace_s / 4, 1, 0.0))  # the first run is never like the others
    runs = await measured(loads, pace_s)
    disk_runs = await measured(beside_disk, max(pace_s, _BESIDE_DISK_S))
    alone = {name: Rate.of([run[0] for run in runs[name]]) for name, beside in loads.items() if len(beside) == 1}
    return MachineRates(
        alone,
        tuple(
            CodecRates(one.codec, one.data, one.ratio, alone[f"{name} encode"].per_s, alone[f"{name} decode"].per_s)
            for name, one in codecs.items()
        ),
        (*_slowdowns(_PAIRS, runs), *_slowdowns(disk_pairs, disk_runs)),
    )


def _side_by_side(pairs: Sequence[Pair], activities: Mapping[Activity, Runnable]) -> dict[str, Sequence[Runnable]]:
    """Loads by name: each pair after the two alone, so that compared rates are measured within moments."""
    loads: dict[str, Sequence[Runnable]] = {}
    for pair in pairs:
        for one in pair:
            loads.setdefault(one.value, [activities[one]])
        loads[_pair_name(pair)] = [activities[one] for one in pair]
    return loads


def _busy(device: ComputeDevice, memory: Bytes) -> dict[str, Load]:
    """Every load that is neither a disk's nor a codec's, by name; loads of one pair share no bytes."""
    half = memory.nbytes // 2
    busy = {
        Activity.H2D.value: links.h2d(device, memory[:half]),
        Activity.D2H.value: links.d2h(device, memory[half:]),
        Activity.MATMUL.value: links.matmul(device),
        Activity.ADAM.value: compute.adam("bf16"),
        "adam fp32": compute.adam("fp32"),
        "norm": compute.norms(),
        "memory": compute.memory_copies(memory),
        "checksum": compute.checksums(memory),
    }
    if device.kind == "cuda":  # without a device there is nothing to pin memory for
        pageable = np.ones(_PAGEABLE_BYTES, np.uint8)
        busy["h2d pageable"], busy["d2h pageable"] = links.h2d(device, pageable), links.d2h(device, pageable)
    return busy


def _pair_name(pair: Pair) -> str:
    return f"{pair[0].value} beside {pair[1].value}"


def _slowdowns(pairs: Sequence[Pair], runs: Runs) -> Iterator[Slowdown]:
    """Slow-downs of both activities of each pair: medians over rounds, each comparing rates of about one moment."""
    for pair in pairs:
        for index, one in enumerate(pair):
            factors = [alone[0] / both[index] for alone, both in zip(runs[one.value], runs[_pair_name(pair)])]
            # Nothing runs faster beside another load: less than 1 is noise.
            yield Slowdown(one, pair[1 - index], max(1.0, middle(factors)[0]))
