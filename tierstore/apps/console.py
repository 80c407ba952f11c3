"""Where commands show things: rich's console, which outlives its reader.

Scope: one class. Not here: what is shown (`plain.py`, `progress.py`, the reports).
"""

from __future__ import annotations

from rich import console

from tierstore.apps.stopping import let_go


class Console(console.Console):
    """Who reads may leave, as `head` does: nothing more is shown then, and the work goes on to its end."""

    def on_broken_pipe(self) -> None:
        let_go(self.file.fileno())
