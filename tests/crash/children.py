"""Forked processes that train: blows that fall on them, and how they end. None outlives the loop.

Scope: a fork per rank, signals from outside, exit codes. Not here: what they do, and what is compared (`kills.py`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from crash.claims import Broken

from tierstore.errors import RankLost

LIMIT_S = 120.0
DONE, FAILED, LOST = 0, 1, 3
"""Exit codes; LOST: another rank was lost, which is said in a sentence."""


@dataclass(frozen=True)
class Blow:
    """What happens to a run.

    Attributes:
        ranks: the ranks that it hits.
        at_call: number of the system call inside which they end by SIGKILL; None: they get `signal` after `after_s`.
    """

    ranks: tuple[int, ...]
    at_call: int | None = None
    after_s: float = 0.0
    signal: signal.Signals = signal.SIGKILL


class Marks:
    """Where each process is, in memory shared with the parent: numbers that survive the process."""

    def __init__(self, ranks: int) -> None:
        self._shared = mmap.mmap(-1, 2 * ranks)

    def clear(self) -> None:
        self._shared[:] = bytes(len(self._shared))

    def set(self, rank: int, phase: int, call: int = 0) -> None:
        """Numbers from 1 on; with phase 0 the phase stays."""
        self._shared[2 * rank] = phase or self._shared[2 * rank]
        self._shared[2 * rank + 1] = call

    def get(self, rank: int) -> tuple[int, int]:
        """Phase and call."""
        return self._shared[2 * rank], self._shared[2 * rank + 1]


def run_children(work: Callable[[int], None], ranks: int, folder: Path, blow: Blow | None = None) -> list[int]:
    """Fork a process per rank that does `work(rank)`, and deal a blow.

    Returns:
        By rank: an exit code, or minus the signal that ended it.

    Raises:
        Broken: one failed, with its traceback; or did not end.
    """
    children: list[int] = []
    try:
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # until work allows them
        try:
            children.extend(_fork(work, rank, folder) for rank in range(ranks))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        if blow is not None and blow.at_call is None and not _have_ended(children, blow.after_s):
            for rank in blow.ranks:
                os.kill(children[rank], blow.signal)
        if not _have_ended(children, LIMIT_S):
            raise Broken(f"a run did not end within {LIMIT_S} s of {blow}")
    finally:
        statuses = [_reap(child) for child in children]
    for rank, status in enumerate(statuses):
        if status == FAILED or (status < 0 and blow is None):
            raise Broken(f"rank {rank} ended by {status}:\n{(folder / f'stderr.{rank}').read_text()[-4000:]}")
    return statuses


def _fork(work: Callable[[int], None], rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # parent or child, whichever is first
            os.setpgid(child, child)
        return child
    status = FAILED
    try:
        os.setpgid(0, 0)  # Ctrl-C is for the parent
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background the parent ignores it
        os.dup2(os.open(folder / f"stderr.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        work(rank)
        status = DONE
    except RankLost:
        status = LOST
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else FAILED
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _have_ended(children: Sequence[int], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    for child in children:
        descriptor = os.pidfd_open(child)
        try:
            if not select.select([descriptor], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                return False
        finally:
            os.close(descriptor)
    return True


def _reap(child: int) -> int:
    """Kill a child and all that it has started; how the child ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the child is not reaped yet, so the number is still its own
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
