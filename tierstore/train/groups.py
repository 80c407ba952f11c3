"""Which parameters move together, and the flat storages that they are views of.

Scope: finding groups in a module tree, and binding parameters to one storage per group.
Not here: when a group is on the device (`access.py`), and its bytes (`store/`).
Owner: the training side; only the store resizes storages.

[Note: one storage per group] Autograd saves views of a weight's storage, such as `weight.t()`: giving a parameter new
data would free nothing and leave such a view stale. So a group keeps one storage for ever, which is resized to 0 when
the group leaves the device and filled again when it comes back. Filling goes through an alias, so no version counter
moves.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tierstore.device.spans import TORCH_DTYPES
from tierstore.device.streams import ComputeDevice
from tierstore.errors import ConfigError, GraphError
from tierstore.plan.placement import GroupNeed
from tierstore.store.layout import GroupSpec, ParameterSpec
from tierstore.train.newcomers import newcomers
from tierstore.train.overlaps import KeptView, kept_views, refuse_shared_memory, tell_kept_views

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NO_VERSION = -1


@dataclass(eq=False)
class Group:
    """Parameters of one block with one dtype, all trainable or all frozen.

    Attributes:
        idle_uses: reference count of the storage while only the parameters use it.
        classes: classes of the parameters; `hidden_classes`: their classes while they are hidden (`guard.py`).
        versions: version counters of the parameters when their values were last known.
        token: each view saved for backward refers to it, so its reference count tells their number. Not a weak set,
            whose callback in Python would swallow a KeyboardInterrupt.
    """

    index: int
    spec: GroupSpec
    parameters: list[nn.Parameter]
    storage: torch.UntypedStorage
    idle_uses: int = 0
    classes: list[type] = field(default_factory=list)
    hidden_classes: list[type] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    token: object = field(default_factory=object)

    def __post_init__(self) -> None:
        self._idle_references = 0
        self._idle_references = self.saved_views()

    def saved_views(self) -> int:
        """How many views of the weights are saved for backward, which brings the group back before it uses one."""
        return sys.getrefcount(self.token) - self._idle_references

    def is_viewed(self) -> bool:
        """Whether anything besides the saved views holds a view of the weights, so that they must stay."""
        # Checked twice: between the two counts another thread may release a saved view.
        return self._other_uses() > 0 and self._other_uses() > 0

    def is_free(self) -> bool:
        """Whether no view of the weights is saved for backward, and nothing else holds one."""
        return not (self.saved_views() or self.is_viewed())

    def _other_uses(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata) - self.idle_uses - self.saved_views()

    def bind(self, device: ComputeDevice) -> None:
        """Make the parameters views of the group's storage, and leave the storage empty. Their old data is dropped."""
        where, dtype = device.torch_device, self.parameters[0].dtype
        self.storage = torch.empty(0, dtype=dtype, device=where).untyped_storage()
        device.allocate(self.storage, self.spec.device_bytes)
        for position, parameter in enumerate(self.parameters):
            parameter.data = self._view(position)  # not kept in a variable: it would count as a user of the storage
        self.idle_uses = torch._C._storage_Use_Count(self.storage._cdata)
        self.classes = [type(parameter) for parameter in self.parameters]
        self.accept_changes()
        device.release(self.storage, device.record())

    def changed(self) -> Iterator[str]:
        """Names of parameters that were changed in place since `accept_changes`, or were given other data."""
        elsewhere = set(self._elsewhere())
        for position, (spec, parameter, version) in enumerate(
            zip(self.spec.parameters, self.parameters, self.versions)
        ):
            if parameter._version != version or position in elsewhere:
                yield spec.name

    def name_of(self, parameter: nn.Parameter) -> str:
        """The name of one of its parameters."""
        return next(spec.name for spec, own in zip(self.spec.parameters, self.parameters) if own is parameter)

    def accept_changes(self) -> None:
        """Take the values as known: `changed` reports only later changes."""
        self.versions = [parameter._version for parameter in self.parameters]

    def displaced(self, storages: Sequence[range]) -> dict[int, torch.Tensor]:
        """The other data that parameters were given (`p.data = new`), by their positions.

        Args:
            storages: the addresses of all groups. Data that lies there (`p.data, q.data = q.data, p.data`) is copied:
                it is written over when the first parameter is taken back.
        """
        given = {position: self.parameters[position].detach() for position in self._elsewhere()}
        return {
            position: data.clone() if any(data.data_ptr() in storage for storage in storages) else data
            for position, data in given.items()
        }

    @torch.no_grad()
    def take_back(self, displaced: Mapping[int, torch.Tensor]) -> list[str]:
        """Make these parameters views of the storage again, with the values that they were given.

        The group must be on the device. These parameters count as changed until `accept_changes`.

        Returns:
            One message for each parameter that was given data of another shape or dtype; that data is lost.
        """
        wrong = []
        for position, value in displaced.items():
            self.versions[position] = _NO_VERSION  # changed, whatever version the parameter has
            spec = self.spec.parameters[position]
            given, expected = (tuple(value.shape), value.dtype), (spec.shape, TORCH_DTYPES[self.spec.dtype])
            if given == expected:
                self._view(position).copy_(value)
            else:
                wrong.append(
                    f"parameter {spec.name} was given data of {given[1]} {given[0]}, it is {expected[1]} {expected[0]}"
                )
            self.parameters[position].data = self._view(position)
            torch.autograd.graph.increment_version(self.parameters[position])  # graphs over the old values are refused
        return wrong

    def _elsewhere(self) -> Iterator[int]:
        """Positions of parameters that are not the view which `bind` has made; called in each forward."""
        own, dtype = self.storage._cdata, TORCH_DTYPES[self.spec.dtype]
        for position, (spec, parameter) in enumerate(zip(self.spec.parameters, self.parameters)):
            if not (
                parameter.untyped_storage()._cdata == own
                and parameter.storage_offset() == spec.start
                and parameter.shape == spec.shape
                and parameter.is_contiguous()
                and parameter.dtype is dtype
            ):
                yield position

    def _view(self, position: int) -> torch.Tensor:
        spec = self.spec.parameters[position]
        stride = torch.empty(spec.shape, device="meta").stride()
        alias = torch.empty(0, dtype=TORCH_DTYPES[self.spec.dtype], device=self.storage.device)
        return alias.set_(self.storage, spec.start, spec.shape, stride)


@dataclass(frozen=True)
class ModelGroups:
    """All groups of a model.

    Attributes:
        of_module: the groups that a module needs on the device: those of its own parameters, and those of all modules
            below it if it is compiled or `closed`.
        closed: modules whose parameters, with those of all modules below, are exactly one group. Modules below are not
            in `of_module`. A closed module may call modules that need other groups: its own group must be there when it
            begins, and later only when it is read.
        together: sets of groups that must be on the device at one time, as far as the module tree tells: those of a
            module or of a block, with those of all modules that run around it.
        names: one name of each parameter.
        aliases: every name of every parameter, mapped to the one in `names`.
        empty: parameters without elements, which are in no group, by each of their names.
        kept_views: views that modules hold; the first forward may make them anew.
        tied: groups with a parameter that has several names.
    """

    groups: list[Group]
    of_module: dict[nn.Module, tuple[int, ...]]
    closed: set[nn.Module]
    together: set[frozenset[int]]
    names: dict[nn.Parameter, str]
    aliases: dict[str, str]
    empty: dict[str, ParameterSpec]
    kept_views: list[KeptView]

    def storages(self) -> list[range]:
        """The addresses of the weights of the groups that are on the device."""
        found = [group.storage for group in self.groups]
        return [range(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in found]

    def refuse_newcomers(self, model: nn.Module) -> None:
        """Refuse parameters that were added to the model later: they are in no group, and would never be trained.

        Raises:
            GraphError: names one.
        """
        for name, _ in newcomers(model, self._known_ids):
            raise GraphError(
                f"parameter {name} came into the model after the engine was made, and would be neither trained nor "
                "kept: build the model with it, and make another engine; "
                "values alone are set by engine.load_state_dict(...)"
            )

    def check_kept_views(self, *, is_resumed: bool) -> None:
        """Warn of stale views after the first forward; see `tell_kept_views`.

        Args:
            is_resumed: the run was resumed, so that frozen weights have other values than before, too.
        """
        if self.kept_views:
            stale = [view for view in self.kept_views if view.is_trained or is_resumed]
            self.kept_views.clear()
            tell_kept_views(stale)

    def frozen_since(self) -> list[str]:
        """Names of parameters that were trainable when the engine was made, and need no gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return [
                spec.name
                for group in self.groups
                if group.spec.trainable
                for spec, parameter in zip(group.spec.parameters, group.parameters)
                if not parameter.requires_grad
            ]

    def refuse_gradients(self) -> None:
        """Refuse a `.grad` that backward has not taken: this step would not see it, and the next one would.

        Raises:
            ConfigError: names one.
        """
        with torch._C.DisableTorchFunctionSubclass():
            given = (name for p, name in self.names.items() if p.grad is not None and p.requires_grad)
            name = next(given, None)
        if name is not None:
            raise ConfigError(
                f"the .grad of {name} is set, and this step would not see it: gradients are taken in "
                "engine.backward(), of parameters that the loss reaches; to use it, add a term to the loss, and set "
                ".grad to None"
            )

    @functools.cached_property
    def _known_ids(self) -> set[int]:
        return {id(parameter) for parameter in self.names}  # a parameter's own hash is a function in Python

    def acquired_bytes(self, needs: Sequence[GroupNeed]) -> int:
        """Device bytes of the largest set in `together`, by the needs of its groups."""
        return max(sum(needs[group].device_bytes for group in together) for together in self.together)

    @property
    def tied(self) -> set[int]:
        counts = Counter(self.aliases.values())
        return {g.index for g in self.groups if any(counts[spec.name] > 1 for spec in g.spec.parameters)}

    def locate(self, name: str) -> tuple[Group, ParameterSpec]:
        """The group and the place of a parameter, by any of its names; for an empty one, a place in the first group.

        Raises:
            ConfigError: the model has none of this name.
        """
        if name in self.empty:
            return self.groups[0], self.empty[name]
        for group in self.groups:
            for spec in group.spec.parameters:
                if spec.name == self.aliases.get(name):
                    return group, spec
        raise ConfigError(f"the model has no parameter {name!r}")


def find_groups(model: nn.Module) -> ModelGroups:
    """Cut a model into groups: one per block of each list of blocks, the other parameters by the module that owns them.

    Raises:
        ConfigError: the model cannot be trained in groups; the message names what prevents it.
    """
    _refuse_unsplittable(model)
    _refuse_odd_parameters(model)
    refuse_shared_memory(model)
    blocks = _block_of_parameters(model)
    names: dict[nn.Parameter, str] = {}
    members: dict[tuple[str, str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype not in DTYPES:
            raise ConfigError(f"parameter {name} has dtype {parameter.dtype}; fp32, bf16 and fp16 can be trained")
        if parameter.numel() == 0:
            continue
        names[parameter] = name
        members.setdefault((blocks[name], DTYPES[parameter.dtype], parameter.requires_grad), []).append(parameter)
    if not members:
        raise ConfigError("the model has no parameters")
    groups: list[Group] = []
    taken: set[str] = set()
    for (block, dtype, trainable), parameters in members.items():
        name = block if block not in taken else f"{block}.{dtype}{'' if trainable else '.frozen'}"
        taken.add(name)
        groups.append(_make_group(len(groups), name, dtype, trainable, parameters, names))
    index_of = {parameter: group.index for group in groups for parameter in group.parameters}
    everywhere = dict(model.named_parameters(remove_duplicate=False))
    aliases = {name: names[p] for name, p in everywhere.items() if p in names}
    empty = {name: ParameterSpec(name, tuple(p.shape), 0) for name, p in everywhere.items() if p not in names}
    of_module, closed = _groups_of_modules(model, index_of)
    together = set(_together(model, of_module, index_of))
    return ModelGroups(groups, of_module, closed, together, names, aliases, empty, kept_views(model))


def _refuse_unsplittable(model: nn.Module) -> None:
    if is_compiled(model):
        raise ConfigError(
            "the model went through torch.compile as a whole, so its groups cannot come and go; compile its blocks, "
            "for example `for block in model.blocks: block.compile()`, and give the model itself"
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"module {name or 'model'} went through torch.jit, so nothing tells when its weights are needed; "
                "give the module that it was made from, and compile that with torch.compile if need be"
            )


def _refuse_odd_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.layout is not torch.strided or parameter.is_nested:
            kind = "nested" if parameter.is_nested else parameter.layout
            raise ConfigError(f"parameter {name} is {kind}; only dense parameters can be trained")
        if hasattr(parameter, "device_mesh"):  # not `isinstance`: DTensor is slow to import
            raise ConfigError(
                f"parameter {name} is a DTensor, sharded by fully_shard() or parallelize_module(); give the model "
                "without that: the engine shards it itself (zero=)"
            )
        if parameter.is_inference():
            raise ConfigError(f"parameter {name} was made in torch.inference_mode(); build the model outside of that")


def refuse_empty_buffers(model: nn.Module) -> None:
    """Refuse buffers on the meta device: the model runs, and needs their values. (`find_groups` allows them.)

    Raises:
        ConfigError: names one.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(f"buffer {name} holds no values (meta device); make it on the CPU, as deferred() does")


def _groups_of_modules(
    model: nn.Module, index_of: dict[nn.Parameter, int]
) -> tuple[dict[nn.Module, tuple[int, ...]], set[nn.Module]]:
    compiled = {module for module in model.modules() if is_compiled(module)}
    closed = {block for block in _closed_modules(model, index_of) if not any(map(is_compiled, block.modules()))}
    inside = {below for module in compiled | closed for below in module.modules() if below is not module}
    found = {}
    for module in model.modules():
        if module not in inside:  # there hooks would split compiled code, and tell nothing new about a block
            own = module.parameters() if module in compiled | closed else module._parameters.values()
            if needed := _groups_of(own, index_of):
                found[module] = tuple(sorted(needed))
    return found, closed & found.keys()


def _together(
    module: nn.Module,
    of_module: dict[nn.Module, tuple[int, ...]],
    index_of: dict[nn.Parameter, int],
    around: frozenset[int] = frozenset(),
) -> Iterator[frozenset[int]]:
    """See `ModelGroups.together`. A block counts as a whole: if backward recomputes it, it needs all of its groups.

    Args:
        around: the groups of the modules that run around this one.
    """
    needed = around.union(of_module.get(module, ()), _groups_of(module._parameters.values(), index_of))
    yield needed
    held = around if type(module).forward is nn.Module.forward else needed  # nobody calls a mere container
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            yield held.union(_groups_of(child.parameters(), index_of))
        else:
            yield from _together(child, of_module, index_of, held)


def _groups_of(parameters: Iterable[nn.Parameter | None], index_of: dict[nn.Parameter, int]) -> set[int]:
    return {index_of[p] for p in parameters if p is not None and p in index_of}


def _closed_modules(model: nn.Module, index_of: dict[nn.Parameter, int]) -> Iterator[nn.Module]:
    """Modules that have all parameters of one group below them and no others, and share none of them with the rest.

    Containers are left out: nobody calls a ModuleList, and many models iterate over a Sequential instead of calling it.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(f"{name}." if name else "")
    sizes = Counter(index_of.values())
    for module, prefixes in names.items():
        is_container = type(module).forward is nn.Module.forward or isinstance(module, nn.Sequential)
        needed = Counter(index_of[p] for p in module.parameters() if p in index_of)
        is_one_group = len(needed) == 1 and all(sizes[group] == count for group, count in needed.items())
        if is_one_group and not is_container:
            below = (name for one in module.modules() if one._parameters for name in names[one])
            if all(name.startswith(tuple(prefixes)) for name in below):
                yield module


def is_compiled(module: nn.Module) -> bool:
    """Whether a module went through `torch.compile`, as a wrapper or in place."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _make_group(
    index: int, name: str, dtype: str, trainable: bool, parameters: list[nn.Parameter], names: dict[nn.Parameter, str]
) -> Group:
    specs, start = [], 0
    for parameter in parameters:
        specs.append(ParameterSpec(names[parameter], tuple(parameter.shape), start))
        start += parameter.numel()
    return Group(index, GroupSpec(name, dtype, trainable, tuple(specs)), parameters, torch.UntypedStorage(0))  # type: ignore[no-untyped-call]


def _block_of_parameters(model: nn.Module) -> dict[str, str]:
    """The name of the block of every parameter: an item of the outermost list of blocks, or the owning module."""
    blocks = {
        f"{prefix}.{child}" if prefix else child
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for child, _ in module.named_children()
    }
    return {name: _owner(name, blocks) for name, _ in model.named_parameters()}


def _owner(parameter: str, blocks: set[str]) -> str:
    parts = parameter.split(".")[:-1]
    around = (".".join(parts[:n]) for n in range(1, len(parts) + 1))  # the outermost first
    return next((name for name in around if name in blocks), ".".join(parts) or "model")
