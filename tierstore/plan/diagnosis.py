"""Why a measured step is not shorter, in words, and the step time that each remedy would give.

Scope: one measured step, the timeline that explains it, and remedies tried on that timeline.
Not here: measuring (`train/data_parallel/overlap.py`); the timeline itself (`plan/buckets.py`).

[Note: at the measured overlap]
A remedy is tried on the measured step, not on an ideal one: gradients are ready when they were measured to be, less the
pauses that the remedy takes away, and collectives cost what the fitted model says, times the factor by which those of
the step were slower (they share cores, memory and links with the compute, and wait for other ranks). The time that the
timeline of the unchanged step leaves unexplained (the optimizer, gaps) is added to every prediction. Remedies are tried
one after the other, causes before their effects; each counts only if it still shortens the step by `WORTH_WHILE`, and
its prediction includes the remedies before it.

Collectives are taken one at a time, however many are in flight, because they run so: see
`train/data_parallel/arrangement.py`.

Effects that no step has shown yet are not predicted: where collectives take cores from the compute (gloo), a step that
begins to overlap computes more slowly than the one before it did.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from tierstore.config import format_size
from tierstore.errors import ConfigError
from tierstore.plan.buckets import Gradient, Timeline, best_bucket_bytes, form_buckets, timeline
from tierstore.plan.cost_model import CostModel

WORTH_WHILE = 0.03  # share of the step: smaller gains are within the variation of the steps of one run
_FIRST_BUCKET_BYTES = 2**20  # as in DDP
_IDLE_LINK = 0.3  # share of the compute: with less communication the interconnect hardly matters


class Symptom(enum.Enum):
    """What is wrong with a step."""

    STRAY_SYNCHRONIZATION = "stray synchronization"
    UNUSED_SEARCH = "unused-parameter search"
    HEAVY_HOOK = "heavy hook"
    SAME_STREAM = "same stream"
    READY_ORDER = "readiness order against bucket order"
    FIRST_BUCKET_LATE = "first bucket late"
    BUCKET_TOO_LARGE = "bucket too large"
    BUCKET_TOO_SMALL = "bucket too small"
    COMMUNICATION_BOUND = "communication-bound"
    COMPUTE_BOUND = "compute-bound"


class PauseKind(enum.Enum):
    """Why the compute stood still."""

    SYNCHRONIZATION = "synchronization"
    SEARCH = "search"
    HOOK = "hook"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True)
class Pause:
    """Time before the end of backward in which nothing was computed; seconds from the start of the step."""

    kind: PauseKind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step as it was measured; all times in seconds from its start.

    Attributes:
        seconds: the whole step, the optimizer included.
        timeline: the end of backward, and its buckets in the order of launch.
        gradients: of all parameters, or of whole buckets if no more is known.
        buckets: the gradients, by index, that each bucket of the timeline holds.
        pauses: those that are known.
    """

    seconds: float
    timeline: Timeline
    gradients: tuple[Gradient, ...]
    buckets: tuple[tuple[int, ...], ...]
    pauses: tuple[Pause, ...] = ()

    def __post_init__(self) -> None:
        if len(self.buckets) != len(self.timeline.events):
            raise ConfigError(f"{len(self.buckets)} buckets have {len(self.timeline.events)} events")
        if sorted(member for bucket in self.buckets for member in bucket) != list(range(len(self.gradients))):
            raise ConfigError("every gradient belongs to one bucket")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that can be improved.

    Attributes:
        evidence: what was seen, with figures.
        remedy: what to do.
        seconds: the step time that the timeline predicts with this remedy and those before it.
            See [Note: at the measured overlap].
    """

    symptom: Symptom
    evidence: str
    remedy: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """The step on paper, which remedies change."""

    gradients: tuple[Gradient, ...]
    buckets: tuple[tuple[int, ...], ...]
    compute_s: float
    model: CostModel

    def run(self) -> Timeline:
        return timeline(self.gradients, self.buckets, self.model, compute_s=self.compute_s)

    def bucketed(self, cap_bytes: float) -> _Plan:
        """Buckets of another size, in the same order of gradients."""
        order = self.order
        runs = form_buckets([self.gradients[member].nbytes for member in order], cap_bytes)
        return replace(self, buckets=tuple(tuple(order[place] for place in run) for run in runs))

    @property
    def order(self) -> list[int]:
        """Gradients in the order in which they stand in the buckets."""
        return [member for bucket in self.buckets for member in bucket]

    @property
    def cap_bytes(self) -> int:
        """The size of its largest bucket."""
        return max(map(self.bucket_bytes, range(len(self.buckets))), default=0)

    def bucket_bytes(self, index: int) -> int:
        """The size of one bucket."""
        return sum(self.gradients[member].nbytes for member in self.buckets[index])


class _Patient:
    """The step under examination: the plan so far, and what it is predicted to take."""

    def __init__(self, step: MeasuredStep, model: CostModel) -> None:
        self.step = step
        measured = step.timeline
        modelled_s = sum(model.seconds(event.nbytes) for event in measured.events)
        slowdown = measured.communication_s / modelled_s if modelled_s > 0 else 1.0
        # No `cores` here: the measured gradients are as late as the loss of cores made them.
        slowed = CostModel(model.alpha_s * slowdown, model.beta_bytes_per_s / max(slowdown, 1e-9), model.launch_s)
        plan = _Plan(step.gradients, step.buckets, measured.compute_s, slowed)
        self.plan = self.without(plan, ())
        self.tail_s = max(0.0, step.seconds - measured.seconds)
        self.unexplained_s = step.seconds - self.plan.run().seconds
        self.seconds = step.seconds
        self.found: list[Diagnosis] = []

    def without(self, plan: _Plan, pauses: Sequence[Pause]) -> _Plan:
        """The plan with the measured readiness, less these pauses, and less the launches, which `timeline` adds."""
        events, launch_s = self.step.timeline.events, plan.model.launch_s

        def moved(until_s: float) -> float:
            launches_s = launch_s * sum(1 for event in events if event.start_s < until_s)
            return max(0.0, until_s - _paused_s(pauses, until_s) - launches_s)

        gradients = tuple(replace(gradient, ready_s=moved(gradient.ready_s)) for gradient in self.step.gradients)
        compute_s = max([moved(self.step.timeline.compute_s), *(gradient.ready_s for gradient in gradients)])
        return replace(plan, gradients=gradients, compute_s=compute_s)

    def predict(self, plan: _Plan) -> float:
        run = plan.run()
        return max(run.seconds + self.unexplained_s, run.compute_s + self.tail_s)

    def gain_s(self, plan: _Plan) -> float:
        return self.seconds - self.predict(plan)

    def try_remedy(self, symptom: Symptom, plan: _Plan, evidence: str, remedy: str) -> bool:
        """Takes the remedy if it shortens the step enough."""
        if self.gain_s(plan) < WORTH_WHILE * self.step.seconds:
            return False
        self.plan, self.seconds = plan, self.predict(plan)
        self.found.append(Diagnosis(symptom, evidence, remedy, self.seconds))
        return True


def diagnose(step: MeasuredStep, model: CostModel) -> tuple[Diagnosis, ...]:
    """The findings on a step, causes before effects; empty if none is worth while.

    Args:
        model: of the interconnect without other load, as `fit_cost_model` finds it.
    """
    patient = _Patient(step, model)
    if not step.timeline.events:
        return ()
    for kind, symptom, evidence, remedy in _PAUSES:
        _look_at_pauses(patient, kind, symptom, evidence, remedy)
    _look_at_order(patient)
    _look_at_sizes(patient)
    _look_at_bounds(patient)
    return tuple(patient.found)


_PAUSES: tuple[tuple[PauseKind, Symptom, str, str], ...] = (
    (PauseKind.SYNCHRONIZATION, Symptom.STRAY_SYNCHRONIZATION, "the host waits {count} time{s} for the device, {time}",
     "take .item(), .cpu(), print and synchronize() out of forward and backward"),
    (PauseKind.SEARCH, Symptom.UNUSED_SEARCH, "the graph is searched for unused parameters, {time}",
     "find_unused=False if every parameter is always used, static_graph=True if the same ones always are"),
    (PauseKind.HOOK, Symptom.HEAVY_HOOK, "{count} hook{s} in the way of backward, {time}",
     "make the comm hook asynchronous: return a future, and leave its work to the communication stream"),
    (PauseKind.COLLECTIVE, Symptom.SAME_STREAM, "{count} collective{s} on the stream of the compute, {time}",
     "launch collectives on a stream of their own, asynchronously"),
)  # fmt: skip


def _look_at_pauses(patient: _Patient, kind: PauseKind, symptom: Symptom, evidence: str, remedy: str) -> None:
    pauses = [pause for pause in patient.step.pauses if pause.kind is kind]
    if not pauses:
        return
    # Pauses are measured on the original step, but gradients may have moved since: so all pauses that were taken away
    # are subtracted from the measured times at once.
    taken = {_KINDS[diagnosis.symptom] for diagnosis in patient.found if diagnosis.symptom in _KINDS} | {kind}
    away = [pause for pause in patient.step.pauses if pause.kind in taken]
    plan = patient.without(patient.plan, away)
    time = f"{_ms(_paused_s(pauses, patient.step.timeline.compute_s))} in all"
    patient.try_remedy(
        symptom, plan, evidence.format(count=len(pauses), s="" if len(pauses) == 1 else "s", time=time), remedy
    )


_KINDS = {symptom: kind for kind, symptom, _, _ in _PAUSES}


def _paused_s(pauses: Sequence[Pause], until_s: float) -> float:
    """Time of pauses before a moment; overlapping pauses count once."""
    total_s = covered_s = 0.0
    for pause in sorted(pauses, key=lambda pause: pause.start_s):
        end_s = min(pause.end_s, until_s)
        total_s += max(0.0, end_s - max(pause.start_s, covered_s))
        covered_s = max(covered_s, end_s)
    return total_s


def _look_at_order(patient: _Patient) -> None:
    """Tries buckets of the same sizes, filled in the order in which gradients become ready."""
    plan = patient.plan
    order = sorted(plan.order, key=lambda member: plan.gradients[member].ready_s)
    sizes = [plan.bucket_bytes(index) for index in range(len(plan.buckets))]
    waiting = sum(later.ready_s < earlier.ready_s for earlier, later in itertools.pairwise(plan.run().events))
    reordered = replace(plan, buckets=_filled(order, plan.gradients, sizes))
    patient.try_remedy(
        Symptom.READY_ORDER,
        reordered,
        f"{waiting} of {len(sizes)} buckets are ready before the one that is launched ahead of them, "
        "or hold gradients made far apart",
        "order the buckets as gradients become ready (order=last_step().order), the same on all ranks",
    )


def _filled(order: Sequence[int], gradients: Sequence[Gradient], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Gradients in `order`, cut into buckets of about these sizes."""
    buckets: list[list[int]] = [[]]
    limit, total = sizes[0], 0
    for member in order:
        if buckets[-1] and total + gradients[member].nbytes / 2 > limit and len(buckets) < len(sizes):
            limit += sizes[len(buckets)]
            buckets.append([])
        buckets[-1].append(member)
        total += gradients[member].nbytes
    return tuple(map(tuple, buckets))


def _look_at_sizes(patient: _Patient) -> None:
    """Tries a change of the first bucket before a change of all buckets: it is the smaller change."""
    plan, now_bytes = patient.plan, patient.plan.cap_bytes
    cap_bytes = _best_cap(patient)
    best = plan.bucketed(cap_bytes)
    split = _first_split(plan)
    if split is not None and patient.gain_s(split) >= 0.8 * patient.gain_s(best):
        ready_s = [plan.gradients[member].ready_s for member in plan.buckets[0]]
        evidence = (
            f"the channel is idle until {_ms(max(ready_s))}, when the first bucket is full "
            f"({format_size(plan.bucket_bytes(0))}); its first gradient is there at {_ms(min(ready_s))}"
        )
        if patient.try_remedy(
            Symptom.FIRST_BUCKET_LATE, split, evidence, "a first bucket of 1 MiB, the next as others"
        ):
            return
    run = plan.run()
    if cap_bytes > now_bytes:
        symptom = Symptom.BUCKET_TOO_SMALL
        share = plan.model.alpha_s * len(run.events) / max(run.communication_s, 1e-12)
        evidence = f"{_buckets(run)} of at most {format_size(now_bytes)}: {share:.0%} of their time is latency"
    else:
        symptom = Symptom.BUCKET_TOO_LARGE
        evidence = (
            f"{_buckets(run)} of up to {format_size(now_bytes)}: the last one is launched when backward "
            f"ends, and takes {_ms(plan.model.seconds(run.events[-1].nbytes))}"
        )
    patient.try_remedy(symptom, best, evidence, f"buckets of {format_size(round(cap_bytes))}")


def _first_split(plan: _Plan) -> _Plan | None:
    """The first bucket split: a small one, then some as large as the others; None if it is alone or too small."""
    if len(plan.buckets) < 2:
        return None
    others = median(plan.bucket_bytes(index) for index in range(1, len(plan.buckets)))
    first = plan.buckets[0]
    sizes = [plan.gradients[member].nbytes for member in first]
    runs = form_buckets(sizes, max(others, 1), _FIRST_BUCKET_BYTES)
    if len(runs) < 2:
        return None
    return replace(plan, buckets=(*(tuple(first[place] for place in run) for run in runs), *plan.buckets[1:]))


def _best_cap(patient: _Patient) -> int:
    plan = patient.plan
    gradients = [plan.gradients[member] for member in plan.order]
    return best_bucket_bytes(gradients, plan.model, compute_s=plan.compute_s, slack=WORTH_WHILE / 3)


def _look_at_bounds(patient: _Patient) -> None:
    plan = patient.plan
    run = plan.run()
    floor_s = sum(event.nbytes for event in run.events) / plan.model.beta_bytes_per_s
    first_s = min(gradient.ready_s for gradient in plan.gradients)
    if first_s + floor_s > run.compute_s:
        halved = replace(plan, gradients=tuple(replace(one, nbytes=one.nbytes // 2) for one in plan.gradients))
        patient.try_remedy(
            Symptom.COMMUNICATION_BOUND,
            halved,
            f"the bytes alone take {_ms(floor_s)}, more than the {_ms(run.compute_s - first_s)} of compute "
            f"after the first gradient",
            "send half the bytes by the bf16 comm hook (predicted here), accumulate micro-batches under no_sync(), "
            "or take a faster interconnect",
        )
    free_s = patient.predict(replace(plan, model=CostModel(0.0, float("inf"))))
    is_free = patient.seconds - free_s < WORTH_WHILE * patient.step.seconds
    measured = patient.step.timeline
    if not patient.found and is_free and measured.communication_s < _IDLE_LINK * measured.compute_s:
        patient.found.append(
            Diagnosis(
                Symptom.COMPUTE_BOUND,
                f"{_ms(measured.communication_s)} of communication beside {_ms(measured.compute_s)} of compute, "
                f"{measured.hidden_share:.0%} of it hidden",
                "nothing to gain from buckets or links: only faster compute shortens this step "
                "(an interconnect that costs nothing is predicted)",
                free_s,
            )
        )


def report_lines(step: MeasuredStep, found: Sequence[Diagnosis]) -> list[str]:
    """The diagnosis as lines of text, two for each finding."""
    if not found:
        return [f"nothing to remedy: a step takes {_ms(step.seconds)}"]
    lines = [f"a step takes {_ms(step.seconds)}"]
    for diagnosis in found:
        lines.append(f"{diagnosis.symptom.value}: {diagnosis.evidence}")
        lines.append(f"  -> {diagnosis.remedy}: {_ms(diagnosis.seconds)} predicted")
    return lines


def _buckets(run: Timeline) -> str:
    return "1 bucket" if len(run.events) == 1 else f"{len(run.events)} buckets"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
