"""This rank's part of every group, and what the planner is asked to place.

Scope: cutting groups on the grid of the store, new or resumed; the device memory that reducing with other ranks takes.
Not here: a request of one rank (`budgets.py`), the decision (`plan/tiers.py`), what a part is (`partition.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierstore.config import TierConfig, UpdateSchedule
from tierstore.plan.one_memory import divided, with_part
from tierstore.plan.placement import Request
from tierstore.plan.tiers import place
from tierstore.store.layout import GroupSpec
from tierstore.train.budgets import request_for, with_scratch
from tierstore.train.groups import ModelGroups
from tierstore.train.partition import Partition
from tierstore.train.reduction import Buckets


def cut_groups(
    groups: ModelGroups,
    tiers: TierConfig,
    schedule: UpdateSchedule,
    grid: int | None,
    partition: Partition,
    *,
    is_coded: bool,
) -> Request:
    """Cut every group to the part that this rank keeps; returns the request for the planner.

    Args:
        grid: elements of a chunk of the store that is resumed; None for a new store.
        is_coded: some kind of chunks has a codec.
    """

    def request(specs: Sequence[GroupSpec]) -> Request:
        needs = [spec.need() for spec in specs]
        asked = request_for(needs, tiers, schedule, grid, groups.acquired_bytes(needs))
        if partition.is_shared:
            asked = _with_buckets(asked, specs, groups.tied, partition)
        return with_scratch(asked, tiers) if is_coded else asked  # last: everything else comes first

    whole = [group.spec for group in groups.groups]
    if grid is None and not partition.keeps_all:
        limit = partition.chunk_limit(whole)
        asked = request([partition.cut(spec, limit) for spec in whole])
        planned = partition.all_succeed("the size of chunks", lambda: place(divided(asked)).chunk_elements)
        grid = min(limit, *planned)
    if grid is not None:
        for group in groups.groups:
            group.spec = partition.cut(group.spec, grid)
    asked = request([group.spec for group in groups.groups])
    if not asked.is_one_memory:
        return asked
    parts = partition.all_succeed("the GPU tier's part of the memory", lambda: divided(asked).gpu_bytes)
    return with_part(asked, min(parts))  # the same at all ranks: what is fetched when depends on it


def _with_buckets(request: Request, specs: Sequence[GroupSpec], tied: set[int], partition: Partition) -> Request:
    buckets = Buckets(partition)
    sizes = {spec.name: buckets.device_bytes(spec) for spec in specs if spec.trainable}
    # The gradient of a tied weight is complete only when backward ends: its bucket is held beside all others.
    held = {specs[group].name for group in tied}
    gradients = sum(sizes[name] for name in held & sizes.keys())
    gradients += max((size for name, size in sizes.items() if name not in held), default=0)
    everything = sum(spec.need().device_bytes for spec in specs)
    acquired = request.acquired_bytes if partition.stage == 3 else everything
    return replace(request, gradient_room_bytes=gradients, acquired_bytes=acquired, updates_on_gpu=False)
