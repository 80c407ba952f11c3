"""A plan as a picture: bytes of each tier by strategy, seconds of a step by phase.

Scope: one picture. Not here: the figures in it (`apps/plan.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.apps.plan import Plan
from tierstore.config import Tier, format_decimal
from tierstore.plan.placement import Kind
from tierstore.plan.strategies import Option, usable_bytes
from tierstore.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {Kind.WEIGHTS: "tab:blue", Kind.GRADIENTS: "tab:orange", Kind.STATE: "tab:green"}
_OTHER = "0.75"  # everything else that is taken
_PHASES = ("tab:purple", "tab:olive", "tab:cyan", "tab:pink", "tab:brown")
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))
_NEAR = 5  # times the largest bar: a limit further off is not drawn


def draw(plan: Plan, path: Path) -> None:
    """Three panels of bytes and one of seconds, with a bar for each strategy, as a PNG file.

    Raises:
        ConfigError: there is no matplotlib.
        StorageError: the file cannot be written.
    """
    figure = new_figure(14, 5.2)
    panels = figure.subplots(1, 4, sharey=True)
    node = plan.situation.node
    is_one = plan.situation.is_one_memory
    titles = {Tier.GPU: "each GPU", Tier.CPU: "CPU memory of a node", Tier.NVME: "disks of a node"}
    if is_one:
        titles |= {Tier.GPU: "the GPU tier, in CPU memory", Tier.CPU: "the CPU tier, beside it"}
    for axes, (tier, limit) in zip(panels, usable_bytes(node).items()):
        _draw_tier(axes, plan.options, tier, limit, has_limit=not is_one or tier is Tier.NVME)
        axes.set_title(titles[tier])
    _draw_seconds(panels[-1], plan.options)
    names = [option.strategy.value + ("" if option.fits else " (does not fit)") for option in plan.options]
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    shown = {label: handle for axes in panels[:-1] for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=len(shown), fontsize="small")
    figure.suptitle(f"{plan.situation.job.shape.name}, {plan.situation.layout.nodes} x {node.name}", parse_math=False)
    save_figure(figure, path)


def _draw_tier(axes: Axes, options: tuple[Option, ...], tier: Tier, limit: float, *, has_limit: bool) -> None:
    """One panel; two tiers that are in one memory have no limits of their own."""
    most = max(option.taken.get(tier, 0.0) for option in options)
    is_far = not has_limit or 0 < _NEAR * most < limit
    largest = most if is_far else max(limit, most)
    unit, name = next(((unit, name) for unit, name in _UNITS if largest >= unit), (1.0, "B"))
    rows = range(len(options))
    left = [0.0] * len(options)
    for kind in Kind:
        sizes = [option.bytes.get((kind, tier), 0.0) / unit for option in options]
        axes.barh(rows, sizes, left=left, color=_COLORS[kind], label=kind.value)
        left = [before + size for before, size in zip(left, sizes)]
    rest = [max(0.0, option.taken.get(tier, 0.0) / unit - before) for option, before in zip(options, left)]
    axes.barh(rows, rest, left=left, color=_OTHER, label="activations; staging; second slot")
    if is_far:  # the bars would be too small to see
        axes.set_xlim(0, 1.1 * (most or limit) / unit)
    else:
        axes.axvline(limit / unit, color="tab:red", linestyle="--", label="what can be used")
    axes.set_xlabel(f"{name} ({format_decimal(limit)} can be used)" if has_limit else name)
    axes.grid(axis="x", alpha=0.3)


def _draw_seconds(axes: Axes, options: tuple[Option, ...]) -> None:
    # Phases differ between strategies: where cores are shared, "auto" is another schedule for state in memory.
    names = dict.fromkeys(phase.name for option in options for phase in option.phases)
    rows = range(len(options))
    left = [0.0] * len(options)
    for index, name in enumerate(names):
        seconds = [sum(phase.seconds for phase in option.phases if phase.name == name) for option in options]
        axes.barh(rows, seconds, left=left, color=_PHASES[index % len(_PHASES)], label=name)
        left = [before + more for before, more in zip(left, seconds)]
    compute_s = [option.compute_s for option in options]
    axes.plot(compute_s, rows, "k|", markersize=14, label="computing alone")
    axes.set_title("a step")
    axes.set_xlabel("seconds")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
