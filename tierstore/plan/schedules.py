"""What an update schedule asks of gradients and weights, and which one `auto` is.

Scope: the same rules for the engine, `tune` and `plan`.
Not here: options that exclude each other (`train/options.py`), steps that leave the schedule (`train/rounds.py`).
"""

from __future__ import annotations

from tierstore.config import UpdateSchedule
from tierstore.plan.placement import GradientMode


def gradient_mode(schedule: UpdateSchedule) -> GradientMode:
    """How gradients are kept; see `Request`."""
    if schedule is UpdateSchedule.DELAYED:
        return "doubled"
    return "streamed" if schedule is UpdateSchedule.BACKWARD else "held"


def updates_in_backward(schedule: UpdateSchedule) -> bool:
    """Whether a group is updated as its gradient arrives: its weights are on the device then, and need not be read."""
    return schedule in (UpdateSchedule.BACKWARD, UpdateSchedule.SPECULATIVE)


def usual(*, needs_norm: bool, can_go_back: bool) -> UpdateSchedule:
    """What `auto` is, as far as it can be known without the placement.

    Args:
        needs_norm: what a group gets is known only when all gradients are: clipping, fp16.
        can_go_back: each step is committed, so that an update that was wrong can be done again.
    """
    if not needs_norm:
        return UpdateSchedule.BACKWARD
    return UpdateSchedule.SPECULATIVE if can_go_back else UpdateSchedule.FORWARD


def settled(schedule: UpdateSchedule, *, shares_cores: bool, in_memory: bool) -> UpdateSchedule:
    """What `auto` is: on a CPU a whole update in memory has nothing to hide, and runs by itself.

    Beside the next forward it would take turns with it on the same cores, and slow it by more than it gains. And where
    the update waits for no disk, to guess is not worth what a wrong guess costs: to read all of the state.

    Args:
        schedule: the usual one.
        shares_cores: updates run on the cores that compute.
        in_memory: no update needs the disk, at no rank.
    """
    if schedule not in (UpdateSchedule.FORWARD, UpdateSchedule.SPECULATIVE) or not in_memory:
        return schedule
    return UpdateSchedule.STEP if shares_cores else UpdateSchedule.FORWARD
