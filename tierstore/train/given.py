"""What each run of a store is given anew: hyper-parameters, a schedule of the learning rate, registered objects.

Scope: their states in a generation, and on resume; what a resumed run goes on without, or does not use, told once.
Not here: when a generation is captured (`generations.py`), how a schedule is made (`assembly.py`).
Owner: the training side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tierstore.caller import warn_caller
from tierstore.errors import ConfigError, UnusedOptionWarning, first_line
from tierstore.pack.layout import listed, some_of
from tierstore.train import capture
from tierstore.train.optimizer import TieredOptimizer, ended_schedule

_NOT_OF_SCHEDULES = ("weight_decay", "eps", "decoupled")
"""Hyper-parameters that none of torch's schedules sets."""


class Given:
    """What this run was given.

    Args:
        scheduler: the engine's; None if it has none.
        registered: objects, by name.
    """

    def __init__(
        self, optimizer: TieredOptimizer, scheduler: Any, registered: Mapping[str, capture.Stateful]
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._registered = dict(registered)
        self._made_with: Sequence[Mapping[str, Any]] | None = optimizer.given
        """The hyper-parameters of the run that has made the store; None: the store does not tell."""
        self._schedule_kind = None if scheduler is None else type(scheduler).__name__
        # Of the run that is resumed:
        self._options: Sequence[Mapping[str, Any]] = ()
        self._unregistered: dict[str, Any] = {}
        """States of objects that are not registered in this run, or not yet."""
        self._left_schedule: Any = None  # the state of its schedule, if this run has none
        self._ended_schedule: str | None = None  # the class of its schedule, if this run has one of another class
        self._to_tell: list[tuple[str, type[Warning]]] | None = None

    def captured(self) -> dict[str, Any]:
        """What a generation holds of these; what only earlier runs were given, or not yet this one, stays as it was."""
        return {
            "optimizer": [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups],
            "made_with": self._made_with,
            "scheduler": self._left_schedule if self._scheduler is None else self._scheduler.state_dict(),
            "scheduler_kind": self._schedule_kind,
            "registered": self._unregistered | {name: one.state_dict() for name, one in self._registered.items()},
        }

    def restore(self, captured: Mapping[str, Any], registered: Mapping[str, Any]) -> None:
        """Go on from a generation.

        Args:
            registered: the states of the objects that this rank had registered.

        Raises:
            ConfigError: the schedule does not take the state of the resumed run's schedule.
        """
        self._options = captured["optimizer"]
        self._made_with = captured.get("made_with")
        self._restore_schedule(captured)
        self._unregistered = dict(registered)
        for name, value in self._registered.items():
            self._restore_registered(name, value)

    def _restore_schedule(self, captured: Mapping[str, Any]) -> None:
        state = captured["scheduler"]
        self._ended_schedule = ended_schedule(captured, self._scheduler)
        if self._scheduler is None:
            self._left_schedule, self._schedule_kind = state, captured.get("scheduler_kind")
        elif state is not None and self._ended_schedule is None:
            try:
                self._scheduler.load_state_dict(capture.with_tensors(state))
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ConfigError(
                    f"the {self._schedule_kind} does not take the state of the schedule that the run had "
                    f"({type(error).__name__}: {first_line(error)}); give the lr_scheduler of then"
                ) from error
            self._optimizer.restore(self._options)  # making the schedule has set the rates of its first step

    def register(self, name: str, value: capture.Stateful) -> None:
        """Make another object part of every generation; it gets its state now.

        Raises:
            ConfigError: another object has that name.
        """
        if self._registered.get(name, value) is not value:
            raise ConfigError(f"another object is registered as {name!r}, and would be kept no more; use another name")
        self._restore_registered(name, value)
        self._registered[name] = value

    def awaits(self, name: str) -> bool:
        """Whether an object of this name was registered in the run that is resumed, and is not yet in this one."""
        return name in self._unregistered

    def _restore_registered(self, name: str, value: capture.Stateful) -> None:
        if name in self._unregistered:
            value.load_state_dict(capture.with_tensors(self._unregistered[name]))
            del self._unregistered[name]  # only now: after an object that refused it the right one may come
            if self._scheduler is None and _schedules(value, self._optimizer):
                # As in `_restore_schedule`; other options may have been set since.
                self._optimizer.restore(self._options, but=_NOT_OF_SCHEDULES)

    def tell_what_ends(self) -> None:
        """Warn, once, before the state of an ended schedule is given up."""
        ended, self._ended_schedule = self._ended_schedule, None
        if ended is not None:
            warn_caller(
                f"the {ended} that has set the learning rates of this run is replaced by the {self._schedule_kind}, "
                "which begins as in a new run, from the rates that the store keeps; to keep the former, make the "
                "engine with it before another step"
            )

    def tell_what_is_left(self) -> None:
        """Warn, once, before the first step after a resume: of what the run goes on without, and what is not used."""
        if self._to_tell is None:
            self._to_tell = [*self._what_is_left()]
        while self._to_tell:
            warn_caller(*self._to_tell.pop(0))

    def _what_is_left(self) -> Iterator[tuple[str, type[Warning]]]:
        if unused := self._optimizer.unused(self._made_with or ()):
            yield (
                f"the hyper-parameters of this run are those that its store keeps; not used: {some_of(unused)}. What "
                "is to change is set in engine.optimizer.param_groups"
                + ("" if self._scheduler is None else "; learning rates are set by the schedule"),
                UnusedOptionWarning,
            )
        left = [f"what was registered as {listed(list(self._unregistered))}"] if self._unregistered else []
        left += ["the learning-rate schedule (give lr_scheduler)"] if self._left_schedule is not None else []
        if left:
            yield (
                f"this run goes on without {' and '.join(left)} of the run that it has resumed: that stays as it was",
                UserWarning,
            )


def _schedules(value: object, optimizer: TieredOptimizer) -> bool:
    """Whether an object is a scheduler of this optimizer, or has one as an attribute, or in a list or mapping there."""
    held = (value, *getattr(value, "__dict__", {}).values())
    return any(
        getattr(one, "__dict__", {}).get("optimizer") is optimizer and hasattr(one, "step")
        for some in held
        for one in (some, *_members(some))
    )


def _members(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
