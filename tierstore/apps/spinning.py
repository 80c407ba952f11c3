"""How long torch's CPU threads spin when an operation has ended: a setting of the process, made by commands.

Another OpenMP than GNU's, which torch's own builds come with, is left as it is.

Scope: the wish, told before torch is imported. Not here: how many threads there are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_SPINS = "10000"
"""Long enough to meet the next operation of a layer: 0.4 ms where that was measured (by the CPU time of the idle thread
after an operation). By default it is 300,000 turns, 8 ms there, in which the threads that read, check and update get no
core. Between two that were measured on 2 cores (2026-11-23, rounds of `apps/bench/step_worker.py` in turns): with 2,000
and 20,000 the 99th percentile of the loop's lag was 3.8 to 5.0 ms instead of 5.0 to 7.1, and with 20,000 a step without
a store took 0.35 s instead of 0.38 to 0.39."""


def ask_for_short_spins() -> None:
    """Have threads without work sleep soon, unless the environment has a wish of its own.

    By the environment, and before torch is imported, because OpenMP looks there once, when it is loaded.
    """
    os.environ.update(short_spins(os.environ))


def short_spins(environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be added to this environment."""
    has_wish = "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment
    return {} if has_wish else {"GOMP_SPINCOUNT": _SPINS}
