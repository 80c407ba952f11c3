"""Measured rates as plain data.

Scope: the table of rates, its JSON form, and the estimate of a rate from observed transfers.
Not here: the measuring (`measure/`), files (`io/table_file.py`).
"""

from __future__ import annotations

import enum
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tierstore.config import Codec
from tierstore.errors import ConfigError, FormatError
from tierstore.plan.cost_model import CostModel
from tierstore.plan.layers import TimedLayer

VERSION = 4
"""Version of the JSON form: 2 added rates of norms, timed layers, and the cores of a collective, 3 the rate of syncs,
4 sizes. A newer form has all fields of the older ones."""
_READ_VERSIONS = (1, 2, 3, VERSION)
_OF_DISKS = ("read_bytes_per_s", "write_bytes_per_s", "shared_bytes_per_s", "sync_bytes_per_s")
_AT_ONCE = 10
"""A sync that is this many times as fast as writes takes negligible time."""
REPORT = "report"
"""A key that the writer of a table may add; it is ignored when the table is read."""


class Activity(enum.Enum):
    """What keeps a part of the machine busy."""

    READ = "read"
    WRITE = "write"
    H2D = "h2d"
    D2H = "d2h"
    MATMUL = "matmul"
    ADAM = "adam"


PAIRS = tuple(itertools.permutations(Activity, 2))
"""Every ordered pair of different activities."""


class _Part:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    __slots__ = ()


def middle(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and the quartiles; of fewer than four samples, the smallest and the largest instead."""
    if len(samples) < 4:
        return statistics.median(samples), min(samples), max(samples)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return median, low, high


@dataclass(frozen=True, slots=True)
class Rate(_Part):
    """A rate that was measured several times: the median and the quartiles, per second."""

    per_s: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _check_positive(self, ("per_s", "low", "high"))

    @classmethod
    def of(cls, samples: Sequence[float]) -> Rate:
        """The rate of these samples, at least one."""
        return cls(*middle(samples))

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a share of the median."""
        return (self.high - self.low) / self.per_s


@dataclass(frozen=True, slots=True)
class DirectoryRates(_Part):
    """One directory at its best block size and number of threads.

    Attributes:
        both: the sum of reads and writes at once, as many bytes each way.
        is_direct: measured with O_DIRECT; else through the page cache, and then the rates are those of memory.
    """

    path: str
    read: Rate
    write: Rate
    both: Rate
    read_block_bytes: int
    read_threads: int
    write_block_bytes: int
    write_threads: int
    is_direct: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, ("read_block_bytes", "read_threads", "write_block_bytes", "write_threads"))


@dataclass(frozen=True, slots=True)
class CodecRates(_Part):
    """One codec on one thread.

    Attributes:
        data: the kind of data that was encoded.
        ratio: bytes before encoding to bytes after.
    """

    codec: Codec
    data: str
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_positive(self, ("ratio", "encode_bytes_per_s", "decode_bytes_per_s"))


@dataclass(frozen=True, slots=True)
class Slowdown(_Part):
    """How many times as long one activity takes while another goes on."""

    activity: Activity
    beside: Activity
    factor: float

    def __post_init__(self) -> None:
        _check_positive(self, ("factor",))


@dataclass(frozen=True, slots=True)
class NamedRate(_Part):
    """The spread of a rate of the table, under the name of its field."""

    name: str
    rate: Rate


@dataclass(frozen=True, slots=True)
class Sizes(_Part):
    """Memory and disk space of the measured machine, in bytes.

    Attributes:
        cpu_bytes: its memory.
        nvme_bytes: free space in all directories together.
        gpu_bytes: memory of the GPU; None where none was measured.
    """

    cpu_bytes: float
    nvme_bytes: float
    gpu_bytes: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self, ("cpu_bytes", "gpu_bytes"))
        if not 0 <= self.nvme_bytes < math.inf:
            raise ConfigError(f"nvme_bytes is 0 or more, and finite, not {self.nvme_bytes}")


@dataclass(frozen=True, slots=True)
class BandwidthTable(_Part):
    """Rates of one machine. The first seven are always there; the others only if they were measured.

    [Note: syncs] Writes may end in a volatile cache: the DRAM of a drive, or the host memory behind a virtual disk. The
    sync at the end of each commit moves the cached bytes to the medium, and the disk may do nothing else meanwhile (a
    virtual disk that read at 3.6 and took writes at 3.9 GB/s synced them at 1.3 GB/s, and read at 0.04 GB/s during the
    sync; 2026-11-25). Between two commits all steps write the same slot, so that a sync moves no more than one slot,
    however often it was written. A sync that takes next to no time is not counted: then there is no such cache.

    Attributes:
        read_bytes_per_s: NVMe, reads alone (all directories together).
        write_bytes_per_s: NVMe, writes alone.
        shared_bytes_per_s: NVMe, the sum of reads and writes at once.
        h2d_bytes_per_s: CPU memory (pinned) to device.
        d2h_bytes_per_s: device to CPU memory (pinned).
        memory_bytes_per_s: copies within CPU memory.
        adam_elements_per_s: the CPU optimizer, all its threads, bf16 weights.
        adam_fp32_elements_per_s: likewise, fp32 weights.
        h2d_pageable_bytes_per_s, d2h_pageable_bytes_per_s: from and to memory that is not pinned.
        checksum_bytes_per_s: on one thread.
        norm_elements_per_s: sums of squares of bf16 gradients, all threads of the CPU optimizer.
        matmul_flop_per_s: of the device, bf16 (on a CPU fp32).
        sync_bytes_per_s: NVMe, bytes that were written and are then synced, per second of the sync. See [Note: syncs].
        collective: cost of a collective between the ranks that measured it.
        layers: timed layers of a model, computed on the cores of this machine; none if a GPU computes.
        spreads: of the rates above.
        sizes: of the machine.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    shared_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    memory_bytes_per_s: float
    adam_elements_per_s: float
    adam_fp32_elements_per_s: float | None = None
    h2d_pageable_bytes_per_s: float | None = None
    d2h_pageable_bytes_per_s: float | None = None
    checksum_bytes_per_s: float | None = None
    norm_elements_per_s: float | None = None
    matmul_flop_per_s: float | None = None
    sync_bytes_per_s: float | None = None
    directories: tuple[DirectoryRates, ...] = ()
    codecs: tuple[CodecRates, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    collective: CostModel | None = None
    spreads: tuple[NamedRate, ...] = ()
    layers: tuple[TimedLayer, ...] = ()
    sizes: Sizes | None = None

    def __post_init__(self) -> None:
        _check_positive(self, RATE_NAMES)

    def disk_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Time of this traffic on the disks; reads and writes run at once as long as both last.

        The shared rate, measured with as many bytes read as written, tells how much of the shorter time is hidden
        behind the longer: nothing if reads and writes share one budget, all of it on a full-duplex disk.
        """
        read_s, write_s = 1 / self.read_bytes_per_s, 1 / self.write_bytes_per_s
        hidden = min(1.0, (read_s + write_s - 2 / self.shared_bytes_per_s) / min(read_s, write_s))
        reading_s, writing_s = read_bytes * read_s, written_bytes * write_s
        return reading_s + writing_s - hidden * min(reading_s, writing_s)

    def durable_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """`disk_seconds`, plus `sync_seconds` of all written bytes; a byte that is written twice counts twice.

        See [Note: syncs].
        """
        return self.disk_seconds(read_bytes, written_bytes) + self.sync_seconds(written_bytes)

    def sync_seconds(self, written_bytes: float) -> float:
        """Time to sync these bytes if the disk caches writes, else 0. See [Note: syncs]."""
        return written_bytes / (self.sync_bytes_per_s or math.inf) if self.caches_writes else 0.0

    @property
    def caches_writes(self) -> bool:
        """Whether a sync takes more than a negligible part of the time of its writes. See [Note: syncs]."""
        return self.sync_bytes_per_s is not None and self.sync_bytes_per_s < _AT_ONCE * self.write_bytes_per_s

    def slowdown(self, activity: Activity, beside: Activity) -> float:
        """How many times as long `activity` takes while `beside` goes on, at least 1; 1 if that was not measured."""
        return max([1.0, *(s.factor for s in self.slowdowns if (s.activity, s.beside) == (activity, beside))])

    def scaled(self, *, disk: float) -> BandwidthTable:
        """The rates of the same machine with disks `disk` times as fast.

        Rates of single directories and codecs, and spreads, are left out.
        """
        scaled = {name: rate * disk for name in _OF_DISKS if (rate := getattr(self, name)) is not None}
        return replace(self, **scaled, directories=(), codecs=(), spreads=())

    def to_json(self) -> dict[str, Any]:
        """A JSON object: the version of the form, and each measured field by name."""
        return {"version": VERSION, **_ADAPTER.dump_python(self, mode="json", exclude_defaults=True)}

    @classmethod
    def from_json(cls, value: object) -> BandwidthTable:
        """The table of a JSON object as `to_json` makes it, or of the seven rates alone.

        Raises:
            FormatError: any other value; a rate that is missing or not a positive number.
        """
        if not isinstance(value, dict):
            raise FormatError(f"a bandwidth table is a JSON object, not {type(value).__name__}")
        version = value.get("version", VERSION)
        if version not in _READ_VERSIONS or isinstance(version, bool):
            known = ", ".join(map(str, _READ_VERSIONS))
            raise FormatError(f"a bandwidth table of version {version!r}; this tierstore reads versions {known}")
        rates = {name: part for name, part in value.items() if name not in ("version", REPORT)}
        try:  # as text: accepts only what JSON can hold
            return _ADAPTER.validate_json(json.dumps(rates), strict=True)
        except ValidationError as error:
            raise FormatError(f"bandwidth table: {first_wrong(error)}") from None
        except (ConfigError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"bandwidth table: {error}") from None


RATE_NAMES = tuple(field.name for field in fields(BandwidthTable) if field.name.endswith("_per_s"))
"""Fields of a table that are rates."""

_ADAPTER = TypeAdapter(BandwidthTable)


def _check_positive(owner: object, names: Sequence[str]) -> None:
    rates = {name: getattr(owner, name) for name in names}
    bad = {name: rate for name, rate in rates.items() if rate is not None and not 0 < rate <= sys.float_info.max}
    if bad:
        raise ConfigError(f"figures are positive and finite: {bad}")


def first_wrong(error: ValidationError) -> str:
    """The first error that was found, and where."""
    found = error.errors(include_url=False)[0]
    where = ".".join(map(str, found["loc"]))
    what = str(found.get("ctx", {}).get("error", found["msg"])).replace("keyword argument", "name")
    return f"{where}: {what}" if where else what


class Estimator:
    """A rate estimated from observed transfers; old ones are forgotten.

    Bytes and seconds are averaged separately and then divided, so that a small transfer counts little.

    Args:
        weight: of the newest observation, above 0 and at most 1.
    """

    def __init__(self, weight: float) -> None:
        if not 0 < weight <= 1:
            raise ConfigError(f"an estimator needs a weight above 0 and at most 1, not {weight}")
        self.weight = weight
        self.observations = 0
        self._bytes = 0.0
        self._seconds = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        """Counts one transfer; a transfer without bytes or time is ignored."""
        if nbytes <= 0 or seconds <= 0:
            return
        self.observations += 1
        # A plain mean of the first few, which turns into an exponential one: so there is no start value to forget.
        weight = max(self.weight, 1 / self.observations)
        self._bytes += weight * (nbytes - self._bytes)
        self._seconds += weight * (seconds - self._seconds)

    @property
    def bytes_per_s(self) -> float | None:
        """The rate, or None before the first observation."""
        return self._bytes / self._seconds if self.observations else None
