"""How long a step takes, by phase: the longest of compute and each link's own total, and the time that nothing hides.

Scope: the bytes of a placement on every link of a node, in forward, backward and update; the phases of a schedule.
Not here: which placements there are (`plan/strategies.py`), and how groups follow one another (`plan/simulate.py`).

Every rank does the same, so a node moves what one rank moves times its GPUs. Left out, because they are small:
latencies, the traffic between pipeline stages, and an update on the GPU (except for new weights on their way to the
CPU).

[Note: what hides] Transfers and updates beside computing are hidden as far as they and the computing do not slow each
other: nearly all on a GPU, nearly nothing on a CPU whose cores compute, copy and update. Slow-downs are measured in
pairs (`BandwidthTable.slowdown`); a pair that was not measured has none.

[Note: commits] Under any schedule, chunks that live in CPU memory are written for a commit in the background, until the
next commit. Where writes wait in a cache, they are synced in the background likewise (see [Note: syncs] in
`plan/bandwidth.py`). Both are done first where the disks are idle, and only the rest makes a step longer. The cores
have no part in syncs.

[Note: reads ahead] An update after backward reads its first chunks during backward, as many as its pool holds: there
they wait for gradients.

[Note: drag] Where the cores that compute also run the I/O threads, reads and writes take longer than measured alone.
`tune` learns how much from steps that it runs; here it is a factor from steps of GPT-2 124M and 1.5B on two cores.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

from tierstore.config import Tier, UpdateSchedule
from tierstore.plan.bandwidth import Activity
from tierstore.plan.costs import StepPattern, beside_s, efficiency, phase_seconds, step_traffic
from tierstore.plan.gpu_room import kept_gradients
from tierstore.plan.layers import LayerKind, LayerWork, computing_s
from tierstore.plan.machine import Node
from tierstore.plan.memory import Job, Layout, stage_parts
from tierstore.plan.placement import Grid, Kind, Placement
from tierstore.plan.schedules import updates_in_backward

DRAG_BESIDE_COMPUTING = 1.1
"""See [Note: drag]: factors of 1.02 to 1.23, in the median 1.05, make 7 forecasts of 2026-12-01 right. Older
forecasts were made with rates of Adam in the caches, and with all reads of an update in forward: they wanted more."""


class Link(enum.StrEnum):
    """What a phase may wait for, besides the GPUs' own work."""

    DISKS = "disks"
    H2D = "CPU to GPU"
    D2H = "GPU to CPU"
    OPTIMIZER = "CPU Adam"
    PEERS = "GPU to GPU"
    BUBBLE = "bubble"
    SUMS = "sums"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a part of a step on one node; seconds are those of every GPU.

    Attributes:
        peers_s: collectives that run beside the compute.
        bubble_s, sums_s: time that nothing hides: the bubble of a pipeline, tensor-parallel sums.
        optimizer_s: of the CPU optimizer, and of norms, if the ranks of a node updated one after another.
    """

    compute_s: float = 0.0
    peers_s: float = 0.0
    bubble_s: float = 0.0
    sums_s: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    optimizer_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other))))

    def __sub__(self, other: Work) -> Work:
        return Work(*(max(0.0, mine - theirs) for mine, theirs in zip(astuple(self), astuple(other))))


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step in which everything overlaps.

    Attributes:
        waits_s: time that nothing hides, by its cause.
        slower: two factors of each link: how many times as long computing takes beside the link's work, and the link's
            work beside computing.
        syncing_s: the part of the disks' seconds in which they sync; syncs slow no core, and no core slows them.
    """

    name: str
    compute_s: float
    waits_s: Mapping[Link, float]
    links_s: Mapping[Link, float]
    slower: Mapping[Link, tuple[float, float]] = field(default_factory=dict)
    syncing_s: float = 0.0

    @property
    def sync_s(self) -> float:
        """Time that nothing hides."""
        return sum(self.waits_s.values())

    @property
    def seconds(self) -> float:
        """See [Note: what hides]."""
        busy_s = self.compute_s
        for link in self.slower:
            busy_s = self._beside(busy_s, link)
        return phase_seconds(busy_s, self.links_s.values(), self.sync_s)

    @property
    def efficiency(self) -> float:
        return efficiency(self.compute_s, self.seconds)

    @property
    def losses_s(self) -> Mapping[Link, float]:
        """Seconds without computing, by cause; of the links, only the one that alone would cost most."""
        alone_s = {link: self._beside(self.compute_s, link) for link in self.links_s}
        link = max(alone_s, key=lambda link: (alone_s[link], self.links_s[link]))
        return {**self.waits_s, link: max(0.0, self.seconds - self.sync_s - self.compute_s)}

    def _beside(self, busy_s: float, link: Link) -> float:
        """`beside_s` of the cores, busy for `busy_s`, and a link, whose syncs go on beside both."""
        syncing_s = self.syncing_s if link is Link.DISKS else 0.0
        both_s = beside_s(busy_s, self.links_s[link] - syncing_s, self.slower.get(link, (1.0, 1.0)))
        return max(both_s, self.links_s[link])


def phases_of(
    work: Mapping[str, Work], node: Node, schedule: UpdateSchedule, single: Mapping[str, Work] | None = None,
    most_synced_bytes: float = math.inf,
) -> tuple[Phase, ...]:  # fmt: skip
    """The phases of a step, in order; the schedule decides in which one the update is; a commit hides in all of them.

    With several micro-batches only one pass hides the update: the first forward, in which a layer waits for its own
    update at its first visit; or the last backward, which completes the gradients. The other passes are a phase of
    their own.

    Args:
        work: of "forward", "backward" and "update", and of a "commit" if there is one.
        single: likewise, of a step with one micro-batch; None if this step has only one.
        most_synced_bytes: that a step has synced, if each commit syncs a whole slot.
    """
    parts = _parts(work, schedule, single)
    phases = tuple(_phase(name, part, node) for name, part in parts.items())
    committed_bytes = work.get("commit", Work()).written_bytes
    written_bytes = committed_bytes + sum(part.written_bytes for part in parts.values())
    if not written_bytes:
        return phases
    synced_bytes = min(written_bytes, most_synced_bytes)
    # See [Note: commits].
    idle_s = [max(0.0, phase.seconds - phase.sync_s - phase.links_s[Link.DISKS]) for phase in phases]
    if not any(idle_s):
        idle_s = [1.0] * len(phases)
    shares = [one_s / sum(idle_s) for one_s in idle_s]
    return tuple(
        _phase(name, part + Work(written_bytes=share * committed_bytes), node, share * synced_bytes)
        for (name, part), share in zip(parts.items(), shares)
    )


def _parts(work: Mapping[str, Work], schedule: UpdateSchedule, single: Mapping[str, Work] | None) -> dict[str, Work]:
    """The work of each phase by its name, in the order of the step; see `phases_of`."""
    forward, backward, update = work["forward"], work["backward"], work["update"]
    if schedule is UpdateSchedule.STEP:
        return {"forward": forward, "backward": backward, "update": update}
    if schedule is UpdateSchedule.DELAYED:
        return {"forward, backward, update": forward + backward + update}
    if updates_in_backward(schedule):
        if single is None:
            return {"forward": forward, "backward, update": backward + update}
        last = single["backward"]
        return {"forward": forward, "other backwards": backward - last, "last backward, update": last + update}
    if single is None:
        return {"forward, update": forward + update, "backward": backward}
    first = single["forward"]
    return {"first forward, update": first + update, "other forwards": forward - first, "backward": backward}


_ACTIVITIES = {Link.OPTIMIZER: Activity.ADAM, Link.H2D: Activity.H2D, Link.D2H: Activity.D2H}


def _phase(name: str, work: Work, node: Node, synced_bytes: float = 0.0) -> Phase:
    rates = node.rates
    slower = {
        link: (rates.slowdown(Activity.MATMUL, activity), rates.slowdown(activity, Activity.MATMUL))
        for link, activity in _ACTIVITIES.items()
    }
    way = Activity.WRITE if work.written_bytes > work.read_bytes else Activity.READ
    slower[Link.DISKS] = rates.slowdown(Activity.MATMUL, way), rates.slowdown(way, Activity.MATMUL)
    drag = DRAG_BESIDE_COMPUTING if node.computes_on_cpu else 1.0
    syncing_s = drag * rates.sync_seconds(synced_bytes)
    return Phase(
        name,
        work.compute_s,
        {Link.BUBBLE: work.bubble_s, Link.SUMS: work.sums_s},
        {
            Link.DISKS: drag * rates.disk_seconds(work.read_bytes, work.written_bytes) + syncing_s,
            Link.H2D: work.h2d_bytes / (node.links * rates.h2d_bytes_per_s),
            Link.D2H: work.d2h_bytes / (node.links * rates.d2h_bytes_per_s),
            Link.OPTIMIZER: work.optimizer_s,
            Link.PEERS: work.peers_s,
        },
        slower,
        syncing_s,
    )


def step_work(
    job: Job, layout: Layout, node: Node, placement: Placement | None, schedule: UpdateSchedule, commits_per_step: float
) -> dict[str, Work]:
    """The work of forward, backward, update and commit on a node.

    Args:
        placement: of one rank; None: nothing is offloaded.
    """
    forward_s, backward_s = compute_s(job, layout, node)
    parts = {
        "forward": _gpu_work(job, layout, node, 1, forward_s),
        "backward": _gpu_work(job, layout, node, 2 if job.checkpointing else 1, backward_s),
        "update": Work(),
        "commit": Work(),
    }
    if placement is None and node.computes_on_cpu:  # updates on a GPU are not counted: they are short
        elements = layout.gpus * sum(part.parameters for part in stage_parts(job.shape, layout)) / layout.shares(1)
        parts["update"] = Work(optimizer_s=elements / _adam_elements_per_s(job, node))
    loads = _loads(job, placement, layout)
    if layout.data > 1:
        gathered_s, reduced_s = _collectives_s(job, layout, node, loads)
        parts["forward"] += Work(peers_s=gathered_s[0])
        parts["backward"] += Work(peers_s=gathered_s[1] + reduced_s)
    if placement is not None:
        kept = kept_gradients(placement) if layout.data == 1 else ()
        pattern = step_pattern(job, schedule, commits_per_step, loads, kept)
        for name, work in _offload_work(placement, pattern, loads, _adam_elements_per_s(job, node)).items():
            parts[name] += Work(*(layout.gpus * value for value in astuple(work)))
        if not updates_in_backward(schedule):  # see [Note: reads ahead]
            ahead = Work(read_bytes=min(parts["update"].read_bytes, layout.gpus * placement.pools.update))
            parts["backward"] += ahead
            parts["update"] -= ahead
        if (norms := node.rates.norm_elements_per_s) is not None:  # of gradients that arrive in CPU memory
            parts["backward"] += Work(optimizer_s=layout.gpus * _elements_on_cpu(placement) / norms)
    return parts


def _adam_elements_per_s(job: Job, node: Node) -> float:
    """Rate of the CPU optimizer, for the dtype of the weights if that was measured."""
    measured = node.rates.adam_fp32_elements_per_s if job.dtype == "fp32" else None
    return measured or node.rates.adam_elements_per_s


def step_pattern(
    job: Job,
    schedule: UpdateSchedule,
    commits_per_step: float,
    loads: Sequence[tuple[int, int]],
    kept: Collection[int],
) -> StepPattern:
    """How often weights, gradients and commits go through the disks under the engine's schedules."""
    return StepPattern(
        weight_loads=tuple(sum(both) if _comes_and_goes(both) else 0 for both in loads),
        commits_per_step=commits_per_step,
        micro_batches=job.accumulate,
        kept_gradients=kept,
        read_weights_with_state=not updates_in_backward(schedule),
    )


def _collectives_s(
    job: Job, layout: Layout, node: Node, loads: Sequence[tuple[int, int]]
) -> tuple[tuple[float, float], float]:
    """Seconds of gathering weights, in forward and backward, and of reducing gradients.

    A ring of d ranks moves (d - 1) / d of the bytes through each rank, twice for an all-reduce (Patarasuk and Yuan,
    2009).
    """
    weights = [part.parameters * job.bytes.weights for part in stage_parts(job.shape, layout)]
    s_per_byte = (layout.data - 1) / layout.data / _ring_bytes_per_s(layout, node)
    ways = [sum(size * count[way] for size, count in zip(weights, loads)) * s_per_byte for way in (0, 1)]
    reductions = job.accumulate if layout.zero >= 2 else 2
    return ((ways[0], ways[1]) if layout.zero else (0.0, 0.0)), sum(weights) * reductions * s_per_byte


def compute_s(job: Job, layout: Layout, node: Node) -> tuple[float, float]:
    """Seconds of computing in all forwards and all backwards of a step, on every GPU.

    From timed layers of the machine if there are any in this dtype; else by flop/s, and backward takes twice as long.
    Ranks of a node without a GPU share its cores, which compute for one after the other.
    """
    tokens = job.batch * job.sequence
    timed = computing_s(node.rates.layers, job.dtype, _layer_work(job, tokens / layout.data))
    sharing = layout.gpus if node.computes_on_cpu else 1
    if timed is not None:
        times = sharing * job.accumulate / layout.tensor / layout.pipeline
        forward_s, backward_s = (times * seconds for seconds in timed)
    else:
        flop = job.shape.forward_flop(tokens * job.accumulate, job.sequence)
        forward_s = sharing * flop / layout.count / node.flop_per_s
        backward_s = 2 * forward_s
    return forward_s, backward_s + forward_s * job.checkpointing


def _layer_work(job: Job, tokens: float) -> dict[LayerKind, LayerWork]:
    """The work of so many tokens in the whole model; embedding, norms and the vocabulary product are one head."""
    shape = job.shape
    blocks = sum(part.parameters for part in shape.parts if part.is_block)
    around = shape.vocabulary * shape.hidden
    head_flop = 2.0 * tokens * around
    block_flop = shape.forward_flop(tokens, job.sequence) - head_flop
    return {
        LayerKind.BLOCK: LayerWork(shape.layers, blocks, tokens * shape.hidden * shape.layers, block_flop),
        LayerKind.HEAD: LayerWork(1.0, around, tokens * shape.vocabulary, head_flop),
    }


def _gpu_work(job: Job, layout: Layout, node: Node, passes: int, compute_s: float) -> Work:
    """The computing of so many passes of one kind, and what nothing hides: tensor-parallel sums and the bubble."""
    tokens = job.batch * job.sequence * job.accumulate
    # Narayanan et al. (2021), section 2.2: (stages - 1) / micro-batches of the ideal time.
    bubble_s = compute_s * (layout.pipeline - 1) / job.accumulate
    sums_s = 0.0
    if layout.tensor > 1:
        # Two all-reduces per block and pass, each moves 2 (t - 1) / t of the activations (Shoeybi et al., 2019).
        activations = tokens / layout.data * job.shape.hidden * job.bytes.weights
        blocks = -(-job.shape.layers // layout.pipeline)
        moved = passes * 2 * blocks * activations * 2 * (layout.tensor - 1) / layout.tensor
        sums_s = moved / _peer_bytes_per_s(node)
    return Work(compute_s=compute_s, bubble_s=bubble_s, sums_s=sums_s)


def _peer_bytes_per_s(node: Node) -> float:
    """Rate between GPUs of a node; without a link of their own, through CPU memory."""
    return node.peer_bytes_per_s or node.rates.h2d_bytes_per_s * node.links / node.gpus


def _ring_bytes_per_s(layout: Layout, node: Node) -> float:
    """Rate of a ring over data-parallel ranks; the rings of a node share its network."""
    peer = _peer_bytes_per_s(node)
    if layout.nodes == 1:
        return peer
    return min(peer, (node.network_bytes_per_s or peer) / layout.tensor)


def _loads(job: Job, placement: Placement | None, layout: Layout) -> list[tuple[int, int]]:
    """How often each group comes to the GPU in forward and backward: once if it stays, never if it is updated there."""
    count = len(stage_parts(job.shape, layout))
    each_time = (job.accumulate, job.accumulate)
    if placement is None:
        return [each_time if layout.zero == 3 else (1, 0)] * count
    sizes = [need.device_bytes for need in placement.groups]
    room = placement.gpu_weight_bytes
    if sum(sizes) > room:
        room -= 2 * max(sizes)  # the group that computes, and the next one
    loads = []
    for group, size in enumerate(sizes):
        stays = (0, 0) if placement.is_updated_on_gpu(group) else (1, 0)
        loads.append(stays if size <= room else each_time)
        room -= size if size <= room else 0
    return loads


def _comes_and_goes(loads: tuple[int, int]) -> bool:
    """Whether a group is fetched from its home; one that stays gets its new weights from the update."""
    return loads[1] > 0


def _elements_on_cpu(placement: Placement) -> int:
    """Number of elements that the CPU updates."""
    groups = enumerate(placement.groups)
    return sum(need.elements for group, need in groups if need.trainable and not placement.is_updated_on_gpu(group))


def _offload_work(
    placement: Placement, pattern: StepPattern, loads: Sequence[tuple[int, int]], adam_elements_per_s: float
) -> dict[str, Work]:
    """Bytes of one rank on disks and links, by part of the step, and seconds of its update."""
    traffic = step_traffic(placement, replace(pattern, commits_per_step=0.0))
    committed = step_traffic(placement, pattern).written_bytes - traffic.written_bytes
    grids = [Grid(need, placement.chunk_elements).total(need.weight_bytes) for need in placement.groups]
    on_nvme = [home is Tier.NVME for home in placement.weights_home]
    fetched = [sum(size * count[way] for size, count in zip(grids, loads)) for way in (0, 1)]
    coming = [size if far and _comes_and_goes(count) else 0 for size, count, far in zip(grids, loads, on_nvme)]
    read = [sum(size * count[way] for size, count in zip(coming, loads)) for way in (0, 1)]
    on_gpu = [size if placement.is_updated_on_gpu(group) else 0 for group, size in enumerate(grids)]
    homes = placement.gradient_home
    made = [size if need.trainable else 0 for size, need in zip(grids, placement.groups)]
    arrivals = [pattern.arrivals(group) for group in range(len(made))]
    gradients = sum(size * count for size, count, home in zip(made, arrivals, homes) if home is not Tier.GPU)
    added = sum(size * (count - 1) for size, count, home in zip(made, arrivals, homes) if home is Tier.NVME)
    return {
        "forward": Work(read_bytes=read[0], h2d_bytes=fetched[0]),
        "backward": Work(
            read_bytes=read[1] + added, written_bytes=traffic.written[Kind.GRADIENTS],
            h2d_bytes=fetched[1], d2h_bytes=gradients,
        ),
        "update": Work(
            read_bytes=traffic.read_bytes - sum(read) - added,
            written_bytes=traffic.written_bytes - traffic.written[Kind.GRADIENTS], d2h_bytes=sum(on_gpu),
            optimizer_s=_elements_on_cpu(placement) / adam_elements_per_s,
        ),
        "commit": Work(written_bytes=committed),
    }  # fmt: skip
