"""A step of the engine on paper: how long it takes, how long compute waits, how much memory it fills.

Scope: the training thread (`train/access.py`, `train/steps.py`) on the store of `plan/step_store.py`, with the
    placement, the residency policy and the pools that the engine uses.
Not here: where bytes live (`plan/tiers.py`), the comparison of choices (`apps/tune.py`).

[Note: what is modelled] The I/O threads run as many jobs at once as there are threads, all at one speed, which the
measured rates give for the mix of reads and writes that is running. Demanded reads go first, then reads that an update
waits for, writes, reads ahead, and writes for a commit. An I/O thread computes the checksum of what it has read, except
for an update, which checks what it reads in its own pass. Adam, checksums, the model's arithmetic, reads and writes
slow each other down as measured in pairs. The recorded step tells how that differs for this model's own kernels
(`StepRecord.contention`), and how much the I/O threads lose besides (`StepRecord.drag`). Processes wait for the same
things as in the engine.

[Note: what is not] Codecs, the digests that an update computes in its own pass over the bytes that it reads and writes,
several ranks, a wrong speculation, other processes, and the time that Python takes between jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.config import UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.plan.events import Clock, Process, Signal
from tierstore.plan.placement import Placement
from tierstore.plan.residency import Decision, ResidencyPolicy
from tierstore.plan.schedules import updates_in_backward
from tierstore.plan.step_machine import Machine
from tierstore.plan.step_record import StepRecord
from tierstore.plan.step_store import Round, Store

_LONGEST_PERIOD = 8  # steps simulated from commit to commit, at most
_QUIET = 2  # simulated steps, those before the last, that stand for the rest of a longer period
_PERIODS = 2  # simulated periods, if they are short
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """How the engine is to run the step; without a store (`commits` False) nothing is written for a commit."""

    depth: int
    schedule: UpdateSchedule
    commit_every: int = 1
    commits: bool = True


@dataclass(frozen=True, slots=True)
class StepForecast:
    """One step in steady state, a mean over several.

    Attributes:
        stall_s: time in which compute waits for weights.
        slowed_s: how much longer compute takes beside the update.
        disk_s: time in which the disks work.
        cpu_peak_bytes, gpu_peak_bytes: largest use of the tiers' budgets.
        waiting_s: time of the step beyond its computing, slowed as that is: waits for weights, gradients, updates.
    """

    seconds: float
    forward_s: float
    backward_s: float
    stall_s: float
    slowed_s: float
    disk_s: float
    read_bytes: float
    written_bytes: float
    cpu_peak_bytes: int
    gpu_peak_bytes: int
    waiting_s: float

    @property
    def computing_s(self) -> float:
        """Time of both passes beside the update, without waiting for weights; as `train/meters.py` measures it."""
        return self.forward_s + self.backward_s - self.stall_s


def forecast(record: StepRecord, placement: Placement, machine: Machine, policy: StepPolicy) -> StepForecast:
    """Runs some steps from a committed store, and gives the mean of those after `_WARM_UP_STEPS`.

    Raises:
        ConfigError: the schedule is not modelled, or the record and the placement are of different models.
    """
    if policy.schedule in (UpdateSchedule.AUTO, UpdateSchedule.DELAYED):
        raise ConfigError(f"a step with update={policy.schedule.value!r} has no model; give an exact schedule")
    if [need.elements for need in record.groups] != [need.elements for need in placement.groups]:
        raise ConfigError("the recorded step and the placement are of different models")
    record.check_gradients()
    period = min(policy.commit_every, _LONGEST_PERIOD) if policy.commits else 1
    count = period * max(1, min(_PERIODS, _LONGEST_PERIOD // period))
    clock = Clock()
    store = Store(clock, placement, machine.beside_training(record.contention, record.drag))
    run = _Trainer(clock, record, store, replace(policy, commit_every=period))
    clock.run(clock.spawn(run.train(_WARM_UP_STEPS + count, _WARM_UP_STEPS)))
    mean = _mean(run.marks[_WARM_UP_STEPS:], policy.commit_every if period == _LONGEST_PERIOD else count)
    computing_s = mean["forward"] + mean["backward"] - mean["stall"] - mean["gradients"]
    slowed_s = computing_s - record.forward_s - record.backward_s
    return StepForecast(
        seconds=mean["now"],
        forward_s=mean["forward"],
        backward_s=mean["backward"],
        stall_s=mean["stall"],
        slowed_s=slowed_s,
        disk_s=mean["disk"],
        read_bytes=mean["read"],
        written_bytes=mean["write"],
        cpu_peak_bytes=run.store.cpu_peak_bytes,
        gpu_peak_bytes=run.store.device.peak_bytes + run.gradient_peak_bytes + run.store.placement.gpu_update_bytes,
        waiting_s=max(mean["now"] - record.compute_s - slowed_s, 0.0),
    )


def _mean(marks: Sequence[Mapping[str, float]], steps: int) -> dict[str, float]:
    """The mean over `steps` steps: those between the marks, and for the rest quiet ones, long after a commit began."""
    first, last = marks[0], marks[-1]
    more = steps - (len(marks) - 1)
    if more <= 0:
        return {name: (last[name] - first[name]) / (len(marks) - 1) for name in first}
    quiet, before = marks[-2], marks[-2 - _QUIET]  # the last step begins the next commit
    return {n: (last[n] - first[n] + more * (quiet[n] - before[n]) / _QUIET) / steps for n in first}


class _Trainer:
    """The training thread, and the groups that it holds on the device."""

    def __init__(self, clock: Clock, record: StepRecord, store: Store, policy: StepPolicy) -> None:
        self.clock, self.record, self.store, self.policy = clock, record, store, policy
        groups = store.placement.groups
        self.sizes = tuple(need.device_bytes for need in groups)
        self.trainable = [index for index, need in enumerate(groups) if need.trainable]
        self.order = tuple(group for group, _ in (*record.forward, *record.backward))
        capacity_bytes = store.placement.gpu_weight_bytes
        self.residency = ResidencyPolicy(self.order, self.sizes, capacity_bytes, policy.depth)
        self.from_device = updates_in_backward(policy.schedule)
        self.completed = _completed_at(record)
        self.held: set[int] = set()
        self.ready: dict[int, Signal] = {}
        self.drops: dict[int, Signal] = {}
        self.stale: set[int] = set()
        self.awaiting: set[int] = set()
        self.accepting: list[Signal] = []
        self.gradient_bytes = self.gradient_peak_bytes = 0
        self.totals = dict.fromkeys(("forward", "backward", "stall", "gradients"), 0.0)
        self.marks: list[dict[str, float]] = []
        self.commit_phase = 0

    def train(self, steps: int, committed: int) -> Process:
        """Runs so many steps, one after the other; one of the commits begins at the end of step `committed`."""
        self.commit_phase = committed % self.policy.commit_every
        self._mark()
        for number in range(1, steps + 1):
            round_ = self._begin_round()
            yield from self._pass("forward", round_)
            self.store.allow_through()
            yield from self._pass("backward", round_)
            yield from self._end_step(round_, number)
            self._mark()

    def _mark(self) -> None:
        work = self.store.work
        moved = {way: work.amounts[way] for way in ("read", "write")}
        self.marks.append(self.totals | moved | {"disk": work.busy_s(*moved, "sync"), "now": self.clock.now_s})

    def _begin_round(self) -> Round:
        need = self.record.completed if self.from_device else self.order
        wanted = [group for group in dict.fromkeys((*need, *self.trainable)) if group in self.trainable]
        self.awaiting = set(wanted) if self.from_device else set()
        schedule = self.policy.schedule
        return self.store.begin(
            wanted,
            reads_weights=not (self.from_device or self.store.placement.weights_stay),
            is_lazy=schedule is UpdateSchedule.FORWARD,
            keeps_gradients=schedule is UpdateSchedule.SPECULATIVE,
        )

    def _pass(self, name: str, round_: Round) -> Process:
        began_s, forward = self.clock.now_s, self.record.forward
        visits, first = (forward, 0) if name == "forward" else (self.record.backward, len(forward))
        for position, (group, seconds) in enumerate(visits):
            yield from self._go_to(first + position, group)
            yield self.store.work.submit("main", "compute", seconds)
            for complete in self.completed.get(position, ()) if name == "backward" else ():
                yield from self._hand_over(round_, complete)
        yield from self._left(self.accepting)
        self.accepting.clear()
        self.totals[name] += self.clock.now_s - began_s

    def _end_step(self, round_: Round, number: int) -> Process:
        self.store.decide(round_, round_.order)
        if self.policy.schedule is UpdateSchedule.SPECULATIVE:
            self.store.rearrange(round_, tuple(dict.fromkeys(self.order)))
        self.store.approve(round_)
        if self.policy.schedule is UpdateSchedule.STEP:
            yield from [trip.ended for trip in round_.trips.values()]
        self.stale = self.held & set(round_.order)
        for group in self.stale:
            # A refresh begins when the next load is posted; until then the group is not ready.
            self.ready[group] = Signal()
        if self.policy.commits and number % self.policy.commit_every == self.commit_phase:
            self.store.begin_commit(round_)
        if self.policy.depth > 0:
            self._start(self._decide(0, self.order[0], self.policy.depth - 1))
            self._refresh()
        yield self.record.between_s

    # --- groups on the device (train/access.py) -------------------------------------------------------------------

    def _go_to(self, position: int, group: int) -> Process:
        began_s = self.clock.now_s
        self._refresh()
        while (decision := self._decide(position, group, self._depth_from(position))).wait:
            yield self.ready[decision.wait[0]]
        self._start(decision)
        yield self.ready[group]
        self.totals["stall"] += self.clock.now_s - began_s

    def _decide(self, position: int, group: int, depth: int) -> Decision:
        self.residency.depth = depth
        loading = {one for one in self.held if not self.ready[one].is_set}
        return self.residency.decide(position, self.held - loading, (), loading, demand=group)

    def _depth_from(self, position: int) -> int:
        """The prefetch depth, cut where an update will make weights stale, as in the engine."""
        count, seen = len(self.order), {self.order[position]}
        for place in range(position + 1, position + count):
            group = self.order[place % count]
            if len(seen) > self.policy.depth or (place >= count and (not self.from_device or group in self.awaiting)):
                break
            seen.add(group)
        return min(self.policy.depth, len(seen) - 1)

    def _start(self, decision: Decision) -> None:
        if decision.wait:
            return
        for group in decision.evict:
            self.held.discard(group)
            self.drops[group] = self.clock.spawn(self.store.drop(group, self.ready[group]))
        for group in decision.load:
            self.held.add(group)
            self.store.announce(group)
            self.ready[group] = self.clock.spawn(self.store.load(group, self.drops.get(group)))

    def _refresh(self) -> None:
        for group in sorted(self.stale):
            stale, fresh = self.ready[group], self.clock.spawn(self.store.applied(group))
            self.clock.spawn(self._forward(fresh, stale))
        self.stale.clear()

    def _forward(self, fresh: Signal, stale: Signal) -> Process:
        yield fresh
        self.clock.set(stale)

    # --- gradients (train/backward.py) ----------------------------------------------------------------------------

    def _hand_over(self, round_: Round, group: int) -> Process:
        """The gradient leaves the device; backward waits while too many gradients are on their way."""
        nbytes = self.sizes[group]
        while self.gradient_bytes and self.gradient_bytes + nbytes > self.store.placement.gpu_gradient_bytes:
            yield from self._left([self.accepting.pop(0)])
        self.gradient_bytes += nbytes
        self.gradient_peak_bytes = max(self.gradient_peak_bytes, self.gradient_bytes)

        def left() -> None:
            self.gradient_bytes -= nbytes

        self.accepting.append(self.clock.spawn(self.store.accept(round_, group, left)))
        if self.from_device and not self.store.placement.is_updated_on_gpu(group):
            self.awaiting.discard(group)
            self.store.decide(round_, [group])

    def _left(self, accepted: Sequence[Signal]) -> Process:
        """Wait until these gradients have left the device."""
        began_s = self.clock.now_s
        yield from accepted
        self.totals["gradients"] += self.clock.now_s - began_s


def _completed_at(record: StepRecord) -> Mapping[int, Sequence[int]]:
    """Groups whose gradients are complete after a visit of backward, by its position: not before their own last one."""
    last = {group: position for position, (group, _) in enumerate(record.backward)}
    found: dict[int, list[int]] = {}
    position = 0
    for group in record.completed:
        position = max(position, last.get(group, 0))
        found.setdefault(position, []).append(group)
    return found
