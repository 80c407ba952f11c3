"""A profiled step for the eye: a table and a timeline as text, a timeline as a picture.

Scope: lines of text that fit a terminal of 100 columns, a picture.
Not here: the figures (`overlap_steps.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tierstore.config import format_size
from tierstore.plan.buckets import BucketEvent
from tierstore.plots import new_figure, save_figure
from tierstore.train.data_parallel.overlap_steps import ProfiledStep, Summary

_COLUMNS = 72  # of the bars
_MOST_ROWS = 40
_WAITING, _HIDDEN, _EXPOSED, _COMPUTE, _PAUSE = ".", "=", "#", "-", "x"


def table_lines(summary: Summary) -> list[str]:
    """Medians per step and per bucket."""
    lines = [
        f"{summary.steps} steps, median {_ms(summary.seconds)}: compute {_ms(summary.compute_s)}, "
        f"exposed communication {_ms(summary.exposed_s)}, rest {_ms(summary.rest_s)}",
        f"communication {_ms(summary.communication_s)}, {summary.hidden_share:.0%} of it hidden",
        f"{'bucket':>6} {'size':>9} {'ready ms':>9} {'launch ms':>9} {'done ms':>9} {'comm. ms':>9} {'exposed':>9} "
        f"{'hidden':>7}",
    ]
    for row in summary.buckets[:_MOST_ROWS]:
        times = (row.ready_s, row.start_s, row.end_s, row.communication_s, row.exposed_s)
        columns = " ".join(f"{seconds * 1e3:9.2f}" for seconds in times)
        lines.append(f"{row.index:>6} {format_size(row.nbytes):>9} {columns} {row.hidden_share:7.0%}")
    return lines + _left_out(len(summary.buckets))


def timeline_lines(step: ProfiledStep) -> list[str]:
    """One line for the compute and one for each bucket."""
    end_s = max(step.seconds, step.timeline.seconds, 1e-9)
    run = step.timeline

    def place(seconds: float) -> int:
        return min(_COLUMNS, max(0, round(seconds / end_s * _COLUMNS)))

    def bar(*spans: tuple[float, float, str]) -> str:
        cells = [" "] * _COLUMNS
        for begin_s, stop_s, mark in spans:
            first = min(place(begin_s), _COLUMNS - 1)
            last = max(place(stop_s), first + 1)
            cells[first:last] = mark * (last - first)
        return "".join(cells).rstrip()

    pauses = [(pause.start_s, min(pause.end_s, run.compute_s), _PAUSE) for pause in step.measured.pauses
              if pause.start_s < run.compute_s]  # fmt: skip
    last = f"{end_s * 1e3:.4g} ms"
    lines = [
        " " * 18 + "0 ms" + last.rjust(_COLUMNS - 4),
        f"{'compute':>17} {bar((0.0, run.compute_s, _COMPUTE), *pauses)}",
    ]
    gathers = step.gathers[:_MOST_ROWS]
    lines += [f"{_label('gather', event)} {bar((event.start_s, event.end_s, _HIDDEN))}" for event in gathers]
    buckets = run.events[:_MOST_ROWS]
    lines += [f"{_label('bucket', event)} {bar(*_parts(event, run.compute_s))}" for event in buckets]
    marks = f"{_COMPUTE} compute   {_WAITING} ready, not launched   {_HIDDEN} collective, hidden   {_EXPOSED} exposed"
    return [*lines, *_left_out(len(run.events)), " " * 18 + marks + (f"   {_PAUSE} pause" if pauses else "")]


def _parts(event: BucketEvent, compute_s: float) -> list[tuple[float, float, str]]:
    parts = []
    if event.start_s > event.ready_s:
        parts.append((event.ready_s, event.start_s, _WAITING))
    if event.start_s < compute_s:
        parts.append((event.start_s, min(event.end_s, compute_s), _HIDDEN))
    if event.end_s > compute_s:
        parts.append((max(event.start_s, compute_s), event.end_s, _EXPOSED))
    return parts


def _label(kind: str, event: BucketEvent) -> str:
    name = f"{kind[0]}{event.index}"
    return f"{name:>6} {format_size(event.nbytes):>10}"


def _left_out(count: int) -> list[str]:
    return [f"{'...':>6} and {count - _MOST_ROWS} more"] if count > _MOST_ROWS else []


def draw_timeline(step: ProfiledStep, path: str | os.PathLike[str]) -> None:
    """Compute, gathers and buckets as bars over time."""
    run = step.timeline
    rows = 1 + len(step.gathers) + len(run.events)
    figure = new_figure(9, min(1.6 + 0.22 * rows, 20))
    axes = figure.add_subplot()
    labels = ["compute"]
    axes.barh(0, run.compute_s * 1e3, color="tab:green", label="compute")
    pauses = [pause for pause in step.measured.pauses if pause.start_s < run.compute_s]
    for index, pause in enumerate(pauses):
        width_s = min(pause.end_s, run.compute_s) - pause.start_s
        axes.barh(0, width_s * 1e3, left=pause.start_s * 1e3, color="black", label=None if index else "pause")
    colors = {_WAITING: "0.85", _HIDDEN: "tab:blue", _EXPOSED: "tab:red"}
    names = {_WAITING: "ready, not launched", _HIDDEN: "collective, hidden", _EXPOSED: "collective, exposed"}
    seen: set[str] = set()
    for event in step.gathers:
        axes.barh(len(labels), (event.end_s - event.start_s) * 1e3, left=event.start_s * 1e3, color="tab:purple",
                  label=None if "gather" in seen else "gather")  # fmt: skip
        seen.add("gather")
        labels.append(f"gather {event.index}, {format_size(event.nbytes)}")
    for event in run.events:
        for begin_s, end_s, mark in _parts(event, run.compute_s):
            axes.barh(len(labels), (end_s - begin_s) * 1e3, left=begin_s * 1e3, color=colors[mark],
                      label=None if mark in seen else names[mark])  # fmt: skip
            seen.add(mark)
        labels.append(f"bucket {event.index}, {format_size(event.nbytes)}")
    axes.axvline(run.compute_s * 1e3, color="tab:green", linestyle=":", linewidth=1)
    shown = _spread(len(labels))
    axes.set_yticks(shown, [labels[index] for index in shown], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, max(step.seconds, run.seconds) * 1e3)
    axes.set_xlabel("ms from the start of the step")
    axes.set_title(
        f"step {_ms(step.seconds)}: communication {_ms(run.communication_s)}, {run.hidden_share:.0%} of it hidden"
    )
    axes.grid(axis="x", alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=6, frameon=False)
    save_figure(figure, path)


def _spread(count: int) -> Sequence[int]:
    """Rows with a label: all of them, or as many as can be read."""
    return range(0, count, -(-count // 80))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
