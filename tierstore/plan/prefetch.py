"""How far ahead to fetch.

Scope: the textbook depth, the recommended depth, and the face of the residency policy (`plan/residency.py`).
Not here: the transfers themselves.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.plan.residency import Decision, ResidencyPolicy
from tierstore.plan.simulate import Simulation, Visit, simulate

__all__ = [
    "Decision",
    "DepthChoice",
    "Regime",
    "ResidencyPolicy",
    "Visit",
    "recommend_depth",
    "required_depth",
]

_ROUNDING_S = 1e-9  # of the clock


def required_depth(group_bytes: int, bytes_per_s: float, compute_s: float) -> int:
    """Textbook prefetch depth `max(1, ceil(S / (B * Tc)))` of equal groups on one link.

    More than 1 means that the link is slower than the compute: then no depth hides the transfers, and a deeper buffer
    only absorbs unequal groups and jitter. `recommend_depth` says what is gained.
    """
    if group_bytes < 0 or bytes_per_s <= 0 or compute_s <= 0:
        raise ConfigError(f"a depth needs positive rates and times: {group_bytes} B, {bytes_per_s} B/s, {compute_s} s")
    return max(1, math.ceil(group_bytes / (bytes_per_s * compute_s)))


class Regime(enum.Enum):
    """What bounds a step at its best depth."""

    RESIDENT = "resident"
    COMPUTE_BOUND = "compute-bound"
    BANDWIDTH_BOUND = "bandwidth-bound"
    BUFFER_BOUND = "buffer-bound"


@dataclass(frozen=True, slots=True)
class DepthChoice:
    """A depth, and why.

    Attributes:
        stall_s: of one step at this depth.
        stall_by_depth: of every depth that was simulated; none is beyond the first that has no stall.
        reason: one sentence for a report.
    """

    depth: int
    stall_s: float
    stall_by_depth: Mapping[int, float]
    regime: Regime
    reason: str


def recommend_depth(
    order: tuple[Visit, ...], bytes_per_s: float, capacity_bytes: int, max_depth: int = 8
) -> DepthChoice:
    """The smallest depth whose simulated stall is within 1 % of the best up to `max_depth`.

    Raises:
        BudgetError: a group alone exceeds the capacity.
    """
    if max_depth < 1:
        raise ConfigError(f"max_depth is at least 1, not {max_depth}")
    runs: dict[int, Simulation] = {}
    for depth in range(1, max_depth + 1):
        runs[depth] = simulate(order, capacity_bytes, depth, bytes_per_s)
        if runs[depth].stall_s <= _ROUNDING_S:
            break  # none has less
    limit_s = 1.01 * min(run.stall_s for run in runs.values()) + _ROUNDING_S
    depth = next(depth for depth, run in runs.items() if run.stall_s <= limit_s)
    regime, reason = _explain(runs[depth], depth)
    return DepthChoice(depth, runs[depth].stall_s, {d: run.stall_s for d, run in runs.items()}, regime, reason)


def _explain(run: Simulation, depth: int) -> tuple[Regime, str]:
    times = f"{run.link_s:.4g} s of transfers and {run.compute_s:.4g} s of compute per step"
    if not run.link_s:
        return Regime.RESIDENT, "all groups stay on the device: nothing is fetched"
    if run.stall_s <= 0.01 * run.seconds:
        return Regime.COMPUTE_BOUND, f"{times}: depth {depth} hides the transfers"
    if run.link_s > run.compute_s:
        return Regime.BANDWIDTH_BOUND, f"{times}: the link is the slower of the two, so no depth hides all transfers"
    return (
        Regime.BUFFER_BOUND,
        f"{times}: compute waits {run.stall_s:.4g} s because too few groups fit ahead; "
        "more memory or smaller groups would help",
    )
