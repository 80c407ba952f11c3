"""The console of the commands: rich's, except that work goes on when the reader of its output leaves.

Scope: one class. Not here: what is shown (`plain.py`, `progress.py`, the reports).
"""

from __future__ import annotations

from rich import console

from tierstore.apps.stopping import let_go


class Console(console.Console):
    """If the reader of the output leaves, as `head` does, nothing more is shown, and the work goes on to its end."""

    def on_broken_pipe(self) -> None:
        let_go(self.file.fileno())
