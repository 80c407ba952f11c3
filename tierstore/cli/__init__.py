"""The command line: parses, calls `apps/`, turns errors into one sentence and an exit code.

Scope: the entry point; what it starts is imported there (`commands.py`), where a Ctrl-C is heard.
"""

from __future__ import annotations

import os
import signal
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
    usual = signal.getsignal(signal.SIGINT)
    hears = usual is signal.default_int_handler  # else somebody else does, or nobody shall
    if hears:
        signal.signal(signal.SIGINT, _leave)
    from tierstore.cli.commands import run

    if hears:
        signal.signal(signal.SIGINT, usual)
    run()


def _leave(number: int, frame: object) -> None:
    """Before anything is done that is to be undone. See apps/stopping.py [Note: leaving at once]."""
    os.write(2, b"tierstore: interrupted\n")
    os._exit(128 + number)
