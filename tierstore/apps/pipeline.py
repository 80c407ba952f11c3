"""Layers that are fetched ahead of their use, on paper: a table, a Gantt chart, a verdict, JSON.

Scope: what `tierstore simulate step` asks and shows.
Not here: the run (`plan/simulate.py`); the prediction of a real model's step (`apps/tune.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.apps.buckets import size_text
from tierstore.apps.files import write_object
from tierstore.apps.output_files import check_outputs
from tierstore.errors import ConfigError
from tierstore.plan.buckets import Layer
from tierstore.plan.simulate import Link, Span, Track, Visit, run_steps
from tierstore.plots import new_figure, save_figure

if TYPE_CHECKING:
    from rich.table import Table

_WARM_UP_STEPS = 3
_SAME = 0.01  # times that differ by a smaller part count as the same
_DEEPEST = 64
_SHOWN_VISITS = 10  # in the text timeline; the plot shows the whole step


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineOptions:
    """What a person asks of `tierstore simulate step`, in bytes and seconds.

    Attributes:
        layers: in the order of forward, with forward's time.
        backward: time of backward in multiples of forward's; 0 leaves it out.
        memory: for layers on the device; None is depth + 1 times the largest layer.
        disks: rates; layers are striped over all disks in proportion to their rates.
        other_bytes: other traffic of the disks per visit of a layer.
        steps: number of steps over which means are taken, with jitter.
    """

    layers: tuple[Layer, ...]
    depths: tuple[int, ...]
    backward: float
    memory: int | None
    disks: tuple[float, ...]
    other_bytes: int
    ranks: int
    gather_bytes_per_s: float
    jitter: float
    seed: int
    steps: int
    plot: Path | None
    json: Path | None

    def __post_init__(self) -> None:
        if wrong := [depth for depth in self.depths if not 0 <= depth <= _DEEPEST]:
            raise ConfigError(f"--depth is 0 to {_DEEPEST} layers, not {wrong[0]}")
        for name, value, least in (("ranks", self.ranks, 1), ("steps", self.steps, 1), ("backward", self.backward, 0)):
            if not (math.isfinite(value) and value >= least):
                raise ConfigError(f"--{name} must be at least {least}, not {value}")
        if not all(rate > 0 for rate in (*self.disks, self.gather_bytes_per_s)):
            raise ConfigError("a rate of 0 bytes per second moves nothing: give --disk and --gather a positive one")
        if not any(layer.compute_s for layer in self.layers):
            raise ConfigError("a step that computes nothing hides nothing: give a --layer some milliseconds")
        largest = max(layer.nbytes for layer in self.layers)
        if self.memory is not None and self.memory < largest:
            raise ConfigError(
                f"--memory {size_text(self.memory)} cannot hold the largest layer, {size_text(largest)}: give more"
            )

    @property
    def order(self) -> tuple[Visit, ...]:
        """The visits of a step: forward, and backward in reverse."""
        forward = [Visit(group, one.nbytes, one.compute_s, self.other_bytes) for group, one in enumerate(self.layers)]
        back = [replace(visit, compute_s=self.backward * visit.compute_s) for visit in reversed(forward)]
        return (*forward, *(back if self.backward else ()))

    @property
    def links(self) -> tuple[Link, ...]:
        disks = Link(sum(self.disks), share=1 / self.ranks)
        return (disks,) if self.ranks == 1 else (disks, Link(self.gather_bytes_per_s, share=1 - 1 / self.ranks))

    def capacity_bytes(self, depth: int) -> int:
        """Memory for layers at this depth."""
        return self.memory if self.memory is not None else (depth + 1) * max(layer.nbytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class DepthRow:
    """Means over the steps of one depth; `shown` is one of them, with what the step before it has left on the links."""

    depth: int
    seconds: float
    compute_s: float
    stall_s: float
    link_s: float
    loads: float
    peak_bytes: int
    shown: tuple[Span, ...]


def run(options: PipelineOptions) -> tuple[DepthRow, ...]:
    """A row per depth, after a check that the files that are asked for can be written (by `save`).

    Raises:
        ConfigError: one cannot be written.
    """
    check_outputs(json=options.json, plot=options.plot)
    return tuple(_row(options, depth) for depth in options.depths)


def save(options: PipelineOptions, rows: Sequence[DepthRow]) -> None:
    """Writes the files that are asked for.

    Raises:
        StorageError: one cannot be written.
    """
    if options.json is not None:
        write_object(options.json, as_json(options, rows), "--json")
    if options.plot is not None:
        draw(options, rows, options.plot)


def _row(options: PipelineOptions, depth: int) -> DepthRow:
    count = options.steps if options.jitter else 1
    steps = run_steps(
        options.order, options.capacity_bytes(depth), depth, options.links, jitter=options.jitter, seed=options.seed
    )
    before, *runs = itertools.islice(steps, _WARM_UP_STEPS - 1, _WARM_UP_STEPS + count)
    seconds, compute_s, stall_s, link_s, loads = (
        sum(values) / count
        for values in zip(*((run.seconds, run.compute_s, run.stall_s, run.link_s, sum(run.loads)) for run in runs))
    )
    peak_bytes = max(run.peak_bytes for run in runs)
    begun = (replace(s, start_s=s.start_s - before.seconds, end_s=s.end_s - before.seconds) for s in before.timeline)
    shown = (*(span for span in begun if span.end_s > 0), *runs[0].timeline)
    return DepthRow(depth, seconds, compute_s, stall_s, link_s, loads, peak_bytes, shown)


def as_table(options: PipelineOptions, rows: Sequence[DepthRow]) -> Table:
    """The depths for a terminal; the shortest steps are marked."""
    from rich.table import Table

    visits = len(options.order)
    disks = " + ".join(f"{rate / 1e9:.4g}" for rate in options.disks)
    table = Table(
        title=f"{len(options.layers)} layers, {size_text(sum(layer.nbytes for layer in options.layers))}, "
        f"{visits} visits a step; disk {disks} GB/s"
        + (f"; {options.ranks} ranks, {options.gather_bytes_per_s / 1e9:.4g} GB/s" if options.ranks > 1 else "")
        + (f"; jitter {options.jitter:.0%}, mean of {options.steps} steps" if options.jitter else ""),
        title_justify="left",
    )
    for name in ("depth", "buffers", "step ms", "per visit", "stall ms", "loads", "link", "peak"):
        table.add_column(name, justify="right", no_wrap=True)
    shortest_s = min(row.seconds for row in rows) * (1 + _SAME)
    for row in rows:
        buffers = "" if options.memory is not None else str(row.depth + 1)
        table.add_row(
            str(row.depth), buffers, f"{row.seconds * 1e3:.1f}", f"{row.seconds / visits * 1e3:.1f}",
            f"{row.stall_s * 1e3:.1f}", f"{row.loads:.0f}", f"{row.link_s / row.seconds:.0%}",
            size_text(row.peak_bytes), style="bold" if row.seconds <= shortest_s else None,
        )  # fmt: skip
    return table


def verdict(options: PipelineOptions, rows: Sequence[DepthRow]) -> str:
    """What bounds the step, and what another buffer is worth, in words."""
    best = min(row.seconds for row in rows)
    chosen = next(row for row in rows if row.seconds <= best * (1 + _SAME))
    visits = len(options.order)
    compute_ms, step_ms = chosen.compute_s / visits * 1e3, chosen.seconds / visits * 1e3
    if not options.other_bytes and not any(row.loads for row in rows):
        return "All layers stay on the device: nothing is fetched, at any depth."
    if not options.other_bytes and not chosen.loads:
        text = f"All layers stay on the device at depth {chosen.depth}: nothing is fetched."
    elif chosen.stall_s <= _SAME * chosen.seconds:
        text = f"Compute-bound: depth {chosen.depth} hides the transfers ({step_ms:.1f} ms a visit, all computing)."
    elif chosen.link_s >= (1 - _SAME) * chosen.seconds:
        each = f"{chosen.link_s / max(chosen.loads, 1) * 1e3:.1f} ms a fetch"
        if options.other_bytes:
            each = f"{chosen.link_s / visits * 1e3:.1f} ms a visit with all its traffic"
        text = (
            f"Bandwidth-bound: the slowest link is busy all the time, {each} beside "
            f"{compute_ms:.1f} ms of computing a visit; no depth hides that. What would: a link "
            f"{chosen.link_s / chosen.compute_s:.1f} times as fast, or as much more computing a visit (a larger batch)."
        )
    else:
        text = (
            f"Neither link nor compute is busy all the time ({chosen.link_s / chosen.seconds:.0%} and "
            f"{chosen.compute_s / chosen.seconds:.0%}): they wait for each other, {chosen.stall_s * 1e3:.1f} ms a step."
        )
    return f"{text} {_worth_of_buffers(options, rows)}".strip()


def _worth_of_buffers(options: PipelineOptions, rows: Sequence[DepthRow]) -> str:
    double = next((row for row in rows if row.depth == 1), None)
    deeper = [row for row in rows if row.depth > 1]
    if double is None or not deeper:
        return ""
    best = min(deeper, key=lambda row: row.seconds)
    gain = double.seconds / best.seconds - 1
    if gain <= _SAME:
        return (
            f"A third buffer gains nothing over two (depth 1: {double.seconds * 1e3:.1f} ms, depth {best.depth}: "
            f"{best.seconds * 1e3:.1f} ms): buffers do not raise the rate of a link."
        )
    fewer = double.loads - best.loads
    causes = [f"{fewer:.0f} fewer fetches, for the memory holds more layers over the turn"] if fewer > 0 else []
    causes += ["links in series work at once"] if options.ranks > 1 else []
    causes += ["it absorbs jitter"] if options.jitter else []
    causes += ["it absorbs unequal layers"] if len(set(options.layers)) > 1 or options.backward not in (0, 1) else []
    reason = f": {'; '.join(causes)}" if causes else ""
    return f"Depth {best.depth} is {gain:.1%} faster than two buffers{reason}."


# --- the chart ------------------------------------------------------------------------------------------------------


def _lanes(options: PipelineOptions, shown: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Names of the lanes from the top, each with its busy spans; all disks of a stripe have the same spans."""
    computing = [span for span in shown if span.track is Track.COMPUTE]
    links = [[s for s in shown if s.track is Track.LINK and s.link == index] for index in range(2)]
    count = len(options.disks)
    disks = [(f"disk {index + 1}" if count > 1 else "disk", links[0]) for index in range(count)]
    return [("compute", computing), *disks, *([("gather", links[1])] if options.ranks > 1 else [])]


def as_text(options: PipelineOptions, rows: Sequence[DepthRow], width: int) -> str:
    """The first visits of each depth as lines: a digit is the last one of a layer's number, `+` is other traffic."""
    visits = options.order[:_SHOWN_VISITS]
    window_s = max(max(visit.compute_s for visit in visits), rows[-1].seconds / len(options.order)) * len(visits)
    columns = max(20, min(width, 120) - 18)
    lines = [f"the first {window_s * 1e3:.0f} ms of a step; a digit is the last one of a layer's number"]
    for row in rows:
        for position, (name, spans) in enumerate(_lanes(options, row.shown)):
            cells = ["·"] * columns
            for span in spans:
                first, end = (int(at / window_s * columns + 0.5) for at in (span.start_s, span.end_s))
                for cell in range(max(first, 0), min(end, columns)):
                    cells[cell] = "+" if span.group is None else str(span.group % 10)
            lines.append(f"{f'depth {row.depth}' if position == 0 else '':9}{name:8} {''.join(cells)}")
    return "\n".join(lines)


def draw(options: PipelineOptions, rows: Sequence[DepthRow], path: Path) -> None:
    """A Gantt chart: a panel per depth, a lane per link and for compute."""
    lanes = len(_lanes(options, rows[0].shown))
    figure = new_figure(11, 1.2 + len(rows) * (0.55 + 0.3 * lanes))
    all_axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for axes, row in zip(all_axes, rows):
        for height, (_, spans) in enumerate(named := _lanes(options, row.shown)):
            ordered = [span for span in spans if span.group is not None]
            shades = ["tab:blue" if span.group is not None and span.group % 2 else "tab:cyan" for span in ordered]
            axes.broken_barh(_bars(ordered), (height - 0.4, 0.8), facecolors=shades)
            others = [span for span in spans if span.group is None]
            axes.broken_barh(_bars(others), (height - 0.4, 0.8), facecolors="tab:orange")
            axes.set_yticks(range(len(named)), [name for name, _ in named])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        end_s = max(span.end_s for span in row.shown if span.track is Track.COMPUTE)
        axes.axvline(end_s * 1e3, color="0.3", linewidth=1, linestyle=":")
        axes.set_title(
            f"depth {row.depth}: step {row.seconds * 1e3:.0f} ms, stall {row.stall_s * 1e3:.0f} ms",
            loc="left", fontsize="small",
        )  # fmt: skip
    all_axes[-1].set_xlabel("time from the start of the step, ms (dotted: its end; orange: other traffic)")
    save_figure(figure, path)


def _bars(spans: Sequence[Span]) -> list[tuple[float, float]]:
    return [(span.start_s * 1e3, (span.end_s - span.start_s) * 1e3) for span in spans]


def as_json(options: PipelineOptions, rows: Sequence[DepthRow]) -> dict[str, Any]:
    """Everything of a run; bytes and seconds."""
    figures = ("depth", "seconds", "compute_s", "stall_s", "link_s", "loads", "peak_bytes")
    return {
        "layers": [asdict(layer) for layer in options.layers],
        "links": [asdict(link) for link in options.links],
        "visits": len(options.order),
        "verdict": verdict(options, rows),
        "rows": [
            {key: getattr(row, key) for key in figures}
            | {"timeline": [asdict(span) | {"track": span.track.value} for span in row.shown]}
            for row in rows
        ],
    }
