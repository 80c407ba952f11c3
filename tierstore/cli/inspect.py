"""`tierstore inspect` and `tierstore verify`: their options.

Not here: the work (`apps/inspect.py`, `apps/verify.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.plain import show_plain
from tierstore.cli.common import Debug, directory, file_option, say, size_option, told

_PATHS = typer.Argument(
    parser=directory, metavar="PATH...", help="A pack, a store, or all directories over which one is striped."
)


def inspect(
    paths: Annotated[list[Path], _PATHS],
    tensors: Annotated[
        bool | None, typer.Option(help="Name all tensors, or only groups [default: the first 40].")
    ] = None,
    plot: Annotated[Path | None, file_option("The map of the files.", "FILE.png|svg")] = None,
    json: Annotated[Path | None, file_option("All of it, in bytes.")] = None,
    debug: Debug = False,
) -> None:
    """Show what a pack or a store holds. That is: groups, tensors, ratios, generation, and a map of each file."""
    from tierstore.apps.console import Console

    with told(debug):
        from tierstore.apps import inspect as app
        from tierstore.apps.files import write_object
        from tierstore.apps.output_files import check_outputs

        check_outputs(paths, json=json, plot=plot)
        content = app.look(paths)
        Console().print(app.tree(content, tensors=tensors))
        if json is not None:
            write_object(json, app.as_json(content), "--json")
        if plot is not None:
            app.draw(content, plot)


def verify(
    paths: Annotated[list[Path], _PATHS],
    memory: Annotated[int, size_option("The most memory it may take [default: 1GiB].")] = 2**30,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Fail if the disk does not answer for so long.")
    ] = 1800.0,
    json: Annotated[Path | None, file_option("Totals and all damage.")] = None,
    debug: Debug = False,
) -> None:
    """Read every byte of a pack or a store, and name what is damaged. Exit code 1 if anything is.

    Of a store, the last generation is read.
    """
    from tierstore.apps.console import Console

    with told(debug):
        from tierstore.apps import verify as app
        from tierstore.apps.files import write_object
        from tierstore.apps.output_files import check_outputs

        check_outputs(paths, json=json)
        console = Console()
        verdict = app.run_verify(paths, memory, console, timeout_s=timeout)
        if verdict.damages:
            console.print(app.damage_table(verdict))
            say(f"{verdict}; {verdict.advice}")
        else:
            show_plain(console, str(verdict))
        if json is not None:
            write_object(json, verdict.as_json(), "--json")
        if verdict.damages:
            raise typer.Exit(1)
