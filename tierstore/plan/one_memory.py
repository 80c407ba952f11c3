"""Which part of the memory the GPU tier gets where the processor computes, so that both tiers are one memory.

Scope: `divided`, which makes two budgets of one. Not here: what lives where within them (`plan/tiers.py`).

[Note: the GPU tier's part] Room for all weights, if that leaves a quarter as much to the CPU tier, and no less than a
working set: then no weights are fetched, and none need CPU memory besides. Else room for three neighbours: one that
computes, one that comes, one that leaves. Else the least that is possible. Step times of GPT-2 124M (bf16, speculative,
freed memory kept) with 256 MiB, and with the 312 MiB that hold all weights: 0.965 and 0.959 s in 512 MiB of memory in
all, 0.933 and 0.821 s in 640 MiB, 0.868 and 0.794 s in 768 MiB, with a peak that was 0.13 to 0.24 GiB lower with all
weights. In 352 MiB, where all weights leave 42 MiB, three neighbours took 1.23 s and all weights 1.82 s. Eight equal
blocks of 20 million parameters in 939 MiB: 0.946 s with three of them, 0.872 s with all. GPT-2 1.5B in 4416 MiB: 13.2 s
with the least, 11.9 s with nearly all, although gradients are spilled then. (2 cores, medians of two or three rounds,
in turns except for 1.5B, 2026-11-26.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tierstore.errors import BudgetError
from tierstore.plan import gpu_room
from tierstore.plan.placement import Request
from tierstore.plan.tiers import smallest_budgets, too_small
from tierstore.plan.working_set import WORKING

_LEFT = 0.25


def divided(request: Request) -> Request:
    """The request with a budget for each tier; unchanged if it has both already.

    Raises:
        BudgetError: the memory is too small; the message names the smallest that fits.
    """
    if not request.is_one_memory or request.gpu_bytes:
        return request
    least = smallest_budgets(request)
    if request.cpu_bytes < least.gpu_bytes + least.cpu_bytes:
        short = ("cpu_memory", request.cpu_bytes, least.gpu_bytes + least.cpu_bytes)
        raise BudgetError(too_small(request, [short]))
    for part in _comfortable_parts(request):
        found = with_part(request, part)
        if found.cpu_bytes >= max(_LEFT * part, smallest_budgets(found, WORKING).cpu_bytes):
            return found
    return with_part(request, least.gpu_bytes)


def with_part(request: Request, gpu_bytes: int) -> Request:
    """The request with this part of the memory as the GPU tier."""
    return replace(request, gpu_bytes=gpu_bytes, cpu_bytes=request.cpu_bytes - gpu_bytes)


def _comfortable_parts(request: Request) -> Iterator[int]:
    """Parts to try, the largest first. See [Note: the GPU tier's part]."""
    sizes = [need.device_bytes for need in request.groups]
    neighbours = max((sum(sizes[first : first + 3]) for first in range(len(sizes))), default=0)
    for weights in (sum(sizes), max(neighbours, gpu_room.acquired_bytes(request))):
        yield gpu_room.tier_bytes(request, weights)
