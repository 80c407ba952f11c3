"""The machine of a step on paper: measured rates, threads, and how its activities slow each other down.

Scope: speeds of jobs that run at once, for the step model (`plan/step_model.py`).
Not here: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tierstore.errors import ConfigError
from tierstore.plan.bandwidth import Activity, BandwidthTable

_STILL = 1e-2
"""Share of their speed that transfers keep beside a sync. See [Note: syncs] in `plan/bandwidth.py`."""
Slower = Mapping[tuple[Activity, Activity], float]
"""How many times as long the first takes beside the second; 1 for pairs that are missing."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one machine as the engine uses it.

    Attributes:
        io_threads: of all directories together.
        slower: for reads, writes, copies, Adam (on all its threads; checksums count as Adam), the model's arithmetic.
        sync_s: time to make a commit durable, apart from its writes and their sync.
    """

    table: BandwidthTable
    io_threads: int = 4
    update_threads: int = 2
    slower: Slower = field(default_factory=dict)
    sync_s: float = 0.01

    def __post_init__(self) -> None:
        if min(self.io_threads, self.update_threads) < 1:
            raise ConfigError(f"I/O and updates need a thread each, not {self.io_threads} and {self.update_threads}")
        if min(self.slower.values(), default=1.0) < 1 or self.sync_s < 0:
            raise ConfigError(f"slower must be at least 1, and sync_s not negative: {self}")

    def beside_training(self, strength: float, drag: float) -> Machine:
        """The machine as a training step finds it: see `StepRecord`.

        Args:
            strength: how many times as much a model's computing is slowed as matrix products; 0 is not at all.
            drag: how many times as long reads and writes take.
        """
        slowed = {
            pair: 1 + strength * (factor - 1) for pair, factor in self.slower.items() if pair[0] is Activity.MATMUL
        }
        table = self.table if drag == 1 else self.table.scaled(disk=1 / drag)
        return replace(self, table=table, slower={**self.slower, **slowed})

    def speeds(self, running: Mapping[str, int]) -> dict[str, float]:
        """The speed of one job of each kind: compute (1 is alone), Adam in elements/s, the others in bytes/s."""
        reads, writes, copies, loads = (running.get(kind, 0) for kind in ("read", "write", "d2h", "h2d"))
        updating = (running.get("adam", 0) + running.get("checksum", 0)) / self.update_threads
        busy = {
            Activity.MATMUL: running.get("compute", 0), Activity.ADAM: updating, Activity.D2H: copies,
            Activity.H2D: loads, Activity.READ: reads / max(reads + writes, 1),
            Activity.WRITE: writes / max(reads + writes, 1),
        }  # fmt: skip
        per_job = 1 / self.table.disk_seconds(reads, writes) if reads + writes else math.inf
        if running.get("sync"):
            per_job *= _STILL
        update = self._stretch(Activity.ADAM, busy)
        return {
            "read": per_job / self._stretch(Activity.READ, busy),
            "write": per_job / self._stretch(Activity.WRITE, busy),
            "sync": self.table.sync_bytes_per_s or math.inf,
            "compute": 1 / self._stretch(Activity.MATMUL, busy),
            "adam": self.table.adam_elements_per_s / self.update_threads / update,
            "checksum": (self.table.checksum_bytes_per_s or math.inf) / update,
            "d2h": self.table.d2h_bytes_per_s / max(copies, 1) / self._stretch(Activity.D2H, busy),
            "h2d": self.table.h2d_bytes_per_s / max(loads, 1) / self._stretch(Activity.H2D, busy),
        }

    def _stretch(self, activity: Activity, busy: Mapping[Activity, float]) -> float:
        """How many times as long an activity takes beside others, each of which runs at a share of its full rate."""
        both_ways = {Activity.READ, Activity.WRITE}  # their effect on each other is in `disk_seconds`
        apart = both_ways if activity in both_ways else {activity}
        return 1 + sum(
            min(share, 1.0) * (self.slower.get((activity, other), 1.0) - 1)
            for other, share in busy.items()
            if share and other not in apart
        )
