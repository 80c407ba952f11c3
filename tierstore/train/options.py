"""What the user of an engine chose, validated.

Scope: options, and the update schedule that a name means. Not here: what follows from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import SupportsFloat

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tierstore.config import AdamWConfig, Durability, Resume, TierConfig, UpdateSchedule, choice
from tierstore.errors import ConfigError
from tierstore.io.backend import Backend
from tierstore.plan.schedules import usual
from tierstore.trace import Tracer


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose, validated.

    Attributes:
        loss_scale: a fixed one, or "dynamic".
        is_auto: the schedule was left open: it may change when the placement is known (`schedules.settled`), and must
            not restrict the order of calls more than waiting for a norm does.
    """

    schedule: UpdateSchedule
    durability: Durability
    resume: Resume
    commit_every: int
    max_grad_norm: float | None
    loss_scale: float | str
    overlap: bool
    is_auto: bool


def check_kinds(
    model: object,
    tiers: object,
    optimizer: object,
    lr_scheduler: object,
    initialize: object,
    process_group: object,
    device_mesh: object,
    registered: object,
    tracer: object,
    clock: object,
    backend: object,
) -> None:
    """Refuse arguments of an engine that have the wrong type.

    Raises:
        ConfigError: the message names one, and what it takes.
    """
    expect(isinstance(model, nn.Module), "model", "a torch.nn.Module", model)
    expect(isinstance(tiers, TierConfig), "tiers", "a TierConfig", tiers)
    expect(optimizer is None or isinstance(optimizer, AdamWConfig), "optimizer", "an AdamWConfig", optimizer)
    is_maker = lr_scheduler is None or callable(lr_scheduler)
    expect(is_maker, "lr_scheduler", "a function that makes one of the optimizer", lr_scheduler)
    is_source = initialize is None or (hasattr(initialize, "names") and hasattr(initialize, "stream"))
    expect(is_source, "initialize", "a source of weights, as deferred() gives one", initialize)
    is_group = process_group is None or isinstance(process_group, ProcessGroup)
    expect(is_group, "process_group", "a torch.distributed.ProcessGroup", process_group)
    is_mesh = device_mesh is None or isinstance(device_mesh, DeviceMesh)
    expect(is_mesh, "device_mesh", "a DeviceMesh, as init_device_mesh makes one", device_mesh)
    is_mapping = registered is None or isinstance(registered, Mapping)
    expect(is_mapping, "registered", "a mapping of names to objects", registered)
    expect(tracer is None or isinstance(tracer, Tracer), "tracer", "a Tracer", tracer)
    expect(callable(clock), "clock", "a function that tells seconds", clock)
    expect(backend is None or isinstance(backend, Backend), "backend", "a Backend", backend)


def expect(is_right: bool, name: str, what: str, value: object) -> None:
    """Refuse a value of the wrong type.

    Raises:
        ConfigError: the message says what it must be.
    """
    if not is_right:
        kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ConfigError(f"{name} must be {what}, not {kind}")


def options_of(
    update: UpdateSchedule | str,
    max_grad_norm: float | None,
    loss_scale: float | str,
    commit_every: int,
    durability: Durability | str,
    resume: Resume | str,
    overlap: bool,
    *,
    may_skip: bool,
    has_store: bool,
) -> Options:
    """The options of an engine.

    Args:
        loss_scale: a fixed one, or "dynamic".
        may_skip: a step whose gradients are not finite changes nothing.
        has_store: there is a directory on NVMe.

    Raises:
        ConfigError: a value is invalid, or the options cannot be exact together.
    """
    wish = choice(UpdateSchedule, "update", update)
    kept = choice(Durability, "durability", durability)
    if type(commit_every) is not int:
        raise ConfigError(f"commit_every must be a whole number, not {commit_every!r}")
    if commit_every < 1:
        raise ConfigError(f"commit_every must be at least 1, not {commit_every}")
    if not isinstance(overlap, bool):
        raise ConfigError(f"overlap is True or False, not {overlap!r}")
    norm = None
    if isinstance(max_grad_norm, SupportsFloat) and not isinstance(max_grad_norm, bool):
        with contextlib.suppress(ArithmeticError, ValueError, TypeError, RuntimeError):  # as of two numbers
            norm = float(max_grad_norm)  # a Decimal does not compute with floats, and numpy's fp32 would round results
    if max_grad_norm is not None and not (norm is not None and norm > 0):
        raise ConfigError(f"max_grad_norm must be above 0, not {max_grad_norm!r}; None switches clipping off")
    can_go_back = has_store and commit_every == 1 and kept is Durability.COMMIT
    return Options(
        schedule=_schedule_for(
            wish,
            norm,
            overlap,
            may_skip=may_skip,
            can_go_back=can_go_back,
            has_store=has_store,
        ),
        durability=kept,
        resume=choice(Resume, "resume", resume),
        commit_every=commit_every,
        max_grad_norm=norm,
        loss_scale=loss_scale,
        overlap=overlap,
        is_auto=wish is UpdateSchedule.AUTO,
    )


def _schedule_for(
    wish: UpdateSchedule, max_grad_norm: float | None, overlap: bool, *, may_skip: bool, can_go_back: bool,
    has_store: bool,
) -> UpdateSchedule:  # fmt: skip
    needs_whole_backward = max_grad_norm is not None or may_skip
    if wish is UpdateSchedule.BACKWARD and needs_whole_backward:
        reason = "fp16 or loss scaling" if max_grad_norm is None else "clipping by the global norm"
        raise ConfigError(f"update='backward' applies gradients too early for {reason}; use 'forward' or 'speculative'")
    if wish is UpdateSchedule.SPECULATIVE and not can_go_back:
        missing = "commit_every=1 and durability='commit'" if has_store else "a store: give nvme a directory"
        raise ConfigError(f"update='speculative' goes back to the committed slot: it needs {missing}")
    if wish is UpdateSchedule.DELAYED and not overlap:
        raise ConfigError("update='delayed' has updates overlap with the next step: leave overlap=False out")
    if wish is UpdateSchedule.AUTO:
        wish = usual(needs_norm=needs_whole_backward, can_go_back=can_go_back)
    return wish if overlap else UpdateSchedule.STEP
