"""Adam as the engine runs it: parameter groups, step counts, clipping and the loss scale.

Scope: what each parameter gets in a step, as coefficients for the kernel.
Not here: the kernel (`kernels/adam.py`), when it runs (`store/updates.py`).
Owner: the training side.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierstore.config import AdamWConfig
from tierstore.errors import ConfigError, first_line
from tierstore.kernels.adam import AdamCoefficients
from tierstore.store.layout import GroupSpec
from tierstore.store.rounds import ParameterUpdate
from tierstore.train.capture import with_tensors
from tierstore.train.groups import ModelGroups
from tierstore.train.parameter_groups import checked_options, coefficients_of, refuse_unsupported, validate_options


class TieredOptimizer(torch.optim.Optimizer):
    """The engine's optimizer as torch knows it: schedulers set the learning rate of its `param_groups`.

    `step()` is the engine's step. The optimizer keeps no state of its own: moments live in the store. Its parameter
    groups stay those that it was made with; their `param_names` are the names in the model.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        config: AdamWConfig,
        step: Callable[[], object],
    ) -> None:
        self._engine_step = step
        self.on_zero_grad: Callable[[], None] = lambda: None
        self._is_made = False
        super().__init__(parameters, config.model_dump())
        self._is_made = True
        self.given = [_hyper_parameters(group) for group in self.param_groups]
        """The hyper-parameters that each parameter group was made with."""
        _look_at_others()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's step; see `Engine.step`. Step hooks run before and after all of it."""
        if closure is not None:
            raise ConfigError("a closure is not supported: call engine.backward, then step")
        self._engine_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Works only inside the constructor.

        Raises:
            ConfigError: called later, or an option is bad, or torch refuses the parameters, as those of another group.
        """
        if self._is_made:
            raise ConfigError("a parameter group cannot be added to an engine; give parameter_groups to the engine")
        validate_options(param_group, self.defaults)
        try:
            super().add_param_group(param_group)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"parameter_groups[{len(self.param_groups)}]: {first_line(error)}") from error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, for what `state_dict` gave: options of groups. Moments are in neither, and stay as they are.

        Raises:
            ConfigError: the state has other groups, or groups with other members, or is of another optimizer; nothing
                was changed.
        """
        groups = state_dict["param_groups"]
        self._check_groups(groups)
        absent = sorted({name for group in groups for name in AdamWConfig.model_fields if name not in group})
        if absent or state_dict["state"]:
            what = f"it has no {absent[0]}" if absent else "it has moments, which are in the store here"
            raise ConfigError(
                f"the state is that of another optimizer: {what}; set options in param_groups; moments cannot be loaded"
            )
        super().load_state_dict(state_dict)

    def begin_schedules_here(self) -> None:
        """Make the next schedule begin from the current rates, not from where an earlier schedule began."""
        for group in self.param_groups:
            group["initial_lr"] = copy.deepcopy(group["lr"])  # a tensor is changed in place

    def restore(self, groups: Sequence[Mapping[str, Any]], but: Container[str] = ()) -> None:
        """Set the options of all groups to those that a generation holds.

        Args:
            but: names of options that stay as they are.

        Raises:
            ConfigError: as `load_state_dict`.
        """
        self._check_groups(groups)
        for group, options in zip(self.param_groups, groups):
            group.update(with_tensors({name: value for name, value in options.items() if name not in but}))

    def unused(self, made_with: Sequence[Mapping[str, Any]]) -> list[str]:
        """Options that it was made with, if neither the store was made with them nor are they in force now, as text."""
        found: dict[str, list[int]] = {}
        for index, (given, then, group) in enumerate(zip(self.given, made_with, self.param_groups)):
            now = _hyper_parameters(group)
            for name, value in given.items():
                if not (_is_same(value, then.get(name)) or _is_same(value, now[name])):
                    found.setdefault(f"{name}={value} (here it is {now[name]})", []).append(index)
        return [f"{text} in parameter_groups{groups}" for text, groups in found.items()]

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"the state was made with parameters in {len(groups)} groups, and here they are in "
                f"{len(self.param_groups)}; give parameter_groups= as then"
            )
        for index, (theirs, ours) in enumerate(zip(groups, self.param_groups)):
            names, here = theirs.get("param_names"), ours.get("param_names")
            if names is None or here is None:
                continue
            if other := set(names) ^ set(here):
                name = min(other)
                raise ConfigError(
                    f"parameter_groups[{index}] had {'a' if name in names else 'no'} parameter {name} when the state "
                    "was made; give the same parameter_groups as then"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `Engine.zero_grad` in the middle of a step; else there is nothing to do: a step uses its gradients up."""
        self.on_zero_grad()


def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return checked_options({name: group[name] for name in AdamWConfig.model_fields}).model_dump()


def _as_they_are(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in AdamWConfig.model_fields} | {"lr": float(group["lr"])}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two options are equal; floats to fp32 precision, because a rate may have been an fp32 tensor."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


@functools.cache
def _look_at_others() -> None:
    register_optimizer_step_pre_hook(_refuse_idle)


def _refuse_idle(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of another optimizer on parameters of an engine only: it finds no gradients, trains nothing."""
    if isinstance(optimizer, TieredOptimizer):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if parameters and all("_tierstore_access" in p.__dict__ and p.grad is None for p in parameters):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"{kind}.step would change nothing: the gradients of these parameters go to their engine; call "
            "engine.step(), which updates them, and give hyper-parameters as AdamWConfig(...)"
        )


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler that the engine's step cannot drive.

    Raises:
        ConfigError: it has no `step`, `state_dict` or `load_state_dict`, or its `step` needs arguments.
    """
    kind = type(scheduler).__name__
    if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise ConfigError(f"lr_scheduler must make an object with step and state_dict, not a {kind}")
    try:
        inspect.signature(scheduler.step).bind()
    except TypeError as error:
        raise ConfigError(
            f"{kind}.step: {error}, which the engine does not have; make it from engine.optimizer, register it, and "
            "step it in a callback of engine.on_step, or before engine.backward: so every generation has it"
        ) from None


def ended_schedule(captured: Mapping[str, Any], scheduler: Any) -> str | None:
    """The class of the schedule that a generation holds, if this one has another: that state would mean nothing here.

    Older stores do not name the class.
    """
    kind = captured.get("scheduler_kind")
    if scheduler is None or captured["scheduler"] is None or kind in (None, type(scheduler).__name__):
        return None
    return str(kind)


_FIRST_SCALE = 2.0**16  # of a dynamic one


@dataclass(slots=True)
class LossScale:
    """Loss scaling for fp16; dynamic as in Micikevicius et al., 2018.

    Attributes:
        may_skip: a step whose gradients are not finite changes nothing.
        growth_interval: finite steps in a row before the scale doubles; 0 keeps it fixed.
        dynamic: the scale and good steps with which a dynamic scale goes on in a later run, if this one is fixed.
    """

    scale: float = 1.0
    may_skip: bool = False
    growth_interval: int = 0
    good_steps: int = 0
    dynamic: Sequence[float] = (_FIRST_SCALE, 0)

    @classmethod
    def of(cls, value: float | str | None, model: nn.Module) -> LossScale:
        """What a user asks for: "dynamic", a fixed scale, or None, which is dynamic for fp16 and 1 otherwise.

        Raises:
            ConfigError: none of these.
        """
        is_half = any(parameter.dtype == torch.float16 for parameter in model.parameters())
        if value == "dynamic" or (value is None and is_half):
            return cls(_FIRST_SCALE, may_skip=True, growth_interval=2000)
        if value is None:
            return cls()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"loss_scale must be 'dynamic' or above 0, not {value!r}")
        return cls(float(value), may_skip=is_half or value != 1)

    def captured(self) -> list[float]:
        """What a generation holds: scale and good steps, of a dynamic one."""
        return [self.scale, self.good_steps] if self.growth_interval else [*self.dynamic]

    def restore(self, captured: Sequence[float]) -> None:
        """Go on from a generation; a fixed scale is the one that was given."""
        if self.growth_interval:
            self.scale, self.good_steps = captured[0], int(captured[1])
        else:
            self.dynamic = captured

    def update(self, is_finite: bool) -> None:
        """Take note of a step: it was finite, or was skipped because it was not."""
        if self.growth_interval == 0:
            return
        if not is_finite:
            self.scale, self.good_steps = max(self.scale / 2, 2.0**-14), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0


class AdamStepper:
    """Turns parameter groups and step counts into the updates of a step."""

    def __init__(self, groups: ModelGroups, optimizer: TieredOptimizer) -> None:
        self._groups = groups.groups
        self.optimizer = optimizer
        self.steps: dict[str, int] = dict.fromkeys(groups.names.values(), 0)
        self._option_group: dict[str, int] = {}
        self._kept: dict[int, list[_KeptPart]] = {}  # by group, on demand: groups are cut among ranks later
        for index, options in enumerate(optimizer.param_groups):
            trained = [parameter for parameter in options["params"] if parameter.numel()]
            for parameter in trained:
                if parameter not in groups.names:
                    raise ConfigError(
                        f"parameter_groups[{index}] holds a parameter of shape {tuple(parameter.shape)} that the model "
                        "does not have; what is outside the model needs an optimizer of its own"
                    )
            options["param_names"] = [groups.names[parameter] for parameter in trained]
            self._option_group.update(dict.fromkeys(options["param_names"], index))

    def members(self) -> dict[str, object]:
        """What all ranks must have the same, by description: the index of each parameter's group, and their number."""
        found: dict[str, object] = {"the number of parameter groups": len(self.optimizer.param_groups)}
        return found | {f"the parameter group of {name}": self._option_group.get(name) for name in self.steps}

    def options(self, *, is_checked: bool = True) -> dict[str, object]:
        """The options that an update would use now, by description; if ranks had different ones, weights would differ.

        Args:
            is_checked: False takes them as they are: what a store keeps may make no sense, such as the rate below 0
                that a schedule left after its last step.

        Raises:
            ConfigError: an option was set to a value that makes no sense.
        """
        groups = self.optimizer.param_groups
        for index, group in enumerate(groups if is_checked else ()):
            refuse_unsupported(group, f"(in parameter_groups[{index}])")
        return {
            f"{name} of parameter_groups[{index}]": value
            for index, group in enumerate(groups)
            for name, value in (_hyper_parameters(group) if is_checked else _as_they_are(group)).items()
        }

    def updates(self, group: int, touched: Container[str], gradient_scale: float) -> tuple[ParameterUpdate, ...]:
        """The updates of the touched parameters of a group; the learning rate and other options are read now.

        Neighbours of one parameter group with the same step count share one update.
        """
        if group not in self._kept:
            self._kept[group] = list(_kept_parts(self._groups[group].spec, self._option_group))
        made: dict[tuple[int, int], AdamCoefficients] = {}
        found: list[ParameterUpdate] = []
        for part in self._kept[group]:
            if part.name not in touched:
                continue
            which = part.options, self.steps[part.name] + 1
            if which not in made:
                made[which] = coefficients_of(self.optimizer.param_groups[part.options], which[1], gradient_scale)
            coefficients = made[which]
            start = part.start
            if found and found[-1].stop == start and found[-1].coefficients is coefficients:
                start = found.pop().start
            found.append(ParameterUpdate(start, part.stop, coefficients))
        return tuple(found)

    def count(self, touched: Iterable[str]) -> None:
        """Count one more step of these parameters."""
        for name in touched:
            self.steps[name] += 1


@dataclass(frozen=True, slots=True)
class _KeptPart:
    """The part of a parameter that this rank keeps: elements `[start, stop)` of its part of the group.

    Attributes:
        options: the index of the optimizer's parameter group.
    """

    name: str
    start: int
    stop: int
    options: int


def _kept_parts(spec: GroupSpec, option_group: Mapping[str, int]) -> Iterator[_KeptPart]:
    for parameter in spec.parameters:
        start, stop = spec.kept_part(parameter.start, parameter.stop)
        if parameter.name in option_group and start < stop:
            yield _KeptPart(parameter.name, start, stop, option_group[parameter.name])


def clip_coefficient(square_sum: float, scale: float, max_norm: float | None) -> tuple[float, float]:
    """The gradient norm without the loss scale, and the factor that brings it to at most `max_norm`.

    Source: `torch.nn.utils.clip_grad_norm_`, which adds 1e-6 to the norm. As there, an infinite norm makes all finite
    gradients zero, and one that is NaN makes all gradients NaN.
    """
    norm = math.sqrt(square_sum) / scale if square_sum >= 0 else math.nan
    if max_norm is None:
        return norm, 1.0
    return norm, min(max_norm / (norm + 1e-6), 1.0)  # in this order NaN stays NaN
