"""How the GPU tier is shared: weights, the gradients that are being made, and the groups that are updated there.

Scope: room for gradients; the groups that the GPU has room to update; the share of the weights that it has no room for;
    the size of the tier that some weights need; the gradients that stay until a step's last micro-batch.
Not here: CPU memory (`plan/working_set.py`), the choice (`plan/tiers.py`).

[Note: updated on the GPU] A group whose state and gradient fit the GPU tier beside all weights is updated there: its
gradient does not go to the CPU, and its new weights are on the GPU already. The first groups are taken: their gradients
come last, and the next forward needs them first. Their weights live in CPU memory, too: everything except a step looks
for them there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tierstore.plan.placement import Placement, Request
from tierstore.plan.working_set import chunk_sizes

COMPANY_BYTES = 2 * 2**20
"""Gradients of small groups that are handed over together: see [Note: company] in `train/handover.py`. With it the
engine takes 0.71 to 0.83 of the time: `tierstore bench step --heat cost`, 2 cores, three runs each in turns,
2026-11-25."""


def acquired_bytes(request: Request) -> int:
    """The most bytes of weights that are in use together."""
    if request.acquired_bytes is not None:
        return request.acquired_bytes
    return max((need.device_bytes for need in request.groups), default=0)


def gradient_room_bytes(request: Request) -> int:
    """The least room for gradients that are being made, in bytes."""
    if request.gradient_room_bytes is not None:
        return request.gradient_room_bytes
    return max((need.device_bytes for need in request.groups if need.trainable), default=0)


def gradient_bytes(request: Request) -> int:
    """Room for gradients that are being made:

    * for the largest, always;
    * for two of that size, if enough is left for weights: three times those in use together, or all if these are fewer;
      all of them if copies are within one memory and all have room beside one gradient;
    * with a single rank, for several small ones, in a sixteenth of the tier at most: if all weights have room beside
      the above, they must keep it; else enough must be left for them as above.
    """
    largest = gradient_room_bytes(request)
    all_weights = sum(need.device_bytes for need in request.groups)
    all_stay = request.is_one_memory and request.gpu_bytes - largest >= all_weights
    enough = all_weights if all_stay else min(all_weights, 3 * acquired_bytes(request))
    room = 2 * largest if request.gpu_bytes - 2 * largest >= max(enough, acquired_bytes(request)) else largest
    if request.gradient_room_bytes is not None:
        return room  # with several ranks gradients are not handed over together
    trained = sum(need.device_bytes for need in request.groups if need.trainable)
    several = max(room, min(2 * COMPANY_BYTES, request.gpu_bytes // 16, trained))
    weights_bytes = all_weights if request.gpu_bytes - room >= all_weights else max(enough, acquired_bytes(request))
    return several if request.gpu_bytes - several >= weights_bytes else room


def spare_bytes(request: Request, updated: Sequence[int]) -> int:
    """Bytes left on a GPU beside all weights, room for gradients, and the groups that are updated there (`updated`).

    Only gradients can use them, up to those of all groups: more of them may be on their way, and those of micro-batches
    are summed on the GPU.
    """
    if request.is_one_memory or request.gradient_room_bytes is not None:
        return 0
    taken = gradient_bytes(request) + sum(need.device_bytes for need in request.groups)
    if updated:
        taken += _apart_bytes(request) + sum(request.groups[index].update_bytes for index in updated)
    trained = sum(need.device_bytes for need in request.groups if need.trainable)
    return max(0, min(request.gpu_bytes - taken, trained))


def updatable(request: Request) -> Sequence[int]:
    """Groups that the GPU tier can update, see [Note: updated on the GPU]; none if two steps' gradients are kept."""
    if not request.updates_on_gpu or request.gradients == "doubled":
        return ()
    found: list[int] = []
    weights_bytes = sum(need.device_bytes for need in request.groups)
    room = request.gpu_bytes - gradient_bytes(request) - weights_bytes - _apart_bytes(request)
    for index, need in enumerate(request.groups):
        if need.trainable and need.update_bytes <= room:
            found.append(index)
            room -= need.update_bytes
    return found


def _apart_bytes(request: Request) -> int:
    """Weight bytes of the largest possible chunk: room to update a group on the GPU after its weights have left."""
    most = chunk_sizes(request)[0]
    return max((min(need.elements, most) * need.weight_bytes for need in request.groups if need.trainable), default=0)


def fetched_share(request: Request) -> float:
    """The share of all weights that each pass fetches: those without room beside two of the largest group."""
    sizes = [need.device_bytes for need in request.groups]
    room = request.gpu_bytes - gradient_bytes(request)
    if room >= sum(sizes):
        return 0.0
    return 1.0 - max(0, room - 2 * max(sizes)) / sum(sizes)


def tier_bytes(request: Request, weights_bytes: int) -> int:
    """The smallest GPU tier, in one memory, with room for so many bytes of weights beside gradients."""
    gradient = gradient_room_bytes(request)
    if request.gradient_room_bytes is not None:
        return weights_bytes + gradient
    trained = sum(need.device_bytes for need in request.groups if need.trainable)
    company = min(2 * COMPANY_BYTES, weights_bytes // 15, trained)  # a sixteenth of both together
    return weights_bytes + max(gradient, company)


def kept_gradients(placement: Placement) -> Collection[int]:
    """Groups whose gradients of micro-batches are summed on the GPU; see [Note: kept] in `train/backward.py`."""
    sizes = {index: need.device_bytes for index, need in enumerate(placement.groups) if need.trainable}
    room = placement.gpu_gradient_bytes - max(sizes.values(), default=0)
    kept = []
    for index, size in reversed(sizes.items()):  # in the order in which backward makes them
        if size <= room:
            kept.append(index)
            room -= size
    return kept
