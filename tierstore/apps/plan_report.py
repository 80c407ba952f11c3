"""A plan for a person, as tables and sentences, and for a program, as JSON.

Scope: words and figures of `tierstore plan`. Not here: how they are computed (`apps/plan.py`).
Owner: nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tierstore.apps.plan import Plan
from tierstore.config import Tier, UpdateSchedule, format_decimal
from tierstore.plan.advice import Change, cheapest, tokens_per_s
from tierstore.plan.layers import is_timed
from tierstore.plan.memory import activation_bytes, components, gpu_bytes
from tierstore.plan.model_size import size_name, streaming_hides_from_tokens
from tierstore.plan.step_time import Link, compute_s
from tierstore.plan.strategies import Option, Situation, usable_bytes

if TYPE_CHECKING:
    from rich.table import Table

_SHORT_LIFE_DAYS = 2 * 365
_IN_WORDS = {Link.BUBBLE: "the bubble of the pipeline", Link.SUMS: "tensor-parallel sums"}
_NAMES = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.NVME: "NVMe"}


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of the whole model that cross a link once, and the seconds they take with the links of all nodes."""

    what: str
    over: str
    nbytes: float
    seconds: float


def moves(situation: Situation) -> tuple[Move, ...]:
    """What moving each component once takes, with nothing to hide it behind."""
    node, nodes, job = situation.node, situation.layout.nodes, situation.job
    sizes, rates = components(job), node.rates
    state = sizes["fp32 master"] + sizes["momentum"] + sizes["variance"]
    to_gpu, to_cpu = (node.links * rate * nodes for rate in (rates.h2d_bytes_per_s, rates.d2h_bytes_per_s))
    disk = rates.read_bytes_per_s * nodes
    # As `costs.step_traffic` counts it: weights read in forward and in backward, state read; both written.
    read = job.shape.parameters * (2 * job.bytes.weights + job.bytes.state)
    written = job.shape.parameters * (job.bytes.weights + job.bytes.state)
    per_step = (read + written) // job.shape.parameters
    return (
        Move("weights", "NVMe to CPU", sizes["weights"], sizes["weights"] / disk),
        Move("weights", "CPU to GPU", sizes["weights"], sizes["weights"] / to_gpu),
        Move("gradients", "GPU to CPU", sizes["gradients"], sizes["gradients"] / to_cpu),
        Move("fp32 master, momentum, variance", "NVMe to CPU", state, state / disk),
        Move(f"a step with all on NVMe, {per_step} B per parameter", "NVMe", read + written,
             rates.durable_seconds(read / nodes, written / nodes)),
    )  # fmt: skip


def tables(plan: Plan) -> Iterator[Table]:
    """Components, movements, strategies, and the phases of the fastest that fits."""
    yield _component_table(plan.situation)
    yield _move_table(plan.situation)
    yield _strategy_table(plan)
    shown = plan.fastest or plan.options[-1]
    if shown.phases:
        yield _phase_table(shown)


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index))
    return table


def _component_table(situation: Situation) -> Table:
    job, layout = situation.job, situation.layout
    table = _table("training state", "component", "B/parameter", "all", "share of a GPU")
    held = gpu_bytes(job, layout)
    shares = {"weights": held.weights, "gradients": held.gradients}
    for name, size in components(job).items():
        each = size // job.shape.parameters
        share = shares.get(name, held.state * each / job.bytes.optimizer)
        table.add_row(name, str(each), format_decimal(size), format_decimal(share))
    table.add_section()
    table.add_row("sum", str(job.bytes.total), format_decimal(job.bytes.total * job.shape.parameters),
                  format_decimal(held.total), style="bold")  # fmt: skip
    for name, is_on in (("activations, all kept", False), ("activations, checkpointed", True)):
        kept = format_decimal(activation_bytes(replace(job, checkpointing=is_on), layout))
        table.add_row(name + (" (chosen)" if is_on is job.checkpointing else ""), "", "", kept)
    return table


def _move_table(situation: Situation) -> Table:
    nodes, node = situation.layout.nodes, situation.node
    rate = format_decimal(node.rates.h2d_bytes_per_s)
    title = f"moved once: {_many(nodes * node.links, 'link')} of {rate}/s, the disks of {_many(nodes, 'node')}"
    table = _table(title, "what", "over", "bytes", "seconds")
    for move in moves(situation):
        table.add_row(move.what, move.over, format_decimal(move.nbytes), _seconds(move.seconds))
    return table


def _strategy_table(plan: Plan) -> Table:
    title = "strategies: each GPU with activations, a node's memory, its disks with both slots"
    table = _table(title, "strategy", *_NAMES.values(), "fits", "step s", "eff.", "waits for")
    limits = usable_bytes(plan.situation.node)
    table.caption = "can be used: " + ", ".join(f"{format_decimal(limits[tier])} {_NAMES[tier]}" for tier in _NAMES)
    if plan.situation.is_one_memory:
        table.caption += "; the GPU tier is in CPU memory: what a strategy takes of both must fit into both"
    table.caption_justify = "left"
    for option in plan.options:
        taken = [format_decimal(option.taken[tier]) if option.taken.get(tier) else "" for tier in _NAMES]
        chosen = option is plan.fastest or option is plan.simplest
        times = [_seconds(option.step_s), f"{option.efficiency:.0%}", option.bottleneck or ""] if option.phases else []
        table.add_row(option.strategy.value, *taken, "yes" if option.fits else "no", *times,
                      style="bold" if chosen else None if option.fits else "dim")  # fmt: skip
    return table


def _phase_table(option: Option) -> Table:
    table = _table(f"seconds by phase: {option.strategy.value}", "", *(phase.name for phase in option.phases))
    table.add_row("compute", *(_seconds(phase.compute_s) for phase in option.phases))
    for link in option.phases[0].links_s:
        if any(phase.links_s[link] for phase in option.phases):
            table.add_row(link.value, *(_seconds(phase.links_s[link]) for phase in option.phases))
    table.add_row("not hidden", *(_seconds(phase.sync_s) for phase in option.phases))
    table.add_section()
    table.add_row("phase", *(_seconds(phase.seconds) for phase in option.phases), style="bold")
    table.add_row("efficiency", *(f"{phase.efficiency:.0%}" for phase in option.phases))
    return table


def heading(situation: Situation) -> str:
    """One line: the model, the machines, how they share it."""
    job, layout, node = situation.job, situation.layout, situation.node
    gpus = "1 GPU" if layout.count == 1 else f"{layout.count} GPUs"
    degrees = "".join(
        f", {name} {degree}"
        for name, degree in (("tensor", layout.tensor), ("pipeline", layout.pipeline))
        if degree > 1
    )
    return (
        f"{job.shape.name}: {size_name(job.shape.parameters)} in {job.dtype}; {layout.nodes} x {node.name}, "
        f"{gpus}, ZeRO {layout.zero}{degrees}; {job.batch} x {job.sequence} tokens"
        + (f" x {job.accumulate} micro-batches" if job.accumulate > 1 else "")
    )


def sentences(plan: Plan) -> Iterator[str]:
    """What a person can act on."""
    situation, best = plan.situation, plan.fastest
    if best is None or plan.simplest is None:
        yield from _why_nothing_fits(plan)
    else:
        yield f"simplest that fits: {plan.simplest.strategy.value}, {_speed(situation, plan.simplest)}"
        if best is not plan.simplest:
            yield f"fastest that fits: {best.strategy.value}, {_speed(situation, best)}"
        yield from _wear(situation, best)
    yield from _advice(plan)
    yield from plan.notes
    yield (
        f"weights streamed from CPU memory hide behind computing from {_tokens_that_hide(situation):,.0f} tokens a "
        f"micro-batch on; there are {situation.job.batch * situation.job.sequence:,}"
    )


def _tokens_that_hide(situation: Situation) -> float:
    """Tokens of a micro-batch whose computing hides the streaming of weights; with timed layers, scaled from these."""
    job, layout, node = situation.job, situation.layout, situation.node
    # Ranks that do not shard anything each stream the same weights, side by side.
    copies, link = layout.data / layout.shares(1), node.links * node.rates.h2d_bytes_per_s
    links = link * layout.nodes
    if is_timed(node.rates.layers, job.dtype):
        forward_s, _ = compute_s(replace(job, accumulate=1), layout, node)
        return job.batch * job.sequence * components(job)["weights"] * copies / links / forward_s
    gpus = 1 if node.computes_on_cpu else node.gpus  # ranks without a GPU share the cores of their node
    return streaming_hides_from_tokens(node.flop_per_s * gpus * copies, link, job.bytes.weights)


def _why_nothing_fits(plan: Plan) -> Iterator[str]:
    situation = plan.situation
    taken, usable = activation_bytes(situation.job, situation.layout), usable_bytes(situation.node)[Tier.GPU]
    if taken >= usable and not situation.is_one_memory:
        yield (
            f"nothing fits: activations alone take {format_decimal(taken)} of each GPU, where {format_decimal(usable)} "
            f"can be used: {' or '.join(_fewer_activations(situation))}"
        )
    else:
        yield "nothing fits: " + "; ".join(plan.options[-1].problems)


def _fewer_activations(situation: Situation) -> Iterator[str]:
    if not situation.job.checkpointing:
        yield "--checkpointing"
    if situation.job.batch > situation.layout.data:
        yield "a smaller --batch and more --accumulate"
    yield "a shorter --sequence"


def _speed(situation: Situation, option: Option) -> str:
    waits = "computing hides everything else"
    if option.bottleneck is not None:
        waits = f"it waits for {_IN_WORDS.get(option.bottleneck, option.bottleneck.value)}"
    return (
        f"{_seconds(option.step_s)} s a step, {_rate(tokens_per_s(situation, option))} tokens/s, "
        f"{option.efficiency:.0%} of the time computing; {waits}"
    )


def _wear(situation: Situation, option: Option) -> Iterator[str]:
    if not option.written_bytes:
        return
    text = f"each step writes {format_decimal(option.written_bytes)} to the disks of a node"
    days = option.wear_days(situation.node.endurance_bytes)
    if days is None:
        yield f"{text}; give --endurance to see how long they last"
        return
    if days < _SHORT_LIFE_DAYS:
        rated = format_decimal(situation.node.endurance_bytes)
        commits_each = situation.schedule is UpdateSchedule.SPECULATIVE
        less = "memory for state lowers that" if commits_each else "--commit-every and memory for state lower that"
        yield f"{text}: rated for {rated}, they are worn after {days:,.0f} days of training; {less}"
    else:
        yield f"{text}, which they stand for {days / 365:,.0f} years"


def _advice(plan: Plan) -> Iterator[str]:
    change = cheapest(plan.changes)
    if change is None:
        return
    others = [one for one in plan.changes if one.helps and one is not change]
    if change.gain is None:
        yield f"cheapest change that makes it fit: {change.text}: {_fitting(change)}"
        if others:
            yield "also: " + "; ".join(f"{one.text}: {_fitting(one)}" for one in others)
        return
    yield f"cheapest change that helps: {change.text}: {change.gain:.1f} times the tokens per second"
    if others:
        yield "also: " + "; ".join(f"{one.text} {one.gain or 0:.1f} times" for one in others)


def _fitting(change: Change) -> str:
    return f"{change.option.strategy.value}, {_rate(change.tokens_per_s)} tokens/s"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g}" if seconds < 1000 else f"{seconds:.0f}"


def as_json(plan: Plan) -> dict[str, Any]:
    """All figures, in bytes and seconds."""
    situation = plan.situation
    job, node = situation.job, situation.node
    return {
        "model": {"name": job.shape.name, "parameters": job.shape.parameters, "layers": job.shape.layers,
                  "hidden": job.shape.hidden},
        "machine": {**asdict(node), "rates": node.rates.to_json(), "nodes": situation.layout.nodes},
        "layout": asdict(situation.layout),
        "dtype": job.dtype, "batch": job.batch, "sequence": job.sequence, "accumulate": job.accumulate,
        "checkpointing": job.checkpointing, "update": situation.schedule.value,
        "components": dict(components(job)),
        "gpu_share": asdict(gpu_bytes(job, situation.layout)),
        "activations": {
            name: activation_bytes(replace(job, checkpointing=is_on), situation.layout)
            for name, is_on in (("kept", False), ("checkpointed", True))
        },
        "moved_once": [asdict(move) for move in moves(situation)],
        "strategies": [_option_json(situation, option) for option in plan.options],
        "simplest": plan.simplest.strategy.value if plan.simplest else None,
        "fastest": plan.fastest.strategy.value if plan.fastest else None,
        "changes": [
            {"change": one.text, "strategy": one.option.strategy.value, "tokens_per_s": one.tokens_per_s,
             "gain": one.gain} for one in plan.changes
        ],
    }  # fmt: skip


def _option_json(situation: Situation, option: Option) -> dict[str, Any]:
    return {
        "strategy": option.strategy.value,
        "fits": option.fits,
        "problems": list(option.problems),
        "bytes": [
            {"kind": kind.value, "tier": tier.value, "bytes": size} for (kind, tier), size in option.bytes.items()
        ],
        "taken": {tier.value: size for tier, size in option.taken.items()},
        "step_s": option.step_s, "compute_s": option.compute_s, "efficiency": option.efficiency,
        "bottleneck": option.bottleneck.value if option.bottleneck else None,
        "read_bytes": option.read_bytes, "written_bytes": option.written_bytes,
        "wear_days": option.wear_days(situation.node.endurance_bytes),
        "tokens_per_s": tokens_per_s(situation, option),
        "phases": [
            {"name": phase.name, "seconds": phase.seconds, "compute_s": phase.compute_s, "sync_s": phase.sync_s,
             "links_s": {link.value: seconds for link, seconds in phase.links_s.items()}} for phase in option.phases
        ],
    }  # fmt: skip
