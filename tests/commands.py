"""The command `tierstore` and other programs in processes that start at once: forks of one that has imported it all.

Not here: the start and the end of an interpreter. A test of these starts `python -m tierstore.cli`.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from ranks import fork_server

from tierstore.cli import main


@contextlib.contextmanager
def forked(
    arguments: list[str], output: Path, errors: Path, environment: Mapping[str, str] | None = None
) -> Iterator[BaseProcess]:
    """A process that runs the command and writes into these two files; killed at the end if it still runs.

    Args:
        environment: variables to set in the process.
    """
    process = fork_server().Process(target=_command, args=(arguments, output, errors, environment or {}), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def launched(arguments: list[str], output: Path, errors: Path, ranks: int, restarts: int) -> Iterator[BaseProcess]:
    """Torchrun's agent; all is killed at the end. Its ranks are forks, because the imports of each take ten seconds."""
    # Not a daemon: it has children.
    process = fork_server().Process(target=_launch, args=(arguments, output, errors, ranks, restarts))
    process.start()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def run_program(
    arguments: list[str], folder: Path, given: str = "", wait_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end with `given` as its input; the result is as that of `subprocess.run`.

    Args:
        arguments: a file, or -m and a module, and its own arguments.
        folder: its working directory.
    """
    streams = {name: folder / name for name in ("stdin", "stdout", "stderr")}
    streams["stdin"].write_text(given)
    process = fork_server().Process(target=_program, args=(arguments, streams, folder))
    process.start()
    process.join(wait_s)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(
        arguments, process.exitcode, streams["stdout"].read_text(), streams["stderr"].read_text()
    )


def _program(arguments: list[str], streams: Mapping[str, Path], folder: Path) -> None:
    os.chdir(folder)
    _redirect(streams["stdout"], streams["stderr"])
    sys.stdin = streams["stdin"].open()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _redirect(output: Path, errors: Path) -> None:
    for number, path in ((1, output), (2, errors)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _launch(arguments: list[str], output: Path, errors: Path, ranks: int, restarts: int) -> None:
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.setsid()
    _redirect(output, errors)
    options = ["--nproc-per-node", f"{ranks}", "--max-restarts", f"{restarts}", "--start-method", "fork"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "here"]  # as --standalone
    config, *_ = config_from_args(parse_args([*options, "tierstore"]))
    elastic_launch(config, _rank)(arguments)


def _rank(arguments: list[str]) -> None:
    try:
        _run(arguments)
    except Exception:
        traceback.print_exc()  # the agent reports only one of several errors
        raise


def _run(arguments: list[str]) -> None:
    sys.argv = ["tierstore", *arguments]
    main()


def _command(arguments: list[str], output: Path, errors: Path, environment: Mapping[str, str]) -> None:
    _redirect(output, errors)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # anew, because the output can be a pipe now
    os.environ.update(environment)
    _run(arguments)
