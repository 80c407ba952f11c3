"""How far ahead to fetch.

Scope: the textbook depth, and the face of the residency policy (`plan/residency.py`).
Not here: the transfers themselves.
"""

from __future__ import annotations

import math

from tierstore.errors import ConfigError
from tierstore.plan.residency import Decision, ResidencyPolicy

__all__ = ["Decision", "ResidencyPolicy", "required_depth"]


def required_depth(group_bytes: int, bytes_per_s: float, compute_s: float) -> int:
    """Textbook prefetch depth `max(1, ceil(S / (B * Tc)))` of equal groups on one link.

    More than 1 means that the link is slower than the compute: then no depth hides the transfers, and a deeper buffer
    only absorbs unequal groups and jitter. `recommend_depth` says what is gained.
    """
    if group_bytes < 0 or bytes_per_s <= 0 or compute_s <= 0:
        raise ConfigError(f"a depth needs positive rates and times: {group_bytes} B, {bytes_per_s} B/s, {compute_s} s")
    return max(1, math.ceil(group_bytes / (bytes_per_s * compute_s)))
