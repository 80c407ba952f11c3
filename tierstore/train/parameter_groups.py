"""Parameter groups, as torch's optimizers have them: their members, their options, and the kernel's coefficients.

Scope: refusing options that have no sense here; hyper-parameters as coefficients.
Not here: the optimizers (`optimizer.py`, `cpu_adam.py`).
Owner: nothing here has state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tierstore.config import AdamWConfig
from tierstore.errors import ConfigError
from tierstore.kernels.adam import AdamCoefficients
from tierstore.train.groups import ModelGroups
from tierstore.train.stand_ins import Pair

UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
IGNORED = ("foreach", "fused")  # ways to compute the same
_NO_OPTIONS = frozenset(
    {"params", "param_names", "name", "initial_lr", "decoupled_weight_decay", *UNSUPPORTED, *IGNORED}
)
"""Keys that torch keeps in a group beside the options."""
_WANTED = "parameter_groups are parameters, or mappings with 'params', as torch.optim takes them"


def given_groups(
    model: nn.Module, groups: ModelGroups, given: Any, replaced: Iterable[Pair] = ()
) -> list[Any]:
    """Parameter groups as torch takes them.

    Args:
        replaced: pairs of a parameter on the meta device, which may be given, and the real one.

    Raises:
        ConfigError: these are not parameter groups, or hold no parameters.
    """
    if given is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad and p in groups.names]}]

    in_place_of: dict[Any, nn.Parameter] = {found: other for found, other in replaced if found.is_meta}

    def several(one: Any) -> list[Any]:
        return list(one) if isinstance(one, Iterable) and not isinstance(one, torch.Tensor) else [one]

    def real(parameters: Any) -> Iterator[Any]:
        for one in several(parameters):
            parameter = one[1] if isinstance(one, tuple) and len(one) == 2 else one  # named, as torch takes them, too
            if not isinstance(parameter, torch.Tensor):
                raise ConfigError(_WANTED)
            yield in_place_of.get(parameter, parameter)

    items = several(given)
    if all(isinstance(item, Mapping) and "params" in item for item in items):
        found = [dict(item, params=list(real(item["params"]))) for item in items]
    elif all(isinstance(item, (nn.Parameter, tuple)) for item in items):
        found = [{"params": list(real(items))}]
    else:
        raise ConfigError(_WANTED)
    for index, (item, group) in enumerate(zip(items, found)):
        if isinstance(item, Mapping) and isinstance(item["params"], Iterator) and not group["params"]:
            raise ConfigError(
                f"parameter_groups[{index}] is an iterator that gives no parameters, used up perhaps; give a list, "
                "which may be empty"
            )
    if not any(group["params"] for group in found):
        raise ConfigError("parameter_groups hold no parameters, so that nothing would be trained")
    return found


def validate_options(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Give a parameter group the hyper-parameters that it lacks; a learning rate that is a tensor stays that tensor.

    Raises:
        ConfigError: an option is unknown or makes no sense; the group was not changed.
    """
    refuse_unsupported(group, "(in a parameter group)")
    of_torch = {"decoupled": group["decoupled_weight_decay"]} if "decoupled_weight_decay" in group else {}
    known = {**defaults, **of_torch, **group}  # torch adds to the defaults of an optimizer that is loaded, or copied
    options = {name: value for name, value in known.items() if name not in _NO_OPTIONS}
    try:
        group.update(checked_options(options).model_dump())
    except ConfigError as error:
        raise ConfigError(f"{error} (in a parameter group)") from None
    if isinstance(rate := options["lr"], torch.Tensor):
        group["lr"] = rate


def refuse_unsupported(options: Mapping[str, Any], where: str) -> None:
    """Refuse options of torch's optimizers that would not do here what they promise.

    Raises:
        ConfigError: one is on.
    """
    for name in UNSUPPORTED:
        if options.get(name):
            raise ConfigError(f"{name}={options[name]} is not supported {where}")


def checked_options(options: Mapping[str, Any]) -> AdamWConfig:
    """The hyper-parameters of a parameter group, its learning rate a number or a tensor.

    Raises:
        ConfigError: one is unknown or makes no sense.
    """
    rate = options["lr"]
    if isinstance(rate, torch.Tensor) and rate.numel() != 1:
        raise ConfigError(f"a learning rate is one number, not a tensor of shape {tuple(rate.shape)}")
    return AdamWConfig(**{**options, "lr": float(rate) if isinstance(rate, torch.Tensor) else rate})


def coefficients_of(options: Mapping[str, Any], step: int, gradient_scale: float = 1.0) -> AdamCoefficients:
    """The kernel's coefficients in a step (the first is 1) of a parameter group with these options, as they are now."""
    beta1, beta2 = options["betas"]
    return AdamCoefficients(
        lr=float(options["lr"]),  # options set later may be anything that `AdamWConfig` takes as numbers
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        step=step,
        decoupled=options["decoupled"],
        gradient_scale=gradient_scale,
    )
