"""The whole model, at once or as a stream: state_dict, export, and weights changed from outside.

Scope: reading fp32 masters chunk by chunk, and writing changes back. Callers wait for updates first.
Not here: the file format of a checkpoint (`checkpoints.py`).
Owner: the training side.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tierstore.device.spans import TORCH_DTYPES
from tierstore.errors import BudgetError, ConfigError, FormatError, GraphError
from tierstore.kernels.adam import init_state, state_bytes_per_element
from tierstore.kernels.elements import ELEMENT
from tierstore.pack.layout import listed
from tierstore.plan.gpu_room import COMPANY_BYTES
from tierstore.store.layout import ParameterSpec
from tierstore.store.team import attempt, outcome, results
from tierstore.train import capture
from tierstore.train.assembly import Assembly
from tierstore.train.checkpoints import TensorOut, write_checkpoint
from tierstore.train.filling import Piece, fill, fill_alike
from tierstore.train.groups import Group
from tierstore.train.guard import guard
from tierstore.train.ranks import refuse_different


def masters(
    parts: Assembly, group: Group, start: int, stop: int, *,
    is_announced: bool = False, chunk_at: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """The fp32 values of elements `[start, stop)` of a group, in pieces of at most a chunk.

    Args:
        is_announced: rank 0 asks, and the others answer (`_answer`); otherwise all ranks ask for the same.
        chunk_at: gives the chunk that begins at an element, instead of reading it.
    """
    size = parts.store.placement.chunk_elements
    for first in range(start // size * size, stop, size):
        if is_announced:
            parts.partition.agree("an export", ((group.index, first), None))
        values = _chunk(parts, group, first) if chunk_at is None else chunk_at(first)
        yield values[max(start - first, 0) : min(stop - first, size)]


def _chunk(parts: Assembly, group: Group, first: int) -> torch.Tensor:
    """The fp32 values of the chunk that begins at an element of a group, from the rank that keeps it."""
    size, spec, partition = parts.store.placement.chunk_elements, group.spec, parts.partition
    begin, end = spec.kept_part(first, first + 1)
    if begin < end:
        values = torch.from_numpy(parts.runtime.call(parts.store.at_rest.read, group.index, begin // size))
    else:
        values = torch.empty(min(size, spec.size - first), dtype=torch.float32, device="cpu")
    return values if partition.keeps_all else partition.from_owner(partition.owner(spec, first), values)


def _answer(parts: Assembly) -> None:
    """Give rank 0 the chunks that it asks for, until it is done.

    Raises:
        TierstoreError: rank 0 has failed.
    """
    while True:
        nothing: Any = (None, None)
        asked, told = parts.partition.agree("an export", nothing)
        if asked is None:
            results([(None, told)], None)
            return
        _chunk(parts, parts.groups.groups[asked[0]], asked[1])


def state_dict(parts: Assembly) -> dict[str, torch.Tensor]:
    """As the model's own: weights in fp32, tied ones under each name (one tensor), and copies of all else."""
    by_name: dict[str, torch.Tensor] = {}
    for group in parts.groups.groups:
        last = functools.lru_cache(1)(functools.partial(_chunk, parts, group))  # many parameters lie in one chunk
        for spec in group.spec.parameters:
            pieces = list(masters(parts, group, spec.start, spec.stop, chunk_at=last))
            by_name[spec.name] = torch.cat(pieces).reshape(spec.shape)
    result: dict[str, Any] = {}
    for name, value in parts.model.state_dict(keep_vars=True).items():  # the parameters themselves: nothing is read
        if isinstance(value, nn.Parameter) and value in parts.groups.names:  # whatever its module is called by now
            result[name] = by_name[parts.groups.names[value]]
        elif isinstance(value, torch.Tensor):  # a buffer, or a parameter without elements
            result[name] = value.detach().cpu().clone()
        else:
            result[name] = copy.deepcopy(value)
    return result


def check_state_dict(parts: Assembly, state: Mapping[str, Any]) -> None:
    """Refuse what `load_state_dict` cannot take.

    Raises:
        ConfigError: it is not a mapping.
        FormatError: a tensor is missing, unknown, of another shape, or no ordinary one.
        GraphError: a parameter of the model would keep its value, because it is not the engine's.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"load_state_dict() takes tensors by name, not {type(state).__name__}")
    parts.groups.refuse_newcomers(parts.model)
    wanted = {spec.name: spec.shape for group in parts.groups.groups for spec in group.spec.parameters}
    wanted |= {name: tuple(buffer.shape) for name, buffer in capture.persistent_buffers(parts.model).items()}
    given = {name: _form_of(value) for name, value in state.items()}
    wrong = [
        f"{name} {given.get(name, 'missing')}, expected {shape}"
        for name, shape in wanted.items()
        if given.get(name) != shape
    ]
    known = parts.model.state_dict(keep_vars=True).keys()
    wrong += [f"{name} is not in the model" for name in sorted(map(str, state.keys() - known))]
    if wrong:
        raise FormatError(f"{len(wrong)} tensors do not fit the model: {'; '.join(wrong[:5])}")


def _form_of(value: object) -> tuple[int, ...] | str:
    """The shape of a tensor that can be copied from; for anything else a description."""
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    if value.is_meta:
        return "without values (meta device)"
    if value.layout is not torch.strided or value.is_nested or hasattr(value, "device_mesh"):
        return f"a {type(value).__name__} of {value.layout}, not a whole dense one"
    return tuple(value.shape)


def load_state_dict(parts: Assembly, state: Mapping[str, torch.Tensor]) -> None:
    """Set all weights and buffers from full tensors, and the modules' extra states that are given; moments stay.

    With several ranks, all get rank 0's weights.
    """
    parts.driver.can_redo = False
    parts.access.release_all()
    names = [spec.name for group in parts.groups.groups for spec in group.spec.parameters]
    pieces = (Piece(name, 0, state[name].detach().reshape(-1)) for name in names)
    fill_alike(parts.partition, parts.store, parts.runtime, parts.groups.groups, pieces, keep=True)
    parts.access.settle()
    _restore(parts, range(len(parts.groups.groups)))  # groups with a view have stayed on the device
    for group in parts.groups.groups:  # as when torch sets weights: graphs over the old ones are refused
        torch.autograd.graph.increment_version(group.parameters)
        group.accept_changes()
    with torch.no_grad():
        for name, buffer in capture.persistent_buffers(parts.model).items():
            capture.writable(buffer).copy_(state[name])
    capture.load_extra_states(parts.model, state)


def wanted_groups(parts: Assembly, names: str | Iterable[str], *, modify: bool) -> list[int]:
    """The groups of the parameters of these names, and of all parameters below the modules of these names.

    Raises:
        ConfigError: neither a parameter nor a module has such a name; or ranks want different ones, although they keep
            parts of the weights or change them. Raised at all ranks then.
        BudgetError: they do not fit on the device together.
    """

    def work() -> tuple[bool, list[int]]:
        given = _checked_names(names)
        index_of = {parameter: group.index for group in parts.groups.groups for parameter in group.parameters}
        wanted = sorted({index_of[p] for name in given for p in _parameters_at(parts.model, name) if p in index_of})
        _refuse_too_many(parts, given, wanted)
        return modify, wanted

    if parts.partition.keeps_all and not modify:  # one rank alone may read
        return work()[1]
    told = parts.partition.all_succeed("gathered()", work)
    group_names = [group.spec.name for group in parts.groups.groups]
    refuse_different(
        [
            {"modify of gathered()": modify, "what gathered() is to bring": [group_names[index] for index in wanted]}
            for modify, wanted in told
        ]
    )
    return told[0][1]


def _checked_names(names: str | Iterable[str]) -> list[str]:
    """The names that were given, one or several, as a list.

    Raises:
        ConfigError: they are something else.
    """
    several = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    if wrong := [name for name in several if not isinstance(name, str)]:
        raise ConfigError(f"gathered() takes names of parameters and modules, not {type(wrong[0]).__name__}")
    return several


def _parameters_at(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameter of this name, or those of the module of this name and all below it; "" is the model."""
    with contextlib.suppress(AttributeError):
        return list(model.get_submodule(name).parameters())
    with contextlib.suppress(AttributeError):
        return [model.get_parameter(name)]
    raise ConfigError(f"the model has no parameter or module {name!r}")


def _refuse_too_many(parts: Assembly, names: Sequence[str], groups: Sequence[int]) -> None:
    placement, sizes = parts.store.placement, parts.access.sizes
    room, beside = placement.gpu_weight_bytes, 2 * max(placement.gpu_gradient_bytes, COMPANY_BYTES)
    if (wanted_bytes := sum(sizes[group] for group in groups)) > room:
        raise BudgetError(
            f"{listed(names)} are {wanted_bytes} B of weights with the groups that they are in, and the device tier "
            f"holds {room} B; gather fewer at a time, or give a gpu_memory of {wanted_bytes + beside} B "
            f"(it is {placement.gpu_bytes} B)"
        )


@contextlib.contextmanager
def gathered(
    parts: Assembly, groups: Sequence[int], kept: Container[int], break_off: Callable[[BaseException], None]
) -> Iterator[None]:
    """Keep these groups on the device until the end of the block.

    Changes that are not kept are undone, also in groups that stay on the device because somebody holds a view.

    Args:
        kept: groups whose changes a block around this one keeps.
        break_off: called with the error that ends the block, if its changes cannot be undone: other ranks have parts of
            the weights, and know of no error.
    """
    with contextlib.ExitStack() as entered:
        entered.callback(lambda: parts.access.release(groups) if parts.runtime.is_open else None)
        for group in groups:
            is_first = not parts.access.is_gathered(group)
            parts.access.enter(group, for_long=True)
            entered.callback(parts.access.leave, group, for_long=True)
            if is_first:  # changes made in a forward are lost already
                _undo_changes(parts, group)
        try:
            yield
        except BaseException as error:
            if not parts.runtime.is_open:  # the engine was closed in the block, or its loop was lost
                raise
            undone = [_undo_changes(parts, group) for group in groups if group not in kept]
            if not all(undone):
                break_off(error)
            raise


def refuse_changes(parts: Assembly, groups: Iterable[int]) -> None:
    """Refuse changes of weights of these groups since they were gathered: nothing keeps them.

    Raises:
        GraphError: names one.
    """
    for name in (name for index in groups for name in parts.groups.groups[index].changed()):
        raise GraphError(
            f"{name} was changed inside gathered(), which is lost; change weights inside "
            f"`with engine.gathered([{name!r}], modify=True):`"
        )


def undo_changes(parts: Assembly, groups: Sequence[int]) -> bool:
    """Give groups that a forward has changed the values that they have at rest.

    Returns:
        As `_undo_changes`, for all of them.
    """
    undone = True
    for group in groups:
        parts.access.enter(group)
        undone &= _undo_changes(parts, group)
        parts.access.leave(group)
    parts.access.release(groups)
    return undone


def _undo_changes(parts: Assembly, index: int) -> bool:
    """Give a group on the device its parameters back, with the values that it has at rest.

    Returns:
        Whether its changes are undone, or end when it is dropped; else somebody holds a view, and other ranks have
        parts of its weights.
    """
    group = parts.groups.groups[index]
    is_changed = any(group.changed())
    group.take_back(group.displaced(parts.groups.storages()))
    guard(group, parts.access.gate)
    group.accept_changes()
    if is_changed and parts.partition.keeps_all:
        _reload(parts, index)
    return not is_changed or parts.partition.keeps_all or not group.is_viewed()


def _reload(parts: Assembly, group: int) -> None:
    """Load this rank's part of a group again as it is at rest, if the group is on the device."""
    parts.runtime.call(parts.store.weights.reload, group, parts.access.device.record())


def _restore(parts: Assembly, groups: Sequence[int]) -> None:
    """Give groups on the device the values that they have at rest. All ranks call this."""
    for group in groups:
        _reload(parts, group)
    if not parts.partition.keeps_all:  # the other ranks' parts are gathered
        parts.access.keep_views(groups)
        parts.access.weights_changed(groups)
        parts.access.release_all()


def take_back(parts: Assembly, indices: Sequence[int], kept: Container[int]) -> None:
    """Make the parameters of groups on the device views of their storage again, whatever data they were given.

    Args:
        kept: groups whose changes a block around this one keeps, also if this change is refused.

    Raises:
        ConfigError: a parameter was given data of another shape or dtype, which is lost. Raised at all ranks; if they
            keep parts of the weights, groups not in `kept` then have their values at rest again.
        GraphError: the model has a parameter that is not the engine's; likewise.
    """
    groups = [parts.groups.groups[index] for index in indices]

    def work() -> None:
        parts.groups.refuse_newcomers(parts.model)
        storages = parts.groups.storages()
        displaced = [group.displaced(storages) for group in groups]
        wrong = [sentence for group, those in zip(groups, displaced) for sentence in group.take_back(those)]
        for group in groups:  # `torch.utils.swap_tensors` takes both away
            guard(group, parts.access.gate)
            parts.collector.renew(group)
        if wrong:
            raise ConfigError(wrong[0])

    _, failure = attempt(work)
    told: list[Any] = parts.partition.exchange("a change of weights", outcome(None, failure))
    try:
        results(told, failure)
    except Exception:  # at all ranks
        if not parts.partition.keeps_all:  # else each rank can undo it by itself
            refused = [group for group in groups if group.index not in kept]
            _restore(parts, [group.index for group in refused])
            for group in refused:
                group.accept_changes()
        raise


def keep_changes(parts: Assembly, indices: Iterable[int]) -> None:
    """Write back what was changed in the weights of groups on the device; other masters and all moments stay.

    With several ranks, all get what rank 0 has changed.
    """

    def pieces(group: Group) -> Iterator[Piece]:
        for spec, parameter in zip(group.spec.parameters, group.parameters):
            there, start = parameter.detach().reshape(-1), 0
            weights = parts.partition.as_first(there)
            is_same = parts.partition.is_first or torch.equal(there.cpu().view(torch.uint8), weights.view(torch.uint8))
            if not is_same:  # a copy counts as a change: graphs over these weights are refused
                there.copy_(weights)
            # Masters of all ranks are read, though only those that this rank keeps are written.
            for master in masters(parts, group, spec.start, spec.stop):
                now = weights[start : start + len(master)]
                is_kept = _bits(as_trained(group.spec.dtype, master)) == _bits(now)  # not by value: -0.0 equals 0.0
                kept = torch.where(is_kept, master, now.float())
                yield Piece(spec.name, start, kept)
                start += len(master)

    parts.driver.can_redo = False
    for group in [parts.groups.groups[index] for index in indices]:
        fill(parts.store, parts.runtime, [group], pieces(group), keep=True)
        group.accept_changes()


def as_trained(dtype: str, master: torch.Tensor) -> torch.Tensor:
    """Masters rounded as training rounds them: bf16 half away from zero, which is not torch's way."""
    weights = np.empty(master.numel(), ELEMENT[dtype])
    init_state(dtype, master.numpy(), weights, np.empty(master.numel() * state_bytes_per_element(dtype), np.uint8))
    return torch.from_numpy(weights).view(TORCH_DTYPES[dtype])


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.dtype is torch.float32 else torch.int16)


def export(parts: Assembly, directory: Path) -> None:
    """Stream weights, in the dtype they are trained in, and persistent buffers to ordinary safetensors.

    Of the modules' extra states only tensors are written, because the format has no place for others. Rank 0 writes.
    """
    if not parts.partition.is_first:
        _answer(parts)
        return
    is_shared = parts.partition.is_shared

    def rounded(group: Group, spec: ParameterSpec) -> Iterator[torch.Tensor]:
        for piece in masters(parts, group, spec.start, spec.stop, is_announced=is_shared):
            yield as_trained(group.spec.dtype, piece)

    def tensors() -> Iterator[TensorOut]:
        for group in parts.groups.groups:
            for spec in group.spec.parameters:
                yield TensorOut(spec.name, spec.shape, group.parameters[0].dtype, rounded(group, spec))
        empty = {name: p for name, p in parts.model.named_parameters() if p.numel() == 0}
        for name, value in (empty | capture.module_state(parts.model)).items():
            if isinstance(value, torch.Tensor):
                yield TensorOut(name, tuple(value.shape), value.dtype, iter([value.detach().cpu().reshape(-1)]))

    _, failure = attempt(lambda: write_checkpoint(directory, tensors(), backend=parts.backend))
    parts.partition.agree("an export", outcome(None, failure))
    if failure is not None:
        raise failure
