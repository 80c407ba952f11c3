"""Where every byte of the training state lives, decided from the budgets of the tiers.

Scope: `place`, and the smallest budgets that it accepts. The record it returns is in `plan/placement.py`.
Not here: the memory that homes need (`plan/working_set.py`), room on the GPU tier (`plan/gpu_room.py`), when bytes
    move (`plan/prefetch.py`).

[Note: homes] CPU memory goes to the bytes that save the most NVMe traffic per step. A gradient in CPU memory is neither
written nor read in any micro-batch (2 per byte and micro-batch; half of that when two steps' gradients are kept, next
to nothing if there is one micro-batch and its gradient is used at once). A weight is not read in forward and in
backward (2 per micro-batch, as far as the GPU tier does not hold it), nor by the update if that reads weights (1). A
state byte is not read (1; it is still written for a commit).

[Note: what streams] State that is not kept in memory is written as soon as it is updated, but not before the commit of
the step before, which writes all kept state; until then it holds memory that other trips wait for. So the state that
streams should be updated late. With updates in backward that is the state of the first groups, except the very first:
it is the last to be updated, and the next forward waits for it. A step of GPT-2 124M in 1536 MiB took 0.385 and 0.411 s
this way, and 0.446 and 0.460 s with the last groups streaming (medians of four runs each, in turns, twice, 2026-11-25);
in 768 to 1280 MiB there was no difference.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tierstore.alignment import ALIGNMENT
from tierstore.config import Tier
from tierstore.errors import BudgetError
from tierstore.plan import gpu_room
from tierstore.plan.placement import Grid, GroupNeed, Kind, Placement, Pools, Request
from tierstore.plan.working_set import FLOOR, WORKING, Comfort, Homes, chunk_elements_of, chunk_sizes, corners, pools_of


@dataclass(frozen=True, slots=True)
class Budgets:
    """Smallest budgets that a request fits in."""

    gpu_bytes: int
    cpu_bytes: int


_BUSY_TRIPS = 3  # per worker: one is being read, one updated, one written
_LITTLE = 32
"""A 32nd of the memory is little."""
_USUAL_CHUNK_BYTES = 16 * 2**20
"""Reaches the full rate of the disk with half the working set of the largest chunk: in 1 GiB a step of GPT-2 124M then
moves 19.0 B per parameter, not 20.7 (two rounds in turns on a disk of 1.5 GB/s, 2026-11-22: 1.71 and 1.72 s, not 1.90
and 2.28 s)."""


def smallest_budgets(request: Request, comfort: Comfort = FLOOR) -> Budgets:
    """The smallest budgets that `place` accepts; the CPU's is for this GPU budget and this comfort."""
    least = chunk_sizes(request)[-1]
    return Budgets(
        gpu_bytes=gpu_room.acquired_bytes(request) + gpu_room.gradient_room_bytes(request),
        cpu_bytes=request.scratch_bytes
        + min(
            pools_of(request, least, homes, comfort).total_bytes
            for on_gpu in (gpu_room.updatable(request), ())
            for homes in corners(request, least, on_gpu)
        ),
    )


def place(request: Request) -> Placement:
    """Homes and pools that fit the budgets and move few bytes (see [Note: homes]).

    Raises:
        BudgetError: a budget is too small; the message names the smallest that fits.
    """
    smallest = smallest_budgets(request)
    budgets = (
        ("gpu_memory", request.gpu_bytes, smallest.gpu_bytes),
        ("cpu_memory", request.cpu_bytes, smallest.cpu_bytes),
    )
    if short := [budget for budget in budgets if budget[1] < budget[2]]:
        raise BudgetError(too_small(request, short))
    request = replace(request, cpu_bytes=request.cpu_bytes - request.scratch_bytes, scratch_bytes=0)
    chunk_elements, homes, comfort = _start(request, _updated_on_gpu(request))
    homes, pools = _Filler(request, chunk_elements, homes, comfort).fill()
    return _placement(request, chunk_elements, homes, pools)


def too_small(request: Request, budgets: Sequence[tuple[str, int, int]]) -> str:
    """The message about budgets that are too small, each with its name, its size and the smallest that fits, which is
    also given in whole MiB, as a user writes it.

    What the request says of groups that are needed together may be less than what the model uses together.
    """
    short = [
        f"{name} of {have} B is too small for this model: the smallest that fits is {need} B ({-(-need // 2**20)}MiB)"
        for name, have, need in budgets
    ]
    is_cpu_short = any(name == "cpu_memory" for name, _, _ in budgets)
    hint = "" if request.nvme or not is_cpu_short else "; with an nvme directory less cpu_memory is needed"
    if any(name == "gpu_memory" for name, _, _ in budgets):
        hint += "; blocks that read weights of other modules need more gpu_memory"
    return "; ".join(short) + hint


def place_uniformly(request: Request, *, weights: Tier, gradients: Tier, state: Tier) -> Placement:
    """Every group at the same homes, with a working set of memory around them, whatever the CPU budget."""
    size = chunk_sizes(request)[0]
    homes = Homes(
        weights=(weights,) * len(request.groups),
        gradients=tuple(gradients if need.trainable else Tier.CPU for need in request.groups),
        state=tuple(Grid(need, size).count if need.trainable and state is Tier.CPU else 0 for need in request.groups),
    )
    return _placement(request, size, homes, pools_of(request, size, homes, WORKING))


def _placement(request: Request, chunk_elements: int, homes: Homes, pools: Pools) -> Placement:
    on_gpu = [index for index, home in enumerate(homes.gradients) if home is Tier.GPU]
    gradient_bytes = gpu_room.gradient_bytes(request) + gpu_room.spare_bytes(request, on_gpu)
    placement = Placement(
        groups=request.groups,
        chunk_elements=chunk_elements,
        gpu_weight_bytes=request.gpu_bytes - gradient_bytes,
        gpu_gradient_bytes=gradient_bytes,
        pools=pools,
        weights_home=homes.weights,
        state_resident_chunks=homes.state,
        gradient_home=homes.gradients,
        gradient_copies=2 if request.gradients == "doubled" else 1,
        streams_gradients=request.gradients == "streamed",
    )
    return replace(placement, gpu_weight_bytes=placement.gpu_weight_bytes - placement.gpu_update_bytes)


def _updated_on_gpu(request: Request) -> Sequence[int]:
    """As many groups as the GPU can update while CPU memory holds their weights and a working set of the rest."""
    found, least = gpu_room.updatable(request), chunk_sizes(request)[-1]

    def is_too_many(count: int, comfort: Comfort) -> bool:
        return all(
            pools_of(request, least, homes, comfort).total_bytes > request.cpu_bytes
            for homes in corners(request, least, found[:count])
        )

    for comfort in (WORKING, FLOOR):
        if not is_too_many(len(found), comfort):
            return found
        if not is_too_many(0, comfort):
            counts = range(len(found) + 1)
            return found[: bisect.bisect_left(counts, True, key=lambda count: is_too_many(count, comfort)) - 1]
    return found  # a request that fits neither way was refused before


def _start(request: Request, on_gpu: Container[int]) -> tuple[int, Homes, Comfort]:
    """Chunk size, homes to improve on, and the comfort that better homes may not reduce.

    Everything is in memory if that fits. Otherwise everything is on disk at first, with the largest chunk whose working
    set takes little of the memory, so that homes get the rest.

    Args:
        on_gpu: groups that are updated on the GPU.
    """
    sizes = chunk_sizes(request)
    for comfort in (WORKING, FLOOR):
        for size in sizes:
            homes = next(corners(request, size, on_gpu))
            if pools_of(request, size, homes, comfort).total_bytes <= request.cpu_bytes:
                return size, homes, comfort
    for size in sizes:
        *_, homes = corners(request, size, on_gpu)
        if _is_modest(request, size, homes):
            return size, homes, WORKING
    least = sizes[-1]
    if pools_of(request, least, homes, WORKING).total_bytes <= request.cpu_bytes:
        return least, homes, WORKING
    fitting = (
        homes
        for homes in corners(request, least, on_gpu)
        if pools_of(request, least, homes, FLOOR).total_bytes <= request.cpu_bytes
    )
    return least, next(fitting), FLOOR


def _is_modest(request: Request, chunk_elements: int, homes: Homes) -> bool:
    """Whether a working set of chunks of this size takes at most a quarter of the memory; for chunks larger than the
    disk needs for its full rate, the trips that keep all workers busy also at most a fifth: larger ones save no
    traffic.
    """
    least = pools_of(request, chunk_elements, homes, WORKING)
    room = request.cpu_bytes - least.resident  # weights of groups that the GPU updates stay in any case
    if least.total_bytes - least.resident > room // 4:
        return False
    busy = replace(WORKING, trips=_BUSY_TRIPS * request.workers)
    is_usual = chunk_elements <= chunk_elements_of(request, _USUAL_CHUNK_BYTES)
    return is_usual or pools_of(request, chunk_elements, homes, busy).total_bytes - least.resident <= room // 5


class _Filler:
    """Spends the CPU budget on better homes and more leases, one accepted step at a time."""

    def __init__(self, request: Request, chunk_elements: int, homes: Homes, comfort: Comfort) -> None:
        self.request = request
        self.chunk_elements = chunk_elements
        self.homes = homes
        self.comfort = comfort
        self.budget_bytes = request.cpu_bytes // ALIGNMENT * ALIGNMENT

    def fill(self) -> tuple[Homes, Pools]:
        """Homes in the order of the traffic they save, a good working set before state, and the rest for read-ahead."""
        self._widen(replace(self.comfort, streamed_groups=groups) for groups in (2, 1))
        self._widen(self._cheap_loads())
        for kind in _by_value(self.request):
            if kind is Kind.WEIGHTS:
                self._promote(self.homes.weights, lambda homes, tiers: replace(homes, weights=tiers))
            elif kind is Kind.GRADIENTS:
                self._promote(self.homes.gradients, lambda homes, tiers: replace(homes, gradients=tiers))
            else:
                self._widen(self._working_sets())
                self._keep_state()
        pools = self._pools(self.homes, self.comfort)
        every_trip = replace(self.comfort, trips=sum(self._chunk_counts()) + 1)
        read_ahead = min(
            self.budget_bytes - pools.total_bytes, self._pools(self.homes, every_trip).update - pools.update
        )
        return self.homes, replace(pools, update=pools.update + read_ahead)

    def _pools(self, homes: Homes, comfort: Comfort) -> Pools:
        return pools_of(self.request, self.chunk_elements, homes, comfort)

    def _spare_bytes(self, homes: Homes, comfort: Comfort) -> int:
        return self.budget_bytes - self._pools(homes, comfort).total_bytes

    def _chunk_counts(self) -> tuple[int, ...]:
        return tuple(
            Grid(need, self.chunk_elements).count if need.trainable and home is not Tier.GPU else 0
            for need, home in zip(self.request.groups, self.homes.gradients)
        )

    def _working_sets(self) -> Iterator[Comfort]:
        """From three trips and two staging chunks per worker down to the comfort at hand."""
        for trips in range(_BUSY_TRIPS * self.request.workers, self.comfort.trips, -1):
            staging = max(self.comfort.staging, -(-trips * 2 // 3))
            yield replace(self.comfort, trips=trips, staging=staging, loads=max(self.comfort.loads, staging))

    def _cheap_loads(self) -> Iterator[Comfort]:
        """Comforts with up to two chunks of weights per worker on their way, as far as that takes little memory.

        With fewer, workers begin to read ahead for updates between two chunks of a group that computing waits for, and
        the wait takes longer (GPT-2 1.5B in 4 GiB, speculative: forward took 3.4 and 2.9 s with two chunks, 2.7 and 2.8
        s with eight, in turns, 2026-11-23).
        """
        before_bytes = self._pools(self.homes, self.comfort).total_bytes
        for loads in range(2 * self.request.workers, self.comfort.loads, -1):
            wider = replace(self.comfort, loads=loads)
            if self._pools(self.homes, wider).total_bytes - before_bytes <= self.budget_bytes // _LITTLE:
                yield wider

    def _widen(self, comforts: Iterable[Comfort]) -> None:
        """Takes the first comfort that fits, if one does."""
        for comfort in comforts:
            if self._spare_bytes(self.homes, comfort) >= 0:
                self.comfort = comfort
                return

    def _promote(self, tiers: tuple[Tier, ...], replaced: Callable[[Homes, tuple[Tier, ...]], Homes]) -> None:
        """Moves one kind to CPU memory: all groups if they fit, since the last one also saves the staging; else as many
        groups of each size as fit, which takes few tries however many groups there are.
        """
        chosen: set[int] = set()

        def with_others(others: Sequence[int]) -> Homes:
            taken = chosen.union(others)
            return replaced(self.homes, tuple(Tier.CPU if i in taken else tier for i, tier in enumerate(tiers)))

        def is_too_much(others: Sequence[int]) -> bool:
            return self._spare_bytes(with_others(others), self.comfort) < 0

        on_nvme = [index for index, tier in enumerate(tiers) if tier is Tier.NVME]
        by_size: dict[GroupNeed, list[int]] = {}
        for index in on_nvme:
            by_size.setdefault(replace(self.request.groups[index], name=""), []).append(index)
        if not is_too_much(on_nvme):
            chosen.update(on_nvme)
        for alike in by_size.values():
            counts = range(len(alike) + 1)
            are_too_many = lambda count, alike=alike: is_too_much(alike[:count])  # noqa: E731
            chosen.update(alike[: bisect.bisect_left(counts, True, lo=1, key=are_too_many) - 1])
        self.homes = with_others(())

    def _keep_state(self) -> None:
        """Keeps leading chunks of state in memory, of one group after the other: a static split, because a cyclic scan
        never hits an LRU cache.
        """
        whole = replace(self.homes, state=self._chunk_counts())
        if self._spare_bytes(whole, self.comfort) >= 0:
            self.homes = whole
            return
        spare_bytes = self._spare_bytes(self.homes, self.comfort)
        kept, counts = list(self.homes.state), self._chunk_counts()
        for index in self._in_order():
            need = self.request.groups[index]
            grid = Grid(need, self.chunk_elements)
            while kept[index] < counts[index]:
                step_bytes = grid.leading(need.state_bytes, kept[index] + 1) - grid.leading(
                    need.state_bytes, kept[index]
                )
                if step_bytes > spare_bytes:
                    break
                spare_bytes -= step_bytes
                kept[index] += 1
        self.homes = replace(self.homes, state=tuple(kept))

    def _in_order(self) -> Iterable[int]:
        """Groups in the order in which their state is kept: one order for updates in forward, one for backward.

        See [Note: what streams].
        """
        groups = range(len(self.request.groups))
        return groups if self.request.read_weights_with_state else (*groups[:1], *reversed(groups[1:]))


def _by_value(request: Request) -> list[Kind]:
    """Kinds by the NVMe traffic that a byte of CPU memory saves per step, most first (see [Note: homes])."""
    passes = request.micro_batches
    fetched = gpu_room.fetched_share(request)
    of_gradients = {"held": 2.0 * passes, "doubled": 1.0 * passes, "streamed": 2.0 * passes if passes > 1 else 0.0}
    saved = {
        Kind.GRADIENTS: of_gradients[request.gradients],
        # Computing waits for weights that are fetched at all, so they are never worth less than state.
        Kind.WEIGHTS: (max(1.0, 2.0 * passes * fetched) + request.read_weights_with_state) if fetched else 0.0,
        Kind.STATE: 1.0,
    }
    return sorted(saved, key=lambda kind: -saved[kind])  # stable: gradients before weights before state
