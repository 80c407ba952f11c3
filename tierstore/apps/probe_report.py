"""What a person sees of a probe: tables, what limits the machine, a picture.

Scope: rich tables, sentences, the plot. Not here: the figures (`apps/probe.py`).
Owner: the thread that calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tierstore.apps.plain import show_plain
from tierstore.apps.probe import Outcome
from tierstore.apps.rate_names import NAMES, spreads_of, uncertain
from tierstore.config import format_size
from tierstore.measure.survey import Directory
from tierstore.plan.bandwidth import Activity, BandwidthTable, DirectoryRates, Rate
from tierstore.plan.layers import TimedLayer
from tierstore.plan.model_size import size_name
from tierstore.plots import new_figure, save_figure

_SHARED = 1.25  # both ways at once against the faster one alone: below it the two share one budget


def show(console: Console, outcome: Outcome) -> None:
    """All tables and sentences."""
    table = outcome.table
    console.print(_rates(table))
    console.print(_directories(table.directories))
    if table.codecs:
        console.print(_codecs(table))
    if table.slowdowns:
        console.print(_slowdowns(table))
    for one in outcome.disks.directories:
        if one.contests["read"].fio:
            console.print(_fio(one))
    for sentence in sentences(table):
        show_plain(console, sentence)


def sentences(table: BandwidthTable) -> list[str]:
    """What limits the machine, in words."""
    said = []
    faster = max(table.read_bytes_per_s, table.write_bytes_per_s)
    ratio = table.shared_bytes_per_s / faster
    how = "share one budget" if ratio < _SHARED else "go on side by side" if ratio > 1.6 else "partly share one budget"
    said.append(
        f"Reads and writes {how}: both at once move {table.shared_bytes_per_s / 1e9:.2f} GB/s, "
        f"the faster one alone {faster / 1e9:.2f}."
    )
    if table.caches_writes:
        said.append(
            f"Writes wait in a cache until they are synced: with that they take {table.durable_seconds(0, 1e9):.2f} s "
            "per GB, and other reads and writes may stand still meanwhile."
        )
    adam_s, disk_s = 1 / table.adam_elements_per_s, table.durable_seconds(10, 12)
    slower = "the disk" if disk_s > adam_s else "the cores"
    said.append(
        f"An update whose state is on disk (10 B read and 12 B written per parameter, bf16) is bounded by {slower}: "
        f"{disk_s * 1e9:.2f} s of disk and {adam_s * 1e9:.2f} s of Adam per billion parameters."
    )
    said += [
        f"{one.path} takes no O_DIRECT: measured through the page cache, which may be the rate of memory."
        for one in table.directories
        if not one.is_direct
    ]
    if (link := table.collective) is not None:
        said.append(
            f"An all-reduce between the ranks takes {link.alpha_s * 1e6:.0f} us, and a second per "
            f"{link.beta_bytes_per_s / 1e9:.2f} GB."
            + (f" It keeps {link.cores:.0%} of the computing cores busy." if link.cores else "")
        )
    if table.layers:
        largest = max(table.layers, key=lambda layer: layer.work.flop)
        said.append(
            f"These cores compute a {largest.kind.value} of {size_name(largest.work.parameters)} parameters in "
            f"{largest.dtype} in {largest.forward_s * 1e3:.0f} ms forward and {largest.backward_s * 1e3:.0f} ms "
            f"backward: {_flop_per_s(largest) / 1e9:.0f} Gflop/s."
        )
    return said + uncertain(table)


def _flop_per_s(layer: TimedLayer) -> float:
    """Backward has twice the products of forward."""
    return 3 * layer.work.flop / (layer.forward_s + layer.backward_s)


def _rates(table: BandwidthTable) -> Table:
    shown = _table("rates", ("", "median", "quartiles", "unit"))
    spreads = spreads_of(table)
    for name, label, unit in NAMES:
        if name in spreads:
            shown.add_row(label, *_cells(spreads[name]), unit)
    return shown


def _directories(directories: Sequence[DirectoryRates]) -> Table:
    shown = _table("directories, GB/s, at the best block size x threads", ("", "read", "", "write", "", "both"))
    for one in directories:
        shown.add_row(
            escape(one.path), _number(one.read.per_s), f"{format_size(one.read_block_bytes)} x {one.read_threads}",
            _number(one.write.per_s), f"{format_size(one.write_block_bytes)} x {one.write_threads}",
            _number(one.both.per_s),
        )  # fmt: skip
    return shown


def _codecs(table: BandwidthTable) -> Table:
    shown = _table("codecs, one thread, random weights", ("", "data", "ratio", "encode GB/s", "decode GB/s"))
    for one in table.codecs:
        shown.add_row(one.codec.value, one.data, f"{one.ratio:.2f}", _number(one.encode_bytes_per_s),
                      _number(one.decode_bytes_per_s))  # fmt: skip
    return shown


def _slowdowns(table: BandwidthTable) -> Table:
    shown = _table("times as long as alone: the row beside the column", ("", *(one.value for one in Activity)))
    for activity in Activity:
        factors = {s.beside: s.factor for s in table.slowdowns if s.activity is activity}
        cells = [f"{factors[other]:.2f}" if other in factors else "" for other in Activity]
        shown.add_row(activity.value, *cells)
    return shown


def _fio(one: Directory) -> Table:
    shown = _table(f"{escape(one.rates.path)} in turn with fio, GB/s", ("", "median", "quartiles"))
    for verb, contest in one.contests.items():
        named = {f"tierstore {verb} {format_size(b)} x {t}": rate for (b, t), rate in contest.ours.items()}
        for rates in (named, contest.fio):
            best = max(rates.values(), key=lambda rate: rate.per_s)
            for name, rate in rates.items():
                shown.add_row(name, *_cells(rate), style="bold" if rate is best else None)
        shown.add_row(f"{verb}: tierstore's best / fio's best", f"{contest.against_fio:.2f}", "", end_section=True)
    return shown


def _cells(rate: Rate) -> tuple[str, str]:
    return _number(rate.per_s), f"{_number(rate.low)} .. {_number(rate.high)}"


def _number(per_s: float) -> str:
    return f"{per_s / 1e9:.2f}" if per_s < 99.5e9 else f"{per_s / 1e9:.0f}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    return table


def draw(outcome: Outcome, path: Path) -> None:
    """Rate over block size, a line per number of threads, reads beside writes, a row per directory."""
    directories = outcome.disks.directories
    figure = new_figure(10, 4.2 * len(directories))
    panels = figure.subplots(len(directories), 2, squeeze=False, sharex=True, sharey="row")
    for row, one in zip(panels, directories):
        for axes, verb in zip(row, ("read", "write")):
            _draw_verb(axes, one, verb)
        row[0].set_ylim(bottom=0)  # of both panels, and only now, because it ends the automatic scaling
    save_figure(figure, path)


def _draw_verb(axes: Any, one: Any, verb: str) -> None:
    for threads in sorted({cell.threads for cell in one.cells}):
        cells = [cell for cell in one.cells if cell.threads == threads]
        rates = [getattr(cell, verb) for cell in cells]
        blocks = [cell.block_bytes for cell in cells]
        (line,) = axes.plot(blocks, [rate.per_s / 1e9 for rate in rates], "o-", markersize=4, label=f"{threads}")
        axes.fill_between(blocks, [rate.low / 1e9 for rate in rates], [rate.high / 1e9 for rate in rates],
                          color=line.get_color(), alpha=0.12)  # fmt: skip
    best = getattr(one.rates, verb)
    axes.axhline(best.per_s / 1e9, color="0.4", linestyle=":", label=f"at its best: {best.per_s / 1e9:.2f} GB/s")
    blocks = sorted({cell.block_bytes for cell in one.cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(blocks, [format_size(block) for block in blocks], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_xlabel("block size")
    axes.set_ylabel(f"{verb} rate, GB/s")
    axes.set_title(f"{one.rates.path}: {verb}s", fontsize="medium", parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(title="threads", fontsize="small", loc="lower right", ncols=2)
