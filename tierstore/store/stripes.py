"""Which of several disks has which chunk: each as many as it moves in the same time.

Scope: the share of each disk by measured rates, dealing chunks out.
Not here: where on its disk a chunk lies (`slots.py`); disks of an archive (`archive/`).
Owner: none; pure functions, but for the paths that are looked up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore.config import TierConfig
from tierstore.plan.bandwidth import BandwidthTable

MOST_SHARES = 8
"""Of the fastest disk. Disks whose rates differ by less than a sixteenth are alike: they do when measured twice."""


def shares_of(tiers: TierConfig) -> tuple[int, ...]:
    """What each directory gets of a round, by its rate in the table given (reads and writes at once); alike without.

    Several below one that was measured share its rate. What went through the page cache is the rate of memory.
    """
    measured: list[Path] = []
    known: dict[Path, float] = {}
    if isinstance(tiers.bandwidth, BandwidthTable):
        rows = tiers.bandwidth.directories
        known = {Path(os.path.realpath(one.path)): one.both.per_s for one in rows if one.is_direct}
        for directory in map(Path, map(os.path.realpath, tiers.nvme)):
            measured += [path for path in (directory, *directory.parents) if path in known][:1]
    if len(measured) < len(tiers.nvme):  # one was not
        return (1,) * len(tiers.nvme)
    rates = [known[path] / measured.count(path) for path in measured]
    shares = [max(1, round(MOST_SHARES * rate / max(rates))) for rate in rates]
    return tuple(share // math.gcd(*shares) for share in shares)


def recorded_shares(layout: Mapping[str, Any]) -> tuple[int, ...]:
    """Those of a store with this fingerprint."""
    return tuple(layout.get("shares", (1,) * layout["directories"]))


def dealt(count: int, shares: Sequence[int], after: int = 0) -> list[int]:
    """The disk of each of so many chunks: neighbours on different ones, as far as shares allow.

    They are needed at the same time, so each disk reads its part of a group.

    Args:
        after: so many that were dealt before these.
    """
    disks, credits, before = [], [0] * len(shares), after % sum(shares)  # after that many it is as in the beginning
    for _ in range(before + count):
        credits = [credit + share for credit, share in zip(credits, shares)]
        disk = credits.index(max(credits))
        credits[disk] -= sum(shares)
        disks.append(disk)
    return disks[before:]
