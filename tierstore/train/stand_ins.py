"""Parameters without values (on the meta device), and real ones in their place.

Scope: giving parameters other data, for every holder of them, and undoing that.
Not here: where values come from (`filling.py`).
Owner: no state.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils import swap_tensors

from tierstore.errors import ConfigError
from tierstore.train.owners import TAKEN

Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter as it was found, and the one that takes its place: in the modules, or by a swap of their contents."""


def replace_meta_parameters(model: nn.Module, device: torch.device, replaced: list[Pair]) -> None:
    """Put real parameters in the place of those on the meta device.

    Args:
        replaced: gets each pair before the parameter is replaced: an interrupt may come at any time.
    """
    for parameter in [parameter for parameter in model.parameters() if parameter.is_meta]:
        # One element expanded to the whole shape: `bind` gives it memory, the store its bytes.
        data = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        replaced.append((parameter, _twin(model, parameter, data)))
        _replace(model, *replaced[-1])


def put_back(model: nn.Module, replaced: Iterable[Pair]) -> None:
    """Undo `replace_meta_parameters` for the parameters that no engine has taken."""
    for parameter, other in replaced:
        if TAKEN in parameter.__dict__ or TAKEN in other.__dict__:
            continue
        if parameter.is_meta:  # replaced in the modules, or not replaced yet
            _put(model, parameter, instead_of=other)
            continue
        try:
            swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError:  # somebody made a weak reference meanwhile: this one without values counts as taken
            parameter.__dict__[TAKEN] = None


def replace(model: nn.Module, parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Give a parameter data of another device: in the same object, if torch can do that, so that every holder sees it;
    else in another object, put into all modules of the model.

    Returns:
        The object with the new data.
    Raises:
        ConfigError: the parameter has hooks, which the new data would not have.
    """
    return _replace(model, parameter, _twin(model, parameter, data))


def _twin(model: nn.Module, parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        name = next(name for name, other in model.named_parameters() if other is parameter)
        raise ConfigError(f"parameter {name} has a hook, and no values yet: register it when the engine is made")
    other = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    return other


def _replace(model: nn.Module, parameter: nn.Parameter, other: nn.Parameter) -> nn.Parameter:
    try:
        swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        return parameter
    except RuntimeError:  # somebody holds a weak reference (recurrent modules do)
        _put(model, other, instead_of=parameter)
        return other


def _put(model: nn.Module, parameter: nn.Parameter, *, instead_of: nn.Parameter) -> None:
    for module in model.modules():
        for name, held in list(module._parameters.items()):
            if held is instead_of:
                setattr(module, name, parameter)
