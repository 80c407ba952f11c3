"""How many cores there are for this process.

Scope: one number. Owner: none; it imports nothing of the package.
"""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may run on: a container, `taskset` or `srun` may leave it few of the machine's."""
    return len(os.sched_getaffinity(0))
