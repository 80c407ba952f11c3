"""Measuring this machine: disks, links, codecs, the optimizer; and the table that the planner and the engine read.

Scope: the options of `tierstore probe`, one run of it, its files.
Not here: how something is measured (`measure/`), what a person sees of it (`apps/probe_report.py`).
Owner: the thread that calls; memory, device and files are released at the end.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.apps.files import write_object
from tierstore.apps.heap import serve_steps
from tierstore.apps.launch import Launch
from tierstore.apps.options import FreedMemory
from tierstore.apps.output_files import check_outputs
from tierstore.config import DEVICE, format_size
from tierstore.errors import ConfigError
from tierstore.io.directories import warn_of_memory
from tierstore.io.machine import memory_limits
from tierstore.plan.bandwidth import REPORT, Activity, BandwidthTable, NamedRate, Rate, Sizes, Slowdown
from tierstore.plan.cost_model import CostModel
from tierstore.plan.layers import TimedLayer

if TYPE_CHECKING:  # torch and numpy come with them
    from tierstore.device.streams import ComputeDevice
    from tierstore.measure.machine import MachineRates
    from tierstore.measure.survey import Disks

_LEAST_FOR_FIO_BYTES = 2**28  # a block for each of its threads
_DISK_SHARE = 0.6  # of the progress bar
_QUICK_RUN_S, _RUN_S = 0.04, 0.3  # of each load other than a disk's
_QUICK_LAYER_S, _LAYER_S = 0.5, 1.0  # of the longest layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """All options of one run; every field is the command-line option of the same name.

    Attributes:
        size: bytes of the file in each directory; None is 2 GiB, 512 MiB when quick.
        seconds: for each directory, about; None is 60, and 4 when quick.
        against: "fio"; None compares with nothing.
    """

    nvme: tuple[Path, ...]
    quick: bool = False
    size: int | None = None
    seconds: float | None = None
    device: str = "cpu"
    json: Path | None = None
    plot: Path | None = None
    against: str | None = None

    def __post_init__(self) -> None:
        if not self.nvme:
            raise ConfigError("which disk? give --nvme a directory on it; repeat it for several")
        if len({path.resolve() for path in self.nvme}) != len(self.nvme):
            raise ConfigError("a directory is listed twice in --nvme")
        if self.json is not None and (odd := [path for path in map(str, self.nvme) if not _is_text(path)]):
            raise ConfigError(f"the name of {odd[0]!r} is not UTF-8, and that of a directory in a --json file is: give "
                              "--nvme a symbolic link to it")  # fmt: skip
        if self.seconds is not None and not 0.1 <= self.seconds <= 86400:
            raise ConfigError(f"--seconds must be at least 0.1 and at most 86400, not {self.seconds}")
        if self.size is not None and self.size < 2**25:
            raise ConfigError(f"--size must be at least 32 MiB, the largest block, not {format_size(self.size)}")
        if self.against not in (None, "fio"):
            raise ConfigError(f"--against knows fio, not {self.against!r}")
        if self.against is not None and self.size is not None and self.size < _LEAST_FOR_FIO_BYTES:
            raise ConfigError(f"--against fio needs --size of at least {format_size(_LEAST_FOR_FIO_BYTES)}, "
                              f"not {format_size(self.size)}")  # fmt: skip
        if not DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device must be cpu, cuda or cuda:N, not {self.device}")


def _is_text(path: str) -> bool:
    try:
        return bool(path.encode())
    except UnicodeEncodeError:  # for bytes that are not UTF-8
        return False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A table, and the measurements behind it."""

    table: BandwidthTable
    disks: Disks
    machine: MachineRates


def probe(options: ProbeOptions, tell: Callable[[str, float], None], launch: Launch) -> Outcome | None:
    """Measures, after a check that the files that are asked for can be written (by `save`); only rank 0 does.

    Args:
        tell: called before each run, with what begins and the share of all that is done so far.
        launch: the ranks, between which a collective is timed if there are several.

    Returns:
        None at a rank that is not the first.

    Raises:
        StorageFull: a directory has not enough room; nothing was written.
        ConfigError: an option cannot work; nothing was written.
    """
    check_outputs(json=options.json, plot=options.plot)
    collective = None
    if launch.count > 1:
        collective = _time_collectives(options, launch)
        if launch.rank > 0:
            return None
    warn_of_memory(options.nvme)
    outcome = measure(options, tell)
    return replace(outcome, table=replace(outcome.table, collective=collective))


def measure(options: ProbeOptions, tell: Callable[[str, float], None]) -> Outcome:
    """Everything except a collective; see `probe`."""
    from tierstore.device.streams import open_device
    from tierstore.io.backend import Backend
    from tierstore.measure.disk import check_room, disk_files, incompressible
    from tierstore.measure.fio import find_fio
    from tierstore.measure.machine import MEMORY_BYTES, measure_machine
    from tierstore.measure.memory import arena_memory
    from tierstore.measure.survey import QUICK, THOROUGH, survey

    effort = QUICK if options.quick else THOROUGH
    effort = replace(effort, size_bytes=options.size or effort.size_bytes, seconds=options.seconds or effort.seconds)
    rounds, run_s = (3, _QUICK_RUN_S) if options.quick else (7, _RUN_S)
    fio = find_fio() if options.against else None
    check_room(options.nvme, effort.size_bytes)
    device = open_device(options.device)

    def tell_of_disks(what: str, done: float) -> None:
        tell(what, _DISK_SHARE * done)

    def tell_of_machine(what: str, done: float) -> None:
        tell(what, _DISK_SHARE + (1 - _DISK_SHARE) * done)

    with arena_memory(MEMORY_BYTES * len(options.nvme), "tierstore-probe", device) as (runtime, memory):
        tell(f"making files of {format_size(effort.size_bytes)}", 0.0)
        incompressible(memory)
        with disk_files(options.nvme, effort.size_bytes, memory, Backend()) as files:
            disks = runtime.call(survey, files, effort, tell_of_disks, fio)
            # While the files are open, because computing and copies are also measured beside the disks.
            machine = runtime.call(measure_machine, device, memory, run_s, rounds, tell_of_machine, disks.loads)
    layers = _time_layers(options, rounds, tell) if device.kind == "cpu" else ()
    sizes = _sizes(options.nvme, device)
    return Outcome(replace(_table(disks, machine), layers=layers, sizes=sizes), disks, machine)


def _sizes(directories: Sequence[Path], device: ComputeDevice) -> Sizes:
    """Of this machine; the free space of a file system counts once, however many directories are on it."""
    free_bytes = {os.stat(path).st_dev: shutil.disk_usage(path).free for path in directories}
    gpu_bytes = None
    if device.kind == "cuda":
        import torch

        gpu_bytes = torch.cuda.get_device_properties(device.torch_device).total_memory
    return Sizes(min(memory_limits().values()), sum(free_bytes.values()), gpu_bytes)


def save(options: ProbeOptions, outcome: Outcome) -> None:
    """Writes the files that are asked for.

    Raises:
        StorageError: one cannot be written.
    """
    from tierstore.apps.probe_report import draw

    if options.json is not None:
        write_object(options.json, outcome.table.to_json() | {REPORT: report(outcome)}, "--json")
    if options.plot is not None:
        draw(outcome, options.plot)


def _time_collectives(options: ProbeOptions, launch: Launch) -> CostModel | None:
    """Alpha and beta of an all-reduce between the ranks; None where the time did not depend on the size."""
    from tierstore.apps.crew import joined
    from tierstore.train.data_parallel.collective_costs import fit_cost_model

    device = f"cuda:{launch.local_rank}" if options.device == "cuda" else options.device
    with joined(launch, device):
        model = fit_cost_model(device=device).model
    return model if math.isfinite(model.beta_bytes_per_s) else None


def _time_layers(options: ProbeOptions, rounds: int, tell: Callable[[str, float], None]) -> tuple[TimedLayer, ...]:
    """Times layers in this thread, as a training loop computes, and in memory that earlier steps have left."""
    from tierstore.measure.layers import DTYPES, time_layers

    longest_s = _QUICK_LAYER_S if options.quick else _LAYER_S
    with serve_steps(FreedMemory.KEEP, updates_in_memory=False):
        return time_layers(tuple(DTYPES), rounds, longest_s, lambda name: tell(name, 1.0))


def _table(disks: Disks, machine: MachineRates) -> BandwidthTable:
    rates: dict[str, Rate] = {
        "read_bytes_per_s": disks.read,
        "write_bytes_per_s": disks.write,
        "shared_bytes_per_s": disks.both,
        "h2d_bytes_per_s": machine.rates["h2d"],
        "d2h_bytes_per_s": machine.rates["d2h"],
        "memory_bytes_per_s": machine.rates["memory"],
        "adam_elements_per_s": machine.rates["adam"],
        "adam_fp32_elements_per_s": machine.rates["adam fp32"],
        "checksum_bytes_per_s": machine.rates["checksum"],
        "norm_elements_per_s": machine.rates["norm"],
        "matmul_flop_per_s": machine.rates["matmul"],
        "sync_bytes_per_s": disks.sync,
    }
    for way in ("h2d", "d2h"):
        if f"{way} pageable" in machine.rates:
            rates[f"{way}_pageable_bytes_per_s"] = machine.rates[f"{way} pageable"]
    # Of the bytes that both ways move together, each way moves half.
    ways = (Slowdown(Activity.READ, Activity.WRITE, max(1.0, 2 * disks.read.per_s / disks.both.per_s)),
            Slowdown(Activity.WRITE, Activity.READ, max(1.0, 2 * disks.write.per_s / disks.both.per_s)))  # fmt: skip
    return BandwidthTable(
        **{name: rate.per_s for name, rate in rates.items()},  # type: ignore[arg-type]
        directories=tuple(one.rates for one in disks.directories),
        codecs=machine.codecs,
        slowdowns=(*ways, *machine.slowdowns),
        spreads=tuple(NamedRate(name, rate) for name, rate in rates.items()),
    )


def report(outcome: Outcome) -> dict[str, Any]:
    """What the table leaves out: every cell, and every rate of fio."""
    return {
        "directories": [
            {
                "path": one.rates.path,
                "cells": [asdict(cell) for cell in one.cells],
                "in_turn": {
                    verb: {
                        "tierstore": [
                            {"block_bytes": block_bytes, "threads": threads, **asdict(rate)}
                            for (block_bytes, threads), rate in contest.ours.items()
                        ],
                        "fio": {name: asdict(rate) for name, rate in contest.fio.items()},
                        "against_fio": contest.against_fio,
                    }
                    for verb, contest in one.contests.items()
                },
            }
            for one in outcome.disks.directories
        ],
        "machine": {name: asdict(rate) for name, rate in outcome.machine.rates.items()},
    }
