"""What a person sees of a benchmark: a table, the same in Markdown, everything in JSON.

Scope: cells and files. Not here: what is measured (the cases).
"""

from __future__ import annotations

import platform
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierstore.apps.bench.case import BenchOptions, Row
from tierstore.apps.bench.run import Outcome
from tierstore.apps.files import write_object, write_text
from tierstore.apps.options import as_option
from tierstore.apps.plain import show_plain
from tierstore.config import format_size, parse_size
from tierstore.cores import available_cores

_MUCH_STOLEN = 0.02
_WITH_QUARTILES = 4  # rounds; of fewer `middle` gives the smallest and the largest


def show(console: Console, outcome: Outcome) -> None:
    """A table for each work of a case, its floor and its bars below."""
    works = dict.fromkeys(row.work for row in outcome.rows)
    for work in works:
        rows = [row for row in outcome.rows if row.work == work]
        table = Table(title=escape(work), title_justify="left")
        for column in _columns(outcome)[1:-1]:
            table.add_column(column, justify="left" if column == "contestant" else "right")
        for row in rows:
            table.add_row(*map(escape, _cells(row)[1:-1]))
        console.print(table)
        said = [f"{row.contestant}: {part}" for row in rows for part in (*map(str, row.bars), row.trouble) if part]
        for sentence in (*said, *_notes(rows)):
            show_plain(console, sentence)
    for sentence in _stolen(outcome):
        show_plain(console, sentence)


def markdown(outcomes: Sequence[Outcome], context: dict[str, Any]) -> str:
    """The tables, with machine, date, versions and command."""
    parts = [f"{_machine_line(context)}\n\n    {context['command']}\n"]
    for outcome in outcomes:
        columns = _columns(outcome)
        lines = [columns, ("---",) * len(columns), *(_cells(row) for row in outcome.rows)]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        parts.append("\n\n".join([table, *_notes(outcome.rows), *_stolen(outcome)]) + "\n")
    return "\n".join(parts)


def save(options: BenchOptions, outcomes: Sequence[Outcome], context: dict[str, Any]) -> None:
    """Writes the files that are asked for.

    Raises:
        StorageError: one cannot be written; the other one is, if that is possible.
    """
    try:
        if options.json is not None:
            write_object(options.json, context | {"cases": [_as_json(one) for one in outcomes]}, "--json")
    finally:
        if options.markdown is not None:
            write_text(options.markdown, markdown(outcomes, context), "--markdown")


def context_of(case: str, options: BenchOptions, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Machine, date, versions and command."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for outcome in outcomes:
        for result in outcome.results.values():
            versions |= result.facts.get("versions", {})
    return {
        "machine": {
            "processor": _processor(),
            "cores": available_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.release()}",
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "command": _command(case, options),
    }


def _command(case: str, options: BenchOptions) -> str:
    """The command line of the same run: every option that is not the default."""
    words = ["tierstore", "bench", case]
    for one in fields(options):
        given = getattr(options, one.name)
        for value in (given if isinstance(given, tuple) else (given,)) if given != one.default else ():
            words += [as_option(one.name), *([] if value is True else [_text(one.name, value)])]
    return shlex.join(words)


def _text(name: str, value: Any) -> str:
    short = format_size(value).replace(" ", "") if name == "size" else ""
    return short if short and parse_size(short) == value else str(value)


def _machine_line(context: dict[str, Any]) -> str:
    machine, versions = context["machine"], context["versions"]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}, "
        f"{machine['system']}; {context['date'][:10]}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _columns(outcome: Outcome) -> tuple[str, ...]:
    rounds = max((len(result.answers) for result in outcome.results.values()), default=0)
    spread = "quartiles" if rounds >= _WITH_QUARTILES else "smallest, largest"
    return ("work", "contestant", f"median ({spread})", "of floor", "peak memory", "bar")


def _cells(row: Row) -> tuple[str, ...]:
    value, bars = row.value, "; ".join([*map(str, row.bars), *([row.trouble] if row.trouble else [])])
    if value is None:
        return (row.work, row.contestant, "", "", "", bars)
    return (
        row.work,
        row.contestant,
        f"{_short(value.median)} {row.unit} ({_short(value.low)}, {_short(value.high)})",
        "" if row.floor is None else f"{value.median / row.floor:.2f} x {_short(row.floor)}",
        "" if row.peak_rss_bytes is None else format_size(row.peak_rss_bytes),
        bars,
    )


def _short(value: float) -> str:
    """Three digits, and never an exponent for a large number."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _notes(rows: Sequence[Row]) -> list[str]:
    floors = dict.fromkeys(row.floor_of for row in rows if row.floor_of)
    return [f"Floor: {one}." for one in floors]


def _stolen(outcome: Outcome) -> list[str]:
    """The cores' time that the host of a virtual machine took, if much: it is in the seconds of all contestants."""
    shares = {name: statistics.median(one.stolen for one in result.answers)
              for name, result in outcome.results.items() if result.answers}  # fmt: skip
    told = "; ".join(f"{share:.0%} in the rounds of {name}" for name, share in shares.items() if share >= _MUCH_STOLEN)
    return [f"The host of this machine took a part of the cores' time: {told}."] if told else []


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "rows": [asdict(row) | {"bars": [asdict(bar) | {"is_met": bar.is_met} for bar in row.bars]}
                 for row in outcome.rows],
        "contestants": {
            name: {"facts": dict(result.facts), "trouble": result.trouble,
                   "rounds": [asdict(answer) for answer in result.answers]}
            for name, result in outcome.results.items()
        },
    }  # fmt: skip
