"""What an update schedule asks of gradients and weights, and which schedule `auto` selects.

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
    """The schedule that `auto` selects, as far as it can be known without the placement.

    Args:
        needs_norm: an update needs all gradients first: clipping, fp16.
        can_go_back: each step is committed, so that a wrong update can be redone.
    """
    if not needs_norm:
        return UpdateSchedule.BACKWARD
    return UpdateSchedule.SPECULATIVE if can_go_back else UpdateSchedule.FORWARD


def settled(schedule: UpdateSchedule, *, shares_cores: bool, in_memory: bool) -> UpdateSchedule:
    """The schedule that `auto` selects, once it is known whether updates need the disk.

    An update wholly in memory has no disk time to hide. On cores that also compute it runs by itself: beside the next
    forward the two would take turns, and forward would lose more than the update gains. On other machines it runs in
    forward, not speculatively: speculation is not worth the cost of a wrong guess, which is to read all of the state.

    Args:
        schedule: the one that `usual` gives.
        shares_cores: updates run on the cores that compute.
        in_memory: no update needs the disk, on any rank.
    """
    if schedule not in (UpdateSchedule.FORWARD, UpdateSchedule.SPECULATIVE) or not in_memory:
        return schedule
    return UpdateSchedule.STEP if shares_cores else UpdateSchedule.FORWARD
