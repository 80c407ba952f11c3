"""How a run learns: --lr, --weight-decay and --warmup; a store keeps the values that it was made with.

Scope: parameter groups, the learning-rate schedule, the comparison with a resumed run.
Not here: how a step is done (`train/`).
Owner: the training thread; the state is a part of every generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tierstore.apps.options import TrainOptions, as_option

_NAMES = ("lr", "weight_decay", "warmup")


class Recipe:
    """The values in force: those of the options, or those of the store that is resumed.

    Moments and schedule come from the stored values, and the engine restores its parameter groups; so different values
    in the options are not used, and `notes` says so.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._values: dict[str, Any] = {name: getattr(options, name) for name in _NAMES}
        self.notes: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """The values in force."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the stored values over."""
        for name, given in self._values.items():
            if (stored := state[name]) != given:
                option = as_option(name)
                self.notes.append(f"the store keeps the {option} {stored} that it was made with; {given} is not used")
        self._values = {name: state[name] for name in _NAMES}

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """Linear warm-up, then a constant rate."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)

    def _factor(self, finished_steps: int) -> float:
        warmup = self._values["warmup"]  # looked up late: a resumed store may have changed it
        return min(1.0, (finished_steps + 1) / warmup) if warmup else 1.0


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of parameters: matrices, which decay, and vectors (biases, norms), which do not."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.dim() >= 2]
    vectors = [parameter for parameter in trainable if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
