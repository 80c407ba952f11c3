"""Pauses of Python's garbage collector, and objects that it never examines.

Not here: what the collector skips while an engine trains (`apps/heap.py`).
Owner: the process; a nested pause ends with the outer one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the collector while many objects are made, or examined, that are not garbage."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Around imports of large libraries: the collector never examines, or frees, any object that exists at the end.

    Otherwise the collector examines all of them again and again, in 1.6 to 1.8 of the 10 s that `tierstore train` takes
    for a step of a small model (2 cores, 2026-11-25).
    """
    with no_garbage_collection():
        yield
        gc.freeze()
