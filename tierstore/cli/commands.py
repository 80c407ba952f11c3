"""All commands, a module each, and their order.

Not here: anything that works. Torch is imported inside a command, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

import tierstore
from tierstore.apps.stopping import let_go
from tierstore.cli import bench, codecs, delete, inspect, pack, plan, probe, simulate, train, tune
from tierstore.cli.common import say

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)  # fmt: skip


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tierstore {tierstore.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    """Train models whose state does not fit in memory."""


app.command()(train.train)
app.command()(pack.pack)
app.command()(pack.unpack)
app.command()(inspect.inspect)
app.command()(inspect.verify)
app.command()(delete.delete)
app.command()(probe.probe)
app.command()(codecs.codecs)
app.command()(bench.bench)
app.command()(tune.tune)
app.command()(plan.plan)
app.add_typer(simulate.simulate, name="simulate")


_command = typer.main.get_command(app)


def run() -> None:
    """Runs the command that the arguments of the process name, and ends the process."""
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _command()
        # The other ranks of a machine say nothing of a wrong option.
        sys.exit(_command(standalone_mode=False) or 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        let_go(1)  # otherwise the interpreter would try again at its end
        say(f"cannot write what is to be shown: {error.strerror}")
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "exit_code"):  # of click, which typer may bring along under another name
            raise
        sys.exit(error.exit_code)
