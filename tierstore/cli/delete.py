"""`tierstore delete`: its options, and the question that it asks.

Not here: the work (`apps/delete.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.plain import show_plain
from tierstore.cli.common import Debug, directory, file_option, say, told
from tierstore.cli.interrupts import interruptible
from tierstore.errors import ConfigError

_NOTHING_REMOVED = "nothing was removed"


def delete(
    paths: Annotated[
        list[Path],
        typer.Argument(parser=directory, metavar="DIR...", help="All directories over which the store is striped."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Annotated[Path | None, file_option("The removed files, in bytes.")] = None,
    debug: Debug = False,
) -> None:
    """Remove a store: all of it, and nothing that no store made.

    A store that a process uses is refused, and so is a directory that holds no store.
    """
    from tierstore.apps.console import Console

    with told(debug):
        from tierstore.apps import delete as app
        from tierstore.apps.files import write_object
        from tierstore.apps.output_files import check_outputs
        from tierstore.store.removal import look, remove

        check_outputs(json=json)
        console = Console()
        for line in app.summary(look(paths)):
            show_plain(console, line)
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("nobody is there to ask; give --yes to remove the store")
            with interruptible(_NOTHING_REMOVED):
                is_wanted = typer.confirm("Remove these files for ever?")
            if not is_wanted:
                say(_NOTHING_REMOVED)
                raise typer.Exit(1)
        found = remove(paths)
        if json is not None:
            write_object(json, app.as_json(found), "--json")
        console.print("removed", highlight=False)
