"""Parameters and buffers that lie in the same memory, and views of them that a module keeps.

Scope: finding them, by where each begins and ends. Not here: parameters that are one object (`groups.py`).
Owner: no state.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from tierstore.caller import warn_caller
from tierstore.errors import ConfigError


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse tensors that share memory: each group gets memory of its own, so they would silently stop sharing it.

    Neighbours in one storage are fine: recurrent modules place their weights so.
    """
    places: list[Place] = []
    for is_parameter, tensors in ((True, model.named_parameters()), (False, model.named_buffers())):
        for name, tensor in tensors:
            if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested and tensor.numel():
                begin, size = tensor.data_ptr(), span(tensor.shape, tensor.stride()) * tensor.itemsize
                places.append(Place(str(tensor.device), begin, begin + size, is_parameter, name))
    refuse_overlap(places)


class KeptView(NamedTuple):
    """A view of a parameter that an attribute of a module holds, itself or in a list, tuple or dict."""

    module: nn.Module
    attribute: str
    tensor: weakref.ref[torch.Tensor]
    where: str
    parameter: str
    is_trained: bool

    def is_there(self) -> bool:
        """Whether the module still holds this very view: forwards and their hooks may have made it anew."""
        return any(tensor is self.tensor() for tensor in _tensors_in(vars(self.module).get(self.attribute)))


def kept_views(model: nn.Module) -> list[KeptView]:
    """Views that will not follow the parameters when these move to other memory.

    Without attributes that a forward pre-hook makes anew before each forward, as that of `torch.nn.utils.spectral_norm`
    does: their module may not be called for a long time. Sets, objects, items after the first 1000 and deeper nesting
    are not searched.
    """
    own = {id(parameter) for parameter in model.parameters()}
    ranges: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, parameter in model.named_parameters():
        if (place := _place(parameter)) is not None:
            ranges.setdefault(place[0], []).append((*place[1:], name, parameter.requires_grad))
    found = []
    for prefix, module in model.named_modules():
        made_anew = [getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()]
        for attribute, value in vars(module).items():
            if attribute in _NO_ATTRIBUTES or attribute in made_anew:
                continue
            for tensor in _tensors_in(value):
                if id(tensor) in own or (place := _place(tensor)) is None:
                    continue
                storage, begin, end = place
                for first, last, name, is_trained in ranges.get(storage, ()):
                    if first < end and begin < last:
                        where = f"{prefix}.{attribute}" if prefix else attribute
                        found.append(KeptView(module, attribute, weakref.ref(tensor), where, name, is_trained))
    return found


def tell_kept_views(views: Iterable[KeptView]) -> None:
    """Warn of views that a forward has not made anew: they hold old values. No error: they may never be read."""
    there = [view for view in views if view.is_there()]
    if there:
        others = f" (and {len(there) - 1} more views)" if len(there) > 1 else ""
        warn_caller(
            f"{there[0].where} holds a view of parameter {there[0].parameter} that was made before the engine"
            f"{others}, and keeps the values of then: what is computed with it differs from plain torch, unless a "
            "later forward makes it anew first; take the view in forward, or keep the Parameter itself"
        )


def _place(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """The storage of a tensor, and where the tensor begins and ends there, in bytes; None if it has no place."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or not tensor.numel():
                return None
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + span(tensor.shape, tensor.stride()) * tensor.itemsize
            return tensor.untyped_storage()._cdata, begin, end
    except (RuntimeError, ValueError):  # a tensor of functorch, or a lazy one
        return None


_NO_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_modules"})
_DEEPEST, _LONGEST = 3, 1000


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple, dict, OrderedDict) and depth < _DEEPEST:  # not their subclasses
        for item in islice(value.values() if isinstance(value, dict) else value, _LONGEST):
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
    """Refuse parameters that share memory with other parameters, or with buffers.

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
