"""`tierstore train`: a causal language model on bytes of text, within the budgets, never losing a step.

Scope: the loop: resume, evaluate, step, report, stop.
Not here: options (`apps/options.py`), model and data (`apps/assembly.py`), how a step is done (`train/`).
Owner: the thread that calls `train`. Its caller handles signals (`cli/train.py`).

[Note: ranks] With several ranks all of them make every call of the engine, in the same order. So whatever decides about
a call (a request to stop, an option, a step count) must be the same on all ranks: all are given it, or an exchange
tells it to all. Losses are means over all ranks, which together see the samples that one rank would see.
"""

from __future__ import annotations

import contextlib
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from tierstore.apps import outputs, presets
from tierstore.apps.arithmetic import slow_products_notes
from tierstore.apps.assembly import Parts, assemble, engine_arguments
from tierstore.apps.crew import Crew
from tierstore.apps.data import held_out_batches
from tierstore.apps.heap import prepare_heap, serve_steps
from tierstore.apps.metrics import StepLog, peak_resident_bytes
from tierstore.apps.options import TrainOptions
from tierstore.apps.progress import spinner
from tierstore.apps.report import Reporter, Totals
from tierstore.apps.stopping import StopRequest
from tierstore.apps.turns import take_short_turns
from tierstore.apps.verify import advised
from tierstore.archive.sources import INDEX, SINGLE
from tierstore.config import Codec, Resume, TierConfig, format_size
from tierstore.cores import share_of_cores
from tierstore.errors import ConfigError, DoneButFor, StorageError, StorageFull, UnusedOptionWarning
from tierstore.io.machine import ranks_on_these_cores
from tierstore.store.snapshots import snapshot_directories
from tierstore.trace import Tracer
from tierstore.train.engine import Engine

T = TypeVar("T")
_OF_A_RANK = ("nvme", "config", "checkpoint", "data", "bandwidth", "device", "threads", "export", "json", "trace")
"""Options that may differ between ranks: places and devices."""
_TRIES_FOR_S, _TRIES_EVERY_S = 3600.0, 5.0
"""How long, and how often, an export is tried again if nothing else keeps the weights."""


@dataclass(slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        stopped_by: the signal that ended it before its last step, or None.
    """

    totals: Totals = field(default_factory=Totals)
    stopped_by: signal.Signals | None = None


def train(
    options: TrainOptions,
    reporter: Reporter,
    make_engine: Callable[..., Any] = Engine,
    stop: StopRequest | None = None,
    crew: Crew | None = None,
) -> Outcome:
    """Trains until `options.steps`, or until a signal asks for the end of the step in flight.

    Args:
        make_engine: takes the arguments of `Engine`, and returns an object with its interface.
        stop: receives the signals; None: nothing does.
        crew: the ranks that train together, each of which calls this function; None: this process alone.

    Raises:
        TierstoreError: bad options, budgets, stores, disks; every committed step stays in the store.
    """
    crew = crew or Crew()
    log = StepLog(options.json) if options.json is not None and crew.leads else None

    def prepare() -> Parts:
        outputs.check_paths(options, writes=crew.leads)
        if log is not None:
            log.open(resumed=outputs.holds_a_run(options.nvme))
            stack.callback(log.close)
        prepare_heap()
        take_short_turns(options.device)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UnusedOptionWarning)  # the recipe says so, by the names of the options
        if options.threads is not None or crew.count > 1:  # of torchrun each rank has one
            torch.set_num_threads(options.threads or share_of_cores(sharing))
        return assemble(options, crew)

    is_told = crew.leads and options.resume is not Resume.PREVIOUS  # whose own error says what to do
    with advised(options.nvme if is_told else (), reporter.console), contextlib.ExitStack() as stack:
        names = [one.name for one in fields(options) if one.name not in _OF_A_RANK]
        same = {name: getattr(options, name) for name in names}
        crew.check_same("options", same | {"whether to --export": options.export is not None})  # all take part in it
        sharing = ranks_on_these_cores(crew.exchange)
        with spinner(reporter.console, "making the model and reading the text"):
            parts = crew.all_succeed("the model and the text", prepare)
        text = {"the fingerprint of the training text": parts.corpus.fingerprint}
        crew.check_same("the model and the text", text | presets.described(parts.configuration))
        stack.callback(parts.batches.close)
        tracer = Tracer(time.perf_counter, enabled=options.trace is not None and crew.leads)
        with spinner(reporter.console, "making the engine (on a new machine its kernels are compiled first)"):
            engine = stack.enter_context(make_engine(**engine_arguments(options, parts, tracer, crew)))
        in_memory = engine.placement.updates_in_memory
        stack.enter_context(serve_steps(options.freed_memory, updates_in_memory=in_memory))
        run = _Run(options, reporter, parts, engine, log, stop or StopRequest(), crew)
        run.describe()
        outcome = run.run()
        if options.trace is not None and crew.leads:
            tracer.to_chrome(options.trace)
            reporter.say(f"trace: {options.trace} (open it at https://ui.perfetto.dev)")
    return outcome


class _Run:
    """The loop and what it counts."""

    def __init__(
        self, options: TrainOptions, reporter: Reporter, parts: Parts, engine: Any, log: StepLog | None,
        stop: StopRequest, crew: Crew,
    ) -> None:  # fmt: skip
        self._options = options
        self._reporter = reporter
        self._parts = parts
        self._engine = engine
        self._log = log
        self._stop = stop
        self._crew = crew
        self._agreed: signal.Signals | None = None
        self._device = torch.device(options.device)
        self._loss = float("nan")
        self._is_full_told = False
        self._totals = Totals()
        self._tokens_per_step = options.accumulate * options.batch * (parts.sequence - 1)

    def describe(self) -> None:
        """Says what will be trained, from where, and where it is placed."""
        parts, options = self._parts, self._options
        for note in self._notes():
            self._reporter.say(f"note: {note}")
        count = self._parameters()
        ranks = self._crew.count
        tiers = TierConfig(device=options.device, gpu_memory=options.gpu_memory, cpu_memory=options.cpu_memory)
        memory = ranks * tiers.memory_bytes
        state = 16 * count
        self._reporter.say(
            f"model: {type(parts.model).__name__}, {count / 1e6:.1f} million parameters, "
            f"{format_size(state)} of training state; memory {format_size(memory)} ({state / max(memory, 1):.1f} x)"
        )
        if ranks > 1:
            nodes = self._crew.launch.nodes
            on = f" on {nodes} machines, a whole store on each" if nodes > 1 else ""
            self._reporter.say(
                f"{ranks} ranks{on}, ZeRO stage {options.zero}, {options.batch // ranks} of {options.batch} samples "
                "each; places, seconds and bytes are those of rank 0, losses and tokens those of all"
            )
        self._reporter.say(f"text: {parts.corpus.description}, {format_size(parts.corpus.nbytes)}")
        self._reporter.placement(self._engine.placement.usage(), has_gpu=self._device.type != "cpu")
        if options.codec is not Codec.NONE:
            self._reporter.codecs(self._engine.statistics()["codecs"])
        if self._engine.step_count:
            self._reporter.say(f"resumed after step {self._engine.step_count}")

    def _notes(self) -> list[str]:
        """What a person may not expect of the run."""
        parts, options, statistics = self._parts, self._options, self._engine.statistics()
        slow = slow_products_notes(options.dtype, options.device)
        notes = [*parts.recipe.notes, *parts.batches.notes, *slow]
        if options.why_nothing_is_kept:
            notes.append(f"{options.why_nothing_is_kept}: however this run ends, only what --export writes remains")
            if options.export is not None:
                notes += outputs.little_room(options.export, 4 * self._parameters())
        if reason := statistics["not_on_gpu"]:
            notes.append(f"no optimizer state lives on the GPU: {reason}")
        if buffered := statistics["buffered_directories"]:
            notes.append(f"no O_DIRECT in {', '.join(buffered)}: I/O is buffered, and the page cache takes memory")
        return notes

    def _parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._parts.model.parameters())

    def run(self) -> Outcome:
        """All steps up to the last one, or up to a signal.

        A signal leaves out what comes after the steps, except an export if nothing else keeps what was trained.
        """
        if self._log is not None:
            self._engine.flush()  # lines beside a store without a generation would count as another run's
            self._log.begin()
            self._engine.before_commit(partial(self._unless_full, self._log.sync))
        self._engine.on_step(self._step_ended)
        options = self._options
        kept = options.why_nothing_is_kept or "the store holds the last committed step: go on with --resume auto"
        with self._stop.wished(kept):
            self._totals.held_out_before = self._held_out_loss()
            self._loop(options.steps)
            if self._log is not None:
                self._end(self._log)
            self._totals.last_step = self._engine.step_count
            stopped_by = self._stopped_by if self._engine.step_count < options.steps else None
            would_be_lost = bool(options.why_nothing_is_kept and self._totals.steps)
            if stopped_by is not None and not (would_be_lost and options.export is not None):
                return Outcome(self._totals, stopped_by)
            if self._totals.steps or options.resume is not Resume.PREVIOUS:  # `previous` alone changes nothing
                self._engine.apply_pending()
            if stopped_by is not None:
                self._reporter.say(f"exporting what was trained, for {options.why_nothing_is_kept}; Ctrl-C ends that")
            elif self._totals.steps:
                self._totals.held_out_after = self._held_out_loss()
            if options.export is not None:
                self._stop.expect("the export", kept)
            if stopped_by is None:
                self._summarize()
            if options.export is not None:
                self._export(options.export)
                self._stop.expect("the export", f"what was trained is in {options.export}")
        return Outcome(self._totals, stopped_by)

    def _end(self, log: StepLog) -> None:
        try:
            log.write_rest()
            log.sync()  # without commits nothing else syncs it
        except StorageFull as error:
            self._reporter.say(f"note: {error}; it lacks the last lines")

    def _loop(self, last: int) -> None:
        every = self._options.snapshot_every
        self._reporter.start(self._engine.step_count, last)
        started_s = time.perf_counter()
        try:
            while self._engine.step_count < last and self._stopped_by is None:
                report = self._step()
                self._totals.add(report, self._loss, self._tokens_per_step)
                self._reporter.step(report, self._loss, self._tokens_per_step, last)
                if self._totals.diverged_at == report.step:
                    self._reporter.say(
                        f"note: the loss of step {report.step} is {self._loss}: the run has diverged; "
                        "stop it, and start again in a new store with a lower --lr"
                    )
                if every is not None and report.step % every == 0:
                    self._snapshot(f"step-{report.step}")
            # Late updates belong to the time of the steps; and a request to stop means: with everything committed.
            self._engine.flush()
        finally:
            self._reporter.stop()
        self._totals.wall_s = time.perf_counter() - started_s

    def _snapshot(self, name: str) -> None:
        """Keeps this step, unless there is one from before the run went back; without room training goes on."""
        directories = snapshot_directories(self._options.nvme, name)
        if any(self._exchange(outputs.holds_a_run(directories))):
            self._reporter.say(f"note: {directories[0]} is there already, and stays as it is")
            return
        self._engine.flush()
        try:
            self._engine.snapshot(name)
        except (ConfigError, StorageError) as error:
            self._reporter.say(f"note: {name} is not kept as a snapshot, training goes on: {error}")
        else:
            self._reporter.say(f"taking a snapshot: {directories[0]}")

    def _summarize(self) -> None:
        """The table of a run that reached its end."""
        if self._totals.steps:
            self._totals.peak_rss_bytes = peak_resident_bytes()
            self._reporter.summary(self._totals)
        else:
            done = f"step {self._engine.step_count} of {self._options.steps}"
            self._reporter.say(f"nothing to train: {done} is done already")

    def _export(self, directory: Path) -> None:
        options, has_weights = self._options, False
        is_there = any((directory / name).is_file() for name in (SINGLE, INDEX))
        try:
            self._export_weights(directory)
            has_weights = True
            if self._crew.leads:
                if options.checkpoint is not None:
                    outputs.copy_companions(options.checkpoint, directory, replace=is_there)
                outputs.write_configuration(self._parts.configuration, directory)  # last: in place of that copy
        except (ConfigError, StorageError) as error:  # somebody else writes there, or the system refused
            what = "the store holds the trained weights: make room, and repeat the command with --resume auto"
            if has_weights or isinstance(error, DoneButFor):
                what = f"the trained weights are in {directory}, not all that belongs beside them is"
            elif options.why_nothing_is_kept:
                what = f"the trained weights are lost: {options.why_nothing_is_kept}"
            raise StorageError(f"{error}; {what}") from error
        self._reporter.say(f"exported to {directory}")

    def _export_weights(self, directory: Path) -> None:
        """Weights that nothing else keeps are not given up at once: somebody can still make room."""
        until_s = time.monotonic() + (_TRIES_FOR_S if self._options.why_nothing_is_kept else 0.0)
        is_told = False
        while True:
            try:
                with spinner(self._reporter.console, f"exporting to {directory}"):
                    self._engine.export(directory)
                return
            except DoneButFor:
                raise
            except (ConfigError, StorageError) as error:
                if any(self._exchange(time.monotonic() >= until_s)):
                    raise
                if not is_told:
                    times = "" if self._stopped_by is not None else ", twice,"  # the first is a request to stop
                    self._reporter.say(
                        f"{error}; nothing else keeps the trained weights: put that right, it is tried again for "
                        f"{_TRIES_FOR_S / 60:.0f} minutes; Ctrl-C{times} gives them up"
                    )
                is_told = True
            time.sleep(_TRIES_EVERY_S)

    def _step(self) -> Any:
        tokens = [
            self._parts.batches.next().to(self._device, non_blocking=True) for _ in range(self._options.accumulate)
        ]
        batches = [{"input_ids": one, "labels": one} for one in tokens]
        return self._engine.train_step(batches, schedule=self._options.micro_batches.value)

    @property
    def _stopped_by(self) -> signal.Signals | None:
        """The signal that ends the run; with several ranks, one that all of them know of. See [Note: ranks]."""
        return self._stop.signal_number if self._crew.count == 1 else self._agreed

    def _exchange(self, value: T) -> list[T]:
        """The values of all ranks, by rank; also agrees on whether one of them was asked to stop."""
        if self._crew.count == 1:
            return [value]
        told = self._crew.exchange("the loss", (value, self._stop.signal_number))
        if self._agreed is None:
            self._agreed = next((number for _, number in told if number is not None), None)
            if self._agreed is not None:
                self._stop.announce()
        return [theirs for theirs, _ in told]

    def _mean_of_all(self, loss: float) -> float:
        told = self._exchange(loss)
        return sum(told) / len(told)

    def _step_ended(self, report: Any) -> None:
        """Called inside every step, before its commit: takes the loss, and writes the step's line."""
        self._loss = self._mean_of_all(report.loss)
        if self._log is not None:
            self._unless_full(partial(self._log.append, step_record(report, self._loss, self._tokens_per_step)))

    def _unless_full(self, write: Callable[[], None]) -> None:
        """Writes or syncs lines of --json; a full disk, which is told once, is no reason to stop."""
        try:
            write()
        except StorageFull as error:
            if not self._is_full_told:
                self._is_full_told = True
                self._reporter.say(f"note: {error}; training goes on, and lines are written when there is room")

    def _held_out_loss(self) -> float | None:
        """The mean loss on held-out text; None without text or samples, or if a signal comes meanwhile."""
        options, parts, crew = self._options, self._parts, self._crew
        if not options.evaluate:
            return None
        total, count, done = 0.0, 0, 0
        parts.model.eval()
        try:
            with torch.no_grad(), spinner(self._reporter.console, "held-out loss") as tell:
                for tokens in held_out_batches(parts.corpus.held_out, parts.sequence, options.evaluate, options.batch):
                    self._exchange(None)
                    if self._stopped_by is not None:
                        return None
                    tell(f"held-out loss: {done} of {options.evaluate} samples")
                    done += len(tokens)
                    own = tokens[crew.rank :: crew.count]
                    predicted = own.shape[0] * (own.shape[1] - 1)
                    moved = (own if len(own) else tokens[:1]).to(self._device)  # all ranks take part in a forward
                    loss = float(self._engine(input_ids=moved, labels=moved).loss)
                    total += loss * predicted if predicted else 0.0
                    count += predicted
        finally:
            parts.model.train()
        told = self._exchange((total, count))
        if self._stopped_by is not None:
            return None
        total, count = (sum(values) for values in zip(*told))
        return total / count if count else None


def step_record(report: Any, loss: float, tokens: int) -> dict[str, Any]:
    """One line of `--json`: the step as the engine reports it, with its loss and the peak of resident memory."""
    return asdict(report) | {"loss": loss, "tokens": tokens, "peak_rss_bytes": peak_resident_bytes()}
