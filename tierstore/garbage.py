"""What Python's collector of cycles need not look at.

Not here: what it passes over while an engine trains (`apps/heap.py`).
Owner: the process; a rest within a rest ends with the outer one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For a while in which much is made, or looked at, that is no garbage."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around imports of large libraries: what they make, and all that is there then, is never looked at, and stays.

    Else the collector goes through all of it, again and again, in 1.6 to 1.8 of the 10 s that `tierstore train` takes
    for a step of a small model (2 cores, 2026-11-25).
    """
    with no_garbage_collection():
        yield
        gc.freeze()
