"""The memory that homes need: chunk sizes, and pools around the bytes that live in CPU memory.

Scope: resident bytes, and bytes that pass through transient pools on their way.
Not here: which homes are chosen (`plan/tiers.py`), the GPU tier (`plan/gpu_room.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tierstore.config import Tier
from tierstore.plan.placement import BLOCK, Grid, GroupNeed, Pools, Request


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the weights and the gradient of each group live, and how many of its chunks of state are in CPU memory."""

    weights: tuple[Tier, ...]
    gradients: tuple[Tier, ...]
    state: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comfort:
    """How many leases the transient pools hold: trips, gradients and weights on their way; and for the gradients of how
    many whole groups there is room if they are streamed.
    """

    trips: int
    staging: int
    loads: int
    streamed_groups: int = 0


FLOOR = Comfort(trips=1, staging=1, loads=1)
WORKING = Comfort(trips=4, staging=2, loads=2)  # with less, reading, updating and writing take turns


@dataclass(slots=True)
class _Transient:
    """Leases of a transient pool: the largest one, and the sum of all."""

    largest_bytes: int = 0
    total_bytes: int = 0

    def add(self, largest_bytes: int, total_bytes: int) -> None:
        self.largest_bytes = max(self.largest_bytes, largest_bytes)
        self.total_bytes += total_bytes

    def pool_bytes(self, leases: int) -> int:
        """Room for `leases` of the largest, or for everything that ever passes if that is less."""
        return min(leases * self.largest_bytes, self.total_bytes)


class _Share(NamedTuple):
    """What a group adds to the pools: bytes that stay; for each transient pool, its largest lease and their sum."""

    resident: int
    gradients: int
    weights: tuple[int, int]
    spill: tuple[int, int]
    update: tuple[int, int]
    device: tuple[int, int]


def pools_of(request: Request, chunk_elements: int, homes: Homes, comfort: Comfort) -> Pools:
    """Pools that these homes need; transient ones hold `comfort` leases, or all there ever are if those are fewer."""
    resident = gradients = largest_whole = streamed_bytes = 0
    spill, update, weights, device = (_Transient() for _ in range(4))
    for need, *home in zip(request.groups, homes.weights, homes.gradients, homes.state):
        share = _share(need.elements, need.weight_bytes, need.state_bytes, need.trainable, chunk_elements, *home)
        resident += share.resident
        gradients += share.gradients
        spill.add(*share.spill)
        update.add(*share.update)
        weights.add(*share.weights)
        device.add(*share.device)
        largest_whole = max(largest_whole, share.spill[1])
    copies = 2 if request.gradients == "doubled" else 1
    if request.gradients == "streamed":
        whole_bytes = min(spill.total_bytes, comfort.streamed_groups * largest_whole)
        streamed_bytes = max(spill.pool_bytes(comfort.staging), whole_bytes)
    return Pools(
        resident=resident,
        gradients=copies * gradients + streamed_bytes,
        spill=spill.pool_bytes(comfort.staging),
        update=update.pool_bytes(comfort.trips),
        weights=weights.pool_bytes(comfort.loads),
        device=device.pool_bytes(comfort.staging if request.nvme else 1),  # without commits, one after the other
    )


@lru_cache(2**13)  # most groups are alike, and a search for good homes asks for the same again and again
def _share(
    elements: int, weight_bytes: int, state_bytes: int, trainable: bool, chunk_elements: int,
    weights_home: Tier, gradient_home: Tier, resident_chunks: int,
) -> _Share:  # fmt: skip
    need, nothing = GroupNeed("", elements, weight_bytes, state_bytes, trainable), (0, 0)
    grid = Grid(need, chunk_elements)
    weights = grid.largest(need.weight_bytes), grid.total(need.weight_bytes)
    state = grid.largest(need.state_bytes), grid.total(need.state_bytes)
    is_updated_here = need.trainable and gradient_home is not Tier.GPU
    is_spilled = is_updated_here and gradient_home is Tier.NVME
    resident = weights[1] if weights_home is Tier.CPU else 0
    if is_updated_here:
        resident += grid.leading(need.state_bytes, resident_chunks)
    beside_state = (weights_home is Tier.NVME) + is_spilled
    return _Share(
        resident=resident,
        gradients=weights[1] if is_updated_here and not is_spilled else 0,
        weights=nothing if weights_home is Tier.CPU else weights,
        spill=weights if is_spilled else nothing,
        update=_trips(grid, resident_chunks, beside_state) if is_updated_here else nothing,
        device=state if gradient_home is Tier.GPU else nothing,
    )


def _trips(grid: Grid, resident_chunks: int, beside_state: int) -> tuple[int, int]:
    """The largest trip of a group's updates and the sum of all, with `beside_state` copies of weight size in each."""
    need = grid.need
    moved_state = grid.largest(need.state_bytes, skip=resident_chunks)
    with_state = moved_state + beside_state * grid.largest(need.weight_bytes, skip=resident_chunks)
    without_state = beside_state * grid.largest(need.weight_bytes) if resident_chunks else 0
    state_total = grid.total(need.state_bytes) - grid.leading(need.state_bytes, resident_chunks)
    return max(with_state, without_state), state_total + beside_state * grid.total(need.weight_bytes)


def corners(request: Request, chunk_elements: int, on_gpu: Container[int]) -> Iterator[Homes]:
    """Uniform homes of the groups that the GPU does not update, from all in CPU memory to all on disk."""
    groups = request.groups
    is_on_cpu = [need.trainable and index not in on_gpu for index, need in enumerate(groups)]
    whole = tuple(Grid(need, chunk_elements).count if here else 0 for need, here in zip(groups, is_on_cpu))
    places = (Tier.CPU, Tier.NVME) if request.nvme else (Tier.CPU,)
    for gradients, weights, state in itertools.product(places, places, places):
        homes = [gradients if here else Tier.CPU for here in is_on_cpu]
        yield Homes(
            weights=tuple(Tier.CPU if index in on_gpu else weights for index in range(len(groups))),
            gradients=tuple(Tier.GPU if index in on_gpu else home for index, home in enumerate(homes)),
            state=whole if state is Tier.CPU else (0,) * len(groups),
        )


def chunk_sizes(request: Request) -> Sequence[int]:
    """Chunk sizes in elements, largest first; none is larger than the largest group needs."""
    if request.chunk_elements is not None:
        return (request.chunk_elements,)
    largest = chunk_elements_of(request, request.chunk_limit_bytes)
    longest = max((need.elements for need in request.groups), default=0)
    if not request.nvme:  # without read-ahead to even it out, most elements get chunks of one size
        sizes = [need.elements for need in request.groups]
        usual = max(sizes, key=lambda size: size * sizes.count(size), default=0)
        largest = _whole_blocks(-(-usual // -(-usual // largest))) if usual > largest else largest
    return range(min(largest, _whole_blocks(longest)), 0, -BLOCK)


def _whole_blocks(elements: int) -> int:
    return max(1, -(-elements // BLOCK)) * BLOCK


def chunk_elements_of(request: Request, nbytes: int) -> int:
    """The most whole blocks of elements of which no kind takes more than `nbytes`; at least one block."""
    element_bytes = max((max(need.weight_bytes, need.state_bytes) for need in request.groups), default=1)
    return max(1, nbytes // element_bytes // BLOCK) * BLOCK
