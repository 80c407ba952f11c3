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
from torch import nn

from tierstore.errors import ConfigError
from tierstore.train.access import DeviceAccess
from tierstore.train.hooks import ModelHooks, hooks_on_saved
from tierstore.train.vertical import SideBySide

LossOfBatch = Callable[[Callable[..., Any], Any], torch.Tensor]
"""Calls the model, or the engine, with a micro-batch, and returns the loss."""


def loss_by(
    loss_of: Callable[[Any], torch.Tensor] | None, criterion: Callable[[Any, Any], torch.Tensor] | None
) -> LossOfBatch:
    """How `train_step` computes the loss of a micro-batch.

    Raises:
        ConfigError: two ways are given; or, when it is called, a micro-batch is no pair.
    """
    if criterion is None:
        take_loss = loss_of or _own_loss
        return lambda model, batch: take_loss(_called(model, batch))
    if loss_of is not None:
        raise ConfigError("give train_step loss_of, which gets the output, or criterion, which gets the target, too")

    def loss_of_pair(model: Callable[..., Any], batch: Any) -> torch.Tensor:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            what = f"{len(batch)} items" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise ConfigError(f"with a criterion a micro-batch is a pair (inputs, target), not {what}")
        return criterion(_called(model, batch[0]), batch[1])

    return loss_of_pair


def _called(model: Callable[..., Any], inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computes itself, as models of `transformers` do.

    Raises:
        ConfigError: the output has none.
    """
    loss: torch.Tensor | None = getattr(output, "loss", None)
    if loss is None:
        kind = type(output).__name__
        raise ConfigError(f"the model's output, a {kind}, has no .loss; give labels, loss_of or a criterion")
    return loss


def check_loss(loss: torch.Tensor) -> None:
    """Refuse a loss that backward cannot begin with.

    Raises:
        ConfigError: it is not one real number that depends on the weights.
    """
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(f"a loss is a tensor that depends on the weights, not {type(loss).__name__}")
    if loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
        raise ConfigError(
            f"a loss is one real number that depends on the weights, not a tensor of {loss.dtype} {tuple(loss.shape)}"
            f"{'' if loss.requires_grad else ' that needs no gradient'}"
        )


def mean_of(losses: Sequence[torch.Tensor]) -> float:
    """The mean of losses, each one number. Copied one by one: on a GPU one kernel takes longer than a few copies."""
    return sum(map(float, losses)) / len(losses)


def losses_side_by_side(
    model: nn.Module, batches: Sequence[Any], loss_of_batch: LossOfBatch, access: DeviceAccess, hooks: ModelHooks
) -> list[torch.Tensor]:
    """The losses of micro-batches that pass each group together."""

    others = hooks_on_saved()  # of this thread

    def loss_of(batch: Any) -> torch.Tensor:
        # In the forward's thread: nodes made in another one may rank below all of these, and separate the backwards.
        with hooks.watching(others):  # the loss, too, may read weights: forward runs until the last one is made
            loss = loss_of_batch(model, batch)
        check_loss(loss)
        return loss.reshape(())

    forwards = SideBySide([partial(loss_of, batch) for batch in batches])
    access.before_visit = forwards.meet
    try:
        with access.device.current():  # taking turns uses the current device's stream and generator
            return forwards.run()
    finally:
        access.before_visit = lambda group: None
