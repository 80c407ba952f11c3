"""The alignment that O_DIRECT requires of addresses, offsets and lengths.

Scope: one number, and rounding up to its multiples. Owner: none; it imports nothing.
"""

from __future__ import annotations

ALIGNMENT = 4096


def padded(nbytes: int) -> int:
    """The smallest multiple of `ALIGNMENT` that holds `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
