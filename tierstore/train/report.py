"""What a step reports.

Scope: plain data. Not here: measuring it (`meters.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step.

    Attributes:
        step: 1 for the first.
        grad_norm: global norm of the gradients before clipping, without the loss scale; None if none arrived.
        loss_scale: the factor of the losses in backward, as this step used it.
        skipped: the gradients were not finite, and are not applied: no weight was changed, except under "delayed" by
            the gradients of the step before.
        lr: of each parameter group, as this step used it.
        seconds: forward, backward, update (inside step()), wait (stalls on weights), total since the step before;
            forward passes under `no_grad` count nowhere. If the step waited for `Engine.snapshot`, also snapshot.
        bytes: by link (nvme_read, nvme_write, h2d, d2h; with other ranks gather, reduce) since the step before.
        peak_bytes: largest use by tier so far (gpu, cpu).
        prefetch_depth: groups fetched ahead in the next step.
        schedule: the update schedule in force.
        loss: mean of the losses of the micro-batches that `train_step` was given, at this rank; None in other loops,
            which have the losses themselves.
    """

    step: int
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    lr: list[float]
    seconds: dict[str, float]
    bytes: dict[str, int]
    peak_bytes: dict[str, int]
    prefetch_depth: int
    schedule: str
    loss: float | None = None
