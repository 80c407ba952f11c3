"""Who has the parameters of a model, or their gradients, already.

Scope: the marks of engines on parameters, and which reducers there are. Not here: what they do with them.
Owner: the one list of the process's reducers.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import nn

from tierstore.errors import ConfigError

TAKEN = "_tierstore_access"


class Reducer(Protocol):
    """`data_parallel/reducer.py`."""

    module: nn.Module

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Whether it averages the gradient of this parameter."""

    def close(self) -> None:
        """It averages none any more."""


reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
"""Those that are not closed."""


def refuse_taken(model: nn.Module) -> None:
    """A model serves one engine: its weights left with that engine's store. And it alone has their gradients.

    Raises:
        ConfigError: an engine has taken the model over before, or a reducer is there.
    """
    if any(TAKEN in parameter.__dict__ for parameter in model.parameters()):
        raise ConfigError("the model belongs to another engine, perhaps a closed one; build it anew")
    refuse_reduced(model)


def refuse_reduced(model: nn.Module) -> None:
    """Two who average a gradient would divide it twice.

    Raises:
        ConfigError: a reducer has it.
    """
    for reducer in list(reducers):
        if (name := next((name for name, p in model.named_parameters() if reducer.reduces(p)), None)) is not None:
            kind = type(reducer.module).__name__
            raise ConfigError(f"the GradientReducer of a {kind} averages the gradient of {name}: close() it first")


def close_reducers_of(module: nn.Module) -> None:
    """Those of this very module, as of a cell of a notebook that is run again."""
    for reducer in [one for one in reducers if one.module is module]:
        reducer.close()
