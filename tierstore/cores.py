"""How many cores this process may use, and how many threads update.

Scope: these numbers. Owner: none; it imports nothing from the package.
"""

from __future__ import annotations

import os

_FEW_CORES, _MANY_CORES = 8, 16
MOST_UPDATE_THREADS = 64
"""The largest `update_threads` of a `TierConfig`."""


def own_cores() -> set[int]:
    """Cores that this process may run on; a container, `taskset` or `srun` may leave it only some of the machine's."""
    return os.sched_getaffinity(0)


def available_cores() -> int:
    """How many these are."""
    return len(own_cores())


def share_of_cores(processes: int) -> int:
    """The cores of each of so many like processes on this machine; at least one."""
    return max(1, available_cores() // processes)


def update_threads(wish: int | None = None, processes: int = 1) -> int:
    """Threads of the CPU optimizer: `wish`, or else one per core up to 8; with more cores all but two, from 8 to 16.

    Args:
        processes: how many share the cores, and update at the same time.

    A step of GPT-2 1.5B with its state in CPU memory took 0.61 to 0.63 s with 14 threads, and 0.67 to 0.68 s with 8
    (one H200, 16 cores, 2026-11-29).
    """
    cores = share_of_cores(processes)
    return wish or min(cores, max(_FEW_CORES, cores - 2), _MANY_CORES)
