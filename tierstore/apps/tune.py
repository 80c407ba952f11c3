"""`tierstore tune`: what depth and schedule fit a model on this machine, predicted, and measured if asked.

Scope: from a recorded step and rates to a choice; the runs that check it; the options that `train` takes.
Not here: the forecast (`plan/step_model.py`), the choice (`plan/tuning.py`), tables and plots (`apps/tune_views.py`),
    rates (`apps/probe.py`).
Owner: nothing is kept between calls, except the files that are asked for.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.apps.files import read_object, write_object
from tierstore.apps.heap import prepare_heap
from tierstore.apps.options import Preset, TrainOptions
from tierstore.apps.output_files import check_directory, check_outputs
from tierstore.config import TierConfig, UpdateSchedule
from tierstore.cores import MOST_UPDATE_THREADS, update_threads
from tierstore.errors import ConfigError, FormatError
from tierstore.io.table_file import read_table
from tierstore.plan.bandwidth import PAIRS, RATE_NAMES, BandwidthTable
from tierstore.plan.one_memory import divided
from tierstore.plan.placement import Placement
from tierstore.plan.schedules import settled, usual
from tierstore.plan.step_machine import Machine
from tierstore.plan.step_model import StepPolicy, forecast
from tierstore.plan.step_record import StepRecord
from tierstore.plan.tiers import place
from tierstore.plan.tuning import DEPTHS, WORTH_IT, Candidate, Tuning, calibrated, tune
from tierstore.train.budgets import request_for

if TYPE_CHECKING:
    from tierstore.apps.trial import Measured, Recorded

_PROBED_BYTES, _PROBED_S = 2**28, 2.0
_NEVER_CLIPPED = 1e30
_OF_UPDATE_THREADS = ("adam_elements_per_s", "adam_fp32_elements_per_s", "norm_elements_per_s")
_OF = "of"
"""Key in a recorded step's file: the model and options that the step was recorded with."""
_DEFAULTS = {field.name: field.default for field in fields(TrainOptions)}

Rates = Callable[[], Machine]
"""Measures the machine now. Called once before the forecast, and after every round of `--measure`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions:
    """What a person asks of `tierstore tune`.

    Attributes:
        train: the run to be tuned; options that it leaves open are chosen, the others stay.
        record: a recorded step; None records one now, with the real engine.
        depths: depths that `measure` runs, beside the chosen one, in `rounds` rounds of `steps` steps each.
    """

    train: TrainOptions
    record: Path | None = None
    save_record: Path | None = None
    measure: bool = False
    depths: tuple[int, ...] = (0, 1, 2, 4, 8)
    rounds: int = 3
    steps: int = 3
    write: Path | None = None
    plot: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        if self.train.update is UpdateSchedule.DELAYED:
            raise ConfigError("--update delayed, a step late, is not predicted: tune with another --update")
        if wrong := [depth for depth in self.depths if depth not in DEPTHS]:
            raise ConfigError(f"--depth is 0 to {DEPTHS[-1]}, the depths that are predicted, not {wrong[0]}")
        if self.rounds < 1 or self.steps < 2:
            raise ConfigError(f"--rounds is at least 1 and --steps at least 2, not {self.rounds} and {self.steps}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found.

    Attributes:
        measured: by depth, of the choice; empty if nothing was measured.
        machine: the rates of the forecast; with measurements, the medians of all rates that were measured meanwhile.
    """

    record: StepRecord
    machine: Machine
    tuning: Tuning
    measured: Mapping[int, Measured]

    @property
    def depth(self) -> int:
        """The depth to run with: the chosen one, unless another was faster, beyond their spread, when both were run."""
        chosen = self.tuning.choice.depth
        if chosen not in self.measured:
            return chosen
        best = min(self.measured, key=lambda depth: self.measured[depth].seconds)
        ours, theirs = self.measured[chosen], self.measured[best]
        is_clear = theirs.high < ours.low and theirs.seconds < (1 - WORTH_IT) * ours.seconds
        return best if is_clear else chosen


def run(options: TuneOptions, rates: Rates, say: Callable[[str], None]) -> Outcome:
    """Records, predicts and measures, after a check that the files that are asked for can be written (by `save`).

    Raises:
        BudgetError, ConfigError, FormatError, StorageError: a file, a budget or the model cannot be used.
    """
    files = {name: getattr(options, name) for name in ("save_record", "write", "plot", "json")}
    train = options.train
    check_outputs([options.record, train.config, train.checkpoint, train.bandwidth], **files)
    if options.record is None or options.measure or train.bandwidth is None:
        for directory in train.nvme:
            check_directory("nvme", directory)
    found = _recorded(options, say)
    if train.bandwidth is None:
        say("measuring the rates of this machine")
    seen = [rates()]
    if options.record is None:
        say("running steps on paper")
    record = found if isinstance(found, StepRecord) else calibrated_to(found, _as_recorded(train), seen[0], say)
    tuning = _tune(options, record, seen[0])
    measured: Mapping[int, Measured] = {}
    if options.measure:
        say(f"measuring {options.rounds} rounds of {options.steps} steps of several depths")
        measured, later_record = _measure(options, tuning, lambda: seen.append(rates()))
        if later_record is not None:
            record = replace(later_record, contention=record.contention, drag=record.drag)
        # The forecast shown beside the measurement uses the rates and the computing of the same time; the choice was
        # made before.
        tuning = _tune(options, record, _median(seen), (tuning.choice.candidate, tuning.choice.depth))
    return Outcome(record, _median(seen), tuning, measured)


def save(options: TuneOptions, outcome: Outcome) -> None:
    """Writes the files that are asked for.

    Raises:
        StorageError: one cannot be written.
    """
    from tierstore.apps import tune_views

    if options.save_record is not None:
        kept = outcome.record.to_json() | {_OF: _recorded_of(options.train)}
        write_object(options.save_record, kept, "--save-record")
    if options.write is not None:
        write_object(options.write, as_train_options(options.train, outcome), "--write")
    if options.json is not None:
        write_object(options.json, tune_views.as_json(outcome), "--json")
    if options.plot is not None:
        tune_views.draw(outcome, options.plot)


def rates_for(train: TrainOptions) -> Rates:
    """The rates of the file that is given; without one each call measures them, in a few seconds.

    To measure, freed memory is returned to the system, as in `tierstore probe`: until an engine is made, every buffer
    is new.

    Raises:
        ConfigError: no file, and no disk to measure. FormatError: the file holds something else.
    """
    if train.bandwidth is not None:
        given = machine_of(read_table(train.bandwidth), train)
        return lambda: given
    if not train.nvme:
        raise ConfigError("tune needs rates: give --bandwidth the file of `tierstore probe --json`, or --nvme")
    prepare_heap()

    def measured() -> Machine:
        from tierstore.apps.probe import ProbeOptions, measure
        from tierstore.apps.scratch import made

        options = ProbeOptions(nvme=train.nvme, quick=True, size=_PROBED_BYTES, seconds=_PROBED_S, device=train.device)
        with contextlib.ExitStack() as stack:
            for directory in train.nvme:
                stack.enter_context(made(directory))
            return machine_of(measure(options, lambda what, done: None).table, train)

    return measured


def machine_of(table: BandwidthTable, train: TrainOptions) -> Machine:
    """The machine as the engine of this run will use it; the CPU optimizer was measured with `update_threads()`."""
    io_threads = TierConfig().io_threads * max(1, len(train.nvme))
    slower = {pair: table.slowdown(*pair) for pair in PAIRS}
    threads = min(update_threads(train.threads), MOST_UPDATE_THREADS)
    share = min(1.0, threads / update_threads())
    rates = {name: share * rate for name in _OF_UPDATE_THREADS if (rate := getattr(table, name)) is not None}
    return Machine(replace(table, **rates), io_threads, threads, slower)


def candidates(record: StepRecord, train: TrainOptions) -> Iterator[Candidate]:
    """Ways to run the step that give the same result; the first is what `train` would do by itself.

    Chunks are those of the planner, or as given, and not compared: the model leaves out Python's time per chunk, so it
    overrates small ones (measured, GPT-2 124M in 1500 MiB, 2 cores, 2026-11-21: predicted 1.1 s with 4 MiB, took 1.75
    s).
    """
    found = [train.update]
    if train.update is UpdateSchedule.AUTO:
        schedule = usual(needs_norm=train.needs_norm, can_go_back=train.can_go_back)
        in_memory = _placed(record, train, schedule).updates_in_memory
        first = settled(schedule, shares_cores=train.device == "cpu", in_memory=in_memory)
        found = [first, UpdateSchedule.FORWARD, UpdateSchedule.STEP]
    for schedule in dict.fromkeys(found):
        yield Candidate(schedule, _placed(record, train, schedule))


def _placed(record: StepRecord, train: TrainOptions, schedule: UpdateSchedule) -> Placement:
    tiers = TierConfig(
        device=train.device, gpu_memory=train.gpu_memory, cpu_memory=train.cpu_memory, nvme=train.nvme,
        chunk_bytes=train.chunk,
    )  # fmt: skip
    return place(divided(request_for(record.groups, tiers, schedule, None, record.acquired_bytes)))


def _recorded(options: TuneOptions, say: Callable[[str], None]) -> StepRecord | Recorded:
    """The record of the file, which was calibrated when it was made; or steps recorded now."""
    if options.record is not None:
        return _read_record(options.record, options.train)
    from tierstore.apps.arithmetic import slow_products_notes
    from tierstore.apps.trial import trial

    for note in slow_products_notes(options.train.dtype, options.train.device):
        say(f"note: {note}")
    say("recording steps of the real engine")
    with trial(_as_recorded(options.train)) as real:
        return real.record()


def _read_record(path: Path, train: TrainOptions) -> StepRecord:
    values = read_object(path, "recorded step")
    try:
        record = StepRecord.from_json(values)
    except FormatError as error:
        raise ConfigError(f"{path}: {error}") from None
    wanted = _recorded_of(train)
    of = values.get(_OF, {})  # an older file does not have it
    if not isinstance(of, dict):
        raise ConfigError(f"the recorded step {path} does not say what it is one of; record it again")
    for name, recorded in of.items():
        if wanted.get(name) != recorded:
            was, ours = ("(not given)" if one is None else one for one in (recorded, wanted.get(name, "of that")))
            raise ConfigError(f"the recorded step {path} is one of {name} {was}, not {ours}; record it again")
    return record


def _recorded_of(train: TrainOptions) -> dict[str, Any]:
    """The model and the options on which the computing of a step depends."""
    model = {name: path.name for name in ("config", "checkpoint") if (path := getattr(train, name)) is not None}
    names = ("dtype", "device", "batch", "sequence", "checkpointing")
    model = model or {"preset": (train.preset or Preset.P25M).value}
    return model | {name: _plain(getattr(train, name)) for name in names}


def _as_recorded(train: TrainOptions) -> TrainOptions:
    """The run as it is recorded: with updates beside the next forward, except in whole steps that will speculate.

    It commits each step, so that any few steps show what all of them read and write.
    """
    may_guess = train.update in (UpdateSchedule.AUTO, UpdateSchedule.SPECULATIVE) and train.needs_norm
    if may_guess and train.commit_every == 1:
        clip = train.clip and _NEVER_CLIPPED  # after the first steps of a run nothing is clipped
        return replace(train, update=UpdateSchedule.AUTO, clip=clip)
    return replace(train, update=UpdateSchedule.FORWARD, commit_every=1)


def calibrated_to(
    recorded: Recorded, train: TrainOptions, machine: Machine, say: Callable[[str], None] = lambda note: None
) -> StepRecord:
    """The recorded step with the contention and the drag that the whole steps show, which run beside updates.

    If no drag makes the forecast match those steps, that is said.

    Args:
        train: the options under which they ran.
    """
    placement = next(candidates(recorded.step, train)).placement
    whole = recorded.whole
    policy = StepPolicy(whole.depth, whole.schedule, train.commit_every, train.commits)
    record = calibrated(recorded.step, placement, machine, policy, whole.computing_s, whole.step_s)
    forecast_s = forecast(record, placement, machine, policy).seconds
    if whole.step_s and abs(forecast_s / whole.step_s - 1) > WORTH_IT:
        say(f"note: steps took {whole.step_s:.3g} s, and on paper {forecast_s:.3g} s: forecasts may be as far off")
    return record


def _tune(
    options: TuneOptions, record: StepRecord, machine: Machine, taken: tuple[Candidate, int] | None = None
) -> Tuning:
    train = options.train
    found = list(candidates(record, train))
    return tune(record, found, machine, commit_every=train.commit_every, commits=train.commits, taken=taken)


def _measure(
    options: TuneOptions, tuning: Tuning, between: Callable[[], None]
) -> tuple[dict[int, Measured], StepRecord | None]:
    from tierstore.apps.trial import trial

    depths = sorted({*options.depths, tuning.choice.depth})
    chosen = _chosen(options.train, tuning)
    if chosen.update is UpdateSchedule.SPECULATIVE:
        chosen = replace(chosen, clip=_NEVER_CLIPPED)  # as predicted; the first steps of a run are mostly clipped
    with trial(chosen) as real:
        return real.measure(depths, options.rounds, options.steps, between)


def _chosen(train: TrainOptions, tuning: Tuning) -> TrainOptions:
    return replace(train, update=tuning.choice.candidate.schedule, prefetch_depth=tuning.choice.depth)


def _median(seen: Sequence[Machine]) -> Machine:
    last = seen[-1].table
    names = [name for name in RATE_NAMES if getattr(last, name) is not None]
    rates = {name: statistics.median(getattr(machine.table, name) for machine in seen) for name in names}
    return replace(
        seen[-1],
        table=replace(last, **rates),
        slower={pair: statistics.median(machine.slower.get(pair, 1.0) for machine in seen) for pair in PAIRS},
    )


def as_train_options(train: TrainOptions, outcome: Outcome) -> dict[str, Any]:
    """The options of `train` that give this outcome: those that a person gave, and those that were chosen."""
    chosen = replace(_chosen(train, outcome.tuning), prefetch_depth=outcome.depth)
    given = {name: getattr(chosen, name) for name, default in _DEFAULTS.items() if getattr(chosen, name) != default}
    always = {name: getattr(chosen, name) for name in ("cpu_memory", "update", "prefetch_depth")}
    return {name: _plain(value) for name, value in (given | always).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value.absolute()) if isinstance(value, Path) else value  # the file may be read from anywhere
