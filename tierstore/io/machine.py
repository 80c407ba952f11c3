"""The machine that this process runs on: its identity, and how much CPU memory processes may have there.

Scope: the memory of the machine, the limits of control groups, and whether these suffice; who shares its cores.
Not here: budgets (`plan/`, `train/budgets.py`), what takes memory (`memory.py`), rates (`measure/`).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tierstore.config import format_size
from tierstore.cores import own_cores
from tierstore.errors import BudgetError

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_USE = {
    "memory.max": ("memory.current", "active_file", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_active_file", "total_inactive_file"),
}
"""By the file of a control group's limit: the file of what it uses, and what `memory.stat` calls its page cache."""


class MemoryClaim(NamedTuple):
    """CPU memory that a process is about to take.

    Attributes:
        limits: the limits that apply to it, in bytes, by name as in `memory_limits`.
        given_back_bytes: memory that the process has now and gives back meanwhile.
    """

    limits: Mapping[str, int]
    nbytes: int
    given_back_bytes: int


def boot_id() -> str:
    """A text that identifies the running machine."""
    try:
        return _BOOT.read_text().strip()
    except OSError:  # a sandbox without it
        return socket.gethostname()


def ranks_on_these_cores(exchange: Callable[[str, Any], list[Any]]) -> int:
    """How many ranks, this one included, may run on a core on which this one may run.

    Args:
        exchange: gives the values of all ranks.
    """
    here, cores = boot_id(), own_cores()
    told = exchange("the cores of the machine", (here, cores))
    return sum(machine == here and not cores.isdisjoint(theirs) for machine, theirs in told)


def memory_limits() -> dict[str, int]:
    """Memory limits in bytes: first that of the machine, then those of this process's control groups. The names are the
    same in all processes."""
    return {boot_id(): psutil.virtual_memory().total, **_of_groups(lambda file, limit_bytes: limit_bytes)}


def _of_groups(figure: Callable[[Path, int], int]) -> dict[str, int]:
    """A figure of each limited control group of this process, from the file of its limit and the limit in bytes."""
    figures = {}
    for file in _group_limits():
        with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
            figures[f"{boot_id()} {file.parent.stat().st_ino}"] = figure(file, int(file.read_text()))
    return figures


def _free_bytes(file: Path, limit_bytes: int) -> int:
    """What a control group does not use, or uses for the page cache, which it gives up first."""
    counts = dict(line.split() for line in (file.parent / "memory.stat").read_text().splitlines())
    used, *cached = _USE[file.name]
    return limit_bytes - int((file.parent / used).read_text()) + sum(int(counts.get(name, 0)) for name in cached)


def _group_limits() -> Iterator[Path]:
    with contextlib.suppress(OSError):  # no control groups
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if not controllers:
                root, name = _GROUPS, "memory.max"
            elif "memory" in controllers.split(","):  # version 1
                root, name = _GROUPS / "memory", "memory.limit_in_bytes"
            else:
                continue
            group = root / own.lstrip("/")
            yield from (one / name for one in (group, *group.parents) if one.is_relative_to(root))


def claim_memory(nbytes: int, given_back_bytes: int = 0) -> MemoryClaim:
    """The memory claim of this process."""
    return MemoryClaim(memory_limits(), nbytes, given_back_bytes)


def refuse_impossible(claims: Sequence[MemoryClaim], what: str) -> None:
    """Refuse claims that exceed the limit of a machine or of a control group.

    Args:
        claims: those of all processes that take memory together; the result is the same in each of them.
        what: what takes the memory, for the message.

    Raises:
        BudgetError: the message names the limit.
    """
    limits = {name: limit_bytes for claim in claims for name, limit_bytes in claim.limits.items()}
    for name, limit_bytes in limits.items():
        wanted_bytes = sum(claim.nbytes for claim in claims if name in claim.limits)
        if wanted_bytes > limit_bytes:
            raise BudgetError(
                f"{what} takes {format_size(wanted_bytes)} of CPU memory, and the machine, or its control group, "
                f"allows {format_size(limit_bytes)} for all processes: give smaller budgets"
            )


def shortage(claims: Sequence[MemoryClaim]) -> str | None:
    """A warning if this machine, or a control group of this process, has no room now for the claims of its processes;
    otherwise None."""
    free = {boot_id(): psutil.virtual_memory().available, **_of_groups(_free_bytes)}
    for name, free_bytes in free.items():
        wanted_bytes = sum(claim.nbytes - claim.given_back_bytes for claim in claims if name in claim.limits)
        if wanted_bytes > free_bytes:
            return (
                f"{format_size(wanted_bytes)} of CPU memory will be taken, and {format_size(free_bytes)} are free now: "
                "the system ends a process when there is no more; give a smaller budget, or end what else takes memory"
            )
    return None
