"""`tierstore train`: a causal language model on bytes of text, within the budgets, never losing a step.

Scope: the loop: build, resume, evaluate, step, report, stop.
Not here: options (`apps/options.py`), models (`apps/presets.py`), data (`apps/data.py`), how a step is done (`train/`).
Owner: the thread that calls `train`; on the main thread it also owns SIGINT and SIGTERM while the loop runs.

[Note: ranks] With several ranks every call of the engine is made by all, in the same order, so what decides about one
(a wish to stop, an option, a step count) is the same everywhere: it is given to all, or told by an exchange. Losses are
means over all ranks, which together see the samples that one rank would see.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import nn

from tierstore.apps import outputs, presets
from tierstore.apps.crew import Crew
from tierstore.apps.data import Batches, Corpus, corpus_bytes, held_out_batches, read_corpus
from tierstore.apps.metrics import StepLog, peak_resident_bytes
from tierstore.apps.options import Preset, TrainOptions
from tierstore.apps.recipe import Recipe, parameter_groups
from tierstore.apps.report import Reporter, Totals
from tierstore.apps.stopping import StopRequest
from tierstore.apps.verify import advised
from tierstore.config import AdamWConfig, Codec, Resume, TierConfig, format_size
from tierstore.errors import ConfigError
from tierstore.trace import Tracer
from tierstore.train.checkpoints import CheckpointSource
from tierstore.train.engine import Engine
from tierstore.train.materialize import Source, deferred

T = TypeVar("T")
_LONGEST_DEFAULT_SEQUENCE = 1024
_M_MMAP_THRESHOLD, _RETURNED_FROM_BYTES = -3, 2**20  # malloc.h
_MOST_UPDATE_THREADS = 64  # of TierConfig
_SMALLEST_VOCABULARY = 256  # one id per byte
_OF_A_RANK = ("nvme", "config", "checkpoint", "data", "device", "threads", "export", "json", "trace")
"""Options that may differ between ranks: places and devices."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of, before the engine takes the model over.

    Attributes:
        configuration: as it was given, without what training has set on the model's own.
    """

    configuration: Any
    model: nn.Module
    source: Source
    corpus: Corpus
    batches: Batches
    recipe: Recipe
    sequence: int


@dataclass(slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        stopped_by: the signal that ended it before its last step, or None.
    """

    totals: Totals = field(default_factory=Totals)
    stopped_by: signal.Signals | None = None


def return_freed_memory() -> None:
    """Have glibc give large buffers back to the system as soon as they are freed.

    By default it keeps them once a few were freed, so that the storages that groups leave behind on the CPU's GPU tier
    add up: 1.55 GB instead of 1.20 GB at preset 124m with 256 MiB for each tier (no difference in time was measured).
    It is a setting of the whole process, therefore made here and not in the engine.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc has no mallopt
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _RETURNED_FROM_BYTES)


def train(
    options: TrainOptions,
    reporter: Reporter,
    make_engine: Callable[..., Any] = Engine,
    stop: StopRequest | None = None,
    crew: Crew | None = None,
) -> Outcome:
    """Trains until `options.steps`, or until a signal asks for the end of the step in flight.

    Args:
        make_engine: takes the arguments of `Engine`, and gives something with its face.
        stop: hears the signals; None: nobody does.
        crew: the ranks that train together, each of which calls this; None: this one alone.

    Raises:
        TierstoreError: bad options, budgets, stores, disks; every committed step stays in the store.
    """
    crew = crew or Crew()
    log = StepLog(options.json) if options.json is not None and crew.leads else None

    def prepare() -> Parts:
        outputs.check_paths(options, writes=crew.leads)
        if log is not None:
            log.open(resumed=outputs.holds_a_run(options))
            stack.callback(log.close)
        return_freed_memory()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        return assemble(options, crew)

    is_told = crew.leads and options.resume is not Resume.PREVIOUS  # which says itself that it is damaged
    with advised(options.nvme if is_told else (), reporter.console), contextlib.ExitStack() as stack:
        names = [one.name for one in fields(options) if one.name not in _OF_A_RANK]
        crew.check_same("options", {name: getattr(options, name) for name in names})
        parts = crew.all_succeed("the model and the text", prepare)
        crew.check_same("training text", parts.corpus.fingerprint)
        stack.callback(parts.batches.close)
        tracer = Tracer(time.perf_counter, enabled=options.trace is not None and crew.leads)
        engine = stack.enter_context(make_engine(**engine_arguments(options, parts, tracer, crew)))
        run = _Run(options, reporter, parts, engine, log, stop or StopRequest(), crew)
        run.describe()
        outcome = run.run()
        if options.trace is not None and crew.leads:
            tracer.to_chrome(options.trace)
            reporter.say(f"trace: {options.trace} (open it at https://ui.perfetto.dev)")
    return outcome


def assemble(options: TrainOptions, crew: Crew | None = None) -> Parts:
    """Model (its weights not yet in memory), data and order of samples.

    Raises:
        ConfigError: the model cannot read bytes, or not that many; no such model or data.
    """
    given = _configuration(options)
    configuration = presets.prepare(copy.deepcopy(given), dropout=options.dropout)
    vocabulary = presets.vocabulary_size(configuration)
    if vocabulary < _SMALLEST_VOCABULARY:
        raise ConfigError(f"the model knows {vocabulary} token ids; text as bytes needs {_SMALLEST_VOCABULARY}")
    sequence = _sequence(options, configuration)
    corpus = read_corpus(options.data)
    batches = Batches(
        corpus, length=sequence, batch=options.batch, seed=options.seed, workers=options.workers,
        pin_memory=options.device.startswith("cuda"), rank=crew.rank if crew else 0, ranks=crew.count if crew else 1,
    )  # fmt: skip
    torch.manual_seed(options.seed)
    model, source = _deferred(options, configuration)
    if crew and not crew.leads:  # the weights are those of rank 0; dropout is to be another at every rank
        torch.manual_seed(hash((options.seed, crew.rank)) % 2**63)
    model.train()
    if options.checkpointing:
        _enable_checkpointing(model)
    # What an exported configuration says of the weights beside it, which are those of the built model.
    given.architectures, given.dtype = [type(model).__name__], configuration.dtype
    return Parts(given, model, source, corpus, batches, Recipe(options), sequence)


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
        self._losses: list[torch.Tensor] = []
        self._loss = float("nan")
        self._totals = Totals()
        self._tokens_per_step = options.accumulate * options.batch * (parts.sequence - 1)

    def describe(self) -> None:
        """Says what will be trained, from where, and where it is placed."""
        parts, options = self._parts, self._options
        notes = [*parts.recipe.notes, *parts.batches.notes]
        if options.why_nothing_is_kept:
            notes.append(f"{options.why_nothing_is_kept}: however this run ends, only what --export writes remains")
        unused = parts.source.unexpected if isinstance(parts.source, CheckpointSource) else ()
        if unused:
            notes.append(f"tensors of the checkpoint that are not used: {len(unused)}, the first is {unused[0]}")
        if buffered := self._engine.statistics()["buffered_directories"]:
            notes.append(f"no O_DIRECT in {', '.join(buffered)}: I/O is buffered, and the page cache takes memory")
        for note in notes:
            self._reporter.say(f"note: {note}")
        count = sum(parameter.numel() for parameter in parts.model.parameters())
        ranks = self._crew.count
        memory = ranks * (options.gpu_memory + options.cpu_memory)
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
        self._reporter.say(f"text: {parts.corpus.description}, {format_size(corpus_bytes(parts.corpus))}")
        self._reporter.placement(self._engine.placement.usage())
        if options.codec is not Codec.NONE:
            self._reporter.codecs(self._engine.statistics()["codecs"])
        if self._engine.step_count:
            self._reporter.say(f"resumed after step {self._engine.step_count}")

    def run(self) -> Outcome:
        """All steps up to the last one, or up to a signal, which leaves out what comes after them."""
        if self._log is not None:
            self._engine.flush()  # a line without a generation would be that of another run
            self._log.begin()
        self._engine.on_step(self._step_ended)
        kept = self._options.why_nothing_is_kept or "the store holds the last committed step: go on with --resume auto"
        with self._stop.wished(kept):
            self._totals.held_out_before = self._held_out_loss()
            self._loop(self._options.steps)
            self._totals.last_step = self._engine.step_count
            if self._engine.step_count < self._options.steps:
                return Outcome(self._totals, self._stopped_by)
            if self._totals.steps:
                self._totals.held_out_after = self._held_out_loss()
        self._finish()
        return Outcome(self._totals)

    def _loop(self, last: int) -> None:
        self._reporter.start(self._engine.step_count, last)
        started_s = time.perf_counter()
        try:
            while self._engine.step_count < last and self._stopped_by is None:
                report = self._step()
                self._totals.add(report, self._loss, self._tokens_per_step, peak_resident_bytes())
                self._reporter.step(report, self._loss, self._tokens_per_step, last)
                if self._totals.diverged_at == report.step:
                    self._reporter.say(
                        f"note: the loss of step {report.step} is {self._loss}: the run has diverged; "
                        "stop it, and start again in a new store with a lower --lr"
                    )
            # Late updates belong to the time of the steps; and a wish to stop means: with everything committed.
            self._engine.flush()
        finally:
            self._reporter.stop()
        self._totals.wall_s = time.perf_counter() - started_s

    def _finish(self) -> None:
        """The table and the export of a run that reached its end."""
        options, reporter = self._options, self._reporter
        if self._totals.steps:
            self._totals.peak_rss_bytes = peak_resident_bytes()
            reporter.summary(self._totals)
        else:
            reporter.say(f"nothing to train: step {self._engine.step_count} of {options.steps} is done already")
        if options.export is not None:
            outputs.export(
                self._engine, self._parts.configuration, options.checkpoint, options.export, writes=self._crew.leads
            )
            reporter.say(f"exported to {options.export}")

    def _step(self) -> Any:
        self._losses.clear()
        tokens = [
            self._parts.batches.next().to(self._device, non_blocking=True) for _ in range(self._options.accumulate)
        ]
        batches = [{"input_ids": one, "labels": one} for one in tokens]
        return self._engine.train_step(batches, self._keep_loss, self._options.micro_batches.value)

    def _keep_loss(self, output: Any) -> torch.Tensor:
        loss: torch.Tensor = output.loss
        self._losses.append(loss.detach())
        return loss

    @property
    def _stopped_by(self) -> signal.Signals | None:
        """The signal that ends the run: of several ranks, one that all know of. See [Note: ranks]."""
        return self._stop.signal_number if self._crew.count == 1 else self._agreed

    def _exchange(self, value: T) -> list[T]:
        """What every rank gives, by rank, and with it whether one of them was asked to stop."""
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
        """Inside every step, before its commit: its loss is known, and its line is written."""
        self._loss = self._mean_of_all(float(torch.stack(self._losses).mean()))
        if self._log is not None:
            self._log.append(step_record(report, self._loss, self._tokens_per_step))

    def _held_out_loss(self) -> float | None:
        """None without text or samples, and when a signal comes meanwhile."""
        options, parts, crew = self._options, self._parts, self._crew
        if not options.evaluate:
            return None
        total, count = 0.0, 0
        parts.model.eval()
        try:
            with torch.no_grad():
                for tokens in held_out_batches(parts.corpus.held_out, parts.sequence, options.evaluate, options.batch):
                    self._exchange(None)
                    if self._stopped_by is not None:
                        return None
                    own = tokens[crew.rank :: crew.count]
                    predicted = own.shape[0] * (own.shape[1] - 1)
                    moved = (own if len(own) else tokens[:1]).to(self._device)  # a forward is one of all ranks
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
    return {
        "step": report.step,
        "loss": loss,
        "grad_norm": report.grad_norm,
        "lr": list(report.lr),
        "loss_scale": report.loss_scale,
        "skipped": report.skipped,
        "tokens": tokens,
        "seconds": dict(report.seconds),
        "bytes": dict(report.bytes),
        "peak_bytes": dict(report.peak_bytes),
        "peak_rss_bytes": peak_resident_bytes(),
        "prefetch_depth": report.prefetch_depth,
        "schedule": report.schedule,
    }


def engine_arguments(options: TrainOptions, parts: Parts, tracer: Tracer, crew: Crew) -> dict[str, Any]:
    """What the engine of a run is made with."""
    update_threads = None if options.threads is None else min(options.threads, _MOST_UPDATE_THREADS)
    return {
        "model": parts.model,
        "tiers": TierConfig(
            device=options.device, gpu_memory=options.gpu_memory, cpu_memory=options.cpu_memory,
            nvme=options.nvme, codec=options.codec, update_threads=update_threads, bandwidth=options.bandwidth,
            prefetch_depth=options.prefetch_depth, chunk_bytes=options.chunk,
        ),
        "optimizer": AdamWConfig(lr=options.lr, weight_decay=options.weight_decay),
        "parameter_groups": parameter_groups(parts.model, options.weight_decay),
        "lr_scheduler": parts.recipe.schedule,
        "update": options.update.value,
        "max_grad_norm": options.max_grad_norm,
        "commit_every": options.commit_every,
        "durability": options.durability.value,
        "resume": options.resume.value,
        "initialize": parts.source,
        "registered": {"data": parts.batches, "recipe": parts.recipe},
        "tracer": tracer,
        "zero": options.zero if crew.count > 1 else None,
        "device_mesh": crew.mesh(options.device),
    }  # fmt: skip


def _deferred(options: TrainOptions, configuration: Any) -> tuple[nn.Module, Source]:
    """The model without its weights, and where those come from."""
    model, new_weights = deferred(lambda: presets.build(configuration, options.dtype))
    return model, new_weights if options.checkpoint is None else CheckpointSource(options.checkpoint, model)


def _configuration(options: TrainOptions) -> Any:
    if options.checkpoint is not None:
        if not options.checkpoint.is_dir():
            raise ConfigError(f"no such directory: --checkpoint {options.checkpoint}")
        return presets.file_configuration(options.checkpoint / "config.json")
    if options.config is not None:
        return presets.file_configuration(options.config)
    return presets.preset_configuration(options.preset or Preset.P25M)


def _sequence(options: TrainOptions, configuration: Any) -> int:
    context = presets.context_length(configuration)
    if options.sequence is None:
        return min(context or _LONGEST_DEFAULT_SEQUENCE, _LONGEST_DEFAULT_SEQUENCE)
    if context is not None and options.sequence > context:
        raise ConfigError(f"--sequence {options.sequence} is longer than the model's context of {context}")
    return options.sequence


def _enable_checkpointing(model: nn.Module) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(f"{type(model).__name__} does not support --checkpointing")
    enable: Any = getattr(model, "activation_checkpointing_enable", None)  # the later of its two names
    if enable is not None:
        enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        enable = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
