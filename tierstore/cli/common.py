"""What every command shares: options, parsers of sizes and paths, an error as one sentence and an exit code.

Scope: exit codes 0 done, 1 the run failed, 2 an option or a budget cannot work, 129, 130 and 143 stopped by a signal.
Not here: commands (a module each) and anything that works (`apps/`).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.apps.options import as_option
from tierstore.apps.stopping import let_go
from tierstore.config import at_home, parse_size
from tierstore.errors import BudgetError, CheckpointWarning, ConfigError, MachineWarning, TierstoreError

# Names of the engine's arguments in its messages, with a value or alone; not as a part of a path.
_ARGUMENT = re.compile(
    r"(?<![\w/.'-])(?:(resume|update|durability|commit_every|zero)='?(\w+)'?|(gpu_memory|cpu_memory|nvme)(?![\w/.'-]))"
)

Debug = Annotated[bool, typer.Option("--debug", help="Show where an error was raised.")]


def size(text: int | str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def rate(text: int | str) -> int:
    """Bytes per second: a size, with `/s` behind it or not."""
    return size(text.removesuffix("/s") if isinstance(text, str) else text)


def directory(text: str) -> Path:
    if not text:  # an unset shell variable would otherwise become the current directory
        raise typer.BadParameter("an empty path is not a directory")
    if text == "-":
        raise typer.BadParameter("nothing is read from or written to a pipe here; give a path")
    return at_home(Path(text))


def file(text: str) -> Path:
    if not text:
        raise typer.BadParameter("an empty path is not a file")
    return at_home(Path(text))


def size_option(help: str, metavar: str = "SIZE", parser: Callable[[Any], int] = size) -> Any:
    """An option in bytes; its help says what the default is."""
    return typer.Option(parser=parser, metavar=metavar, show_default=False, help=help)


def file_option(help: str, metavar: str = "FILE") -> Any:
    """The path of a file."""
    return typer.Option(parser=file, metavar=metavar, help=help)


def given_options(context: typer.Context) -> list[str]:
    """Names of the options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for p in context.command.params if (name := p.name)}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@contextlib.contextmanager
def told(debug: bool = False) -> Iterator[None]:
    """Turns an error of tierstore into one sentence and an exit code; `debug` shows where it was raised."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # letters that the encoding lacks are shown as "?"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            yield
    except TierstoreError as error:
        if debug:
            raise
        say(_as_options(str(error)))
        raise typer.Exit(2 if isinstance(error, (ConfigError, BudgetError)) else 1) from None
    except KeyboardInterrupt:  # in a command that has nothing to clean up
        if debug:
            raise
        say("interrupted")
        raise typer.Exit(130) from None
    except OSError as error:  # other reads and writes raise StorageError
        if debug or not isinstance(error.filename, (str, os.PathLike)):
            raise
        say(f"cannot use {error.filename}: {error.strerror}")  # from looking at a path that was given
        raise typer.Exit(1) from None


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **to: Any
) -> None:
    """Shows as notes the warnings that a user of the commands can act on, once per machine; the others as usual."""
    if not issubclass(category, (CheckpointWarning, MachineWarning)):
        show(message, category, *where, **to)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"note: {message}")


def say(sentence: str) -> None:
    """A sentence on the error stream, under tierstore's name."""
    if sentence:
        try:
            typer.echo(f"tierstore: {sentence}", err=True)
        except OSError:  # the reader has left, the terminal is gone, or the disk of a log is full
            let_go(2)


def _as_options(text: str) -> str:
    """The text in one line, with the engine's arguments as options: `resume='auto'` becomes `--resume auto`."""

    def option(found: re.Match[str]) -> str:
        name, value, budget = found.groups()
        return as_option(name or budget) + (f" {value}" if name else "")

    return _ARGUMENT.sub(option, " ".join(text.split()).removeprefix("TierConfig: "))
