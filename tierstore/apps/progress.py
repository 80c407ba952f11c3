"""A bar, or a spinner, for work that takes long: how far it is, and what it is doing.

Scope: one line on a terminal, nothing elsewhere. Not here: what is worked on.
Owner: each belongs to its `with` block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


@contextlib.contextmanager
def spinner(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Shows `what` while the block runs; call the function that it gives to show something else."""
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status(Text(what)) as status:
        yield lambda what: status.update(Text(what))


@contextlib.contextmanager
def byte_bar(console: Console, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar; call the function that it gives with each number of bytes done, from any thread."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextlib.contextmanager
def share_bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar; call the function that it gives with what goes on now, and the share of all that is done so far."""
    if not console.is_terminal:
        yield lambda what, done: None
        return
    bar = Progress(BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn(),
                   TextColumn("{task.description}", markup=False), console=console, transient=True)  # fmt: skip
    task = bar.add_task("beginning", total=1.0)
    with bar:
        yield lambda what, done: bar.update(task, completed=done, description=what)
