"""`tierstore simulate`: step time against the size of gradient buckets.

Not here: the arithmetic (`plan/buckets.py`), the table and the plot (`apps/buckets.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.common import told
from tierstore.config import parse_size


def simulate(
    layer: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE:MS[xN]", help="Layers in the order of backward; repeat it [default: 25MB:3x48]."),
    ] = None,
    alpha: Annotated[float, typer.Option(metavar="US", help="Fixed cost of a collective, microseconds.")] = 200.0,
    beta: Annotated[str, typer.Option(metavar="SIZE", help="Bytes per second of the interconnect.")] = "12GB",
    launch: Annotated[float, typer.Option(metavar="US", help="What a launch takes from the compute.")] = 0.0,
    before: Annotated[float, typer.Option(metavar="MS", help="Time of a step before backward.")] = 0.0,
    bucket: Annotated[
        list[str] | None, typer.Option(metavar="SIZE", help="Bucket size; repeat it [default: a range of them].")
    ] = None,
    first_bucket: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the first bucket [default: as the others].")
    ] = None,
    in_flight: Annotated[int, typer.Option(help="Collectives at once.")] = 1,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Step time against bucket size.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="All figures, in bytes and seconds.")] = None,
) -> None:
    """Step time against the size of gradient buckets, on any interconnect, from the bucket timeline."""
    from rich.console import Console

    from tierstore.apps.buckets import SweepOptions, as_table, parse_layers
    from tierstore.apps.buckets import simulate as run
    from tierstore.plan.cost_model import CostModel

    with told():
        options = SweepOptions(
            layers=tuple(one for text in layer or ["25MB:3x48"] for one in parse_layers(text)),
            link=CostModel(alpha / 1e6, parse_size(beta.removesuffix("/s")), launch / 1e6), before_s=before / 1e3,
            bucket=tuple(map(parse_size, bucket or ())), in_flight=in_flight,
            first_bucket=None if first_bucket is None else parse_size(first_bucket), plot=plot, json=json,
        )  # fmt: skip
        Console().print(as_table(options, run(options)))
