"""The micro-batches of a step: how the model is called with one, what its loss is, and all of them side by side.

Scope: from batches to losses.
Not here: how forwards take turns (`vertical.py`), backward and step (`steps.py`).
Owner: the thread that trains; side by side, the thread of each forward in its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tierstore.errors import ConfigError
from tierstore.train.access import DeviceAccess
from tierstore.train.vertical import SideBySide


def called(model: Callable[..., Any], batch: Any) -> Any:
    """The output for a batch: a mapping is keyword arguments, anything else the first argument."""
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computes itself, as models of `transformers` do.

    Raises:
        ConfigError: the output has none.
    """
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is None:
        raise ConfigError(f"the model's output, a {type(output).__name__}, has no .loss; give labels, or loss_of")
    return loss


def check_loss(loss: torch.Tensor) -> None:
    """Refuse a loss that backward cannot begin with.

    Raises:
        ConfigError: it is not one number that depends on the weights.
    """
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(f"a loss is a tensor that depends on the weights, not {type(loss).__name__}")
    if loss.numel() != 1 or not loss.requires_grad:
        raise ConfigError(
            f"a loss is one number that depends on the weights, not a tensor of shape {tuple(loss.shape)}"
            f"{'' if loss.requires_grad else ' that needs no gradient'}"
        )


def mean_of(losses: Sequence[torch.Tensor]) -> float:
    """The mean of losses, each one number. Copied one by one: on a GPU one kernel takes longer than a few copies."""
    return sum(map(float, losses)) / len(losses)


def losses_side_by_side(
    model: Callable[..., Any], batches: Sequence[Any], take_loss: Callable[[Any], torch.Tensor], access: DeviceAccess
) -> list[torch.Tensor]:
    """The losses of micro-batches that pass each group together."""

    def loss_of(batch: Any) -> torch.Tensor:
        # In the forward's thread: nodes made in another one may rank below all of these, and separate the backwards.
        loss = take_loss(called(model, batch))
        check_loss(loss)
        return loss.reshape(())

    forwards = SideBySide([partial(loss_of, batch) for batch in batches])
    access.before_visit = forwards.meet
    try:
        with access.device.current():  # taking turns uses the current device's stream and generator
            return forwards.run()
    finally:
        access.before_visit = lambda group: None
