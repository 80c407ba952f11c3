"""What the planner is asked for: the groups, the budgets of the tiers, and the part of these that is not to be placed.

Scope: from options to a `Request`.
Not here: the decision (`plan/tiers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierstore.alignment import padded
from tierstore.config import TierConfig, UpdateSchedule
from tierstore.plan.placement import BLOCK, MAX_CHUNK_BYTES, GroupNeed, Request
from tierstore.plan.schedules import gradient_mode, updates_in_backward
from tierstore.plan.tiers import smallest_budgets


def request_for(
    groups: Sequence[GroupNeed],
    tiers: TierConfig,
    schedule: UpdateSchedule,
    chunk_elements: int | None,
    acquired_bytes: int | None = None,
) -> Request:
    """The request of a run without codecs.

    Args:
        chunk_elements: the grid of the store that is resumed; None for a new one.
        acquired_bytes: see `Request`.
    """
    return Request(
        groups=tuple(groups),
        gpu_bytes=0 if tiers.is_one_memory else tiers.gpu_budget_bytes,
        cpu_bytes=tiers.cpu_memory,
        nvme=bool(tiers.nvme),
        gradients=gradient_mode(schedule),
        chunk_bytes=tiers.chunk_bytes,
        chunk_elements=chunk_elements,
        acquired_bytes=acquired_bytes,
        read_weights_with_state=not updates_in_backward(schedule),
        micro_batches=tiers.accumulation_steps,
        workers=tiers.io_threads,
        updates_on_gpu=tiers.may_update_on_gpu,
        is_one_memory=tiers.is_one_memory,
    )


def with_scratch(request: Request, tiers: TierConfig) -> Request:
    """The request with scratch memory for codecs, where at least one kind of chunks has one."""
    scratch_bytes = _scratch_bytes(request, tiers.io_threads * len(tiers.nvme))
    limit_bytes = min(tiers.chunk_bytes or MAX_CHUNK_BYTES, scratch_bytes)
    return replace(request, scratch_bytes=scratch_bytes, chunk_bytes=limit_bytes)


def _scratch_bytes(request: Request, threads: int) -> int:
    """Memory in which chunks are encoded: an eighth of the budget, less if that is not to spare or the threads need
    less, but at least the smallest chunk.
    """
    block = request.chunk_elements or BLOCK
    least = max(padded(min(n.elements, block) * max(n.weight_bytes, n.state_bytes)) for n in request.groups)
    smallest = smallest_budgets(request)
    spare = request.cpu_bytes - smallest.cpu_bytes - (smallest.gpu_bytes if request.is_one_memory else 0)
    return max(least, min(request.cpu_bytes // 8, spare, threads * MAX_CHUNK_BYTES))
