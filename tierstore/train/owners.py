"""Which engine, reducer or DDP has the parameters of a model, or their gradients, already.

Scope: the marks of engines on parameters, and which reducers there are. Not here: what they do with them.
Owner: the process's one list of reducers, for any thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tierstore.errors import ConfigError

TAKEN = "_tierstore_access"


class Reducer(Protocol):
    """`data_parallel/reducer.py`."""

    module: nn.Module

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Whether it averages the gradient of this parameter."""

    def close(self) -> None:
        """Stop averaging gradients."""


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
"""The reducers that are not closed."""
_lists = threading.Lock()


def enlist(reducer: Reducer) -> None:
    """Take note that a reducer averages gradients from now on. Twice is fine."""
    with _lists:
        _reducers.add(reducer)


def strike_off(reducer: Reducer) -> None:
    """Take note that a reducer is closed. Twice is fine."""
    with _lists:
        _reducers.discard(reducer)


def _enlisted() -> list[Reducer]:
    with _lists:
        return list(_reducers)


def refuse_taken(model: nn.Module) -> None:
    """Refuse a model whose weights are in another engine's store, or whose gradients a reducer or DDP averages.

    Raises:
        ConfigError: an engine has taken the model over before, or a reducer or DDP is there.
    """
    refuse_ddp(model)
    for name, parameter in model.named_parameters():
        if TAKEN in parameter.__dict__:
            raise ConfigError(
                f"parameter {name} of the model belongs to another engine, perhaps a closed one: a module, shared or "
                "not, belongs to one engine; build it anew"
            )
    refuse_reduced(model.named_parameters())


def refuse_ddp(model: nn.Module) -> None:
    """Refuse a module that torch's DDP has, or has a part of.

    Raises:
        ConfigError: it does.
    """
    if any(isinstance(child, DistributedDataParallel) for child in model.modules()):
        raise ConfigError("DDP averages the gradients of this module already: give the module that it was made of")


def refuse_reduced(parameters: Iterable[tuple[str, nn.Parameter]], *, but_of: nn.Module | None = None) -> None:
    """Refuse parameters whose gradients a reducer averages: averaging them twice would divide them twice.

    Args:
        but_of: a module whose own reducer does not count.

    Raises:
        ConfigError: a reducer has it.
    """
    others = [reducer for reducer in _enlisted() if reducer.module is not but_of]
    for name, parameter in parameters if others else ():
        if (reducer := next((one for one in others if one.reduces(parameter)), None)) is not None:
            kind = type(reducer.module).__name__
            raise ConfigError(
                f"the GradientReducer of a {kind} averages the gradient of {name}: close() it first (if nobody has it "
                f"any more, GradientReducer(that {kind}).close() does it)"
            )


def close_reducers_of(module: nn.Module) -> None:
    """Close the reducers of this very module, as when a cell of a notebook is run again."""
    for reducer in _enlisted():
        if reducer.module is module:
            reducer.close()
