"""A step of this model as `tune` and `plan` predict it, from rates that were measured in the same run.

Scope: from a contestant's options to seconds. Not here: what they are compared with (`step.py`).
"""

from __future__ import annotations

from dataclasses import replace

from tierstore.apps.bench.case import Result
from tierstore.apps.options import TrainOptions
from tierstore.config import UpdateSchedule
from tierstore.plan.step_machine import Machine
from tierstore.plan.step_record import StepRecord


def computing(recorder: Result, tried: Result, train: TrainOptions, machine: Machine) -> StepRecord:
    """How long the model computes, as a contestant recorded it at its start.

    The record is scaled to the first steps of the rounds, which have no update beside them either, and calibrated by
    the steps of a trial in each round, because a machine's speed varies from minute to minute.

    Args:
        recorder: the contestant that recorded a step.
        tried: the contestant whose trial is used; it has the schedule that is to be predicted.
        train: the options of `tried`.
    """
    from tierstore.apps.trial import Recorded, WholeSteps
    from tierstore.apps.tune import calibrated_to

    step = StepRecord.from_json(recorder.facts["recorded"])
    own_s = step.forward_s + step.backward_s
    step = step.scaled((recorder.median("computing_s") or own_s) / own_s)
    # With rare commits the steps of a trial wrote none, so they do not show what commits take.
    step_s = tried.median("trial_step_s") or 0.0 if train.commit_every == 1 else 0.0
    depth, schedule = int(tried.median("depth") or 0), UpdateSchedule(tried.facts["schedule"])
    whole = WholeSteps(tried.median("trial_computing_s") or own_s, step_s, depth, schedule)
    return calibrated_to(Recorded(step, whole), train, machine)


def by_tune(record: StepRecord, train: TrainOptions, machine: Machine, depth: int) -> float:
    """Seconds of the schedule that `train` takes."""
    from tierstore.apps.tune import candidates
    from tierstore.plan.step_model import StepPolicy, forecast

    usual = next(candidates(record, train))
    policy = StepPolicy(depth, usual.schedule, train.commit_every, train.commits)
    found = forecast(record, usual.placement, machine, policy)
    return found.seconds + _flush_s(train, machine, found.written_bytes)


def by_plan(train: TrainOptions, machine: Machine) -> float | None:
    """Seconds of the engine's own split on one GPU with these rates; None where the budgets are too small for any.

    `plan` is given what a machine has, and leaves a part of that to others; here the budgets are what a run may take.
    """
    from tierstore.apps.plan import PlanOptions, situation_of
    from tierstore.plan.memory import activation_bytes
    from tierstore.plan.strategies import USABLE, Strategy, options_of

    situation = situation_of(PlanOptions(
        preset=train.preset, config=train.config, gpus=1, nodes=1, dtype=train.dtype, batch=train.batch,
        sequence=train.sequence, accumulate=train.accumulate, update=train.update, commit_every=train.commit_every,
        flops=machine.table.matmul_flop_per_s, nvme_capacity=None if train.nvme else 0,
    ))  # fmt: skip
    gpu_bytes = (train.gpu_memory or 0) + activation_bytes(situation.job, situation.layout)
    node = replace(
        situation.node, rates=machine.table, cpu_bytes=train.cpu_memory / USABLE, gpu_bytes=gpu_bytes / USABLE
    )
    situation = replace(situation, node=node, is_one_memory=train.gpu_memory is None)
    (option,) = options_of(situation, [Strategy.ENGINE])
    if not option.phases:
        return None
    return option.step_s + _flush_s(train, machine, option.work["commit"].written_bytes)


def _flush_s(train: TrainOptions, machine: Machine, committed_bytes: float) -> float:
    """A step's share of a flush, which is measured where commits are rare; see [Note: a step's time].

    Args:
        committed_bytes: of a step, on average.
    """
    return machine.table.durable_seconds(0, committed_bytes) if train.commit_every > 1 else 0.0
