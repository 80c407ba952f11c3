"""Step time against bucket size on any interconnect, on paper: as a table, a plot, JSON.

Scope: what `tierstore simulate buckets` asks and shows.
Not here: the timeline (`plan/buckets.py`); a measured step (`train/data_parallel/overlap.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.apps.files import write_object
from tierstore.apps.output_files import check_outputs
from tierstore.config import format_decimal, format_size, parse_size
from tierstore.errors import ConfigError
from tierstore.plan.buckets import Gradient, Layer, SweepRow, backward, best_bucket_bytes, candidate_caps, sweep
from tierstore.plan.cost_model import CostModel
from tierstore.plots import new_figure, save_figure

if TYPE_CHECKING:
    from rich.table import Table

_LAYER = re.compile(r"\s*([^:]+?)\s*:\s*([0-9.eE+-]+)\s*(?:x\s*([0-9]+)\s*)?")
_NEAR = 0.01  # a step that is longer by this part is as good
_MOST_LAYERS = 100_000
_MOST_POINTS = 200  # of the plot


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """What a person asks of `tierstore simulate buckets`; fields are options of the same names, in bytes and seconds.

    Attributes:
        layers: in the order of backward.
        before_s: time of a step before backward.
        bucket: sizes in the table; if empty, that of the smallest layer, doubled until one bucket holds all.
        first_bucket: size of the first bucket; None is that of the others.
    """

    layers: tuple[Layer, ...]
    link: CostModel
    before_s: float = 0.0
    bucket: tuple[int, ...] = ()
    first_bucket: int | None = None
    in_flight: int = 1
    plot: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        if not any(layer.nbytes for layer in self.layers):
            raise ConfigError("no layer has gradients: give --layer SIZE:MILLISECONDS")
        if not (self.before_s >= 0 and math.isfinite(self.before_s)):
            raise ConfigError(f"--before cannot be {self.before_s * 1e3} ms")
        if self.in_flight < 1:
            raise ConfigError(f"--in-flight must be at least 1, not {self.in_flight}")
        if 0 in (*self.bucket, self.first_bucket):
            raise ConfigError("a bucket holds at least one byte")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A sweep.

    Attributes:
        rows: of the sizes asked for, by size, and the best row if it is not among them.
        best: the row of the shortest step among many more sizes.
        near: the row of the largest size whose step is at most 1 % longer.
        curve: what a plot shows; empty without one.
    """

    rows: tuple[SweepRow, ...]
    best: SweepRow
    near: SweepRow
    compute_s: float
    curve: tuple[SweepRow, ...] = ()


def parse_layers(text: str) -> tuple[Layer, ...]:
    """Layers of `SIZE:MILLISECONDS` or `SIZE:MILLISECONDSxCOUNT`, such as `25MB:3x48`.

    Raises:
        ConfigError: it is neither.
    """
    match = _LAYER.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        milliseconds, count = float(match[2]), int(match[3] or 1)
        if not (0 <= milliseconds < math.inf and 1 <= count <= _MOST_LAYERS):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"not a layer: {text!r}; write SIZE:MILLISECONDS or SIZE:MILLISECONDSxCOUNT, as 25MB:3x48"
        ) from None
    return (Layer(parse_size(match[1]), milliseconds / 1e3),) * count


def simulate(options: SweepOptions) -> Outcome:
    """Runs the timeline at every size.

    Raises:
        ConfigError: a file that is asked for cannot be written, or there is no matplotlib for the plot.
    """
    check_outputs(json=options.json, plot=options.plot)
    gradients = backward(options.layers, options.before_s)
    sizes = [layer.nbytes for layer in options.layers]
    first = options.first_bucket
    sizes_worth = [
        best_bucket_bytes(gradients, options.link, max_in_flight=options.in_flight, first_cap_bytes=first, slack=slack)
        for slack in (0.0, _NEAR)
    ]
    best, near = _rows(options, gradients, sizes_worth)
    asked = sorted({*(options.bucket or _doubled(sizes))})
    rows = _rows(options, gradients, asked)
    if not options.bucket:  # of sizes that make the same buckets one is enough
        rows = tuple(
            row for row, after in zip(rows, (*rows[1:], None)) if after is None or row.buckets != after.buckets
        )
    if all(row.seconds > best.seconds + 1e-12 for row in rows):
        rows = tuple(sorted([*rows, best], key=lambda row: row.cap_bytes))
    curve: tuple[SweepRow, ...] = ()
    if options.plot is not None:
        caps = candidate_caps(sizes)
        curve = _rows(options, gradients, sorted({*caps[:: -(-len(caps) // _MOST_POINTS)], *asked, *sizes_worth}))
    return Outcome(rows, best, near, options.before_s + sum(layer.compute_s for layer in options.layers), curve)


def save(options: SweepOptions, outcome: Outcome) -> None:
    """Writes the files that are asked for.

    Raises:
        StorageError: one cannot be written.
    """
    if options.json is not None:
        write_object(options.json, as_json(options, outcome), "--json")
    if options.plot is not None:
        draw(options, outcome, options.plot)


def _rows(options: SweepOptions, gradients: Sequence[Gradient], caps: Sequence[int]) -> tuple[SweepRow, ...]:
    return sweep(gradients, options.link, caps, max_in_flight=options.in_flight, first_cap_bytes=options.first_bucket)


def _doubled(sizes: Sequence[int]) -> list[int]:
    total, cap = sum(sizes), min(size for size in sizes if size)
    caps = []
    while cap < total:
        caps.append(cap)
        cap *= 2
    return [*caps, total]


def as_table(options: SweepOptions, outcome: Outcome) -> Table:
    """The sweep for a terminal; the shortest steps are marked."""
    from rich.table import Table

    link = options.link
    table = Table(
        title=f"{len(options.layers)} layers, {size_text(sum(layer.nbytes for layer in options.layers))}, "
        f"{outcome.compute_s * 1e3:.4g} ms of compute; alpha {link.alpha_s * 1e6:.4g} us, "
        f"beta {link.beta_bytes_per_s / 1e9:.4g} GB/s",
        caption=f"shortest: {size_text(outcome.best.cap_bytes)}, {outcome.best.seconds * 1e3:.1f} ms; "
        f"largest within 1 % of it: {size_text(outcome.near.cap_bytes)}, {outcome.near.seconds * 1e3:.1f} ms",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("bucket", "count", "step ms", "serial ms", "comm. ms", "exposed ms", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    shortest_s = min(row.seconds for row in outcome.rows) + 1e-12
    for row in outcome.rows:
        times = (row.seconds, row.serial_s, row.communication_s, row.exposed_s)
        table.add_row(
            size_text(row.cap_bytes), str(row.buckets), *(f"{seconds * 1e3:.1f}" for seconds in times),
            f"{row.hidden_share:.1%}", style="bold" if row.seconds <= shortest_s else None,
        )  # fmt: skip
    return table


def size_text(nbytes: float) -> str:
    """A size in the units that it was probably given in: `25 MB`, `1 MiB`."""
    return format_size(nbytes) if nbytes and nbytes % 2**20 == 0 else format_decimal(nbytes)


def as_json(options: SweepOptions, outcome: Outcome) -> dict[str, Any]:
    """Everything of a sweep; bytes and seconds."""
    return {
        "link": asdict(options.link),
        "layers": [asdict(layer) for layer in options.layers],
        "before_s": options.before_s,
        "first_bucket_bytes": options.first_bucket,
        "max_in_flight": options.in_flight,
        "compute_s": outcome.compute_s,
        "best_bucket_bytes": outcome.best.cap_bytes,
        "near_best_bucket_bytes": outcome.near.cap_bytes,
        "rows": [asdict(row) for row in outcome.rows],
    }


def draw(options: SweepOptions, outcome: Outcome, path: Path) -> None:
    """Step time against bucket size, with what bounds it, as a PNG file."""
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    curve = outcome.curve or outcome.rows
    caps = [row.cap_bytes for row in curve]
    lines = (("without overlap", [row.serial_s for row in curve], "0.55", "--"),
             ("overlapped", [row.seconds for row in curve], "tab:blue", "-"),
             ("communication alone", [row.communication_s for row in curve], "tab:orange", "-"))  # fmt: skip
    for label, seconds, color, style in lines:
        # A staircase: up to the next gradient's size a larger cap makes the same buckets.
        axes.plot(
            caps, [1e3 * one for one in seconds], drawstyle="steps-pre", color=color, linestyle=style, label=label
        )
    axes.axhline(outcome.compute_s * 1e3, color="tab:green", linestyle=":", label="compute alone")
    rows = outcome.rows
    axes.plot([row.cap_bytes for row in rows], [row.seconds * 1e3 for row in rows], "o", color="tab:blue", markersize=4)
    best = outcome.best
    axes.plot([best.cap_bytes], [best.seconds * 1e3], "*", color="tab:red", markersize=13, zorder=3,
              label=f"best: {size_text(best.cap_bytes)}, {best.seconds * 1e3:.1f} ms")  # fmt: skip
    axes.set_xscale("log", base=2)
    marked = [row.cap_bytes for row in rows]
    # The last cap holds everything, and may come close to the one before it.
    ticks = [cap for cap, after in zip(marked, (*marked[1:], math.inf)) if after > 1.35 * cap]
    axes.set_xticks(ticks, [size_text(cap) for cap in ticks], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bucket size")
    axes.set_ylabel("step, ms")
    link = options.link
    axes.set_title(f"alpha {link.alpha_s * 1e6:.4g} us, beta {link.beta_bytes_per_s / 1e9:.4g} GB/s, "
                   f"{options.in_flight} in flight")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path)
