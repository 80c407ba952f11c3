"""Which of several disks has which chunk: each disk gets as many as it can move in the same time.

Scope: the share of each disk by measured rates, dealing chunks out to disks.
Not here: where on its disk a chunk lies (`slots.py`); disks of an archive (`archive/`).
Owner: none; pure functions, except that paths are resolved.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.config import TierConfig
from tierstore.plan.bandwidth import BandwidthTable

MOST_SHARES = 8
"""Shares of the fastest disk. Rates that differ by less than a sixteenth count as equal: two measurements of one
disk may differ as much."""


def shares_of(tiers: TierConfig) -> tuple[int, ...]:
    """The share of the chunks that each directory gets, by its rate in the given table (reads and writes at once).

    Directories below one that was measured share its rate. A rate measured through the page cache is one of memory, and
    does not count. If a directory has no rate, all shares are 1.
    """
    known = _known_rates(tiers)
    measured = [path for directory in tiers.nvme if (path := _measured_at(directory, known)) is not None]
    if len(measured) < len(tiers.nvme):  # one of them was not measured
        return (1,) * len(tiers.nvme)
    rates = [known[path] / measured.count(path) for path in measured]
    shares = [max(1, round(MOST_SHARES * rate / max(rates))) for rate in rates]
    return tuple(share // math.gcd(*shares) for share in shares)


def why_equal(tiers: TierConfig) -> str | None:
    """A warning if rates of directories were given, and several directories share equally because one has none."""
    known = _known_rates(tiers)
    without = [directory for directory in tiers.nvme if _measured_at(directory, known) is None]
    if not known or not without or len(tiers.nvme) == 1:
        return None
    return (
        f"the given rates have none of {without[0]} or of a directory above it, so all directories get equal parts: "
        "measure them by tierstore probe, with a --nvme DIR for each"
    )


def _known_rates(tiers: TierConfig) -> dict[Path, float]:
    rows = tiers.bandwidth.directories if isinstance(tiers.bandwidth, BandwidthTable) else ()
    return {Path(os.path.realpath(one.path)): one.both.per_s for one in rows if one.is_direct}


def _measured_at(directory: Path, known: Container[Path]) -> Path | None:
    """The directory that was measured for this one: itself, or the nearest above it."""
    own = Path(os.path.realpath(directory))
    return next((path for path in (own, *own.parents) if path in known), None)


def recorded_shares(layout: Mapping[str, Any]) -> tuple[int, ...]:
    """The shares of a store with this fingerprint."""
    return tuple(layout.get("shares", (1,) * layout["directories"]))


def dealt(count: int, shares: Sequence[int], after: int = 0) -> list[int]:
    """The disk of each of `count` chunks: neighbours are on different disks, as far as shares allow.

    Neighbours are needed at the same time, so that each disk reads its part of a group.

    Args:
        after: how many chunks were dealt before these.
    """
    disks, credits, before = [], [0] * len(shares), after % sum(shares)  # after that many, the order repeats
    for _ in range(before + count):
        credits = [credit + share for credit, share in zip(credits, shares)]
        disk = credits.index(max(credits))
        credits[disk] -= sum(shares)
        disks.append(disk)
    return disks[before:]
