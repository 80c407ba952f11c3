"""What a parameter is while its group is not on the device.

Scope: hiding and showing the parameters of a group; the functions that may be called on a hidden one.
Not here: when (`access.py`).
Owner: the training side.

[Note: let go] C++ holds the graph of a step that was broken off. The graph refers to its parameters and to the
unpacking hooks, which the garbage collector does not see, and an error refers to the graph through its frames. If the
graph led to the engine and the engine kept that error, none of them would ever be freed. So parameters and unpacking
hooks hold only a `Gate`, and `close` cuts it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tierstore.errors import ClosedError, GraphError
from tierstore.train.groups import Group


class Access(Protocol):
    """Brings groups to the device; `access.py`."""

    is_inside: bool

    def enter(self, group: int) -> None: ...

    def enter_unasked(self, group: int, parameter: nn.Parameter, *, is_write: bool) -> None: ...

    def leave(self, group: int) -> None: ...

    def visit(self, group: int) -> None: ...


class Gate:
    """All that a model and its graphs hold of an engine; see [Note: let go].

    Args:
        access: None until there is an engine.
    """

    def __init__(self, access: Access | None = None) -> None:
        self._access = access
        self._why_none = "this model has given its weights to an engine that could not be made: build it anew"

    @property
    def access(self) -> Access:
        """The way to the weights.

        Raises:
            ClosedError: the engine was closed, or could not be made.
        """
        if self._access is None:
            raise ClosedError(self._why_none)
        return self._access

    def __reduce__(self) -> Any:
        """Parameters hold this, so pickling comes here. (A deep copy of a parameter holds none.)"""
        raise GraphError(
            "a model that an engine has cannot be pickled, nor its parameters; save engine.state_dict(), or call "
            "engine.export(...)"
        )

    def cut(self) -> None:
        """Drop the reference to the engine, for good."""
        self._access = None
        self._why_none = (
            "the engine of this model is closed: its weights are in its store, if it had one, and in its exports"
        )


def guard(group: Group, gate: Gate) -> None:
    """From now on a read of a hidden parameter of this group goes through the gate. Twice is fine."""
    group.hidden_classes = [_offloaded(kind) for kind in group.classes]
    for parameter in group.parameters:
        parameter._tierstore_access = (gate, group.index)  # type: ignore[attr-defined]


def hide(group: Group) -> None:
    """From now on reading a parameter of this group brings the group back, or raises by name. Twice is fine."""
    for parameter, kind in zip(group.parameters, group.hidden_classes):
        parameter.__class__ = kind


def show(group: Group) -> None:
    """Undo `hide`: the group is on the device."""
    for parameter, kind in zip(group.parameters, group.classes):
        parameter.__class__ = kind


_READABLE = (
    "shape dtype device requires_grad grad grad_fn is_leaf ndim layout is_meta is_cuda is_cpu is_sparse is_quantized "
    "itemsize nbytes names name is_nested is_mps is_xpu _version output_nr"
)
_CALLABLE = (
    "size dim ndimension numel nelement stride storage_offset is_floating_point is_complex element_size register_hook "
    "register_post_accumulate_grad_hook requires_grad_ is_contiguous is_signed __len__ untyped_storage get_device"
)


def _harmless() -> frozenset[Any]:
    """The functions that may be called on a parameter without its values."""
    tensor: Any = torch.Tensor
    found = {getattr(tensor, name).__get__ for name in _READABLE.split() if hasattr(tensor, name)}
    found |= {getattr(tensor, name) for name in _CALLABLE.split() if hasattr(tensor, name)}
    found |= {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like}
    return frozenset(found | {tensor.grad.__set__, tensor.grad.__delete__, tensor.requires_grad.__set__})


_HARMLESS = _harmless()
_GIVES_POINTER = frozenset({torch.Tensor.data_ptr})
"""Functions that return an address. No view shows that it is in use, so the group stays entered until the pass ends."""


class OffloadedParameter(nn.Parameter):
    """What a parameter is while its group is not on the device: reading it acquires the group, or raises by name.

    A parameter switches between this class and its own; without this class, reading its empty storage would crash the
    process. Three C functions get past it, because they do not call `__torch_function__`: the old constructors
    (`torch.Tensor(p)`), `torch.Tensor._make_subclass`, and another tensor's `set_` with the parameter as its source.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _grad(func, *args, **kwargs)
        entered: list[tuple[Access, int]] = []
        try:
            if func not in _HARMLESS:
                values = list(_leaves((*args, *kwargs.values())))
                for value in values * 2:  # a group that comes may take the place of one that was there
                    if isinstance(value, OffloadedParameter):
                        # Does nothing, except where this is traced: then with fullgraph=True it is the error.
                        torch._dynamo.graph_break(
                            msg="a weight of a module that is not called here comes and goes; leave fullgraph=True out"
                        )
                        gate, group = value._tierstore_access  # type: ignore[attr-defined]
                        access: Access = gate.access
                        access.enter_unasked(group, value, is_write=_writes(func))
                        if func not in _GIVES_POINTER:
                            entered.append((access, group))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        finally:
            for access, group in entered:
                access.leave(group)

    def __repr__(self) -> str:  # type: ignore[override]
        """Also where the parameter cannot be read: debuggers ask for it, and `print(model)` with an `EmbeddingBag`."""
        try:
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        except (GraphError, ClosedError) as error:  # no other: a kept failure is raised once, not swallowed here
            return f"Parameter without values here: {error}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy that a model makes in forward belongs to no group, so it gets the parameter's own class."""
        hidden, copied = type(self), super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.__class__ = nn.Parameter if hidden is OffloadedParameter else hidden.__bases__[1]
        return copied  # type: ignore[no-any-return]

    def as_subclass(self, cls: Any) -> Any:
        """As torch's own, which does not call `__torch_function__`."""
        return self.__torch_function__(torch.Tensor.as_subclass, (type(self),), (self, cls))


def _grad(
    grad: Any, outputs: Any, inputs: Any, *, grad_outputs: Any, materialize_grads: bool, **options: Any
) -> Any:
    """`torch.autograd.grad`, which refuses to make up gradients for edges of the graph.

    Hidden parameters among `grad_outputs` are copied: all of them would have to stay until it ends.
    """
    if grad_outputs is not None:  # None stands for all of them
        given = (grad_outputs,) if isinstance(grad_outputs, torch.Tensor) else grad_outputs
        grad_outputs = [one.clone() if isinstance(one, OffloadedParameter) else one for one in given]
    gradients = grad(_edges(outputs), _edges(inputs), grad_outputs, **options)
    if not materialize_grads:
        return gradients
    with torch._C.DisableTorchFunctionSubclass():  # of a hidden parameter only the shape is asked for
        return tuple(
            torch.zeros_like(one, requires_grad=options["create_graph"]) if gradient is None else gradient
            for one, gradient in zip(inputs, gradients, strict=True)
        )


def _edges(tensors: Iterable[Any]) -> Any:
    """Hidden parameters as edges of the graph, for `torch.autograd.grad`, which needs no values and calls any code."""
    with torch._C.DisableTorchFunctionSubclass():
        edge = torch.autograd.graph.get_gradient_edge
        return [edge(one) if isinstance(one, OffloadedParameter) else one for one in tensors]


def _writes(func: Any) -> bool:
    """Whether a function changes its first argument, by its name: `add_`, `__setitem__`, `__iadd__`, `__set__`."""
    name: str = getattr(func, "__name__", "")
    if not name.endswith("__"):
        return name.endswith("_")
    return name in ("__setitem__", "__set__") or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))


@functools.cache
def _offloaded(kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that stands for `kind` while its group is not on the device."""
    if kind is nn.Parameter:
        return OffloadedParameter
    return type(kind.__name__, (OffloadedParameter, kind), {})


def _leaves(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value
