"""A step of this model as `tune` foretells it, from rates that were measured in the same run.

Scope: from a contestant's options to seconds. Not here: what they are compared with (`step.py`).
"""

from __future__ import annotations

from tierstore.apps.bench.case import Result
from tierstore.apps.options import TrainOptions
from tierstore.plan.step_machine import Machine
from tierstore.plan.step_record import StepRecord


def computing(recorder: Result, train: TrainOptions, machine: Machine) -> StepRecord:
    """What the model's computing takes, as a contestant recorded it at its start.

    It is scaled to that of the first steps of the rounds: they have no update beside them either, and the machine is
    not as fast in every minute.

    Args:
        train: of that contestant.
    """
    from tierstore.apps.trial import Recorded
    from tierstore.apps.tune import calibrated_to

    given = recorder.facts["recorded"]
    recorded = Recorded(StepRecord.from_json(given["step"]), given["computing_s"], given["depth"])
    record = calibrated_to(recorded, train, machine)
    own_s = record.forward_s + record.backward_s
    return record.scaled((recorder.median("computing_s") or own_s) / own_s)


def by_tune(record: StepRecord, train: TrainOptions, machine: Machine, depth: int) -> float:
    """Seconds of the schedule that `train` takes."""
    from tierstore.apps.tune import candidates
    from tierstore.plan.step_model import StepPolicy, forecast

    usual = next(candidates(record, train))
    policy = StepPolicy(depth, usual.schedule, train.commit_every, bool(train.nvme))
    return forecast(record, usual.placement, machine, policy).seconds
