"""`tierstore probe`: its options, the progress bar, the tables.

Not here: the run (`apps/probe.py`). Torch is imported inside, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.common import Debug, directory, file_option, size, told
from tierstore.cli.interrupts import interruptible
from tierstore.garbage import loading


def probe(
    nvme: Annotated[
        list[Path],
        typer.Option(parser=directory, metavar="DIR", help="A directory on the disk; repeat it for several disks."),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute in all.")] = False,
    size_: Annotated[
        int | None,
        typer.Option(
            "--size", parser=size, metavar="SIZE",
            help="File in each directory, removed after [default: 2GiB, quick 512MiB].",
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Time for each directory, about [default: 60, quick 4].")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N: whose link is measured.")] = "cpu",
    against: Annotated[
        str | None,
        typer.Option(metavar="fio", help="Run fio in turn with our own reads and writes: some minutes more."),
    ] = None,
    json: Annotated[Path | None, file_option("The table, as train, tune and plan take it, and all figures.")] = None,
    plot: Annotated[
        Path | None, file_option("Rate over block size, a line per number of threads.", "FILE.png|svg")
    ] = None,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Measure disks, links, codecs and optimizer of this machine. Each alone, and beside each other.

    With collectives between ranks, too: torchrun --nproc-per-node 2 -m tierstore.cli probe ...
    """
    with told(debug):
        from tierstore.apps.console import Console
        from tierstore.apps.spinning import ask_for_short_spins

        ask_for_short_spins()

        with loading():
            from tierstore.apps.heap import prepare_heap
            from tierstore.apps.launch import Launch
            from tierstore.apps.probe import ProbeOptions, save
            from tierstore.apps.probe import probe as run
            from tierstore.apps.probe_report import show
            from tierstore.apps.progress import share_bar

        options = ProbeOptions(nvme=tuple(nvme), quick=quick, size=size_, seconds=seconds, device=device,
                               against=against, json=json, plot=plot)  # fmt: skip
        launch = Launch.of(os.environ)
        console = Console() if launch.rank == 0 else Console(quiet=True, force_terminal=False)
        with interruptible("interrupted; the files that were measured on are gone" if launch.rank == 0 else ""):
            prepare_heap()
            with share_bar(console) as tell:
                outcome = run(options, tell, launch)
            if outcome is not None:
                show(console, outcome)
                save(options, outcome)
