#!/usr/bin/env python3
"""Is a committed step never lost? Kills, power cuts and faults by the hundred, beside an undisturbed run.

The loops are in `tests/crash/`, because they use the simulated disks of the tests, which fail and lose writes.
"""

from __future__ import annotations

import contextlib
import json as json_format
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in (".", "train")]
KILLS = 200


def crash_loop(
    kills: Annotated[
        int,
        typer.Option(
            min=0,
            show_default=False,
            help=f"So many kills and stops by a signal, at random moments \\[default: {KILLS}].",
        ),
    ] = 0,
    ranks: Annotated[int, typer.Option(min=1, max=4, help="Processes that train one model together, in --kills.")] = 1,
    variant: Annotated[list[str] | None, typer.Option(help="A way to train, in --kills \\[default: all].")] = None,
    cuts: Annotated[int, typer.Option(min=0, help="Power cuts at so many random instants.")] = 0,
    soak: Annotated[int, typer.Option(min=0, help="So many steps on a disk that fails now and then, as 2000.")] = 0,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    directory: Annotated[Path | None, typer.Option(help="Where the stores are \\[default: a temporary one].")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="All figures.")] = None,
) -> None:
    """Train, disturb, resume and compare; exit code 1 if a promise was not kept."""
    from tierstore.cli.interrupts import interruptible

    if find_spec("pytest") is None:  # the disks of the tests use it
        raise typer.BadParameter("this needs pytest: run bash tools/run_tests.sh once, or pip install -e '.[dev]'")
    if soak == 1:
        raise typer.BadParameter("--soak compares its last steps with its first: give at least 2")
    console, found = Console(), []
    with interruptible("interrupted; nothing is left behind"), tempfile.TemporaryDirectory(dir=directory) as folder:
        if kills or not (cuts or soak):
            from crash.kills import VARIANTS, kill

            if unknown := set(variant or ()) - set(VARIANTS):
                raise typer.BadParameter(f"no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
            with bar(console, "kills", kills or KILLS) as advance:
                found.append(kill(variant or list(VARIANTS), kills or KILLS, seed, Path(folder), ranks, advance))
        if soak:  # it forks, as kills do, so both run before cuts, which train in this process
            from crash.soak import soak as run

            with bar(console, "steps", soak) as advance:
                found.append(run(soak, seed, Path(folder), advance))
        if cuts:
            from crash.cuts import cut

            with bar(console, "cuts", cuts) as advance:
                found.append(cut(cuts, seed, Path(folder), advance))
    for findings in found:
        console.print(table(findings))
    if json is not None:
        whole = [vars(findings) | {"claims": [vars(claim) for claim in findings.claims]} for findings in found]
        json.write_text(json_format.dumps(whole, indent=2) + "\n")
    if not all(claim.holds for findings in found for claim in findings.claims):
        raise typer.Exit(1)


@contextlib.contextmanager
def bar(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; call the function that it gives for each one done. No thread, because the process forks."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield partial(progress.update, task, advance=1, refresh=True)


def table(findings: Any) -> Table:
    """What was seen, and each claim with its evidence."""
    shown = Table(title=findings.title, title_justify="left", show_header=False)
    for name, value in findings.rows:
        shown.add_row(name, Text(value))
    shown.add_section()
    for claim in findings.claims:
        shown.add_row("holds" if claim.holds else "BROKEN", Text(f"{claim.text}: {claim.seen}"))
    return shown


if __name__ == "__main__":
    typer.run(crash_loop)
