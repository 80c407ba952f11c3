"""Where every byte of the training state lives: the record of the decision.

Scope: what is to be placed, the chunk grid, the homes of weights, gradients and state, and the pools of the CPU arena.
Not here: the decision (`plan/tiers.py`), when bytes move (`plan/prefetch.py`), and the arena itself (`io/memory.py`).

[Note: pools] Each pool is a range of its own, in which waiters queue in order. A task that holds memory of one pool
waits only for a pool that comes later in: weights, gradients, spill, update, device. So nothing waits in a circle, and
the floor of each pool is one lease: one chunk's whole trip. Memory above the floor only adds speed. (A trip in places
of gradients, see that note in `store/trip_leases.py`, holds memory before its own gradient does: it is recalled. A
spilled gradient stays in staging only for a trip that has its memory already, and so waits for no memory.)
"""

from __future__ import annotations

import enum
import functools
import itertools
from dataclasses import dataclass
from typing import Literal

from tierstore.alignment import padded
from tierstore.config import Tier
from tierstore.errors import ConfigError

BLOCK = 65536  # elements; chunks and rank boundaries are cut at multiples of it, and norms are summed per block
MAX_CHUNK_BYTES = 32 * 2**20
_MAX_IN_MEMORY_BYTES, _MANY_CHUNKS = 4 * MAX_CHUNK_BYTES, 200  # without NVMe; with it, MAX_CHUNK_BYTES is enough

GradientMode = Literal["held", "streamed", "doubled"]


class Kind(enum.StrEnum):
    """What bytes are for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """One group: `weight_bytes` and `state_bytes` are per element; a gradient has the weights' dtype.

    Attributes:
        elements: how many this rank keeps; other ranks may keep others.
        whole_bytes: bytes of the weights of all ranks, on the device; None: this rank keeps all.
    """

    name: str
    elements: int
    weight_bytes: int
    state_bytes: int
    trainable: bool
    whole_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.elements < 0 or self.weight_bytes <= 0 or self.state_bytes < 0 or (self.whole_bytes or 0) < 0:
            raise ConfigError(f"group {self.name!r} has impossible sizes: {self}")
        if self.state_bytes and not self.trainable:
            raise ConfigError(f"group {self.name!r} is frozen but has {self.state_bytes} B of state per element")

    @property
    def device_bytes(self) -> int:
        """Padded bytes of the weights while the group is on the device."""
        return padded(self.elements * self.weight_bytes if self.whole_bytes is None else self.whole_bytes)

    @property
    def update_bytes(self) -> int:
        """Padded bytes of state and gradient: what an update on the GPU takes there beside the weights."""
        return padded(self.elements * self.state_bytes) + padded(self.elements * self.weight_bytes)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be placed, and the budgets.

    Attributes:
        gradients: "held" keeps every gradient until the global norm is known; "streamed" consumes a group's gradient
            soon after it arrives, and needs its home only while gradients accumulate or the graph is not known;
            "doubled" keeps the gradients of two steps.
        chunk_bytes: upper bound of a chunk of any kind; None is 32 MiB. Without NVMe it is a 200th of all state, from
            32 to 128 MiB, and 128 MiB if the GPU has room for everything: each chunk takes Python's time. A chunk has
            at least one block of elements.
        chunk_elements: chunk size of a store that exists already; then `chunk_bytes` does not count.
        acquired_bytes: largest sum of simultaneously acquired groups; None is the largest group.
        gradient_room_bytes: smallest room for gradients on the device; None is the largest group's.
        read_weights_with_state: the update runs when a group may have left the device: it reads weights that live on
            NVMe, unless all weights stay on the device.
        micro_batches: backward passes per step, each after a forward of its own.
        scratch_bytes: part of the CPU budget that is not placed: memory of a codec.
        updates_on_gpu: state may live on the GPU tier, and be updated there.
        is_one_memory: copies to the GPU tier are within CPU memory. If `gpu_bytes` is 0, the GPU tier's part of
            `cpu_bytes` is still to be found (`plan/one_memory.py`).
    """

    groups: tuple[GroupNeed, ...]
    gpu_bytes: int
    cpu_bytes: int
    nvme: bool
    gradients: GradientMode
    chunk_bytes: int | None = None
    chunk_elements: int | None = None
    acquired_bytes: int | None = None
    gradient_room_bytes: int | None = None
    read_weights_with_state: bool = False
    micro_batches: int = 1
    workers: int = 4
    scratch_bytes: int = 0
    updates_on_gpu: bool = False
    is_one_memory: bool = False

    @property
    def chunk_limit_bytes(self) -> int:
        """Upper bound of a chunk of any kind."""
        most = MAX_CHUNK_BYTES
        if not self.nvme:
            trained = [need for need in self.groups if need.trainable]
            state_bytes = sum(need.elements * need.state_bytes for need in trained)
            most = min(max(most, state_bytes // _MANY_CHUNKS), _MAX_IN_MEMORY_BYTES)
            sizes = [need.device_bytes for need in self.groups]
            on_gpu_bytes = sum(sizes) + sum(need.update_bytes for need in trained)
            spare_bytes = max(sizes, default=0) + _MAX_IN_MEMORY_BYTES  # for gradients, and `gpu_apart_bytes`
            if self.updates_on_gpu and on_gpu_bytes + spare_bytes <= self.gpu_bytes:
                most = _MAX_IN_MEMORY_BYTES
        return min(self.chunk_bytes or most, most)


@dataclass(frozen=True, slots=True)
class Pools:
    """Bytes of the ranges of the CPU arena (see [Note: pools]).

    Attributes:
        resident: weights and state chunks that live in CPU memory; permanent.
        gradients: gradients that live in CPU memory, held for the step, and streamed ones passing through.
        spill: staging to write and accumulate gradient chunks that live on NVMe.
        update: transient; one lease is a chunk's `trip_bytes`. More leases are read-ahead and write-behind.
        weights: transient staging of weight chunks between NVMe and the device.
        device: transient staging of state that lives on the GPU tier, to and from disk.
    """

    resident: int = 0
    gradients: int = 0
    spill: int = 0
    update: int = 0
    weights: int = 0
    device: int = 0

    @property
    def total_bytes(self) -> int:
        return self.resident + self.gradients + self.spill + self.update + self.weights + self.device


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Bytes of one kind on one tier, and the number of groups that have some there."""

    kind: Kind
    tier: Tier
    groups: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Padded sizes of a group's chunks in closed form: all are whole except perhaps the last."""

    need: GroupNeed
    chunk_elements: int

    @property
    def count(self) -> int:
        return -(-self.need.elements // self.chunk_elements)

    def total(self, element_bytes: int) -> int:
        # A whole chunk has a multiple of 65536 elements, so it is whole pages: only the last one is padded.
        return padded(self.need.elements * element_bytes)

    def leading(self, element_bytes: int, chunks: int) -> int:
        return padded(min(chunks * self.chunk_elements, self.need.elements) * element_bytes)

    def largest(self, element_bytes: int, skip: int = 0) -> int:
        """Largest chunk after the first `skip`."""
        left = self.need.elements - skip * self.chunk_elements
        return padded(min(max(left, 0), self.chunk_elements) * element_bytes)


@dataclass(frozen=True)
class Placement:
    """The homes of all bytes; tuples are by group, in the order of `groups`.

    Attributes:
        gpu_weight_bytes: part of the GPU budget for weights on the device.
        gpu_gradient_bytes: part of the GPU budget for gradients on their way to the CPU.
        gradient_home: the GPU if the group is updated there; then its state lives there, too.
        state_resident_chunks: number of leading chunks of each group whose state lives in CPU memory; the rest is on
            NVMe, unless the group is updated on the GPU.
        gradient_copies: gradients kept per parameter (2 under a delayed update).
        streams_gradients: a gradient whose home is NVMe only passes through CPU memory if it is used at once.
    """

    groups: tuple[GroupNeed, ...]
    chunk_elements: int
    gpu_weight_bytes: int
    gpu_gradient_bytes: int
    pools: Pools
    weights_home: tuple[Tier, ...]
    state_resident_chunks: tuple[int, ...]
    gradient_home: tuple[Tier, ...]
    gradient_copies: int = 1
    streams_gradients: bool = False

    def chunk_count(self, group: int) -> int:
        return -(-self.groups[group].elements // self.chunk_elements)

    def chunk(self, group: int, chunk: int) -> tuple[int, int]:
        """Elements `(start, stop)` of one chunk."""
        start = chunk * self.chunk_elements
        stop = min(start + self.chunk_elements, self.groups[group].elements)
        if not 0 <= start < stop:
            raise IndexError(f"group {group} has {self.chunk_count(group)} chunks, not a chunk {chunk}")
        return start, stop

    def chunks(self, group: int) -> tuple[tuple[int, int], ...]:
        """Elements `(start, stop)` of all chunks of a group."""
        return tuple(self.chunk(group, index) for index in range(self.chunk_count(group)))

    def weight_bytes(self, group: int, chunk: int) -> int:
        """Padded bytes of the weights of one chunk."""
        return self._chunk_bytes(group, chunk, self.groups[group].weight_bytes)

    def state_bytes(self, group: int, chunk: int) -> int:
        """Padded bytes of the optimizer state of one chunk; 0 if frozen."""
        return self._chunk_bytes(group, chunk, self.groups[group].state_bytes)

    def gradient_bytes(self, group: int, chunk: int) -> int:
        """Padded bytes of the gradient of one chunk; 0 if frozen."""
        need = self.groups[group]
        return self._chunk_bytes(group, chunk, need.weight_bytes if need.trainable else 0)

    def is_state_resident(self, group: int, chunk: int) -> bool:
        """Whether the state of a chunk lives in CPU memory."""
        return chunk < self.state_resident_chunks[group]

    def is_updated_on_gpu(self, group: int) -> bool:
        """Whether state and gradient of a group live on the GPU tier."""
        return self.gradient_home[group] is Tier.GPU

    @property
    def weights_stay(self) -> bool:
        """Whether the GPU tier has room for all weights, so that none has to leave it."""
        return sum(need.device_bytes for need in self.groups) <= self.gpu_weight_bytes

    @functools.cached_property
    def gpu_update_bytes(self) -> int:
        """Part of the GPU budget for the state and the gradients that live there, and for `gpu_apart_bytes`."""
        updated = [need.update_bytes for group, need in enumerate(self.groups) if self.is_updated_on_gpu(group)]
        return sum(updated) + self.gpu_apart_bytes

    @functools.cached_property
    def gpu_apart_bytes(self) -> int:
        """Room for the weights of the largest chunk that is updated there, for a group that has left the GPU."""
        updated = filter(self.is_updated_on_gpu, range(len(self.groups)))
        chunks = ((self.groups[group], *extent) for group in updated for extent in self.chunks(group))
        return max(((stop - start) * need.weight_bytes for need, start, stop in chunks), default=0)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the GPU tier."""
        return self.gpu_weight_bytes + self.gpu_gradient_bytes + self.gpu_update_bytes

    @property
    def gpu_filled_bytes(self) -> int:
        """The part of the GPU tier that a step of this model fills at least; it may hold more than one gradient."""
        whole = sum(need.device_bytes for need in self.groups)
        gradient = max((need.device_bytes for need in self.groups if need.trainable), default=0)
        return min(self.gpu_weight_bytes, whole) + gradient + self.gpu_update_bytes

    def state_bytes_in_memory(self, group: int) -> int:
        """Padded bytes of state that no update reads from a disk; they are written for a commit only."""
        need = self.groups[group]
        grid = Grid(need, self.chunk_elements)
        if self.is_updated_on_gpu(group):
            return grid.total(need.state_bytes)
        return grid.leading(need.state_bytes, self.state_resident_chunks[group])

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Padded bytes that all steps between two commits write to the disks: a slot of what is trained, and spills."""
        total = 0
        for index, need in enumerate(self.groups):
            if need.trainable:
                spills = self.gradient_copies if self.gradient_home[index] is Tier.NVME else 0
                grid = Grid(need, self.chunk_elements)
                total += grid.total(need.state_bytes) + grid.total(need.weight_bytes) * (1 + spills)
        return total

    def trip_bytes(self, group: int, chunk: int) -> int:
        """The update pool's lease of one chunk: everything that comes from a disk; 0 if frozen or if nothing does."""
        if not self.groups[group].trainable or self.is_updated_on_gpu(group):
            return 0
        state = 0 if self.is_state_resident(group, chunk) else self.state_bytes(group, chunk)
        weights = 0 if self.weights_home[group] is Tier.CPU else self.weight_bytes(group, chunk)
        gradient = 0 if self.gradient_home[group] is Tier.CPU else self.gradient_bytes(group, chunk)
        return state + weights + gradient

    @property
    def updates_in_memory(self) -> bool:
        """Whether the update of a step reads and writes only memory; its changes are written to disk for commits."""
        chunks = ((group, chunk) for group in range(len(self.groups)) for chunk in range(self.chunk_count(group)))
        return not any(self.trip_bytes(*key) for key in chunks)

    def usage(self) -> tuple[UsageRow, ...]:
        """Padded bytes per kind and tier; for the GPU tier its budgets, as far as there are bytes to fill them."""
        everywhere: dict[tuple[Kind, Tier], list[int]] = {}
        for index, need in enumerate(self.groups):
            grid = Grid(need, self.chunk_elements)
            state_bytes, in_memory = grid.total(need.state_bytes), self.state_bytes_in_memory(index)
            gradient_bytes = grid.total(need.weight_bytes) * self.gradient_copies if need.trainable else 0
            for kind, tier, nbytes in (
                (Kind.WEIGHTS, self.weights_home[index], grid.total(need.weight_bytes)),
                (Kind.GRADIENTS, self.gradient_home[index], gradient_bytes),
                (Kind.STATE, Tier.GPU if self.is_updated_on_gpu(index) else Tier.CPU, in_memory),
                (Kind.STATE, Tier.NVME, state_bytes - in_memory),
            ):
                if nbytes:
                    everywhere.setdefault((kind, tier), []).append(nbytes)
        weights = [need.device_bytes for need in self.groups]
        gradients = [nbytes for nbytes, need in zip(weights, self.groups) if need.trainable]
        kept_bytes = sum(everywhere.pop((Kind.GRADIENTS, Tier.GPU), []))
        passing_bytes = min(self.gpu_gradient_bytes, sum(gradients))
        weight_bytes = min(self.gpu_weight_bytes, sum(weights)) + self.gpu_apart_bytes
        rows = [
            UsageRow(Kind.WEIGHTS, Tier.GPU, len(weights), weight_bytes),
            UsageRow(Kind.GRADIENTS, Tier.GPU, len(gradients), passing_bytes + kept_bytes),
        ]
        rows += [UsageRow(kind, tier, len(sizes), sum(sizes)) for (kind, tier), sizes in everywhere.items()]
        order = {key: rank for rank, key in enumerate(itertools.product(Kind, Tier))}
        return tuple(sorted((row for row in rows if row.bytes), key=lambda row: order[row.kind, row.tier]))

    def _chunk_bytes(self, group: int, chunk: int, element_bytes: int) -> int:
        start, stop = self.chunk(group, chunk)
        return padded((stop - start) * element_bytes)
