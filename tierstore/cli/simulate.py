"""`tierstore simulate`: a step on paper, of fetched layers or of gradient buckets.

Not here: the arithmetic (`plan/simulate.py`, `plan/buckets.py`), tables and plots (`apps/pipeline.py`,
    `apps/buckets.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.apps.plain import show_plain
from tierstore.cli.common import Debug, file_option, rate, size_option, told
from tierstore.cli.interrupts import interruptible

simulate = typer.Typer(no_args_is_help=True, help="A step on paper: fetched layers, or gradient buckets.")


@simulate.command()
def step(
    layer: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE:MS[xN]", help="Layers in the order of forward; repeat it [default: 80MB:50x24]."),
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="Layers fetched ahead: 1 is double buffering, 2 triple; repeat it [default: 0 1 2 3 4]."
        ),
    ] = None,
    backward: Annotated[
        float,
        typer.Option(metavar="TIMES", max=1e6, help="Backward takes so many times forward's time; 0: forward only."),
    ] = 0.0,
    memory: Annotated[int | None, size_option("For layers on the device [default: depth + 1 of the largest].")] = None,
    disk: Annotated[
        list[int] | None,
        size_option("Bytes per second of a disk; repeat it to stripe over them [default: 1GB].", "RATE", rate),
    ] = None,
    other: Annotated[
        int, size_option("Other traffic of the disks per visit of a layer: state, gradients [default: 0].")
    ] = 0,
    ranks: Annotated[int, typer.Option(help="Each reads 1/N of a layer, and gathers the rest from the others.")] = 1,
    gather: Annotated[
        int | None, size_option("Bytes per second between the ranks [default: 10GB].", "RATE", rate)
    ] = None,
    bandwidth: Annotated[
        Path | None,
        file_option("Rates for --disk and --gather where not given, as `probe --json` writes."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(metavar="PART", help="Standard deviation of every time, as a part of it.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps that the means with jitter are taken over.")] = 30,
    plot: Annotated[Path | None, file_option("Gantt chart of every depth.", "FILE.png|svg")] = None,
    json: Annotated[Path | None, file_option("All figures, in bytes and seconds.")] = None,
    debug: Debug = False,
) -> None:
    """Layers fetched ahead of their use: what each depth gains. The policy is the one that the engine runs."""
    with told(debug), interruptible("interrupted"):
        from tierstore.apps.buckets import parse_layers
        from tierstore.apps.console import Console
        from tierstore.apps.output_files import check_outputs
        from tierstore.apps.pipeline import PipelineOptions, as_table, as_text, run, save, verdict
        from tierstore.io.table_file import read_table

        disks, between_ranks = tuple(map(float, disk or [10**9])), 1e10 if gather is None else float(gather)
        if bandwidth is not None:
            check_outputs([bandwidth], json=json, plot=plot)
            table = read_table(bandwidth)
            disks = disks if disk else (table.read_bytes_per_s,)
            if gather is None and table.collective is not None:
                between_ranks = table.collective.beta_bytes_per_s
        options = PipelineOptions(
            layers=tuple(one for text in layer or ["80MB:50x24"] for one in parse_layers(text)),
            depths=tuple(sorted({*(depth or range(5))})), backward=backward,
            memory=memory, disks=disks, other_bytes=other, ranks=ranks, gather_bytes_per_s=between_ranks,
            jitter=jitter, seed=seed, steps=steps, plot=plot, json=json,
        )  # fmt: skip
        rows = run(options)
        console = Console()
        console.print(as_table(options, rows))
        show_plain(console, as_text(options, rows, console.width))
        console.print(verdict(options, rows), highlight=False, markup=False)
        save(options, rows)


@simulate.command()
def buckets(
    layer: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE:MS[xN]", help="Layers in the order of backward; repeat it [default: 25MB:3x48]."),
    ] = None,
    alpha: Annotated[float, typer.Option(metavar="US", help="Fixed cost of a collective, microseconds.")] = 200.0,
    beta: Annotated[
        int, size_option("Bytes per second of the interconnect [default: 12GB].", "RATE", rate)
    ] = 12 * 10**9,
    launch: Annotated[float, typer.Option(metavar="US", help="What a launch takes from the compute.")] = 0.0,
    before: Annotated[float, typer.Option(metavar="MS", help="Time of a step before backward.")] = 0.0,
    bucket: Annotated[list[int] | None, size_option("Bucket size; repeat it [default: a range of them].")] = None,
    first_bucket: Annotated[int | None, size_option("Size of the first bucket [default: as the others].")] = None,
    in_flight: Annotated[int, typer.Option(help="Collectives at once.")] = 1,
    plot: Annotated[Path | None, file_option("Step time against bucket size.", "FILE.png|svg")] = None,
    json: Annotated[Path | None, file_option("All figures, in bytes and seconds.")] = None,
    debug: Debug = False,
) -> None:
    """Step time against the size of gradient buckets. On any interconnect, from the bucket timeline."""
    with told(debug), interruptible("interrupted"):
        from tierstore.apps.buckets import SweepOptions, as_table, parse_layers, save
        from tierstore.apps.buckets import simulate as run
        from tierstore.apps.console import Console
        from tierstore.plan.cost_model import CostModel

        options = SweepOptions(
            layers=tuple(one for text in layer or ["25MB:3x48"] for one in parse_layers(text)),
            link=CostModel(alpha / 1e6, beta, launch / 1e6), before_s=before / 1e3,
            bucket=tuple(bucket or ()), in_flight=in_flight, first_bucket=first_bucket, plot=plot, json=json,
        )  # fmt: skip
        outcome = run(options)
        Console().print(as_table(options, outcome))
        save(options, outcome)
