"""How torch, glibc and Python get memory and give it back: settings of the process, made by commands, not the engine.

A libc other than glibc is left as it is.

Scope: huge pages; giving freed memory back while an engine is made, and keeping it for the steps; what the garbage
    collector scans. Not here: the arena (`io/memory.py`), which is mapped separately.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

from tierstore.apps.options import FreedMemory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # malloc.h
_LARGE_BYTES = 2**20
_SMALL_BYTES, _MANY = 2**17, 2**16  # glibc's defaults
_NEVER = -1
_SERVING_BYTES, _SERVING_TOP_BYTES = 2**23, 2**26  # buffers below this are reused; most free memory at the top

KEPT_AS_OURS = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0",
                "MALLOC_TRIM_THRESHOLD_": "9000000000000"}  # fmt: skip
"""For the environment of another program: what an engine gets here whose steps keep all memory that they free. The
threshold is more than any machine has."""


def ask_for_huge_pages() -> None:
    """Have torch allocate its large tensors on huge pages, unless the environment already decides that.

    A step then faults in 35,000 pages instead of 145,000 at preset 124m with its state on the disk and freed memory
    returned, in 0.26 s of system time instead of 0.46 s, and with the same memory at the peak (2 cores, 2026-11-22).
    Set through the environment because torch has no other way, and before the first tensor because it is read once.
    """
    if os.path.exists(_HUGE_PAGES):  # `Path.exists` raises where it may not look
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def prepare_heap() -> None:
    """Have large buffers go back to the system as soon as they are freed, and ask for huge pages.

    By default glibc keeps freed memory once a few buffers were freed. The storages that groups leave behind on a GPU
    tier in CPU memory would then add up, as would the memory that an engine needs only while it is made.
    """
    ask_for_huge_pages()
    # One arena, so that memory freed by one thread serves the others; threads that have another arena by now keep it.
    _set((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE_BYTES), (_MMAP_MAX, _MANY), (_TRIM_THRESHOLD, _SMALL_BYTES))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # give back what was kept until now


@contextlib.contextmanager
def serve_steps(wish: FreedMemory, *, updates_in_memory: bool) -> Iterator[None]:
    """Around the steps of an engine: keep the memory that a step frees for the next one, or give it back.

    Where freed memory is given back, the system clears the same pages again in each step: 440 to 580 MB of them at
    preset 124m, 11 % of a step without a store, and 4 to 12 % of one whose state is on the disk (2 cores, in turns,
    2026-11-22 and 23). Keeping all of it takes 0.06 to 0.4 GiB more at the peak, so it is not the default: the peak
    should be the budgets and what the model computes with. Where an update needs the disk, "auto" therefore keeps only
    freed buffers under 8 MiB: that saves 2 to 10 % of a step, for 0.02 to 0.07 GiB more at the peak, and with 8
    micro-batches a step took 2.5 s instead of 2.9 to 3.2 s, for 0.06 GiB more (preset 124m, 2 cores, 2026-11-25; all
    kept: 2.2 s and 0.29 GiB more).

    Modules, model and engine live as long as the steps, so the garbage collector skips them. During a collection of all
    generations, once in three steps of preset 1.5b, every thread waited for 0.28 s, the disk's threads included
    (2026-11-23).

    Args:
        updates_in_memory: whether an update needs nothing from the disk; "auto" then assumes room, and keeps all.
    """
    if wish is FreedMemory.KEEP or (wish is FreedMemory.AUTO and updates_in_memory):
        _set((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    elif wish is FreedMemory.AUTO:
        _set((_MMAP_THRESHOLD, _SERVING_BYTES), (_TRIM_THRESHOLD, _SERVING_TOP_BYTES))
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        prepare_heap()  # nothing uses what the steps have kept any more


def _set(*values: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another libc has no mallopt
        libc = ctypes.CDLL(None)
        for name, value in values:
            libc.mallopt(name, value)
