"""A step on paper whose groups are fetched over links.

Scope: the residency policy of the engine, driven by computed, not measured, times; deterministic even with jitter.
Not here: the choice of a depth from such runs (`plan/prefetch.py`), updates and commits (`plan/step_model.py`).

A link serves fetches in the order in which they were asked for; a fetch over several links passes them one after the
other. Other traffic of the first link (state, gradients, new weights) fills the gaps between fetches. The traffic that
a visit's update leaves behind must be done before the same visit of the next step begins.
"""

from __future__ import annotations

import enum
import itertools
import math
import random
from collections.abc import Callable, Iterator
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
        other_bytes: traffic that the visit leaves behind on the first link: state, spilled gradients, new weights.
    """

    group: int
    bytes: int
    compute_s: float
    other_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.group, self.bytes, self.compute_s, self.other_bytes) < 0:
            raise ConfigError(f"no field of a visit can be negative: {self}")


@dataclass(frozen=True, slots=True)
class Link:
    """One of the links that a fetch passes.

    Attributes:
        bytes_per_s: of all its disks together, if groups are striped over several.
        share: part of a group's bytes that passes this link: with N ranks, 1/N from the disk of each, the rest between
            them.
    """

    bytes_per_s: float
    share: float = 1.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and 0 <= self.share <= 1):
            raise ConfigError(f"a link needs a positive rate and a share of at most 1: {self}")

    def seconds(self, nbytes: int) -> float:
        """Time of one fetch of a group of so many bytes."""
        return self.share * nbytes / self.bytes_per_s


class Track(enum.Enum):
    """What is busy in a span of the timeline."""

    LINK = "link"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Span:
    """A busy time, in seconds from the start of the step; `group` is None for other traffic of the link `link`."""

    track: Track
    group: int | None
    start_s: float
    end_s: float
    link: int = 0


@dataclass(frozen=True, slots=True)
class Simulation:
    """One step in steady state.

    Attributes:
        seconds: of the step, `compute_s + stall_s`.
        stall_s: time in which compute waits for the link.
        loads: how often each group id is fetched.
        link_s: time that the slowest link needs for all its traffic of one step, without jitter.
        peak_bytes: largest sum of resident and loading groups.
        timeline: spans that begin in the step; fetches for the next step may end after it.
    """

    seconds: float
    compute_s: float
    stall_s: float
    loads: tuple[int, ...]
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
    links: float | tuple[Link, ...],
    *,
    warm_up_steps: int = 3,
) -> Simulation:
    """Runs the policy over some steps from an empty device, and reports the step after `warm_up_steps`.

    Args:
        links: that every fetch passes, in this order; a number is the rate of one link.

    Raises:
        BudgetError: a group alone exceeds the capacity.
    """
    return next(itertools.islice(run_steps(order, capacity_bytes, depth, links), warm_up_steps, None))


def run_steps(
    order: tuple[Visit, ...],
    capacity_bytes: int,
    depth: int,
    links: float | tuple[Link, ...],
    *,
    jitter: float = 0.0,
    seed: int = 0,
) -> Iterator[Simulation]:
    """Endless steps, one after the other, from an empty device.

    Args:
        jitter: standard deviation of every compute and transfer time, relative to it (log-normal, of mean 1). With the
            same seed, compute times are the same at every depth.
    """
    if not (0 <= jitter < 10):
        raise ConfigError(f"a jitter is a part of a time, 0 or more and below 10, not {jitter}")
    route = links if isinstance(links, tuple) else (Link(links),)
    if not route:
        raise ConfigError("a fetch passes at least one link")
    run = _Run(order, capacity_bytes, depth, route, _noise(jitter, f"{seed} compute"), _noise(jitter, f"{seed} links"))
    while True:
        yield run.step()


def _noise(jitter: float, seed: str) -> Callable[[], float]:
    generator, variance = random.Random(seed), math.log1p(jitter * jitter)
    return lambda: math.exp(generator.gauss(-variance / 2, math.sqrt(variance))) if jitter else 1.0


class _Run:
    """The device, the links and the clock of one simulation."""

    def __init__(
        self,
        order: tuple[Visit, ...],
        capacity_bytes: int,
        depth: int,
        links: tuple[Link, ...],
        compute_noise: Callable[[], float],
        link_noise: Callable[[], float],
    ) -> None:
        self.order = order
        self.sizes = group_sizes(order)
        self.policy = ResidencyPolicy(tuple(visit.group for visit in order), self.sizes, capacity_bytes, depth)
        self.links = links
        self.compute_noise, self.link_noise = compute_noise, link_noise
        self.now_s = self.begun_s = 0.0  # now, and the start of the step
        self.free_s = [0.0] * len(links)  # when each link has served all that it was asked for
        self.ready_s: dict[int, float] = {}  # when each present group is, or will be, resident
        self.present: set[int] = set()  # the keys of `ready_s`
        self.present_bytes = 0
        self.left_s = 0.0  # time that other traffic has asked of the first link, since the beginning
        self.served_s = 0.0
        self.due_s = [0.0] * len(order)  # the `left_s` that must be served before this visit's next turn
        self.spans: list[Span] = []
        self.loads: list[int] = []

    def step(self) -> Simulation:
        self.begun_s = self.now_s
        self.spans, self.loads = [], [0] * len(self.sizes)
        peak_bytes = 0
        stall_s = compute_s = 0.0
        for position, visit in enumerate(self.order):
            asked_s = self.now_s
            self._make_resident(position)
            peak_bytes = max(peak_bytes, self.present_bytes)
            stall_s += self.now_s - asked_s
            visit_s = visit.compute_s * self.compute_noise()
            self._note(Track.COMPUTE, visit.group, self.now_s, self.now_s + visit_s)
            self.now_s += visit_s
            compute_s += visit_s
            self._other_traffic(min(self.left_s - self.served_s, self.now_s - self.free_s[0]))
            self.free_s = [max(free_s, self.now_s) for free_s in self.free_s]  # idle time that is past is lost
            self.left_s += visit.other_bytes / self.links[0].bytes_per_s
            self.due_s[position] = self.left_s
        return Simulation(
            seconds=self.now_s - self.begun_s,
            compute_s=compute_s,
            stall_s=stall_s,
            loads=tuple(self.loads),
            link_s=self._link_s(),
            peak_bytes=peak_bytes,
            timeline=tuple(self.spans),
        )

    def _note(self, track: Track, group: int | None, start_s: float, end_s: float, link: int = 0) -> None:
        self.spans.append(Span(track, group, start_s - self.begun_s, end_s - self.begun_s, link))

    def _link_s(self) -> float:
        times_s = [sum(n * link.seconds(size) for n, size in zip(self.loads, self.sizes)) for link in self.links]
        times_s[0] += sum(visit.other_bytes for visit in self.order) / self.links[0].bytes_per_s
        return max(times_s)

    def _make_resident(self, position: int) -> None:
        """Asks the policy, starts the loads, and moves the clock to when the visit can compute."""
        overdue_s = self.due_s[position] - self.served_s
        if overdue_s > 0:
            self._other_traffic(overdue_s)
            self.now_s = max(self.now_s, self.free_s[0])
        while not self.policy.is_settled(position, self.present):
            decision = self._decide(position)
            if decision.wait:
                self.now_s = min(self.ready_s[group] for group in decision.wait)
                continue
            for group in decision.evict:
                del self.ready_s[group]
                self.present.discard(group)
                self.present_bytes -= self.sizes[group]
            for group in decision.load:
                self._fetch(group)
            break
        self.now_s = max(self.now_s, self.ready_s[self.order[position].group])

    def _decide(self, position: int) -> Decision:
        loading = {group for group, ready_s in self.ready_s.items() if ready_s > self.now_s}
        return self.policy.decide(position, self.present - loading, (), loading)

    def _fetch(self, group: int) -> None:
        at_s = self.now_s
        for index, link in enumerate(self.links):
            start_s = max(at_s, self.free_s[index])
            at_s = self.free_s[index] = start_s + link.seconds(self.sizes[group]) * self.link_noise()
            self._note(Track.LINK, group, start_s, at_s, index)
        self.ready_s[group] = at_s
        self.present.add(group)
        self.present_bytes += self.sizes[group]
        self.loads[group] += 1

    def _other_traffic(self, seconds: float) -> None:
        if seconds > 0:
            start_s = self.free_s[0]
            self.free_s[0] = start_s + seconds
            self._note(Track.LINK, None, start_s, self.free_s[0])
            self.served_s += seconds
