"""How long torch's CPU threads spin when an operation has ended: a setting of the process, made by commands.

Only GNU's OpenMP, which torch's own builds come with, is set; any other is left as it is.

Scope: the setting, made before torch is imported. Not here: how many threads there are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_SPINS = "10000"
"""Long enough to last until the next operation of a layer begins: 0.4 ms on the machine that was measured (CPU time of
the idle thread after an operation). The default is 300,000 spins, 8 ms there, during which the threads that read, check
and update get no core. The value lies between two that were measured on 2 cores (2026-11-23, rounds of
`apps/bench/step_worker.py` in turns): with 2,000 and 20,000 the 99th percentile of the loop's lag was 3.8 to 5.0 ms
instead of 5.0 to 7.1, and with 20,000 a step without a store took 0.35 s instead of 0.38 to 0.39."""


def ask_for_short_spins() -> None:
    """Have idle threads sleep soon, unless the environment already sets this.

    Set through the environment, before torch is imported, because OpenMP reads it once, when it is loaded.
    """
    os.environ.update(short_spins(os.environ))


def short_spins(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to this environment."""
    has_wish = "OMP_WAIT_POLICY" in environment or "GOMP_SPINCOUNT" in environment
    return {} if has_wish else {"GOMP_SPINCOUNT": _SPINS}
