"""What a run of `tierstore train` is made of, from its options: model, text, order of samples, the engine's arguments.

Scope: everything before the first step that is not the engine's own.
Not here: options (`apps/options.py`), architectures (`apps/presets.py`), reading text (`apps/data.py`), the loop
    (`apps/train.py`).
Owner: the thread that makes the engine.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tierstore.apps import presets
from tierstore.apps.crew import Crew
from tierstore.apps.data import Batches, Corpus, read_corpus
from tierstore.apps.options import Preset, TrainOptions
from tierstore.apps.recipe import Recipe, parameter_groups
from tierstore.config import AdamWConfig, MicroBatchSchedule, TierConfig
from tierstore.cores import MOST_UPDATE_THREADS
from tierstore.errors import ConfigError
from tierstore.trace import Tracer
from tierstore.train.filling import Source
from tierstore.train.materialize import deferred

_LONGEST_DEFAULT_SEQUENCE = 1024
_SMALLEST_VOCABULARY = 256  # one id per byte


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run, before the engine takes the model over.

    Attributes:
        configuration: as it was given, without the changes that training makes in the model's own copy.
    """

    configuration: Any
    model: nn.Module
    source: Source
    corpus: Corpus
    batches: Batches
    recipe: Recipe
    sequence: int


def assemble(options: TrainOptions, crew: Crew | None = None) -> Parts:
    """Model (its weights not yet in memory), data and order of samples.

    Raises:
        ConfigError: the model cannot read bytes, or not so many per sample; no such model or data.
    """
    crew = crew or Crew()
    given = _configuration(options)
    configuration = presets.prepare(copy.deepcopy(given), dropout=options.dropout)
    vocabulary = presets.vocabulary_size(configuration)
    if vocabulary < _SMALLEST_VOCABULARY:
        raise ConfigError(f"the model knows {vocabulary} token ids; text as bytes needs {_SMALLEST_VOCABULARY}")
    sequence = _sequence(options, configuration)
    corpus = read_corpus(options.data)
    batches = Batches(
        corpus, length=sequence, batch=options.batch, seed=options.seed, workers=options.workers,
        pin_memory=options.device.startswith("cuda"), rank=crew.rank, ranks=crew.count,
    )  # fmt: skip
    torch.manual_seed(options.seed)
    model, source = deferred(lambda: presets.build(configuration, options.dtype), checkpoint=options.checkpoint)
    if not crew.leads:  # the weights are those of rank 0; dropout must differ between ranks
        torch.manual_seed(hash((options.seed, crew.rank)) % 2**63)
    model.train()
    if options.checkpointing:
        _enable_checkpointing(model)
    # An exported configuration describes the weights beside it, which are those of the built model.
    given.architectures, given.dtype = [type(model).__name__], configuration.dtype
    return Parts(given, model, source, corpus, batches, Recipe(options), sequence)


def engine_arguments(
    options: TrainOptions, parts: Parts, tracer: Tracer | None = None, crew: Crew | None = None
) -> dict[str, Any]:
    """The arguments of a run's engine."""
    crew = crew or Crew()
    threads = None if options.threads is None else min(options.threads, MOST_UPDATE_THREADS)
    return {
        "model": parts.model,
        "tiers": TierConfig(
            device=options.device, gpu_memory=options.gpu_memory, cpu_memory=options.cpu_memory,
            nvme=options.nvme, codec=options.codec, update_threads=threads, bandwidth=options.bandwidth,
            prefetch_depth=options.prefetch_depth, chunk_bytes=options.chunk,
            accumulation_steps=1 if options.micro_batches is MicroBatchSchedule.VERTICAL else options.accumulate,
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
    enable: Any = getattr(model, "activation_checkpointing_enable", None)  # the newer of its two names
    if enable is not None:
        enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        enable = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
