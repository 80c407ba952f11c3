"""How long a step takes, by phase: the longest of compute and each link's own total, and what nothing hides.

Scope: the bytes of a placement on every link of a node, in forward, backward and update; the phases of a schedule.
Not here: which placements there are (`plan/strategies.py`), and how groups follow one another (`plan/simulate.py`).

Every rank does the same, so a node moves what one rank moves times its GPUs. What is left out, for it is small:
latencies, the traffic between pipeline stages, and an update on the GPU.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from tierstore.config import Tier, UpdateSchedule
from tierstore.plan.costs import StepPattern, efficiency, phase_seconds, step_traffic
from tierstore.plan.machine import Node
from tierstore.plan.memory import Job, Layout, stage_parts
from tierstore.plan.placement import Grid, Kind, Placement


class Link(enum.StrEnum):
    """What a phase may wait for, besides the GPUs' own work."""

    DISKS = "disks"
    H2D = "CPU to GPU"
    D2H = "GPU to CPU"
    OPTIMIZER = "CPU Adam"
    PEERS = "GPU to GPU"


@dataclass(frozen=True, slots=True)
class Work:
    """What a part of a step asks of one node; seconds are those of every GPU.

    Attributes:
        peers_s: collectives that run beside the compute.
        sync_s: what nothing hides: tensor-parallel sums, the bubble of a pipeline.
        updated: elements of the CPU optimizer.
    """

    compute_s: float = 0.0
    peers_s: float = 0.0
    sync_s: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    updated: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step in which everything overlaps."""

    name: str
    compute_s: float
    sync_s: float
    links_s: Mapping[Link, float]

    @property
    def seconds(self) -> float:
        return phase_seconds(self.compute_s, self.links_s.values(), self.sync_s)

    @property
    def efficiency(self) -> float:
        return efficiency(self.compute_s, self.seconds)

    @property
    def bottleneck(self) -> Link | None:
        """The link that computing waits for; None where it waits for none."""
        link = max(self.links_s, key=lambda link: self.links_s[link])
        return link if self.links_s[link] > self.compute_s else None


def phases_of(work: Mapping[str, Work], node: Node, schedule: UpdateSchedule) -> tuple[Phase, ...]:
    """The phases of a step, in its order; the update hides where the schedule puts it.

    Args:
        work: of "forward", "backward" and "update".
    """
    forward, backward, update = work["forward"], work["backward"], work["update"]
    if schedule is UpdateSchedule.STEP:
        return tuple(_phase(name, part, node) for name, part in work.items())
    if schedule is UpdateSchedule.DELAYED:
        return (_phase("forward, backward, update", forward + backward + update, node),)
    if schedule in (UpdateSchedule.BACKWARD, UpdateSchedule.SPECULATIVE):
        return (_phase("forward", forward, node), _phase("backward, update", backward + update, node))
    return (_phase("forward, update", forward + update, node), _phase("backward", backward, node))


def _phase(name: str, work: Work, node: Node) -> Phase:
    rates = node.rates
    return Phase(
        name,
        work.compute_s,
        work.sync_s,
        {
            Link.DISKS: rates.disk_seconds(work.read_bytes, work.written_bytes),
            Link.H2D: work.h2d_bytes / (node.links * rates.h2d_bytes_per_s),
            Link.D2H: work.d2h_bytes / (node.links * rates.d2h_bytes_per_s),
            Link.OPTIMIZER: work.updated / rates.adam_elements_per_s,
            Link.PEERS: work.peers_s,
        },
    )


def step_work(
    job: Job, layout: Layout, node: Node, placement: Placement | None, schedule: UpdateSchedule, commits_per_step: float
) -> dict[str, Work]:
    """What forward, backward and update ask of a node.

    Args:
        placement: of one rank; None: nothing is offloaded.
    """
    parts = {
        "forward": _gpu_work(job, layout, node, 1.0),
        "backward": _gpu_work(job, layout, node, 3.0 if job.checkpointing else 2.0),
        "update": Work(),
    }
    loads = _loads(job, placement, layout)
    if layout.data > 1:
        gathered_s, reduced_s = _collectives_s(job, layout, node, loads)
        parts["forward"] += Work(peers_s=gathered_s[0])
        parts["backward"] += Work(peers_s=gathered_s[1] + reduced_s)
    if placement is not None:
        pattern = step_pattern(job, schedule, commits_per_step, loads)
        for name, work in _offload_work(placement, pattern, loads).items():
            parts[name] += Work(*(layout.gpus * value for value in astuple(work)))
    return parts


def step_pattern(
    job: Job, schedule: UpdateSchedule, commits_per_step: float, loads: Sequence[tuple[int, int]]
) -> StepPattern:
    """How often the disks see what, as the engine's schedules do it."""
    return StepPattern(
        weight_loads=tuple(sum(both) for both in loads),
        commits_per_step=commits_per_step,
        micro_batches=job.accumulate,
        read_weights_with_state=reads_weights_with_state(schedule),
    )


def reads_weights_with_state(schedule: UpdateSchedule) -> bool:
    """Whether a group has left the device by the time of its update, so that its weights are read again."""
    return schedule not in (UpdateSchedule.BACKWARD, UpdateSchedule.SPECULATIVE)


def _collectives_s(
    job: Job, layout: Layout, node: Node, loads: Sequence[tuple[int, int]]
) -> tuple[tuple[float, float], float]:
    """Seconds of gathering weights, in forward and backward, and of reducing gradients.

    A ring of d ranks moves (d - 1) / d of the bytes through each, twice for an all-reduce (Patarasuk and Yuan, 2009).
    """
    weights = [part.parameters * job.bytes.weights for part in stage_parts(job.shape, layout)]
    s_per_byte = (layout.data - 1) / layout.data / _ring_bytes_per_s(layout, node)
    ways = [sum(size * count[way] for size, count in zip(weights, loads)) * s_per_byte for way in (0, 1)]
    reductions = job.accumulate if layout.zero >= 2 else 2
    return ((ways[0], ways[1]) if layout.zero else (0.0, 0.0)), sum(weights) * reductions * s_per_byte


def _gpu_work(job: Job, layout: Layout, node: Node, forwards: float) -> Work:
    """Computing of one pass that costs so many forwards; tensor-parallel sums and the bubble wait for nobody."""
    tokens = job.batch * job.sequence * job.accumulate
    compute_s = forwards * job.shape.forward_flop(tokens, job.sequence) / layout.count / node.flop_per_s
    # Narayanan et al. (2021), section 2.2: (stages - 1) / micro-batches of the ideal time.
    sync_s = compute_s * (layout.pipeline - 1) / job.accumulate
    if layout.tensor > 1:
        # Two all-reduces per block and forward, each moves 2 (t - 1) / t of the activations (Shoeybi et al., 2019).
        activations = tokens / layout.data * job.shape.hidden * job.bytes.weights
        blocks = -(-job.shape.layers // layout.pipeline)
        passes = forwards - 1 if forwards > 1 else 1  # of backward one, and the forward that checkpointing repeats
        moved = passes * 2 * blocks * activations * 2 * (layout.tensor - 1) / layout.tensor
        sync_s += moved / _peer_bytes_per_s(node)
    return Work(compute_s=compute_s, sync_s=sync_s)


def _peer_bytes_per_s(node: Node) -> float:
    """Between GPUs of a node: without a link of their own, through CPU memory."""
    return node.peer_bytes_per_s or node.rates.h2d_bytes_per_s * node.links / node.gpus


def _ring_bytes_per_s(layout: Layout, node: Node) -> float:
    """Of a ring over data-parallel ranks, which several rings of a node share the network with."""
    peer = _peer_bytes_per_s(node)
    if layout.nodes == 1:
        return peer
    return min(peer, (node.network_bytes_per_s or peer) / layout.tensor)


def _loads(job: Job, placement: Placement | None, layout: Layout) -> list[tuple[int, int]]:
    """How often each group comes to the GPU in forward and in backward of a step: once if it stays."""
    count = len(stage_parts(job.shape, layout))
    each_time = (job.accumulate, job.accumulate)
    if placement is None:
        return [each_time if layout.zero == 3 else (1, 0)] * count
    sizes = [need.device_bytes for need in placement.groups]
    room = placement.gpu_weight_bytes
    if sum(sizes) > room:
        room -= 2 * max(sizes)  # the group that computes, and the one that comes
    loads = []
    for size in sizes:
        loads.append((1, 0) if size <= room else each_time)
        room -= min(size, max(room, 0)) if size <= room else 0
    return loads


def _offload_work(placement: Placement, pattern: StepPattern, loads: Sequence[tuple[int, int]]) -> dict[str, Work]:
    """Bytes of one rank on disks and links, by part of the step."""
    traffic = step_traffic(placement, pattern)
    grids = [Grid(need, placement.chunk_elements).total(need.weight_bytes) for need in placement.groups]
    on_nvme = [home is Tier.NVME for home in placement.weights_home]
    fetched = [sum(size * count[way] for size, count in zip(grids, loads)) for way in (0, 1)]
    read = [sum(size * count[way] for size, count, far in zip(grids, loads, on_nvme) if far) for way in (0, 1)]
    gradients = sum(grids) * pattern.micro_batches
    spilled = traffic.read[Kind.GRADIENTS]
    added = spilled * (pattern.micro_batches - 1) / pattern.micro_batches
    return {
        "forward": Work(read_bytes=read[0], h2d_bytes=fetched[0]),
        "backward": Work(
            read_bytes=read[1] + added, written_bytes=traffic.written[Kind.GRADIENTS],
            h2d_bytes=fetched[1], d2h_bytes=gradients,
        ),
        "update": Work(
            read_bytes=traffic.read_bytes - sum(read) - added,
            written_bytes=traffic.written_bytes - traffic.written[Kind.GRADIENTS],
            updated=traffic.trained_parameters,
        ),
    }  # fmt: skip
