"""What a machine gives but for its disks: memory, the device's link, codecs, Adam; alone, and in pairs.

Scope: which loads run, and the rates and slow-downs that follow.
Not here: a load (`compute.py`, `links.py`), rounds (`loads.py`), disks (`survey.py`).
Owner: the caller owns device and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tierstore.device.streams import ComputeDevice
from tierstore.io.memory import Bytes
from tierstore.kernels import warm_up
from tierstore.measure import compute, links
from tierstore.measure.loads import Load, Pace, Runnable, in_turn
from tierstore.plan.bandwidth import Activity, CodecRates, Rate, Slowdown

_PAIRS = (
    (Activity.H2D, Activity.D2H),
    (Activity.H2D, Activity.MATMUL),
    (Activity.D2H, Activity.MATMUL),
    (Activity.ADAM, Activity.MATMUL),
    (Activity.H2D, Activity.ADAM),
)
_BESIDE_DISK = (Activity.MATMUL, Activity.ADAM, Activity.H2D)
_PAGEABLE_BYTES = 2**26
MEMORY_BYTES = 2**28
"""What the loads here are made over."""


@dataclass(frozen=True, slots=True)
class Machine:
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
) -> Machine:
    """Measures everything once per round, `pace_s` each.

    Args:
        disk: loads that read and write, to be run beside what computes and copies.
        tell: called before each run, with what is done and the share of all that is over.
    """
    warm_up(["fp32", "bf16"])
    busy = _busy(device, memory)
    codecs = compute.codecs()
    loads: dict[str, list[Runnable]] = {name: [load] for name, load in busy.items()}
    for name, coder in codecs.items():
        loads[f"{name} encode"], loads[f"{name} decode"] = [coder.encode], [coder.decode]
    activities: dict[Activity, Runnable] = {one: busy[one.value] for one in Activity if one.value in busy}
    pairs = list(_PAIRS)
    for activity, load in (disk or {}).items():
        activities[activity] = load
        loads[activity.value] = [load]
        pairs += [(activity, other) for other in _BESIDE_DISK]
    singles = list(loads)
    for one, other in pairs:
        loads[_pair_name(one, other)] = [activities[one], activities[other]]
    begun, total = [0], rounds * len(loads)

    def tell_of(name: str) -> None:
        tell(name, begun[0] / total)
        begun[0] += 1

    await in_turn(loads, Pace(pace_s / 4, 1, 0.0))  # the first time is never like the others
    runs = await in_turn(loads, Pace(pace_s, rounds, time.perf_counter() + 3 * pace_s * total, tell_of))
    alone = {name: Rate.of([run[0] for run in runs[name]]) for name in singles}
    return Machine(
        alone,
        tuple(
            CodecRates(one.codec, one.data, one.ratio, alone[f"{name} encode"].per_s, alone[f"{name} decode"].per_s)
            for name, one in codecs.items()
        ),
        tuple(slowdown for pair in pairs for slowdown in _slowdowns(pair, runs[_pair_name(*pair)], alone)),
    )


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


def _pair_name(one: Activity, other: Activity) -> str:
    return f"{one.value} beside {other.value}"


def _slowdowns(
    pair: tuple[Activity, Activity], runs: list[tuple[float, ...]], alone: Mapping[str, Rate]
) -> tuple[Slowdown, Slowdown]:
    """Each of a pair beside the other."""
    first, second = (Rate.of([run[index] for run in runs]).per_s for index in (0, 1))
    one, other = pair
    return (
        Slowdown(one, other, max(1.0, alone[one.value].per_s / first)),  # nothing gains by company: less is noise
        Slowdown(other, one, max(1.0, alone[other.value].per_s / second)),
    )
