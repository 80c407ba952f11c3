"""What `tierstore tune` has found: a table, words, a plot, JSON.

Scope: showing. Not here: finding (`apps/tune.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.apps.rate_names import uncertain
from tierstore.apps.tune import Outcome
from tierstore.config import Tier, TierConfig, UpdateSchedule, format_size
from tierstore.cores import available_cores
from tierstore.plan.bandwidth import BandwidthTable
from tierstore.plan.codec_choice import WORTH
from tierstore.plan.costs import codec_pays
from tierstore.plan.placement import Kind
from tierstore.plan.tuning import USUAL_DEPTH, WORTH_IT, Candidate, Choice
from tierstore.plots import new_figure, save_figure

if TYPE_CHECKING:
    from rich.table import Table


def as_table(outcome: Outcome) -> Table:
    """Every depth of the choice: predicted, and measured if it was."""
    from rich.table import Table

    tuning, measured = outcome.tuning, outcome.measured
    table = Table(title=f"prefetch depth, {describe(tuning.choice.candidate)}", title_justify="left")
    if measured:
        table.padding = 0  # so that a terminal of 80 columns shows every digit
    names = ["depth", "step s", "stall s", "disk s", "CPU peak", "GPU peak"]
    for name in [*names, *(["measured", "quartiles", "off"] if measured else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for depth, step in enumerate(tuning.choice.forecasts):
        cells = [
            str(depth), f"{step.seconds:.3f}", f"{step.stall_s:.3f}", f"{step.disk_s:.3f}",
            format_size(step.cpu_peak_bytes), format_size(step.gpu_peak_bytes),
        ]  # fmt: skip
        if depth in measured:
            real = measured[depth]
            off = step.seconds / real.seconds - 1
            cells += [f"{real.seconds:.3f}", f"{real.low:.3f}-{real.high:.3f}", f"{off:+.1%}"]
        elif measured:
            cells += [""] * 3
        table.add_row(*cells, style="bold" if depth == tuning.choice.depth else None)
    return table


def describe(candidate: Candidate) -> str:
    """A candidate in words."""
    item_bytes = max(need.state_bytes for need in candidate.placement.groups)
    chunk = format_size(candidate.placement.chunk_elements * item_bytes)
    return f"update {candidate.schedule.value}, chunks of {chunk}"


def as_words(outcome: Outcome) -> str:
    """The choice, why, where the state lives, and what else was considered."""
    tuning, table = outcome.tuning, outcome.machine.table
    choice = tuning.choice
    lines = [
        f"Depth {choice.depth}, {describe(choice.candidate)}: {choice.best.seconds:.3f} s a step, "
        f"{choice.best.stall_s:.3f} s of it waiting for weights.",
        *_nearly_as_good(outcome),
        tuning.reason[0].upper() + tuning.reason[1:] + ".",
        _split(choice),
        "One depth serves all groups: the policy fetches them in the order of use as far as memory allows, and groups "
        "of other sizes change how many that are, not which. Gradients go in one bucket per group.",
        _codec(table, is_fp32=all(need.weight_bytes == 4 for need in outcome.record.groups)),
    ]
    lines += [
        f"Not taken: {describe(candidate)}: {step.seconds:.3f} s at the usual depth."
        for candidate, step in tuning.others[:3]
    ]
    if choice.candidate.schedule is UpdateSchedule.SPECULATIVE:
        lines.append("That is a step whose gradients are not clipped: `train` updates as under forward while they are.")
    if outcome.measured:
        lines.append(_check(outcome))
    else:
        lines += uncertain(table)
    return "\n".join(lines)


def _nearly_as_good(outcome: Outcome) -> Iterator[str]:
    """Why a depth or an update that looks faster on paper was not taken."""
    tuning, choice = outcome.tuning, outcome.tuning.choice
    at_usual_s = choice.forecasts[USUAL_DEPTH].seconds
    depths = min(one.seconds for one in choice.forecasts) / choice.best.seconds
    updates = min([step.seconds / at_usual_s for _, step in tuning.others], default=1.0)
    if outcome.measured and min(depths, updates) < 1 - WORTH_IT:
        yield "While it was measured the machine was another one than before, when the choice was made: tune again."
    elif min(depths, updates) < 1:
        yield (
            f"What is less than {WORTH_IT:.0%} faster on paper may not be: then the smallest depth from 1 on is taken, "
            "and the update that `train` takes by itself; --measure tells."
        )


def _codec(table: BandwidthTable, *, is_fp32: bool) -> str:
    """Whether a codec would pay on this disk, at its rate on the threads that read, overlapped with the disk."""
    codecs = [one for one in table.codecs if not (is_fp32 and one.data == "bf16")]
    if not codecs:
        return "Codec: none; a bandwidth table of `tierstore probe` holds what would decide it."
    threads, disk = TierConfig().io_threads, table.shared_bytes_per_s
    cores = min(threads, available_cores())
    rates = [(one, cores * min(one.encode_bytes_per_s, one.decode_bytes_per_s)) for one in codecs]
    pays = [one for one, rate in rates if one.ratio >= WORTH and codec_pays(disk, one.ratio, rate, overlapped=True)]
    if pays:
        names = ", ".join(f"{one.codec.value} on {one.data} ({one.ratio:.2f})" for one in pays)
        return f"Codec: none; faster than the disk's {disk / 1e9:.2f} GB/s, where cores are idle, would be {names}."
    one, rate = max(rates, key=lambda item: item[1] * (item[0].ratio > 1))
    return (
        f"Codec: none. The fastest, {one.codec.value} on {one.data}, does {rate / 1e9:.2f} GB/s on {cores} cores at a "
        f"ratio of {one.ratio:.2f}: slower than the disk's {disk / 1e9:.2f} GB/s, or it shrinks nothing."
    )


def _split(choice: Choice) -> str:
    usage = {(row.kind, row.tier): row.bytes for row in choice.candidate.placement.usage()}
    parts = []
    for kind in Kind:
        cpu, nvme = usage.get((kind, Tier.CPU), 0), usage.get((kind, Tier.NVME), 0)
        if cpu + nvme:
            parts.append(f"{kind.value} {cpu / (cpu + nvme):.0%} of {format_size(cpu + nvme)}")
    rest = "; the rest on NVMe" if any(tier is Tier.NVME for _, tier in usage) else ""
    return f"In CPU memory: {', '.join(parts)}{rest}."


def _check(outcome: Outcome) -> str:
    """Predicted against measured at the chosen depth, and that depth against the best measured one."""
    depth = outcome.tuning.choice.depth
    real, best_depth = outcome.measured[depth], min(outcome.measured, key=lambda d: outcome.measured[d].seconds)
    best = outcome.measured[best_depth]
    off = outcome.tuning.choice.best.seconds / real.seconds - 1
    spread = (real.high - real.low) / real.seconds
    return (
        f"Measured at depth {depth}: {real.seconds:.3f} s; the prediction is {off:+.1%} off. Best measured: depth "
        f"{best_depth} with {best.seconds:.3f} s; the choice is {real.seconds / best.seconds - 1:.1%} slower "
        f"(quartiles of its steps are {spread:.1%} apart)."
        + (f" That is clear: --write takes depth {outcome.depth}." if outcome.depth != depth else "")
    )


def draw(outcome: Outcome, path: Path) -> None:
    """Step time and its parts against the depth."""
    figure = new_figure(8, 4.8)
    axes = figure.add_subplot()
    steps = outcome.tuning.choice.forecasts
    depths = list(range(len(steps)))
    axes.plot(depths, [step.seconds for step in steps], "o-", color="tab:blue", label="predicted step")
    axes.plot(depths, [step.stall_s for step in steps], "s--", color="tab:orange", label="predicted stall")
    axes.axhline(outcome.record.compute_s, color="tab:green", linestyle=":", label="compute alone")
    axes.axhline(steps[-1].disk_s, color="0.5", linestyle="-.", label="disks alone")
    if outcome.measured:
        real = [outcome.measured[depth] for depth in sorted(outcome.measured)]
        axes.errorbar(
            sorted(outcome.measured), [one.seconds for one in real],
            yerr=[[one.seconds - one.low for one in real], [one.high - one.seconds for one in real]],
            fmt="D", color="tab:red", capsize=3, label="measured step (quartiles)",
        )  # fmt: skip
    axes.axvline(outcome.tuning.choice.depth, color="0.8", zorder=0, linewidth=6, label="chosen depth")
    axes.set_xlabel("prefetch depth, groups")
    axes.set_ylabel("seconds per step")
    axes.set_ylim(bottom=0)
    axes.set_xticks(depths)
    axes.set_title(describe(outcome.tuning.choice.candidate))
    axes.grid(alpha=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything in bytes and seconds; `depth` is what `--write` takes."""
    tuning = outcome.tuning
    return {
        "depth": outcome.depth,
        "predicted_depth": tuning.choice.depth,
        "update": tuning.choice.candidate.schedule.value,
        "chunk_elements": tuning.choice.candidate.placement.chunk_elements,
        "regime": tuning.regime.value,
        "reason": tuning.reason,
        "compute_s": outcome.record.compute_s,
        "predicted": [asdict(step) for step in tuning.choice.forecasts],
        "measured": {str(depth): asdict(real) for depth, real in outcome.measured.items()},
        "rates": outcome.machine.table.to_json(),
    }
