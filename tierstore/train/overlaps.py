"""Parameters and buffers that lie in the same memory, and views of them that a module keeps.

Scope: finding them, by where each begins and ends. Not here: parameters that are one object (`groups.py`).
Owner: no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tierstore.errors import ConfigError


def refuse_shared_memory(model: nn.Module) -> None:
    """Every group gets a memory of its own, so what shared some would silently no longer do so.

    Neighbours in one storage are fine: recurrent modules lay their weights so.
    """
    places: list[Place] = []
    for is_parameter, tensors in ((True, model.named_parameters()), (False, model.named_buffers())):
        for name, tensor in tensors:
            if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested and tensor.numel():
                begin, size = tensor.data_ptr(), span(tensor.shape, tensor.stride()) * tensor.itemsize
                places.append(Place(str(tensor.device), begin, begin + size, is_parameter, name))
    refuse_overlap(places)


def refuse_kept_views(model: nn.Module) -> None:
    """A view of a parameter that an attribute holds would silently keep the values of now.

    But for what a hook makes anew before each forward, as that of `torch.nn.utils.spectral_norm`.

    Raises:
        ConfigError: names the attribute, and the parameter.
    """
    own = {id(parameter) for parameter in model.parameters()}
    storages = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        made_anew = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        for attribute, value in vars(module).items():
            if attribute in _NO_ATTRIBUTES or attribute in made_anew:
                continue
            for tensor in _tensors_in(value):
                name = storages.get(tensor.untyped_storage()._cdata) if torch._C._has_storage(tensor) else None
                if name is not None and id(tensor) not in own:
                    where = f"{prefix}.{attribute}" if prefix else attribute
                    raise ConfigError(
                        f"{where} holds a view of parameter {name}, and would keep the values that it has now; take "
                        "the view in forward, or keep the Parameter itself"
                    )


_NO_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_modules"})
_DEEPEST = 3


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)) and depth < _DEEPEST:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, depth + 1)


class Place(NamedTuple):
    """Where a parameter or a buffer lies in some memory: from `begin` up to `end`, in any unit."""

    memory: str
    begin: int
    end: int
    is_parameter: bool
    name: str


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    return sum((n - 1) * step for n, step in zip(shape, stride)) + 1


def refuse_overlap(places: Iterable[Place]) -> None:
    """Parameters that share memory with others, or with buffers.

    Raises:
        ConfigError: names two.
    """
    furthest: dict[tuple[str, bool], tuple[int, str]] = {}
    for memory, begin, end, is_parameter, name in sorted(places):
        for other_is_parameter in (True, False) if is_parameter else (True,):
            other_end, other = furthest.get((memory, other_is_parameter), (0, ""))
            if other_end > begin:
                kinds = {True: "parameter", False: "buffer"}
                raise ConfigError(
                    f"{kinds[other_is_parameter]} {other} and {kinds[is_parameter]} {name} lie in the same memory; "
                    "tie parameters by giving both modules the same Parameter, or clone one of the two"
                )
        furthest[memory, is_parameter] = max(furthest.get((memory, is_parameter), (0, "")), (end, name))
