"""How soon a thread that has little to do gets a core among those that compute: a wish told to Linux.

Scope: the calling thread's slice of time. Elsewhere, and before Linux 6.12, nothing happens.
Owner: nothing is kept; the kernel forgets it with the thread.
"""

from __future__ import annotations

import ctypes
import platform
import sys

_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr and sched_getattr; older glibcs have neither
_USUAL_POLICY = 0  # SCHED_OTHER
_RESET_ON_FORK = 1  # threads that this one starts have the usual slice
_SHORTEST_NS = 100_000


class Attributes(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2); `runtime` is the slice in ns, 0 for the usual one."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def ask_for_short_slices() -> None:
    """Have the calling thread run soon when it wakes, for a tenth of a millisecond at a time.

    A thread that wakes waits for the end of the slice of the one that computes, usually 3 ms, unless its own is
    shorter. The 99th percentile of the loop's lag was 7.1 ms without and 4.5 ms with this (GPT-2 124M, state on the
    disk, 2 cores, medians of six rounds in turns, 2026-11-23), and a step as long.
    """
    found = attributes()
    if found is None or found.policy != _USUAL_POLICY or found.nice < 0:
        return  # of a better niceness, the threads that this one starts would be reset, too
    found.runtime = _SHORTEST_NS
    found.flags |= _RESET_ON_FORK
    _call(0, 0, ctypes.byref(found), 0)  # where it is refused, nothing is lost


def attributes() -> Attributes | None:
    """What the kernel says of the calling thread; None where it says nothing."""
    found = Attributes()
    return found if _call(1, 0, ctypes.byref(found), ctypes.sizeof(found), 0) == 0 else None


def _call(which: int, *arguments: object) -> int:
    if sys.platform != "linux" or sys.maxsize < 2**32 or platform.machine() not in _NUMBERS:
        return -1
    return int(ctypes.CDLL(None).syscall(_NUMBERS[platform.machine()][which], *arguments))
