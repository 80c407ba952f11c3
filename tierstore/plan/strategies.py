"""Every way to spread a training run over the tiers: which of them fit, how fast they are, which is the simplest.

Scope: strategies from nothing offloaded to all on NVMe and the engine's own split; bytes per tier, step time, wear.
Not here: what would help (`plan/advice.py`), how a report looks (`apps/plan.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tierstore.config import Tier, UpdateSchedule, enough, format_decimal
from tierstore.errors import BudgetError
from tierstore.plan.costs import efficiency
from tierstore.plan.machine import Node
from tierstore.plan.memory import Job, Layout, activation_bytes, gpu_bytes, group_needs
from tierstore.plan.one_memory import divided
from tierstore.plan.placement import GroupNeed, Kind, Placement, Request
from tierstore.plan.schedules import gradient_mode, settled, updates_in_backward, usual
from tierstore.plan.step_time import Link, Phase, Work, phases_of, step_work
from tierstore.plan.tiers import place, place_uniformly, smallest_budgets

USABLE = 0.9
"""Share of a memory that a run may take: the rest is for the system, the allocator and the framework."""
_ROUNDED = 1 + 1e-12  # so that rounding down gives back the same whole bytes
_SLOTS = 2  # of a store: the committed generation, and the one that is being written
_DAY_S = 86400.0
_WHERE = {Tier.GPU: "each GPU", Tier.CPU: "CPU memory of a node", Tier.NVME: "the disks of a node"}


class Strategy(enum.Enum):
    """Where weights, gradients and state live, from the simplest on."""

    NOTHING = "nothing offloaded"
    STATE_CPU = "state on CPU"
    ALL_CPU = "state, weights on CPU"
    STATE_NVME = "state on NVMe"
    STATE_NVME_WEIGHTS_CPU = "state on NVMe, weights on CPU"
    WEIGHTS_NVME = "state, weights on NVMe"
    ALL_NVME = "all on NVMe"
    ENGINE = "split by tierstore"


@dataclass(frozen=True, slots=True)
class _Homes:
    stays: bool  # weights on the GPU for the whole step
    weights: Tier
    gradients: Tier
    state: Tier


_HOMES = {
    Strategy.STATE_CPU: _Homes(True, Tier.CPU, Tier.CPU, Tier.CPU),
    Strategy.ALL_CPU: _Homes(False, Tier.CPU, Tier.CPU, Tier.CPU),
    Strategy.STATE_NVME: _Homes(True, Tier.CPU, Tier.CPU, Tier.NVME),
    Strategy.STATE_NVME_WEIGHTS_CPU: _Homes(False, Tier.CPU, Tier.CPU, Tier.NVME),
    Strategy.WEIGHTS_NVME: _Homes(False, Tier.NVME, Tier.CPU, Tier.NVME),
    Strategy.ALL_NVME: _Homes(False, Tier.NVME, Tier.NVME, Tier.NVME),
}


@dataclass(frozen=True, slots=True)
class Situation:
    """A training run on given machines.

    Attributes:
        schedule: AUTO is the engine's choice when gradients are clipped, as modelled for steps that need no clipping:
            "speculative"; "forward" if not every step is committed or all updates are in memory; "step" if these also
            share their cores with the computing.
        is_one_memory: GPU tiers and activations are parts of a node's one memory, the sum of its GPU and CPU memory.
    """

    job: Job
    layout: Layout
    node: Node
    schedule: UpdateSchedule = UpdateSchedule.AUTO
    commit_every: int = 1
    is_one_memory: bool = False

    def schedule_for(self, placement: Placement | None) -> UpdateSchedule:
        """The schedule of an engine with this placement (None: nothing is offloaded)."""
        if self.schedule is not UpdateSchedule.AUTO:
            return self.schedule
        if placement is None:
            return UpdateSchedule.FORWARD
        is_shared, in_memory = self.node.computes_on_cpu, placement.updates_in_memory
        return settled(self.placed_for, shares_cores=is_shared, in_memory=in_memory)

    @property
    def placed_for(self) -> UpdateSchedule:
        """The schedule that a placement is made for."""
        if self.schedule is not UpdateSchedule.AUTO:
            return self.schedule
        return usual(needs_norm=True, can_go_back=self.commit_every == 1 and self.node.nvme_bytes > 0)

    @property
    def gpu_budget_bytes(self) -> int:
        """Bytes of one GPU for weights and gradients: those that activations leave."""
        return max(0, int(USABLE * self.node.gpu_bytes - activation_bytes(self.job, self.layout)))

    @property
    def cpu_budget_bytes(self) -> int:
        """Bytes of CPU memory of one rank."""
        return int(USABLE * self.node.cpu_bytes / self.layout.gpus)


@dataclass(frozen=True, slots=True)
class Option:
    """A strategy in a situation.

    Attributes:
        bytes: by kind and tier, at rest; of each GPU on the GPU tier, of a node on the others.
        taken: by tier: of each GPU with activations, of a node's memory with staging, of its disks with both slots.
        problems: why it does not fit, a sentence each.
        work: of forward, backward, update and commit, on one node.
        phases: of a step; empty, like `work`, if a budget is too small for any placement.
        placement: of one rank; None if nothing is offloaded.
    """

    strategy: Strategy
    bytes: Mapping[tuple[Kind, Tier], float]
    taken: Mapping[Tier, float]
    problems: tuple[str, ...]
    work: Mapping[str, Work]
    phases: tuple[Phase, ...]
    placement: Placement | None = None

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def compute_s(self) -> float:
        return sum(phase.compute_s for phase in self.phases)

    @property
    def efficiency(self) -> float:
        return efficiency(self.compute_s, self.step_s)

    @property
    def bottleneck(self) -> Link | None:
        """What computing waits for longest, over all phases; None if it waits for nothing."""
        losses_s: dict[Link, float] = {}
        for phase in self.phases:
            for link, seconds in phase.losses_s.items():
                losses_s[link] = losses_s.get(link, 0.0) + seconds
        longest = max(losses_s, key=lambda link: losses_s[link], default=None)
        return longest if longest is not None and losses_s[longest] > 0 else None

    @property
    def read_bytes(self) -> float:
        """From the disks of a node, per step."""
        return sum(work.read_bytes for work in self.work.values())

    @property
    def written_bytes(self) -> float:
        """To the disks of a node, per step."""
        return sum(work.written_bytes for work in self.work.values())

    @property
    def waits_for_commits(self) -> bool:
        """Whether the run waits for disks that only commits use."""
        return self.bottleneck is Link.DISKS and not self.read_bytes

    def wear_days(self, endurance_bytes: float) -> float | None:
        """Days of training until the drives have had all the writes they are rated for; None: never, or unknown."""
        if not (endurance_bytes and self.written_bytes):
            return None
        return endurance_bytes / self.written_bytes * self.step_s / _DAY_S


def options_of(situation: Situation, strategies: Iterable[Strategy] = Strategy) -> tuple[Option, ...]:
    """Every strategy, from the simplest to the one that offloads most; the engine's own split last."""
    situation = as_divided(situation)
    return tuple(_option(situation, strategy) for strategy in strategies)


def as_divided(situation: Situation) -> Situation:
    """A situation of one memory, divided as the engine divides it for its tiers; other situations as they are."""
    if not situation.is_one_memory:
        return situation
    node, count = situation.node, situation.layout.gpus
    memory_bytes = node.cpu_bytes + count * node.gpu_bytes
    request, activations = _whole_request(situation)
    try:
        part = divided(request).gpu_bytes
    except BudgetError:  # then the engine's split does not fit, and its option says so
        part = smallest_budgets(request).gpu_bytes
    each = min((part + activations) * _ROUNDED / USABLE, (memory_bytes - 1) / count)  # each tier has some
    rest = (memory_bytes - each * count) * _ROUNDED
    return replace(situation, node=replace(node, gpu_bytes=each, cpu_bytes=rest))


def _whole_request(situation: Situation) -> tuple[Request, float]:
    """The engine's request for one rank where both tiers are one memory, and its bytes of activations."""
    node, count = situation.node, situation.layout.gpus
    activations = activation_bytes(situation.job, situation.layout)
    memory_bytes = USABLE * (node.cpu_bytes / count + node.gpu_bytes) - activations
    request = request_of(situation, group_needs(situation.job, situation.layout), 0)
    return replace(request, cpu_bytes=max(0, int(memory_bytes * _ROUNDED))), activations


def simplest(options: Iterable[Option]) -> Option | None:
    """The first option that fits; options come in the order of what they involve."""
    return next((option for option in options if option.fits), None)


def fastest(options: Iterable[Option]) -> Option | None:
    """The option that fits with the shortest step; the simplest of equals."""
    fitting = [option for option in options if option.fits]
    return min(fitting, key=lambda option: option.step_s) if fitting else None


def _option(situation: Situation, strategy: Strategy) -> Option:
    if strategy is Strategy.NOTHING:
        return _nothing(situation)
    try:
        placement = _placement(situation, strategy)
    except BudgetError:
        return Option(strategy, {}, {}, _too_little(situation), {}, ())
    has_store = _has_store(situation, placement)
    work, phases = _phases(situation, placement, has_store)
    taken = _taken(situation, placement, has_store)
    return Option(strategy, _bytes(placement, situation.layout), taken, _problems(situation, taken), work, phases,
                  placement)  # fmt: skip


def _nothing(situation: Situation) -> Option:
    job, layout = situation.job, situation.layout
    held = gpu_bytes(job, layout)
    sizes = {Kind.WEIGHTS: held.weights, Kind.GRADIENTS: held.gradients, Kind.STATE: held.state}
    working = 0.0
    if layout.shares(3) > 1:  # two whole groups are gathered: the one that computes, and the next
        working = 2.0 * max(need.device_bytes for need in group_needs(job, layout))
    taken = {Tier.GPU: held.total + working + activation_bytes(job, layout)}
    work, phases = _phases(situation, None, has_store=False)
    by_tier = {(kind, Tier.GPU): size for kind, size in sizes.items()}
    return Option(Strategy.NOTHING, by_tier, taken, _problems(situation, taken), work, phases)


def request_of(situation: Situation, groups: tuple[GroupNeed, ...], gpu_budget_bytes: int) -> Request:
    """The request that the engine makes for one rank."""
    everything = sum(need.device_bytes for need in groups)
    return Request(
        groups=groups,
        gpu_bytes=gpu_budget_bytes,
        cpu_bytes=situation.cpu_budget_bytes,
        nvme=situation.node.nvme_bytes > 0,
        gradients=gradient_mode(situation.placed_for),
        acquired_bytes=everything if _keeps_weights(situation.layout) else None,
        read_weights_with_state=not updates_in_backward(situation.placed_for),
        micro_batches=situation.job.accumulate,
        updates_on_gpu=not situation.node.computes_on_cpu and situation.layout.count == 1,
        is_one_memory=situation.is_one_memory,
    )


def _keeps_weights(layout: Layout) -> bool:
    """Whether each rank has all weights on its GPU, with several data-parallel ranks that do not share out weights."""
    return layout.data > 1 and layout.zero < 3


def _placement(situation: Situation, strategy: Strategy) -> Placement:
    groups = group_needs(situation.job, situation.layout)
    if strategy is Strategy.ENGINE:
        return place(request_of(situation, groups, situation.gpu_budget_bytes))
    homes = _HOMES[strategy]
    sizes = [need.device_bytes for need in groups]
    # While a group computes, the next one arrives, and the one before may still be leaving; and two gradients leave.
    stays = homes.stays or _keeps_weights(situation.layout)
    weights = sum(sizes) if stays else min(sum(sizes), 3 * max(sizes))
    request = request_of(situation, groups, weights + 2 * max(sizes))
    return place_uniformly(request, weights=homes.weights, gradients=homes.gradients, state=homes.state)


def _phases(
    situation: Situation, placement: Placement | None, has_store: bool
) -> tuple[Mapping[str, Work], tuple[Phase, ...]]:
    commits = 1 / situation.commit_every if has_store else 0.0
    job, layout, node = situation.job, situation.layout, situation.node
    schedule = situation.schedule_for(placement)
    work = step_work(job, layout, node, placement, schedule, commits)
    single = None
    if job.accumulate > 1:
        single = step_work(replace(job, accumulate=1), layout, node, placement, schedule, commits)
    slot_bytes = 0 if placement is None else placement.slot_bytes
    return work, phases_of(work, node, schedule, single, commits * layout.gpus * slot_bytes)


def _has_store(situation: Situation, placement: Placement) -> bool:
    """Whether commits are written: the engine writes them to any disks that it has, even if nothing lives there."""
    return situation.node.nvme_bytes > 0 or any(row.tier is Tier.NVME for row in placement.usage())


def _bytes(placement: Placement, layout: Layout) -> dict[tuple[Kind, Tier], float]:
    return {(row.kind, row.tier): row.bytes * (1 if row.tier is Tier.GPU else layout.gpus) for row in placement.usage()}


def _taken(situation: Situation, placement: Placement, has_store: bool) -> dict[Tier, float]:
    gpus = situation.layout.gpus
    on_gpu = sum(row.bytes for row in placement.usage() if row.tier is Tier.GPU)
    taken = {
        Tier.GPU: on_gpu + activation_bytes(situation.job, situation.layout),
        Tier.CPU: float(placement.pools.total_bytes * gpus),
    }
    if has_store:
        spilled = sum(row.bytes for row in placement.usage() if row.tier is Tier.NVME and row.kind is Kind.GRADIENTS)
        slots = sum(need.elements * (need.weight_bytes + need.state_bytes) for need in placement.groups) * _SLOTS
        taken[Tier.NVME] = float((slots + spilled) * gpus)
    return taken


def usable_bytes(node: Node) -> dict[Tier, float]:
    """Bytes that a run may take: of each GPU, of the memory and of the disks of a node."""
    return {Tier.GPU: USABLE * node.gpu_bytes, Tier.CPU: USABLE * node.cpu_bytes, Tier.NVME: node.nvme_bytes}


def _problems(situation: Situation, taken: Mapping[Tier, float]) -> tuple[str, ...]:
    usable = usable_bytes(situation.node)
    if situation.is_one_memory:
        taken, usable = (_as_one(sizes, situation.layout.gpus) for sizes in (taken, usable))
    return tuple(
        "{} would hold {}, {} can be used".format(_WHERE[tier], *_apart(taken[tier], limit))
        for tier, limit in usable.items()
        if taken.get(tier, 0.0) > limit
    )


def _apart(one: float, other: float) -> tuple[str, str]:
    """Two sizes as text, in bytes where they would otherwise read alike."""
    told = format_decimal(one), format_decimal(other)
    return told if told[0] != told[1] else (f"{one:,.0f} B", f"{other:,.0f} B")


def _as_one(sizes: Mapping[Tier, float], gpus: int) -> dict[Tier, float]:
    """Sizes by tier where the GPU tiers are in CPU memory."""
    together = sizes.get(Tier.CPU, 0.0) + gpus * sizes.get(Tier.GPU, 0.0)
    return {Tier.CPU: together, Tier.NVME: sizes.get(Tier.NVME, 0.0)}


def sizes_needed(situation: Situation) -> dict[Tier, int]:
    """The least sizes for the engine's own split, of memories that are too small: by tier, of each GPU and of a node.

    If both tiers are one memory, that counts as the CPU's.
    """
    count, activations = situation.layout.gpus, activation_bytes(situation.job, situation.layout)
    usable = usable_bytes(situation.node)
    if situation.is_one_memory:
        least = smallest_budgets(_whole_request(situation)[0])
        usable = _as_one(usable, count)
        needed = {Tier.CPU: count * (least.gpu_bytes + least.cpu_bytes + activations)}
    else:
        groups = group_needs(situation.job, situation.layout)
        least = smallest_budgets(request_of(situation, groups, situation.gpu_budget_bytes))
        needed = {Tier.GPU: least.gpu_bytes + activations, Tier.CPU: float(count * least.cpu_bytes)}
    return {tier: enough(need / USABLE) for tier, need in needed.items() if need > usable[tier]}


def _too_little(situation: Situation) -> tuple[str, ...]:
    """Why even the smallest split does not fit: a sentence for each memory that is too small."""
    usable, count = usable_bytes(situation.node), situation.layout.gpus
    activations = {Tier.GPU: activation_bytes(situation.job, situation.layout)}
    if situation.is_one_memory:
        usable, activations = (_as_one(sizes, count) for sizes in (usable, activations))
    return tuple(
        f"{_WHERE[tier]} would hold {format_decimal(USABLE * size)}"
        + (f", of which activations take {format_decimal(activations[tier])}" if activations.get(tier) else "")
        + f"; {format_decimal(usable[tier])} can be used"
        for tier, size in sizes_needed(situation).items()
    )
