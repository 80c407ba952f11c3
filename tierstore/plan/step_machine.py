"""What a step runs on: measured rates, threads, and how its parts slow each other down.

Scope: speeds of what runs at once, for the step model (`plan/step_model.py`).
Not here: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.plan.bandwidth import BandwidthTable


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one machine as the engine uses it.

    Attributes:
        io_threads: of all directories together.
        compute_beside_update: how many times as long forward and backward take while all update threads run, or as
            many that compute checksums.
        update_beside_compute: how many times as long the update takes then. Both 1 where the device is no CPU.
        sync_s: of making a commit durable, apart from its writes.
    """

    table: BandwidthTable
    io_threads: int = 4
    update_threads: int = 2
    compute_beside_update: float = 1.0
    update_beside_compute: float = 1.0
    sync_s: float = 0.01

    def __post_init__(self) -> None:
        if min(self.io_threads, self.update_threads) < 1:
            raise ConfigError(f"I/O and updates need a thread each, not {self.io_threads} and {self.update_threads}")
        if min(self.compute_beside_update, self.update_beside_compute) < 1 or self.sync_s < 0:
            raise ConfigError(f"what runs beside something else does not get faster, and time is not negative: {self}")

    def disk_speeds(self, running: Mapping[str, int]) -> dict[str, float]:
        """Bytes per second of each read and of each write, of so many that run."""
        per_job = 1 / self.table.disk_seconds(running.get("read", 0), running.get("write", 0))
        return {"read": per_job, "write": per_job}

    def core_speeds(self, running: Mapping[str, int]) -> dict[str, float]:
        """Speed of compute (1 is alone), Adam in elements/s, copies and checksums in bytes/s, of each that runs."""
        threads = running.get("adam", 0) + running.get("checksum", 0)
        busy, computing = min(threads / self.update_threads, 1.0), running.get("compute", 0)
        slow = self.update_beside_compute if computing else 1.0
        return {
            "compute": 1 / (1 + (self.compute_beside_update - 1) * busy),
            "adam": self.table.adam_elements_per_s / self.update_threads / slow,
            "copy": self.table.d2h_bytes_per_s / slow,
            "checksum": (self.table.checksum_bytes_per_s or math.inf) / slow,
        }
