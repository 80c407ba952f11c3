"""Parameters that hold no values: on the meta device, and real ones in their place.

Scope: putting other data in the place of theirs, for all who hold them, and taking it away again.
Not here: where values come from (`filling.py`).
Owner: no state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils import swap_tensors

from tierstore.errors import ConfigError
from tierstore.train.owners import TAKEN


def replace_meta_parameters(model: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Real ones in the place of those on the meta device.

    Returns:
        Real ones by those, for `put_back`. Where torch can, the object that was there is the real one now.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for parameter in [parameter for parameter in model.parameters() if parameter.is_meta]:
            # One element seen as the whole shape: `bind` gives it its memory, the store its bytes.
            data = torch.empty((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            real, meta = replace(model, parameter, data)
            replaced[meta] = real
    except BaseException:
        put_back(model, replaced)
        raise
    return replaced


def put_back(model: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Undo `replace_meta_parameters` where no engine has taken them: they are as they were before."""
    for meta, real in replaced.items():
        if TAKEN not in real.__dict__:
            _exchange(model, real, meta)


def replace(model: nn.Module, parameter: nn.Parameter, data: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """A parameter with other data, of another device: the same object, if torch can do that, so that all who hold it
    see it; else another one, in all modules of the model.

    Returns:
        That object, and one that has the data of before.
    Raises:
        ConfigError: it has hooks, which would not be those of the other data.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        name = next(name for name, other in model.named_parameters() if other is parameter)
        raise ConfigError(f"parameter {name} has a hook, and no values yet: register it when the engine is made")
    other = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
    other.__dict__.update(parameter.__dict__)
    return _exchange(model, parameter, other)


def _exchange(model: nn.Module, parameter: nn.Parameter, other: nn.Parameter) -> tuple[nn.Parameter, nn.Parameter]:
    """What is in the modules after one parameter has taken the place of another, and what is not."""
    try:
        swap_tensors(parameter, other)  # type: ignore[no-untyped-call]
        return parameter, other
    except RuntimeError:  # somebody holds a weak reference (recurrent modules do)
        for module in model.modules():
            for name, held in list(module._parameters.items()):
                if held is parameter:
                    setattr(module, name, other)
        return other, parameter
