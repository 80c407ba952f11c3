"""When buckets of gradients are reduced: the timeline of a step, and the bucket size that suits it.

Scope: buckets formed from gradients, their collectives on one channel, sweeps over the bucket size.
Not here: the cost of one collective (`plan/cost_model.py`), what to do about a measured step (`plan/diagnosis.py`).

[Note: the channel]
Collectives of one group start in one order and share one channel. A bucket starts when its gradients are ready, all
earlier buckets have started, and fewer than `max_in_flight` of them are unfinished. The fixed costs of collectives in
flight together overlap, but their bytes go one after the other: more in flight hide alpha, never n / beta. While a
collective runs, compute has only the rest of the cores (`CostModel.cores`), which delays all later gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.plan.cost_model import CostModel

_CAPS_PER_OCTAVE = 8
_ROUNDING = 1e-12  # relative rounding error of sums of times


@dataclass(frozen=True, slots=True)
class Layer:
    """A part of backward: its compute, after which its gradients of `nbytes` are ready."""

    nbytes: int
    compute_s: float

    def __post_init__(self) -> None:
        if not (self.nbytes >= 0 and self.compute_s >= 0 and math.isfinite(self.compute_s)):
            raise ConfigError(f"bytes and seconds of a layer cannot be negative: {self}")


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient of `nbytes` that is ready `ready_s` after the start of the step."""

    nbytes: int
    ready_s: float

    def __post_init__(self) -> None:
        if not (self.nbytes >= 0 and self.ready_s >= 0 and math.isfinite(self.ready_s)):
            raise ConfigError(f"bytes and seconds of a gradient cannot be negative: {self}")


@dataclass(frozen=True, slots=True)
class BucketEvent:
    """One bucket of one step, computed or measured; times in seconds from the start of the step.

    Attributes:
        ready_s: its last gradient is ready.
        start_s: its collective is launched.
        end_s: its collective is done.
    """

    index: int
    nbytes: int
    ready_s: float
    start_s: float
    end_s: float

    def exposed_s(self, compute_s: float) -> float:
        """The part of the collective's time that lies after the compute."""
        return max(0.0, self.end_s - max(self.start_s, compute_s))


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step up to its last reduced gradient.

    Attributes:
        compute_s: when forward and backward are done, or would be without collectives beside them.
        slowed_s: how much collectives beside them delay that.
        events: in the order of launch.
    """

    compute_s: float
    events: tuple[BucketEvent, ...]
    slowed_s: float = 0.0

    @property
    def seconds(self) -> float:
        """When compute and all collectives are done."""
        return max([self.compute_s + self.slowed_s, *(event.end_s for event in self.events)])

    @property
    def communication_s(self) -> float:
        """Time in which a collective runs; several at once count once."""
        return self._busy_s(0.0)

    @property
    def exposed_s(self) -> float:
        """Time after the compute in which a collective runs."""
        return self._busy_s(self.compute_s + self.slowed_s)

    @property
    def hidden_share(self) -> float:
        """Share of the communication that costs nothing, `1 - (T_overlap - T_compute) / T_comm`; 1 without any.

        0 if a measured channel stood idle after the compute, so that the step took longer than compute and
        communication in turn.
        """
        communication_s = self.communication_s
        return max(0.0, 1 - (self.seconds - self.compute_s) / communication_s) if communication_s > 0 else 1.0

    def _busy_s(self, from_s: float) -> float:
        busy_s, free_s = 0.0, from_s
        for event in sorted(self.events, key=lambda event: event.start_s):
            busy_s += max(0.0, event.end_s - max(event.start_s, free_s))
            free_s = max(free_s, event.end_s)
        return busy_s


def backward(layers: Sequence[Layer], start_s: float = 0.0) -> tuple[Gradient, ...]:
    """The gradients of layers, given in the order in which backward computes them; `start_s` is the time before."""
    gradients, now_s = [], start_s
    for layer in layers:
        now_s += layer.compute_s
        gradients.append(Gradient(layer.nbytes, now_s))
    return tuple(gradients)


def form_buckets(sizes: Sequence[int], cap_bytes: float, first_cap_bytes: float | None = None) -> tuple[range, ...]:
    """Runs of indices, each closed by the gradient that brings it to the cap: DDP's rule, so a bucket may exceed it.

    Args:
        first_cap_bytes: cap of the first bucket alone (DDP: 1 MiB); None is `cap_bytes`.

    Source: `compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    first = cap_bytes if first_cap_bytes is None else first_cap_bytes
    if not (cap_bytes > 0 and first > 0):
        raise ConfigError(f"a bucket holds at least one byte, not {min(cap_bytes, first)}")
    runs: list[range] = []
    begin = nbytes = 0
    for index, size in enumerate(sizes):
        nbytes += size
        if nbytes >= (cap_bytes if runs else first):
            runs.append(range(begin, index + 1))
            begin, nbytes = index + 1, 0
    if begin < len(sizes):
        runs.append(range(begin, len(sizes)))
    return tuple(runs)


def timeline(
    gradients: Sequence[Gradient],
    buckets: Sequence[Sequence[int]],
    model: CostModel,
    *,
    compute_s: float | None = None,
    max_in_flight: int = 1,
    overlap: bool = True,
) -> Timeline:
    """The step of these buckets, launched in this order. See [Note: the channel].

    Every launch delays all later compute by `launch_s`, and every collective by `CostModel.cores` of its own time.

    Args:
        buckets: indices of gradients; a bucket is ready with the last of them.
        compute_s: when compute would be done without launches; None: with the last gradient.
        overlap: False starts every bucket after the compute.

    Raises:
        ConfigError: `max_in_flight` below 1, or compute that ends before a gradient is ready.
    """
    last_s = max((gradient.ready_s for gradient in gradients), default=0.0)
    end_s = last_s if compute_s is None else compute_s
    if max_in_flight < 1:
        raise ConfigError(f"at least one bucket is in flight, not {max_in_flight}")
    if end_s < last_s:
        raise ConfigError(f"compute cannot end at {end_s} s: a gradient is ready at {last_s} s")
    end_s += model.launch_s * len(buckets)
    ends_s: list[float] = []
    events: list[BucketEvent] = []
    wire_free_s = launched_s = 0.0
    for index, members in enumerate(buckets):
        nbytes = sum(gradients[member].nbytes for member in members)
        computed_s = max((gradients[member].ready_s for member in members), default=0.0) + model.launch_s * index
        ready_s = _reached(computed_s, events, model.cores)
        start_s = max(ready_s if overlap else end_s, launched_s)
        if index >= max_in_flight:
            start_s = max(start_s, ends_s[index - max_in_flight])
        launched_s = start_s
        wire_free_s = max(start_s + model.alpha_s, wire_free_s) + nbytes / model.beta_bytes_per_s
        ends_s.append(wire_free_s)
        events.append(BucketEvent(index, nbytes, ready_s, start_s, wire_free_s))
    slowed_s = _reached(end_s, events, model.cores) - end_s if overlap else 0.0
    return Timeline(end_s, tuple(events), slowed_s)


def _reached(computed_s: float, events: Sequence[BucketEvent], cores: float) -> float:
    """When `computed_s` seconds of compute are done, beside collectives that take the share `cores` while they run."""
    if not cores:
        return computed_s
    now_s, left_s = 0.0, computed_s
    for event in events:
        begin_s = max(event.start_s, now_s)
        # A gradient ready as a collective starts counts as ready before: an ulp late, it would wait for all of it.
        if left_s <= begin_s - now_s + _ROUNDING * begin_s:
            break
        left_s -= begin_s - now_s
        now_s = max(event.end_s, begin_s)
        beside_s = (now_s - begin_s) * (1 - cores)
        if left_s <= beside_s:
            return begin_s + left_s / (1 - cores)
        left_s -= beside_s
    return now_s + left_s


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A bucket size, and the step that it makes.

    Attributes:
        largest_bytes: size of the largest bucket.
        seconds, serial_s: time of the step with and without overlap.
    """

    cap_bytes: float
    buckets: int
    largest_bytes: int
    seconds: float
    serial_s: float
    communication_s: float
    exposed_s: float
    hidden_share: float


def sweep(
    gradients: Sequence[Gradient],
    model: CostModel,
    caps_bytes: Sequence[float],
    *,
    compute_s: float | None = None,
    max_in_flight: int = 1,
    first_cap_bytes: float | None = None,
) -> tuple[SweepRow, ...]:
    """The step at each bucket size."""
    rows = []
    for cap_bytes in caps_bytes:
        buckets = form_buckets([gradient.nbytes for gradient in gradients], cap_bytes, first_cap_bytes)
        run, serial = (
            timeline(gradients, buckets, model, compute_s=compute_s, max_in_flight=max_in_flight, overlap=overlap)
            for overlap in (True, False)
        )
        rows.append(
            SweepRow(
                cap_bytes, len(buckets), max((event.nbytes for event in run.events), default=0), run.seconds,
                serial.seconds, run.communication_s, run.exposed_s, run.hidden_share,
            )
        )  # fmt: skip
    return tuple(rows)


def candidate_caps(sizes: Sequence[int]) -> tuple[int, ...]:
    """Bucket sizes worth a try, ascending: from the smallest gradient to all of them, eight to an octave."""
    total = sum(sizes)
    smallest = min((size for size in sizes if size > 0), default=0)
    if not smallest:
        return (1,)
    steps = math.ceil(_CAPS_PER_OCTAVE * math.log2(total / smallest))
    caps = {round(total / 2 ** (step / _CAPS_PER_OCTAVE)) for step in range(steps)}
    return tuple(sorted(caps | {smallest, total}))


def best_bucket_bytes(
    gradients: Sequence[Gradient],
    model: CostModel,
    *,
    compute_s: float | None = None,
    max_in_flight: int = 1,
    first_cap_bytes: float | None = None,
    slack: float = 0.0,
) -> int:
    """The cap of `candidate_caps` with the shortest simulated step, or a larger one that makes the same buckets.

    Of equally good caps the largest is taken.

    Args:
        first_cap_bytes: cap of the first bucket, if it is fixed.
        slack: a step that is longer by this share is equally good.
    """
    sizes = [gradient.nbytes for gradient in gradients]
    caps = candidate_caps(sizes)
    rows = sweep(
        gradients, model, caps, compute_s=compute_s, max_in_flight=max_in_flight, first_cap_bytes=first_cap_bytes
    )
    limit_s = min(row.seconds for row in rows) * (1 + slack) + 1e-12  # a picosecond for the rounding of sums
    best = max(cap for cap, row in zip(caps, rows) if row.seconds <= limit_s)
    return _loosest(sizes, best, first_cap_bytes)


def _loosest(sizes: Sequence[int], cap_bytes: int, first_cap_bytes: float | None) -> int:
    """The largest cap that makes the same buckets: the size of the smallest one that was closed by reaching the cap."""
    runs = form_buckets(sizes, cap_bytes, first_cap_bytes)
    closed = runs[:-1] if first_cap_bytes is None else runs[1:-1]
    return min((sum(sizes[index] for index in run) for run in closed), default=max(cap_bytes, sum(sizes)))
