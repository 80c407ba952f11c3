"""Will it fit, and how fast: a plan before the run.

Scope: from what a person asks of `tierstore plan` to a situation, its strategies, and what would help.
Not here: the arithmetic (`plan/`), tables and sentences (`apps/plan_report.py`), the picture (`apps/plan_picture.py`).
Torch is not imported, so that a plan is there at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tierstore.apps.files import read_object
from tierstore.apps.options import Precision, Preset, as_option
from tierstore.apps.preset_sizes import PRESET_FIELDS
from tierstore.config import UpdateSchedule
from tierstore.errors import ConfigError
from tierstore.io.table_file import read_table
from tierstore.plan.advice import Change, changes
from tierstore.plan.bandwidth import Activity, BandwidthTable
from tierstore.plan.layers import is_timed
from tierstore.plan.machine import Node, node_called
from tierstore.plan.memory import Attention, Job, Layout
from tierstore.plan.model_size import ModelShape, from_config, from_parameters
from tierstore.plan.strategies import Option, Situation, as_divided, fastest, options_of, simplest

_COUNT = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmbt]?)\s*", re.IGNORECASE)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_LONGEST_DEFAULT_SEQUENCE = 2048
_DEFAULT_MACHINE = "dgx-h100"
_MOST = dict.fromkeys(("gpus", "nodes", "disks", "links"), 10**6) | dict.fromkeys(
    ("batch", "sequence", "accumulate", "commit_every"), 10**9
)
_FLOPS = 1e6, 1e20
_FP32_SPEED = 0.5
"""As a part of the speed with 16 bits: that of TF32, by the white papers of Ampere, Hopper and Ada. Without TF32, fp32
products take 15 times as long as those of 16 bits on GPUs of data centers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """All options of a plan; every field is the command-line option of the same name, in bytes and bytes per second.

    Attributes:
        params, config, preset: where the model comes from; exactly one.
        gpu_memory: of each GPU; None is that of the machine, or a part of `cpu_memory` if `bandwidth` was measured on a
            machine that computes on the CPU.
        gpus: of each node; without `nodes`, of all nodes together, as many as that takes. None is the machine's number,
            or one if `bandwidth` is given and no machine is named.
        machine: a node by name; the options below it replace its figures. None is a dgx-h100; if `bandwidth` is given,
            its GPUs compute as fast as measured.
        batch: samples of a micro-batch, of all GPUs together; None is one for each data-parallel rank.
    """

    params: str | None = None
    config: Path | None = None
    preset: Preset | None = None
    gpus: int | None = None
    nodes: int | None = None
    machine: str | None = None
    gpu_memory: int | None = None
    cpu_memory: int | None = None
    nvme_capacity: int | None = None
    nvme_read: int | None = None
    nvme_write: int | None = None
    disks: int | None = None
    link: int | None = None
    links: int | None = None
    flops: float | None = None
    bandwidth: Path | None = None
    endurance: int | None = None
    dtype: Precision = Precision.BF16
    zero: int = 3
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    batch: int | None = None
    sequence: int | None = None
    accumulate: int = 1
    checkpointing: bool = False
    attention: Attention = Attention.FUSED
    update: UpdateSchedule = UpdateSchedule.AUTO
    commit_every: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What a plan says.

    Attributes:
        options: every strategy, the engine's own split last.
        simplest, fastest: of the strategies that fit; None if none does.
        changes: what would help, the cheapest first.
        notes: which figures are assumed, or easily misread.
    """

    situation: Situation
    options: tuple[Option, ...]
    simplest: Option | None
    fastest: Option | None
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()


def plan(asked: PlanOptions) -> Plan:
    """Plans a run.

    Raises:
        ConfigError: options that exclude each other, or cannot work.
        FormatError: the bandwidth file is not one.
    """
    situation = situation_of(asked)
    options = options_of(situation)
    best = fastest(options)
    notes = (
        *_flops_note(asked, situation), *_commit_note(situation, options), *_link_note(asked, situation),
        *_sizes_note(asked, situation),
    )  # fmt: skip
    return Plan(as_divided(situation), options, simplest(options), best, changes(situation, best), notes)


def _flops_note(asked: PlanOptions, situation: Situation) -> tuple[str, ...]:
    node, notes = situation.node, []
    if asked.flops is not None or is_timed(node.rates.layers, situation.job.dtype):
        return ()
    machine = node_called(asked.machine or _DEFAULT_MACHINE)
    if asked.bandwidth is not None and (asked.machine is not None or node.rates.matmul_flop_per_s is None):
        of_sheet = f"the GPUs' {machine.flop_per_s:g} flop/s are those of the data sheet of {machine.name}"
        notes.append(f"{of_sheet}: give --flops")
    if asked.dtype is Precision.FP32 and not node.computes_on_cpu:
        notes.append(
            "products of fp32 are taken to be half as fast as those of 16 bits, as TF32 is, which torch uses after "
            "torch.set_float32_matmul_precision('high'): give --flops for others"
        )
    return tuple(notes)


def _sizes_note(asked: PlanOptions, situation: Situation) -> tuple[str, ...]:
    if not _is_measured(asked):
        return ()
    has = situation.node.rates.sizes
    unknown = {
        "--gpu-memory": not situation.is_one_memory and asked.gpu_memory is None and not (has and has.gpu_bytes),
        "--cpu-memory": has is None and asked.cpu_memory is None,
        "--nvme-capacity": has is None and asked.nvme_capacity is None,
    }
    guessed = ", ".join(option for option, is_unknown in unknown.items() if is_unknown)
    told = f"these rates do not tell all sizes: those of a {_DEFAULT_MACHINE} are taken for {guessed}"
    return (told,) if guessed else ()


def _link_note(asked: PlanOptions, situation: Situation) -> tuple[str, ...]:
    if not _is_measured(asked) or situation.layout.count == 1:
        return ()
    return ("these rates have no links between GPUs or nodes: taken as fast as those of CPU memory to GPUs",)


def _commit_note(situation: Situation, options: Sequence[Option]) -> tuple[str, ...]:
    if not any(option.fits and option.waits_for_commits for option in options):
        return ()
    every = "every step" if situation.commit_every == 1 else f"every {situation.commit_every} steps"
    other = "--update forward with " if situation.schedule is UpdateSchedule.SPECULATIVE else ""
    return (
        f"what is offloaded to CPU memory is written to the disks for a commit {every}, and a step waits for that: "
        f"{other}--commit-every N commits less often, {other}--nvme-capacity 0 plans without a store",
    )


def situation_of(asked: PlanOptions) -> Situation:
    """The model, the machines and how they share the model, as the options say."""
    shape = model_of(asked)
    node, nodes = _node(asked)
    if asked.update is UpdateSchedule.SPECULATIVE and not (asked.commit_every == 1 and node.nvme_bytes):
        raise ConfigError(
            "--update speculative goes back to the last committed step: it needs disks and --commit-every 1"
        )
    layout = Layout(nodes, node.gpus, asked.tensor_parallel, asked.pipeline_parallel, asked.zero)
    batch = layout.data if asked.batch is None else asked.batch
    if batch % layout.data:
        more = -(-batch // layout.data) * layout.data
        raise ConfigError(
            f"--batch {batch} cannot be divided among {layout.data} data-parallel ranks: give a multiple, as {more}"
        )
    context = shape.context or _LONGEST_DEFAULT_SEQUENCE
    sequence = min(context, _LONGEST_DEFAULT_SEQUENCE) if asked.sequence is None else asked.sequence
    job = Job(shape, asked.dtype.value, batch, sequence, asked.accumulate, asked.checkpointing, asked.attention)
    is_one_memory = node.computes_on_cpu and asked.gpu_memory is None
    if is_one_memory:
        node = replace(node, gpu_bytes=1.0)  # GPU memory is a part of CPU memory
    return Situation(job, layout, node, asked.update, asked.commit_every, is_one_memory)


def model_of(asked: PlanOptions) -> ModelShape:
    """The model of --params, --config or --preset."""
    given = [f"--{name}" for name in ("params", "config", "preset") if getattr(asked, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: each says which model to plan for")
    if asked.params is not None:
        return from_parameters(_count(asked.params))
    if asked.preset is not None:
        return from_config(PRESET_FIELDS[asked.preset], f"preset {asked.preset.value}")
    if asked.config is not None:
        values = read_object(asked.config, "configuration")
        return from_config(values, f"{values.get('model_type')} of {asked.config.name}")
    raise ConfigError("which model? give --params 70e9, --config config.json or --preset 124m")


def _count(text: str) -> float:
    match = _COUNT.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        return float(match[1]) * _UNITS[match[2].lower()]
    except ValueError:
        raise ConfigError(f"not a number of parameters: {text!r}; write 70e9, 70B or 1.5T") from None


def _node(asked: PlanOptions) -> tuple[Node, int]:
    """The node, and how many there are."""
    node = node_called(asked.machine or _DEFAULT_MACHINE)
    _check_figures(asked)
    gpus, nodes = asked.gpus or (1 if _is_measured(asked) else node.gpus), asked.nodes or 1
    if asked.nodes is None and gpus > node.gpus:
        nodes, left = divmod(gpus, node.gpus)
        if left:
            raise ConfigError(
                f"--gpus {gpus} is no multiple of the {node.gpus} of a {node.name}: give --nodes, and --gpus of each"
            )
        gpus = node.gpus
    if gpus != node.gpus:
        node = node.with_gpus(gpus)
    if asked.disks is not None:
        if _is_measured(asked):
            raise ConfigError("--disks needs --machine: measured rates are those of all disks together already")
        node = node.with_disks(asked.disks)
    rates = _rates(asked, node.rates)
    name = f"{node.name}, changed"
    if asked.bandwidth is not None and _is_measured(asked):
        node, name = _as_measured(node, rates), f"machine of {asked.bandwidth.name}"
    sizes = (asked.gpu_memory, asked.cpu_memory, asked.nvme_capacity, asked.flops, asked.links, asked.endurance)
    flop_per_s = _or(asked.flops, _flop_per_s(asked, node, rates))
    if rates is not node.rates or any(size is not None for size in sizes):
        node = replace(
            node,
            name=name,
            gpu_bytes=_or(asked.gpu_memory, node.gpu_bytes),
            cpu_bytes=_or(asked.cpu_memory, node.cpu_bytes),
            nvme_bytes=_or(asked.nvme_capacity, node.nvme_bytes),
            links=asked.links or node.links,
            endurance_bytes=_or(asked.endurance, node.endurance_bytes),
            rates=rates,
        )
    return replace(node, flop_per_s=flop_per_s), nodes


def _as_measured(node: Node, rates: BandwidthTable) -> Node:
    """The node with the figures of the machine that was measured, as far as they are known.

    Not known are the endurance of its disks, and the links between GPUs and between nodes.
    """
    if (sizes := rates.sizes) is not None:
        node = replace(node, cpu_bytes=sizes.cpu_bytes, nvme_bytes=sizes.nvme_bytes,
                       gpu_bytes=sizes.gpu_bytes or node.gpu_bytes)  # fmt: skip
    if rates.layers:  # without a GPU copies stay in the one memory, however many ranks there are
        node = replace(node, links=1)
    return replace(node, disks=len(rates.directories) or 1, endurance_bytes=0.0, peer_bytes_per_s=0.0,
                   network_bytes_per_s=0.0, source="measured")  # fmt: skip


def _is_measured(asked: PlanOptions) -> bool:
    """Whether the machine is the one whose rates were measured: `bandwidth` is given, and no machine is named."""
    return asked.bandwidth is not None and asked.machine is None


def _check_figures(asked: PlanOptions) -> None:
    for name, most in _MOST.items():
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise ConfigError(f"{as_option(name)} must be at least 1, not {value}")
        if value is not None and value > most:
            raise ConfigError(f"{as_option(name)} must be at most {most}, not {value}")
    for name in ("gpu_memory", "cpu_memory", "link"):
        value = getattr(asked, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{as_option(name)} must be above 0, not {value}")
    least, highest = _FLOPS
    if asked.flops is not None and not least <= asked.flops <= highest:  # false for nan
        raise ConfigError(f"--flops must be from {least:g} to {highest:g}, not {asked.flops:g}; an H100 reaches 5e14")


def _flop_per_s(asked: PlanOptions, node: Node, rates: BandwidthTable) -> float:
    """From the table, or the data sheet of the machine; both are for 16 bits, except for a CPU that was measured."""
    measured = rates.matmul_flop_per_s if asked.machine is None else None
    is_slower = asked.dtype is Precision.FP32 and not rates.layers
    return (measured or node.flop_per_s) * (_FP32_SPEED if is_slower else 1.0)


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _rates(asked: PlanOptions, rates: BandwidthTable) -> BandwidthTable:
    """Measured rates in place of the data sheet's, and rates that are options in place of either."""
    if asked.bandwidth is not None:
        rates = read_table(asked.bandwidth)
        if _is_measured(asked) and rates.layers and asked.flops is not None and asked.gpu_memory is None:
            raise ConfigError("--flops is that of a GPU, and these rates are of a machine without: give --gpu-memory")
        if asked.machine is not None or asked.flops is not None:
            rates = _without_computing(rates)
    if asked.nvme_read is not None or asked.nvme_write is not None:
        read = _or(asked.nvme_read, rates.read_bytes_per_s)
        write = _or(asked.nvme_write, _or(asked.nvme_read, rates.write_bytes_per_s))
        if not (read > 0 and write > 0):
            raise ConfigError("--nvme-read and --nvme-write must be above 0; --nvme-capacity 0 is a node without disks")
        # Both at once share one budget, as on the disks that were measured.
        rates = replace(rates, read_bytes_per_s=read, write_bytes_per_s=write,
                        shared_bytes_per_s=2 / (1 / read + 1 / write))  # fmt: skip
    if asked.link is not None:
        rates = replace(rates, h2d_bytes_per_s=float(asked.link), d2h_bytes_per_s=float(asked.link))
    return rates


def _without_computing(rates: BandwidthTable) -> BandwidthTable:
    """The rates without those of computing, because options say how fast the machine computes.

    Left out are timed layers, and slowdowns of and by matrix products.
    """
    if not rates.layers:
        return rates
    kept = (one for one in rates.slowdowns if Activity.MATMUL not in (one.activity, one.beside))
    return replace(rates, layers=(), slowdowns=tuple(kept))
