"""Hooks on modules and on saved tensors: they tell which group is needed, before it is touched.

Scope: forward hooks of modules that own parameters, and the packing of saved views of weights.
Not here: what happens then (`access.py`), gradients (`backward.py`).
Owner: the training side.

[Note: backward by saved tensors] Backward needs from a group the views that forward saved. Each is packed into a handle
that does not keep the group, and unpacking it brings the group back. So backward needs no hook on the outputs of a
module: in-place operations, dictionaries as outputs, skipped and twice-called modules all come out right. A
recomputation saves views past these hooks (see `_detach_for`), and a group with a view is not dropped. Elsewhere
nothing may be saved past these hooks: autograd saves a parameter as itself, which no count of views shows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tierstore.errors import GraphError
from tierstore.train.access import DeviceAccess
from tierstore.train.groups import Group, ModelGroups

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A pair of hooks on saved tensors: the one that packs, and the one that unpacks."""

_Packed = tuple[Group | None, int, object, torch.Tensor]
"""What is kept of a saved tensor. For a view of a group's storage: the group, a number that grows with each change of
the weights (the version of the view, and the step if they are trained), the group's token (whose references count the
saved views), and the view, whatever the storage holds meanwhile. For any other tensor: None, its version, None (of a
compressed sparse tensor its values, see `_counted_values`), and an alias of it. A tuple, not a class, because a group
has a dozen of them in each pass."""


class _Here(threading.local):
    """How often this thread is inside of `watching`: hooks on saved tensors belong to a thread."""

    watchers = 0


class ModelHooks:
    """Installs the hooks on a model, and removes them."""

    def __init__(self, model: nn.Module, groups: ModelGroups, access: DeviceAccess) -> None:
        self._gate = access.gate
        self._groups = groups.groups
        self._by_storage = {group.storage._cdata: group for group in groups.groups}
        self._watchers = 0
        self._here = _Here()
        self._step = 0
        for called_by_autograd in (
            ModelHooks._pack, ModelHooks._unpack, ModelHooks._pack_or_pass, _unpack_pair, _pack_detached,
        ):  # fmt: skip
            # Uncompiled code in a compiled block saves, too: `torch.compile` would compile these for each shape. Unlike
            # `disable`, `skip` costs nothing per call. Not at module level: the import takes seconds.
            torch._dynamo.decorators.skip(called_by_autograd)
        self.refuse_outside: Callable[[], None] = lambda: None
        """Called when a module is called outside of `watching`."""
        self._recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
        for recurrent in self._recurrent:
            vars(recurrent)["flatten_parameters"] = _flatten_nothing
        self._handles = []
        for module, needed in groups.of_module.items():
            enter, leave = self._hooks_of(module, access, needed, holds=module not in groups.closed)
            self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Take all hooks off the model. Twice is fine."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for recurrent in self._recurrent:
            vars(recurrent).pop("flatten_parameters", None)
        self._recurrent.clear()
        self.refuse_outside = lambda: None  # graphs hold this; see [Note: let go]

    def step_ended(self) -> None:
        """The weights change: views saved so far can no longer be used."""
        self._step += 1

    @contextlib.contextmanager
    def watching(self, others: Hooks | None = None) -> Iterator[None]:
        """Forward and backward run inside of this.

        Args:
            others: hooks that get what is no weight; None takes those in force in this thread.

        Raises:
            GraphError: `torch.func` takes gradients in here, which torch does not allow under such hooks; or backward
                has met a parameter that was saved past these hooks.
        """
        self._watchers += 1
        self._here.watchers += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(*self._before(others or hooks_on_saved())):
                yield
        except RuntimeError as error:
            if "storage of size 0" in str(error):
                raise GraphError(
                    "backward has met weights that are not on the device, because a parameter was saved as itself: by "
                    "hooks on saved tensors (saved_tensors_hooks) in forward, which must return tensor.detach(), or by "
                    "a function in a compiled block, which must call ctx.save_for_backward"
                ) from error
            if "torch.func" not in str(error) or "saved tensor hooks" not in str(error):
                raise
            raise GraphError(
                "torch.func.grad, vjp, jacrev or hessian was called, which torch does not allow while the engine "
                "looks at what is saved for backward; use torch.autograd.grad(..., create_graph=True)"
            ) from error
        finally:
            self._watchers -= 1
            self._here.watchers -= 1

    def _hooks_of(
        self, own: nn.Module, access: DeviceAccess, needed: tuple[int, ...], *, holds: bool
    ) -> tuple[Any, Any]:
        """What runs before and after a module's forward.

        Args:
            own: the module; a copy of it has these hooks, too, but weights of its own.
            holds: its groups stay while it runs. Otherwise groups of modules that it calls may take their place;
                reading them then brings them back (`guard.py`).
        """
        entered: list[int] = []
        weights = [parameter for group in needed for parameter in self._groups[group].parameters]
        detaching: list[object] = []  # hooks on saved tensors, also of other threads

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def enter(module: nn.Module, args: Any) -> None:
            if module is not own:
                return
            recomputes = torch._C._current_graph_task_id() != -1
            if not self._watchers:
                self.refuse_outside()
            if not self._watchers and torch.is_grad_enabled() and not (recomputes and hooks_on_saved()):
                raise GraphError(
                    f"{type(module).__name__} was called outside of engine(...) with gradients enabled; "
                    "call it in the model's forward, inside `with engine.gathered([...]):`, or under torch.no_grad()"
                )
            if not self._here.watchers and torch.is_grad_enabled() and not recomputes:
                raise GraphError(
                    f"{type(module).__name__} was called in a thread of the model's own, whose graphs the engine does "
                    "not see; call modules in the thread that calls engine(...), or under torch.no_grad() in their own"
                )
            for group in needed:
                if holds or not access.is_inside:
                    access.enter(group)
                    entered.append(group)
                else:
                    access.pass_through(group)
            is_frozen = recomputes and not all(parameter.requires_grad for parameter in weights)
            if is_frozen and (hooks := hooks_on_saved()):
                detaching.append(_detach_for(*hooks))

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module is not own:
                return
            if detaching and (top := hooks_on_saved()) and top[0] in detaching:
                detaching.remove(top[0])
                torch._C._autograd._pop_saved_tensors_default_hooks()
            # This runs also if the forward or an earlier hook has failed: only groups that were entered are left.
            for _ in needed[: len(entered)]:
                access.leave(entered.pop())

        return enter, leave

    def _before(self, others: Hooks | None) -> Hooks:
        """The engine's hooks, which hand what is no weight on to `others`: torch calls the last hooks only."""
        if others is None or others[0] == self._pack:
            return self._pack, self._unpack
        return functools.partial(self._pack_or_pass, others), _unpack_pair

    def _pack_or_pass(self, others: Hooks, tensor: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], Any]:
        packed = self._pack(tensor)
        if packed[0] is None and packed[2] is None:
            return others[1], others[0](tensor)
        return self._unpack, packed

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        try:
            group = self._by_storage.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a sparse tensor has none
            return None, tensor._version, _counted_values(tensor), tensor.detach()
        # Detached: if the node that saves the tensor has made it, the two would hold each other. Both share one version
        # counter, which torch does not check under such hooks.
        if group is None:
            return None, tensor._version, None, tensor.detach()
        return group, tensor._version + self._step * group.spec.trainable, group.token, tensor.detach()

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        group, moment, same = packed[0], packed[1], packed[3]  # not the token: this variable would be counted, too
        if group is None:
            if same._version != moment:
                raise GraphError(
                    f"a tensor of shape {tuple(same.shape)} that backward needs was changed in place after it was "
                    "saved, as by y.mul_(2) or y[0] = 0; make another one, as y = y * 2, or change a clone()"
                )
            return same
        if moment != same._version + self._step * group.spec.trainable:
            raise GraphError(
                f"backward needs the weights of {group.spec.name} as they were before engine.step() or a change of "
                "weights; call engine.backward(loss) before that"
            )
        access = self._gate.access
        if access.is_inside:
            access.visit(group.index)
        else:  # a backward that is not the engine's: no end of a pass will hide the group
            access.enter(group.index)
            access.leave(group.index)
        return same.detach()  # a new view: it keeps the group there, which the saved one does not


def hooks_on_saved() -> Hooks | None:
    """The hooks on saved tensors that are in force in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _detach_for(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> object:
    """Push hooks that hand on views of what is saved: a recomputing checkpoint keeps frozen weights as themselves."""
    detaching = functools.partial(_pack_detached, pack)
    torch._C._autograd._push_saved_tensors_default_hooks(detaching, unpack)
    return detaching


def _pack_detached(pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    return pack(tensor.detach())


def _unpack_pair(packed: tuple[Callable[[Any], torch.Tensor], Any]) -> torch.Tensor:
    return packed[0](packed[1])


def _flatten_nothing() -> None:
    """In place of `nn.LSTM.flatten_parameters`, which models call in forward: on a GPU it takes weights out of the
    storage of their group. A copy of the model has this, too; only its speed depends on that."""


def _counted_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a compressed sparse tensor, perhaps weights; their storage does not count that tensor as a use."""
    is_compressed = tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    return tensor.detach().values() if is_compressed else None
