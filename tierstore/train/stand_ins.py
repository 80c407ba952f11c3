"""Parameters that hold no values: on the meta device, or in the place of one that was there.

Scope: putting other data in the place of theirs, for all who hold them.
Not here: where values come from (`filling.py`).
Owner: no state.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import swap_tensors

from tierstore.errors import ConfigError

STAND_IN = "_tierstore_stand_in"
"""Attribute of a parameter: the storage that it has until a group gives it its own."""


def replace_meta_parameters(model: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Real ones in the place of those on the meta device.

    Returns:
        By those, the real ones that are not the same objects.
    """
    replaced = {}
    for parameter in list(model.parameters()):
        if parameter.is_meta:
            # One element seen as the whole shape: `bind` gives it its memory, the store its bytes.
            data = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            real = replace(model, parameter, data)
            real.__dict__[STAND_IN] = real.untyped_storage()
            if real is not parameter:
                replaced[parameter] = real
    return replaced


def holds_values(parameter: nn.Parameter) -> bool:
    """Whether it has some: not on the meta device, nor after an engine could not be made of one that was."""
    if parameter.is_meta:
        return False
    stand_in = parameter.__dict__.get(STAND_IN)
    return stand_in is None or stand_in._cdata != parameter.untyped_storage()._cdata  # it was given other data since


def replace(model: nn.Module, parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter with other data, of another device: the same object, if torch can do that, so that all who hold it
    see it; else another one, in all modules of the model.

    Returns:
        That object.
    Raises:
        ConfigError: it has hooks, which would not be those of the other data.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        name = next(name for name, other in model.named_parameters() if other is parameter)
        raise ConfigError(f"parameter {name} has a hook, and no values yet: register it when the engine is made")
    other = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    try:
        swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        return parameter
    except RuntimeError:  # somebody holds a weak reference (recurrent modules do)
        for module in model.modules():
            for name, held in list(module._parameters.items()):
                if held is parameter:
                    setattr(module, name, other)
        return other
