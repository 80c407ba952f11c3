"""The consoles of the commands: rich's, except that work goes on when the reader of its output leaves.

Scope: two classes. Not here: what is shown (`plain.py`, `progress.py`, the reports).
"""

from __future__ import annotations

from typing import Any

from rich import console

from tierstore.apps.stopping import let_go


class Console(console.Console):
    """If the reader of the output leaves, as `head` does, nothing more is shown, and the work goes on to its end."""

    def on_broken_pipe(self) -> None:
        let_go(self.file.fileno())


class RunConsole(Console):
    """The console of work that leaves more than what it shows: whatever refuses its output is a reader who has left."""

    def __exit__(self, *error: Any) -> None:  # where rich writes
        try:
            super().__exit__(*error)
        except OSError:  # the terminal is gone, or the disk of a log is full
            self.on_broken_pipe()
