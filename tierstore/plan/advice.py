"""Cheap changes that make a run fit or faster: fewer commits, a larger batch, checkpointing, memory, a disk, a GPU.

Scope: variations of a situation, and the gain of each.
Not here: the strategies of one situation (`plan/strategies.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tierstore.config import Tier, UpdateSchedule, enough, format_decimal
from tierstore.errors import ConfigError
from tierstore.plan.layers import is_timed
from tierstore.plan.strategies import Option, Situation, Strategy, fastest, options_of, sizes_needed

_HELPS = 1.1  # factor on tokens per second from which a change is worth a sentence
_GOOD = 0.9  # no larger batch is suggested from this efficiency on
_MOST_DOUBLINGS = 10
_OPTIONS = {Tier.GPU: "--gpu-memory", Tier.CPU: "--cpu-memory", Tier.NVME: "--nvme-capacity"}
_STEPS_PER_COMMIT = 50  # commits then write 2 % of what they write when every step commits


@dataclass(frozen=True, slots=True)
class Change:
    """A change that a person can make, and the run that results.

    Attributes:
        gain: tokens per second relative to those before the change; None if nothing fitted before.
    """

    text: str
    option: Option
    tokens_per_s: float
    gain: float | None

    @property
    def helps(self) -> bool:
        return self.gain is None or self.gain >= _HELPS


def tokens_per_s(situation: Situation, option: Option) -> float:
    """Tokens per second of all GPUs together; 0 if the option has no step."""
    return situation.job.tokens_per_step / option.step_s if option.step_s else 0.0


def changes(situation: Situation, now: Option | None) -> tuple[Change, ...]:
    """Changes that may make the run fit or faster, the cheapest first: settings, memory, a disk, a GPU for every node.

    Args:
        now: the fastest option that fits; None if none does.
    """
    found = []
    for text, other in _variations(situation, now):
        option = _best(other, now)
        if option is not None:
            rate = tokens_per_s(other, option)
            found.append(Change(text, option, rate, None if now is None else rate / tokens_per_s(situation, now)))
    return tuple(found)


def cheapest(found: tuple[Change, ...]) -> Change | None:
    """The first change that helps."""
    return next((change for change in found if change.helps), None)


def _best(situation: Situation, now: Option | None) -> Option | None:
    """The fastest option that fits, of the strategies that can win: the engine's split is as good as a uniform one."""
    candidates = {Strategy.NOTHING, Strategy.ENGINE} | ({now.strategy} if now else set())
    return fastest(options_of(situation, [strategy for strategy in Strategy if strategy in candidates]))


def _variations(situation: Situation, now: Option | None) -> Iterator[tuple[str, Situation]]:
    job, layout, node = situation.job, situation.layout, situation.node
    may_commit_less = situation.schedule is not UpdateSchedule.SPECULATIVE  # it goes back to the last commit
    if now is not None and now.waits_for_commits and situation.commit_every < _STEPS_PER_COMMIT and may_commit_less:
        yield (
            f"--commit-every {_STEPS_PER_COMMIT} (a kill then loses up to {_STEPS_PER_COMMIT} steps)",
            replace(situation, commit_every=_STEPS_PER_COMMIT),
        )
    if job.dtype != "fp32" and is_timed(node.rates.layers, "fp32"):  # a CPU may have no fast 16-bit products
        yield "--dtype fp32", replace(situation, job=replace(job, dtype="fp32"))
    if not job.checkpointing:
        yield "--checkpointing", replace(situation, job=replace(job, checkpointing=True))
    if now is None:
        if job.batch > layout.data:
            yield (
                f"--batch {layout.data}, one sample on each GPU at a time",
                replace(situation, job=replace(job, batch=layout.data)),
            )
        yield from _large_enough(situation)
    else:
        if now.efficiency < _GOOD:
            yield from _larger_batch(situation, now)
        memory_bytes = 2 * node.cpu_bytes
        yield (
            f"twice the CPU memory ({format_decimal(memory_bytes)} a node)",
            replace(situation, node=replace(node, cpu_bytes=memory_bytes)),
        )
        if node.nvme_bytes:
            more = node.with_disks(node.disks + 1)
            yield f"one more disk ({more.disks} a node)", replace(situation, node=more)
    yield from _more_gpus(situation)


def _large_enough(situation: Situation) -> Iterator[tuple[str, Situation]]:
    """Memory and disks just large enough for the engine's own split; for a node without disks, also with new disks."""
    disks = [situation.node.nvme_bytes] if situation.node.nvme_bytes else [0.0, math.inf]
    for nvme_bytes in disks:
        node = replace(situation.node, nvme_bytes=nvme_bytes)
        sizes = sizes_needed(replace(situation, node=node))
        gpu_bytes, cpu_bytes = sizes.get(Tier.GPU, node.gpu_bytes), sizes.get(Tier.CPU, node.cpu_bytes)
        node = replace(node, gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes)
        (option,) = options_of(replace(situation, node=node), [Strategy.ENGINE])
        taken = option.taken.get(Tier.NVME, 0.0)
        if taken > situation.node.nvme_bytes:
            sizes[Tier.NVME] = enough(taken)
            node = replace(node, nvme_bytes=sizes[Tier.NVME])
        text = " and ".join(f"{_OPTIONS[tier]} {format_decimal(size).replace(' ', '')}" for tier, size in sizes.items())
        yield text, replace(situation, node=node)


def _larger_batch(situation: Situation, now: Option) -> Iterator[tuple[str, Situation]]:
    """The batch, then the micro-batches, doubled until computing would hide the rest, or as often as fits."""
    wanted = min(math.ceil(math.log2(_GOOD / max(now.efficiency, 2.0**-_MOST_DOUBLINGS))), _MOST_DOUBLINGS)
    for name in ("batch", "accumulate"):
        for doublings in range(wanted, 0, -1):
            value = getattr(situation.job, name) * 2**doublings
            other = replace(situation, job=replace(situation.job, **{name: value}))
            if _best(other, now) is not None:
                yield f"--{name} {value} ({2**doublings} times as much)", other
                break


def _more_gpus(situation: Situation) -> Iterator[tuple[str, Situation]]:
    """A second GPU for nodes with one; for nodes with several, or that compute on the CPU, twice as many nodes."""
    layout, node, job = situation.layout, situation.node, situation.job
    try:
        if layout.gpus == 1 and not node.computes_on_cpu:
            more = replace(layout, gpus=2)
            text, larger = "one more GPU a node", node.with_gpus(2)
        elif layout.nodes == 1 and not node.network_bytes_per_s:
            return
        else:
            more = replace(layout, nodes=2 * layout.nodes)
            text, larger = f"twice the nodes ({more.nodes})", node
        batch = job.batch * more.data // layout.data
        yield text, replace(situation, layout=more, node=larger, job=replace(job, batch=batch))
    except ConfigError:
        return  # the parallel degrees do not divide this number of GPUs
