"""What a person sees of a training run: the placement, a live line, the final table.

Scope: rich tables and progress; plain lines where the output is no terminal.
Not here: the figures themselves (`apps/train.py`, the engine).
Owner: the training thread.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from tierstore.apps.plain import show_plain
from tierstore.config import Tier, format_size

_LINE_INTERVAL_S = 5.0
_LINKS = {"nvme_read": "disk read", "nvme_write": "disk write", "h2d": "to GPU tier", "d2h": "from GPU tier"}
_PHASES = {"wait": "waiting for weights, of these"}
_SMOOTHING = 0.8  # of the rates in the live line


@dataclass(slots=True)
class Totals:
    """Sums and peaks over the steps of this process.

    Attributes:
        seconds: by phase. `bytes`: by link. `peak_bytes`: by tier.
        held_out_before, held_out_after: mean loss on the held-out text, nats per byte.
        diverged_at: the first step whose loss was infinite or NaN.
        wall_s: seconds of the loop, evaluation not included.
    """

    first_step: int = 0
    last_step: int = 0
    steps: int = 0
    skipped: int = 0
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    diverged_at: int | None = None
    held_out_before: float | None = None
    held_out_after: float | None = None
    wall_s: float = 0.0
    seconds: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0

    def add(self, report: Any, loss: float, tokens: int) -> None:
        """Counts one finished step."""
        if self.steps == 0:
            self.first_step, self.first_loss = report.step, loss
        if self.diverged_at is None and not math.isfinite(loss):
            self.diverged_at = report.step
        self.steps += 1
        self.skipped += report.skipped
        self.last_step, self.last_loss = report.step, loss
        self.tokens += tokens
        self.seconds.update(report.seconds)
        self.bytes.update(report.bytes)
        for tier, peak in report.peak_bytes.items():
            self.peak_bytes[tier] = max(peak, self.peak_bytes.get(tier, 0))


def efficiency(seconds: Any) -> float:
    """Share of a step in which the model computes: (forward + backward - waits for weights) / total.

    Backward's waits until gradients have left the device count as computing, because a GPU computes meanwhile. On a CPU
    it does not, so there the share is too high where these waits are long.

    Source: ZeRO-Infinity (Rajbhandari et al., 2021), section 4.1, compute time over step time.
    """
    total = seconds.get("total", 0.0)
    busy = seconds.get("forward", 0.0) + seconds.get("backward", 0.0) - seconds.get("wait", 0.0)
    return min(1.0, max(0.0, busy / total)) if total > 0 else 0.0


class Reporter:
    """Writes to one console.

    Args:
        clock: seconds, for the interval of plain lines.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line_s = float("-inf")
        self._rates: dict[str, float] = {}

    def say(self, sentence: str) -> None:
        """One line of text, not interpreted."""
        show_plain(self.console, sentence)

    def placement(self, rows: Iterable[Any], *, has_gpu: bool) -> None:
        """Which kind of data lives on which tier."""
        table = Table(title="placement", title_justify="left")
        for name in ("kind", "tier"):
            table.add_column(name)
        for name in ("groups", "size"):
            table.add_column(name, justify="right")
        for row in rows:
            is_memory = row.tier is Tier.GPU and not has_gpu
            tier = f"{row.tier.value} (main memory)" if is_memory else row.tier.value
            table.add_row(row.kind.value, tier, f"{row.groups:,}", format_size(row.bytes))
        self.console.print(table)

    def codecs(self, decided: Mapping[str, Mapping[str, str]]) -> None:
        """How each kind is stored, and why: a line each."""
        for kind, choice in decided.items():
            self.say(f"codec of {kind}: {choice['codec']}; {choice['why']}")

    def start(self, first_step: int, last_step: int) -> None:
        """Begins the live line; without a terminal there is none."""
        if not self.console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=16),
            TextColumn("{task.description}"), TimeRemainingColumn(), console=self.console, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("the first step ...", total=last_step, completed=first_step)
        self._progress.start()

    def step(self, report: Any, loss: float, tokens: int, last_step: int) -> None:
        """One finished step: the live line, or a plain line now and then."""
        text = self._line(report, loss, tokens)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=report.step, description=text)
            return
        now = self._clock()
        if now - self._last_line_s >= _LINE_INTERVAL_S or report.step == last_step:
            self._last_line_s = now
            self.say(f"step {report.step}/{last_step}  {text}")

    def stop(self) -> None:
        """Ends the live line. Twice is fine."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def summary(self, totals: Totals) -> None:
        """The table at the end."""
        table = Table(title="result", title_justify="left", show_header=False)
        table.add_column("what")
        table.add_column("value", justify="right")
        for name, value in summary_rows(totals):
            table.add_row(name, value)
        self.console.print(table)

    def _line(self, report: Any, loss: float, tokens: int) -> str:
        seconds = max(report.seconds.get("total", 0.0), 1e-9)
        rates = {"tokens": tokens / seconds, "efficiency": efficiency(report.seconds)}
        rates.update({link: count / seconds for link, count in report.bytes.items()})
        for name, rate in rates.items():
            self._rates[name] = _SMOOTHING * self._rates.get(name, rate) + (1 - _SMOOTHING) * rate
        links = "  ".join(
            f"{label} {self._rates[link] / 1e9:.2f} GB/s" for link, label in _LINKS.items() if self._rates.get(link)
        )
        parts = [f"loss {loss:.3f}", f"{self._rates['tokens']:,.0f} tokens/s", links,
                 f"efficiency {self._rates['efficiency']:.0%}"]  # fmt: skip
        return "  ".join(part for part in parts if part)


def summary_rows(totals: Totals) -> list[tuple[str, str]]:
    """Names and values of the final table."""
    rows = [("steps", f"{totals.steps}" + (f" ({totals.first_step} to {totals.last_step})" if totals.steps else ""))]
    if totals.skipped:
        rows.append(("steps skipped for overflow", str(totals.skipped)))
    if totals.diverged_at is not None:
        rows.append(("the loss is no number", f"since step {totals.diverged_at}: the run has diverged"))
    losses = (
        ("training loss", totals.first_loss, totals.last_loss),
        ("held-out loss, nats per byte", totals.held_out_before, totals.held_out_after),
    )
    for name, first, last in losses:
        if first is not None and last is not None:
            rows.append((name, f"{first:.3f} -> {last:.3f}"))
    if totals.steps and totals.wall_s > 0:
        rows.append(("tokens per second", f"{totals.tokens / totals.wall_s:,.0f}"))
        rows.append(("seconds per step", f"{totals.wall_s / totals.steps:.2f}"))
        rows += [
            (f"  {_PHASES.get(name, name)}", f"{seconds / totals.steps:.2f}")
            for name, seconds in totals.seconds.items()
            if name != "total"
        ]
        rows.append(("efficiency", f"{efficiency(totals.seconds):.0%}"))
        rows += [
            (f"{_LINKS.get(link, link)} per step", format_size(count / totals.steps))
            for link, count in totals.bytes.items()
            if count
        ]
    rows += [(f"peak of tier {tier}", format_size(peak)) for tier, peak in totals.peak_bytes.items()]
    if totals.peak_rss_bytes:
        rows.append(("peak resident memory", format_size(totals.peak_rss_bytes)))
    return rows
