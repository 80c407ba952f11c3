"""Seconds by phase, bytes by link, peaks by tier.

Scope: reading the counters of all parts once per step. Not here: the counters.
Owner: the training side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tierstore.train.assembly import Assembly
from tierstore.train.report import StepReport

_PHASES = ("forward", "backward", "update")


class StepMeters:
    """What happened since the last report."""

    def __init__(self, parts: Assembly, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self._seconds = dict.fromkeys(_PHASES, 0.0)
        self._stall_s = 0.0
        self._since = clock()
        self._bytes = self._links()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs in here as a phase of the step."""
        start = self._clock()
        try:
            with self._parts.tracer.measure("step", name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """What runs in here, such as an evaluation, does not count as time of a step."""
        start, stall_s = self._clock(), self._parts.access.stall_s
        try:
            with self._parts.tracer.measure("step", "evaluation"):
                yield
        finally:
            self._since += self._clock() - start
            self._stall_s += self._parts.access.stall_s - stall_s

    @property
    def computing_s(self) -> float:
        """Seconds of forward and backward since the last report, without waiting for weights."""
        waiting_s = self._parts.access.stall_s - self._stall_s
        return max(self._seconds["forward"] + self._seconds["backward"] - waiting_s, 0.0)

    def report(
        self, *, step: int, grad_norm: float | None, loss_scale: float, skipped: bool, lr: list[float],
        loss: float | None,
    ) -> StepReport:  # fmt: skip
        """The report of the step that ends now; the next step is counted from here."""
        now, links, stall_s = self._clock(), self._links(), self._parts.access.stall_s
        seconds = self._seconds | {"wait": stall_s - self._stall_s, "total": now - self._since}
        moved = {link: links[link] - self._bytes[link] for link in links}
        self._seconds = dict.fromkeys(_PHASES, 0.0)
        self._since, self._bytes, self._stall_s = now, links, stall_s
        for link, nbytes in moved.items():
            self._parts.tracer.counter(link, "bytes per step", nbytes)
        depth, schedule = self._parts.access.depth, self._parts.driver.schedule.value
        peaks = self._peaks()
        return StepReport(step, grad_norm, loss_scale, skipped, lr, seconds, moved, peaks, depth, schedule, loss)

    def totals(self) -> dict[str, Any]:
        """Totals since the engine was made."""
        return {
            "bytes": self._links(),
            "peak_bytes": self._peaks(),
            "stall_s": self._parts.access.stall_s,
            "generation": self._parts.store.commits.generation,
            "snapshots": {name: kept.report() for name, kept in self._parts.store.commits.snapshots.items()},
            "codecs": {
                kind.value: {"codec": choice.codec.value, "why": choice.why}
                for kind, choice in self._parts.store.codecs.items()
            },
            "prefetch_depth": self._parts.access.depth,
            "not_on_gpu": self._parts.not_on_gpu,
            "buffered_directories": sorted(map(str, self._parts.backend.buffered_directories)),
        }

    def _links(self) -> dict[str, int]:
        disk, link = self._parts.backend.counters.totals(), self._parts.device.counters.totals()
        return {
            "nvme_read": disk.read_bytes,
            "nvme_write": disk.written_bytes,
            "h2d": link.h2d_bytes,
            "d2h": link.d2h_bytes,
        } | {name: meter.totals()[0] for name, meter in self._parts.links.items()}

    def _peaks(self) -> dict[str, int]:
        store = self._parts.store
        return {
            "gpu": store.gpu_budget.peak_bytes + self._parts.collector.peak_bytes + store.placement.gpu_update_bytes,
            "cpu": store.cpu_peak_bytes,
        }
