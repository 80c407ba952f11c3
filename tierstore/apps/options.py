"""What a person asks of `tierstore train`, checked once, before anything heavy is imported.

Scope: the enums and the record of options, also from a file; which options exclude each other.
Not here: parsing of the command line (`cli/train.py`); budgets and optimizer settings (`tierstore.config`).
Owner: the record is immutable; `apps/train.py` only reads it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tierstore.config import (
    Codec,
    Durability,
    MicroBatchSchedule,
    Resume,
    UpdateSchedule,
    at_home,
    format_size,
    parse_size,
)
from tierstore.errors import ConfigError, advice_on


class Preset(enum.Enum):
    """Architectures known by a name; see `apps/presets.py` for their sizes."""

    P25M = "25m"
    P124M = "124m"
    P350M = "350m"
    P1_5B = "1.5b"
    P7B = "7b"


class Precision(enum.Enum):
    """Dtype of weights, gradients and arithmetic; the optimizer always keeps fp32 accuracy."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class FreedMemory(enum.Enum):
    """What becomes of the CPU memory that a step frees; "auto" keeps all if no update needs the disk, else a little."""

    AUTO = "auto"
    KEEP = "keep"
    RETURN = "return"


MODELS = ("preset", "config", "checkpoint")
"""Options that say which model to train, of which one can be given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """All options of one run; every field is the command-line option of the same name.

    Attributes:
        preset, config, checkpoint: where the model comes from; at most one. None of them means preset 25m.
        data: file or directory of training text; None is the source of Python's standard library.
        gpu_memory, cpu_memory: budgets of the two tiers, in bytes, for each rank; see `TierConfig`.
        nvme: directories of the store; if empty, everything is in memory, and nothing is kept after the end.
        zero: ZeRO stage, where there are several ranks; one rank keeps everything.
        batch: samples per micro-batch, of all ranks together.
        sequence: bytes per sample; None is the model's context, at most 1024.
        steps: the step at which training ends; a resumed run counts the steps of its past.
        warmup: steps of linear warm-up; the rate is constant afterwards, so that a run can be prolonged.
        clip: bound of the global gradient norm; 0 switches clipping off.
        prefetch_depth: groups fetched ahead; None computes it from measured rates.
        chunk: upper bound in bytes of a unit of I/O and update; None leaves it to the planner.
        evaluate: samples of held-out text, measured before and after; 0 leaves the evaluation out.
        snapshot_every: steps per snapshot, each a store of its own; None makes none.
        freed_memory: whether freed memory is kept for the next step, which raises the peak (see `apps/heap.py`).
        bandwidth: rates that `tierstore probe --json` measured; None measures while training.
        threads: threads of torch and, separately, of the update; None leaves both to their defaults.

    Raises:
        ConfigError: a value that cannot work, or options that exclude each other.
    """

    preset: Preset | None = None
    config: Path | None = None
    checkpoint: Path | None = None
    data: Path | None = None
    gpu_memory: int | None = None
    cpu_memory: int = 2**30
    nvme: tuple[Path, ...] = ()
    zero: int = 3
    dtype: Precision = Precision.BF16
    batch: int = 8
    sequence: int | None = None
    accumulate: int = 1
    micro_batches: MicroBatchSchedule = MicroBatchSchedule.HORIZONTAL
    steps: int = 100
    lr: float = 3e-4
    weight_decay: float = 0.1
    warmup: int = 0
    clip: float = 1.0
    update: UpdateSchedule = UpdateSchedule.AUTO
    prefetch_depth: int | None = None
    chunk: int | None = None
    commit_every: int = 1
    snapshot_every: int | None = None
    codec: Codec = Codec.NONE
    durability: Durability = Durability.COMMIT
    resume: Resume = Resume.NEVER
    seed: int = 0
    workers: int = 0
    dropout: float = 0.0
    checkpointing: bool = False
    evaluate: int = 16
    export: Path | None = None
    json: Path | None = None
    trace: Path | None = None
    device: str = "cpu"
    threads: int | None = None
    freed_memory: FreedMemory = FreedMemory.AUTO
    bandwidth: Path | None = None

    def __post_init__(self) -> None:
        sources = [f"--{name}" for name in MODELS if getattr(self, name) is not None]
        if len(sources) > 1:
            raise ConfigError(f"{' and '.join(sources)} exclude each other: each says which model to train")
        for name, least in (("batch", 1), ("accumulate", 1), ("steps", 1), ("commit_every", 1), ("warmup", 0),
                            ("seed", 0), ("workers", 0), ("zero", 0), ("evaluate", 0), ("sequence", 2),
                            ("threads", 1), ("prefetch_depth", 0), ("snapshot_every", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{as_option(name)} must be at least {least}, not {value}")
        for name, most in (("seed", 2**63 - 1), ("threads", 1024), ("workers", 1024), ("zero", 3),
                           ("prefetch_depth", 64)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value > most:
                raise ConfigError(f"{as_option(name)} must be at most {most}, not {value}")
        if self.chunk is not None and not 2**16 <= self.chunk <= 2**25:
            raise ConfigError(f"--chunk must be between 64KiB and 32MiB, not {format_size(self.chunk)}")
        for name in ("lr", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{as_option(name)} must be a number that is not negative, not {value}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout must be at least 0 and below 1, not {self.dropout}")
        if self.update is UpdateSchedule.BACKWARD and self.needs_norm:
            raise ConfigError(
                "--update backward applies gradients too early for clipping or fp16 loss scaling: give "
                "--clip 0 and another --dtype, or --update forward or speculative"
            )
        if self.update is UpdateSchedule.SPECULATIVE and not self.can_go_back:
            stored = "--commit-every 1" if self.commit_every != 1 else "--durability commit"
            needs = stored if self.nvme else "--nvme DIR"
            raise ConfigError(f"--update speculative goes back to the last committed step: it needs {needs}")
        if not self.nvme and self.resume in (Resume.MUST, Resume.PREVIOUS):
            raise ConfigError(f"--resume {self.resume.value} needs the store to resume from: give its --nvme DIR")
        if self.snapshot_every is not None and not self.commits:
            raise ConfigError(f"--snapshot-every keeps committed steps, but {self.why_nothing_is_kept}")

    @property
    def commits(self) -> bool:
        """Whether committed steps outlive the process."""
        return self.why_nothing_is_kept is None

    @property
    def why_nothing_is_kept(self) -> str | None:
        """The reason why no step outlives the process, for a person; None if committed steps do."""
        if not self.nvme:
            return "nothing is kept without --nvme"
        return "nothing is kept with --durability none" if self.durability is Durability.NONE else None

    @property
    def max_grad_norm(self) -> float | None:
        """The bound of the gradient norm as the engine takes it."""
        return self.clip or None

    @property
    def needs_norm(self) -> bool:
        """Whether an update must wait for all gradients, or guess."""
        return self.max_grad_norm is not None or self.dtype is Precision.FP16

    @property
    def can_go_back(self) -> bool:
        """Whether each step is committed, so that a wrong update can be redone."""
        return self.commits and self.commit_every == 1


def options_of_object(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Options by name from a JSON object: sizes as numbers or text, the others as on the command line.

    Args:
        source: the file, for error messages.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type.
    """
    hints = get_type_hints(TrainOptions)
    found = {}
    for given, value in values.items():
        name = given.replace("-", "_")
        if name not in hints:
            advice = advice_on(repr(name), [repr(known) for known in hints], "the options are")
            raise ConfigError(f"{source}: train has no option {given!r}; {advice}")
        if name in found:
            raise ConfigError(f"{source}: {name!r} is given twice")
        try:
            if isinstance(value, bool) is not (hints[name] is bool):
                raise ConfigError("must be true or false" if hints[name] is bool else "cannot be true or false")
            if "" in (value if isinstance(value, list) else [value]):  # as a path it would mean the current directory
                raise ConfigError("empty text is no value; leave the option out")
            if name in ("gpu_memory", "cpu_memory", "chunk") and value is not None:
                value = parse_size(value)
            found[name] = _at_home(TypeAdapter(hints[name]).validate_python(value))
        except ConfigError as error:
            raise ConfigError(f"{source}: {given!r} = {value!r}: {error}") from None
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input ").replace("a valid tuple", "a list")
            raise ConfigError(f"{source}: {given!r} = {value!r} {reason}") from None
    return found


def _at_home(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_at_home, value))
    return at_home(value) if isinstance(value, Path) else value


def as_option(name: str) -> str:
    """A field's name as it stands on the command line."""
    return f"--{name.replace('_', '-')}"
