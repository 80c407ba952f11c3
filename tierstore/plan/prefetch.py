"""How far ahead to fetch: the textbook depth, and the recommended one.

Not here: which groups are fetched and evicted (`plan/residency.py`), the transfers themselves.
"""

from __future__ import annotations

import math

from tierstore.errors import ConfigError
from tierstore.plan.simulate import Simulation, Visit, simulate

_ROUNDING_S = 1e-9  # of the clock
_SAME = 1.01
_MOST_DEPTH = 8
_LONG, _MOST_VISITS = 1_000, 10_000  # visits from which an order is long; visits of it that are simulated at most


def required_depth(group_bytes: int, bytes_per_s: float, compute_s: float) -> int:
    """Textbook prefetch depth `max(1, ceil(S / (B * Tc)))` of equal groups on one link.

    More than 1 means that the link is slower than the compute: then no depth hides the transfers, and a deeper buffer
    only absorbs unequal groups and jitter. `recommend_depth` says what is gained.
    """
    if group_bytes < 0 or bytes_per_s <= 0 or compute_s <= 0:
        raise ConfigError(f"a depth needs positive rates and times: {group_bytes} B, {bytes_per_s} B/s, {compute_s} s")
    return max(1, math.ceil(group_bytes / (bytes_per_s * compute_s)))


def recommend_depth(order: tuple[Visit, ...], bytes_per_s: float, capacity_bytes: int) -> int:
    """The smallest depth whose simulated stall is within 1 % of the best up to 8.

    Long orders are tried at fewer depths, because each takes time and one group more or less is a small part of them.

    Raises:
        BudgetError: a group alone exceeds the capacity.
    """
    runs: dict[int, Simulation] = {}
    is_long = len(order) > _LONG
    most = min(_MOST_DEPTH, max(1, _MOST_VISITS // len(order))) if is_long else _MOST_DEPTH
    for depth in range(1, 1 + most):
        # A long order is steady after one step.
        run = runs[depth] = simulate(order, capacity_bytes, depth, bytes_per_s, warm_up_steps=1 if is_long else 3)
        if run.stall_s <= _SAME * max(0.0, run.link_s - run.compute_s) + _ROUNDING_S:
            break  # no depth stalls much less: fetching earlier does not mean fetching less often
    limit_s = _SAME * min(run.stall_s for run in runs.values()) + _ROUNDING_S
    return next(depth for depth, run in runs.items() if run.stall_s <= limit_s)
