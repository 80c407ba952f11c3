"""Measured rates as plain data.

Scope: the table of rates, its JSON form, and the estimator that notices when a rate has changed.
Not here: the measuring (`measure.py`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from tierstore.errors import ConfigError, FormatError


@dataclass(frozen=True, slots=True)
class BandwidthTable:
    """Rates of one machine.

    Attributes:
        read_bytes_per_s: NVMe, reads alone (all directories together).
        write_bytes_per_s: NVMe, writes alone.
        shared_bytes_per_s: NVMe, reads and writes at once, their sum: they share one budget.
        h2d_bytes_per_s: CPU memory to device.
        d2h_bytes_per_s: device to CPU memory.
        memory_bytes_per_s: copies within CPU memory.
        adam_elements_per_s: the CPU optimizer, all its threads.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    shared_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    memory_bytes_per_s: float
    adam_elements_per_s: float

    def __post_init__(self) -> None:
        bad = {name: rate for name, rate in asdict(self).items() if not (rate > 0 and math.isfinite(rate))}
        if bad:
            raise ConfigError(f"rates are positive and finite: {bad}")

    def disk_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Time of this traffic on the disks, reads and writes at once as far as both last.

        How much of the shorter of the two is hidden behind the longer comes from the shared rate, measured with
        as many bytes read as written: nothing on a disk whose ways share one budget, all of it on a full-duplex one.
        """
        read_s, write_s = 1 / self.read_bytes_per_s, 1 / self.write_bytes_per_s
        hidden = min(1.0, (read_s + write_s - 2 / self.shared_bytes_per_s) / min(read_s, write_s))
        reading_s, writing_s = read_bytes * read_s, written_bytes * write_s
        return reading_s + writing_s - hidden * min(reading_s, writing_s)

    def scaled(self, *, disk: float = 1.0, links: float = 1.0, compute: float = 1.0) -> BandwidthTable:
        """A machine whose disks, links to the device, or memory and cores are so many times as fast."""
        factors = {"read": disk, "write": disk, "shared": disk, "h2d": links, "d2h": links}
        return BandwidthTable(
            **{name: rate * factors.get(name.split("_")[0], compute) for name, rate in asdict(self).items()}
        )

    def to_json(self) -> dict[str, float]:
        """A JSON object of the rates by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> BandwidthTable:
        """The table of a JSON object as `to_json` makes it.

        Raises:
            FormatError: not an object of exactly these positive numbers.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            found = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise FormatError(f"a bandwidth table has the rates {sorted(names)}, not {found}")
        if not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in value.values()):
            raise FormatError(f"a rate of the bandwidth table is not a number: {value}")
        try:
            return cls(**{name: float(rate) for name, rate in value.items()})
        except (ConfigError, OverflowError) as error:
            raise FormatError(f"bandwidth table: {error}") from None


class Estimator:
    """A rate from observed transfers, forgetting old ones.

    Bytes and seconds are averaged apart and then divided, so that a small transfer counts little.

    Args:
        weight: of the newest observation, above 0 and at most 1.
        enough: observations before the rate is trusted.
    """

    def __init__(self, weight: float = 0.1, enough: int = 8) -> None:
        if not 0 < weight <= 1 or enough < 1:
            raise ConfigError(f"an estimator needs 0 < weight <= 1 and enough >= 1, not {weight} and {enough}")
        self.weight = weight
        self.enough = enough
        self.observations = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        """Counts one transfer; one without bytes or time says nothing and is left out."""
        if nbytes <= 0 or seconds <= 0:
            return
        self.observations += 1
        # An average over the first few, which turns into the exponential one: no start value to forget.
        weight = max(self.weight, 1 / self.observations)
        self._bytes += weight * (nbytes - self._bytes)
        self._seconds += weight * (seconds - self._seconds)

    @property
    def bytes_per_s(self) -> float | None:
        """The rate, or None before `enough` observations."""
        return self._bytes / self._seconds if self.observations >= self.enough else None

    def drifted(self, reference_bytes_per_s: float, factor: float) -> bool:
        """Whether the rate is known and more than `factor` times above or below the reference."""
        rate = self.bytes_per_s
        return rate is not None and not reference_bytes_per_s / factor <= rate <= reference_bytes_per_s * factor
