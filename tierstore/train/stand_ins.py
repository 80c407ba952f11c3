"""Parameters that hold no values: on the meta device, and real ones in their place.

Scope: putting other data in the place of theirs, for all who hold them, and taking it away again.
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
"""A parameter as it was found, and the one that takes its place: in the modules, or by a swap of what the two are."""


def replace_meta_parameters(model: nn.Module, device: torch.device, replaced: list[Pair]) -> None:
    """Real ones in the place of those on the meta device.

    Args:
        replaced: gets them, each before it is replaced: an interrupt may come at any time.
    """
    for parameter in [parameter for parameter in model.parameters() if parameter.is_meta]:
        # One element seen as the whole shape: `bind` gives it its memory, the store its bytes.
        data = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        replaced.append((parameter, _twin(model, parameter, data)))
        _replace(model, *replaced[-1])


def put_back(model: nn.Module, replaced: Iterable[Pair]) -> None:
    """Undo `replace_meta_parameters` where no engine has taken them: they are as they were before."""
    for parameter, other in replaced:
        if TAKEN in parameter.__dict__ or TAKEN in other.__dict__:
            continue
        if parameter.is_meta:  # not in place; or nothing was done yet
            _put(model, parameter, instead_of=other)
            continue
        try:
            swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError:  # somebody made a weak reference meanwhile: it holds no values, and nobody would see that
            parameter.__dict__[TAKEN] = None


def replace(model: nn.Module, parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter with other data, of another device: the same object, if torch can do that, so that all who hold it
    see it; else another one, in all modules of the model.

    Returns:
        That object.
    Raises:
        ConfigError: it has hooks, which would not be those of the other data.
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
