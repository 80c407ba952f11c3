"""A bar for work that takes long: bytes done, rate, time left.

Scope: one line on a terminal, nothing elsewhere. Not here: what is worked on.
Owner: the bar belongs to its `with` block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextlib.contextmanager
def byte_bar(console: Console, what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar; call what it gives with each number of bytes done, from any thread. It goes when the work has ended."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)
