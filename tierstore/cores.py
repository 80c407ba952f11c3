"""How many cores there are for this process, and how many of them update.

Scope: two numbers. Owner: none; it imports nothing of the package.
"""

from __future__ import annotations

import os

_MOST_UPDATE_THREADS = 8


def available_cores() -> int:
    """Cores that this process may run on: a container, `taskset` or `srun` may leave it few of the machine's."""
    return len(os.sched_getaffinity(0))


def update_threads(wish: int | None = None) -> int:
    """Threads of the CPU optimizer: as many as one wishes, or one per core, at most 8."""
    return wish or min(_MOST_UPDATE_THREADS, available_cores())
