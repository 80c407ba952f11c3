"""What the user of an engine chose, validated.

Scope: options, and the update schedule that a name means. Not here: what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from tierstore.config import Durability, Resume, UpdateSchedule
from tierstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose, validated.

    Attributes:
        is_auto: the schedule was left open, and may change when the placement is known (`budgets.settled`).
    """

    schedule: UpdateSchedule
    durability: Durability
    resume: Resume
    commit_every: int
    max_grad_norm: float | None
    overlap: bool
    is_auto: bool = False


def schedule_for(
    update: str, max_grad_norm: float | None, model: nn.Module, commit_every: int, durability: str, overlap: bool
) -> UpdateSchedule:
    """The schedule that a name means for this run.

    Raises:
        ConfigError: it cannot be exact with these options.
    """
    try:
        schedule = UpdateSchedule(update)
    except ValueError:
        names = ", ".join(item.value for item in UpdateSchedule)
        raise ConfigError(f"update must be one of {names}, not {update!r}") from None
    if type(commit_every) is not int:
        raise ConfigError(f"commit_every must be a whole number, not {commit_every!r}")
    if commit_every < 1:
        raise ConfigError(f"commit_every must be at least 1, not {commit_every}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm must be above 0, not {max_grad_norm}; None switches clipping off")
    is_half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
    needs_whole_backward = max_grad_norm is not None or is_half
    if schedule is UpdateSchedule.BACKWARD and needs_whole_backward:
        reason = "clipping by the global norm" if max_grad_norm is not None else "fp16 loss scaling"
        raise ConfigError(f"update='backward' cannot know {reason} in time; use 'forward' or 'speculative'")
    if schedule is UpdateSchedule.SPECULATIVE and (commit_every != 1 or durability != "commit"):
        raise ConfigError("update='speculative' goes back to the committed slot: it needs commit_every=1 and a store")
    if schedule is UpdateSchedule.AUTO:
        schedule = UpdateSchedule.FORWARD if needs_whole_backward else UpdateSchedule.BACKWARD
    return schedule if overlap else UpdateSchedule.STEP
