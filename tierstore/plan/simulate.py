"""A step of groups that are fetched over one link, run on paper.

Scope: the residency policy of the engine, driven by computed instead of measured times; deterministic.
Not here: the choice of a depth from such runs (`plan/prefetch.py`).

The link serves fetches in the order in which they were asked for. Other traffic of the same disk (state, gradients, new
weights) fills the gaps between them, and must be through before the same visit of the next step begins: it is what that
visit's update left behind.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.plan.residency import Decision, ResidencyPolicy


@dataclass(frozen=True, slots=True)
class Visit:
    """One use of a group in a step.

    Attributes:
        group: id, 0 or more.
        bytes: of the group; the same at each of its visits.
        compute_s: time of the visit on the compute device.
        other_bytes: traffic that the visit leaves behind on the same link: state, spilled gradients, new weights.
    """

    group: int
    bytes: int
    compute_s: float
    other_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.group, self.bytes, self.compute_s, self.other_bytes) < 0:
            raise ConfigError(f"nothing of a visit can be negative: {self}")


class Track(enum.Enum):
    """What is busy in a span of the timeline."""

    LINK = "link"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Span:
    """A busy time, in seconds from the start of the step; `group` is None for other traffic of the link."""

    track: Track
    group: int | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One step in steady state.

    Attributes:
        seconds: of the step, `compute_s + stall_s`.
        stall_s: time in which compute waits for the link.
        loads: how often each group id is fetched.
        load_bytes: fetched.
        link_s: time that the link needs for all its traffic of one step.
        peak_bytes: largest sum of resident and loading groups.
        timeline: spans that begin in the step; fetches for the next step may end after it.
    """

    seconds: float
    compute_s: float
    stall_s: float
    loads: tuple[int, ...]
    load_bytes: int
    link_s: float
    peak_bytes: int
    timeline: tuple[Span, ...]


def group_sizes(order: tuple[Visit, ...]) -> tuple[int, ...]:
    """Bytes by group id; 0 for ids that are not visited.

    Raises:
        ConfigError: no visit, or two visits that disagree.
    """
    if not order:
        raise ConfigError("an order has at least one visit")
    sizes = [-1] * (max(visit.group for visit in order) + 1)
    for visit in order:
        if sizes[visit.group] not in (-1, visit.bytes):
            raise ConfigError(
                f"group {visit.group} has {sizes[visit.group]} B in one visit and {visit.bytes} in another"
            )
        sizes[visit.group] = visit.bytes
    return tuple(max(size, 0) for size in sizes)


def simulate(
    order: tuple[Visit, ...],
    capacity_bytes: int,
    depth: int,
    bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    warm_up_steps: int = 3,
) -> Simulation:
    """Runs the policy over some steps from an empty device, and reports the step after `warm_up_steps`.

    Args:
        latency_s: fixed cost of one fetch.

    Raises:
        BudgetError: a group alone exceeds the capacity.
    """
    if bytes_per_s <= 0 or latency_s < 0:
        raise ConfigError(f"a link needs a positive rate: {bytes_per_s} B/s, latency {latency_s} s")
    run = _Run(order, capacity_bytes, depth, bytes_per_s, latency_s)
    for _ in range(warm_up_steps):
        run.step()
    return run.step()


class _Run:
    """The device, the link and the clock of one simulation."""

    def __init__(
        self, order: tuple[Visit, ...], capacity_bytes: int, depth: int, bytes_per_s: float, latency_s: float
    ) -> None:
        self.order = order
        self.sizes = group_sizes(order)
        self.policy = ResidencyPolicy(tuple(visit.group for visit in order), self.sizes, capacity_bytes, depth)
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.now_s = 0.0
        self.link_free_s = 0.0
        self.ready_s: dict[int, float] = {}  # when each present group is, or will be, resident
        self.left_s = 0.0  # link time that other traffic has asked for, since the beginning
        self.served_s = 0.0
        self.due_s = [0.0] * len(order)  # of `left_s`, what must be served before this visit's next turn
        self.spans: list[Span] = []
        self.loads: list[int] = []

    def step(self) -> Simulation:
        start_s = self.now_s
        self.spans, self.loads = [], [0] * len(self.sizes)
        peak_bytes = 0
        stall_s = 0.0
        for position, visit in enumerate(self.order):
            asked_s = self.now_s
            self._make_resident(position)
            peak_bytes = max(peak_bytes, sum(self.sizes[group] for group in self.ready_s))
            stall_s += self.now_s - asked_s
            self.spans.append(Span(Track.COMPUTE, visit.group, self.now_s, self.now_s + visit.compute_s))
            self.now_s += visit.compute_s
            self._other_traffic(min(self.left_s - self.served_s, self.now_s - self.link_free_s))
            self.link_free_s = max(self.link_free_s, self.now_s)  # idle time that is past is lost
            self.left_s += visit.other_bytes / self.bytes_per_s
            self.due_s[position] = self.left_s
        load_bytes = sum(count * size for count, size in zip(self.loads, self.sizes))
        other_bytes = sum(visit.other_bytes for visit in self.order)
        return Simulation(
            seconds=self.now_s - start_s,
            compute_s=sum(visit.compute_s for visit in self.order),
            stall_s=stall_s,
            loads=tuple(self.loads),
            load_bytes=load_bytes,
            link_s=(load_bytes + other_bytes) / self.bytes_per_s + sum(self.loads) * self.latency_s,
            peak_bytes=peak_bytes,
            timeline=tuple(
                Span(span.track, span.group, span.start_s - start_s, span.end_s - start_s) for span in self.spans
            ),
        )

    def _make_resident(self, position: int) -> None:
        """Asks the policy, starts what it says, and moves the clock to when the visit can compute."""
        overdue_s = self.due_s[position] - self.served_s
        if overdue_s > 0:
            self._other_traffic(overdue_s)
            self.now_s = self.link_free_s
        decision = self._decide(position)
        while decision.wait:
            self.now_s = min(self.ready_s[group] for group in decision.wait)
            decision = self._decide(position)
        for group in decision.evict:
            del self.ready_s[group]
        for group in decision.load:
            self._fetch(group)
        self.now_s = max(self.now_s, self.ready_s[self.order[position].group])

    def _decide(self, position: int) -> Decision:
        resident = [group for group, ready_s in self.ready_s.items() if ready_s <= self.now_s]
        loading = [group for group, ready_s in self.ready_s.items() if ready_s > self.now_s]
        return self.policy.decide(position, resident, (), loading)

    def _fetch(self, group: int) -> None:
        start_s = self.link_free_s  # never before now
        self.link_free_s = start_s + self.latency_s + self.sizes[group] / self.bytes_per_s
        self.ready_s[group] = self.link_free_s
        self.loads[group] += 1
        self.spans.append(Span(Track.LINK, group, start_s, self.link_free_s))

    def _other_traffic(self, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(Span(Track.LINK, None, self.link_free_s, self.link_free_s + seconds))
            self.link_free_s += seconds
            self.served_s += seconds
