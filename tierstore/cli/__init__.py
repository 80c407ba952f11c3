"""The command line: parses, calls `apps/`, turns errors into one sentence and an exit code.

Scope: the entry point. It imports the commands (`commands.py`) itself, when Ctrl-C is already handled.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.cli.commands import app as app


def __getattr__(name: str) -> Any:
    if name == "app":
        from tierstore.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Entry point of the command `tierstore`."""
    _open_streams()
    usual = signal.getsignal(signal.SIGINT)
    hears = usual is signal.default_int_handler  # else it has another handler, or is ignored
    if hears:
        signal.signal(signal.SIGINT, _leave)
    from tierstore.cli.commands import run

    if hears:
        signal.signal(signal.SIGINT, usual)
    run()


def _open_streams() -> None:
    """Opens the standard streams that are closed, on nothing: files opened later would take their places."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is that of this stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", errors="replace", closefd=False))


def _leave(number: int, frame: object) -> None:
    """Ends the process: nothing to undo has been done yet. See apps/stopping.py [Note: leaving at once]."""
    os.write(2, b"tierstore: interrupted\n")
    os._exit(128 + number)
