"""Reading a table of rates from its file.

Scope: reading the JSON of a `BandwidthTable`. Not here: what is in it (`plan/bandwidth.py`), writing (`apps/probe.py`).
Owner: nothing is kept.
"""

from __future__ import annotations

from pathlib import Path

from tierstore.config import TierConfig
from tierstore.errors import ConfigError, FormatError
from tierstore.pack.strict_json import parse_json
from tierstore.plan.bandwidth import BandwidthTable

_MOST_BYTES = 2**24  # a table has kilobytes
_ADVICE = "make one with: tierstore probe --nvme DIR --json FILE"


def read_table(path: Path) -> BandwidthTable:
    """The table in a file of the format that `probe --json` writes.

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
    """The same configuration, with the table itself in place of its path.

    Raises:
        ConfigError: as `read_table`.
    """
    if not isinstance(tiers.bandwidth, Path):
        return tiers
    return tiers.model_copy(update={"bandwidth": read_table(tiers.bandwidth)})
