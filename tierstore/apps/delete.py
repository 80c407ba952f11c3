"""What `tierstore delete` shows: the files of a store with their bytes, and what stays.

Scope: words and JSON. Not here: which files those are, and removing them (`store/removal.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierstore.config import format_size
from tierstore.pack.layout import listed
from tierstore.store.names import SNAPSHOTS
from tierstore.store.removal import StoreDirectory


def summary(found: Sequence[StoreDirectory]) -> list[str]:
    """A line for each directory and for what stays in it."""
    lines = []
    for directory in found:
        lines.append(f"{directory.path}: {len(directory.files)} files, {format_size(directory.file_bytes)}")
        if others := [name for name in directory.others if name != SNAPSHOTS]:
            lines.append(f"{directory.path}: no store made {listed(others)}; that stays")
        if SNAPSHOTS in directory.others:
            lines.append(f"{directory.path}: its snapshots stay, each a store of its own in {SNAPSHOTS}/")
    return lines


def as_json(found: Sequence[StoreDirectory]) -> dict[str, Any]:
    """Files with their bytes."""
    return {
        "directories": [
            {"path": str(one.path), "files": one.files, "file_bytes": one.file_bytes, "left": list(one.others)}
            for one in found
        ]
    }
