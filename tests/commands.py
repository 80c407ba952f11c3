"""The command `tierstore` as a process that starts at once: a fork of one that has imported what it needs.

Not here: the start and the end of an interpreter. A test of those starts `python -m tierstore.cli`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from ranks import fork_server

from tierstore.cli import main


@contextmanager
def forked(arguments: list[str], output: Path, errors: Path) -> Iterator[BaseProcess]:
    """The process, which writes into these two files; killed at the end if it runs then."""
    process = fork_server().Process(target=_command, args=(arguments, output, errors), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _command(arguments: list[str], output: Path, errors: Path) -> None:
    for number, path in ((1, output), (2, errors)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["tierstore", *arguments]
    main()
