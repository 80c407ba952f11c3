"""A table of rates as a file.

Scope: reading and writing the JSON of a `BandwidthTable`. Not here: what is in it (`plan/bandwidth.py`).
Owner: nothing is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tierstore.config import TierConfig
from tierstore.errors import ConfigError, FormatError, StorageError
from tierstore.pack.strict_json import parse_json
from tierstore.plan.bandwidth import REPORT, BandwidthTable
from tierstore.whole_file import whole_file

_MOST_BYTES = 2**24  # a table has kilobytes
_ADVICE = "make one with: tierstore probe --nvme DIR --json FILE"


def read_table(path: Path) -> BandwidthTable:
    """The table that `probe --json` wrote, or that anyone else did.

    Raises:
        ConfigError: the file cannot be read, or is not a table.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the bandwidth table {path}: {error.strerror}; {_ADVICE}") from error
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES} B: that is no bandwidth table")
    try:
        return BandwidthTable.from_json(parse_json(text, str(path)))
    except FormatError as error:
        what = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ConfigError(f"{what}; {_ADVICE}") from None


def with_rates(tiers: TierConfig) -> TierConfig:
    """The same with the table itself where a file of one is given.

    Raises:
        ConfigError: as `read_table`.
    """
    if not isinstance(tiers.bandwidth, Path):
        return tiers
    return tiers.model_copy(update={"bandwidth": read_table(tiers.bandwidth)})


def write_table(path: Path, table: BandwidthTable, report: Any = None) -> None:
    """Writes a table, and a report that `read_table` does not look at: all of it, or what was there before stays.

    Raises:
        StorageError: the file cannot be written.
    """
    value = table.to_json() | ({} if report is None else {REPORT: report})
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    try:
        with whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise StorageError(f"cannot write --json {path}: {error.strerror}") from error
