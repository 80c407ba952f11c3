"""`tierstore bench`: its options, the progress bar, the tables.

Not here: the run (`apps/bench/run.py`). Nothing heavy is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.plain import show_plain
from tierstore.cli.common import Debug, directory, file, file_option, given_options, size_option, told
from tierstore.cli.interrupts import interruptible


def bench(
    context: typer.Context,
    case: Annotated[str, typer.Argument(metavar="disk|adam|step|load|reduce|all", help="What is measured.")],
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="deepspeed, fio, torch or safetensors; repeat it [default: all of a case]."),
    ] = None,
    peer_python: Annotated[
        Path,
        typer.Option(
            parser=file, metavar="PYTHON", show_default=False,
            help="The interpreter that has the peers [default: this one].",
        ),
    ] = Path(sys.executable),
    nvme: Annotated[
        Path, typer.Option(parser=directory, metavar="DIR", help="A directory on the disk to measure.")
    ] = Path(),
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds that count; one more warms up.")] = 5,
    size: Annotated[int, size_option("Size of the file of disk and the checkpoint of load [default: 4GiB].")] = 2**32,
    params: Annotated[int, typer.Option(metavar="N", help="Parameters of adam.")] = 2**26,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of step in a round, after a first one.")] = 2,
    curve: Annotated[bool, typer.Option("--curve", help="Only the curve of step over CPU budgets.")] = False,
    large: Annotated[bool, typer.Option("--large", help="Only step with 1.5B parameters; writes 48 GB.")] = False,
    heat: Annotated[
        str | None, typer.Option(metavar="disk|memory|accumulate|cost", help="Only this part of step.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="Dtype of the models of step.")] = "bf16",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="With cuda, all runs what needs a GPU.")] = "cpu",
    json: Annotated[Path | None, file_option("All answers, machine, versions, command.")] = None,
    markdown: Annotated[Path | None, file_option("The tables, with machine and command.")] = None,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Measure tierstore, its peers and the limits of this machine. All take turns in one run."""
    with told(debug):
        from tierstore.apps.bench.case import BenchOptions
        from tierstore.apps.bench.report import context_of, save, show
        from tierstore.apps.bench.run import Outcome, cases_of, check_room, clear_left, notes, refuse_unread, run_case
        from tierstore.apps.console import Console
        from tierstore.apps.progress import share_bar
        from tierstore.errors import StorageError

        options = BenchOptions(
            peer=tuple(peer or ()), peer_python=peer_python, nvme=nvme, rounds=rounds, size=size, params=params,
            steps=steps, curve=curve, large=large, heat=heat, dtype=dtype, device=device, json=json, markdown=markdown,
        )  # fmt: skip
        cases = cases_of(case, device)
        refuse_unread(options, given_options(context), cases)
        if device != "cpu":
            from tierstore.device.streams import check_device  # with torch

            check_device(device)
        console = Console()
        left = clear_left(options)
        check_room(options, cases)
        for note in (*left, *notes(options, cases)):
            show_plain(console, f"note: {note}")
        outcomes: list[Outcome] = []
        unsaved: StorageError | None = None

        def keep(outcome: Outcome) -> None:
            nonlocal unsaved
            so_far, before = [*outcomes, outcome], unsaved
            try:
                save(options, so_far, context_of(case, options, so_far))
                unsaved = None
            except StorageError as error:
                unsaved = error  # what was measured takes longer to get again than a file
                if before is None:
                    show_plain(console, f"note: {error}; the run goes on, and its tables are shown")

        with interruptible("interrupted; contestants are ended and their files are gone"):
            for one in cases:
                with share_bar(console) as tell:
                    outcomes.append(run_case(one, options, tell, keep))
                show(console, outcomes[-1])
        if unsaved is not None:
            raise unsaved
